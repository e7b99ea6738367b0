"""Reduction of ordinary arrays through the node's window, in chunks that stay in the cache.

Every rank owns one slice of every chunk.  It shows its peers the slices that they own, adds up its own (in rank
order, so that equal runs give equal bits), and shows the sum; one chunk later everybody copies the other sums out.
No array is copied whole, and nothing is allocated.

Each rank has two staging buffers of two parts, in turn: what it brings, and what it has added up.  A part is written
again only after all peers have said that they are done with the chunk after it, or have come that far.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays import COMBINE, Array
from mpistrategy.mpi.shared_memory import ALIGNMENT, SharedMemory
from mpistrategy.mpi.waiting import Waiting

_COUNTERS = 3
_BUFFERS = 2
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
        number = self._chunks
        waiting: tuple[Array, list[Array], list[tuple[int, int]]] | None = None
        for source, target, count in _chunks(pairs, elements):
            brought, added = stages[number & 1]
            number += 1
            borders = [share(count, rank, size, itemsize) for rank in range(size)]
            begin, end = borders[me]
            if begin > 0:
                brought[me][:begin] = source[:begin]
            if end < count:
                brought[me][end:count] = source[end:]
            self._tell(self._brought, number)
            if waiting is not None:
                self._copy_out(*waiting, number - 1)
            self._wait_for(self._brought, number)
            if end > begin:
                total, mine = added[me][begin:end], source[begin:end]
                parts = [mine if rank == me else brought[rank][begin:end] for rank in range(size)]
                combine(parts[0], parts[1], out=total)
                for part in parts[2:]:
                    combine(total, part, out=total)
                if divisor != 1:
                    np.true_divide(total, dtype.type(divisor), out=total)
            self._tell(self._added, number)
            if end > begin:
                target[begin:end] = total
            waiting = (target, added, borders)
        if waiting is not None:
            self._copy_out(*waiting, number)
        self._chunks = number

    def _copy_out(self, target: Array, added: list[Array], borders: list[tuple[int, int]], number: int) -> None:
        self._wait_for(self._added, number)
        for rank, (begin, end) in enumerate(borders):
            if rank != self.local_rank and end > begin:
                target[begin:end] = added[rank][begin:end]

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


def _chunks(pairs: Sequence[tuple[Array, Array]], elements: int) -> Iterator[tuple[Array, Array, int]]:
    for source, target in pairs:
        if source.size <= elements:
            yield source, target, source.size
            continue
        for start in range(0, source.size, elements):
            piece = source[start : start + elements]
            yield piece, target[start : start + elements], piece.size
