"""The end of one rank is the end of the job: no peer is left waiting for a rank that has died.

MPI leaves the others hanging when a Python exception ends one rank.  From the first communicator of several ranks on,
an uncaught exception (in any thread) and a non-zero `sys.exit` abort the whole job, with that rank's traceback; an
orderly end waits for the peers and tells a peer that still calls a collective who has left.  All of this ends with the
last strategy.  A strategy that contains errors (`on_error="raise"`) ends only itself.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from mpistrategy.errors import MpiStrategyError
from mpistrategy.mpi.contract.channel import growing_pauses
from mpistrategy.mpi.contract.error_messages import PATIENCE_SECONDS
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.job import child_exit
from mpistrategy.mpi.job.exit_hooks import INTERRUPTED, ExitHooks
from mpistrategy.objects.later import later
from mpistrategy.options import is_on

if TYPE_CHECKING:
    from mpistrategy.mpi.watchdog import error_files, reports
else:
    later(globals(), "mpistrategy.mpi.watchdog.error_files")
    later(globals(), "mpistrategy.mpi.watchdog.reports")

_PACKAGE_FOLDER = os.path.join(os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..")), "")
_FORWARDING_SECONDS = 0.2
_ENDS = "the whole job ends here."


class _Watch:
    """What this process knows about its own end."""

    def __init__(self, rank: int, size: int, abort: Callable[[int], Any], mpi_is_over: Callable[[], bool]) -> None:
        self.rank, self.size, self._abort, self.mpi_is_over = rank, size, abort, mpi_is_over
        self.open: dict[Guard, Callable[[], None]] = {}
        self.exit_status = 0
        self.known_status: int | None = None
        self.last_words = ""
        self.pid = os.getpid()
        self.hooks = ExitHooks(self)
        self._bottom = _bottom_frame()

    def status(self) -> int:
        """Return the status with which the program ends, as far as Python lets us know."""
        if self.known_status is not None:
            return self.known_status
        if getattr(sys, "last_value", None) is not None:  # set before any excepthook runs
            return 1
        return self.exit_status if child_exit.was_unwound(self._bottom) else 0

    def say(self, text: str) -> None:
        prefix = f"[rank {self.rank}/{self.size}] "
        sys.stdout.flush()
        sys.stderr.flush()
        # To the descriptor: torch calls excepthooks with a buffer as sys.stderr, which would end with this process.
        reports.write_at_once("".join(prefix + line + "\n" for line in text.splitlines()))

    def abort(self, status: int) -> NoReturn:
        if failed := reports.failed_tests():
            self.say(failed)
        # MPI_Abort kills the launcher's helpers: output that they have not yet read from our pipes is lost.
        reports.wait_until_read()
        time.sleep(_FORWARDING_SECONDS)
        if not self.mpi_is_over():
            self._abort(status)
        # Under srun MPI_Abort may return before Slurm has killed us; nothing of ours may run any more.
        os._exit(status)

    def end_with(self, status: int) -> NoReturn:
        self.say(self.last_words)
        self.say(f"ended with status {status} while other ranks go on: {_ENDS}")
        self.abort(status)

    def end_job(
        self,
        error: BaseException,
        kind: type[BaseException],
        trace: TracebackType | None,
        where: str,
        status: int = 1,
    ) -> None:
        self.say(in_words(kind, error, trace))
        if path := error_files.write(error, self.rank):
            self.say(f"The error as data: {path}")
        self.say(f"{kind.__name__} was not caught{where}: {_ENDS}")
        self.abort(INTERRUPTED if issubclass(kind, KeyboardInterrupt) else status)

    def end_untold(self, error: BaseException) -> None:
        stack = traceback.extract_stack()
        theirs = [frame for frame in stack if not frame.filename.startswith(_PACKAGE_FOLDER)]
        lines = ["Traceback (most recent call last):\n", *traceback.format_list(theirs)]
        self.say("".join([*lines, *traceback.format_exception_only(error)]))
        self.say(f"The other ranks may wait for data of this rank, and cannot be told: {_ENDS}")
        self.abort(1)


def in_words(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> str:
    """Return the traceback; for errors of this package without its own frames, which do not help a user."""
    report = traceback.TracebackException(kind, error, trace)
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
    global _watch
    if _watch is None:
        _watch = _Watch(rank, size, abort, mpi_is_over)
        atexit.register(_say_goodbye, _watch)
    _watch.open[guard] = free
    if not guard.contains_errors:
        _watch.hooks.install()
        guard.give_up = _watch.end_untold


def note_end(status: int, last_words: str = "") -> None:
    """Set the status with which the program ends; `mpistrategy run` knows it."""
    child_exit.note(status)
    if _watch is not None:
        _watch.known_status = status
        _watch.last_words = last_words


def forget(guard: Guard) -> None:
    """Say no goodbye to the peers of `guard`: its communicator is closed.  The last one gives Python's hooks back."""
    global _watch
    if _watch is None or os.getpid() != _watch.pid or _watch.open.pop(guard, None) is None:
        return
    if all(other.contains_errors for other in _watch.open):
        _watch.hooks.remove()
    if not _watch.open:
        atexit.unregister(_say_goodbye)
        _watch = None


def _bottom_frame() -> FrameType | None:
    """Return the outermost frame of the main thread: the program itself."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _say_goodbye(state: _Watch) -> None:
    if os.getpid() != state.pid or state.mpi_is_over():
        return
    _leave_contained(state)
    status = state.status() if any(not guard.contains_errors for guard in state.open) else 0
    all_leave = any(guard.all_leave for guard in state.open)
    end = time.monotonic() + (PATIENCE_SECONDS if status and not all_leave else math.inf)
    waiting = [guard for guard in state.open if not guard.is_broken]
    for guard in waiting:
        guard.start_leaving()
    pauses = growing_pauses()
    while waiting:
        for guard in list(waiting):
            left = guard.is_broken or guard.peers_have_left()
            if left:
                waiting.remove(guard)
            elif left is False and not status:
                try:
                    guard.tell_peers()
                except MpiStrategyError as error:
                    if guard.is_broken:  # the rank that failed while its peers were told has raised its own error
                        continue
                    state.end_job(error, type(error), error.__traceback__, " at the end of the program")
            elif status and (left is False or time.monotonic() > end):
                state.end_with(status)
        time.sleep(next(pauses))
    is_untold = any(guard.is_untold for guard in state.open)
    if status and not all_leave and (is_untold or not any(guard.size == state.size for guard in state.open)):
        # Some rank cannot be told: no strategy reaches it, or it is in a call.  MPI_Finalize would wait for it.
        time.sleep(PATIENCE_SECONDS)
        state.end_with(status)
    for guard, free in list(state.open.items()):
        if not guard.is_broken:  # messages may be under way
            free()


def _leave_contained(state: _Watch) -> None:
    """Tell the peers of strategies that contain errors of one that was not caught; they raise RemoteError."""
    error = getattr(sys, "last_value", None)
    contained = [guard for guard in state.open if guard.contains_errors and not guard.is_broken]
    if error is None or not contained:
        return
    state.say(
        f"{type(error).__name__} was not caught. The other ranks of its communicator are told, and this one waits for "
        "all ranks of the job in MPI_Finalize."
    )
    for guard in contained:
        guard.leave_with(error)
