"""Reductions over the replicas and along axes of their arrays, whose lengths may differ."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from mpistrategy.arrays import nest
from mpistrategy.arrays.convert import (
    any_array,
    is_on_device,
    like_given,
    on_device_of,
    placed_as,
    reducible,
)
from mpistrategy.arrays.dtypes import (
    dtype_name,
    host_wire_dtype,
    maximum,
    minimum,
    quietly,
    sum_dtype_of_mean,
    wire_dtype,
)
from mpistrategy.arrays.values import ArenaBase, contribution, event_of_reads
from mpistrategy.errors import OptionError, OptionTypeError, ShapeError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.collectives import checked_axis, identity
from mpistrategy.reduction.inputs import refuse_mirrored_sum
from mpistrategy.reduction.reducer import General
from mpistrategy.reduction.transfer import finish


class ReduceAlong(General):
    """`Strategy.reduce` with an axis; the argument is the operation, the axis, and the type of the axis."""

    def run(self, call: Call, value: Any, out: Any, weight: Any) -> Any:
        """Return the reduction of one array; see `CallPlan.run`."""
        (reduce_op, axis, _), where = self.argument, call.where
        if isinstance(value, ArenaBase) or weight is not None:
            raise OptionError.at(where, found=f"{axis=} with an arena or weight=", expected="axis= alone")
        structure, op = nest.flatten_without_none(value)[1], ReduceOp._parse(reduce_op, where)
        call.structure = structure.text
        if self.reducer.agrees_on_none(call, op, structure):
            return structure.pack([])
        if call.structure != nest.LEAF.text:
            found = f"a structure {call.structure} with {axis=}"
            raise OptionTypeError.at(where, found=found, expected="a single array")
        refuse_mirrored_sum(value, op, where)
        component = contribution(value)
        array = reducible(component, where)
        axes = tuple(checked_axis(a, array.ndim, where) for a in (axis if isinstance(axis, (tuple, list)) else [axis]))
        if len(set(axes)) != len(axes):
            raise ShapeError.at(where, found=f"axis={axis}, one axis twice", expected="each axis once")
        call.structure = f"{op.value} of {dtype_name(array.dtype)} along axis {axes}"
        local_result, rows = _combined_here(array, axes, op), prod(array.shape[a] for a in axes)
        self.reducer.communicator.guard.wait_for_gpu(event_of_reads([component]))
        # A mean is divided at the end; of MIN and MAX the numbers of rows tell whether there is any row.
        over = ReduceOp.SUM if op is ReduceOp.MEAN else op
        leaves = [local_result, -rows if op is ReduceOp.MIN else rows]
        total, count = self.reducer.all_reduce_leaves(call, over, leaves, lambda: ["", " (the number of rows)"])
        if count == 0 and op in (ReduceOp.MIN, ReduceOp.MAX):
            raise ShapeError.at(where, found=f"no elements on any rank under {op.name}", expected="at least one")
        return like_given(finish(any_array(total), array.dtype, op, int(count)), component)


@quietly
def _combined_here(array: Any, axes: tuple[int, ...], op: ReduceOp) -> Any:
    """Combine an array along `axes`, where it is; a rank without elements gives the identity element.

    16-bit floats are rounded once, at the end: the sums here stay in the wire dtype.
    """
    travels = wire_dtype if is_on_device(array) else host_wire_dtype
    dtype = travels(sum_dtype_of_mean(array.dtype) if op is ReduceOp.MEAN else array.dtype)
    with on_device_of(array):
        wide = array.astype(dtype, copy=False)
        if op not in (ReduceOp.MIN, ReduceOp.MAX):
            return (wide.prod if op is ReduceOp.PROD else wide.sum)(axis=axes, dtype=dtype)
        if 0 in (array.shape[axis] for axis in axes):
            shape = [length for axis, length in enumerate(array.shape) if axis not in axes]
            return placed_as(np.full(shape, identity(dtype, op), dtype), array)
        return (minimum if op is ReduceOp.MIN else maximum).reduce(wide, axes)
