"""What variables are written with: `checked` checks a value before anything has changed, `apply` changes the memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import (
    as_device_array,
    host_array,
    is_on_device,
    may_share_memory,
    on_device_of,
    placed_as,
    to_array,
)
from mpistrategy.arrays.dtypes import Array, dtype_name
from mpistrategy.arrays.foreign import is_foreign
from mpistrategy.arrays.values import ArrayLike, IndexedSlices, local_component
from mpistrategy.errors import DTypeError, DTypeMismatchError, OptionTypeError, ShapeError, UnsupportedError


def _set(storage: Array, value: Array) -> None:
    storage[...] = value


def _set_rows(storage: Array, indices: Array, values: Array) -> None:
    storage[indices] = values


#: What the methods with whole values do with the storage and an array of its shape.
DENSE: dict[str, Callable[[Array, Array], Any]] = {
    "assign": _set,
    "assign_add": lambda storage, value: np.add(storage, value, out=storage),
    "assign_sub": lambda storage, value: np.subtract(storage, value, out=storage),
}

#: What the methods with IndexedSlices do with the storage, row numbers and rows.  Additions of repeated rows add up; of
#: several updates of one row the last one counts.
SPARSE: dict[str, Callable[[Array, Array, Array], Any]] = {
    "scatter_add": np.add.at,
    "scatter_sub": np.subtract.at,
    "scatter_max": np.maximum.at,
    "scatter_update": _set_rows,
}

#: The dtype kinds that a method does not support.
_NOT_FOR_KINDS = {
    "assign_add": "b",
    "assign_sub": "b",
    "scatter_add": "b",
    "scatter_sub": "b",
    "scatter_max": "bc",
}


def checked(method: str, storage: Array, value: Any, where: str) -> Array | IndexedSlices:
    """Return the value of a write as an array (or slices) of the storage's dtype and shape.

    Args:
        method: the writing method of a variable.
        storage: its memory.
        value: the argument of the method.
        where: the method and the variable, for messages.

    Raises:
        DTypeError, ShapeError, LeafError, OptionTypeError: when it does not fit.
    """
    if storage.dtype.kind in _NOT_FOR_KINDS.get(method, ""):
        expected = "a dtype that can be compared" if method == "scatter_max" else "a numeric dtype"
        raise DTypeError.at(where, found=f"a variable of dtype {dtype_name(storage.dtype)}", expected=expected)
    if method in SPARSE:
        return _checked_slices(storage, local_component(value), where)
    if type(value) is type(storage) is np.ndarray and (value.dtype, value.shape) == (storage.dtype, storage.shape):
        return value  # the usual case, quickly
    value = plain(value)
    if isinstance(value, IndexedSlices):
        raise UnsupportedError.at(where, found="IndexedSlices", expected="an array", fix="Pass slices.to_dense().")
    array = _of_dtype(storage, value, where)
    if array.shape != storage.shape:
        raise ShapeError.at(where, found=f"shape {array.shape}", expected=f"shape {storage.shape}")
    return placed_as(array, storage)


def _checked_slices(storage: Array, slices: Any, where: str) -> IndexedSlices:
    shape = storage.shape
    if not isinstance(slices, IndexedSlices):
        raise OptionTypeError.at(where, found=type(slices).__name__, expected="IndexedSlices(values, indices)")
    indices = to_array(plain(slices.indices), f"{where}: indices")
    if indices.dtype.kind not in "iu":
        raise DTypeError.at(where, found=f"indices of dtype {dtype_name(indices.dtype)}", expected="integer indices")
    values = _of_dtype(storage, plain(slices.values), where)
    if not shape or indices.ndim != 1 or values.shape != (*indices.shape, *shape[1:]):
        raise ShapeError.at(
            where,
            found=f"values of shape {values.shape} for indices of shape {indices.shape}",
            expected=f"one row of the variable, whose shape is {shape}, for each index",
        )
    outside = indices[(indices < 0) | (indices >= shape[0])]
    if outside.size:
        raise ShapeError.at(where, found=f"index {outside[0]}", expected=f"indices from 0 to {shape[0] - 1}")
    return IndexedSlices(values.copy() if may_share_memory(values, storage) else values, indices.astype(np.int64))


def _of_dtype(storage: Array, value: Any, where: str) -> Array:
    on_device = is_on_device(value) and is_on_device(storage)
    array = as_device_array(value, where) if on_device else to_array(value, where)
    if array.dtype == storage.dtype:
        return array
    if isinstance(value, np.ndarray) or is_on_device(value) or is_foreign(value):
        raise misfit(array, storage.dtype, where)
    return converted(array, storage.dtype, where)


def apply(method: str, storage: Array, change: Array | IndexedSlices) -> None:
    """Change the memory of a variable: with the result of `checked`, or the combination of several replicas' results.

    Rows of a variable in GPU memory are written on the host, so that repeated ones have NumPy's bits.
    """
    with on_device_of(storage):
        if not isinstance(change, IndexedSlices):
            DENSE[method](storage, placed_as(change, storage))
            return
        indices, values = host_array(change.indices), host_array(change.values)
        if not is_on_device(storage):
            SPARSE[method](storage, indices, values)
            return
        touched, numbers = np.unique(indices, return_inverse=True)
        there = placed_as(touched, storage)
        rows = host_array(storage[there])
        SPARSE[method](rows, numbers, values)
        storage[there] = placed_as(rows, storage)


def differing(where: str, why: str) -> OptionTypeError:
    """Return the error for a PerReplica where all replicas must write the same."""
    return OptionTypeError.at(
        where,
        found="a PerReplica or another value of which each replica has its own",
        expected=f"one value, the same on every rank: {why}",
        fix="Reduce it first: strategy.reduce('MEAN', value).  Or make a variable with synchronization='ON_READ', "
        "whose copies may differ, and write it in strategy.run.",
    )


def plain(value: Any) -> Any:
    """Return this rank's component of a container, or the value of a variable; anything else unchanged."""
    value = local_component(value)
    return value._read() if isinstance(value, ArrayLike) else value


def converted(array: Array, dtype: np.dtype[Any], where: str) -> Array:
    """Convert a number or a list to `dtype`; raise where `dtype` has another kind or too small a range."""
    integers = array.dtype.kind in "iu"
    if not np.can_cast(array.dtype, dtype, "same_kind") and not (integers and dtype.kind in "iufc"):
        raise misfit(array, dtype, where)
    with np.errstate(over="ignore", invalid="ignore"):
        result = array.astype(dtype)
    if integers and dtype.kind in "iu":
        fits = np.array_equal(result.astype(object), array.astype(object))
    else:
        fits = np.array_equal(np.isfinite(array), np.isfinite(result))
    if not fits:
        raise DTypeError.at(where, found=f"{array}", expected=f"numbers that {dtype_name(dtype)} can hold")
    return result


def misfit(array: Array, dtype: np.dtype[Any], where: str) -> DTypeMismatchError:
    """Return the error for an array of another dtype."""
    return DTypeMismatchError.at(
        where,
        found=f"dtype {dtype_name(array.dtype)}",
        expected=f"dtype {dtype_name(dtype)}",
        fix=f"Convert it first: x.astype({dtype_name(dtype)!r}).",
    )
