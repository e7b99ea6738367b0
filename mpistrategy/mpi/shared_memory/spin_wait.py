"""Counters that all ranks of a node see, and how a rank waits for one: fast at first, politely later."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from mpistrategy.mpi.shared_memory.segments import ALIGNMENT, Fence, SharedMemory

#: Looks before the core is given away: about 2 and 140 microseconds.
_FEWEST_LOOKS, _MOST_LOOKS = 64, 4096
_POLITE_AFTER_SECONDS = 3e-3
_NAP_SECONDS = 2e-5


class Counter:
    """One number for each rank, which only that rank writes and only ever raises.

    A peer that sees the number can read everything that the rank wrote before it.

    Args:
        memory: zeroed; counters are at its beginning, a cache line (`ALIGNMENT`) each.
        line: the index of this counter among them.

    Attributes:
        numbers: of the ranks, by local rank.
        own_number: the one of this rank.
    """

    def __init__(self, memory: SharedMemory, line: int) -> None:
        self.numbers: list[memoryview[int]] = [
            segment[line * ALIGNMENT :][:8].data.cast("B").cast("q") for segment in memory.segments
        ]
        self.fence: Fence = memory.fence
        self.own_number: memoryview[int] = self.numbers[memory.local_rank]

    def tell(self, number: int) -> None:
        """Show the peers that this rank has come to `number`."""
        self.fence()
        self.own_number[0] = number


#: ``wait_until(numbers, value)`` waits for a number of a peer, which only ever raises it, and returns when
#: ``numbers[0] >= value``; it raises RemoteError when the peer has failed.
WaitUntil: TypeAlias = Callable[[memoryview, int], None]


class SpinWait:
    """Waits with no messages under way.

    First it only looks (a peer that is on its way comes within microseconds), then it gives its core away between two
    looks, and after some milliseconds it naps.  A wait that outlasts the looks halves their number for the next wait;
    a shorter wait doubles it: where other programs take a core, the peer may need this core.

    Args:
        progress: called before each pause: lets MPI move other messages that need this rank.
        look: called before each nap; raises where the peer will not come.
        is_crowded: whether the ranks of this node outnumber their cores: the core is given away after the first look.
    """

    def __init__(
        self, progress: Callable[[], Any], look: Callable[[], object] = lambda: None, *, is_crowded: bool = False
    ) -> None:
        self._fewest, self._most = (1, 1) if is_crowded else (_FEWEST_LOOKS, _MOST_LOOKS)
        self._looks = self._most
        self._progress = progress
        self._look = look

    def until(self, numbers: memoryview, value: int) -> None:
        """Wait; see `WaitUntil`."""
        for _ in range(self._looks):
            if numbers[0] >= value:
                self._looks = min(2 * self._looks, self._most)
                return
        self._looks = max(self._looks // 2, self._fewest)
        polite_from = time.monotonic() + _POLITE_AFTER_SECONDS
        while numbers[0] < value:
            self._progress()
            if time.monotonic() < polite_from:
                os.sched_yield()
            else:
                self._look()
                time.sleep(_NAP_SECONDS)
