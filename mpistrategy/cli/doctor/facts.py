"""Gathers facts of this process: plain values, which become one JSON object for rank 0.

Nothing here raises, waits for another rank, or shows variables at large.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from glob import glob
from pathlib import Path
from shutil import disk_usage

import numpy as np

from mpistrategy.cli.doctor import cuda_trial, leftovers
from mpistrategy.cli.doctor.findings import Facts, parts_of
from mpistrategy.cli.ranks import Ranks
from mpistrategy.errors import LaunchError
from mpistrategy.mpi.gpu import cuda_aware
from mpistrategy.mpi.gpu.device_selection import Sight, look
from mpistrategy.mpi.job import launcher
from mpistrategy.mpi.shared_memory.memory_limits import memory
from mpistrategy.mpi.tuning.thresholds import library_name
from mpistrategy.objects.shown import size_in_words

#: Every key, with the value for "unknown": a rank may run another version of this package, which has fewer keys.
UNKNOWN: Facts = {
    # Its number, and how many MPI counts; its node; by MPI the node's first rank.
    "rank": 0, "size": 1, "host": "", "leader": 0,
    # Versions, of the MPI library with its name; the files of MPI libraries that the process has loaded; what MPI was
    # started with.
    "python": "", "mpistrategy": "", "numpy": "", "mpi4py": "", "library": "", "libraries": (),
    "thread_level": "multiple",
    # The launcher, how many processes it started (0: unknown), this process's number, and the variables that say so;
    # what the launcher offers for the ranks to meet; why the library would not start here, and the cure.
    "launcher": "", "tasks": 0, "place": 0, "said": "", "pmi": (), "refusal": (),
    # The cores that it may use, and how many the node has; the threads of linear algebra, and how they are known.
    "cores": (), "machine_cores": 1, "threads": 0, "threads_source": "",
    # How many bytes the ranks of the node may still share, and what limits them; free in /dev/shm, -1 if unknown.
    "room_free": 0, "room_of": "", "shm_free": -1,
    # What it sees of GPUs (`device_selection.Sight.text`); device files of GPUs; whether there are AMD's;
    # how many Slurm promises on the node; CUDA_VISIBLE_DEVICES; why no GPU memory is given to MPI.
    "sight": Sight().text(), "gpu_devices": 0, "amd": False, "gpus_promised": 0, "visible": None, "cuda_refused": "",
    # Which network between nodes MPI uses, as far as the process shows, and which fast one is there.
    "network": "", "fabric": "",
    # What killed jobs have left on the node, in words; "" for nothing.
    "leftovers": "",
}  # fmt: skip
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
#: What stands for a network where a process has it open.
_DEVICES = {
    "/dev/cxi": "Slingshot",
    "/dev/hfi1": "Omni-Path",
    "/dev/ipath": "Omni-Path",
    "/dev/infiniband/uverbs": "verbs",
}


def of_this_process(environment: Mapping[str, str]) -> Facts:
    """Return the facts that are known without MPI, from the variables of the process."""
    facts = dict(UNKNOWN)
    claim, room = launcher.claim_in(environment), memory()
    if claim is not None:
        variables = ", ".join(f"{name}={environment[name]}" for name in claim.variables)
        facts |= {"launcher": claim.launcher, "tasks": claim.tasks, "place": claim.rank, "said": variables}
    if room is not None:
        facts |= {"room_free": room.free, "room_of": f"{room.of}, {size_in_words(room.total)}"}
    own_cores, gpus_promised = sorted(os.sched_getaffinity(0)), environment.get("SLURM_GPUS_ON_NODE", "")
    threads, source = blas_threads(environment, len(own_cores))
    return facts | {
        "host": os.uname().nodename,
        "python": ".".join(map(str, sys.version_info[:3])),
        "mpistrategy": launcher.version(),
        "numpy": np.__version__,
        "pmi": offered(environment),
        "cores": own_cores,
        "machine_cores": os.cpu_count() or 1,
        "threads": threads,
        "threads_source": source,
        "gpu_devices": len(glob("/dev/nvidia[0-9]*")),
        "amd": os.path.exists("/dev/kfd"),
        "fabric": fabric(),
        "gpus_promised": int(gpus_promised) if gpus_promised.isdecimal() else 0,
        "visible": environment.get("CUDA_VISIBLE_DEVICES"),
        "leftovers": leftovers.in_words(),
    }


def of_mpi(ranks: Ranks) -> Facts:
    """Return the facts that are known once MPI has started."""
    library, sight = library_name(ranks.version), look()
    refusal: tuple[str, ...] = ()
    try:
        launcher.check_world(ranks.size, library, "mpistrategy doctor")
    except LaunchError as error:
        refusal = parts_of(error)
    return {
        "rank": ranks.rank,
        "size": ranks.size,
        "mpi4py": ranks.mpi4py,
        "thread_level": ranks.thread_level,
        "library": library,
        "libraries": [path for path in cuda_aware.mapped_files() if cuda_aware.is_mpi(path)],
        "refusal": refusal,
        "network": network(),
        "shm_free": disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else -1,
        "sight": sight.text(),
        "cuda_refused": cuda_trial.obstacle() if sight.gpus else "",
    }


def blas_threads(environment: Mapping[str, str], cores: int) -> tuple[int, str]:
    """Return how many threads NumPy's linear algebra takes by the first variable that is set, and by which.

    Args:
        environment: the variables of the process.
        cores: how many it may use; the default number of threads.
    """
    for name in _THREADS:
        if environment.get(name, "").isdecimal():
            return int(environment[name]), f"{name}={environment[name]}"
    return cores, f"no {_THREADS[0]} is set"


def offered(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the kinds of PMI that a launcher offers."""
    kinds = {
        "PMIx": {"PMIX_NAMESPACE", "PMIX_RANK"} <= environment.keys(),
        "PMI": "PMI_RANK" in environment
        and not {"PMI_FD", "PMI_PORT", "PMI_CONTROL_PORT", "PMI_SIZE"}.isdisjoint(environment),
    }
    return tuple(kind for kind, is_there in kinds.items() if is_there)


def network(folder: str = "/proc/self/fd") -> str:
    """Return what messages between nodes go by: Slingshot, Omni-Path, verbs or TCP; "" where it cannot be seen."""
    opened = []
    for link in glob(f"{folder}/*"):  # none without /proc
        with suppress(OSError):  # closed meanwhile
            opened.append(os.readlink(link))
    kinds = (kind for device, kind in _DEVICES.items() if any(path.startswith(device) for path in opened))
    return next(kinds, "TCP" if opened else "")


def fabric(root: str = "/sys/class") -> str:
    """Return the fast network of this node: InfiniBand, RoCE, Slingshot or EFA; "" where none is seen."""
    if glob(f"{root}/cxi/*"):
        return "Slingshot"
    drivers = map(os.path.realpath, glob(f"{root}/infiniband/*/device/driver"))
    if "efa" in map(os.path.basename, drivers):
        return "EFA"
    layers = []
    for path in glob(f"{root}/infiniband/*/ports/*/link_layer"):
        with suppress(OSError):
            layers.append(Path(path).read_text(encoding="utf-8").strip())
    return "InfiniBand" if "InfiniBand" in layers else "RoCE" if layers else ""
