"""A number of each rank of a node that all of them see: how far it has come."""

from __future__ import annotations

from mpistrategy.mpi.shared_memory.segments import ALIGNMENT, SharedMemory


def bytes_of(count: int) -> int:
    """Return how much memory of each rank so many counters take: a cache line each."""
    return count * ALIGNMENT


class Counter:
    """One number of each rank, which only its rank writes and only ever raises.

    What a rank wrote before it raised its number can be read by those who have seen the number.

    Args:
        memory: zeroed; counters are at its beginning.
        line: which of them this is, from 0 on.
    """

    def __init__(self, memory: SharedMemory, line: int) -> None:
        self.numbers = [segment[bytes_of(line) :][:8].data.cast("B").cast("q") for segment in memory.segments]
        self.fence = memory.fence
        self._mine = self.numbers[memory.local_rank]

    def tell(self, number: int) -> None:
        """Show the peers that this rank has come to `number`."""
        if self.fence is not None:
            self.fence()
        self._mine[0] = number
