"""Can MPICH start here?  Looked at before MPI starts.

MPICH aborts where it cannot speak the PMI of its launcher.  It ends in a Bus error where /dev/shm is too small.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from shutil import disk_usage

from mpistrategy.cli.doctor.findings import BAD, Facts, Finding
from mpistrategy.mpi.job import launcher
from mpistrategy.mpi.tuning.thresholds import library_name
from mpistrategy.objects.shown import size_in_words

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
    room = disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    needed = _ranks_here(environment) * _BYTES_A_RANK
    is_small = room is not None and room.total < needed
    version = _version_text() if offers_pmix or is_small else ""
    if not version.startswith("MPICH "):
        return None
    library = library_name(version)
    if room is not None and is_small:
        problem = (
            f"/dev/shm has {size_in_words(room.total)}, and {library} wants {size_in_words(needed)} for the ranks of "
        )
        fix = "Give a container more: docker run --shm-size=1g, or --ipc=host"
        return Finding("shared memory", BAD, f"{problem}a node: it ends in a Bus error", fix)
    if "pmix" in version.lower():  # the text says how the library was configured
        return None
    problem = f"{facts['launcher'] or 'the environment (PMIX_NAMESPACE)'} offers PMIx, which {library} does not speak: "
    fix = "Take away what an outer launcher has set: env -u PMIX_NAMESPACE ..."
    if facts["launcher"] and "PMI_SIZE" not in environment:
        fix = launcher.cure(facts["launcher"], library)
    return Finding("launch", BAD, f"{problem}it aborts (unsupported PMI version PMIx)", fix)


def _ranks_here(environment: Mapping[str, str]) -> int:
    """Return how many ranks the launcher has started on this node; 1 where it does not say."""
    text = environment.get("MPI_LOCALNRANKS") or environment.get("SLURM_STEP_TASKS_PER_NODE") or "1"
    number = re.match(r"\d+", text, re.ASCII)  # Slurm: 4(x2),1
    return int(number[0]) if number else 1


def _version_text() -> str:
    """Return what the MPI library says of itself, in a process of its own that does not start it; "" if unknown."""
    command = [sys.executable, "-m", "mpi4py", "--mpi-lib-version"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False).stdout
    return ""
