"""The communicator of the strategy that this thread is working for.

Users make a CrossDeviceOps without a communicator, and may call it directly or from another one: here it finds its
ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from mpistrategy.mpi.interface.communicator import Communicator


class _Stack(threading.local):
    def __init__(self) -> None:
        self.entered: list[Communicator] = []


_stack = _Stack()


def enter(communicator: Communicator) -> None:
    """Make `communicator` this thread's current one."""
    _stack.entered.append(communicator)


def leave() -> None:
    """Go back to the previous one."""
    _stack.entered.pop()


def current() -> Communicator | None:
    """Return this thread's current communicator, or None outside every strategy."""
    return _stack.entered[-1] if _stack.entered else None


def working_on(communicator: Communicator) -> AbstractContextManager[None]:
    """Return a context manager that makes `communicator` current; it does nothing where it is current already."""
    return nullcontext() if current() is communicator else _entering(communicator)


@contextmanager
def _entering(communicator: Communicator) -> Iterator[None]:
    enter(communicator)
    try:
        yield
    finally:
        leave()
