"""Where a rank reports before it ends the job: to stderr, and past a pytest that captures it.

The plugin `pytest_mpistrategy` is looked up in `sys.modules` and never imported: pytest has loaded it.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from mpistrategy.objects.text import encoded

_LOOK_SECONDS, _FLUSH_SECONDS = 0.01, 0.5
#: How long the launcher may take to forward what it has read.
_FORWARDING_SECONDS = 0.3

#: The beginning of each line: this rank, once MPI has said which it is.
title: str = ""

T = TypeVar("T")


def in_time(work: Callable[[], T], otherwise: T, seconds: float) -> tuple[T, threading.Thread]:
    """Return what `work` returns, or `otherwise` where it raises or takes longer; and the thread that does it."""
    results = [otherwise]

    def quietly() -> None:
        with suppress(Exception):
            results.append(work())

    thread = threading.Thread(target=quietly, name="mpistrategy watchdog's patience", daemon=True)
    with suppress(RuntimeError):  # no thread can be started
        thread.start()
        thread.join(seconds)
    return results[-1], thread


def say(text: str) -> None:
    """Write each line of a text behind the title, to stderr itself: the program may hold or replace that."""
    pytest, data = _captured(), encoded("".join(f"{title}{line}\n" for line in text.splitlines()))
    if pytest is not None and data:
        data = b"\n" + data  # behind pytest's dots
    with suppress(OSError):
        while data:
            data = data[os.write(2 if pytest is None else pytest.stderr, data) :]


def finish(seconds: float = 10.0) -> None:
    """Say which tests have failed, which pytest prints at its end only, and let the launcher read all that was printed.

    Only pipes show what the launcher has read.

    Args:
        seconds: how long the launcher may take.
    """
    pytest, end = _captured(), time.monotonic() + seconds
    if pytest is not None:
        say(str(pytest.failed_tests()))
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            in_time(stream.flush, None, _FLUSH_SECONDS)
    for descriptor in {1, 2 if pytest is None else pytest.stderr}:
        while _unread(descriptor) and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
    time.sleep(_FORWARDING_SECONDS)


def _unread(descriptor: int) -> int:
    import fcntl
    import termios

    with suppress(OSError):
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), sys.byteorder)
    return 0


def _captured() -> Any:
    """Return the plugin's state of this process's pytest, or None."""
    reports = getattr(sys.modules.get("pytest_mpistrategy"), "reports", None)
    return reports if reports is not None and reports.is_of_this_process() else None
