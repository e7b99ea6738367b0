"""Outcomes of giving GPU memory to an MPI library, kept from one job to the next.

`mpistrategy doctor` tries it in a job of its own, where a crash is an answer, and writes it down beside the measured
thresholds; strategies read it.  An outcome counts for the library that it was found with, for the settings that decide
how the library moves memory, and for one node or several.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from mpistrategy import own_files
from mpistrategy.mpi.gpu.cuda_aware import NO, UNVERIFIED, YES, Answer
from mpistrategy.mpi.tuning.files import MOST_BYTES, kept_file, library_name, replace_whole
from mpistrategy.objects.text import encoded

#: Whether the two ranks were on one node.
Place: TypeAlias = Literal["one node", "several nodes"]

_FORMAT = 2
_VERDICTS = {"right": YES, "wrong": NO, "died": NO}
#: Variables that decide how MPI libraries and the layers below them move memory.
_SETTINGS = ("UCX_", "OMPI_MCA_", "MPICH_", "FI_")
#: Those among them by which a launcher tells a rank who it is.
TOLD_BY_LAUNCHERS = (
    *("OMPI_MCA_ess", "OMPI_MCA_orte_", "OMPI_MCA_pmix", "OMPI_MCA_initial_wdir", "OMPI_MCA_mpi_oversubscribe"),
    *("OMPI_MCA_shmem_RUNTIME_", "OMPI_MCA_rmaps_", "OMPI_MCA_plm", "OMPI_MCA_ras", "OMPI_MCA_hwloc_base_binding"),
)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a trial.

    Attributes:
        outcome: "right", "wrong" (the numbers), or "died".
        reason: in words.
        direct: how many bytes a second are summed by MPI in GPU memory; 0 if unknown.
        staged: the same through the host.
        nccl: the same by NCCL.
        network: what NCCL took between the ranks; "" if unknown.
    """

    outcome: str
    reason: str
    direct: float = 0.0
    staged: float = 0.0
    nccl: float = 0.0
    network: str = ""

    @property
    def is_slower(self) -> bool:
        """Whether MPI takes longer in GPU memory than through the host."""
        return 0 < self.direct < self.staged


def settings(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that an outcome depends on, in order; of this process by default."""
    given = os.environ if environment is None else environment
    return {
        name: given[name]
        for name in sorted(given)
        if name.startswith(_SETTINGS) and not name.startswith(TOLD_BY_LAUNCHERS)
    }


def file_of(version: str, place: Place) -> Path:
    """Return the file with the outcome for a library, which is known by its version text, and these settings."""
    known = "\0".join([version, place, *(f"{name}={value}" for name, value in settings().items())])
    return kept_file(library_name(version), f"{zlib.crc32(encoded(known)):08x}-gpu")


def save(version: str, place: Place, found: Outcome) -> Path:
    """Write the outcome for a library under this process's settings; return the file.

    Raises:
        OSError: when it cannot be written.
    """
    file = file_of(version, place)
    content = {"format": _FORMAT, "library": version, "place": place, "settings": settings(), **asdict(found)}
    replace_whole(file, json.dumps(content) + "\n")
    return file


def load(version: str, place: Place) -> Outcome | None:
    """Return the outcome for a library and these settings; None without one, or where the file is not understood."""
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(own_files.read(str(file_of(version, place)), MOST_BYTES).decode())
        known = {"format": _FORMAT, "library": version, "place": place, "settings": settings()}
        if isinstance(content, dict) and all(content.get(name) == value for name, value in known.items()):
            outcome, reason = content.get("outcome"), content.get("reason")
            speeds = [content.get(name) for name in ("direct", "staged", "nccl")]
            if isinstance(outcome, str) and outcome in _VERDICTS and isinstance(reason, str):
                direct, staged, nccl = (float(each) if isinstance(each, (int, float)) else 0.0 for each in speeds)
                return Outcome(outcome, reason, direct, staged, nccl, str(content.get("network", "")))
    return None


def network_of_nccl(version: str) -> str:
    """Return which network NCCL took between two nodes, and how fast it was, in words; "" where nobody looked."""
    found = load(version, "several nodes")
    if found is None or not found.network:
        return ""
    return f"over {found.network}, {found.nccl / 1e9:.1f} GB/s between two nodes by mpistrategy doctor"


def verified(answer: Answer, version: str, word: bool | None, nodes: int = 1) -> Answer:
    """Return the answer after the trials: a yes without a trial does not count, nor one that is slower than the host.

    Args:
        answer: `mpistrategy.mpi.gpu.cuda_aware.decide`'s.
        version: what the library says about itself.
        word: the user's, who has the last one.
        nodes: how many nodes the ranks are on; what is right within a node may be wrong between nodes.
    """
    if word is not None or answer.verdict == NO:
        return answer
    place: Place = "one node" if nodes == 1 else "several nodes"
    near = load(version, "one node")
    if nodes > 1 and near is not None and near.outcome != "right":  # small arrays go by MPI within nodes, too
        return Answer(NO, f"{answer.reason}; tried on one node: {near.reason}")
    tried = load(version, place)
    if tried is None:
        where = "" if nodes == 1 else " on several nodes"
        how = f"run mpistrategy doctor once{where}, as you start your program"
        return Answer(UNVERIFIED, f"{answer.reason}; not tried here yet with these settings{where}: {how}")
    if tried.outcome == "right" and tried.is_slower:
        return Answer(NO, f"{answer.reason}; slower than the host: {tried.reason}")
    return Answer(_VERDICTS[tried.outcome], f"{answer.reason}; tried: {tried.reason}")
