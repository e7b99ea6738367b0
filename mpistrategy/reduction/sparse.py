"""Reduction of IndexedSlices: values and indices of all replicas, one after another in replica order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

import numpy as np

from mpistrategy.arrays.convert import array_where_it_is, host_array, is_on_device, reducible
from mpistrategy.arrays.dtypes import Array, dtype_name
from mpistrategy.arrays.gpu import layout_of
from mpistrategy.arrays.values import IndexedSlices
from mpistrategy.errors import DTypeError, ShapeError, UnsupportedError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.layout.finish import divide
from mpistrategy.reduction.routes import on_device
from mpistrategy.reduction.routes.base import Targets


def checked(slices: IndexedSlices, op: ReduceOp, where: str) -> IndexedSlices:
    """Return `slices` with arrays for values and indices.

    Raises:
        ShapeError: when there is not one index for each row of values.
        DTypeError: for indices that are no integers.
        UnsupportedError: for an operation other than SUM and MEAN.
    """
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise UnsupportedError.at(
            where, found=f"{op.name} of IndexedSlices", expected="SUM or MEAN", fix="Use to_dense()."
        )
    values = reducible(slices.values, where, ".values")
    indices = array_where_it_is(slices.indices, where, ".indices")
    if indices.dtype.kind not in "iu":
        raise DTypeError.at(where, found=f"indices of dtype {dtype_name(indices.dtype)}", expected="integer indices")
    if values.ndim == 0 or indices.shape != values.shape[:1]:
        raise ShapeError.at(
            where,
            found=f"IndexedSlices with values {values.shape} and indices {indices.shape}",
            expected="one index for each row of values",
        )
    return IndexedSlices(values, indices, slices.dense_shape)


def layout(slices: IndexedSlices) -> tuple[str, tuple[int, ...]]:
    """Return what must be equal on all ranks: dtypes and the rows' shape, not the number of rows."""
    dense = "?" if slices.dense_shape is None else str([int(n) for n in host_array(slices.dense_shape)])
    kinds = [layout_of(part)[0] for part in (slices.values, slices.indices)]
    return f"IndexedSlices<{','.join(kinds)},{dense}>", slices.values.shape[1:]


def concatenate(communicator: Ranks, slices: IndexedSlices, op: ReduceOp, call: Call) -> IndexedSlices:
    """Return all ranks' slices in rank order, on every rank; MEAN divides the values by the number of ranks."""
    lengths: Array = np.zeros(communicator.size, np.int64)
    communicator.allgatherv(np.array([slices.values.shape[0]]), [1] * communicator.size, lengths)
    rows = lengths.tolist()
    values, indices = gather_all(communicator, [(slices.values, rows), (slices.indices, rows)])
    if op is ReduceOp.MEAN:
        values = communicator.guard.on_all(lambda: divide(values, communicator.size))
    return IndexedSlices(values, indices, slices.dense_shape)


def gather_all(communicator: Ranks, blocks: Sequence[tuple[Array, list[int]]], into: Targets = None) -> list[Array]:
    """Return, for each (block, rows), the blocks of all ranks along the first axis.  Collective.

    ``rows[r]`` is the length of rank r's block.  Results on the host are in the memory of `into`, which may have the
    blocks, where there is some of that size.  If a rank has no memory for the result, all ranks raise.
    """
    targets = [None] * len(blocks) if into is None else into
    rooms = communicator.guard.on_all(lambda: [*map(partial(_room, communicator), blocks, targets)])
    for (block, rows), (mine, result) in zip(blocks, rooms, strict=True):
        counts = [count * prod(block.shape[1:]) for count in rows]
        if is_on_device(block):
            on_device.gather_rows(communicator, mine, counts, result)
        else:
            communicator.allgatherv(mine, counts, result)
    return [result for _, result in rooms]


def _room(communicator: Ranks, given: tuple[Array, list[int]], target: Array | None) -> tuple[Array, Array]:
    """Return a block, contiguous, and memory for the blocks of all ranks."""
    block, rows = given
    if is_on_device(block):
        return on_device.room_for_rows(communicator, block, rows)
    shape = (sum(rows), *block.shape[1:])
    fits = target is not None and (target.shape, target.dtype) == (shape, block.dtype)
    memory: Array = target if target is not None and fits else np.empty(shape, block.dtype)
    return block.copy() if np.may_share_memory(block, memory) else np.ascontiguousarray(block), memory
