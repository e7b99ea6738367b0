"""Where the arrays of an arena lie: one bucket for each dtype, in order, each array on a cache line of its own."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrategy.arrays import nest
from mpistrategy.arrays.convert import reducible
from mpistrategy.arrays.devices import gpu_of
from mpistrategy.arrays.dtypes import Array, dtype_name
from mpistrategy.arrays.gpu import cupy_for
from mpistrategy.arrays.values import contribution
from mpistrategy.errors import DTypeError, MpiStrategyError
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.interface.gpu_transport import communication_memory
from mpistrategy.mpi.shared_memory.segments import ALIGNMENT, aligned, private_memory
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.layout.packing import Layout
from mpistrategy.reduction.routes.in_place import Replicas, joined, typed


@dataclass(frozen=True)
class Place:
    """Where one array of an arena lies.

    Attributes:
        bucket: the number of its bucket.
        start: its first element there; on a cache line.
        stop: one past its last element.
        shape: its shape.
    """

    bucket: int
    start: int
    stop: int
    shape: tuple[int, ...]

    def view(self, flat: Array) -> Array:
        """Return the array's view of a flat array of its bucket."""
        return flat[self.start : self.stop].reshape(self.shape)


def layouts_of(leaves: Sequence[Any], like: Any, where: str) -> list[Layout]:
    """Return the dtype and the shape of every leaf.

    Raises:
        DTypeError, LeafError: for a leaf that cannot be reduced.
    """
    try:
        return [_layout(contribution(leaf), where) for leaf in leaves]
    except MpiStrategyError:  # once more, to say which leaf it is
        paths = nest.leaf_paths(like)
        return [_layout(contribution(leaf), where, path) for leaf, path in zip(leaves, paths, strict=True)]


def _layout(leaf: Any, where: str, path: str = "") -> Layout:
    array = reducible(leaf, where, path)
    return array.dtype, array.shape


def laid_out(layouts: Sequence[Layout]) -> tuple[tuple[Place, ...], list[np.dtype[Any]], list[int]]:
    """Return each array's place, and each bucket's dtype and number of elements."""
    numbers: dict[np.dtype[Any], int] = {}
    sizes: list[int] = []
    places = []
    for dtype, shape in layouts:
        number = numbers.setdefault(dtype, len(numbers))
        if number == len(sizes):
            sizes.append(0)
        line = max(1, ALIGNMENT // dtype.itemsize)
        start = -(-sizes[number] // line) * line
        sizes[number] = start + int(np.prod(shape, dtype=np.int64))
        places.append(Place(number, start, sizes[number], shape))
    return tuple(places), list(numbers), sizes


def buckets_for(
    communicator: Communicator,
    dtypes: Sequence[np.dtype[Any]],
    sizes: Sequence[int],
    shared_result: bool,
    on_device: bool = False,
) -> tuple[Replicas, ...]:
    """Return zeroed arrays of these dtypes and sizes for every rank, and one result for the node where it is asked for.

    Collective.
    """
    if on_device:
        return _on_device(communicator, dtypes, sizes, shared_result)
    starts, total = [], 0
    for dtype, size in zip(dtypes, sizes, strict=True):
        starts.append(total)
        total += aligned(size * dtype.itemsize)
    memory = communicator.shared(total)
    is_shared, result = memory.is_shared, None
    if shared_result:
        # Each rank brings its part of the one result: the parts lie side by side.
        if is_shared:
            pages = -(-total // (len(memory.segments) * mmap.PAGESIZE))
            parts = communicator.shared(max(1, pages) * mmap.PAGESIZE)
            is_shared, result = parts.is_shared, joined(parts)
        if not is_shared:
            result = private_memory(total).mine
    buckets = []
    for dtype, size, start in zip(dtypes, sizes, starts, strict=True):
        arrays = typed(memory, start, size, dtype)
        one = None if result is None else result[start : start + size * dtype.itemsize].view(dtype)
        if not is_shared:
            arrays = (arrays[memory.local_rank],)
        buckets.append(Replicas(arrays, memory.local_rank if is_shared else 0, is_shared, one))
    return tuple(buckets)


def _on_device(
    communicator: Communicator, dtypes: Sequence[np.dtype[Any]], sizes: Sequence[int], shared_result: bool
) -> tuple[Replicas, ...]:
    cupy = cupy_for("an arena in GPU memory")
    index = gpu_of(communicator.devices, communicator.rank)
    with cupy.cuda.Device(cupy.cuda.runtime.getDevice() if index is None else index):
        made = []
        for dtype, size in zip(dtypes, sizes, strict=True):
            mine, *result = (communication_memory(cupy, size, dtype) for _ in range(1 + shared_result))
            for array in (mine, *result):
                array[...] = 0
            made.append(Replicas((mine,), result=result[0] if shared_result else None))
    return tuple(made)


def check_dtypes(buckets: Sequence[Replicas], op: ReduceOp, where: str) -> None:
    """Raise DTypeError for a MEAN of integers, which does not fit where they are, and an order of complex numbers."""
    for bucket in buckets:
        dtype = bucket.mine.dtype
        if op is ReduceOp.MEAN and dtype.kind in "iu":
            raise DTypeError.at(
                where,
                found=f"MEAN of {dtype_name(dtype)} in an arena",
                expected="a floating dtype: a mean of integers is none, and does not fit where they are",
                fix="Reduce with SUM, or pass arena.values without out=.",
            )
        if op in (ReduceOp.MIN, ReduceOp.MAX) and dtype.kind == "c":
            raise DTypeError.at(where, found=f"{op.name} of {dtype_name(dtype)}", expected="numbers that have an order")
