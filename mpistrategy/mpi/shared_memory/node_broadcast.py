"""One rank's bytes on all ranks of a node, in pieces through shared memory.

The writer copies a piece into the next of a few slots, and the others copy it out while it writes the next one.  Every
rank counts the pieces that it has written or read; a slot is written again when all have read what was in it.

Between nodes MPI's Bcast does it: leaders that pass pieces of 4 MiB on, and show them to their nodes like this, took up
to twice its time from 16 MiB on.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.shared_memory.segments import SharedMemory
from mpistrategy.mpi.shared_memory.spin_wait import Counter, Waiting, counter_bytes

_COUNTERS = 2
#: A node of a few ranks has slots of the largest size; with more ranks they get shorter, and there are more of them.
_LARGEST_SLOT_BYTES = 2**20
_LEAST_SLOT_BYTES = 2**16
_FEWEST_SLOTS = 4


def slot_bytes_for(ranks: int) -> int:
    """Return the size of a slot on a node of so many ranks."""
    shares = 1 << (-(-ranks // _FEWEST_SLOTS) - 1).bit_length()
    return max(_LEAST_SLOT_BYTES, _LARGEST_SLOT_BYTES // shares)


def segment_bytes(ranks: int) -> int:
    """Return how much memory each of so many ranks needs."""
    return counter_bytes(_COUNTERS) + -(-_FEWEST_SLOTS // ranks) * slot_bytes_for(ranks)


class NodeBroadcast:
    """The slots of a node.

    Args:
        memory: `segment_bytes` of each rank, zeroed.
        waiting: how to wait for a peer.
    """

    def __init__(self, memory: SharedMemory, waiting: Waiting) -> None:
        ranks, self._me = len(memory.segments), memory.local_rank
        self._waiting = waiting
        self._written, self._done = (Counter(memory, line) for line in range(_COUNTERS))
        nbytes, start = slot_bytes_for(ranks), counter_bytes(_COUNTERS)
        rows = -(-_FEWEST_SLOTS // ranks)
        self._slots = [segment[start + row * nbytes :][:nbytes] for row in range(rows) for segment in memory.segments]
        self._number = 0
        #: All ranks are known to be done with the pieces up to this one.
        self._done_by_all = 0

    def run(self, data: Array, root: int) -> None:
        """Replace `data`, bytes, on every rank by those of `root`.

        Raises:
            RemoteError: when a rank that this one waits for has failed.
        """
        if root == self._me:
            self._send(data)
        else:
            self._receive(data, root)

    def _send(self, data: Array) -> None:
        for start, slot in self._next_slots(data):
            self._wait_until_done(self._number - len(self._slots))
            slot[...] = data[start : start + slot.size]
            self._written.tell(self._number)
            self._done.tell(self._number)

    def _receive(self, data: Array, root: int) -> None:
        theirs, fence = self._written.numbers[root], self._written.fence
        for start, slot in self._next_slots(data):
            if theirs[0] < self._number:
                self._waiting.until(theirs, self._number)
            if fence is not None:
                fence()
            data[start : start + slot.size] = slot
            self._done.tell(self._number)

    def _next_slots(self, data: Array) -> Iterator[tuple[int, Array]]:
        """Yield where each piece of `data` begins, and its slot."""
        nbytes = self._slots[0].size
        for start in range(0, data.size, nbytes):
            self._number += 1
            yield start, self._slots[self._number % len(self._slots)][: data.size - start]

    def _wait_until_done(self, number: int) -> None:
        """Wait until all ranks have read the pieces up to `number`; look only where that is not known."""
        if self._done_by_all >= number:
            return
        for theirs in self._done.numbers:
            if theirs[0] < number:
                self._waiting.until(theirs, number)
        if self._done.fence is not None:
            self._done.fence()
        others = [theirs[0] for rank, theirs in enumerate(self._done.numbers) if rank != self._me]
        self._done_by_all = min(others)
