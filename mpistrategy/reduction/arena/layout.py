"""Where the arrays of an arena lie: one bucket for each dtype, in order, each array on a cache line of its own."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays.devices import gpu_of
from mpistrategy.arrays.dtypes import dtype_name
from mpistrategy.arrays.gpu import cupy_for
from mpistrategy.errors import DTypeError
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.interface.gpu_transport import communication_memory
from mpistrategy.mpi.shared_memory.segments import ALIGNMENT, aligned, private_memory
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.inputs import check_order
from mpistrategy.reduction.layout import packing
from mpistrategy.reduction.layout.packing import Layout, Member, Pack
from mpistrategy.reduction.routes.in_place import Replicas, joined, typed

#: More than any arena has: all arrays of a dtype lie in one bucket.
_NO_LIMIT = 2**62


def laid_out(layouts: tuple[Layout, ...]) -> tuple[tuple[Pack, ...], list[tuple[int, Member]]]:
    """Return the buckets of arrays with these layouts; and for each array the number of its bucket, and its place."""
    packs = packing.plan(layouts, _NO_LIMIT, 0, _itself, None, ALIGNMENT)
    places = {m.index: (number, m) for number, pack in enumerate(packs) for m in pack.members}
    return packs, [places[index] for index in range(len(layouts))]


def _itself(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype


def buckets_for(
    communicator: Communicator, packs: Sequence[Pack], shared_result: bool, on_device: bool
) -> tuple[Replicas, ...]:
    """Return the zeroed memory of these buckets for every rank, and one result for the node where it is asked for.

    Collective.
    """
    if on_device:
        return _on_device(communicator, packs, shared_result)
    starts, total = [], 0
    for pack in packs:
        starts.append(total)
        total += aligned(pack.nbytes)
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
    for pack, start in zip(packs, starts, strict=True):
        arrays = typed(memory, start, pack.size, pack.dtype)
        one = None if result is None else result[start : start + pack.nbytes].view(pack.dtype)
        if not is_shared:
            arrays = (arrays[memory.local_rank],)
        buckets.append(Replicas(arrays, memory.local_rank if is_shared else 0, is_shared, one))
    return tuple(buckets)


def _on_device(communicator: Communicator, packs: Sequence[Pack], shared_result: bool) -> tuple[Replicas, ...]:
    cupy = cupy_for("an arena in GPU memory")
    index = gpu_of(communicator.devices, communicator.rank)
    with cupy.cuda.Device(cupy.cuda.runtime.getDevice() if index is None else index):
        made = []
        for pack in packs:
            mine, *result = (communication_memory(cupy, pack.size, pack.dtype) for _ in range(1 + shared_result))
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
                expected="a floating dtype: the mean of integers is not an integer, and does not fit into the arena",
                fix="Reduce with SUM, or pass arena.values without out=.",
            )
        check_order(dtype, op, where)
