"""Whether stderr is a terminal or a file, and how lines and a progress bar share a terminal."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
import threading
from typing import IO

from mpistrategy.mpi.watchdog.local_process import stat_of

_LAUNCHERS = re.compile(r"(mpiexec|mpirun|prterun|orterun|srun|jsrun)(\.\w+)?$")
_MOST_PARENTS = 16
_CLEAR = "\r\x1b[K"

_lock = threading.RLock()
#: What the last line of the terminal shows now: a bar that other lines must not be written into.
_shown: list[str] = []


def say(text: str, stream: IO[str]) -> None:
    """Write whole lines at once; a progress bar on the same terminal stays below them."""
    with _lock:
        if _shown and stream is sys.stderr:
            text = f"{_CLEAR}{text}{_shown[0]}"
        stream.write(text)
        stream.flush()


def show_bar(text: str) -> None:
    """Show a bar in the last line of the terminal, in place of the one before; "" for none."""
    with _lock:
        sys.stderr.write(_CLEAR + text)
        sys.stderr.flush()
        _shown[:] = [text] if text else []


def end_bar(text: str) -> None:
    """Show a bar for the last time, and leave it where it is."""
    with _lock:
        sys.stderr.write(f"{_CLEAR}{text}\n")
        sys.stderr.flush()
        _shown.clear()


def is_watched() -> bool:
    """Return whether what this process writes to stderr is shown on a terminal.

    Under mpiexec stderr is a pipe; the launcher's own stderr decides.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if sys.stderr.isatty():
            return True
        if stat.S_ISFIFO(os.fstat(sys.stderr.fileno()).st_mode):
            return _launcher_has_terminal()
    return False


def _launcher_has_terminal() -> bool:
    process = os.getpid()
    for _ in range(_MOST_PARENTS):
        process = int(stat_of(process)[1])
        if process <= 1:
            return False
        with open(f"/proc/{process}/comm", encoding="utf-8", errors="replace") as file:
            if _LAUNCHERS.match(file.read().strip()):
                return os.readlink(f"/proc/{process}/fd/2").startswith(("/dev/pts/", "/dev/tty"))
    return False
