"""The end of a forked child of a rank: that of any program, but without MPI_Finalize, which only its parent may call.

mpi4py finalizes MPI after the last of Python's atexit handlers, where no Python runs any more.  So a child ends by
itself in a handler that its parent has registered when the first strategy was made: after its own handlers, and in
place of those that are older.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys

from mpistrategy.mpi.job.exit_hooks import EXITS, ProgramEnd, exit_that_notes

#: Python's status where standard output cannot be written.
_NOT_WRITTEN = 120
_UNKNOWN = (
    "mpistrategy: a forked child was left by a SystemExit that was not raised by sys.exit; with which status cannot be "
    "known in a child of a rank, and it ends with 1\n"
)

#: Of this process, if it is a forked child.
_child: ProgramEnd | None = None


@functools.cache
def prepare() -> None:
    """Prepare for the children of this program; MPI runs."""
    atexit.register(_end)
    os.register_at_fork(after_in_child=_follow)


def _follow() -> None:
    """Prepare for the end of this process, which has just been forked."""
    global _child
    _child = ProgramEnd()
    for place, name in EXITS:
        if hasattr(place, name):
            setattr(place, name, exit_that_notes(_child.note_exit, getattr(place, name)))


def note(status: int) -> None:
    """Set the exit status of the program, if this process is a forked child."""
    if _child is not None:
        _child.known_status = status


def _end() -> None:
    """End this process, if it is a forked child and Python has its handlers run, not the program."""
    if _child is None or sys._getframe().f_back is not None:
        return
    status = _child.status()
    if status is None:
        os.write(2, _UNKNOWN.encode())
        status = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except Exception:  # of a stream of the program's own, too
            status = _NOT_WRITTEN
    os._exit(status)
