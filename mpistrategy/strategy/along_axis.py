"""Reduction over the replicas and along axes of their arrays, whose lengths may differ."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrategy.arrays import dtypes, nest
from mpistrategy.arrays.convert import any_array, is_on_device, like_given, reducible
from mpistrategy.arrays.dtypes import Array, dtype_name, host_wire_dtype, sum_dtype_of_mean, wire_dtype
from mpistrategy.arrays.gpu import DeviceArray, cupy_for
from mpistrategy.arrays.values import PerReplica, contribution, event_of_reads, local_component
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
    array = reducible(given, where)
    axes = tuple(checked_axis(a, array.ndim, where) for a in (axis if isinstance(axis, (tuple, list)) else [axis]))
    if len(set(axes)) != len(axes):
        raise ShapeError.at(where, found=f"axis={axis}, one axis twice", expected="each axis once")
    call.structure = f"{op.value} of {dtype_name(array.dtype)} along axis {axes}"
    # 16-bit floats are rounded once, at the end: what is summed here stays in the wire dtype.
    if is_on_device(array):
        with array.device:
            here = _combine_on_device(array, axes, op)
            read = event_of_reads([given])
        call._guard.wait_for_gpu(read)
    else:
        here = _combine_along(array, axes, op)
    length = np.asarray(np.prod([array.shape[a] for a in axes], dtype=np.int64))
    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        pairs = [(PerReplica((part,)), PerReplica((0,))) for part in (here, length)]
        total, count = map(any_array, map(local_component, algorithm.batch_reduce(ReduceOp.SUM, pairs, options)))
        return like_given(finish(total, array.dtype, op, int(count)), given)
    if op is not ReduceOp.PROD:
        rows = algorithm.reduce(ReduceOp.SUM, PerReplica((length,)), PerReplica((0,)), options)
        if int(local_component(rows)) == 0:
            raise ShapeError.at(where, found=f"no elements on any rank under {op.name}", expected="at least one")
    extreme = algorithm.reduce(op, PerReplica((here,)), PerReplica((0,)), options)
    return like_given(finish(any_array(local_component(extreme)), array.dtype, op, 1), given)


def _combine_along(array: Array, axes: tuple[int, ...], op: ReduceOp) -> Array:
    """Combine `array` along `axes`, in its wire dtype; a rank without elements gives the neutral one."""
    dtype = host_wire_dtype(sum_dtype_of_mean(array.dtype) if op is ReduceOp.MEAN else array.dtype)
    wide = array.astype(dtype, copy=False)
    with np.errstate(all="ignore"):  # as in sums between the replicas
        if op in (ReduceOp.MIN, ReduceOp.MAX):
            extreme = dtypes.minimum if op is ReduceOp.MIN else dtypes.maximum
            return extreme.reduce(wide, axes, identity(dtype, op))
        add = np.multiply if op is ReduceOp.PROD else np.add
        return np.asarray(add.reduce(wide, axis=axes, dtype=dtype))


def _combine_on_device(array: DeviceArray, axes: tuple[int, ...], op: ReduceOp) -> DeviceArray:
    """Do `_combine_along` in GPU memory; MIN and MAX of floats are those of keys, so that the bits are the same."""
    from mpistrategy.mpi.gpu.transports import ordered_keys  # here, for the quick import

    cupy = cupy_for("an array in GPU memory")
    dtype = wire_dtype(sum_dtype_of_mean(array.dtype) if op is ReduceOp.MEAN else array.dtype)
    wide = array.astype(dtype, copy=False)
    if op not in (ReduceOp.MIN, ReduceOp.MAX):
        return wide.prod(axis=axes, dtype=dtype) if op is ReduceOp.PROD else wide.sum(axis=axes, dtype=dtype)
    if 0 in (array.shape[axis] for axis in axes):
        neutral = identity(dtype, op)
        return cupy.full([length for axis, length in enumerate(array.shape) if axis not in axes], neutral, dtype)
    if not ordered_keys.are_for(dtype, op._on_the_wire):
        return wide.min(axis=axes) if op is ReduceOp.MIN else wide.max(axis=axes)
    keys = ordered_keys.to_keys(cupy, wide.copy() if wide is array else wide, op._on_the_wire)
    least = keys.min(axis=axes) if op is ReduceOp.MIN else keys.max(axis=axes)
    return ordered_keys.to_floats(cupy, least, op._on_the_wire)


def identity(dtype: np.dtype[Any], op: ReduceOp) -> Any:
    """Return what changes no SUM, PROD, MIN or MAX of numbers of this dtype."""
    if op not in (ReduceOp.MIN, ReduceOp.MAX):
        return 1 if op is ReduceOp.PROD else 0
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return limits.max if op is ReduceOp.MIN else limits.min
    return np.inf if op is ReduceOp.MIN else -np.inf
