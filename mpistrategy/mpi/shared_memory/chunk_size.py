"""Small chunks or large ones: which are faster now, measured by the first rank of the node.

Where the cores of two ranks share a cache, a small chunk is read there, before it has left it.  Where they do not, data
that a peer has just written come out of its cache several times more slowly than out of memory, and chunks should be so
large that they have left it.  (Two ranks, 16 MiB, chunks of 512 KiB against 4 MiB: 2.8 and 4.6 ms with near cores, 10.3
and 5.1 with far ones.)  It depends on where MPI puts the ranks; under a hypervisor it changes within seconds.

Results do not depend on it: whatever the chunks, each element is added up in rank order.
"""

from __future__ import annotations

import time
from collections import deque

from mpistrategy.mpi.shared_memory.spin_wait import Counter

SMALL, LARGE = 0, 1
#: The size of large chunks, and of the smallest call that may have them: two at least.
LARGE_BYTES = 4 * 2**20
LEAST_BYTES = 2 * LARGE_BYTES
#: The buffers of more ranks would take too much memory.
MOST_RANKS = 16
#: The other size is tried again every so many calls.
_TRIED_EVERY = 32
#: The fastest of so many calls counts: one disturbed call is no reason to change.
_LATEST = 3


class ChunkChoice:
    """The choice for the next large call, by the first rank of the node.

    In every large call, all ranks call `begin`, `first_chunk_is_over` and `end`.

    Args:
        announced: the first rank's number is twice the number of calls so far, plus the choice for the next one.
        leads: whether this is the first rank.
    """

    def __init__(self, announced: Counter, leads: bool) -> None:
        self._announced = announced
        self._leads = leads
        self._times: tuple[deque[float], deque[float]] = (deque(maxlen=_LATEST), deque(maxlen=_LATEST))
        self._now = SMALL
        self._calls = 0
        self._started = 0.0

    def begin(self) -> int:
        """Return the size for this call: the same on all ranks."""
        self._now = self._announced.numbers[0][0] & 1
        return self._now

    def first_chunk_is_over(self) -> None:
        """Announce the choice for the next call, now that all ranks have begun this one, and none has ended it."""
        if self._leads:
            self._calls += 1
            self._announced.tell(2 * self._calls + self._next())
            self._started = time.perf_counter()  # not before: other ranks may have come late

    def end(self, nbytes: int) -> None:
        """Remember how long `nbytes` took since then."""
        if self._leads:
            self._times[self._now].append((time.perf_counter() - self._started) / nbytes)

    def _next(self) -> int:
        small, large = (min(times, default=0.0) for times in self._times)  # a size that was never tried is next
        faster = SMALL if small <= large else LARGE
        return 1 - faster if self._calls % _TRIED_EVERY == 0 else faster
