"""One write to a variable: `Write.checked` checks the value, and `Write.apply` changes the storage.

`checked` raises before anything has changed.  Where ranks write together, `apply` belongs into their call: a rank that
fails in it has another copy than the others, which must hear of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
from mpistrategy.arrays.values import ArrayLike, IndexedSlices, event_of_reads, local_component, may_differ
from mpistrategy.errors import DTypeError, DTypeMismatchError, OptionTypeError, ShapeError, UnsupportedError
from mpistrategy.objects.jax_traces import refuse_in_jax_trace
from mpistrategy.options import VariableSynchronization
from mpistrategy.variables.protocols import Replica


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


@dataclass(slots=True)
class Write:
    """One call of `Variable.assign`, `assign_add` or another writing method.

    Attributes:
        variable: the variable.
        method: the name of the method.
        where: its public name, for messages.
        value: the argument of the call.
        called: its name=.
    """

    variable: Replica
    method: str
    where: str
    value: Any
    called: str | None = None

    @property
    def full_name(self) -> str:
        """The method and the variable, for messages."""
        return f"{self.where} of {self.variable.name!r}"

    def checked(self) -> Array | IndexedSlices:
        """Return the value as an array (or slices) of the variable's dtype and shape.

        Raises:
            DTypeError, ShapeError, LeafError, OptionTypeError: when it does not fit; nothing has changed then.
            ContextError: in a function that JAX traces.
        """
        refuse_in_jax_trace(self.where)
        variable, value = self.variable, self.value
        if variable.dtype.kind in _NOT_FOR_KINDS.get(self.method, ""):
            raise DTypeError.at(
                self.full_name,
                found=f"a variable of dtype {dtype_name(self.variable.dtype)}",
                expected="a dtype that can be compared" if self.method == "scatter_max" else "a numeric dtype",
            )
        if self.method not in DENSE:
            return self._slices()
        if (
            type(value) is np.ndarray
            and value.dtype == variable.dtype
            and value.shape == variable.shape
            and type(variable.local_view) is np.ndarray
        ):
            return value  # the usual case, quickly
        return self._array()

    def apply(self, change: Array | IndexedSlices) -> None:
        """Change the storage in place, with the result of `checked` or the combination of several replicas' results."""
        storage = self.variable._storage
        if type(storage) is type(change) is np.ndarray:
            DENSE[self.method](storage, change)
            return
        with on_device_of(storage):
            if isinstance(change, IndexedSlices):
                self._apply_rows(storage, host_array(change.indices), change.values)
            else:
                DENSE[self.method](storage, placed_as(change, storage))
            self.variable._extended.communicator.guard.wait_for_gpu(event_of_reads([local_component(self.value)]))

    def _apply_rows(self, storage: Array, indices: Array, values: Array) -> None:
        """Write rows; those of a variable in GPU memory on the host, so that repeated ones have NumPy's bits."""
        write = SPARSE[self.method]
        if not is_on_device(storage):
            write(storage, indices, host_array(values))
            return
        touched, numbers = np.unique(indices, return_inverse=True)
        there = placed_as(touched, storage)
        rows = host_array(storage[there])
        write(rows, numbers, host_array(values))
        storage[there] = placed_as(rows, storage)

    def _array(self) -> Array:
        value = plain(self.value)
        if isinstance(value, IndexedSlices):
            raise UnsupportedError.at(
                self.full_name, found="IndexedSlices", expected="an array", fix="Pass slices.to_dense()."
            )
        array = self._of_dtype(value)
        if array.shape != self.variable.shape:
            raise ShapeError.at(self.full_name, found=f"shape {array.shape}", expected=f"shape {self.variable.shape}")
        return placed_as(array, self.variable._storage)

    def _slices(self) -> IndexedSlices:
        slices, shape = local_component(self.value), self.variable.shape
        if not isinstance(slices, IndexedSlices):
            raise OptionTypeError.at(
                self.full_name, found=type(slices).__name__, expected="IndexedSlices(values, indices)"
            )
        indices = to_array(plain(slices.indices), f"{self.full_name}: indices")
        if indices.dtype.kind not in "iu":
            raise DTypeError.at(
                self.full_name, found=f"indices of dtype {dtype_name(indices.dtype)}", expected="integer indices"
            )
        values = self._of_dtype(plain(slices.values))
        if not shape or indices.ndim != 1 or values.shape != (*indices.shape, *shape[1:]):
            raise ShapeError.at(
                self.full_name,
                found=f"values of shape {values.shape} for indices of shape {indices.shape}",
                expected=f"one row of the variable, whose shape is {shape}, for each index",
            )
        outside = indices[(indices < 0) | (indices >= shape[0])]
        if outside.size:
            raise ShapeError.at(
                self.full_name, found=f"index {outside[0]}", expected=f"indices from 0 to {shape[0] - 1}"
            )
        if may_share_memory(values, self.variable.local_view):
            values = values.copy()
        return IndexedSlices(values, indices.astype(np.int64))

    def _of_dtype(self, value: Any) -> Array:
        on_device = is_on_device(value) and is_on_device(self.variable._storage)
        array = as_device_array(value, self.full_name) if on_device else to_array(value, self.full_name)
        if array.dtype == self.variable.dtype:
            return array
        if isinstance(value, np.ndarray) or is_on_device(value) or is_foreign(value):
            raise misfit(array, self.variable.dtype, self.full_name)
        return converted(array, self.variable.dtype, self.full_name)


def refuse_drift(variable: Replica, value: Any, where: str) -> None:
    """Raise OptionTypeError for a value that may differ by replica, if the copies of the variable are to stay equal."""
    kept_equal = variable.synchronization is VariableSynchronization.ON_WRITE and not variable._extended._is_local
    if kept_equal and may_differ(value):
        raise differing(where, f"the copies of the ON_WRITE variable {variable.name!r} are equal")


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
