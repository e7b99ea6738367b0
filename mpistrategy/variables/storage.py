"""Where variables are stored: in slabs of memory that the ranks of a node share, at the same places on every rank.

Variables are placed in order of creation, so that those of one model lie side by side, in the memory of every rank
alike: an optimizer can then work on its share of all ranks' copies.  Creation is collective, so that every rank places
every variable, and all ranks' notes are equal without a word between them.

When a variable has been collected, and every array that looks into it, its block can be used again.  Ranks collect at
different times.  So they compare what is free when there is no room left, and release what is free on all of them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.shared_memory.segments import ALIGNMENT, SharedMemory, aligned

#: A strategy with few small variables takes no more than the first size.  Later slabs grow with what there is
#: already, since each one costs an open file.
_FIRST_SLAB_BYTES = 2**20
_SLAB_BYTES = 4 * 2**20
_SLAB_FRACTION = 8
#: When less than this part of a slab has come free, a new slab is made, too: looking for free blocks takes a
#: collective, and must not be needed again soon.
_WORTHWHILE = 4


class Slab:
    """One piece of shared memory for variables.

    Args:
        memory: what the node's ranks share.

    Attributes:
        segments: the memory of each rank of the node, as flat uint8 arrays, by local rank.
        local_rank: this rank's index among them.
        nbytes: the size of each.
    """

    is_shared = True

    def __init__(self, memory: SharedMemory) -> None:
        self.segments = memory.segments
        self.local_rank = memory.local_rank
        self.nbytes = memory.mine.nbytes
        self._typed: dict[np.dtype[Any], tuple[Array, ...]] = {}

    def replicas(self, dtype: np.dtype[Any]) -> tuple[Array, ...]:
        """Return the memory of each rank of the node as elements of `dtype`, by local rank."""
        typed = self._typed.get(dtype)
        if typed is None:
            whole = self.nbytes // dtype.itemsize * dtype.itemsize
            typed = self._typed[dtype] = tuple(segment[:whole].view(dtype) for segment in self.segments)
        return typed


class Block(NamedTuple):
    """Where a variable lies, in the memory of every rank of its node.

    Attributes:
        slab: the memory.
        offset: its first byte there, on a cache line.
    """

    slab: Slab
    offset: int


def contiguous(variables: Iterable[Any]) -> bool:
    """Return whether variables lie one after another in one slab, with nothing between them but their alignment."""
    end: tuple[Slab, int] | None = None
    for variable in variables:
        block = variable.block
        if block is None or (end is not None and (block.slab is not end[0] or block.offset != end[1])):
            return False
        end = (block.slab, block.offset + padded(variable.local_view.nbytes))
    return True


def padded(nbytes: int) -> int:
    """Return the bytes that a block of so many takes."""
    return max(ALIGNMENT, aligned(nbytes))


@dataclass
class _Placed:
    """A block in use: by a variable, or by an array that looks into one."""

    slab: Slab
    start: int
    stop: int
    memory: weakref.ref[Array]


@dataclass
class _Room:
    """The free ranges of one slab, in order; as (start, stop)."""

    slab: Slab
    free: list[tuple[int, int]] = field(default_factory=list)

    def take(self, nbytes: int) -> int | None:
        """Return where the first free range of that size begins, and use it; None when there is none."""
        for number, (start, stop) in enumerate(self.free):
            if stop - start >= nbytes:
                if stop - start == nbytes:
                    del self.free[number]
                else:
                    self.free[number] = (start + nbytes, stop)
                return start
        return None

    def release(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Make ranges free again; neighbours become one."""
        merged: list[tuple[int, int]] = []
        for start, stop in sorted([*self.free, *ranges]):
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
        self.free = merged

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in it."""
        return self.free == [(0, self.slab.nbytes)]


class VariableStorage:
    """The memory of the variables of one strategy."""

    def __init__(self) -> None:
        self._rooms: list[_Room] = []
        self._placed: list[_Placed] = []
        # Set when the node has no shared memory (any more), on all ranks alike.
        self._exhausted = False

    @property
    def nbytes(self) -> int:
        """The size of all slabs, for each rank."""
        return sum(room.slab.nbytes for room in self._rooms)

    def allocate(
        self, communicator: Communicator, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> tuple[Array, Block | None]:
        """Return memory for a variable, and where it is: None for memory of this rank's own.

        To be called inside an agreed call by all ranks, with equal arguments.  Whatever looks into the array keeps
        its memory from being used again.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        found = None
        if communicator.size > 1:
            found = self._find(padded(nbytes)) or self._find_more(communicator, padded(nbytes))
        if found is None:
            return np.empty(shape, dtype), None
        slab, start = found
        stop = start + padded(nbytes)
        # By way of a memoryview: NumPy lets views of views refer to the first array with a base that is no array.
        # That array is then this variable's own, and not the slab's.
        memory = np.frombuffer(slab.segments[slab.local_rank].data[start:stop], np.uint8)
        self._placed.append(_Placed(slab, start, stop, weakref.ref(memory)))
        return np.ndarray(shape, dtype, memory), Block(slab, start)

    def _find(self, nbytes: int) -> tuple[Slab, int] | None:
        for room in self._rooms:
            start = room.take(nbytes)
            if start is not None:
                return room.slab, start
        return None

    def _find_more(self, communicator: Communicator, nbytes: int) -> tuple[Slab, int] | None:
        """Look for what is free on all ranks, then make a new slab.  Collective."""
        if self._exhausted and not self._rooms:
            return None
        released = self._release(communicator, nbytes) if self._placed else 0
        enough = self._exhausted or released >= max(nbytes, _SLAB_BYTES // _WORTHWHILE)
        found = self._find(nbytes) if enough else None
        if found is not None or self._exhausted:
            return found
        least = _SLAB_BYTES if self._rooms else _FIRST_SLAB_BYTES
        memory = communicator.shared(max(nbytes, least, padded(self.nbytes // _SLAB_FRACTION)))
        if not memory.is_shared:
            self._exhausted = True
            return self._find(nbytes)
        slab = Slab(memory)
        self._rooms.append(_Room(slab, [(0, slab.nbytes)]))
        return self._find(nbytes)

    def _release(self, communicator: Communicator, nbytes: int) -> int:
        """Make the blocks free that no rank uses any more; return how many bytes.  Collective.

        Slabs without any block are given back, but for one in which the next `nbytes` can be placed.
        """
        is_free = np.array([placed.memory() is None for placed in self._placed], np.int32)
        communicator.allreduce(is_free, "MIN")
        ranges: dict[int, list[tuple[int, int]]] = {}
        kept, released = [], 0
        for placed, free in zip(self._placed, is_free.tolist(), strict=True):
            if free:
                ranges.setdefault(id(placed.slab), []).append((placed.start, placed.stop))
                released += placed.stop - placed.start
            else:
                kept.append(placed)
        self._placed = kept
        for room in self._rooms:
            room.release(ranges.get(id(room.slab), ()))
        empty = [room for room in self._rooms if room.is_empty]
        fits = [room for room in empty if room.slab.nbytes >= nbytes]
        stays = min(fits, key=lambda room: room.slab.nbytes, default=None)
        self._rooms = [room for room in self._rooms if not room.is_empty or room is stays]
        return released
