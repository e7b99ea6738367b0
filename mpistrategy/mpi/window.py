"""Reduction of ordinary arrays through the node's window, in chunks that stay in the cache.

Every rank owns one slice of every chunk.  It shows its peers the slices that they own, adds up its own (in rank
order, so that equal runs give equal bits), and shows the sum, which the others copy out.  No array is copied whole,
and nothing is allocated.

A chunk is brought one turn before it is added up, and copied out two turns after: nobody waits for a peer that is
less than a turn behind.  So there are three staging buffers, each of two parts: what a rank brings, and what it has
added up.  In turn c a rank copies out chunk c - 2, brings c + 1 into the same buffer, and adds up c.  Both writes are
safe: it has seen that all have added up c - 2, so nobody reads what was brought then; and that all have brought c,
which they do after they have copied out c - 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays import COMBINE, Array
from mpistrategy.mpi.shared_memory import ALIGNMENT, SharedMemory
from mpistrategy.mpi.waiting import Waiting

_COUNTERS = 3
_BUFFERS = 3
#: With many ranks on a node a chunk grows, so that each one's slice of it is worth a call of NumPy.
_LEAST_SLICE_BYTES = 16 * 2**10
_LARGEST_CHUNK_BYTES = 2**20


def chunk_bytes_for(ranks: int, chunk_bytes: int) -> int:
    """Return the size of the chunks for so many ranks."""
    return max(chunk_bytes, min(ranks * _LEAST_SLICE_BYTES, _LARGEST_CHUNK_BYTES))


def segment_bytes(chunk_bytes: int) -> int:
    """Return how much memory each rank's counters and staging buffers take."""
    return _COUNTERS * ALIGNMENT + _BUFFERS * 2 * chunk_bytes


def share(count: int, part: int, parts: int, itemsize: int) -> tuple[int, int]:
    """Return where share `part` of `count` elements begins and ends; the borders are on cache lines."""
    step = max(1, ALIGNMENT // itemsize)
    lines = -(-count // step)
    return min(count, lines * part // parts * step), min(count, lines * (part + 1) // parts * step)


class NodeWindow:
    """The staging buffers of all ranks of one node.

    Args:
        memory: `segment_bytes(chunk_bytes)` for each rank, zeroed.
        chunk_bytes: what a rank stages at a time.
        waiting: how to wait for a peer.
    """

    def __init__(self, memory: SharedMemory, chunk_bytes: int, waiting: Waiting) -> None:
        self.local_rank = memory.local_rank
        self.size = len(memory.segments)
        self._fence = memory.fence
        self._waiting = waiting
        self._chunk_bytes = chunk_bytes
        counters = [
            [segment[line * ALIGNMENT :][:8].data.cast("B").cast("q") for segment in memory.segments]
            for line in range(_COUNTERS)
        ]
        self._brought, self._added, self._arrived = counters
        start = _COUNTERS * ALIGNMENT
        self._stages = [
            [
                [segment[start + (2 * b + part) * chunk_bytes :][:chunk_bytes] for segment in memory.segments]
                for part in (0, 1)
            ]
            for b in range(_BUFFERS)
        ]
        self._typed: dict[np.dtype[Any], list[list[list[Array]]]] = {}
        self._chunks = 0
        self._barriers = 0

    def barrier(self) -> None:
        """Wait for all ranks of the node; what they wrote before can be read after it."""
        self._barriers += 1
        self._tell(self._arrived, self._barriers)
        self._wait_for(self._arrived, self._barriers)

    def allreduce(self, source: Array, target: Array, op: str = "SUM", divisor: int = 1) -> None:
        """Write the combination of all ranks' `source` into `target`; flat, contiguous, of one dtype; may be the same.

        Args:
            source: what this rank brings.
            target: where the result goes.
            op: "SUM", "MIN", "MAX" or "PROD".
            divisor: the result is divided by it; floating dtypes only.
        """
        self.allreduce_many([(source, target)], op, divisor)

    def allreduce_many(self, pairs: Sequence[tuple[Array, Array]], op: str = "SUM", divisor: int = 1) -> None:
        """Do `allreduce` for several pairs of one dtype, without a pause between them."""
        # A warning that is an error would end one rank in the middle and leave the others waiting; MPI gives none.
        with np.errstate(all="ignore"):
            self._allreduce_many(pairs, op, divisor)

    def _allreduce_many(self, pairs: Sequence[tuple[Array, Array]], op: str, divisor: int) -> None:
        dtype = pairs[0][0].dtype
        stages = self._typed.get(dtype)
        if stages is None:
            stages = self._typed[dtype] = [[[s.view(dtype) for s in part] for part in two] for two in self._stages]
        combine = COMBINE[op]
        me, size, itemsize = self.local_rank, self.size, dtype.itemsize
        elements = self._chunk_bytes // itemsize
        chunks = list(_chunks(pairs, elements))
        shares = {
            count: [share(count, rank, size, itemsize) for rank in range(size)]
            for count in {source.size for source, _ in chunks}
        }
        first = self._chunks + 1  # chunks are counted from 1 on, over all reductions
        for turn in range(-1, len(chunks) + 2):
            if turn >= 2:
                target = chunks[turn - 2][1]
                number = first + turn - 2
                added = stages[number % _BUFFERS][1]
                self._wait_for(self._added, number)
                for rank, (begin, end) in enumerate(shares[target.size]):
                    if rank != me and end > begin:
                        target[begin:end] = added[rank][begin:end]
            if turn + 1 < len(chunks):
                source = chunks[turn + 1][0]
                number = first + turn + 1
                brought = stages[number % _BUFFERS][0][me]
                begin, end = shares[source.size][me]
                if begin > 0:
                    brought[:begin] = source[:begin]
                if end < source.size:
                    brought[end : source.size] = source[end:]
                self._tell(self._brought, number)
            if 0 <= turn < len(chunks):
                source, target = chunks[turn]
                number = first + turn
                everybodys, added = stages[number % _BUFFERS]
                begin, end = shares[source.size][me]
                self._wait_for(self._brought, number)
                if end > begin:
                    total, mine = added[me][begin:end], source[begin:end]
                    parts = [mine if rank == me else everybodys[rank][begin:end] for rank in range(size)]
                    combine(parts[0], parts[1], out=total)
                    for part in parts[2:]:
                        combine(total, part, out=total)
                    if divisor != 1:
                        np.true_divide(total, dtype.type(divisor), out=total)
                self._tell(self._added, number)
                if end > begin:
                    target[begin:end] = total
        self._chunks += len(chunks)

    def _tell(self, counter: list[memoryview], number: int) -> None:
        if self._fence is not None:
            self._fence()
        counter[self.local_rank][0] = number

    def _wait_for(self, counter: list[memoryview], number: int) -> None:
        for numbers in counter:
            if numbers[0] < number:
                self._waiting.until(numbers, number)
        if self._fence is not None:
            self._fence()


def _chunks(pairs: Sequence[tuple[Array, Array]], elements: int) -> Iterator[tuple[Array, Array]]:
    for source, target in pairs:
        if source.size <= elements:
            yield source, target
            continue
        for start in range(0, source.size, elements):
            yield source[start : start + elements], target[start : start + elements]
