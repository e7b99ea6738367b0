"""Can MPICH start here?  Looked at before MPI starts.

MPICH aborts where it cannot speak the PMI of its launcher.  It ends in a Bus error where /dev/shm has too little room.

As a program it prints which MPI library mpi4py loads, and ``PMIx`` where that speaks it, without starting MPI: in a
process of its own, since MPI starts where mpi4py.MPI is imported.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from mpistrategy.cli.doctor.findings import BAD, Facts, Finding, mebibytes
from mpistrategy.mpi.gpu import loaded_mpi
from mpistrategy.mpi.job import launcher
from mpistrategy.mpi.shared_memory.memory_limits import file_system
from mpistrategy.mpi.tuning.thresholds import library_name

_SECONDS = 30.0
#: What each rank of a node takes in /dev/shm.  Measured with MPICH 5.0.2: 64 cells of 16 KiB, their heads, and a page.
_BYTES_A_RANK = 2**20 + 2**14


def refusal(facts: Facts, environment: Mapping[str, str]) -> Finding | None:
    """Return why MPICH would not start; None where nothing is known against it, or it is another MPI.

    Args:
        facts: of this process, without MPI.
        environment: its variables.
    """
    # The second variable names the kind of PMI.
    offers_pmix = "PMIX_NAMESPACE" in environment and "MPIR_CVAR_PMI_VERSION" not in environment
    room, needed = file_system("/dev/shm"), _ranks_here(environment) * _BYTES_A_RANK
    lacks_room = room is not None and room.free < needed and not _has_begun()
    if not (offers_pmix or lacks_room):
        return None
    library, spoken = _library()
    if not library.startswith("MPICH "):
        return None
    if room is not None and lacks_room:
        problem = (
            f"{mebibytes(room.free)} are free in /dev/shm, and {library} wants {mebibytes(needed)} for the ranks of "
        )
        fix = "Give a container more: docker run --shm-size=1g, or --ipc=host; or remove what killed jobs have left."
        return Finding("shared memory", BAD, f"{problem}a node: it ends in a Bus error", fix)
    if spoken:
        return None
    problem = f"{facts['launcher'] or 'the environment (PMIX_NAMESPACE)'} offers PMIx, which {library} does not speak: "
    fix = "Take away what an outer launcher has set: env -u PMIX_NAMESPACE ..."
    if facts["launcher"] and "PMI_SIZE" not in environment:
        fix = launcher.cure(facts["launcher"], library)
    return Finding("pmi", BAD, f"{problem}it aborts (unsupported PMI version PMIx)", fix)


def _ranks_here(environment: Mapping[str, str]) -> int:
    """Return how many ranks the launcher has started on this node; 1 where it does not say."""
    text = environment.get("MPI_LOCALNRANKS") or environment.get("SLURM_STEP_TASKS_PER_NODE") or "1"
    number = re.match(r"\d+", text, re.ASCII)  # Slurm: 4(x2),1
    return int(number[0]) if number else 1


def _has_begun() -> bool:
    """Return whether a rank that was quicker may have made MPICH's queues here a moment ago."""
    try:
        return any(time.time() - segment.stat().st_mtime < _SECONDS for segment in Path("/dev/shm").glob("mpich_shm_*"))
    except OSError:  # a segment goes meanwhile
        return True


def _library() -> tuple[str, str]:
    """Return the MPI library and its kind of PMI, as this program prints them; empty if unknown."""
    command = [sys.executable, "-m", __name__]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False, errors="replace"
        )
    except (OSError, subprocess.SubprocessError):
        return "", ""
    library, spoken, *_ = [*process.stdout.split("\n"), "", ""]
    return library, spoken


def main() -> None:
    """Print the name and the version of the library, and its kind of PMI."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    files = loaded_mpi.mapped_files()
    speaks = any("/libpmix.so" in path for path in files) or any(
        hasattr(ctypes.CDLL(path), "PMIx_Init") for path in files if loaded_mpi.is_mpi(path)
    )
    print(library_name(MPI.Get_library_version()), "PMIx" if speaks else "", sep="\n")


if __name__ == "__main__":
    main()
