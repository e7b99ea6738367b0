"""Compares what the launcher says about this process with what MPI says; without a match, refuses to start.

A launcher and an MPI that do not know each other start N programs of one rank each, which train N models and end with
status 0.  Here each of them refuses to start.

Evidence is only what a launcher said to *this* process: a batch shell's SLURM_NTASKS speaks of tasks that are not
started yet, and a child of a rank has the environment of its parent.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mpistrategy.errors import LaunchError
from mpistrategy.options import is_on

#: Set to 1 to start several programs of one rank each on purpose.
ALONE = "MPISTRATEGY_ALONE"

_MPICH, _OPEN_MPI, _SRUN = "the mpiexec of MPICH or Intel MPI", "the mpirun of Open MPI", "srun"
_JSRUN, FLUX = "jsrun", "flux run"
#: The variables in which the launchers of MPI libraries say: which launcher, how many processes, which one.
_PLACES = (
    (_MPICH, "PMI_SIZE", "PMI_RANK"),
    (_OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("the mpirun_rsh of MVAPICH", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
)
#: Those of LSF's and Flux's launchers, which set the variables of an MPI's launcher, too.
_BATCH_PLACES = (
    (_JSRUN, "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    (FLUX, "FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
)
#: They count this node only, and are used where there are no others.
_PLACE_ON_NODE = (_MPICH, "MPI_LOCALNRANKS", "MPI_LOCALRANKID")
#: The variable in which a rank tells the processes that it starts its process id.
_RANK_PROCESS = "_MPISTRATEGY_RANK_PROCESS"
#: Slurm numbers what is no step of srun (the batch script, the shell of salloc, ...) from here on.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class Claim:
    """What a launcher said to this process.

    Attributes:
        launcher: in words.
        tasks: how many processes it started.
        rank: which of them this one is.
        variables: where it said so.
    """

    launcher: str
    tasks: int
    rank: int
    variables: tuple[str, ...]


def claim_in(environment: Mapping[str, str]) -> Claim | None:
    """Return what the innermost launcher said; None where there was none, or it is not to be trusted."""
    said = [claim for place in _PLACES if (claim := _place(environment, *place)) is not None]
    job = _job_of_pmi(environment)
    if job:  # of `srun --mpi=pmi2`; sbatch hands on the variables of the step that it was called in
        is_this = job == environment.get("SLURM_JOB_ID", "")
        said = [replace(claim, launcher=_SRUN) if claim.launcher == _MPICH else claim for claim in said]
        said = [claim for claim in said if is_this or claim.launcher != _SRUN]
    batch = next(filter(None, (_place(environment, *place) for place in _BATCH_PLACES)), None)
    if batch:
        same = (batch.tasks, batch.rank)
        said = [
            replace(claim, launcher=batch.launcher) if (claim.tasks, claim.rank) == same else claim for claim in said
        ]
    if said:
        return min(said, key=lambda claim: claim.tasks)  # one inside the other: who says 1 may be the inner one
    return batch or _place(environment, *_PLACE_ON_NODE) or _claim_of_srun(environment)


def _place(environment: Mapping[str, str], launcher: str, size: str, rank: str) -> Claim | None:
    tasks, mine = _number(environment, size), _number(environment, rank)
    return None if tasks is None or mine is None else Claim(launcher, tasks, mine, (size, rank))


def _claim_of_srun(environment: Mapping[str, str]) -> Claim | None:
    step = _number(environment, "SLURM_STEP_ID")
    if step is None or step >= _FIRST_SPECIAL_STEP:
        return None
    if "SLURM_PTY_PORT" in environment:
        return None  # an interactive shell, in which somebody types `python program.py`
    return _place(environment, _SRUN, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")


def _job_of_pmi(environment: Mapping[str, str]) -> str:
    """Return the Slurm job that the PMI variables speak of; "" where Slurm has not set them."""
    job, _, step = environment.get("PMI_JOBID", "").partition(".")
    return job if job.isdigit() and step.isdigit() else ""


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None


def refusal(
    environment: Mapping[str, str], world_size: int, library: str = "", where: str = "MirroredStrategy"
) -> LaunchError | None:
    """Return why this process must not go on; None when all is well.

    Args:
        environment: the variables of the process.
        world_size: how many ranks MPI says there are.
        library: the MPI library; `mpistrategy.mpi.tuning.files.library_name`.
        where: the public name that the error speaks of.
    """
    claim = claim_in(environment)
    if world_size > 1 or is_on(environment.get(ALONE, "")) or claim is None or claim.tasks <= 1:
        return None
    said = ", ".join(f"{name}={environment[name]}" for name in claim.variables)
    return LaunchError.at(
        where,
        found=f"an MPI ({library or 'unknown'}) that takes this process for the only one, while "
        f"{claim.launcher} started it as rank {claim.rank} of {claim.tasks} ({said})",
        expected=f"an MPI with {claim.tasks} ranks",
        fix=f"{cure(claim.launcher, library)} If {claim.tasks} separate programs of one rank each are meant, "
        f"set {ALONE}=1.",
    )


def cure(launcher: str, library: str) -> str:
    """Return how to start this MPI library's ranks in place of what this launcher did."""
    is_open_mpi = library.startswith("Open MPI")
    if launcher == _SRUN:
        option = "pmix" if is_open_mpi else "pmi2"
        return (
            f"Start it with `srun --mpi={option}`, or with the mpiexec of {library or 'that MPI'} in the batch script."
        )
    if launcher == FLUX:
        option = "pmix` (with flux-pmix installed)" if is_open_mpi else "simple`"
        return (
            f"Start it with `flux run -o pmi={option}, or with the mpiexec of {library or 'that MPI'} inside "
            "`flux batch` or `flux alloc`."
        )
    if launcher == _JSRUN:
        return (
            "jsrun starts ranks of IBM Spectrum MPI: load its module and build mpi4py with it, or start the ranks with "
            f"the mpiexec of {library or 'that MPI'} in the batch script."
        )
    beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    mpiexec = beside if os.path.exists(beside) else "mpiexec"
    if is_open_mpi != (launcher == _OPEN_MPI):
        return (
            f"Launcher and library are of two MPIs: start it with the mpiexec of {library or 'the library'} "
            f"({mpiexec}), or install the other MPI beside this Python."
        )
    return (
        "The process cannot reach its launcher: does something in between close files or clear the environment? "
        f"Start it directly: `{mpiexec} -n N python program.py`."
    )


def check_world(world_size: int, library: str, where: str = "MirroredStrategy") -> None:
    """Raise LaunchError on a rank that MPI takes for the only one while a launcher started several.

    Args:
        world_size: how many ranks MPI says there are.
        library: the MPI library.
        where: the public name that the error speaks of.
    """
    error = refusal(os.environ, world_size, library, where)
    if error is not None:
        raise error


def tell_children() -> None:
    """Tell the processes that this rank starts that they are no ranks."""
    os.environ[_RANK_PROCESS] = str(os.getpid())


def is_of_rank(claim: Claim) -> bool:
    """Return whether a rank, to which the launcher spoke, has started this process, which MPI would take for the rank.

    It aborts there (MPICH), or waits for other such processes (Open MPI).  A single program under srun tells MPI
    nothing.  A launcher that a rank has started is the parent of its own ranks.
    """
    is_single = claim.tasks == 1 and claim.variables[0].startswith("SLURM_")
    if is_single or is_on(os.environ.get(ALONE, "")):
        return False
    return _is_of_multiprocessing() or os.environ.get(_RANK_PROCESS) == str(os.getppid())


def _is_of_multiprocessing() -> bool:
    """Return whether multiprocessing has started this process.

    It is so where the methods 'spawn' and 'forkserver' import the program's module, and after that.
    """
    main = sys.modules.get("__mp_main__")  # in other processes it is another name of __main__
    return (main is not None and main.__name__ == "__mp_main__") or any(
        "from multiprocessing." in each for each in sys.orig_argv
    )


def refusal_of_child(where: str, claim: Claim) -> LaunchError:
    """Return what is raised in a process that a rank has started."""
    if _is_of_multiprocessing():
        found = f"a process that multiprocessing has started in rank {claim.rank} of {claim.tasks}"
        fix = (
            "Such a process imports the program's module: put what only the ranks shall do, as MirroredStrategy(), "
            'below `if __name__ == "__main__":`. OneDeviceStrategy works in it.'
        )
    else:
        found = f"a program that rank {claim.rank} of {claim.tasks} has started"
        fix = (
            f"It has the rank's variables ({', '.join(claim.variables)}, ...), and MPI would take it for that rank. "
            "OneDeviceStrategy works in it; or start it with the MPI's mpiexec, without these variables."
        )
    return LaunchError.at(where, found=found, expected="a strategy in the ranks alone", fix=fix)


def no_mpi(where: str, error: BaseException) -> LaunchError:
    """Return what to raise where no MPI library can be loaded: three lines, the same from everywhere."""
    found = _what_is_missing(error)
    expected = "an MPI that mpi4py can load"
    fix = (
        "Load your cluster's MPI module, or install an MPI into this environment: pip install mpich\n"
        "Without MPI, OneDeviceStrategy and mpistrategy.testing.run_replicas work."
    )
    made = LaunchError.at(where, found=found, expected=expected, fix=fix)
    made.args = (f"{where}: found {found}; expected {expected}.\n{fix}",)
    return made


def _what_is_missing(error: BaseException) -> str:
    """Return in one line why mpi4py finds no MPI; it tells one line for each library that it has tried."""
    if isinstance(error, ModuleNotFoundError) and error.name == "mpi4py":
        return "no mpi4py"
    _, *tried = str(error).splitlines() or [""]
    names = [line.partition(":")[0] for line in tried]
    if tried and all("No such file" in line for line in tried):
        return f"no MPI library (there is no {', '.join(names)})"
    return f"no MPI library ({' '.join(' '.join(tried or [str(error)]).split())[:300]})"
