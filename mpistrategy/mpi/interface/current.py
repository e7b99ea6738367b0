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
        self.communicators: list[Communicator] = []


#: What the calling thread works for is ``entered.communicators``, the innermost last.
entered: _Stack = _Stack()


def current() -> Communicator | None:
    """Return this thread's current communicator, or None outside every strategy."""
    return entered.communicators[-1] if entered.communicators else None


def working_on(communicator: Communicator) -> AbstractContextManager[None]:
    """Return a context manager that makes `communicator` current; it does nothing where it is current already."""
    return nullcontext() if current() is communicator else _entering(communicator)


@contextmanager
def _entering(communicator: Communicator) -> Iterator[None]:
    entered.communicators.append(communicator)
    try:
        yield
    finally:
        entered.communicators.pop()
