"""How a guard reaches the other ranks, and how to wait without a busy core."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from mpistrategy.arrays.dtypes import Array

_SHORTEST_PAUSE, _LONGEST_PAUSE = 1e-5, 2e-3
_LOOKS = 8


class ControlChannel(ABC):
    """Tiny collectives on a communicator that never carries data.

    Attributes:
        is_free: whether the comparison travels with the data, so that leaving it out would save nothing.
        values: this rank's numbers for a comparison that also adds up a few numbers of all ranks; float64, written
            before it.  Only where the ranks have a `first_message`.
        sums: the sums over the ranks after it, until the next one.
    """

    is_free: bool = True
    values: Array
    sums: Array

    def all_equal(self, digest: int, look: Callable[[], object] | None = None) -> bool:
        """Wait for every rank's digest; return whether all are equal.

        With `look`, no core is kept busy where ranks wait for one another, and it is called now and then; it may raise.
        """
        self.start(digest)
        return wait_patiently(self.finished, look)

    @abstractmethod
    def start(self, digest: int) -> None:
        """Begin `all_equal` without waiting."""

    @abstractmethod
    def finished(self) -> bool | None:
        """Return the answer to `start`, or None while ranks are missing."""

    @abstractmethod
    def allgather_text(self, text: str, look: Callable[[], object] | None = None) -> list[str]:
        """Return every rank's text, in rank order.

        Args:
            text: this rank's.
            look: is called now and then; an exception in it ends the wait.
        """


def wait_patiently(finished: Callable[[], bool | None], look: Callable[[], object] | None = None) -> bool:
    """Return what `finished` returns once it is not None, without keeping a core busy; `look` may raise."""
    pauses = growing_pauses()
    while True:
        if look is not None:
            look()
        for _ in range(_LOOKS):  # an MPI may need several to make progress
            if (answer := finished()) is not None:
                return answer
        time.sleep(next(pauses))


def growing_pauses() -> Iterator[float]:
    """Yield the seconds to sleep between two looks: short at first, never long."""
    pause = _SHORTEST_PAUSE
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE)
