"""The time limit of the doctor: a process that exceeds it says where it waits, and ends."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress

from mpistrategy.objects.text import encoded

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


def _say(text: str) -> None:
    with suppress(OSError):
        os.write(2, encoded(f"{text}\n"))


_ANY = "Does every rank start, on every node? --timeout SECONDS gives them longer."
