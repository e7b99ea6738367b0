"""How two ranks of a job of their own are started: by the launcher that started this process."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mpistrategy.mpi.gpu.cuda_trials import TOLD_BY_LAUNCHERS, Place
from mpistrategy.mpi.gpu.loaded_mpi import is_mpi

_CHILD = ("-m", "mpistrategy.cli.doctor.facts.cuda_child")
#: Variables by which a launcher tells a rank who it is; they would confuse the launcher of the separate job.
_LAUNCHERS = (
    *("PMI", "PRTE_", "HYDI_", "HYDRA_", "MPI_LOCAL", "SLURM_", "PALS_", "MV2_COMM_", "JSM_", "OMPI_"),
    *("FLUX_JOB_", "FLUX_TASK_"),
    *TOLD_BY_LAUNCHERS,
)
#: Set by a user, a module or the batch system, and kept.  (OPAL_PREFIX, its location, matches nothing above.)
_KEPT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_MCA_")
#: What srun needs of Slurm's: the job, and how to reach Slurm.
_OF_SLURM = ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JOB_NODELIST", "SLURM_CONF", "SLURM_MPI_TYPE", "SLURM_CLUSTER_NAME")
#: More ranks than cores.
_MORE_RANKS = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}

#: The command of each launcher but mpiexec, before Python's.
_BATCH: dict[str, dict[Place, tuple[str, ...]]] = {
    # --overlap: the step that this process is in holds the cores and the GPUs.
    "srun": {
        "one node": ("srun", "--overlap", "--nodes=1", "--ntasks=2"),
        "several nodes": ("srun", "--overlap", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"),
    },
    "flux": {
        "one node": ("flux", "run", "-N1", "-n2"),
        "several nodes": ("flux", "run", "-N2", "-n2"),
    },
    "jsrun": {
        "one node": ("jsrun", "-n1", "-a2", "-c2", "-gALL_GPUS"),
        "several nodes": ("jsrun", "-n2", "-r1", "-a1", "-c1", "-g1"),
    },
}
#: What shows which of them started this process, and what shows that they can start others.
_STARTED_BY = {"srun": "SLURM_STEP_ID", "flux": "FLUX_TASK_RANK", "jsrun": "JSM_NAMESPACE_RANK"}
_CAN_START = {"srun": "SLURM_JOB_ID", "flux": "FLUX_URI", "jsrun": "LSB_JOBID"}
#: What shows that mpiexec started this process, also within a job of one of those.
_BY_MPIEXEC = ("OMPI_COMM_WORLD_RANK", "HYDI_CONTROL_FD", "MPI_LOCALRANKID", "MV2_COMM_WORLD_RANK")


@dataclass(frozen=True)
class Start:
    """How two ranks are started.

    Attributes:
        command: with Python and its arguments.
        environment: of the launcher.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]


def start(
    place: Place,
    environment: Mapping[str, str],
    files: Sequence[str] = (),
    hosts: Sequence[str] = (),
    which: Callable[[str], str | None] = shutil.which,
) -> Start | None:
    """Return how two ranks are started there; None where nothing here can.

    Args:
        place: where they shall be.
        environment: of this process.
        files: the libraries in this process; the mpiexec that came with its MPI goes before all others.
        hosts: the nodes of this job; an mpiexec needs the names of two to use them.
        which: finds a program.
    """
    mpiexec = _mpiexec(files, which)
    started = next((name for name, shown in _STARTED_BY.items() if shown in environment), "")
    by_mpiexec = any(name in environment for name in _BY_MPIEXEC) and "JSM_NAMESPACE_RANK" not in environment
    if started and not by_mpiexec and which(started) is not None:
        return _by_batch(started, place, environment)
    if mpiexec is not None:
        return _by_mpiexec(mpiexec, place, environment, files, hosts)
    able = (name for name, shown in _CAN_START.items() if shown in environment and which(name) is not None)
    batch = next(able, "")
    return _by_batch(batch, place, environment) if batch else None


def _by_batch(name: str, place: Place, environment: Mapping[str, str]) -> Start:
    kept = without_launcher(environment)
    if name == "srun":
        kept |= {each: environment[each] for each in _OF_SLURM if each in environment}
    return Start((*_BATCH[name][place], sys.executable, *_CHILD), kept)


def _by_mpiexec(
    mpiexec: str, place: Place, environment: Mapping[str, str], files: Sequence[str], hosts: Sequence[str]
) -> Start | None:
    kept, named = without_launcher(environment), list(dict.fromkeys(hosts))
    if place == "one node":
        kept |= {"HYDRA_LAUNCHER": "fork"}
        return Start((mpiexec, "-n", "2", sys.executable, *_CHILD), kept)
    if len(named) < 2:
        return None
    kept |= {each: environment[each] for each in _OF_SLURM if each in environment}  # it starts its ranks by srun there
    is_open_mpi = any(os.path.basename(path).startswith(("libopen-pal", "libopen-rte")) for path in files)
    where = ["--host", f"{named[0]}:1,{named[1]}:1"] if is_open_mpi else ["-hosts", ",".join(named[:2]), "-ppn", "1"]
    return Start((mpiexec, "-n", "2", *where, sys.executable, *_CHILD), kept)


def _mpiexec(files: Sequence[str], which: Callable[[str], str | None]) -> str | None:
    own = [os.path.dirname(os.path.dirname(path)) for path in files if is_mpi(path)]
    folders = [*(os.path.join(root, "bin") for root in own), os.path.dirname(sys.executable)]
    beside = [os.path.join(folder, "mpiexec") for folder in folders]
    return next((path for path in beside if os.access(path, os.X_OK)), None) or which("mpiexec")


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables of a launcher, in which there may be more ranks than cores."""
    return {key: value for key, value in environment.items() if not _is_told(key)} | _MORE_RANKS


def _is_told(key: str) -> bool:
    longest = max((len(start) for start in _LAUNCHERS if key.startswith(start)), default=0)
    return longest > max((len(start) for start in _KEPT if key.startswith(start)), default=0)
