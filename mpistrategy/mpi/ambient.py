"""The communicator of the strategy that this thread is working for.

A CrossDeviceOps is made by the user without a communicator, and may be called directly or by another one; it finds
the ranks it works on here.
"""

from __future__ import annotations

import threading

from mpistrategy.mpi.transport import Communicator


class _Stack(threading.local):
    def __init__(self) -> None:
        self.entered: list[Communicator] = []


_stack = _Stack()


def enter(communicator: Communicator) -> None:
    """Make `communicator` this thread's current one."""
    _stack.entered.append(communicator)


def leave() -> None:
    """Go back to the one before."""
    _stack.entered.pop()


def current() -> Communicator | None:
    """Return this thread's current communicator, or None outside every strategy."""
    return _stack.entered[-1] if _stack.entered else None
