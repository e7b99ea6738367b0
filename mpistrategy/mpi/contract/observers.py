"""The observers of this process: they hear of its collectives, its steps, and the spans that the program names.

Whoever enters a collective, a step or a span looks whether there is an observer, and does nothing else without one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from mpistrategy.mpi.contract.flight_recorder import CurrentCall
from mpistrategy.mpi.contract.guard import Guard


class Observer(Protocol):
    """Its methods run in the thread of the collective; a collective inside a collective is a part of the outer one."""

    def entered(self, guard: Guard, call: CurrentCall) -> None:
        """A collective begins."""

    def left(self, guard: Guard, call: CurrentCall) -> None:
        """The collective has ended, with a result or an exception."""

    def begin(self, kind: str, name: str) -> Any:
        """A step or a span begins; returns the argument of `end`."""

    def end(self, token: Any) -> None:
        """The step or the span has ended."""


#: The observers at present.  What a child of a rank does is not the rank's.
observers: list[Observer] = []
os.register_at_fork(after_in_child=observers.clear)


def unwatch(observer: Observer) -> None:
    """Remove `observer`."""
    if observer in observers:
        observers.remove(observer)


@contextmanager
def interval(kind: str, name: str) -> Iterator[None]:
    """Tell the present observers of the beginning and the end of a step or a span.

    Args:
        kind: "step" or "span".
        name: the name.
    """
    tokens: list[tuple[Observer, Any]] = []
    try:
        tokens.extend((observer, observer.begin(kind, name)) for observer in observers)
        yield
    finally:
        for observer, token in reversed(tokens):  # the last one first, for observers that keep a stack
            observer.end(token)
