"""The time limit of the doctor: a process that exceeds it says where it waits, and ends."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

#: The exit status when something is bad; a hang counts as bad.
STATUS = 1


class Deadline:
    """Ends this process when its time is over.

    Args:
        seconds: from now on.
        title: the beginning of its last message.

    Attributes:
        stage: what is being done, for the last message.
    """

    def __init__(self, seconds: float, title: str = "") -> None:
        self._end = time.monotonic() + seconds
        self._seconds = seconds
        self._over = threading.Event()
        self.title = title
        self.stage = "looking at this process"
        threading.Thread(target=self._wait, name="mpistrategy doctor's deadline", daemon=True).start()

    @property
    def left(self) -> float:
        """How many seconds are left."""
        return max(0.0, self._end - time.monotonic())

    def met(self) -> None:
        """Say that all is done."""
        self._over.set()

    def _wait(self) -> None:
        if not self._over.wait(self._seconds):
            sys.stdout.flush()
            _say(f"{self.title}mpistrategy doctor: not done after {self._seconds:g} s, while {self.stage}. {_ANY}")
            os._exit(STATUS)


@contextmanager
def starting_mpi(seconds: float, title: str) -> Iterator[None]:
    """End this process when MPI does not start in time.

    MPI holds the interpreter while it starts, so a child process watches the clock.

    Args:
        seconds: from now on.
        title: the beginning of the last message.
    """
    inside, outside = os.pipe()
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads, which the child does not need
        child = os.fork()
    if child == 0:
        try:
            os.close(outside)
            if not select.select([inside], [], [], seconds)[0]:  # else the parent is done, or gone
                _say(f"{title}mpistrategy doctor: MPI has not started after {seconds:g} s. {_NO_START} {_ANY}")
                os.kill(parent, signal.SIGKILL)
        finally:
            os._exit(0)
    os.close(inside)
    try:
        yield
    finally:
        os.close(outside)
        with suppress(ChildProcessError):
            os.waitpid(child, 0)


def _say(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace"))


_ANY = "Does every rank start, on every node? --timeout SECONDS gives them longer."
_NO_START = (
    "Do launcher and MPI library fit together (srun --mpi=list), and can the nodes reach each other? The cluster's own "
    "MPI knows its network: load its module."
)
