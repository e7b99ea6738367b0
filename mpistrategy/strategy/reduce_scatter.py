"""Reduce-scatter: each rank gets its part of a reduction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.gather import checked_axis
from mpistrategy.reduction.plan import Plan, Transfer
from mpistrategy.reduction.plans import NestPlan, kind_of
from mpistrategy.reduction.reducer import AllReduce
from mpistrategy.reduction.routes.base import CallPlan, Targets

_WHERE = "ReplicaContext.reduce_scatter"


class Scattered(AllReduce):
    """`reduce_scatter`; the `out` of its calls is the axis."""

    @staticmethod
    def kind(value: Any, out: Any) -> Any:
        """Return what tells the calls apart for which there are plans."""
        return kind_of(value), type(out), out

    def leaves_of(self, value: Any, out: Any) -> nest.Leaves | None:
        """Return how to reach the arrays of a value, with their axes in the text that is compared."""
        found = nest.leaves_of(value)
        return found and replace(found, text=_text(found.text, _axes(found.take(value), out, _WHERE)))

    def plan(self, call: Call, value: Any, out: Any, weight: Any) -> CallPlan | None:
        """Return the plan of nests of arrays on the host; see `General.plan`."""
        op = ReduceOp._parse(self.argument, call.where)
        made = self.plan_of_nest(call, op, value, out, None, is_weighted=False)
        return made if isinstance(made, NestPlan) else None

    def transfer(self, plan: Plan, leaves: Sequence[Any], out: Any) -> Transfer:
        """Return what becomes of the arrays: of their reductions each rank gets its parts."""
        axes = _axes(leaves, out, _WHERE)
        parts = [_part(leaf, axis, self.reducer.communicator) for leaf, axis in zip(leaves, axes, strict=True)]
        return _Scattering(plan, parts)

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


class _Scattering(Transfer):
    """The reduction of arrays of which this rank gets its parts.

    Args:
        plan: of the reduction.
        parts: where this rank's part of each result is.
    """

    def __init__(self, plan: Plan, parts: list[tuple[slice, ...]]) -> None:
        self._plan, self._parts, self.layouts, self.results = plan, parts, plan.layouts, plan.results
        self._shapes = [
            np.empty(shape, np.int8)[part].shape for (_, shape), part in zip(plan.layouts, parts, strict=True)
        ]

    def bring(self, arrays: Sequence[Array], targets: Targets = None) -> tuple[list[Array], Any]:
        """Take memory for the parts."""
        return [*map(np.empty, self._shapes, self.results)], self._plan.bring(arrays)

    def run(self, arrays: Sequence[Array], memory: tuple[list[Array], Any]) -> list[Array]:
        """Return the parts."""
        mine, more = memory
        for room, result, part in zip(mine, self._plan.run(arrays, more), self._parts, strict=True):
            room[...] = result[part]
        return mine


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


def _part(leaf: Any, axis: int, communicator: Communicator) -> tuple[slice, ...]:
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
