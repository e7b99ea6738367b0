"""Counts the calls of MPI that a communicator of the library makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Counted:
    """An mpi4py communicator whose upper-case methods are counted."""

    def __init__(self, comm: Any, calls: Counter[str]) -> None:
        self._comm, self._calls = comm, calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._comm, name)
        if not name[0].isupper() or not callable(found):
            return found

        def counted(*arguments: Any, **named: Any) -> Any:
            self._calls[name] += 1
            return found(*arguments, **named)

        return counted


@contextmanager
def counted_calls(communicator: Any) -> Iterator[Counter[str]]:
    """Yield how often each method of MPI moves data of the communicator, by name, while this is entered."""
    calls: Counter[str] = Counter()
    comm = communicator._comm
    communicator._comm = Counted(comm, calls)
    try:
        yield calls
    finally:
        communicator._comm = comm
