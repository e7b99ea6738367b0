"""Python's hooks for uncaught exceptions and exits, in place while strategies that end the job are open.

Python tells nobody of SystemExit: so the functions that raise it are hooks, too, which note the status.

A forked child of a rank must not finalize MPI, which mpi4py does after the last of Python's atexit handlers.  So a
child ends by itself in a handler that its parent has registered with the first strategy: after its own handlers, and in
place of those that are older.
"""

from __future__ import annotations

import atexit
import builtins
import functools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

#: Where Python's functions that raise SystemExit are; `python -S` has only the first.
_EXITS: tuple[tuple[Any, str], ...] = tuple(
    (place, name) for place, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")) if hasattr(place, name)
)
#: Called before this rank ends the job: what other threads have begun must not be lost.
before_abort: list[Callable[[], object]] = []
#: The exit status of a program that Ctrl-C has ended, as in a shell.
INTERRUPTED = 130
#: Python's status where standard output cannot be written.
_NOT_WRITTEN = 120


def status_of(error: BaseException | None) -> int:
    """Return the status of a program that ends with this error; None is a plain end."""
    if isinstance(error, SystemExit):
        code = error.code
        return 0 if code is None else code & 0xFF if isinstance(code, int) else 1
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else int(error is not None)


class ProgramEnd:
    """How the program of this process ends, as far as it is known.

    Attributes:
        status: what `sys.exit` was called with, or what `mpistrategy run` knows.
        words: what there is to say of that.
        known_at: when that was; time.monotonic().
    """

    status: int = 0
    words: str = ""
    known_at: float = 0.0

    def note(self, status: int, words: str = "") -> None:
        """Set the status and the words."""
        self.status, self.words, self.known_at = status, words, time.monotonic()


program: ProgramEnd = ProgramEnd()


def _exit(status: Any = None, /) -> NoReturn:
    """Exit the interpreter by raising SystemExit(status)."""
    exit_now = SystemExit(status)
    if threading.current_thread() is threading.main_thread():
        stack = "".join(traceback.format_stack(sys._getframe(1)))
        words = f"sys.exit({status!r}) was called here (most recent call last):\n{stack}".rstrip()
        program.note(status_of(exit_now), words)
    raise exit_now


class ExitHooks:
    """Reports uncaught exceptions, in any thread, and notes `sys.exit`, from now on.

    A hook that somebody else has wrapped meanwhile cannot be removed; it then only calls the hook before it.

    Args:
        end_job: ends the job with an error that was not caught, and "" or in which thread it was.
    """

    def __init__(self, end_job: Callable[[BaseException, str], object]) -> None:
        self._end_job = end_job
        self._pid = os.getpid()
        self._uncaught_before, self._in_thread_before = sys.excepthook, threading.excepthook
        ours = [(sys, "excepthook", self._uncaught), (threading, "excepthook", self._uncaught_in_thread)]
        ours += [(place, name, _exit) for place, name in _EXITS]
        self._replaced = [(place, name, getattr(place, name), hook) for place, name, hook in ours]
        for place, name, hook in ours:
            setattr(place, name, hook)

    def remove(self) -> None:
        """Restore the hooks that were there before."""
        self._pid = 0
        for place, name, before, ours in self._replaced:
            if getattr(place, name, None) == ours:
                setattr(place, name, before)

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_pythons = hasattr(sys, "ps1") or os.getpid() != self._pid
        if is_pythons or self._uncaught_before is not sys.__excepthook__:
            self._uncaught_before(kind, error, trace)
        if not is_pythons:
            self._end_job(error, "")

    def _uncaught_in_thread(self, args: threading.ExceptHookArgs) -> None:
        if args.exc_value is None or os.getpid() != self._pid:
            self._in_thread_before(args)
        elif not isinstance(args.exc_value, SystemExit):  # it ends only the thread, as always in Python
            self._end_job(args.exc_value, f" in thread {args.thread.name if args.thread else '?'!r}")


@functools.cache
def prepare_for_children() -> None:
    """Let forked children of this process end without MPI_Finalize."""
    atexit.register(_end_child, os.getpid())
    os.register_at_fork(after_in_child=_begin_child)


def _begin_child() -> None:
    program.note(0)
    for place, name in _EXITS:
        setattr(place, name, _exit)


def _end_child(parent: int) -> None:
    """End this process, unless it is the one that has registered this."""
    if os.getpid() == parent:
        return
    status = program.status or status_of(getattr(sys, "last_value", None))
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except Exception:  # of a stream of the program's own, too
            status = _NOT_WRITTEN
    os._exit(status)
