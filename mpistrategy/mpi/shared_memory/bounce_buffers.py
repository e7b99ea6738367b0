"""The bounce buffers of the pipelined all-reduce, and where each part of a chunk is in them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.shared_memory.segments import ALIGNMENT, SharedMemory

BUFFERS = 2
_REMEMBERED = 512


def bytes_of(chunk_bytes: int) -> int:
    """Return how much memory of each rank the bounce buffers for chunks of this size take."""
    return BUFFERS * 2 * chunk_bytes


def share(count: int, part: int, parts: int, itemsize: int) -> tuple[int, int]:
    """Return where share `part` of `count` elements begins and ends; the borders are on cache lines."""
    step = max(1, ALIGNMENT // itemsize)
    lines = -(-count // step)
    return min(count, lines * part // parts * step), min(count, lines * (part + 1) // parts * step)


class Layout(NamedTuple):
    """Where a chunk of one size is, in one of the two bounce buffers.

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


class BounceBuffers:
    """Two bounce buffers of each rank, in turn: in each what it brings, and what it has added up.

    Args:
        memory: `bytes_of(chunk_bytes)` of each rank, from `start` on.
        chunk_bytes: the size of the largest chunk.
        start: where the buffers begin.
    """

    def __init__(self, memory: SharedMemory, chunk_bytes: int, start: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._rank = memory.local_rank
        self._stages = [
            [
                [segment[start + (2 * b + part) * chunk_bytes :][:chunk_bytes] for segment in memory.segments]
                for part in (0, 1)
            ]
            for b in range(BUFFERS)
        ]
        self._layouts: dict[tuple[np.dtype[Any], int], tuple[Layout, Layout]] = {}

    def layout(self, dtype: np.dtype[Any], count: int, number: int) -> Layout:
        """Return where everything is of chunk `number`, of so many elements."""
        layouts = self._layouts.get((dtype, count))
        if layouts is None:
            if len(self._layouts) >= _REMEMBERED:
                self._layouts.clear()
            layouts = self._layouts[dtype, count] = (self._laid_out(dtype, count, 0), self._laid_out(dtype, count, 1))
        return layouts[number & 1]

    def _laid_out(self, dtype: np.dtype[Any], count: int, buffer: int) -> Layout:
        brought, added = ([segment.view(dtype) for segment in part] for part in self._stages[buffer])
        me, size = self._rank, len(brought)
        borders = [slice(*share(count, rank, size, dtype.itemsize)) for rank in range(size)]
        own = borders[me]
        around = [part for part in (slice(0, own.start), slice(own.stop, count)) if part.stop > part.start]
        return Layout(
            [(part, brought[me][part]) for part in around],
            own if own.stop > own.start else None,
            [None if rank == me else brought[rank][own] for rank in range(size)],
            added[me][own],
            [(part, added[r][part]) for r, part in enumerate(borders) if r != me and part.stop > part.start],
        )
