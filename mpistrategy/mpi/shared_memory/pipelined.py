"""The pipelined all-reduce of ordinary arrays on one node, in chunks that stay in the cache.

Every rank owns one slice of every chunk.  It copies the other slices into its bounce buffer, adds up its own slice (in
rank order, so that equal runs give equal bits), and shows the sum; one chunk later everybody copies the other sums out.
No array is copied whole, and nothing is allocated.

A bounce buffer is written again only after all peers have said that they are done with the chunk after it, or have come
that far.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpistrategy.arrays.dtypes import COMBINE, Array, Combine, divide_by, quiet_runner
from mpistrategy.mpi.shared_memory.bounce_buffers import BounceBuffers, Layout, combined
from mpistrategy.mpi.shared_memory.segments import SharedMemory
from mpistrategy.mpi.shared_memory.setup import COUNTERS
from mpistrategy.mpi.shared_memory.spin_wait import Counter, Waiting, counter_bytes


class PipelinedAllReduce:
    """The pipelined all-reduce among the ranks of one node.

    Args:
        memory: `setup.pipelined_bytes(chunk_bytes)` for each rank, zeroed.
        chunk_bytes: the size of a chunk.
        waiting: how to wait for a peer.
    """

    def __init__(self, memory: SharedMemory, chunk_bytes: int, waiting: Waiting) -> None:
        self.local_rank: int = memory.local_rank
        self.size: int = len(memory.segments)
        self._waiting = waiting
        self._sent, self._added, self._arrived = (Counter(memory, line) for line in range(COUNTERS))
        self._bounce_buffers = BounceBuffers(memory, chunk_bytes, counter_bytes(COUNTERS))
        self._quiet = quiet_runner()
        self._chunks = 0
        self._barriers = 0

    def barrier(self) -> None:
        """Wait for all ranks of the node; what they wrote before can be read after it."""
        self._barriers += 1
        self._arrived.tell(self._barriers)
        self._wait_for(self._arrived, self._barriers)

    def allreduce_many(self, pairs: Sequence[tuple[Array, Array]], op: str = "SUM", divisor: int = 1) -> None:
        """Write the combination of all ranks' sources into the targets, for pairs of (source, target), and divide it.

        All are flat, contiguous, of one dtype; source and target may be the same.  `op` is "SUM", "MIN", "MAX" or
        "PROD".
        """
        # A warning that is an error would end one rank in the middle and leave the others waiting; MPI gives none.
        self._quiet(self._allreduce_many, pairs, COMBINE[op], divisor)

    def _allreduce_many(self, pairs: Sequence[tuple[Array, Array]], combine: Combine, divisor: int) -> None:
        buffers = self._bounce_buffers
        elements = buffers.chunk_bytes // pairs[0][0].dtype.itemsize
        last: tuple[Array, Layout] | None = None
        for source, target in pairs:
            whole = source.size <= elements
            for start in (0,) if whole else range(0, source.size, elements):
                part = slice(start, start + elements)
                mine, result = (source, target) if whole else (source[part], target[part])
                layout = buffers.layout(mine.dtype, mine.size, self._chunks)
                self._chunk(layout, mine, result, combine, divisor, last)
                last = (result, layout)
        if last is not None:
            self._copy_out(*last)

    def _chunk(
        self,
        layout: Layout,
        source: Array,
        target: Array,
        combine: Combine,
        divisor: int,
        last: tuple[Array, Layout] | None,
    ) -> None:
        """Copy in and add up one chunk, and copy the one before it out."""
        number = self._chunks + 1
        for part, place in layout.sent:
            place[...] = source[part]
        self._sent.tell(number)
        if last is not None:
            self._copy_out(*last)
        self._chunks = number
        self._wait_for(self._sent, number)
        own = layout.own
        if own is None:
            self._added.tell(number)
            return
        total, mine = layout.total, source[own]
        combined(combine, [mine if theirs is None else theirs for theirs in layout.parts], total, total)
        divide_by(divisor, total)
        self._added.tell(number)
        target[own] = total

    def _copy_out(self, target: Array, layout: Layout) -> None:
        """Copy the peers' sums of the chunk before this one."""
        self._wait_for(self._added, self._chunks)
        for part, total in layout.others:
            target[part] = total

    def _wait_for(self, counter: Counter, number: int) -> None:
        for theirs in counter.numbers:
            if theirs[0] < number:
                self._waiting.until(theirs, number)
        if counter.fence is not None:
            counter.fence()
