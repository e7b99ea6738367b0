"""Many small arrays become few large buffers: grouped by dtype, in order, up to a number of bytes.

A pack is summed in one call, and the results are views of it: fresh memory without other users.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array, host_wire_dtype
from mpistrategy.options import ReduceOp

#: What bytes_per_pack=0 stands for.
DEFAULT_BYTES_PER_PACK = 32 * 2**20
#: A number that is a view of a larger pack would keep all of it.
FEW_ELEMENTS = 64

#: What one thread of a GPU reads at once.
GPU_ALIGNMENT = 16

Layout = tuple[np.dtype[Any], tuple[int, ...]]
#: The kinds of dtypes that are reduced as they are.
_KINDS = "fiuc"
_Wire = Callable[[np.dtype[Any]], np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Member:
    """One array's place in a pack."""

    index: int
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Pack:
    """One buffer: its dtype on the wire, its length, and the arrays in it, which may have another dtype."""

    dtype: np.dtype[Any]
    size: int
    members: tuple[Member, ...]

    @property
    def nbytes(self) -> int:
        """The length of the buffer in bytes."""
        return self.size * self.dtype.itemsize

    def arrays_in(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """Return the arrays that are in the pack."""
        return arrays if len(self.members) == len(arrays) else [arrays[member.index] for member in self.members]

    def fill(self, arrays: Sequence[Array], buffer: Array | None = None) -> Array:
        """Return a buffer, `buffer` or a new one, with the arrays' values, converted to the wire dtype.

        For packs without gaps, such as packs on the host.
        """
        filled = np.empty(self.size, self.dtype) if buffer is None else buffer
        np.concatenate(self.arrays_in(arrays), axis=None, out=filled, casting="unsafe")
        return filled

    @cached_property
    def starts(self) -> Array:
        """Where the arrays begin; uint64, as addresses are."""
        return np.array([m.start for m in self.members], np.uint64)

    def views(self, buffer: Array) -> list[tuple[int, Array]]:
        """Return (index, view of `buffer` with the array's shape) for every member."""
        return [
            (m.index, buffer[m.start : m.stop] if len(m.shape) == 1 else buffer[m.start : m.stop].reshape(m.shape))
            for m in self.members
        ]


def layouts_of(arrays: Sequence[Any]) -> tuple[Layout, ...]:
    """Return the dtype and the shape of each array."""
    return tuple([(array.dtype, array.shape) for array in arrays])


@lru_cache(maxsize=256)
def plan(
    layouts: tuple[Layout, ...],
    bytes_per_pack: float = 0,
    num_packs: float = 0,
    wire: _Wire = host_wire_dtype,
    alone_bytes: float | None = None,
    alignment: int = 1,
) -> tuple[Pack, ...]:
    """Return the packs of arrays with these layouts.

    Args:
        layouts: dtype and shape of each array.
        bytes_per_pack: an upper bound for a pack of several arrays, 0 for the library's own.
        num_packs: split each dtype's bytes into about so many packs instead, 0 means bytes_per_pack decides.
        wire: returns the dtype in which an array of a dtype travels.
        alone_bytes: arrays of so many bytes and more travel by themselves; None: all are packed.
        alignment: each array begins at a multiple of so many bytes: in GPU memory of 16, which kernels move at a time.
    """
    groups: dict[tuple[np.dtype[Any], int | None], list[int]] = {}
    for index, (own_dtype, shape) in enumerate(layouts):
        dtype = wire(own_dtype)
        is_large = alone_bytes is not None and prod(shape) * dtype.itemsize >= alone_bytes
        groups.setdefault((dtype, index if is_large else None), []).append(index)
    packs: list[Pack] = []
    for (dtype, _), indices in groups.items():
        limit, line = int(bytes_per_pack) or DEFAULT_BYTES_PER_PACK, max(1, alignment // dtype.itemsize)
        if num_packs >= 1:
            total = sum(-(-prod(layouts[index][1]) // line) * line for index in indices) * dtype.itemsize
            limit = max(1, -(-total // int(num_packs)))
        members: list[Member] = []
        for index in indices:
            count = prod(layouts[index][1])
            start = -(-members[-1].stop // line) * line if members else 0
            if members and (start + count) * dtype.itemsize > limit:
                packs.append(Pack(dtype, members[-1].stop, tuple(members)))
                members, start = [], 0
            members.append(Member(index, start, start + count, layouts[index][1]))
        packs.append(Pack(dtype, members[-1].stop, tuple(members)))
    return tuple(packs)


def own_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of the packs of arrays that travel as they are."""
    return dtype


def host_packs(layouts: tuple[Layout, ...], alone_bytes: float, bytes_per_pack: float) -> tuple[Pack, ...]:
    """Return packs of small arrays on the host, and one pack for each array of `alone_bytes` and more."""
    return plan(layouts, bytes_per_pack, alone_bytes=alone_bytes)


def is_simple(dtype: np.dtype[Any], op: ReduceOp) -> bool:
    """Return whether arrays of a dtype are reduced as they are.

    They are NumPy's own, native, and ordered for MIN and MAX.
    """
    fits = op not in (ReduceOp.MIN, ReduceOp.MAX) or dtype.kind != "c"
    return dtype.kind in _KINDS and dtype.isnative and dtype.type.__module__ == "numpy" and fits
