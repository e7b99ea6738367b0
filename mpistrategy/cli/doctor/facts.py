"""Gathers facts of this process: plain values, which become one JSON object for rank 0.

Nothing here raises, waits for another rank, or shows variables at large.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING

from mpistrategy.cli.doctor import network
from mpistrategy.cli.doctor.findings import Facts, mebibytes, parts_of
from mpistrategy.errors import LaunchError
from mpistrategy.mpi.gpu import loaded_mpi
from mpistrategy.mpi.job import introductions, launcher
from mpistrategy.mpi.shared_memory.memory_limits import file_system, memory
from mpistrategy.mpi.shared_memory.spin_wait import cores
from mpistrategy.mpi.tuning.thresholds import library_name
from mpistrategy.mpi.watchdog.local_process import stat_of

if TYPE_CHECKING:
    from mpistrategy.cli.doctor.ranks import Ranks

#: Every key, with the value for "unknown": a rank may run another version of this package, which has fewer keys.
UNKNOWN: Facts = {
    # Its number, and how many MPI counts; its node; by MPI the node's first rank.
    "rank": 0, "size": 1, "host": "", "leader": 0,
    # Versions, of the MPI library with its name; the MPI that mpi4py was built for; the files of MPI libraries that
    # the process has loaded; the library that MPI4PY_LIBMPI names, without links; what MPI was started with.
    "python": "", "mpistrategy": "", "numpy": "", "mpi4py": "", "library": "", "built_for": "", "libraries": (),
    "wanted": "", "thread_level": "multiple",
    # The launcher, how many processes it started (0: unknown), this process's number, and the variables that say so;
    # what the launcher offers for the ranks to meet; why the library would not start here, and the cure.
    "launcher": "", "tasks": 0, "place": 0, "said": "", "pmi": (), "refusal": (),
    # The cores that it may use, and how many the node has; the threads of linear algebra, and how they are known.
    "cores": (), "machine_cores": 1, "threads": 0, "threads_source": "",
    # How many bytes the ranks of the node may still share, and what limits them; free in /dev/shm, -1 if unknown.
    "room_free": 0, "room_of": "", "shm_free": -1,
    # From the start of the process until this command ran (the imports), and for MPI; the folder of this package.
    "start_seconds": 0.0, "mpi_seconds": 0.0, "home": "",
    # What it sees of GPUs (`device_selection.Sight.text`); device files of GPUs; whether there are AMD's;
    # how many Slurm promises on the node; CUDA_VISIBLE_DEVICES; why no GPU memory is given to MPI.
    "sight": "", "gpu_devices": 0, "amd": False, "gpus_promised": 0, "visible": None, "cuda_refused": "",
    # `mpistrategy.cli.doctor.network`
    "network": "", "fabric": "",
    # What killed jobs have left on the node, in words; "" for nothing.
    "leftovers": "",
}  # fmt: skip
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
_VISIBLE = re.compile(r"(?:NoDevFiles|-?\d+|(?:GPU|MIG)-[\w/-]+)?(?:,(?:-?\d+|(?:GPU|MIG)-[\w/-]+))*")
_PATH = re.compile(r"[\w./+-]{1,400}")


def seconds_since_start() -> float:
    """Return how long ago this process began; 0.0 if unknown."""
    with suppress(OSError, ValueError, IndexError, AttributeError):
        ticks = int(stat_of(os.getpid())[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    return 0.0


def of_this_process(environment: Mapping[str, str], start_seconds: float) -> Facts:
    """Return the facts that are known without MPI.

    Args:
        environment: the variables of the process.
        start_seconds: what `seconds_since_start` said when the command began.
    """
    import numpy

    from mpistrategy.cli.doctor import leftovers

    facts = dict(UNKNOWN)
    claim, room = launcher.claim_in(environment), memory()
    if claim is not None:
        variables = ", ".join(f"{name}={environment[name]}" for name in claim.variables)
        facts |= {"launcher": claim.launcher, "tasks": claim.tasks, "place": claim.rank, "said": variables}
    if room is not None:
        facts |= {"room_free": room.free, "room_of": f"{room.of}, {mebibytes(room.total)}"}
    own_cores, visible = sorted(cores()), environment.get("CUDA_VISIBLE_DEVICES")
    threads, source = blas_threads(environment, len(own_cores))
    return facts | {
        "host": os.uname().nodename,
        "python": ".".join(map(str, sys.version_info[:3])),
        "mpistrategy": introductions.version(),
        "numpy": numpy.__version__,
        "pmi": offered(environment),
        "cores": own_cores,
        "machine_cores": os.cpu_count() or 1,
        "threads": threads,
        "threads_source": source,
        "start_seconds": round(start_seconds, 3),
        "home": str(Path(__file__).parents[3]),
        "gpu_devices": len(glob("/dev/nvidia[0-9]*")),
        "amd": os.path.exists("/dev/kfd"),
        "fabric": network.fabric(),
        "gpus_promised": _number(environment, "SLURM_GPUS_ON_NODE"),
        "visible": visible if visible is None or _VISIBLE.fullmatch(visible) else "(something else)",
        "wanted": _library_wanted(environment.get("MPI4PY_LIBMPI", "")),
        "leftovers": leftovers.in_words(),
    }


def of_mpi(ranks: Ranks, seconds: float) -> Facts:
    """Return the facts that are known once MPI has started.

    Args:
        ranks: all of them.
        seconds: how long MPI took to start.
    """
    from mpistrategy.cli.doctor import cuda_trial
    from mpistrategy.mpi.gpu.device_selection import look

    library, files, shm = library_name(ranks.version), loaded_mpi.mapped_files(), file_system("/dev/shm")
    refusal: tuple[str, ...] = ()
    try:
        launcher.check_world(ranks.size, library, "mpistrategy doctor")
    except LaunchError as error:
        refusal = parts_of(error)
    libraries, sight = [path for path in files if loaded_mpi.is_mpi(path)], look()
    return ranks.facts() | {
        "library": library,
        "libraries": libraries,
        "mpi_seconds": round(seconds, 3),
        "refusal": refusal,
        "network": network.network(),
        "shm_free": shm.free if shm is not None else -1,
        "sight": sight.text(),
        "cuda_refused": cuda_trial.obstacle() if sight.gpus else "",
    }


def blas_threads(environment: Mapping[str, str], cores: int) -> tuple[int, str]:
    """Return how many threads NumPy's linear algebra takes, and how that is known.

    threadpoolctl asks the libraries, where it is installed (it comes with scikit-learn); else the variables say.

    Args:
        environment: the variables of the process.
        cores: how many it may use; the default number of threads.
    """
    threads, source = cores, f"no {_THREADS[0]} is set"
    for name in reversed(_THREADS):  # the first variable that is set
        if environment.get(name, "").isdigit():
            threads, source = int(environment[name]), f"{name}={environment[name]}"
    with suppress(ImportError):
        from threadpoolctl import threadpool_info

        pool_threads = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
        threads = max(pool_threads, default=threads)
    return threads, source


def offered(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the kinds of PMI that a launcher offers."""
    kinds = []
    if "PMIX_NAMESPACE" in environment and "PMIX_RANK" in environment:
        kinds.append("PMIx")
    if "PMI_RANK" in environment and not {"PMI_FD", "PMI_PORT", "PMI_CONTROL_PORT", "PMI_SIZE"}.isdisjoint(environment):
        kinds.append("PMI")
    return tuple(kinds)


def _library_wanted(path: str) -> str:
    if not _PATH.fullmatch(path):
        return ""
    return os.path.realpath(path) if "/" in path else path


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdigit() else 0
