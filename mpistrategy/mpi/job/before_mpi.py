"""Starts MPI; says before what would end in an abort or a Bus error, and what a rank waits for that does not start."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress

from mpistrategy.errors import LaunchError
from mpistrategy.mpi.contract import timeouts
from mpistrategy.mpi.contract.forks import after_finalize
from mpistrategy.mpi.job import launcher
from mpistrategy.mpi.job.launcher import Claim

#: The status of a job that ends because a rank did not come in time; as that of a late collective.
_LATE = 124
_SHM = "/dev/shm"
#: With these variables a user says himself which PMI it is.
_PMI_CHOSEN = ("MPIR_CVAR_PMI_VERSION", "MPICH_PMI_VERSION", "MPIR_PARAM_PMI_VERSION")

_refused: LaunchError | None = None


def start(where: str, seconds: float | None = None, status: int = _LATE, longer: str = "") -> None:
    """Import `mpi4py.MPI`, which starts MPI, unless that has been done; MPI runs afterwards.

    Args:
        where: the public name that messages speak of.
        seconds: how long MPI may take to start; None for the limit of a collective.
        status: what the process ends with when it takes longer.
        longer: how to give it longer, in words.

    Raises:
        LaunchError: when this MPI library would abort or crash at its start, or a rank has started this process, or
            the program has kept mpi4py from starting MPI and has not started it.
        ContextError: after MPI.Finalize().
        ImportError, RuntimeError: what mpi4py raises where it finds no MPI library.
    """
    if _refused is not None:
        raise _refused
    if "mpi4py.MPI" not in sys.modules:
        _import(where, seconds, status, longer)
    _check_runs(where)


def _import(where: str, seconds: float | None, status: int, longer: str) -> None:
    environment = os.environ
    claim = launcher.claim_in(environment)
    if claim is not None and launcher.is_of_rank(claim):
        raise launcher.refusal_of_child(where, claim)
    with _in_time(where, claim, timeouts.expected() if seconds is None else seconds, status, longer):
        if "PMIX_NAMESPACE" in environment or _lacks(claim, environment):
            _start_checked(where, environment, claim)
        else:
            import mpi4py.MPI  # noqa: F401 - starts MPI


def _check_runs(where: str) -> None:
    from mpi4py import MPI

    if MPI.Is_finalized():
        raise after_finalize(where)
    if not MPI.Is_initialized():
        raise LaunchError.at(
            where,
            found="an MPI that has not been initialized (mpi4py.rc.initialize is False)",
            expected="one that runs",
            fix="Call MPI.Init_thread() before it, and MPI.Finalize() at the end of the program; or leave both to "
            "mpi4py: mpi4py.rc.initialize = True.",
        )


def _start_checked(where: str, environment: Mapping[str, str], claim: Claim | None) -> None:
    """Load the library, look at it, and start MPI as mpi4py does."""
    global _refused  # a library that is loaded and not started must not be called later
    from mpi4py import rc

    initialize, finalize = rc.initialize, rc.finalize
    rc.initialize = False
    if finalize is None:
        rc.finalize = initialize
    try:
        from mpi4py import MPI
    finally:
        rc.initialize, rc.finalize = initialize, finalize
    if not initialize or MPI.Is_initialized():
        return
    from mpistrategy.mpi.tuning.files import library_name

    library = library_name(MPI.Get_library_version())
    _refused = refusal(where, library, environment, claim)
    if _refused is not None:
        raise _refused
    if rc.threads:
        MPI.Init_thread(getattr(MPI, f"THREAD_{str(rc.thread_level).upper()}", MPI.THREAD_MULTIPLE))
    else:
        MPI.Init()


# ------------------------------------------------------------------------------------- what would not start


def refusal(where: str, library: str, environment: Mapping[str, str], claim: Claim | None) -> LaunchError | None:
    """Return why this MPI library would abort or crash at its start; None when nothing is known against it.

    Args:
        where: the public name that the error speaks of.
        library: its name and version, as `mpistrategy.mpi.tuning.files.library_name` has it.
        environment: the variables of the process.
        claim: what the launcher said.
    """
    if not library.startswith("MPICH "):
        return None
    return _of_pmi(where, library, environment, claim) or _of_memory(where, library, environment, claim)


def _of_pmi(where: str, library: str, environment: Mapping[str, str], claim: Claim | None) -> LaunchError | None:
    """MPICH from 5 on aborts where it sees PMIx, unless it was built with it; before, it starts single processes."""
    if "PMIX_NAMESPACE" not in environment or any(name in environment for name in _PMI_CHOSEN):
        return None
    is_old = library.removeprefix("MPICH ")[:2] in ("3.", "4.")
    if (is_old and (claim is None or claim.tasks < 2)) or _speaks_pmix():
        return None
    if "PMI_SIZE" in environment:
        return LaunchError.at(
            where,
            found=f"variables of two launchers (PMI_SIZE and PMIX_NAMESPACE), between which {library} cannot choose",
            expected="one launcher",
            fix="Start the ranks outside of another job's ranks, or remove what the outer launcher has set: "
            "env -u PMIX_NAMESPACE mpiexec ...",
        )
    if claim is None:
        return LaunchError.at(
            where,
            found=f"PMIX_NAMESPACE in the environment: a launcher that offers PMIx, which {library} does not speak",
            expected="a launcher of this MPI, or none",
            fix="If another MPI program's rank starts this one, take it away: env -u PMIX_NAMESPACE python program.py",
        )
    said = ", ".join(f"{name}={environment[name]}" for name in claim.variables)
    return LaunchError.at(
        where,
        found=f"a launcher ({claim.launcher}; {said}) that offers PMIx, which {library} does not speak: it would abort "
        "(unsupported PMI version PMIx)",
        expected="a launcher and an MPI that speak the same PMI",
        fix=launcher.cure(claim.launcher, library),
    )


def _speaks_pmix() -> bool:
    """Return whether the MPI library, or what it is linked with, has PMIx."""
    import ctypes

    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            files = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if "/lib" in line}
    except OSError:
        return False
    for path in files:
        name = os.path.basename(path)
        if name.startswith(("libmpi.so", "libmpich.so", "libmpi_")):
            with suppress(OSError):  # replaced on disk since it was loaded
                if hasattr(ctypes.CDLL(path), "PMIx_Init"):
                    return True
    return any("/libpmix.so" in path for path in files)


def _of_memory(where: str, library: str, environment: Mapping[str, str], claim: Claim | None) -> LaunchError | None:
    """Each rank of a node writes to its queue in /dev/shm while MPICH starts; without room that is a Bus error."""
    lacking = _lacks(claim, environment)
    if lacking is None:
        return None
    free, needed, ranks = lacking
    few = max(4, 64 * free // (2 * needed) // 4 * 4)
    return LaunchError.at(
        where,
        found=f"{free / 2**20:.1f} MiB free in {_SHM}, where {library} takes {needed / 2**20:.1f} MiB for {ranks} "
        f"rank{'s' * (ranks > 1)}: it would end in a Bus error",
        expected="room for the queues of the ranks of this node",
        fix="Give a container more: docker run --shm-size=1g (or --ipc=host); on a node: mount -o remount,size=1g "
        f"{_SHM}, or remove what killed jobs have left there (ls -l {_SHM}). Until then, with shorter queues: export "
        f"{_CELLS}={few}",
    )


_CELLS, _CELL_SIZE = "MPIR_CVAR_CH4_SHM_POSIX_IQUEUE_NUM_CELLS", "MPIR_CVAR_CH4_SHM_POSIX_IQUEUE_CELL_SIZE"
#: Measured with MPICH 5.0.2: 64 cells of 16 KiB and their heads for each rank, and a page.
_USUAL_CELLS, _USUAL_CELL_BYTES, _HEAD_BYTES, _EXTRA_BYTES = 64, 16384, 128, 8192


def _lacks(claim: Claim | None, environment: Mapping[str, str]) -> tuple[int, int, int] | None:
    """Return what is free in /dev/shm, what MPICH needs, and for how many ranks; None where there is room."""
    if _number(environment, "MPIR_CVAR_NOLOCAL"):
        return None
    ranks = _on_this_node(claim, environment) if claim is not None else 1
    cells = _number(environment, _CELLS) or _USUAL_CELLS
    needed = ranks * cells * ((_number(environment, _CELL_SIZE) or _USUAL_CELL_BYTES) + _HEAD_BYTES) + _EXTRA_BYTES
    try:
        state = os.statvfs(_SHM)
        free = state.f_bavail * state.f_frsize
        if free >= needed:
            return None
        # Ranks that came earlier may have taken their part.
        taken = sum(os.stat(f"{_SHM}/{name}").st_blocks * 512 for name in os.listdir(_SHM) if "mpich_shm_" in name)
    except OSError:
        return None
    return None if free + taken >= needed else (free, needed, ranks)


#: How many ranks a launcher has started on this node.
_LOCAL_SIZES = (
    "MPI_LOCALNRANKS",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI_LOCAL_SIZE",
    "PALS_LOCAL_SIZE",
    "JSM_NAMESPACE_LOCAL_SIZE",
)


def _on_this_node(claim: Claim, environment: Mapping[str, str]) -> int:
    """Return how many ranks the launcher has started on this node; 1 where it does not say."""
    told = _told_on_this_node(environment)
    if told:
        return min(claim.tasks, told)
    if claim.launcher == launcher.FLUX and _number(environment, "FLUX_JOB_NNODES"):
        return -(-claim.tasks // _number(environment, "FLUX_JOB_NNODES"))
    # 2(x3),1: of each node
    node, per_node = _number(environment, "SLURM_NODEID"), environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    for part in per_node.split(","):
        tasks, _, times = part.rstrip(")").partition("(x")
        repeated = int(times) if times.isdigit() else 1
        if tasks.isdigit() and node < repeated:
            return min(claim.tasks, int(tasks))
        node -= repeated
    return 1


def _told_on_this_node(environment: Mapping[str, str]) -> int:
    """Return how many ranks are on this node as a launcher of MPI libraries says; 0 where none does."""
    return next(filter(None, (_number(environment, name) for name in _LOCAL_SIZES)), 0)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else 0


# ------------------------------------------------------------------------------------- what does not start in time


def _in_time(where: str, claim: Claim | None, seconds: float, status: int, longer: str) -> AbstractContextManager[None]:
    """Return what watches the clock while MPI starts; nothing for a process that no others belong to."""
    if claim is None or claim.tasks < 2:
        return nullcontext()
    from mpistrategy.mpi.job import start_alarm

    message = (
        f"[rank {claim.rank}/{claim.tasks}] {where}: MPI has not started after {seconds:g} s. {{who}} Ranks that wait "
        f"end with status {status}, and with them the job; {longer or f'a longer limit: {timeouts.VARIABLE}'}."
    )
    size, rank = claim.variables
    local = str(_told_on_this_node(os.environ))
    program = os.path.join(os.path.dirname(__file__), "absent_ranks.py")
    words = [sys.executable or "python3", "-I", "-S", program, str(os.getpid()), size, rank, local, message]
    return start_alarm.alarm(seconds, "exec " + " ".join(map(_quoted, words)), status)


def _quoted(word: str) -> str:
    """Return a word for the shell; as shlex.quote, whose import takes longer than all of this."""
    return "'" + word.replace("'", "'\"'\"'") + "'"
