"""The memory of variables: slabs that the ranks of a node share, with the same offsets on every rank.

Variables are allocated in order of creation, so the variables of one model are neighbours in the memory of every rank.
An optimizer can then update its share of all ranks' copies.  Creation is collective: every rank allocates every
variable, and the ranks' records are equal without communication.

A slot can be used again when its variable and every view of it have been garbage-collected.  Ranks collect at
different times.  So when a slab is full, they compare which slots are free, and release those free on all ranks.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.shared_memory.segments import ALIGNMENT, SharedMemory, aligned

#: The first slab is small: many strategies have few small variables.  Later slabs grow with the total size, since each
#: slab costs an open file.
_FIRST_SLAB_BYTES = 2**20
_SLAB_BYTES = 4 * 2**20
_SLAB_FRACTION = 8
#: When less than 1 / this of a slab was released, a new slab is made as well: the search for free slots is a
#: collective, and should not be needed again soon.
_WORTHWHILE = 4


class VariableSlot(NamedTuple):
    """The position of a variable, the same in the memory of every rank of its node.

    Attributes:
        slab: the memory of all ranks of the node.
        offset: the first byte in it; on a cache line.
    """

    slab: SharedMemory
    offset: int


def padded(nbytes: int) -> int:
    """Return the size of a slot for so many bytes."""
    return max(ALIGNMENT, aligned(nbytes))


@dataclass
class _UsedSlot:
    """A slot in use by a variable or by a view of one."""

    slab: SharedMemory
    start: int
    stop: int
    memory: weakref.ref[Array]


@dataclass
class _SlabSpace:
    """The free ranges of one slab, in order; as (start, stop)."""

    slab: SharedMemory
    free: list[tuple[int, int]] = field(default_factory=list)

    def take(self, nbytes: int) -> int | None:
        """Return the start of the first free range of that size and mark it used; None when there is none."""
        for number, (start, stop) in enumerate(self.free):
            if stop - start >= nbytes:
                if stop - start == nbytes:
                    del self.free[number]
                else:
                    self.free[number] = (start + nbytes, stop)
                return start
        return None

    def release(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Mark ranges free; neighbours are merged."""
        merged: list[tuple[int, int]] = []
        for start, stop in sorted([*self.free, *ranges]):
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
        self.free = merged

    @property
    def nbytes(self) -> int:
        """The size of the slab, for each rank."""
        return self.slab.mine.nbytes

    @property
    def is_empty(self) -> bool:
        """Whether no slot of the slab is in use."""
        return self.free == [(0, self.nbytes)]


class VariableStorage:
    """The memory of the variables of one strategy."""

    def __init__(self) -> None:
        self._spaces: list[_SlabSpace] = []
        self._used: list[_UsedSlot] = []
        # Set on all ranks together, when the node has no shared memory (any more).
        self._exhausted = False

    @property
    def nbytes(self) -> int:
        """The size of all slabs, for each rank."""
        return sum(space.nbytes for space in self._spaces)

    def allocate(
        self, communicator: Communicator, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> tuple[Array, VariableSlot | None]:
        """Return memory for a variable and its slot; None instead of a slot for memory that is not shared.

        All ranks call it inside an agreed call, with equal arguments.  A view of the array keeps the slot in use.
        If a rank has no memory, all ranks raise.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        found = None
        if communicator.size > 1:
            found = self._find(padded(nbytes)) or self._find_more(communicator, padded(nbytes))
        if found is None:
            return communicator.guard.on_all(partial(np.empty, shape, dtype)), None
        slab, start = found
        stop = start + padded(nbytes)
        # Through a memoryview: the base of a view of a view is the first array whose own base is not an array.  So
        # views keep this array alive, which belongs to one variable, and not the slab's array.
        memory = np.frombuffer(slab.mine.data[start:stop], np.uint8)
        self._used.append(_UsedSlot(slab, start, stop, weakref.ref(memory)))
        return np.ndarray(shape, dtype, memory), VariableSlot(slab, start)

    def _find(self, nbytes: int) -> tuple[SharedMemory, int] | None:
        for space in self._spaces:
            start = space.take(nbytes)
            if start is not None:
                return space.slab, start
        return None

    def _find_more(self, communicator: Communicator, nbytes: int) -> tuple[SharedMemory, int] | None:
        """Release what is free on all ranks, then make a new slab if needed.  Collective."""
        if self._exhausted and not self._spaces:
            return None
        released = self._release(communicator, nbytes) if self._used else 0
        enough = self._exhausted or released >= max(nbytes, _SLAB_BYTES // _WORTHWHILE)
        found = self._find(nbytes) if enough else None
        if found is not None or self._exhausted:
            return found
        least = _SLAB_BYTES if self._spaces else _FIRST_SLAB_BYTES
        slab = communicator.shared(max(nbytes, least, padded(self.nbytes // _SLAB_FRACTION)))
        if slab.is_shared:
            self._spaces.append(_SlabSpace(slab, [(0, slab.mine.nbytes)]))
        else:
            self._exhausted = True
        return self._find(nbytes)

    def _release(self, communicator: Communicator, nbytes: int) -> int:
        """Release the slots that no rank uses any more; return how many bytes.  Collective.

        Empty slabs are freed, except one that can hold the next `nbytes`.
        """
        is_free = np.array([slot.memory() is None for slot in self._used], np.int32)
        communicator.allreduce(is_free, "MIN")
        ranges: dict[int, list[tuple[int, int]]] = {}
        kept, released = [], 0
        for slot, free in zip(self._used, is_free.tolist(), strict=True):
            if free:
                ranges.setdefault(id(slot.slab), []).append((slot.start, slot.stop))
                released += slot.stop - slot.start
            else:
                kept.append(slot)
        self._used = kept
        for space in self._spaces:
            space.release(ranges.get(id(space.slab), ()))
        empty = [space for space in self._spaces if space.is_empty]
        fits = [space for space in empty if space.nbytes >= nbytes]
        stays = min(fits, key=lambda space: space.nbytes, default=None)
        self._spaces = [space for space in self._spaces if not space.is_empty or space is stays]
        return released
