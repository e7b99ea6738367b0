"""The bounce buffers of the pipelined all-reduce, and which part of a chunk is where in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrategy.arrays.dtypes import Array, Combine
from mpistrategy.mpi.shared_memory.segments import ALIGNMENT, SharedMemory
from mpistrategy.mpi.shared_memory.setup import BUFFERS

_REMEMBERED = 512


def share(count: int, part: int, parts: int, itemsize: int) -> tuple[int, int]:
    """Return where share `part` of `count` elements begins and ends; the borders are on cache lines."""
    step = max(1, ALIGNMENT // itemsize)
    lines = -(-count // step)
    return min(count, lines * part // parts * step), min(count, lines * (part + 1) // parts * step)


def combined(combine: Combine, parts: Sequence[Array], out: Array, partial: Array) -> None:
    """Write the combination of two or more `parts`, in their order, into `out`.

    Args:
        combine: a ufunc.
        parts: of one size.
        out: may be the memory of one of them.
        partial: for partial results: `out`, or the first part, which is lost, where `out` is a later part than the
            second.
    """
    total, *others, last = parts
    for other in others:
        combine(total, other, out=partial)
        total = partial
    combine(total, last, out=out)


class Layout(NamedTuple):
    """Where a chunk of one size is, in one of the two bounce buffers.

    Attributes:
        sent: the parts of the source that this rank copies in, and where to: all but its own slice.
        own: the slice that this rank adds up; None when it has none.
        parts: the ranks' contributions to that slice, in rank order; None in the place of this rank.
        total: where it adds them up.
        others: the other ranks' slices, and where their sums are.
    """

    sent: list[tuple[slice, Array]]
    own: slice | None
    parts: list[Array | None]
    total: Array
    others: list[tuple[slice, Array]]


class BounceBuffers:
    """Two bounce buffers of each rank, used in turn; each has a part for what it contributes and one for its sums.

    Args:
        memory: `setup.bounce_bytes(chunk_bytes)` of each rank, from `start` on.
        chunk_bytes: the size of the largest chunk.
        start: where the buffers begin.
    """

    def __init__(self, memory: SharedMemory, chunk_bytes: int, start: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._rank = memory.local_rank
        begins = [start + part * chunk_bytes for part in range(BUFFERS * 2)]
        self._parts = [[segment[begin:][:chunk_bytes] for segment in memory.segments] for begin in begins]
        self._layouts: dict[tuple[np.dtype[Any], int], tuple[Layout, Layout]] = {}

    def layout(self, dtype: np.dtype[Any], count: int, number: int) -> Layout:
        """Return where everything of chunk `number`, of so many elements, is."""
        layouts = self._layouts.get((dtype, count))
        if layouts is None:
            if len(self._layouts) >= _REMEMBERED:
                self._layouts.clear()
            layouts = self._layouts[dtype, count] = (self._laid_out(dtype, count, 0), self._laid_out(dtype, count, 1))
        return layouts[number & 1]

    def _laid_out(self, dtype: np.dtype[Any], count: int, buffer: int) -> Layout:
        sent, sums = ([segment.view(dtype) for segment in part] for part in self._parts[2 * buffer :][:2])
        me, size = self._rank, len(sent)
        borders = [slice(*share(count, rank, size, dtype.itemsize)) for rank in range(size)]
        own = borders[me]
        around = [part for part in (slice(0, own.start), slice(own.stop, count)) if part.stop > part.start]
        return Layout(
            [(part, sent[me][part]) for part in around],
            own if own.stop > own.start else None,
            [None if rank == me else sent[rank][own] for rank in range(size)],
            sums[me][own],
            [(part, sums[r][part]) for r, part in enumerate(borders) if r != me and part.stop > part.start],
        )
