"""Memory of a node in which large arrays are added up, and in which their sums stay as results.

Every rank has blocks of each size.  A result is a rank's own block, which is free again after the last reference to the
result or a view of it.  If some rank has no free block of a call's size, and the call is not the first of this size,
it makes a block for each rank: all ranks know of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.shared_memory.segments import SharedMemory

#: Smaller results are new memory each time.
LEAST_BYTES = 2 * 2**20
#: How large each rank's blocks may be together, and how many of a size there may be.
_MOST_BYTES = 2**30
_MOST_BLOCKS = 16
#: In place of a block's number.
NO_BLOCK = -1


class NodeResults:
    """The blocks of all ranks of one node.

    Args:
        share: returns so many bytes for each rank, of its own where they cannot be shared; collective.
        local_rank: this rank.
    """

    def __init__(self, share: Callable[[int], SharedMemory], local_rank: int) -> None:
        self._share, self._rank = share, local_rank
        self._bytes = 0
        self._may_grow = True
        #: By size: the segments of all ranks for each block, and the numbers of this rank's free blocks.
        self._blocks: dict[int, list[tuple[Array, ...]]] = {}
        self._free: dict[int, list[int]] = {}
        #: The blocks of this rank's results, by address and size.
        self._numbers: dict[tuple[int, int], int] = {}

    def new(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return memory for a result: a free block, or else new memory."""
        nbytes = prod(shape) * dtype.itemsize
        number = self.take(nbytes)
        if number == NO_BLOCK:
            return np.empty(shape, dtype)
        # Views refer to this array over a memoryview, not to the segment below it.
        block = np.frombuffer(self._blocks[nbytes][number][self._rank].data, dtype)
        place = _place(block)
        self._numbers[place] = number
        weakref.finalize(block, _give_back, self._free[nbytes], number, self._numbers, place).atexit = False
        return block.reshape(shape)

    def take(self, nbytes: int) -> int:
        """Return the number of a free block, for `give_back`; `NO_BLOCK` without a free block."""
        free = self._free.get(nbytes)
        return free.pop() if free else NO_BLOCK

    def give_back(self, nbytes: int, number: int) -> None:
        """Note that a block that was taken is free again."""
        self._free[nbytes].append(number)

    def number_of(self, result: Array) -> int:
        """Return the number of the block that an array fills; `NO_BLOCK` for another array."""
        return self._numbers.get(_place(result), NO_BLOCK)

    def block(self, nbytes: int, number: int, local_rank: int) -> Array:
        """Return a block of a rank, as bytes."""
        return self._blocks[nbytes][number][local_rank]

    def grow(self, nbytes: int) -> None:
        """Make one more block of a size for each rank, unless this is the first call of the size, or there are many."""
        blocks = self._blocks.get(nbytes)
        if blocks is None:
            self._blocks[nbytes], self._free[nbytes] = [], []
            return
        if not self._may_grow or len(blocks) == _MOST_BLOCKS or self._bytes + nbytes > _MOST_BYTES:
            return
        memory = self._share(nbytes)
        self._may_grow = memory.is_shared
        if memory.is_shared:
            self._bytes += nbytes
            self._free[nbytes].append(len(self._blocks[nbytes]))
            self._blocks[nbytes].append(memory.segments)


def _place(array: Array) -> tuple[int, int]:
    return array.__array_interface__["data"][0], array.nbytes


def _give_back(free: list[int], number: int, numbers: dict[tuple[int, int], int], place: tuple[int, int]) -> None:
    numbers.pop(place, None)
    free.append(number)
