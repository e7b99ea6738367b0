"""Reduction of ordinary arrays through the node's window, in chunks that stay in the cache.

Every rank owns one slice of every chunk.  It shows its peers the slices that they own, adds up its own (in rank
order, so that equal runs give equal bits), and shows the sum; one chunk later everybody copies the other sums out.
No array is copied whole, and nothing is allocated.

Each rank has two staging buffers of two parts, in turn: what it brings, and what it has added up.  A part is written
again only after all peers have said that they are done with the chunk after it, or have come that far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrategy.arrays import COMBINE, Array, quiet_runner
from mpistrategy.mpi import counters
from mpistrategy.mpi.counters import Counter
from mpistrategy.mpi.shared_memory import ALIGNMENT, SharedMemory
from mpistrategy.mpi.waiting import Waiting

_COUNTERS = 3
_BUFFERS = 2
_REMEMBERED = 512
#: With many ranks on a node a chunk grows, so that each one's slice of it is worth a call of NumPy.
_LEAST_SLICE_BYTES = 16 * 2**10
_LARGEST_CHUNK_BYTES = 2**20


def chunk_bytes_for(ranks: int, chunk_bytes: int) -> int:
    """Return the size of the chunks for so many ranks."""
    return max(chunk_bytes, min(ranks * _LEAST_SLICE_BYTES, _LARGEST_CHUNK_BYTES))


def segment_bytes(chunk_bytes: int) -> int:
    """Return how much memory each rank's counters and staging buffers take."""
    return counters.bytes_of(_COUNTERS) + _BUFFERS * 2 * chunk_bytes


def share(count: int, part: int, parts: int, itemsize: int) -> tuple[int, int]:
    """Return where share `part` of `count` elements begins and ends; the borders are on cache lines."""
    step = max(1, ALIGNMENT // itemsize)
    lines = -(-count // step)
    return min(count, lines * part // parts * step), min(count, lines * (part + 1) // parts * step)


class Layout(NamedTuple):
    """Where a chunk of one size is, in one of the two staging buffers.

    Attributes:
        brings: which parts of the source this rank brings, and where they go: all but its own slice.
        own: this rank's slice; None when it has none.
        parts: what the ranks brought of that slice, in rank order; None in the place of this rank.
        total: where it adds them up.
        outs: the other ranks' slices, and where their sums are.
    """

    brings: list[tuple[slice, Array]]
    own: slice | None
    parts: list[Array | None]
    total: Array
    outs: list[tuple[slice, Array]]


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
        self._waiting = waiting
        self._chunk_bytes = chunk_bytes
        self._brought, self._added, self._arrived = (Counter(memory, line) for line in range(_COUNTERS))
        start = counters.bytes_of(_COUNTERS)
        self._stages = [
            [
                [segment[start + (2 * b + part) * chunk_bytes :][:chunk_bytes] for segment in memory.segments]
                for part in (0, 1)
            ]
            for b in range(_BUFFERS)
        ]
        self._layouts: dict[tuple[np.dtype[Any], int], tuple[Layout, Layout]] = {}
        self._quiet = quiet_runner()
        self._chunks = 0
        self._barriers = 0

    def barrier(self) -> None:
        """Wait for all ranks of the node; what they wrote before can be read after it."""
        self._barriers += 1
        self._arrived.tell(self._barriers)
        self._wait_for(self._arrived, self._barriers)

    def allreduce(self, source: Array, target: Array, op: str = "SUM", divisor: int = 1) -> None:
        """Write the combination of all ranks' `source` into `target`; flat, contiguous, of one dtype; may be the same.

        Args:
            source: what this rank brings.
            target: where the result goes.
            op: "SUM", "MIN", "MAX" or "PROD".
            divisor: the result is divided by it; floating dtypes only.
        """
        self.allreduce_many(((source, target),), op, divisor)

    def allreduce_many(self, pairs: Sequence[tuple[Array, Array]], op: str = "SUM", divisor: int = 1) -> None:
        """Do `allreduce` for several pairs of one dtype, without a pause between them."""
        # A warning that is an error would end one rank in the middle and leave the others waiting; MPI gives none.
        self._quiet(self._allreduce_many, pairs, COMBINE[op], divisor)

    def _allreduce_many(self, pairs: Sequence[tuple[Array, Array]], combine: np.ufunc, divisor: int) -> None:
        elements = self._chunk_bytes // pairs[0][0].dtype.itemsize
        last: tuple[Array, Layout] | None = None
        for source, target in pairs:
            if source.size <= elements:
                last = self._chunk(source, target, combine, divisor, last)
                continue
            for start in range(0, source.size, elements):
                stop = start + elements
                last = self._chunk(source[start:stop], target[start:stop], combine, divisor, last)
        if last is not None:
            self._copy_out(*last)

    def _chunk(
        self, source: Array, target: Array, combine: np.ufunc, divisor: int, last: tuple[Array, Layout] | None
    ) -> tuple[Array, Layout]:
        """Bring and add up one chunk, and copy the one before it out; return what is to be copied out later."""
        key = (source.dtype, source.size)
        layouts = self._layouts.get(key)
        if layouts is None:
            if len(self._layouts) >= _REMEMBERED:
                self._layouts.clear()
            layouts = self._layouts[key] = (self._layout(*key, 0), self._layout(*key, 1))
        layout = layouts[self._chunks & 1]
        number = self._chunks + 1
        for part, place in layout.brings:
            place[...] = source[part]
        self._brought.tell(number)
        if last is not None:
            self._copy_out(*last)
        self._chunks = number
        self._wait_for(self._brought, number)
        own = layout.own
        if own is not None:
            total, mine = layout.total, source[own]
            first, second, *others = (mine if theirs is None else theirs for theirs in layout.parts)
            combine(first, second, out=total)
            for other in others:
                combine(total, other, out=total)
            if divisor != 1:
                np.true_divide(total, total.dtype.type(divisor), out=total)
            self._added.tell(number)
            target[own] = total
        else:
            self._added.tell(number)
        return target, layout

    def _copy_out(self, target: Array, layout: Layout) -> None:
        """Copy the peers' sums of the chunk that was brought last."""
        self._wait_for(self._added, self._chunks)
        for part, total in layout.outs:
            target[part] = total

    def _layout(self, dtype: np.dtype[Any], count: int, buffer: int) -> Layout:
        """Return where everything is of a chunk of so many elements in one of the two buffers."""
        brought, added = ([segment.view(dtype) for segment in part] for part in self._stages[buffer])
        borders = [slice(*share(count, rank, self.size, dtype.itemsize)) for rank in range(self.size)]
        me, own = self.local_rank, borders[self.local_rank]
        around = [part for part in (slice(0, own.start), slice(own.stop, count)) if part.stop > part.start]
        return Layout(
            [(part, brought[me][part]) for part in around],
            own if own.stop > own.start else None,
            [None if rank == me else brought[rank][own] for rank in range(self.size)],
            added[me][own],
            [(part, added[r][part]) for r, part in enumerate(borders) if r != me and part.stop > part.start],
        )

    def _wait_for(self, counter: Counter, number: int) -> None:
        for theirs in counter.numbers:
            if theirs[0] < number:
                self._waiting.until(theirs, number)
        if counter.fence is not None:
            counter.fence()
