"""Nothing here hangs: a process that is not done in time says where it waits, and ends."""

from __future__ import annotations

import os
import sys
import threading
import time

#: The exit status of a doctor that found something bad; a hang is.
STATUS = 1


class Deadline:
    """Ends this process when it is not done in time.

    Args:
        seconds: from now on.
        title: what its last words begin with.

    Attributes:
        stage: what is being done, in words: the last words say so.
    """

    def __init__(self, seconds: float, title: str = "") -> None:
        self._end = time.monotonic() + seconds
        self._seconds = seconds
        self._over = threading.Event()
        self.title = title
        self.stage = "starting MPI"
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
            text = (
                f"{self.title}mpistrategy doctor: not done after {self._seconds:g} s, while {self.stage}. "
                f"{_CURES.get(self.stage, _ANY)}\n"
            )
            sys.stdout.flush()
            os.write(2, text.encode(errors="replace"))
            os._exit(STATUS)


_ANY = "Does every rank start, on every node? --timeout SECONDS gives them longer."
_CURES = {
    "starting MPI": "MPI_Init does not come back: do launcher and MPI library fit together (srun --mpi=list), and can "
    "the nodes reach each other? An MPI of the cluster's own knows its network: load its module. " + _ANY
}
