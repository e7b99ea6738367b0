"""Which MPI this is, and whether it takes pointers to GPU memory: the user's word, else what the doctor has found.

A wrong yes is a segmentation fault, a wrong no costs a copy, and a library's own word is no evidence.  So the
doctor gives GPU memory to MPI in a job of its own, where a crash is an answer, and keeps the outcome beside the
measured thresholds.  It counts for the library that it was found with, for the settings that decide how the library
moves memory, and for one node or several.

mpi4py's wheel opens the library at run time, out of sight of ``ctypes.CDLL(None)``; the files that the process has
mapped tell which it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from mpistrategy import own_files
from mpistrategy.errors import OptionError
from mpistrategy.mpi.tuning.thresholds import MOST_BYTES, kept_file, library_name, replace_whole
from mpistrategy.objects.text import encoded
from mpistrategy.options import NO_WORDS, YES_OR_NO, YES_WORDS, is_on

#: The user's decision: 1 or 0.
VARIABLE = "MPISTRATEGY_CUDA_AWARE"
#: Where the ranks of a trial were.
Place: TypeAlias = Literal["one node", "several nodes"]

#: Variables that decide how MPI libraries and the layers below them move memory.
_SETTINGS = ("UCX_", "OMPI_MCA_", "MPICH_", "FI_", "MV2_USE_CUDA", "MVP_USE_CUDA", "I_MPI_OFFLOAD", "PSP_CUDA")
#: The variables among them in which a launcher describes the rank.
LAUNCHER_VARIABLES = (
    *("OMPI_MCA_ess", "OMPI_MCA_orte_", "OMPI_MCA_pmix", "OMPI_MCA_initial_wdir", "OMPI_MCA_mpi_oversubscribe"),
    *("OMPI_MCA_shmem_RUNTIME_", "OMPI_MCA_rmaps_", "OMPI_MCA_plm", "OMPI_MCA_ras", "OMPI_MCA_hwloc_base_binding"),
)

_MPI = re.compile(r"libmpi(ch)?(_(?!cxx|gtl|mpifh|usempi)\w+)?\.so")


def mapped_files() -> list[str]:
    """Return the paths of the shared libraries in this process; empty where the system does not tell."""
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = [line.split(maxsplit=5)[5].rstrip("\n") for line in maps if "/" in line]
        return list(dict.fromkeys(path for path in paths if ".so" in os.path.basename(path)))
    return []


def is_mpi(path: str) -> bool:
    """Return whether this is the library of an MPI."""
    return _MPI.match(os.path.basename(path)) is not None


def identity() -> tuple[str, ...]:
    """Return what tells this library from others: its version text, and its files.  MPI must have started.

    Two builds of one version, with CUDA and without, may have the same text.
    """
    from mpi4py import MPI  # here: it starts MPI, which the doctor asks first

    files = [path for path in mapped_files() if is_mpi(path) or "libmpi_gtl" in path]  # Cray's part for GPUs
    return (MPI.Get_library_version(), *sorted(files))


@dataclass(frozen=True)
class Outcome:
    """The outcome of a trial.

    Attributes:
        outcome: "right", "slower" (right, and slower than through the host), "wrong" (the numbers), or "unverified".
        reason: in words.
    """

    outcome: str
    reason: str


def user_setting() -> bool | None:
    """Return the user's word, by the variable MPISTRATEGY_CUDA_AWARE; None where it is not set.

    Raises:
        OptionError: where it says neither yes nor no.
    """
    text = os.environ.get(VARIABLE, "")
    if text.lower() not in ("", *NO_WORDS, *YES_WORDS):
        raise OptionError.at(VARIABLE, found=repr(text), expected=YES_OR_NO)
    return is_on(text) if text else None


def obstacle(nodes: int) -> str:
    """Return why GPU memory is not given to this MPI, for ranks on so many nodes; "" where it is.

    Raises:
        OptionError: as `user_setting`.
    """
    word, name = user_setting(), library_name(identity()[0])
    if word is not None:
        return "" if word else f"the user says so: {VARIABLE}"
    on_one_node = load("one node")
    on_these_nodes = on_one_node if nodes == 1 else load("several nodes")
    for outcome in (on_one_node, on_these_nodes):  # small arrays go by MPI within nodes, too
        if outcome is not None and outcome.outcome == "wrong":
            return f"{name}, tried: {outcome.reason}"
    if on_these_nodes is None:
        return f"{name} was not tried with these settings yet{' on several nodes' if nodes > 1 else ''}"
    is_slower = on_these_nodes.outcome == "slower"
    return f"{name} is slower than the host: {on_these_nodes.reason}" if is_slower else ""


def settings() -> dict[str, str]:
    """Return the variables of this process that an outcome depends on, in order."""
    return {
        name: os.environ[name]
        for name in sorted(os.environ)
        if name.startswith(_SETTINGS) and not name.startswith(LAUNCHER_VARIABLES)
    }


def _file_for(place: Place) -> Path:
    """Return the file with the outcome for this library and these settings."""
    library = identity()
    key = "\0".join([*library, place, *(f"{name}={value}" for name, value in settings().items())])
    return kept_file(library_name(library[0]), f"{hashlib.sha256(encoded(key)).hexdigest()[:16]}-gpu")


def save(place: Place, outcome: Outcome) -> Path:
    """Write the outcome for this library under this process's settings; return the file.

    Raises:
        OSError: when it cannot be written.
    """
    file = _file_for(place)
    replace_whole(file, json.dumps(asdict(outcome)) + "\n")
    return file


def load(place: Place) -> Outcome | None:
    """Return the outcome for this library and these settings; None without one, or where the file is not understood."""
    with suppress(OSError, ValueError, RecursionError, TypeError, AttributeError, KeyError):
        content = json.loads(own_files.read(str(_file_for(place)), MOST_BYTES).decode())
        if content["outcome"] in ("right", "slower", "wrong"):
            return Outcome(content["outcome"], str(content["reason"]))
    return None
