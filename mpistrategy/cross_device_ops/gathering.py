"""Gather: the replicas' arrays side by side along one axis, in rank order, on every rank."""

from __future__ import annotations

import json
import operator
from typing import Any

import numpy as np

from mpistrategy.arrays import Array, dtype_name, to_array
from mpistrategy.cross_device_ops.sparse import gather_rows
from mpistrategy.errors import OptionTypeError, ShapeError, UnsupportedError
from mpistrategy.mpi.guard import Call
from mpistrategy.mpi.transport import Communicator
from mpistrategy.values import IndexedSlices, local_component


def gather(communicator: Communicator, value: Any, axis: Any, call: Call) -> Array:
    """Return all ranks' arrays concatenated along `axis`.

    Args:
        value: this rank's array; dtypes and all axes but `axis` are equal on all ranks, the length along `axis` may
            differ and may be 0.
        axis: an int; negative counts from the end.

    Raises:
        ShapeError: for scalars and for an axis out of range.
        OptionTypeError: for an axis that is no int.
        UnsupportedError: for IndexedSlices.

    """
    value = local_component(value)
    if isinstance(value, IndexedSlices):
        raise UnsupportedError.at(
            call.where, found="IndexedSlices", expected="an array", fix="Gather its values and indices."
        )
    array = to_array(value, call.where)
    position = checked_axis(axis, array.ndim, call.where)
    others = tuple(-1 if i == position else n for i, n in enumerate(array.shape))
    call.agree("gather", op=f"axis {position}", values=((dtype_name(array.dtype), others),))
    rows = [int(n) for n in map(json.loads, communicator.allgather_text(str(array.shape[position])))]
    moved = np.moveaxis(array, position, 0)
    return np.ascontiguousarray(np.moveaxis(gather_rows(communicator, moved, rows), 0, position))


def checked_axis(axis: Any, ndim: int, where: str) -> int:
    """Return `axis` as an index from 0 on.

    Raises:
        OptionTypeError: when it is no int.
        ShapeError: when there is no such axis.

    """
    if axis is None:
        raise ShapeError.at(where, found="axis=None", expected="an int", fix="Pass axis=0 for the first axis.")
    try:
        index = operator.index(axis)
    except TypeError as error:
        raise OptionTypeError.at(where, found=f"axis={axis!r}", expected="an int") from error
    if not -ndim <= index < ndim:
        expected = "an array with at least one axis" if ndim == 0 else f"an axis from {-ndim} to {ndim - 1}"
        fix = "Make it an array of one element first: np.atleast_1d(x)." if ndim == 0 else ""
        raise ShapeError.at(where, found=f"axis={index} of an array with {ndim} axes", expected=expected, fix=fix)
    return index % ndim
