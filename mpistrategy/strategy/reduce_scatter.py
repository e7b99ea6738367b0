"""Reduce-scatter: each rank gets its part of a reduction."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from mpistrategy.arrays import nest
from mpistrategy.arrays.convert import copy_of, is_on_device, like_given, on_device_of, reducible
from mpistrategy.arrays.dtypes import Array, mean_dtype
from mpistrategy.arrays.values import IndexedSlices, contribution
from mpistrategy.errors import UnsupportedError
from mpistrategy.input.distributed import part_of_batch
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.gather import checked_axis
from mpistrategy.reduction.reducer import General

_WHERE = "ReplicaContext.reduce_scatter"


class Scattered(General):
    """`reduce_scatter`; the `out` of its calls is the axis."""

    def run(self, call: Call, value: Any, out: Any, weight: Any) -> Any:
        """Return this rank's parts; see `CallPlan.run`."""
        leaves, structure = nest.flatten_without_none(value)
        axes = _axes(leaves, out, call.where)
        call.structure = _text(structure.text, axes)
        op = ReduceOp._parse(self.argument, call.where)
        if self.reducer.agrees_on_none(call, op, structure):
            return structure.pack([])
        parts = [_part(leaf, axis, self.reducer.communicator) for leaf, axis in zip(leaves, axes, strict=True)]
        memory = [_room(leaf, part, op) for leaf, part in zip(leaves, parts, strict=True)]
        paths = partial(nest.paths_without_none, value)
        results = self.reducer.all_reduce_leaves(call, op, leaves, paths, options=self.options)
        return structure.pack([*map(_own_part, results, leaves, parts, memory)])


def _text(structure: str, axes: list[int]) -> str:
    """Return the structure and the axes, as the ranks compare them."""
    return f"{structure} along axis {', '.join(map(str, axes))}"


def _axes(leaves: Sequence[Any], axis: Any, where: str) -> list[int]:
    """Return the axis of each leaf as an index from 0 on."""
    return [_axis(leaf, axis, where) for leaf in leaves]


def _axis(leaf: Any, axis: Any, where: str) -> int:
    """Return the axis of a leaf as an index from 0 on."""
    mine = contribution(leaf)
    if isinstance(mine, IndexedSlices):
        raise UnsupportedError.at(where, found="IndexedSlices", expected="an array", fix="Use to_dense().")
    return checked_axis(axis, reducible(mine, where).ndim, where)


def _part(leaf: Any, axis: int, communicator: Ranks) -> tuple[slice, ...]:
    """Return where this rank's part of a reduced leaf is."""
    length = reducible(contribution(leaf), _WHERE).shape[axis]
    return (slice(None),) * axis + (part_of_batch(length, communicator.rank, communicator.size),)


def _room(leaf: Any, part: tuple[slice, ...], op: ReduceOp) -> Array | None:
    """Return memory for this rank's part, taken before the ranks agree on the call; None for a leaf on a GPU."""
    array = reducible(contribution(leaf), _WHERE)
    if is_on_device(array):
        return None
    return np.empty(array[part].shape, mean_dtype(array.dtype) if op is ReduceOp.MEAN else array.dtype)


def _own_part(result: Any, leaf: Any, part: tuple[slice, ...], room: Array | None) -> Any:
    """Return a copy of this rank's part of a reduced array, in `room` if given, as the kind of array that was given."""
    array = reducible(result, _WHERE)
    if room is None:
        with on_device_of(array):
            return like_given(copy_of(array[part]), contribution(leaf))
    room[...] = array[part]
    return like_given(room, contribution(leaf))
