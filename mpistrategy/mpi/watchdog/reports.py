"""Where a rank reports before it ends the job: to stderr, and past a pytest that captures it.

The plugin `pytest_mpistrategy` is looked up in `sys.modules` and never imported: pytest has loaded it.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from contextlib import suppress
from typing import Any

from mpistrategy.objects.text import encoded

_LOOK_SECONDS = 0.01


def write_at_once(text: str) -> None:
    """Write a report to stderr itself: the program may hold the lock of sys.stderr, or have replaced it."""
    pytest, data = _captured(), encoded(text)
    if pytest is not None and data:
        data = b"\n" + data  # behind pytest's dots
    with suppress(OSError):
        while data:
            data = data[os.write(2 if pytest is None else pytest.stderr, data) :]


def wait_until_read(seconds: float = 10.0) -> None:
    """Wait until the launcher has read this process's output; only pipes show that."""
    pytest, end = _captured(), time.monotonic() + seconds
    for descriptor in {1, 2 if pytest is None else pytest.stderr}:
        while _unread(descriptor) and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)


def _unread(descriptor: int) -> int:
    import fcntl
    import termios

    with suppress(OSError):
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), sys.byteorder)
    return 0


def failed_tests() -> str:
    """Return which tests have failed on this rank so far; "" without any.  pytest prints them at its end only."""
    pytest = _captured()
    return "" if pytest is None else str(pytest.failed_tests())


def _captured() -> Any:
    """Return the plugin's state of this process's pytest, or None."""
    reports = getattr(sys.modules.get("pytest_mpistrategy"), "reports", None)
    return reports if reports is not None and reports.is_of_this_process() else None
