"""The end of one rank is the end of the job: no peer is left waiting for a rank that has died.

MPI leaves the others hanging when a Python exception ends one rank.  From the first communicator of several ranks on,
an uncaught exception (in any thread) and a non-zero `sys.exit` abort the whole job, with that rank's traceback; an
orderly end waits for the peers and tells a peer that still calls a collective who has left.
"""

from __future__ import annotations

import atexit
import builtins
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

from mpistrategy.errors import MpiStrategyError
from mpistrategy.mpi.channel import growing_pauses
from mpistrategy.mpi.guard import OF_ANOTHER_RANK, PATIENCE_SECONDS, Guard

#: The status of a program that Ctrl-C has ended, as shells count.
INTERRUPTED = 130
_PACKAGE_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_FORWARDING_SECONDS = 0.2
_FIRST_SECONDS = 0.5
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
        self._bottom = _bottom_frame()

    def status(self) -> int:
        """Return the status with which the program ends, as far as Python lets us know."""
        if self.known_status is not None:
            return self.known_status
        if getattr(sys, "last_value", None) is not None:  # set before any excepthook runs
            return 1
        return self.exit_status if _was_unwound(self._bottom) else 0

    def say(self, text: str) -> None:
        prefix = f"[rank {self.rank}/{self.size}] "
        sys.stdout.flush()
        sys.stderr.write("".join(prefix + line + "\n" for line in text.splitlines()))
        sys.stderr.flush()

    def abort(self, status: int) -> NoReturn:
        # MPI_Abort kills the launcher's helpers, and with them whatever they have not yet read from our pipes.
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
        self.say(f"{kind.__name__} was not caught{where}: {_ENDS}")
        self.abort(INTERRUPTED if issubclass(kind, KeyboardInterrupt) else status)

    def end_untold(self, error: BaseException) -> None:
        stack = traceback.extract_stack()
        theirs = [frame for frame in stack if not frame.filename.startswith(_PACKAGE_FOLDER)]
        lines = ["Traceback (most recent call last):\n", *traceback.format_list(theirs)]
        self.say("".join([*lines, *traceback.format_exception_only(error)]))
        self.say(f"The other ranks compare this call only now and then, and cannot be told: {_ENDS}")
        self.abort(1)


def in_words(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> str:
    """Return the traceback; of an error of ours without the frames inside this package, which say nothing to a user."""
    report = traceback.TracebackException(kind, error, trace)
    theirs = [frame for frame in report.stack if not frame.filename.startswith(_PACKAGE_FOLDER)]
    if isinstance(error, MpiStrategyError | SystemExit) and theirs and not os.environ.get("MPISTRATEGY_FULL_TRACEBACK"):
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
    """Watch over this process from now on; at its end say goodbye to the peers of `guard`, then `free` with them."""
    global _watch
    if _watch is None:
        _watch = _Watch(rank, size, abort, mpi_is_over)
        _install(_watch)
    _watch.open[guard] = free
    guard.give_up = _watch.end_untold


def note_end(status: int, last_words: str = "") -> None:
    """Say with which status the program ends, where somebody knows: `mpistrategy run` does."""
    if _watch is not None:
        _watch.known_status = status
        _watch.last_words = last_words


def forget(guard: Guard) -> None:
    """Say no goodbye to the peers of `guard`: its communicator is closed."""
    if _watch is not None:
        _watch.open.pop(guard, None)


def _install(state: _Watch) -> None:
    previous_hook, previous_thread_hook = sys.excepthook, threading.excepthook

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        alone = _is_interactive() or os.getpid() != state.pid
        if alone or previous_hook is not sys.__excepthook__:
            previous_hook(kind, error, trace)
        if not alone:
            if OF_ANOTHER_RANK in getattr(error, "__dict__", ()):
                time.sleep(_FORWARDING_SECONDS + _FIRST_SECONDS)  # that rank's traceback is the one that tells
            state.end_job(error, kind, trace, "")

    def uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
        if issubclass(args.exc_type, SystemExit):
            return  # ends the thread and nothing else, as always in Python
        if args.exc_value is None or os.getpid() != state.pid:
            previous_thread_hook(args)
        else:
            name = args.thread.name if args.thread is not None else "?"
            state.end_job(args.exc_value, args.exc_type, args.exc_traceback, f" in thread {name!r}")

    sys.excepthook = uncaught
    threading.excepthook = uncaught_in_thread
    _watch_atexit(state)
    _replace_exit(state)
    atexit.register(_say_goodbye, state)


def _watch_atexit(state: _Watch) -> None:
    """Make an exception in an atexit callback end the job: Python only mentions it, and ends with status 0."""
    previous_hook = sys.unraisablehook

    def ignored(args: sys.UnraisableHookArgs) -> None:
        error, kind = args.exc_value, args.exc_type
        code = status_of(error.code) if isinstance(error, SystemExit) else 1
        at_the_end = "atexit callback" in (args.err_msg or "")
        if not at_the_end or error is None or not code or os.getpid() != state.pid or state.mpi_is_over():
            previous_hook(args)
            return
        if previous_hook is not sys.__unraisablehook__:
            previous_hook(args)
        state.end_job(error, kind, args.exc_traceback, " in an atexit callback", code)

    sys.unraisablehook = ignored


def _replace_exit(state: _Watch) -> None:
    """Make `sys.exit`, `exit` and `quit` remember their status: Python tells nobody with which one it ends."""

    def leave(status: Any = None, /) -> NoReturn:
        """Exit the interpreter by raising SystemExit(status)."""
        if threading.current_thread() is threading.main_thread():
            stack = "".join(traceback.format_stack(sys._getframe(1)))
            state.last_words = f"sys.exit({status!r}) was called here (most recent call last):\n{stack}".rstrip()
            state.exit_status = status_of(status)
        raise SystemExit(status)

    sys.exit = leave
    for name in ("exit", "quit"):
        if hasattr(builtins, name):
            setattr(builtins, name, leave)


def _bottom_frame() -> FrameType | None:
    """Return the outermost frame of the main thread: the program itself."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _was_unwound(frame: FrameType | None) -> bool:
    """Return whether a finished frame was left by an exception: its last instruction was no return."""
    import opcode  # here: only a program's end needs it

    if frame is None or frame.f_lasti < 0:
        return True
    return not opcode.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")


def status_of(code: Any) -> int:
    """Return the status of `SystemExit(code)`."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def _say_goodbye(state: _Watch) -> None:
    if os.getpid() != state.pid or state.mpi_is_over():
        return
    status = state.status()
    end = time.monotonic() + (PATIENCE_SECONDS if status else math.inf)
    waiting = list(state.open)
    for guard in waiting:
        guard.start_leaving()
    pauses = growing_pauses()
    while waiting:
        for guard in list(waiting):
            left = guard.peers_have_left()
            if left:
                waiting.remove(guard)
            elif left is False and not status:
                try:
                    guard.tell_peers()
                except MpiStrategyError as error:
                    state.end_job(error, type(error), error.__traceback__, " at the end of the program")
            elif status and (left is False or time.monotonic() > end):
                state.end_with(status)
        time.sleep(next(pauses))
    if status and not any(guard.size == state.size for guard in state.open):
        # No strategy of ours reaches every rank of the job, and MPI_Finalize would wait for the others.
        time.sleep(PATIENCE_SECONDS)
        state.end_with(status)
    for free in list(state.open.values()):
        free()


def _is_interactive() -> bool:
    return hasattr(sys, "ps1")
