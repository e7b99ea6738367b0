"""Kernels on many arrays at once: which launch works on which of them, and what a launch is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.arrays.gpu import by_value
from mpistrategy.errors import FallbackWarning
from mpistrategy.mpi.contract.call_sites import warn

#: A longer array is several for a kernel, whose numbers have 32 bits.
LONGEST = 2**27
_warned: set[str] = set()


@lru_cache(maxsize=64)
def compiled(cupy: Any, source: str, name: str, options: tuple[str, ...], instead: str) -> Any:
    """Return a kernel; None, with one warning, where it cannot be compiled.

    CuPy compiles it with NVRTC the first time, for each device, and keeps the result in its cache on disk.

    Args:
        cupy: the package.
        source: the program.
        name: the kernel in it.
        options: of NVRTC.
        instead: what is done without it, for the warning.
    """
    try:
        module = cupy.RawModule(code=source, options=options)
        module.compile()
        return module.get_function(name)
    except Exception as error:  # of many types: no NVRTC, no headers, a disk that is full
        reason = str(error).strip().partition("\n")[0]
        if instead not in _warned:
            _warned.add(instead)
            warn(f"{instead}: the kernel for all of them cannot be compiled ({reason})", FallbackWarning)
        return None


@dataclass(frozen=True, eq=False)
class Launch:
    """One call of a kernel: all but the addresses.

    Attributes:
        table: the argument without them.
        count: how many arrays it works on.
        blocks: how many blocks do it.
        arrays: which arrays these are.
        before: how many bytes of each are left to the calls before.
    """

    table: Array
    count: int
    blocks: int
    arrays: Array
    before: Array

    def filled(self, addresses: Array) -> Array:
        """Return the argument with the arrays' addresses: a row for each kind of array, in the order of all arrays."""
        made = self.table.copy()
        made["addresses"][0, :, : self.count] = addresses[:, self.arrays] + self.before
        return by_value(made)


def launches(
    sizes: Sequence[int], itemsize: int, table: np.dtype[Any], arrays: int, block_elements: int
) -> list[Launch]:
    """Return the calls of a kernel that work on arrays with so many elements.

    Args:
        sizes: the number of elements of each array.
        itemsize: of one element.
        table: the dtype of the argument: `addresses`, `size`, `first`.
        arrays: how many a table holds.
        block_elements: what one block works on.
    """
    entries = [
        (index, min(LONGEST, size - start), start * itemsize)
        for index, size in enumerate(sizes)
        for start in range(0, size, LONGEST)
    ]
    return [_launch(entries[at : at + arrays], table, block_elements) for at in range(0, len(entries), arrays)]


def _launch(entries: Sequence[tuple[int, int, int]], table: np.dtype[Any], block_elements: int) -> Launch:
    index, size, before = np.array(entries, np.int64).T
    blocks = -(-size // block_elements)
    made = np.zeros(1, table)
    made["size"][0, : len(entries)] = size
    made["first"][0, : len(entries)] = np.cumsum(blocks) - blocks
    return Launch(made, len(entries), int(blocks.sum()), index, before.astype(np.uint64))


def addresses(arrays: Sequence[Any]) -> Array:
    """Return where arrays in GPU memory begin."""
    return np.fromiter((array.data.ptr for array in arrays), np.uint64, len(arrays))
