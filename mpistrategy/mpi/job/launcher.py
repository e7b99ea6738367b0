"""Compares what the launcher says about this process with what MPI says; without a match, refuses to start.

A launcher and an MPI that do not know each other start N programs of one rank each, which train N models and end with
status 0.  Here each of them refuses to start.

Evidence is only a launcher's word to *this* process: a batch shell's SLURM_NTASKS speaks of tasks that are not
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
#: The variables in which launchers say how many processes they have started, and the rank of this process.
_PLACES = (
    (_MPICH, "PMI_SIZE", "PMI_RANK"),
    (_OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("the mpirun_rsh of MVAPICH", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    # Those of LSF and Flux set the variables of an MPI's launcher, too.
    (_JSRUN, "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    (FLUX, "FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    # These count this node only, and are used where there are no others.
    (_MPICH, "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
    (_SRUN, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)
_OF_MPI = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
#: The variable in which a rank tells the processes that it starts its process id.
_RANK_PROCESS = "_MPISTRATEGY_RANK_PROCESS"
#: Slurm's steps that are not of srun (the batch script, the shell of salloc, ...) have numbers from here on.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0

#: How other launchers start the ranks of an MPI: an option for all MPIs but Open MPI, for that, and the text.
_CURES = {
    _SRUN: ("pmi2", "pmix", "Start it with `srun --mpi={}`, or with the mpiexec of {} in the batch script."),
    FLUX: (
        "simple`",
        "pmix` (with flux-pmix installed)",
        "Start it with `flux run -o pmi={}, or with the mpiexec of {} inside `flux batch` or `flux alloc`.",
    ),
    _JSRUN: (
        "its module",
        "its module",
        "jsrun starts ranks of IBM Spectrum MPI: load {} and build mpi4py with it, or start the ranks with the mpiexec "
        "of {} in the batch script.",
    ),
}


@dataclass(frozen=True)
class Claim:
    """A launcher's claim about this process.

    Attributes:
        launcher: its name, in words.
        tasks: how many processes it started.
        rank: the number of this process among them.
        variables: the variables of the claim.
    """

    launcher: str
    tasks: int
    rank: int
    variables: tuple[str, ...]


def claim_in(environment: Mapping[str, str]) -> Claim | None:
    """Return the claim of the innermost launcher; None without a launcher, or where it is not to be trusted."""
    claims_by_size: dict[str, Claim] = {}
    for launcher, size, rank in _PLACES:
        if environment.get(size, "").isdecimal() and environment.get(rank, "").isdecimal():
            claims_by_size[size] = Claim(launcher, int(environment[size]), int(environment[rank]), (size, rank))
    job, _, step = environment.get("PMI_JOBID", "").partition(".")
    if job.isdecimal() and step.isdecimal() and "PMI_SIZE" in claims_by_size:  # of `srun --mpi=pmi2`
        claims_by_size["PMI_SIZE"] = replace(claims_by_size["PMI_SIZE"], launcher=_SRUN)
        if job != environment.get("SLURM_JOB_ID"):  # sbatch hands on the variables of the step that it was called in
            del claims_by_size["PMI_SIZE"]
    number = environment.get("SLURM_STEP_ID", "")
    if not number.isdecimal() or int(number) >= _FIRST_SPECIAL_STEP or "SLURM_PTY_PORT" in environment:
        claims_by_size.pop(
            "SLURM_STEP_NUM_TASKS", None
        )  # a script, or an interactive shell, where somebody types `python ...`
    claims = [claims_by_size[size] for size in _OF_MPI if size in claims_by_size]
    of_batch = claims_by_size.get("JSM_NAMESPACE_SIZE") or claims_by_size.get("FLUX_JOB_SIZE")
    if not claims:
        return of_batch or claims_by_size.get("MPI_LOCALNRANKS") or claims_by_size.get("SLURM_STEP_NUM_TASKS")
    inner = min(
        claims, key=lambda claim: claim.tasks
    )  # launchers may be nested: the launcher of 1 task may be the inner one
    if of_batch is not None and (of_batch.tasks, of_batch.rank) == (inner.tasks, inner.rank):
        return replace(inner, launcher=of_batch.launcher)
    return inner


def check_world(
    world_size: int,
    library: str = "",
    where: str = "MirroredStrategy",
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Raise LaunchError on a rank that MPI takes for the only one while a launcher started several.

    Args:
        world_size: how many ranks MPI says there are.
        library: the MPI library; `mpistrategy.mpi.tuning.thresholds.library_name`.
        where: the public name in the error.
        environment: the variables of the process.
    """
    claim = claim_in(environment)
    if world_size > 1 or is_on(environment.get(ALONE, "")) or claim is None or claim.tasks <= 1:
        return
    variables = ", ".join(f"{name}={environment[name]}" for name in claim.variables)
    raise LaunchError.at(
        where,
        found=f"an MPI ({library or 'unknown'}) that takes this process for the only one, while "
        f"{claim.launcher} started it as rank {claim.rank} of {claim.tasks} ({variables})",
        expected=f"an MPI with {claim.tasks} ranks",
        fix=f"{cure(claim.launcher, library)} If {claim.tasks} separate programs of one rank each are meant, "
        f"set {ALONE}=1.",
    )


def cure(launcher: str, library: str) -> str:
    """Return the advice how to start the ranks of this MPI library."""
    is_open_mpi = library.startswith("Open MPI")
    if launcher in _CURES:
        *options, text = _CURES[launcher]
        return text.format(options[is_open_mpi], library or "that MPI")
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


def tell_children() -> None:
    """Tell the processes that this rank starts that they are no ranks."""
    os.environ[_RANK_PROCESS] = str(os.getpid())


def refusal_of_child(where: str, claim: Claim) -> LaunchError | None:
    """Return the error of a process that a rank has started, and that must not start MPI; None for other processes.

    MPI would take it for the rank, and aborts there (MPICH) or waits for other such processes (Open MPI).  A single
    program under srun tells MPI nothing.  A launcher that a rank has started is the parent of its own ranks.
    """
    is_single = claim.tasks == 1 and claim.variables[0].startswith("SLURM_")
    if is_single or is_on(os.environ.get(ALONE, "")):
        return None
    main = sys.modules.get("__mp_main__")  # where multiprocessing imports the program; elsewhere a name of __main__
    if (main is not None and main.__name__ == "__mp_main__") or any(
        "from multiprocessing." in w for w in sys.orig_argv
    ):
        found = f"a process that multiprocessing has started in rank {claim.rank} of {claim.tasks}"
        fix = (
            "Such a process imports the program's module: put what only the ranks shall do, as MirroredStrategy(), "
            'below `if __name__ == "__main__":`. OneDeviceStrategy works in it.'
        )
    elif os.environ.get(_RANK_PROCESS) == str(os.getppid()):
        found = f"a program that rank {claim.rank} of {claim.tasks} has started"
        fix = (
            f"It has the rank's variables ({', '.join(claim.variables)}, ...), and MPI would take it for that rank. "
            "OneDeviceStrategy works in it; or start it with the MPI's mpiexec, without these variables."
        )
    else:
        return None
    return LaunchError.at(where, found=found, expected="a strategy in the ranks alone", fix=fix)


def no_mpi(where: str, error: BaseException) -> LaunchError:
    """Return the error where no MPI library can be loaded: three lines, the same from everywhere."""
    _, *failures = str(error).splitlines() or [""]  # mpi4py tells one line for each library that it has tried
    if isinstance(error, ModuleNotFoundError) and error.name == "mpi4py":
        found = "no mpi4py"
    elif failures and all("No such file" in line for line in failures):
        found = f"no MPI library (there is no {', '.join(line.partition(':')[0] for line in failures)})"
    else:
        found = f"no MPI library ({' '.join(' '.join(failures or [str(error)]).split())[:300]})"
    expected = "an MPI that mpi4py can load"
    fix = (
        "Load your cluster's MPI module, or install an MPI into this environment: pip install mpich\n"
        "Without MPI, OneDeviceStrategy and mpistrategy.testing.run_replicas work."
    )
    launch_error = LaunchError.at(where, found=found, expected=expected, fix=fix)
    launch_error.args = (f"{where}: found {found}; expected {expected}.\n{fix}",)
    return launch_error
