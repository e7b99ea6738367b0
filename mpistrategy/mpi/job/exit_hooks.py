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
from typing import Any, NoReturn

#: Where Python's functions that raise SystemExit are; `python -S` has only the first.
EXITS: tuple[tuple[Any, str], ...] = ((sys, "exit"), (builtins, "exit"), (builtins, "quit"))
#: The exit status of a program that Ctrl-C has ended, as in a shell.
INTERRUPTED = 130


def status_of(code: Any) -> int:
    """Return the status of `SystemExit(code)`."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


class ProgramEnd:
    """With which status the program of this process ends, as far as Python lets it be known in an atexit handler.

    Attributes:
        known_status: what `mpistrategy run` says, which knows it.
        exit_status: what `sys.exit` was called with; None for no call.
        last_words: where that was.
    """

    def __init__(self) -> None:
        self.known_status: int | None = None
        self.exit_status: int | None = None
        self.last_words: str = ""
        self._last_value = getattr(sys, "last_value", None)
        self._bottom = sys._current_frames().get(threading.main_thread().ident or 0)
        while self._bottom is not None and self._bottom.f_back is not None:
            self._bottom = self._bottom.f_back

    def note_exit(self, status: Any) -> None:
        """Note a call of `sys.exit`; the program may still catch the exception."""
        stack = "".join(traceback.format_stack(sys._getframe(2)))
        self.last_words = f"sys.exit({status!r}) was called here (most recent call last):\n{stack}".rstrip()
        self.exit_status = status_of(status)

    def status(self) -> int | None:
        """Return the status; None where it is that of a SystemExit that `sys.exit` has not raised."""
        if self.known_status is not None:
            return self.known_status
        error = getattr(sys, "last_value", None)  # set before any excepthook runs
        if error is not None and error is not self._last_value:
            return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        return self.exit_status if self._was_unwound() else 0

    def _was_unwound(self) -> bool:
        """Return whether the program was left by an exception: its last instruction was no return."""
        import opcode  # here: only a program's end needs it

        frame = self._bottom
        if frame is None or frame.f_lasti < 0:
            return True
        return not opcode.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")


def exit_that_notes(note: Callable[[Any], None], previous: Callable[[Any], object]) -> Callable[..., Any]:
    """Return a `sys.exit` that first calls `note` with the status, in the main thread: Python tells nobody."""

    def leave(status: Any = None, /) -> NoReturn:
        """Exit the interpreter by raising SystemExit(status)."""
        if threading.current_thread() is threading.main_thread():
            note(status)
        previous(status)
        raise SystemExit(status)

    return leave


class ExitHooks:
    """Reports uncaught exceptions, in any thread, and `sys.exit` to the code that ends the job, from now on.

    Args:
        program: is told of `sys.exit`.
        end_job: ends the job with an error that was not caught, and "" or in which thread it was.
    """

    def __init__(self, program: ProgramEnd, end_job: Callable[[BaseException, str], object]) -> None:
        self._end_job = end_job
        self._pid = os.getpid()
        self._is_on = True
        self._uncaught_before = sys.excepthook
        self._in_thread_before = threading.excepthook
        leave = exit_that_notes(program.note_exit, sys.exit)
        ours: list[tuple[Any, str, Callable[..., Any]]] = [
            (sys, "excepthook", self._uncaught),
            (threading, "excepthook", self._uncaught_in_thread),
            *((place, name, leave) for place, name in EXITS if hasattr(place, name)),
        ]
        self._replaced = [(place, name, getattr(place, name), hook) for place, name, hook in ours]
        for place, name, hook in ours:
            setattr(place, name, hook)

    def remove(self) -> None:
        """Restore the hooks that were there before."""
        self._is_on = False
        for place, name, before, ours in self._replaced:
            if getattr(place, name, None) == ours:
                setattr(place, name, before)

    def _is_ours(self) -> bool:
        return self._is_on and os.getpid() == self._pid

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        alone = hasattr(sys, "ps1") or not self._is_ours()
        if alone or self._uncaught_before is not sys.__excepthook__:
            self._uncaught_before(kind, error, trace)
        if not alone:
            self._end_job(error, "")

    def _uncaught_in_thread(self, args: threading.ExceptHookArgs) -> None:
        if issubclass(args.exc_type, SystemExit):
            return  # it ends only the thread, as always in Python
        if args.exc_value is None or not self._is_ours():
            self._in_thread_before(args)
        else:
            name = args.thread.name if args.thread is not None else "?"
            self._end_job(args.exc_value, f" in thread {name!r}")
