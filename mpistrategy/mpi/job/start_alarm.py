"""Ends a rank whose MPI does not start in time, and says which ranks of its node have not come.

``MPI_Init`` waits for all ranks, holds the interpreter, and runs no Python handler of a signal: neither a thread nor a
handler can speak.  A timer of the C library can: it runs a command (``system``), later it ends the process (``_exit``).
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

#: Between what is said and the end of the process.
_GRACE_SECONDS = 4.0
_MONOTONIC, _CALL_FUNCTION = 1, 2  # CLOCK_MONOTONIC, SIGEV_THREAD


class _Event(ctypes.Structure):
    """What a timer does: ``struct sigevent`` of 64-bit Linux."""

    _fields_ = [
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("kind", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("rest", ctypes.c_char * 32),
    ]


class _When(ctypes.Structure):
    """``struct itimerspec``: the interval, and when it comes first."""

    _fields_ = [("interval", ctypes.c_long * 2), ("first", ctypes.c_long * 2)]


@contextmanager
def alarm(seconds: float, command: str, status: int) -> Iterator[None]:
    """Run a shell command after so many seconds, and end this process a little later; nothing where it ends sooner.

    It works while the interpreter is held.  Where the system has no such timers nothing happens.

    Args:
        seconds: from now on; infinity for never.
        command: for the shell.
        status: the exit status.
    """
    timers: list[ctypes.c_void_p] = []
    text = ctypes.create_string_buffer(os.fsencode(command))
    library: Any = None
    if math.isfinite(seconds) and sys.platform == "linux" and ctypes.sizeof(ctypes.c_void_p) == 8:
        with suppress(OSError, AttributeError):
            library = _library()
            timers.append(_timer(library, library.system, ctypes.addressof(text), seconds))
            timers.append(_timer(library, library._exit, status, seconds + _GRACE_SECONDS))
    try:
        yield
    finally:
        for timer in timers:
            library.timer_delete(timer)


def _library() -> Any:
    for name in (None, "librt.so.1"):  # before glibc 2.34 timers are in a library of their own
        library = ctypes.CDLL(name)
        if hasattr(library, "timer_create"):
            return library
    raise OSError("no timers")


def _timer(library: Any, function: Any, value: int, seconds: float) -> ctypes.c_void_p:
    timer = ctypes.c_void_p()
    address = ctypes.cast(function, ctypes.c_void_p)
    event = _Event(value=value, kind=_CALL_FUNCTION, function=address)
    if library.timer_create(_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
        raise OSError("timer_create")
    whole = int(seconds)
    when = _When(first=(whole, int((seconds - whole) * 1e9) + 1))
    library.timer_settime(timer, 0, ctypes.byref(when), None)
    return timer
