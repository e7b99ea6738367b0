"""Memory for packs that the ranks of a node see: many small arrays are reduced where they were packed.

Each rank has a few blocks of its own and packs into one that none of its earlier results lives in.  It tells the peers
which, in its cell, with the check of the call; then every rank combines its share of all packs into all of them, as in
an arena, and the results are views of the rank's own block.  A block is used again once nobody holds a view of it.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from mpistrategy.arrays import Array
from mpistrategy.mpi.cells import Cells
from mpistrategy.mpi.shared_memory import ALIGNMENT, SharedMemory

_BLOCKS = 3
_LARGEST_BLOCK_BYTES = 2 * 2**20
_MOST_BYTES_ON_NODE = 96 * 2**20
_NONE = -1


def block_bytes_for(ranks: int) -> int:
    """Return how long the blocks are with so many ranks on the node."""
    return min(_LARGEST_BLOCK_BYTES, _MOST_BYTES_ON_NODE // (ranks * _BLOCKS) // ALIGNMENT * ALIGNMENT)


def segment_bytes(ranks: int) -> int:
    """Return how much memory each rank's blocks take."""
    return _BLOCKS * block_bytes_for(ranks)


class PackBlocks:
    """The blocks of all ranks of one node.

    Args:
        memory: `segment_bytes` for each rank.
        cells: where the ranks tell each other which block they took.
    """

    def __init__(self, memory: SharedMemory, cells: Cells) -> None:
        self._cells = cells
        self._memory = memory
        self.block_bytes = block_bytes_for(len(memory.segments))
        # An array over a memoryview is what all views of it refer to; of an array over an array it would be the latter.
        self._mine = [np.frombuffer(part.data, np.uint8) for part in self._blocks_of(memory.local_rank)]
        self._chosen: list[list[memoryview]] = [
            [payload[:8].data.cast("B").cast("q") for payload in slot.payloads] for slot in cells.slots
        ]

    def _blocks_of(self, rank: int) -> list[Array]:
        segment, length = self._memory.segments[rank], self.block_bytes
        return [segment[number * length :][:length] for number in range(_BLOCKS)]

    def take(self, dtype: np.dtype[Any], count: int) -> Array | None:
        """Return a pack of `count` elements in a free block, and put its number into this rank's cell; None without."""
        number = next((n for n in range(_BLOCKS) if sys.getrefcount(self._mine[n]) == _FREE), _NONE)
        self._chosen[(self._cells.sequence + 1) & 1][self._cells.local_rank][0] = number
        return None if number == _NONE else np.ndarray((count,), dtype, self._mine[number])

    def packs(self, dtype: np.dtype[Any], count: int) -> tuple[Array, ...] | None:
        """Return the packs of all ranks, after the agreement; None, on all of them, when one had no free block."""
        numbers = [int(chosen[0]) for chosen in self._chosen[self._cells.sequence & 1]]
        if _NONE in numbers:
            return None
        nbytes, length = count * dtype.itemsize, self.block_bytes
        segments = self._memory.segments
        return tuple(s[n * length : n * length + nbytes].view(dtype) for s, n in zip(segments, numbers, strict=True))


def _count_of_free_block() -> int:
    blocks = [np.frombuffer(bytearray(1), np.uint8)]
    return next(sys.getrefcount(blocks[n]) for n in range(1))


_FREE = _count_of_free_block()
