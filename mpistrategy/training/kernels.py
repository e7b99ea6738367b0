"""Updates of variables on the host by a kernel, in place, in flat pieces that fit the cache.

So a step needs no temporary arrays of the variable's size, and its bits equal the formula's on whole arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from mpistrategy.arrays.convert import is_on_device
from mpistrategy.arrays.dtypes import Array, span
from mpistrategy.training.formulas import SCRATCH_ARRAYS, Kernel

#: The most bytes of one array that a kernel is given at once.  The arrays of a step then stay in the cache between its
#: operations.  Smaller pieces are slower: they need more calls (measured, 64 KiB to 4 MiB).
CHUNK_BYTES = 2**19


#: Temporary arrays, made once for each dtype.
Scratch: TypeAlias = dict[np.dtype[Any], Array]


def scratch_of(scratch: Scratch, dtype: np.dtype[Any], size: int) -> tuple[Array, ...]:
    """Return ``SCRATCH_ARRAYS + 1`` arrays of `size` elements (at most `chunk_size`): always the same memory."""
    if dtype not in scratch:
        scratch[dtype] = np.empty((SCRATCH_ARRAYS + 1, chunk_size(dtype)), dtype)
    return tuple(scratch[dtype][:, :size])


def chunk_size(dtype: np.dtype[Any]) -> int:
    """Return how many elements of `dtype` a kernel is given at once, at most."""
    return CHUNK_BYTES // dtype.itemsize


def chunks(start: int, stop: int, size: int) -> list[slice]:
    """Return the pieces of at most `size` elements from `start` to `stop`."""
    return [slice(first, min(first + size, stop)) for first in range(start, stop, size)]


class FlatUpdate:
    """One variable and its slots, cut into chunks once; `run` makes a step.

    Args:
        parameter: the variable's memory, C-contiguous.
        slots: its slots' memory by name, of the same shape and dtype.
        scratch: temporary arrays for the kernel.
    """

    def __init__(self, parameter: Array, slots: Mapping[str, Array], scratch: Scratch) -> None:
        flat, beside = parameter.reshape(-1), {name: slot.reshape(-1) for name, slot in slots.items()}
        pieces = chunks(0, flat.size, chunk_size(flat.dtype))
        #: Each piece of the gradient, None for all of it, and what a step changes there.
        self._chunks = [
            (
                piece if len(pieces) > 1 else None,
                flat[piece],
                {name: slot[piece] for name, slot in beside.items()},
                scratch_of(scratch, flat.dtype, piece.stop - piece.start)[:SCRATCH_ARRAYS],
            )
            for piece in pieces
        ]

    def run(self, kernel: Kernel, gradient: Array) -> None:
        """Make one step with a gradient that has the variable's shape and dtype, and shares no memory with it."""
        flat = gradient if gradient.ndim == 1 else gradient.reshape(-1)
        for piece, parameter, slots, scratch in self._chunks:
            kernel(parameter, flat if piece is None else flat[piece], slots, scratch)


class ChangedMemory:
    """The memory that steps write to.

    Args:
        arrays: the variables and their slots, or larger arrays that hold them.
    """

    def __init__(self, arrays: Sequence[Any]) -> None:
        self._blocks = {array.data.mem.ptr for array in arrays if is_on_device(array)}
        spans = [span(array) for array in arrays if not is_on_device(array)]
        self._begin = min((begin for begin, _ in spans), default=0)
        self._end = max((end for _, end in spans), default=0)

    def apart(self, arrays: Sequence[Any]) -> list[Any]:
        """Return `arrays`, with copies of arrays that may share this memory: a step would change them as it reads.

        An array that owns its memory shares none.
        """
        return [
            array if (type(array) is np.ndarray and array.base is None) or not self._holds(array) else array.copy()
            for array in arrays
        ]

    def _holds(self, array: Any) -> bool:
        if is_on_device(array):
            return array.data.mem.ptr in self._blocks
        begin, end = span(array)
        return begin < self._end and self._begin < end
