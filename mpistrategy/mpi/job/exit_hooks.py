"""With which status the program of this process ends.

Python has no hook for SystemExit: so from the first strategy on the functions that raise it note the status.

A forked child of a rank must not finalize MPI, which mpi4py does after the last of Python's atexit handlers.  So a
child ends by itself in a handler that its parent has registered with the first strategy: after its own handlers, and in
place of those that are older.
"""

from __future__ import annotations

import atexit
import builtins
import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn

from mpistrategy.mpi.contract import observers

#: Called before this rank ends the job: work of other threads must not be lost.
before_abort: list[Callable[[], object]] = []
#: The exit status of a program that Ctrl-C has ended, as in a shell.
_INTERRUPTED = 130
#: What to write instead, by words of another library's ValueError: its note, if nobody catches it.
hints: dict[str, str] = {}


def add_hints(error: BaseException) -> None:
    """Add to an uncaught error what to write instead."""
    for words, hint in hints.items():
        if isinstance(error, ValueError) and words in str(error) and hint not in getattr(error, "__notes__", ()):
            error.add_note(hint)


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show an uncaught error, and what to write instead; as `sys.excepthook`, before MPI has started."""
    add_hints(error)
    sys.__excepthook__(kind, error, trace)


def status_of(error: BaseException | None) -> int:
    """Return the status of a program that ends with this error; None is a plain end."""
    if isinstance(error, SystemExit):
        code = error.code
        return 0 if code is None else code & 0xFF if isinstance(code, int) else 1
    return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else int(error is not None)


class ProgramEnd:
    """How the program of this process ends, as far as it is known.

    Attributes:
        status: what `sys.exit` was called with, or what `mpistrategy run` knows.
        words: the text to print about the status.
        all_leave: whether the ranks of a strategy have agreed to end their programs now; each then waits for the others
            whatever its status is.
    """

    status: int = 0
    words: str = ""
    all_leave: bool = False

    def note(self, status: int, words: str = "") -> None:
        """Set the status and the words."""
        self.status, self.words = status, words

    def entered(self, guard: object, call: object) -> None:
        """Forget the status where a call begins after the program has caught `sys.exit`; an observer of calls."""
        if not isinstance(sys.exc_info()[1], SystemExit):  # in a finally block it is still under way
            self.note(0)

    def left(self, guard: object, call: object) -> None:
        """Do nothing."""

    def begin(self, kind: str, name: str) -> None:
        """Do nothing."""

    def end(self, token: object) -> None:
        """Do nothing."""


program: ProgramEnd = ProgramEnd()


def _exit(status: Any = None, /) -> NoReturn:
    """Exit the interpreter by raising SystemExit(status)."""
    exit_now = SystemExit(status)
    if threading.current_thread() is threading.main_thread():
        stack = "".join(traceback.format_stack(sys._getframe(1)))
        program.note(status_of(exit_now), f"sys.exit({status!r}) was called here (most recent call last):\n{stack}")
        observers.observers[:] = [*(one for one in observers.observers if one is not program), program]
    raise exit_now


def prepare() -> None:
    """Note exits from now on, and let forked children of this process end without MPI_Finalize."""
    sys.exit = builtins.exit = builtins.quit = _exit  # type: ignore[assignment]
    atexit.register(_end_child, os.getpid())
    os.register_at_fork(after_in_child=lambda: program.note(0))


def _end_child(parent: int) -> None:
    """End this process, unless it has registered this handler."""
    if os.getpid() == parent:
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # of a stream of the program's own, too
            stream.flush()
    os._exit(program.status or status_of(getattr(sys, "last_value", None)))
