"""Can MPICH start here?  Looked at before MPI starts: MPICH aborts where it cannot, or ends in a Bus error."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mpistrategy.cli.doctor.checks.finding import BAD, Finding, mebibytes
from mpistrategy.cli.doctor.facts.facts import Facts
from mpistrategy.mpi.job import launcher
from mpistrategy.mpi.shared_memory.memory_limits import file_system

#: What each rank of a node takes in /dev/shm.  Measured with MPICH 5.0.2: 64 cells of 16 KiB, their heads, and a page.
_BYTES_PER_RANK = 2**20 + 2**14
#: With this variable a user says which PMI it is.
_CHOSEN = "MPIR_CVAR_PMI_VERSION"
_SECONDS = 30.0


def refusal(facts: Facts, environment: Mapping[str, str]) -> Finding | None:
    """Return why MPICH would not start; None where nothing is known against it, or it is another MPI.

    Args:
        facts: what is known of this process without MPI.
        environment: its variables.
    """
    offers_pmix = "PMIX_NAMESPACE" in environment and _CHOSEN not in environment
    ranks = _on_this_node(environment)
    shm = file_system("/dev/shm")
    lacks_room = shm is not None and shm.free < ranks * _BYTES_PER_RANK and not _has_begun()
    if not (offers_pmix or lacks_room):
        return None
    library, spoken = _library()
    if not library.startswith("MPICH "):
        return None
    if offers_pmix and not spoken:
        return Finding(
            "pmi",
            BAD,
            f"{facts.launcher or 'the environment (PMIX_NAMESPACE)'} offers PMIx, which {library} does not speak: it "
            "aborts (unsupported PMI version PMIx)",
            launcher.cure(facts.launcher, library)
            if facts.launcher and "PMI_SIZE" not in environment
            else "Take away what an outer launcher has set: env -u PMIX_NAMESPACE ...",
        )
    if shm is None or not lacks_room:
        return None
    return Finding(
        "shared memory",
        BAD,
        f"{mebibytes(shm.free)} are free in /dev/shm, and {library} wants {mebibytes(ranks * _BYTES_PER_RANK)} for "
        f"{ranks} rank{'s' * (ranks > 1)} of a node: it ends in a Bus error",
        "Give a container more: docker run --shm-size=1g, or --ipc=host; or remove what killed jobs have left there. "
        "Until then, with shorter queues: export MPIR_CVAR_CH4_SHM_POSIX_IQUEUE_NUM_CELLS=8",
    )


def _has_begun() -> bool:
    """Return whether MPICH has just made its queues here: those of this job, by a rank that was quicker."""
    with suppress(OSError):  # one that goes meanwhile is of this job, too, or of a killed one
        return any(time.time() - each.stat().st_mtime < _SECONDS for each in Path("/dev/shm").glob("mpich_shm_*"))
    return True


def _on_this_node(environment: Mapping[str, str]) -> int:
    """Return how many ranks the launcher has started on this node; 1 where it does not say."""
    told = environment.get("MPI_LOCALNRANKS") or environment.get("SLURM_STEP_TASKS_PER_NODE") or "1"
    number = re.match(r"\d+", told, re.ASCII)  # Slurm: 4(x2),1
    return int(number[0]) if number else 1


def _library() -> tuple[str, str]:
    """Return the MPI library and what `mpi_child` says that it speaks; empty where that cannot be known."""
    command = [sys.executable, "-m", "mpistrategy.cli.doctor.facts.mpi_child"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False, errors="replace")
    except (OSError, subprocess.SubprocessError):
        return "", ""
    library, spoken, *_ = [*done.stdout.split("\n"), "", ""]
    return library, spoken
