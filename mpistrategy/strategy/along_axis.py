"""Reduction over the replicas and along axes of their arrays, whose lengths may differ."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrategy.arrays import dtypes, nest
from mpistrategy.arrays.convert import like_given, to_reducible
from mpistrategy.arrays.dtypes import Array, dtype_name, host_wire_dtype
from mpistrategy.arrays.values import PerReplica, contribution, local_component
from mpistrategy.cross_device_ops.base import CrossDeviceOps
from mpistrategy.errors import OptionTypeError, ShapeError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.options import CommunicationOptions, ReduceOp
from mpistrategy.reduction.gather import checked_axis
from mpistrategy.reduction.inputs import refuse_mirrored_sum
from mpistrategy.reduction.layout.finish import finish


def reduce_along(
    algorithm: CrossDeviceOps, options: CommunicationOptions, op: ReduceOp, value: Any, axis: Any, call: Call
) -> Any:
    """Return the reduction of one array; see `Strategy.reduce`, whose call has been entered."""
    where = call.where
    if call.structure != nest.LEAF.text:
        raise OptionTypeError.at(
            where, found=f"a structure {call.structure} with axis={axis!r}", expected="a single array"
        )
    refuse_mirrored_sum(value, op, where)
    given = contribution(value)
    array = to_reducible(given, where)
    axes = tuple(checked_axis(a, array.ndim, where) for a in (axis if isinstance(axis, (tuple, list)) else [axis]))
    if len(set(axes)) != len(axes):
        raise ShapeError.at(where, found=f"axis={axis}, one axis twice", expected="each axis once")
    call.structure = f"{op.value} of {dtype_name(array.dtype)} along axis {axes}"
    # 16-bit floats are rounded once, at the end: what is summed here stays in the wire dtype.
    here = _combine_along(array, axes, op)
    length = np.asarray(np.prod([array.shape[a] for a in axes], dtype=np.int64))
    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        pairs = [(PerReplica((part,)), PerReplica((0,))) for part in (here, length)]
        total, count = map(local_component, algorithm.batch_reduce(ReduceOp.SUM, pairs, options))
        return like_given(finish(np.asarray(total), array.dtype, op, int(count)), given)
    if op is not ReduceOp.PROD:
        rows = algorithm.reduce(ReduceOp.SUM, PerReplica((length,)), PerReplica((0,)), options)
        if int(local_component(rows)) == 0:
            raise ShapeError.at(where, found=f"no elements on any rank under {op.name}", expected="at least one")
    extreme = algorithm.reduce(op, PerReplica((here,)), PerReplica((0,)), options)
    return like_given(finish(np.asarray(local_component(extreme)), array.dtype, op, 1), given)


def _combine_along(array: Array, axes: tuple[int, ...], op: ReduceOp) -> Array:
    """Combine `array` along `axes`, in its wire dtype; a rank without elements gives the neutral one."""
    dtype = host_wire_dtype(array.dtype)
    wide = array.astype(dtype, copy=False)
    with np.errstate(all="ignore"):  # as in sums between the replicas
        if op in (ReduceOp.MIN, ReduceOp.MAX):
            limits = np.iinfo(dtype) if dtype.kind in "iu" else None
            if op is ReduceOp.MIN:
                return dtypes.minimum.reduce(wide, axes, limits.max if limits else np.inf)
            return dtypes.maximum.reduce(wide, axes, limits.min if limits else -np.inf)
        add = np.multiply if op is ReduceOp.PROD else np.add
        return np.asarray(add.reduce(wide, axis=axes, dtype=dtype))
