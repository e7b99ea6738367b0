"""All ranks of the job: they meet before any strategy connects them, and the end of one rank is the end of the job.

No peer is left waiting for a rank that has died.  MPI leaves the others hanging when a Python exception ends one rank.
From the first communicator of several ranks on, an uncaught exception (in any thread) and a non-zero `sys.exit` abort
the whole job, with that rank's traceback; an orderly end waits for the peers and tells a peer that still calls a
collective who has left.  All of this ends with the last strategy.  A strategy that contains errors
(`on_error="raise"`) ends only itself.  Under `mpistrategy run` errors abort the job from the first line of the program
to its end, whatever strategies there are.
"""

from __future__ import annotations

import atexit
import functools
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, NoReturn

from mpi4py import MPI

from mpistrategy.errors import MpiStrategyError, OptionTypeError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import FOLDER
from mpistrategy.mpi.contract.channel import growing_pauses, wait_patiently
from mpistrategy.mpi.contract.guard import PATIENCE_SECONDS, Guard, refusal_of_child
from mpistrategy.mpi.job import exit_hooks, launcher
from mpistrategy.mpi.job.exit_hooks import program, status_of
from mpistrategy.mpi.shared_memory.segments import SharedMemory, private_memory
from mpistrategy.mpi.tuning.thresholds import library_name
from mpistrategy.mpi.watchdog import reports, status_board, watchdog
from mpistrategy.mpi.watchdog.run_directory import new_path
from mpistrategy.options import is_on

#: Files whose frames come before the program's frames.
_RUN = (os.path.join(FOLDER, "cli", "run.py"), "<frozen runpy>")
#: Where ranks end with a status at the same time, the first rank prints it and ends the job before the others do.
_FIRST_SPEAKS_SECONDS = 0.5
#: How long a rank waits for another rank that prints its error.
_ANOTHER_PRINTS_SECONDS = 2.0
#: How long the ranks of other nodes may take to read why this rank has failed.
_OTHER_NODES_SECONDS = 10.0
_LONGEST_HEAD = 200

_PID, _RANK, _SIZE = os.getpid(), MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
reports.title = f"[rank {_RANK}/{_SIZE}] "
watchdog.here.rank, watchdog.here.size = _RANK, _SIZE
# Hydra, MPICH's and Intel MPI's launcher, takes the status of any killed rank for the status of the job.
if MPI.get_vendor()[0] in ("MPICH", "Intel MPI") and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
    watchdog.here.end = MPI.COMM_WORLD.Abort
#: The guards that are watched in this process, with the functions that free them.
_open: dict[Guard, Callable[[], None]] = {}


def watch(guard: Guard, free: Callable[[], None] = lambda: None) -> None:
    """Watch over this process from now on; at its end say goodbye to the peers of `guard`, then `free` with them.

    An uncaught exception ends the job while some watched guard does not contain errors.
    """
    if _SIZE > 1:
        _begin()
        _open[guard] = free
        if not guard.contains_errors:
            guard.give_up = _end_in_call


@functools.cache
def _begin() -> None:
    exit_hooks.prepare()
    sys.excepthook = functools.partial(uncaught, sys.excepthook)
    threading.excepthook = functools.partial(_uncaught_in_thread, threading.excepthook)
    atexit.register(_say_goodbye)


def forget(guard: Guard) -> None:
    """Say no goodbye to the peers of `guard`, whose communicator is closed, and watch it no longer.

    After the last one errors are Python's.
    """
    _open.pop(guard, None)
    watchdog.here.remove(guard)


def _ends_the_job() -> bool:
    """Return whether an error of this rank ends the whole job."""
    return os.getpid() == _PID and any(not guard.contains_errors for guard in _open)


def uncaught(
    before: Callable[..., object], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Take an uncaught error before the hook that there was; as `sys.excepthook`."""
    exit_hooks.add_hints(error)
    is_pythons = hasattr(sys, "ps1") or not _ends_the_job()
    if is_pythons or before not in (sys.__excepthook__, exit_hooks.show):
        before(kind, error, trace)
    if not is_pythons:
        _end(error, "")


def _uncaught_in_thread(before: Callable[[threading.ExceptHookArgs], object], args: threading.ExceptHookArgs) -> None:
    if args.exc_value is None or not _ends_the_job():
        before(args)
    elif not isinstance(args.exc_value, SystemExit):  # it ends only the thread, as always in Python
        _end(args.exc_value, f" in thread {args.thread.name if args.thread else '?'!r}")


# ---------------------------------------------------------------------------------------------------- the job ends


def _abort(status: int, words: str) -> NoReturn:
    """End the job with a status; `words` say why."""
    reports.say(f"{words}: the whole job ends here.")
    for callback in exit_hooks.before_abort:
        callback()
    # MPI_Abort kills the launcher's helpers: output that they have not yet read from our pipes is lost.
    reports.finish()
    if not MPI.Is_finalized():
        MPI.COMM_WORLD.Abort(status)
    # Under srun MPI_Abort may return before Slurm has killed us; nothing of ours may run any more.
    os._exit(status)


def _end(error: BaseException, where: str) -> NoReturn:
    """End the job with an error that was not caught."""
    kind = type(error).__name__
    if isinstance(error, MpiStrategyError) and error._is_printed_elsewhere:
        head = f"{kind}, which another rank prints whole: {error}".partition("\n")[0]
        reports.say(head[:_LONGEST_HEAD])
        time.sleep(_ANOTHER_PRINTS_SECONDS)  # where that rank has caught it, it comes here in whole
    reports.say(in_words(error))
    _abort(status_of(error), f"{kind} was not caught{where}")


def _end_in_call(error: BaseException) -> NoReturn:
    """End the job with an error in a call, which the program has not met yet."""
    reports.say(in_words(error, traceback.extract_stack()))
    _abort(status_of(error) or 1, "It is of this rank alone, in a call for which the other ranks wait")


def in_words(error: BaseException, above: Iterable[traceback.FrameSummary] = ()) -> str:
    """Return the traceback from the program's first frame on; for errors of this package without its own frames.

    Args:
        error: the error.
        above: the frames above, where it is on its way to the program.
    """
    report = traceback.TracebackException(type(error), error, error.__traceback__)
    frames = [*above, *report.stack]
    frames = frames[max((at for at, frame in enumerate(frames, 1) if frame.filename in _RUN), default=0) :]
    program_frames = [frame for frame in frames if not frame.filename.startswith(FOLDER)]
    is_own = bool(above) or isinstance(error, MpiStrategyError | SystemExit)
    if program_frames and not is_on(os.environ.get("MPISTRATEGY_FULL_TRACEBACK", "")):
        report.stack = traceback.StackSummary.from_list(program_frames if is_own else frames)
        report.__suppress_context__ |= is_own and report.__cause__ is None
    return "".join(report.format()).rstrip()


# ------------------------------------------------------------------------------------------------ the program ends


def _say_goodbye() -> None:
    """Wait for the other ranks, and answer ranks that call a collective; end the job with a status of this rank."""
    if os.getpid() != _PID or MPI.Is_finalized():
        return
    _leave_contained()
    status = _status() if _ends_the_job() else 0
    is_due = status and not program.all_leave
    # A background says its own goodbye when it is freed, and none after a failure.
    guards = [guard for guard in _open if not guard.is_in_background and not guard.is_broken]
    for guard in guards:
        guard.start_leaving()
    end, pauses = time.monotonic() + (PATIENCE_SECONDS if is_due else math.inf), growing_pauses()
    while guards and time.monotonic() < end:
        try:
            guards = [guard for guard in guards if not _has_left(guard, status)]
            time.sleep(next(pauses))
        except SystemExit as stop:  # of a signal's handler: this rank stops already, and the others wait for it
            if status_of(stop):
                _abort(status_of(stop), "stopped while it waited for the other ranks")
    # Some rank goes on, or cannot be told: no strategy reaches it.
    if guards or (is_due and all(guard.size < _SIZE for guard in _open if not guard.is_broken)):
        _end_with(status)
    for guard, free in list(_open.items()):
        if guard.is_broken or guard.is_in_background:  # messages may be under way
            watchdog.here.remove(guard)
        else:
            free()


def _has_left(guard: Guard, status: int) -> bool:
    """Return whether this rank need not wait for the peers of `guard` any more; answer peers that call a collective."""
    has_left = guard.is_broken or guard.peers_have_left()
    if has_left is False:
        if status:
            _end_with(status)
        with suppress(MpiStrategyError):  # a rank has failed meanwhile, and raised its error
            guard.tell_peers()
    return bool(has_left)


def _end_with(status: int) -> NoReturn:
    """End the job with the status of this rank's program, for which MPI_Finalize would wait."""
    time.sleep(_FIRST_SPEAKS_SECONDS if _RANK else 0.0)
    reports.say(program.words)
    _abort(status, f"ended with status {status}")


def _status() -> int:
    """Return the status of the program."""
    return status_of(getattr(sys, "last_value", None)) or program.status  # set before any excepthook runs


def _leave_contained() -> None:
    """Tell the peers of strategies that contain errors of an uncaught exception; they raise RemoteError."""
    error = getattr(sys, "last_value", None)
    contained = [guard for guard in _open if guard.contains_errors and not guard.is_broken]
    if error is not None and contained:
        reports.say(
            f"{type(error).__name__} was not caught. The other ranks of its communicator are told, and this one "
            "waits for all ranks of the job in MPI_Finalize. A rank that waits for it in an MPI call of the "
            "program's own goes on waiting: catch the error in the program, as `mpistrategy guide domain` shows."
        )
        for guard in contained:
            guard.break_off("", error)
    end = time.monotonic() + _OTHER_NODES_SECONDS  # for all of them: one that nobody listens to takes it whole
    for guard in _open:
        if not guard.is_in_background:
            guard.tell_of_failure(max(end - time.monotonic(), 0.1))


# --------------------------------------------------------------------------------------- before a strategy is there


def check(where: str, comm: Any = None) -> None:
    """Raise LaunchError on a rank that MPI takes for the only one while a launcher started several.

    Args:
        where: the public name in the error.
        comm: the communicator of a strategy: COMM_SELF is one rank on purpose.
    """
    if comm is None or comm != MPI.COMM_SELF:
        launcher.check_world(_SIZE, library_name(MPI.Get_library_version()), where)


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
        fix="A rank outside the sub-communicator must not make the strategy: write `if comm != MPI.COMM_NULL:`. (After "
        "Free() a communicator is MPI.COMM_NULL, too.)"
        if is_null
        else "",
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
    ranks = MPI.Group.Translate_ranks(comm.group, None, MPI.COMM_WORLD.group)
    watchdog.here.add(watchdog.Group(guard, memory, ranks, node_of, path))


def watch_program() -> int:
    """Make the end of this rank end the job, from now on and with or without a strategy; return its number in the job.

    No rank waits for another.
    """
    watch(Guard())
    return int(_RANK)


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
    guard = Guard(None, ranks.rank, ranks.size)
    watch(guard)
    try:
        if ranks.size > 1 and _SIZE > 1:
            watch_waiting(ranks, guard, private_memory(status_board.BYTES), [0] * ranks.size, new_path())
        with Call(guard, where, anywhere=True):
            # So that an error can interrupt it: MPI's own collectives cannot be interrupted.
            request = ranks.Ibarrier()
            wait_patiently(lambda: request.Test() or None, guard.look)
            yield
    except BaseException as error:  # the others wait for this rank, and nothing tells them
        if guard.give_up is not None and not isinstance(error, MpiStrategyError):
            guard.give_up(error)
        raise
    finally:
        forget(guard)
