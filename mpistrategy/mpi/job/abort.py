"""The end of one rank is the end of the job: no peer is left waiting for a rank that has died.

MPI leaves the others hanging when a Python exception ends one rank.  From the first communicator of several ranks on,
an uncaught exception (in any thread) and a non-zero `sys.exit` abort the whole job, with that rank's traceback; an
orderly end waits for the peers and tells a peer that still calls a collective who has left.  All of this ends with the
last strategy.  A strategy that contains errors (`on_error="raise"`) ends only itself.  Under `mpistrategy run` errors
abort the job from the first line of the program to its end, whatever strategies there are.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from mpistrategy.errors import MpiStrategyError
from mpistrategy.mpi.contract.channel import growing_pauses
from mpistrategy.mpi.contract.failures import PATIENCE_SECONDS
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.job import child_exit
from mpistrategy.mpi.job.exit_hooks import INTERRUPTED, ExitHooks, ProgramEnd, status_of
from mpistrategy.mpi.watchdog import reports, watchdog
from mpistrategy.options import is_on

_PACKAGE_FOLDER = os.path.join(os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..")), "")
_FORWARDING_SECONDS = 0.2
#: Of ranks that end with a status at the same time, the first one says so and ends the job before the others do.
_FIRST_SPEAKS_SECONDS = 0.5
#: How long a rank waits for another one that prints its error; how long for others that print different ones.
_ANOTHER_PRINTS_SECONDS, _OTHERS_PRINT_SECONDS = 2.0, 0.5
_LONGEST_HEAD = 200
_ENDS = "the whole job ends here."
#: Called before this rank ends the job: what other threads have begun must not be lost.
before_abort: list[Callable[[], object]] = []


class _Watch:
    """What this process knows about its own end."""

    def __init__(self, rank: int, size: int, abort: Callable[[int], Any], mpi_is_over: Callable[[], bool]) -> None:
        self.rank, self.size, self._abort, self.mpi_is_over = rank, size, abort, mpi_is_over
        self.open: dict[Guard, Callable[[], None]] = {}
        #: Whether all of the program is watched, with and without strategies.
        self.is_of_program = False
        #: Whether all ranks had agreed to end when a strategy of all of them was closed.
        self.all_leave = False
        self.program = ProgramEnd()
        self.pid = os.getpid()
        self.hooks: ExitHooks | None = None

    def install_hooks(self) -> None:
        """Have uncaught exceptions and `sys.exit` reported, unless they are."""
        self.hooks = self.hooks or ExitHooks(self.program, self.end_job)

    def ends_the_job(self) -> bool:
        """Return whether an error of this rank is one of the whole job."""
        return self.is_of_program or any(not guard.contains_errors for guard in self.open)

    def say(self, text: str) -> None:
        prefix = f"[rank {self.rank}/{self.size}] "
        sys.stdout.flush()
        sys.stderr.flush()
        # To the descriptor: torch calls excepthooks with a buffer as sys.stderr, which would end with this process.
        reports.write_at_once("".join(prefix + line + "\n" for line in text.splitlines()))

    def abort(self, status: int) -> NoReturn:
        for each in before_abort:
            each()
        if failed := reports.failed_tests():
            self.say(failed)
        # MPI_Abort kills the launcher's helpers: output that they have not yet read from our pipes is lost.
        reports.wait_until_read()
        time.sleep(_FORWARDING_SECONDS)
        if not self.mpi_is_over():
            self._abort(status)
        # Under srun MPI_Abort may return before Slurm has killed us; nothing of ours may run any more.
        os._exit(status)

    def end_with(self, status: int, others: str = " while other ranks go on") -> NoReturn:
        self.say(self.program.last_words)
        self.say(f"ended with status {status}{others}: {_ENDS}")
        self.abort(status)

    def end_job(self, error: BaseException, where: str) -> None:
        kind = type(error)
        if isinstance(error, MpiStrategyError) and error._is_printed_elsewhere:
            head = f"{kind.__name__}, which another rank prints whole: {error}".partition("\n")[0]
            self.say(head[:_LONGEST_HEAD])
            time.sleep(_ANOTHER_PRINTS_SECONDS)  # where that rank has caught it, it comes here in whole
        self.say(in_words(error, error.__traceback__))
        self.say(f"{kind.__name__} was not caught{where}: {_ENDS}")
        if isinstance(error, MpiStrategyError) and error._is_one_of_several:
            time.sleep(_OTHERS_PRINT_SECONDS)
        self.abort(INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)

    def end_untold(self, error: BaseException) -> None:
        stack = [*traceback.extract_stack(), *traceback.extract_tb(error.__traceback__)]
        theirs = [frame for frame in stack if not frame.filename.startswith(_PACKAGE_FOLDER)]
        lines = ["Traceback (most recent call last):\n", *traceback.format_list(theirs)]
        self.say("".join([*lines, *traceback.format_exception_only(error)]))
        self.say(f"The ranks had agreed on this call, and the others cannot be told of the error: {_ENDS}")
        self.abort(1)


def in_words(error: BaseException, trace: TracebackType | None) -> str:
    """Return the traceback; for errors of this package without its own frames, which do not help a user."""
    report = traceback.TracebackException(type(error), error, trace)
    theirs = [frame for frame in report.stack if not frame.filename.startswith(_PACKAGE_FOLDER)]
    if (
        isinstance(error, MpiStrategyError | SystemExit)
        and theirs
        and not is_on(os.environ.get("MPISTRATEGY_FULL_TRACEBACK", ""))
    ):
        report.stack = traceback.StackSummary.from_list(theirs)
        if report.__cause__ is None:
            report.__suppress_context__ = True
    return "".join(report.format()).rstrip()


_watch: _Watch | None = None


def watch(
    guard: Guard,
    free: Callable[[], None],
    rank: int,
    size: int,
    abort: Callable[[int], Any],
    mpi_is_over: Callable[[], bool],
) -> None:
    """Watch over this process from now on; at its end say goodbye to the peers of `guard`, then `free` with them.

    What is not caught ends the job while some guard is watched that does not contain errors.
    """
    state = _watch_of_this_process(rank, size, abort, mpi_is_over)
    state.open[guard] = free
    if not guard.contains_errors:
        state.install_hooks()
        guard.give_up = state.end_untold


def watch_program(rank: int, size: int, abort: Callable[[int], Any], mpi_is_over: Callable[[], bool]) -> None:
    """Watch over this process to its end: what is not caught ends the job, with and without strategies."""
    state = _watch_of_this_process(rank, size, abort, mpi_is_over)
    state.is_of_program = True
    state.install_hooks()


def _watch_of_this_process(
    rank: int, size: int, abort: Callable[[int], Any], mpi_is_over: Callable[[], bool]
) -> _Watch:
    global _watch
    child_exit.prepare()
    if _watch is None:
        _watch = _Watch(rank, size, abort, mpi_is_over)
        atexit.register(_say_goodbye, _watch)
    return _watch


def note_end(status: int, last_words: str = "") -> None:
    """Set the status with which the program ends; `mpistrategy run` knows it."""
    child_exit.note(status)
    if _watch is not None:
        _watch.program.known_status = status
        _watch.program.last_words = last_words


def forget(guard: Guard) -> None:
    """Say no goodbye to the peers of `guard`: its communicator is closed.  The last one gives Python's hooks back."""
    global _watch
    if _watch is None or os.getpid() != _watch.pid or _watch.open.pop(guard, None) is None:
        return
    _watch.all_leave |= guard.all_leave and guard.size == _watch.size
    if _watch.hooks is not None and not _watch.ends_the_job():
        _watch.hooks.remove()
        _watch.hooks = None
    if not _watch.open and not _watch.is_of_program:
        atexit.unregister(_say_goodbye)
        _watch = None


def _say_goodbye(state: _Watch) -> None:
    if os.getpid() != state.pid or state.mpi_is_over():
        return
    _leave_contained(state)
    status = (state.program.status() or 0) if state.ends_the_job() else 0
    all_leave = state.all_leave or any(guard.all_leave for guard in state.open)
    end = time.monotonic() + (PATIENCE_SECONDS if status and not all_leave else math.inf)
    # The engine of a strategy says its own goodbye when that is freed, and none after a failure.
    waiting = [guard for guard in state.open if not guard.is_in_background and (guard.is_untold or not guard.is_broken)]
    for guard in waiting:
        if not guard.has_begun_to_leave:
            guard.start_leaving()
        guard.leaving = True
    pauses = growing_pauses()
    while waiting:
        try:
            for guard in list(waiting):
                left = (guard.is_broken and not guard.is_untold) or guard.peers_have_left()
                if left:
                    waiting.remove(guard)
                elif left is False and not status:
                    _tell_peers(state, guard)
                elif status and (left is False or time.monotonic() > end):
                    state.end_with(status)
            time.sleep(next(pauses))
        except SystemExit as stop:  # of a signal's handler: this rank stops already
            if status_of(stop.code):
                raise
    is_untold = any(guard.is_untold for guard in state.open)
    if status and not all_leave and (is_untold or not any(guard.size == state.size for guard in state.open)):
        # Some rank cannot be told: no strategy reaches it, or it is in a call.  MPI_Finalize would wait for it.
        time.sleep(PATIENCE_SECONDS + (_FIRST_SPEAKS_SECONDS if state.rank else 0.0))
        state.end_with(status, "")
    for guard, free in list(state.open.items()):
        if guard.is_broken or guard.is_in_background:  # messages may be under way
            watchdog.forget(guard)
        else:
            free()


def _tell_peers(state: _Watch, guard: Guard) -> None:
    try:
        guard.tell_peers()
    except MpiStrategyError as error:
        if not guard.is_broken:  # else the rank that failed while its peers were told has raised its own error
            state.end_job(error, " at the end of the program")


def _leave_contained(state: _Watch) -> None:
    """Tell the peers of strategies that contain errors of one that was not caught; they raise RemoteError."""
    error = getattr(sys, "last_value", None)
    contained = [guard for guard in state.open if guard.contains_errors and not guard.is_broken]
    if error is None or not contained:
        return
    state.say(
        f"{type(error).__name__} was not caught. The other ranks of its communicator are told, and this one waits for "
        "all ranks of the job in MPI_Finalize. A rank that waits for it in an MPI call of the program's own goes on "
        "waiting: catch the error in the program, as `mpistrategy guide ending` shows."
    )
    for guard in contained:
        guard.break_off("", error)
