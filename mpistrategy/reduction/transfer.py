"""Transfers: how a list of arrays is packed, moved in a call that all ranks make, and finished.

Many small arrays become few large buffers: grouped by dtype, in order, up to a number of bytes.  A pack is summed in
one call, and the results are views of it: fresh memory without other users.

A route is the transfer of arrays in the dtypes in which they are combined: one way for bytes to travel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, TypeAlias

import numpy as np

from mpistrategy.arrays.convert import are_apart, is_on_device
from mpistrategy.arrays.dtypes import Array, divide_by, dtype_name, host_wire_dtype, is_buffer, mean_dtype, quietly
from mpistrategy.objects.shown import size_in_words
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

    def views(self, buffer: Array) -> list[tuple[int, Array]]:
        """Return (index, view of `buffer` with the array's shape) for every member."""
        return [
            (m.index, buffer[m.start : m.stop] if len(m.shape) == 1 else buffer[m.start : m.stop].reshape(m.shape))
            for m in self.members
        ]

    def unpack(self, buffer: Array, results: list[Any]) -> None:
        """Write the views of `buffer` into the results of all arrays; a number is copied out of a large pack."""
        members = self.members
        if len(members) == 1:  # the buffer itself may be an array of the caller's
            results[members[0].index] = buffer if buffer.shape == members[0].shape else buffer.reshape(members[0].shape)
            return
        copies_numbers = self.size > FEW_ELEMENTS
        for m in members:
            array = buffer[m.start : m.stop].reshape(m.shape)
            results[m.index] = array.copy() if copies_numbers and m.stop - m.start == 1 else array


def layouts_of(arrays: Sequence[Any]) -> tuple[Layout, ...]:
    """Return the dtype and the shape of each array."""
    return tuple([(array.dtype, array.shape) for array in arrays])


@lru_cache(maxsize=256)
def packs_of(
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


def dtypes_of_results(layouts: tuple[Layout, ...], op: ReduceOp) -> list[np.dtype[Any]]:
    """Return the dtype of each result."""
    return [mean_dtype(dtype) if op is ReduceOp.MEAN else dtype for dtype, _ in layouts]


def is_simple(dtype: np.dtype[Any], op: ReduceOp) -> bool:
    """Return whether arrays of a dtype are reduced as they are.

    They are NumPy's own, native, and ordered for MIN and MAX.
    """
    fits = op not in (ReduceOp.MIN, ReduceOp.MAX) or dtype.kind != "c"
    return dtype.kind in _KINDS and dtype.isnative and dtype.type.__module__ == "numpy" and fits


# ------------------------------------------------------------------------------------------------- transfers

#: For each array memory that a result in its own dtype may be written to, contiguous and sharing none with another
#: array; or None.
Targets: TypeAlias = "Sequence[Array | None] | None"
#: How a pack travels, and the copies on this rank; in words.
Way: TypeAlias = "tuple[str, tuple[str, ...]]"


class Transfer(ABC):
    """The work on arrays of certain layouts before the ranks agree on a call, and after the agreement.

    Attributes:
        packs: the buffers that travel: several arrays in one, or one array by itself.
        layouts: dtype and shape of each array.
        writes_targets: whether `bring` takes targets.
        sparingly: whether `run` needs no barrier before it; see `Call.agree`.
        least_in_place: from how many bytes on results are best written over the arrays.
    """

    packs: tuple[Pack, ...] = ()
    layouts: tuple[Layout, ...] = ()
    writes_targets: bool = False
    sparingly: bool = True
    least_in_place: int = 0

    def direct(self, arrays: Sequence[Array], targets: Sequence[Any]) -> Targets:
        """Return for each array the target itself where its result may be written there while others are read.

        None for an array means that its result is copied there at the end; None instead of a list: all results are.
        """
        sources = [array for target, array in zip(targets, arrays, strict=True) if target is not array]
        if not sources and sum([array.nbytes for array in arrays]) < self.least_in_place:
            return None
        # Arrays that own their memory share none with each other.
        if (sources or any(target.base is not None for target in targets)) and not are_apart([*targets, *sources]):
            return None
        return [target if is_buffer(target) else None for target in targets]

    @abstractmethod
    def bring(self, arrays: Sequence[Array], targets: Targets = None) -> Any:
        """Do all that can fail, before the ranks agree on the call: copy, and take memory for the results.

        Returns:
            The memory, for `run`.  Results may be written to `targets`, which keep their values until then.
        """

    @abstractmethod
    def run(self, arrays: Sequence[Array], memory: Any) -> list[Array]:
        """Return the results, after the agreement."""

    def answer(self) -> None:
        """Answer ranks that ask for the structure of the values, after an agreement that says so."""
        raise NotImplementedError(type(self).__name__)

    def way(self, pack: Pack, arrays: Sequence[Array]) -> Way:
        """Return how a pack of these arrays travels."""
        raise NotImplementedError(type(self).__name__)

    def describe(self, arrays: Sequence[Array]) -> list[tuple[Pack, Way]]:
        """Return the packs of these arrays and how they travel, for `Strategy.explain`."""
        return [(pack, self.way(pack, arrays)) for pack in self.packs if pack.size]


def copies_of(pack: Pack, arrays: Sequence[Array]) -> tuple[str, ...]:
    """Return the copies that are made before a pack of these arrays travels, and afterwards."""
    if any(array.dtype != pack.dtype for array in pack.arrays_in(arrays)):
        return (f"all into {pack.dtype.name} and the results back",)
    if len(pack.members) > 1:
        return ("all into the pack",)
    return () if is_buffer(arrays[pack.members[0].index]) else ("all in order",)


def ways_in_words(ways: Sequence[tuple[Pack, Way]]) -> list[str]:
    """Return two lines for the packs of a dtype that take one way."""
    groups: dict[Any, list[Pack]] = {}
    for pack, way in ways:
        groups.setdefault((way, pack.dtype, len(pack.members) > 1), []).append(pack)
    lines = []
    for ((way, copies), dtype, _), group in groups.items():
        count, nbytes = sum(len(pack.members) for pack in group), sum(pack.nbytes for pack in group)
        buffers = f"{counted(count, 'array')} in {counted(len(group), 'buffer')}"
        subject = f"{buffers}, {dtype_name(dtype)}, {size_in_words(nbytes)}"
        lines += [f"{subject}: {way}", f"  copies: {', '.join(copies) or 'none'}"]
    return lines


def counted(number: int, noun: str) -> str:
    """Return "1 array", "2 arrays"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


# ------------------------------------------------------------------------------------ from a sum to the result


def finish(total: Array, dtype: np.dtype[Any], op: ReduceOp, count: int, out: Array | None = None) -> Array:
    """Turn a sum in the wire dtype into the result: divide for MEAN, and round once to the result's dtype.

    Sums of integers wrap around, as NumPy's do.  On the host the result is written into `out`, if given: an array of
    the result's dtype and shape.
    """
    if op is ReduceOp.MEAN:
        return rounded(divide(total, count, out), mean_dtype(dtype), out)
    return rounded(total, dtype, out)


@quietly
def rounded(result: Array, dtype: np.dtype[Any], out: Array | None = None) -> Array:
    """Return `result` in `dtype`, in `out` if given; else no copy where it is that already."""
    if out is None:
        return result.astype(dtype, copy=False)
    if out is not result:
        np.copyto(out, result, casting="unsafe")
    return out


@quietly
def divide(total: Array, count: int | float, out: Array | None = None) -> Array:
    """Return ``total / count`` in the dtype of a mean: in place where it is the same dtype, else in `out` if given."""
    target = mean_dtype(total.dtype)
    if target == total.dtype:
        divide_by(count, total)
        return total
    if is_on_device(total):
        quotient: Array = np.true_divide(total, count, dtype=np.float64).astype(target, copy=False)
        return quotient
    # Divided in float64 and rounded as it is written: no array of that dtype is made.
    return np.true_divide(total, np.float64(count), out=np.empty(total.shape, target) if out is None else out)
