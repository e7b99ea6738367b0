"""All ranks of the job, before any strategy: whether the job is as the launcher started it, and how it ends."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from mpi4py import MPI

from mpistrategy.errors import MpiStrategyError, OptionTypeError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.channel import wait_patiently
from mpistrategy.mpi.contract.guard import Guard, refusal_of_child
from mpistrategy.mpi.job import abort, launcher
from mpistrategy.mpi.shared_memory.segments import SharedMemory, private_memory
from mpistrategy.mpi.tuning.thresholds import library_name
from mpistrategy.mpi.watchdog import status_board, watchdog
from mpistrategy.mpi.watchdog.run_directory import new_path

_OF_COMM_NULL = (
    "A rank outside the sub-communicator must not make the strategy: write `if comm != MPI.COMM_NULL:`. (After Free() "
    "a communicator is MPI.COMM_NULL, too.)"
)
#: The process that has started MPI.
_PID = os.getpid()


def check(where: str, comm: Any = None) -> None:
    """Raise LaunchError on a rank that MPI takes for the only one while a launcher started several.

    Args:
        where: the public name in the error.
        comm: the communicator of a strategy: COMM_SELF is one rank on purpose.
    """
    if comm is None or comm != MPI.COMM_SELF:
        launcher.check_world(MPI.COMM_WORLD.size, library_name(MPI.Get_library_version()), where)


def ranks_of(comm: Any) -> MPI.Intracomm:
    """Return `comm`, or COMM_WORLD for None; raise OptionTypeError for anything but an intracommunicator."""
    if comm is None:
        return MPI.COMM_WORLD
    if isinstance(comm, MPI.Intracomm) and comm != MPI.COMM_NULL:
        return comm
    is_null = isinstance(comm, MPI.Comm) and comm == MPI.COMM_NULL
    raise OptionTypeError.at(
        "MirroredStrategy",
        found=f"communicator={'MPI.COMM_NULL' if is_null else repr(comm)}",
        expected="an mpi4py intracommunicator, or None for all ranks",
        fix=_OF_COMM_NULL if is_null else "",
    )


def watch_waiting(comm: MPI.Intracomm, guard: Guard, memory: SharedMemory, node_of: Sequence[int], path: str) -> None:
    """Let a late collective of `comm` end the job.

    Args:
        comm: whose ranks are watched.
        guard: this rank's.
        memory: for the status board.
        node_of: the node of each rank.
        path: the path of the run directory; the first rank warns if it cannot be written.
    """
    world = MPI.COMM_WORLD
    ranks = MPI.Group.Translate_ranks(comm.group, None, world.group)
    # Hydra, MPICH's and Intel MPI's launcher, takes the status of any killed rank for the status of the job.
    by_hydra = MPI.get_vendor()[0] in ("MPICH", "Intel MPI") and MPI.Query_thread() == MPI.THREAD_MULTIPLE
    group = watchdog.Group(guard, memory, ranks, node_of, path)
    watchdog.of_this_process(world.rank, world.size, world.Abort if by_hydra else None).add(group)


def watch_program() -> int:
    """Make the end of this rank end the job, from now on and with or without a strategy; return its number in the job.

    No rank waits for another.
    """
    abort.watch(Guard())
    return int(MPI.COMM_WORLD.rank)


@contextmanager
def joining(where: str, comm: Any = None) -> Iterator[None]:
    """Watch over the making of a communicator, in which the ranks wait for each other and nothing connects them yet.

    Args:
        where: the public name of the call that makes it.
        comm: the ranks; None for all.

    Raises:
        ForkedProcessError: in a forked child of a rank.
    """
    ranks = ranks_of(comm)
    if ranks.size > 1 and os.getpid() != _PID:
        raise refusal_of_child(where)
    # From here on this rank's end ends the job: the others wait for it, and this guard of one rank tells nobody.
    job_guard = Guard()
    abort.watch(job_guard)
    try:
        with _meeting(ranks, where) if ranks.size > 1 and MPI.COMM_WORLD.size > 1 else nullcontext():
            yield
    except Exception as error:
        if job_guard.give_up is not None and not isinstance(error, MpiStrategyError):
            job_guard.give_up(error)
        abort.forget(job_guard)
        raise
    abort.forget(job_guard)


@contextmanager
def _meeting(ranks: MPI.Intracomm, where: str) -> Iterator[None]:
    guard = Guard(None, ranks.rank, ranks.size)
    watch_waiting(ranks, guard, private_memory(status_board.BYTES), [0] * ranks.size, new_path())
    try:
        with Call(guard, where, anywhere=True):
            # So that an error can interrupt it: MPI's own collectives cannot be interrupted.
            request = ranks.Ibarrier()
            wait_patiently(lambda: request.Test() or None, guard.look)
            yield
    finally:
        watchdog.forget(guard)
