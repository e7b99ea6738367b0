"""The pipelined all-reduce of ordinary arrays on one node, in chunks that stay in the cache.

Every rank owns one slice of every chunk.  It copies the other slices into its bounce buffer, adds up its own slice (in
rank order, so that equal runs give equal bits), and shows the sum; one chunk later everybody copies the other sums out.
No array is copied whole, and nothing is allocated.

A bounce buffer is written again only after all peers have said that they are done with the chunk after it, or have come
that far.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from mpistrategy.arrays.dtypes import COMBINE, Array, Combine, divide_by, quiet_runner
from mpistrategy.mpi.shared_memory.bounce_buffers import BounceBuffers, Layout, combined
from mpistrategy.mpi.shared_memory.segments import ALIGNMENT, SharedMemory
from mpistrategy.mpi.shared_memory.setup import COUNTERS, bounce_bytes
from mpistrategy.mpi.shared_memory.spin_wait import Counter, Waiting, counter_bytes

_SMALL, _LARGE = 0, 1
#: The size of large chunks, and of the smallest call that may have them: two at least.
LARGE_BYTES = 4 * 2**20
LEAST_BYTES = 2 * LARGE_BYTES
#: The large buffers of more ranks would take too much memory.
MOST_RANKS = 16
#: The other size is tried again every so many calls.
_TRIED_EVERY = 32
#: The fastest of so many calls counts: one disturbed call is no reason to change.
_LATEST = 3


class PipelinedAllReduce:
    """The pipelined all-reduce among the ranks of one node.

    Args:
        memory: `setup.pipelined_bytes(chunk_bytes)` for each rank, zeroed.
        chunk_bytes: the size of a chunk.
        waiting: how to wait for a peer.
        more: returns so many bytes more for each rank, None where they cannot be shared; collective.  With them, large
            calls have larger chunks where these are faster.
    """

    def __init__(
        self,
        memory: SharedMemory,
        chunk_bytes: int,
        waiting: Waiting,
        more: Callable[[int], SharedMemory | None] | None = None,
    ) -> None:
        self.local_rank: int = memory.local_rank
        self.size: int = len(memory.segments)
        self._waiting = waiting
        self._sent, self._added, self._arrived = (Counter(memory, line) for line in range(COUNTERS))
        self._bounce_buffers = [BounceBuffers(memory, chunk_bytes, counter_bytes(COUNTERS))]
        self._choice: ChunkChoice | None = None
        self._more = more if self.size <= MOST_RANKS and chunk_bytes < LARGE_BYTES else None
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
        nbytes = sum(source.nbytes for source, _ in pairs)
        # NumPy's products of complex numbers depend on where a slice ends: theirs is always the same.
        cut_alike = pairs[0][0].dtype.kind == "c" and combine is not np.add
        choice = None if nbytes < LEAST_BYTES or cut_alike else self._chunk_choice()
        buffers = self._bounce_buffers[_SMALL if choice is None else choice.begin()]
        elements = buffers.chunk_bytes // pairs[0][0].dtype.itemsize
        last: tuple[Array, Layout] | None = None
        for source, target in pairs:
            whole = source.size <= elements
            for start in (0,) if whole else range(0, source.size, elements):
                part = slice(start, start + elements)
                mine, result = (source, target) if whole else (source[part], target[part])
                layout = buffers.layout(mine.dtype, mine.size, self._chunks)
                self._chunk(layout, mine, result, combine, divisor, last)
                if choice is not None and last is None:
                    choice.first_chunk_is_over()
                last = (result, layout)
        if last is not None:
            self._copy_out(*last)
        if choice is not None:
            choice.end(nbytes)

    def _chunk_choice(self) -> ChunkChoice | None:
        """Return the choice of chunks for large calls; None where there are only small ones."""
        if self._more is not None:
            more, self._more = self._more, None
            memory = more(ALIGNMENT + bounce_bytes(LARGE_BYTES))
            if memory is not None:
                self._bounce_buffers.append(BounceBuffers(memory, LARGE_BYTES, ALIGNMENT))
                self._choice = ChunkChoice(Counter(memory, 0), self.local_rank == 0)
        return self._choice

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


class ChunkChoice:
    """Small chunks or large ones for the next large call: which are faster now, measured by the first rank of the node.

    Where the cores of two ranks share a cache, a small chunk is read there, before it has left it.  Where they do not,
    data that a peer has just written come out of its cache several times more slowly than out of memory, and chunks
    should be so large that they have left it.  (Two ranks, 16 MiB, chunks of 512 KiB against 4 MiB: 2.8 and 4.6 ms with
    near cores, 10.3 and 5.1 with far ones.)  It depends on where MPI puts the ranks; under a hypervisor it changes
    within seconds.  Results do not depend on it: whatever the chunks, each element is added up in rank order.

    In every large call, all ranks call `begin`, `first_chunk_is_over` and `end`.

    Args:
        announced: the first rank's number is twice the number of calls so far, plus the choice for the next one.
        leads: whether this is the first rank.
    """

    def __init__(self, announced: Counter, leads: bool) -> None:
        self._announced = announced
        self._leads = leads
        self._times: tuple[deque[float], deque[float]] = (deque(maxlen=_LATEST), deque(maxlen=_LATEST))
        self._now = _SMALL
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
        faster = _SMALL if small <= large else _LARGE
        return 1 - faster if self._calls % _TRIED_EVERY == 0 else faster
