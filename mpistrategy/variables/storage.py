"""The memory of variables: slabs that the ranks of a node share, with the same offsets on every rank.

Variables are allocated in order of creation, so the variables of one model are neighbours in the memory of every rank.
An optimizer can then update its share of all ranks' copies.  Creation is collective: every rank allocates every
variable, and the ranks' records are equal without communication.

A place is not used again.  A slab is given back, by each rank for itself, when all variables in it and all views of
them have been garbage-collected.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.shared_memory.segments import ALIGNMENT, SharedMemory, aligned

#: The first slab is small: many strategies have few small variables.  Each later slab is twice as large, up to a limit,
#: since each slab costs an open file.
_FIRST_SLAB_BYTES = 2**20
_MOST_SLAB_BYTES = 64 * 2**20


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


class VariableStorage:
    """The memory of the variables of one strategy."""

    def __init__(self) -> None:
        #: The slab that is being filled, and how many of its bytes are used.
        self._slab: SharedMemory | None = None
        self._used = 0
        # Set on all ranks together, when the node has no shared memory (any more).
        self._exhausted = False

    def allocate(
        self, communicator: Ranks, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> tuple[Array, VariableSlot | None]:
        """Return memory for a variable and its slot; None instead of a slot for memory that is not shared.

        All ranks call it inside an agreed call, with equal arguments.  A view of the array keeps the slab.
        If a rank has no memory, all ranks raise.
        """
        nbytes = padded(math.prod(shape) * dtype.itemsize)
        slot = self._slot(communicator, nbytes) if communicator.size > 1 else None
        if slot is None:
            return communicator.guard.on_all(partial(np.empty, shape, dtype)), None
        return np.ndarray(shape, dtype, slot.slab.own_segment[slot.offset : slot.offset + nbytes]), slot

    def _slot(self, communicator: Ranks, nbytes: int) -> VariableSlot | None:
        if self._slab is not None and self._used + nbytes <= self._slab.own_segment.nbytes:
            self._used += nbytes
            return VariableSlot(self._slab, self._used - nbytes)
        if self._exhausted:
            return None
        before = None if self._slab is None else self._slab.own_segment.nbytes
        usual = _FIRST_SLAB_BYTES if before is None else min(2 * before, _MOST_SLAB_BYTES)
        slab = communicator.shared(max(nbytes, usual))
        if not slab.is_shared:
            self._exhausted = True
            return None
        if nbytes < usual:  # a larger variable has a slab for itself
            self._slab, self._used = slab, nbytes
        return VariableSlot(slab, 0)
