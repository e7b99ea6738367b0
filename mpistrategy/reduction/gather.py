"""Gather: the replicas' arrays side by side along one axis, in rank order, on every rank."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import array_where_it_is, is_on_device, like_given, on_device_of
from mpistrategy.arrays.devices import gpu_of
from mpistrategy.arrays.dtypes import Array, dtype_name
from mpistrategy.arrays.gpu import check_device, layout_of
from mpistrategy.arrays.values import IndexedSlices, contribution, event_of_reads
from mpistrategy.errors import OptionTypeError, ShapeError, UnsupportedError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.reduction.sparse import gather_all


def gather(communicator: Communicator, values: Sequence[Any], axis: Any, call: Call) -> list[Array]:
    """Return, for each of the values, all ranks' arrays concatenated along `axis`; arrays in GPU memory stay there.

    Args:
        communicator: the ranks.
        values: this rank's arrays; dtypes and all axes but `axis` are equal on all ranks, the length along `axis` may
            differ and may be 0.
        axis: an int; negative counts from the end.
        call: the guard's call that all ranks make.

    Raises:
        ShapeError: for scalars and for an axis out of range.
        OptionTypeError: for an axis that is not an int.
        UnsupportedError: for IndexedSlices.
    """
    arrays = [_checked(value, call.where) for value in values]
    positions = [checked_axis(axis, array.ndim, call.where) for array in arrays]
    moved = [_moved(array, position, 0) for array, position in zip(arrays, positions, strict=True)]
    placed = [array for array in moved if is_on_device(array)]
    if placed:
        from mpistrategy.reduction.routes import on_device  # here, for the quick import

        check_device(placed, gpu_of(communicator.devices, communicator.rank), call.where)
        on_device.prepare(communicator, placed, call.where)
    layouts = tuple(_layout(array) for array in moved)
    # Before the agreement: short memory must show while all ranks can still raise.
    mine = np.array([array.shape[0] for array in moved], np.int64)
    lengths = np.empty((communicator.size, mine.size), np.int64)
    call.agree("gather", op=f"axis {positions}", values=layouts, sparingly=not placed)
    communicator.allgatherv(mine, [mine.size] * communicator.size, lengths)
    gathered = gather_all(communicator, list(zip(moved, lengths.T.tolist(), strict=True)))
    if placed:
        communicator.guard.wait_for_gpu(event_of_reads(map(contribution, values)))

    def in_order() -> list[Any]:
        return [_contiguous(_moved(array, 0, position)) for array, position in zip(gathered, positions, strict=True)]

    results = communicator.guard.on_all(in_order) if any(positions) else in_order()  # else there is nothing to copy
    return [like_given(result, contribution(value)) for result, value in zip(results, values, strict=True)]


def _checked(value: Any, where: str) -> Any:
    value = contribution(value)
    if isinstance(value, IndexedSlices):
        raise UnsupportedError.at(
            where, found="IndexedSlices", expected="an array", fix="Gather its values and indices."
        )
    return array_where_it_is(value, where)


def _layout(array: Any) -> tuple[str, tuple[int, ...]]:
    """Return what must be equal on all ranks; `array` has the axis along which they are gathered first."""
    name, shape = layout_of(array) if is_on_device(array) else (dtype_name(array.dtype), array.shape)
    return name, shape[1:]


def _moved(array: Any, source: int, target: int) -> Any:
    """Return an array with one axis moved; what `numpy.moveaxis` does, in GPU memory too."""
    axes = [axis for axis in range(array.ndim) if axis != source]
    return array.transpose([*axes[:target], source, *axes[target:]])


def _contiguous(array: Any) -> Any:
    with on_device_of(array):
        return array if array.flags.c_contiguous else array.copy()


def checked_axis(axis: Any, ndim: int, where: str) -> int:
    """Return `axis` as an index from 0 on.

    Raises:
        OptionTypeError: when it is not an int.
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
