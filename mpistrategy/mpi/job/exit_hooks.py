"""Python's hooks for uncaught exceptions and exits, in place while strategies that end the job are open.

A hook that somebody else has wrapped meanwhile cannot be removed; it then only calls the hook before it.
"""

from __future__ import annotations

import builtins
import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn, Protocol

#: The exit status of a program that Ctrl-C has ended, as in a shell.
INTERRUPTED = 130


class Ending(Protocol):
    """What the hooks need to know of this process's end.

    Attributes:
        pid: this process; a forked child is another one.
        mpi_is_over: returns whether MPI has been finalized.
        exit_status: what `sys.exit` was called with.
        last_words: where that was.
    """

    pid: int
    mpi_is_over: Callable[[], bool]
    exit_status: int
    last_words: str

    def end_job(
        self,
        error: BaseException,
        kind: type[BaseException],
        trace: TracebackType | None,
        where: str,
        status: int = 1,
    ) -> None:
        """End the job with an error that was not caught."""


def status_of(code: Any) -> int:
    """Return the status of `SystemExit(code)`."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def exit_that_notes(note: Callable[[Any], None], previous: Callable[[Any], object] | None = None) -> Callable[..., Any]:
    """Return a `sys.exit` that first calls `note` with the status, in the main thread: Python tells nobody.

    `previous`, if given, is called after that; it may raise SystemExit itself.
    """

    def leave(status: Any = None, /) -> NoReturn:
        """Exit the interpreter by raising SystemExit(status)."""
        if threading.current_thread() is threading.main_thread():
            note(status)
        if previous is not None:
            previous(status)
        raise SystemExit(status)

    return leave


class ExitHooks:
    """Reports uncaught exceptions, in any thread, and `sys.exit` to the code that ends the job.

    Args:
        ending: it.
    """

    def __init__(self, ending: Ending) -> None:
        self._ending = ending
        self._before: list[tuple[Any, str, Any, Any]] = []
        self._is_on = False

    def install(self) -> None:
        """Install the hooks, unless they are installed."""
        if self._is_on:
            return
        self._is_on = True
        self._replace(sys, "excepthook", self._uncaught(sys.excepthook))
        self._replace(threading, "excepthook", self._uncaught_in_thread(threading.excepthook))
        self._replace(sys, "unraisablehook", self._ignored(sys.unraisablehook))
        leave = exit_that_notes(self._note_exit)
        self._replace(sys, "exit", leave)
        for name in ("exit", "quit"):
            if hasattr(builtins, name):
                self._replace(builtins, name, leave)

    def remove(self) -> None:
        """Restore the hooks that were there before."""
        self._is_on = False
        for place, name, before, ours in reversed(self._before):
            if getattr(place, name, None) is ours:
                setattr(place, name, before)
        self._before.clear()

    def _replace(self, place: Any, name: str, ours: Any) -> None:
        self._before.append((place, name, getattr(place, name), ours))
        setattr(place, name, ours)

    def _is_ours(self) -> bool:
        return self._is_on and os.getpid() == self._ending.pid

    def _uncaught(self, previous: Callable[..., Any]) -> Callable[..., Any]:
        def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            alone = hasattr(sys, "ps1") or not self._is_ours()
            if alone or previous is not sys.__excepthook__:
                previous(kind, error, trace)
            if not alone:
                self._ending.end_job(error, kind, trace, "")

        return uncaught

    def _uncaught_in_thread(self, previous: Callable[..., Any]) -> Callable[..., Any]:
        def uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
            if issubclass(args.exc_type, SystemExit):
                return  # it ends only the thread, as always in Python
            if args.exc_value is None or not self._is_ours():
                previous(args)
            else:
                name = args.thread.name if args.thread is not None else "?"
                self._ending.end_job(args.exc_value, args.exc_type, args.exc_traceback, f" in thread {name!r}")

        return uncaught_in_thread

    def _ignored(self, previous: Callable[..., Any]) -> Callable[..., Any]:
        """Make an exception in an atexit callback end the job: Python merely prints it, and ends with status 0."""

        def ignored(args: sys.UnraisableHookArgs) -> None:
            error, kind = args.exc_value, args.exc_type
            code = status_of(error.code) if isinstance(error, SystemExit) else 1
            at_the_end = "atexit callback" in (args.err_msg or "")
            if not at_the_end or error is None or not code or not self._is_ours() or self._ending.mpi_is_over():
                previous(args)
                return
            if previous is not sys.__unraisablehook__:
                previous(args)
            self._ending.end_job(error, kind, args.exc_traceback, " in an atexit callback", code)

        return ignored

    def _note_exit(self, status: Any) -> None:
        if self._is_on:
            stack = "".join(traceback.format_stack(sys._getframe(2)))
            self._ending.last_words = f"sys.exit({status!r}) was called here (most recent call last):\n{stack}".rstrip()
            self._ending.exit_status = status_of(status)
