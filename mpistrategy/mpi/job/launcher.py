"""Compares what the launcher says about this process with what MPI says; without a match, refuses to start.

A launcher and an MPI that do not know each other start N programs of one rank each, which train N models and end with
status 0.  Here each of them refuses to start.  Ranks that found each other compare their versions and their layout.

Evidence is only what a launcher said to *this* process: a batch shell's SLURM_NTASKS speaks of tasks that are not
started yet, and a child of a rank has the environment of its parent.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from mpistrategy.errors import LaunchError
from mpistrategy.objects.later import later
from mpistrategy.objects.text import encoded
from mpistrategy.options import is_on

if TYPE_CHECKING:
    from mpistrategy.mpi.watchdog import run_directory
    from mpistrategy.mpi.watchdog.local_process import stat_of
    from mpistrategy.objects.shown import ranks_in_words
else:
    later(globals(), "mpistrategy.mpi.watchdog.run_directory")
    later(globals(), "mpistrategy.mpi.watchdog.local_process", "stat_of")
    later(globals(), "mpistrategy.objects.shown", "ranks_in_words")

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
#: What leads MPI to the launcher; without any it runs alone.
_TO_LAUNCHER = ("PMI_FD", "PMI_PORT", "PMIX_NAMESPACE")
_IS_LAUNCHER = re.compile("mpi(exec|run)|hydra|prte|orte|orted|srun|slurmstepd|flux|jsrun|jsmd|pals|aprun")
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


@dataclass(frozen=True)
class Process:
    """What is known about this process besides its environment.

    Attributes:
        world_size: how many ranks MPI says there are.
        library: the MPI library; `mpistrategy.mpi.tuning.files.library_name`.
        slurm_step: what Slurm's own process says that this one belongs to: ``"17.0"``, ``"17.batch"``; "" when unknown.
        is_child_of_rank: given what a launcher said, whether it was said to a parent of this process that uses MPI.
    """

    world_size: int
    library: str = ""
    slurm_step: str = ""
    is_child_of_rank: Callable[[Claim], bool] = lambda claim: False


def claim_in(environment: Mapping[str, str], slurm_step: str = "") -> Claim | None:
    """Return what the innermost launcher said; None where there was none, or it is not to be trusted.

    Args:
        environment: the variables of the process.
        slurm_step: as in `Process`.
    """
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
    return batch or _place(environment, *_PLACE_ON_NODE) or _claim_of_srun(environment, slurm_step)


def _place(environment: Mapping[str, str], launcher: str, size: str, rank: str) -> Claim | None:
    tasks, mine = _number(environment, size), _number(environment, rank)
    return None if tasks is None or mine is None else Claim(launcher, tasks, mine, (size, rank))


def _claim_of_srun(environment: Mapping[str, str], slurm_step: str) -> Claim | None:
    step = _number(environment, "SLURM_STEP_ID")
    if step is None or step >= _FIRST_SPECIAL_STEP:
        return None
    if slurm_step and not slurm_step.rpartition(".")[2].isdigit():
        return None  # a batch script that was submitted from inside a step, whose variables it still has
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


def refusal(environment: Mapping[str, str], process: Process, where: str = "MirroredStrategy") -> LaunchError | None:
    """Return why this process must not go on; None when all is well.

    Args:
        environment: the variables of the process.
        process: what else is known of it.
        where: the public name that the error speaks of.
    """
    if process.world_size > 1 or is_on(environment.get(ALONE, "")):
        return None
    claim = claim_in(environment, process.slurm_step)
    if claim is None or claim.tasks <= 1 or process.is_child_of_rank(claim):
        return None
    said = ", ".join(f"{name}={environment[name]}" for name in claim.variables)
    return LaunchError.at(
        where,
        found=f"an MPI ({process.library or 'unknown'}) that takes this process for the only one, while "
        f"{claim.launcher} started it as rank {claim.rank} of {claim.tasks} ({said})",
        expected=f"an MPI with {claim.tasks} ranks",
        fix=f"{cure(claim.launcher, process.library)} If {claim.tasks} separate programs of one rank each are meant, "
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
    if world_size > 1:
        return
    process = Process(world_size, library, _slurm_step(os.environ), _is_child_of_rank)
    error = refusal(os.environ, process, where)
    if error is not None:
        raise error


def is_of_rank(claim: Claim) -> bool:
    """Return whether a rank, to which the launcher spoke, has started this process, which MPI would take for the rank.

    It aborts there (MPICH), or waits for other such processes (Open MPI).  A single program under srun tells MPI
    nothing.
    """
    is_single = claim.tasks == 1 and claim.variables[0].startswith("SLURM_")
    if is_single or is_on(os.environ.get(ALONE, "")):
        return False
    if _is_of_multiprocessing():
        return True
    return any(name in os.environ for name in _TO_LAUNCHER) and _is_child_of_rank(claim)


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


# ------------------------------------------------------------------------------------- who started this process


def _read(process: int, what: str) -> bytes:
    """Return what the system shows of a process."""
    with open(f"/proc/{process}/{what}", "rb") as file:
        return file.read()


def _parents(process: int) -> Iterator[int]:
    """Yield the parent, its parent and so on, as far as they can be seen."""
    while process > 1:
        try:
            process = int(stat_of(process)[1])
        except OSError:
            return
        yield process


def _is_child_of_rank(claim: Claim) -> bool:
    """Return whether a parent of this process was told the same, and is a Python program that uses MPI.

    A shell between launcher and program was told the same, too; but it has no MPI, or one that was preloaded.  A
    launcher that a rank has started may tell its ranks what that one was told.
    """
    told = {encoded(f"{name}={os.environ[name]}") for name in claim.variables}
    for parent in _parents(os.getpid()):
        try:
            if not told <= set(_read(parent, "environ").split(b"\0")):
                return False  # the launcher: what is above it does not matter
            if _IS_LAUNCHER.match(_read(parent, "comm").decode(errors="replace")):
                return False
            maps = _read(parent, "maps").decode(errors="replace")
            is_python = "python" in os.readlink(f"/proc/{parent}/exe") or "libpython" in maps
        except OSError:
            return False
        if is_python and re.search(r"/libmpi(ch)?(_[a-z]+)?\.so", maps):
            return True
    return False


def _slurm_step(environment: Mapping[str, str]) -> str:
    """Return the step of the nearest slurmstepd above this process: ``"17.0"``, ``"17.batch"``; "" where none is."""
    if "SLURM_STEP_ID" not in environment:
        return ""
    for parent in _parents(os.getpid()):
        try:
            line = _read(parent, "cmdline").decode(errors="replace")
        except OSError:
            return ""
        found = re.match(r"slurmstepd: \[([\w.+]+)\]", line)
        if found:
            return found[1]
    return ""


# ------------------------------------------------------------------------------------- do the ranks fit together


@dataclass(frozen=True)
class Introduction:
    """What a rank says when it meets the others.

    Attributes:
        mpistrategy: the version of this package.
        python: the version of Python: major and minor.
        size: how many ranks there are, as far as this one knows.
        leader: the first rank on its node.
        local_size: how many ranks its node has.
        cores: the cores that it may use.
        directory: where the job's records would go, if this rank is the first.
    """

    mpistrategy: str
    python: str
    size: int
    leader: int
    local_size: int
    cores: tuple[int, ...]
    directory: str = ""

    @classmethod
    def of_this_rank(cls, rank: int, size: int, leader: int, local_size: int, cores: Sequence[int]) -> Introduction:
        """Return what this rank says."""
        directory = run_directory.new_path() if rank == 0 else ""
        return cls(version(), python_version(), size, leader, local_size, tuple(cores), directory)

    def text(self) -> str:
        """Return it as a text for the others."""
        import json  # here, for the quick import

        return json.dumps(asdict(self))


@functools.cache
def version() -> str:
    """Return the version of this package."""
    return str(sys.modules[__name__.partition(".")[0]].__version__)


def python_version() -> str:
    """Return the version of Python: major and minor."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def introductions(texts: Sequence[str], where: str = "MirroredStrategy") -> list[Introduction]:
    """Return what all ranks said.

    Args:
        texts: `Introduction.text` of every rank, in rank order.
        where: the public name that the error speaks of.

    Raises:
        LaunchError: when the ranks run different versions, or do not agree on who is where.  On every rank alike.
    """
    import json  # here, for the quick import

    told = [json.loads(text) for text in texts]
    for key, what, fix in _MUST_BE_EQUAL:
        _compare([str(each.get(key, "?")) for each in told], what, fix, where)
    ranks = [Introduction(**{**each, "cores": tuple(each["cores"])}) for each in told]
    _compare([str(each.size) for each in ranks], "numbers of ranks", _ANOTHER_START, where)
    leaders = [each.leader for each in ranks]
    sizes = Counter(leaders)
    for rank, each in enumerate(ranks):
        on_node = sizes[each.leader]
        is_led = each.leader <= rank and leaders[each.leader] == each.leader
        if each.size != len(ranks) or each.local_size != on_node or not is_led:
            raise LaunchError.at(
                where,
                found=f"rank {rank} counting {each.local_size} ranks on the node of rank {each.leader} and {each.size} "
                f"in all, where {on_node} and {len(ranks)} say so",
                expected="ranks that agree on who is on which node",
                fix=_ANOTHER_START,
            )
    return ranks


_ANOTHER_START = "Start the job anew, all ranks with one launcher and one MPI."
_MUST_BE_EQUAL = (
    ("mpistrategy", "versions of mpistrategy", "Give all nodes one environment: the same venv, container or module."),
    ("python", "versions of Python", "Give all nodes one environment: the same venv, container or module."),
)


def _compare(values: Sequence[str], what: str, fix: str, where: str) -> None:
    if len(set(values)) <= 1:
        return
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    shown = "; ".join(f"{value} on {ranks_in_words(members)}" for value, members in ranks.items())
    raise LaunchError.at(where, found=f"different {what}: {shown}", expected="the same on all ranks", fix=fix)
