"""The end of a forked child of a rank: that of any program, but without MPI_Finalize, which only its parent may call.

mpi4py finalizes MPI after the last of Python's atexit handlers, where no Python runs any more.  So a child ends by
itself once all handlers have run.  With which status, Python tells no handler: it is 0 where the program has come to
its last line, 1 after an exception that was not caught, what `sys.exit` was called with, or what `mpistrategy run`
says.  After a ``raise SystemExit(...)`` it is not known: it is 1, and the child says so.
"""

from __future__ import annotations

import atexit
import builtins
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from mpistrategy.mpi.contract import forks
from mpistrategy.mpi.job.exit_hooks import INTERRUPTED, exit_that_notes, status_of

#: Python's status where standard output cannot be written.
_NOT_WRITTEN = 120
_UNKNOWN = (
    "mpistrategy: a forked child was left by a SystemExit that was not raised by sys.exit; with which status cannot be "
    "known in a child of a rank, and it ends with 1\n"
)


class _Child:
    """What this process, a forked child, knows about its own end."""

    def __init__(self) -> None:
        self.known_status: int | None = None
        self.exit_status: int | None = None
        self._last_value = getattr(sys, "last_value", None)
        self._bottom = sys._getframe()
        while self._bottom.f_back is not None:
            self._bottom = self._bottom.f_back

    def status(self) -> int:
        """Return the status with which the program ends, as far as Python lets us know."""
        if self.known_status is not None:
            return self.known_status
        error = getattr(sys, "last_value", None)  # set before any excepthook runs
        if error is not None and error is not self._last_value:
            return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        if not was_unwound(self._bottom):
            return 0
        if self.exit_status is None:
            os.write(2, _UNKNOWN.encode())
            return 1
        return self.exit_status


_child: _Child | None = None
_notes_exits = False


def prepare() -> None:
    """Prepare for children that are forked by an atexit handler of this program."""
    atexit.register(_end_late)


def follow() -> None:
    """Prepare for the end of this process, which has just been forked."""
    global _child, _notes_exits
    atexit.unregister(_end)  # the parent's, when it is a child, too
    _child = _Child()
    atexit.register(_end, _child)
    if not _notes_exits:
        _notes_exits = True
        for place, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
            if hasattr(place, name):
                setattr(place, name, exit_that_notes(_note_exit, getattr(place, name)))


def note(status: int) -> None:
    """Set the exit status of the program, if this process is a forked child."""
    if _child is not None:
        _child.known_status = status


def was_unwound(frame: FrameType | None) -> bool:
    """Return whether a finished frame was left by an exception: its last instruction was no return."""
    import opcode  # here: only a program's end needs it

    if frame is None or frame.f_lasti < 0:
        return True
    return not opcode.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")


def _note_exit(status: Any) -> None:
    if _child is not None:
        _child.exit_status = status_of(status)


def _end(child: _Child) -> None:
    """End this process after the other handlers; those that were registered after the fork have run."""
    if sys._getframe().f_back is not None:
        return  # the program has its handlers run, and will end without Python's help
    try:
        _unregister_newer()
        atexit.unregister(_end)
        atexit.unregister(_end_late)
        atexit._run_exitfuncs()
    finally:
        _leave(child)


class _Equal:
    """Equal to chosen handlers; `atexit.unregister` compares every handler with its argument."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, is_meant: Callable[[object], bool | None]) -> None:
        self._is_meant = is_meant

    def __eq__(self, handler: object) -> bool:
        return bool(self._is_meant(handler))


def _unregister_newer() -> None:
    """Unregister the handlers that were registered after `_end`; Pythons differ in which they compare first."""
    atexit.register(_newest)
    handlers: list[object] = []
    atexit.unregister(_Equal(handlers.append))  # type: ignore[arg-type]
    place = next(number for number, handler in enumerate(handlers) if handler is _end)
    newest_first = handlers[0] is _newest
    are_newer = iter([number < place if newest_first else number > place for number in range(len(handlers))])
    atexit.unregister(_Equal(lambda _: next(are_newer)))  # type: ignore[arg-type]


def _newest() -> None:
    """Mark the newest handler."""


def _end_late() -> None:
    if _child is not None and sys._getframe().f_back is None:
        _leave(_child)


def _leave(child: _Child) -> NoReturn:
    status = child.status()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except Exception:  # of a stream of the program's own, too
            status = _NOT_WRITTEN
    os._exit(status)


forks.before_forks.append(prepare)
forks.in_children.append(follow)
