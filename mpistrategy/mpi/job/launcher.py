"""The start of a rank: what its launcher and its variables say, MPI's own start, and whether all say the same.

A launcher and an MPI that do not know each other start N programs of one rank each, which train N models and end with
status 0.  Here each of them refuses to start.

Evidence is only a launcher's word to *this* process: a batch shell's SLURM_NTASKS speaks of tasks that are not
started yet, and a child of a rank has the environment of its parent.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import TIMEOUT_MAX
from types import FunctionType

from mpistrategy.errors import LaunchError, OptionWarning
from mpistrategy.mpi.contract.call_sites import warn
from mpistrategy.mpi.contract.guard import TIMEOUT, expected_limit
from mpistrategy.objects.shown import did_you_mean, ranks_by, ranks_in_words
from mpistrategy.options import is_on

_PREFIX = "MPISTRATEGY_"
#: The names of this package's variables, without the prefix.  `mpistrategy guide environment` says what they set.
NAMES = (
    *("ALONE", "CHECK", "CUDA_AWARE", "FULL_TRACEBACK", "GPU_MAP", "GPU_PATH", "INJECT", "NVTX", "PATHS", "RUN_DIR"),
    *("TIMEOUT_SECONDS", "TRACE"),
)
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

#: The other ranks wait so much longer than rank 0: where rank 0 waits, too, it reports for all.
_LATER_SECONDS = 5.0


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


def _is_number(text: str) -> bool:
    """Return whether a text is a number that a launcher writes; Python refuses to read thousands of digits."""
    return text.isdecimal() and len(text) < 20


def claim_in(environment: Mapping[str, str]) -> Claim | None:
    """Return the claim of the innermost launcher; None without a launcher, or where it is not to be trusted."""
    claims_by_size: dict[str, Claim] = {}
    for launcher, size, rank in _PLACES:
        if _is_number(environment.get(size, "")) and _is_number(environment.get(rank, "")):
            claims_by_size[size] = Claim(launcher, int(environment[size]), int(environment[rank]), (size, rank))
    job, _, step = environment.get("PMI_JOBID", "").partition(".")
    if job.isdecimal() and step.isdecimal() and "PMI_SIZE" in claims_by_size:  # of `srun --mpi=pmi2`
        claims_by_size["PMI_SIZE"] = replace(claims_by_size["PMI_SIZE"], launcher=_SRUN)
        if job != environment.get("SLURM_JOB_ID"):  # sbatch hands on the variables of the step that it was called in
            del claims_by_size["PMI_SIZE"]
    number = environment.get("SLURM_STEP_ID", "")
    if not _is_number(number) or int(number) >= _FIRST_SPECIAL_STEP or "SLURM_PTY_PORT" in environment:
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


def version() -> str:
    """Return the version of this package."""
    return str(sys.modules["mpistrategy"].__version__)


def check_versions(texts: Sequence[str]) -> None:
    """Raise LaunchError, on every rank, unless all ranks run the same versions.

    Args:
        texts: the `versions` of every rank, in rank order.
    """
    if len(ranks := ranks_by(texts)) > 1:
        raise LaunchError.at(
            "MirroredStrategy",
            found="different versions: "
            + "; ".join(f"{text} on {ranks_in_words(peers)}" for text, peers in ranks.items()),
            expected="the same on all ranks",
            fix="Give all nodes one environment: the same venv, container or module.",
        )


def versions() -> str:
    """Return what must be equal on all ranks: the versions of this package and of Python."""
    return f"mpistrategy {version()}, Python {sys.version_info.major}.{sys.version_info.minor}"


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


def refusal_of_child(where: str, claim: Claim) -> LaunchError | None:
    """Return the error of a process that a rank has started, and that must not start MPI; None for other processes.

    MPI would take it for the rank, and aborts there (MPICH) or waits for other such processes (Open MPI).  A single
    program under srun tells MPI nothing.  A launcher that a rank has started is the parent of its own ranks.
    """
    is_single = claim.tasks == 1 and claim.variables[0].startswith("SLURM_")
    is_worker = any("from multiprocessing." in word for word in sys.orig_argv)
    is_child = is_worker or os.environ.get(_RANK_PROCESS) == str(os.getppid())
    if is_single or is_on(os.environ.get(ALONE, "")) or not is_child:
        return None
    return LaunchError.at(
        where,
        found=f"a process that rank {claim.rank} of {claim.tasks} has started",
        expected="a strategy in the ranks alone",
        fix=f"It has the rank's variables ({', '.join(claim.variables)}, ...), and MPI would take it for that rank. "
        "OneDeviceStrategy works in it. multiprocessing imports the program's module in it: put what only the ranks "
        'shall do below `if __name__ == "__main__":`. Start another program with mpiexec, without these variables.',
    )


def no_mpi(where: str, error: BaseException) -> LaunchError:
    """Return the error where no MPI library can be loaded: three lines, the same from everywhere."""
    is_missing = isinstance(error, ModuleNotFoundError) and error.name == "mpi4py"
    found = "no mpi4py" if is_missing else f"no MPI library ({'; '.join(str(error).splitlines())[:500]})"
    launch_error = LaunchError.at(where, found=found, expected="an MPI that mpi4py can load")
    launch_error.fix = (
        "Load your cluster's MPI module, or install an MPI into this environment: pip install mpich\n"
        "Without MPI, OneDeviceStrategy and mpistrategy.testing.run_replicas work."
    )
    launch_error.args = (f"{launch_error}\n{launch_error.fix}",)
    return launch_error


def warn_of_unknown() -> None:
    """Warn of variables that only look like variables of this package, but for those of the tests."""
    for name in sorted(os.environ):
        short = name.removeprefix(_PREFIX)
        if short != name and short not in NAMES and not short.startswith(("TEST_", "GPU_LANE")):
            advice = did_you_mean(short, NAMES) or f"There are {', '.join(NAMES)}."
            warn(f"nothing reads the variable {name} of the environment.  After {_PREFIX}: {advice}", OptionWarning)


# ---------------------------------------------------------------------------------------------------- the start


def start(where: str, seconds: float | None = None) -> None:
    """Import `mpi4py.MPI`, which starts MPI, unless that has been done; MPI runs afterwards.

    Where a launcher has started several ranks, this takes Python's one `faulthandler.dump_traceback_later` meanwhile.

    Args:
        where: the public name in messages.
        seconds: how long MPI may take to start; None for the limit of a collective.

    Raises:
        LaunchError: when a rank has started this process, or the program has kept mpi4py from starting MPI and has not
            started it, or has finalized it; where mpi4py finds no MPI library.
    """
    if "mpi4py.MPI" not in sys.modules:
        claim = claim_in(os.environ)
        if claim is not None and (refusal := refusal_of_child(where, claim)) is not None:
            raise refusal
        try:
            if claim is None or claim.tasks < 2:
                _import()
            else:
                _import_in_time(where, claim, expected_limit() if seconds is None else seconds)
        except (ImportError, RuntimeError) as error:
            raise no_mpi(where, error) from None  # its traceback shows mpi4py's search alone
    from mpi4py import MPI

    if MPI.Is_finalized() or not MPI.Is_initialized():
        raise LaunchError.at(
            where,
            found="an MPI that has been finalized, or not been initialized (mpi4py.rc.initialize is False)",
            expected="one that runs",
            fix="Call MPI.Init_thread() before it, and MPI.Finalize() at the end of the program; or leave both to "
            "mpi4py: mpi4py.rc.initialize = True.",
        )
    os.environ[_RANK_PROCESS] = str(os.getpid())  # tells the processes that this rank starts that they are no ranks


def _import() -> None:
    import mpi4py.MPI  # noqa: F401 - starts MPI


def _import_in_time(where: str, claim: Claim, seconds: float) -> None:
    """Start MPI, which waits for all ranks and holds the interpreter: only faulthandler can report and end it then.

    faulthandler prints only file names and line numbers.  So the file name of the code is the message.
    """
    words = (
        f"[rank {claim.rank}/{claim.tasks}] {where}: waited {seconds:g} s ({TIMEOUT}) in MPI_Init, to which "
        f"all {claim.tasks} ranks must come. Look for a rank that has failed, has not begun, or is stopped (ps on its "
        "node: state T). Do launcher and MPI fit together (srun --mpi=list), and can the nodes reach each other?"
    )
    limit = min(seconds + _LATER_SECONDS * (claim.rank > 0), TIMEOUT_MAX)
    try:
        with suppress(RuntimeError):  # no thread can be started
            faulthandler.dump_traceback_later(limit, exit=True, file=2)
        FunctionType(_import.__code__.replace(co_filename=words), globals())()
    finally:
        faulthandler.cancel_dump_traceback_later()
