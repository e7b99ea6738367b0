"""Distributed values: PerReplica, Mirrored, IndexedSlices.

A rank has only its own component.  Most values are plain arrays; a container is used where it adds information, and
acts as an array.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from mpistrategy.arrays import nest
from mpistrategy.arrays.array_methods import ArrayMethods
from mpistrategy.arrays.convert import (
    any_array,
    array_where_it_is,
    as_device_array,
    copy_of,
    host_array,
    is_on_device,
    like_given,
)
from mpistrategy.arrays.dtypes import Array
from mpistrategy.arrays.foreign import in_jax, is_in_gpu_memory, library_of
from mpistrategy.arrays.gpu import cupy_for, is_cupy, on_device
from mpistrategy.errors import OptionTypeError, PlacementError, ShapeError, UnsupportedError


class ArrayLike(NDArrayOperatorsMixin, ArrayMethods):
    """Arithmetic, comparison, indexing, conversion and NumPy's methods for anything with a `_read` method."""

    def _array(self, asked: str) -> Any:
        return array_where_it_is(self._read(), f"{type(self).__name__}.{asked}")

    def _contribution(self) -> Any:
        """Return this replica's value in a reduction; never communicates."""
        return self._read()

    def _may_differ(self) -> bool:
        """Return whether what `_read` returns here is this replica's own, so that the others may have other values."""
        return False

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        array = host_array(self._read())
        if copy is False and dtype is not None and np.dtype(dtype) != array.dtype:
            raise ValueError(f"{type(self).__name__}: a conversion to {np.dtype(dtype)} needs a copy")
        return np.array(array, dtype=dtype, copy=True) if copy else np.asarray(array, dtype=dtype)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """The memory of a value on the host, for libraries that share it; read-only where the value is."""
        value = self._kept()
        if type(value) is not np.ndarray or value.dtype.isbuiltin != 1:  # the others are said by __array__
            raise AttributeError("__array_interface__")
        return value.__array_interface__

    def _kept(self) -> Any:
        """Return the value if its memory lives as long as this object; None else."""
        return self._read()

    def __dlpack__(self, **options: Any) -> Any:
        """Share the value's memory, on the host or on a GPU; read-only where it is, which torch does not heed."""
        return self._shareable().__dlpack__(**{key: option for key, option in options.items() if option is not None})

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._shareable().__dlpack_device__()
        return device

    def _shareable(self) -> Any:
        value = self._read()
        return value if hasattr(value, "__dlpack__") else np.asarray(value)

    def __jax_array__(self) -> Any:
        """Return a copy for JAX, whose arrays never change.

        NumPy or CuPy copies before JAX sees the memory: JAX itself may read it later, when it has been written again.
        """
        value = copy_of(any_array(self._read()))
        return sys.modules["jax"].numpy.asarray(value) if isinstance(value, np.ndarray) else in_jax(value)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        # ufunc.at would write through a read-only view.
        written = (*kwargs.get("out", ()), *(inputs[:1] if method == "at" else ()))
        for target in written:
            if isinstance(target, ArrayLike):
                if method == "at":
                    target._refuse_part(f" in np.{ufunc.__name__}.at", f"np.{ufunc.__name__}.at(x, ...)")
                operator = ufunc.__name__ if inputs[0] is target else ""
                target._refuse(f" as the result of np.{ufunc.__name__}", f"np.{ufunc.__name__}(...)", operator)
        plain = [value._read() if isinstance(value, ArrayLike) else value for value in inputs]
        # CuPy leaves a ufunc to the other operand's __array_ufunc__, unless that has __cuda_array_interface__ or
        # __cupy_get_ndarray__: then CuPy computes itself, and fails for matrix products.
        if any(map(is_on_device, plain)):
            return on_device(ufunc, method, plain, kwargs)
        return getattr(ufunc, method)(*plain, **kwargs)

    def __getitem__(self, key: Any) -> Array:
        part: Array = self._read()[key]
        return part

    def __len__(self) -> int:
        return len(self._read())

    def __bool__(self) -> bool:
        return bool(self._read())

    def __float__(self) -> float:
        return float(self._read())

    def __int__(self) -> int:
        return int(self._read())

    def __complex__(self) -> complex:
        return complex(self._read())

    def __index__(self) -> int:
        index: int = self._read().__index__()
        return index

    def __format__(self, spec: str) -> str:
        return format(self._read(), spec) if spec else str(self)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the local component."""
        return np.shape(self._read())

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the local component."""
        value = self._read()
        return value.dtype if is_on_device(value) else np.asarray(value).dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape))

    @property
    def itemsize(self) -> int:
        """The bytes of one element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.size * self.itemsize

    def numpy(self) -> Array:
        """Return the value as an ndarray; a value in GPU memory is copied to the host."""
        return host_array(self._read())


class DistributedValues(ArrayLike):
    """A value with one component on each replica; this rank holds its own.

    Attributes:
        values: the components that live on this rank: a tuple of one, or an empty tuple where none does.
    """

    def __init__(self, values: tuple[Any, ...] | list[Any]) -> None:
        self.values: tuple[Any, ...] = values if type(values) is tuple and len(values) < 2 else self._checked(values)

    def _checked(self, values: Any) -> tuple[Any, ...]:
        if not isinstance(values, (tuple, list)) or len(values) > 1:
            raise OptionTypeError.at(
                type(self).__name__,
                found=f"values={values!r}",
                expected="a tuple of one: this rank's own component",
                fix="The other components live on the other ranks.",
            )
        return tuple(values)

    def _read(self) -> Any:
        return self.values[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.values))})"


class PerReplica(DistributedValues):
    """A value that may be different on every replica.

    Args:
        values: a tuple of this rank's component.
        group: the communicator of the ranks with the other components, if known: a CrossDeviceOps that is called
            outside every scope uses it.
    """

    def __init__(self, values: tuple[Any, ...] | list[Any], group: Any = None) -> None:
        super().__init__(values)
        self._group = group

    def _may_differ(self) -> bool:
        return True

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_group": None}  # the ranks belong to this process


class Mirrored(DistributedValues):
    """A value that is the same on every replica that has it.

    Args:
        values: a tuple of one component, or an empty tuple on a rank without the value.
        lives_on: text that names the ranks with the value, for the error of a read on another rank.
    """

    def __init__(self, values: tuple[Any, ...] | list[Any], lives_on: str = "every rank") -> None:
        self.values: tuple[Any, ...] = values if type(values) is tuple and len(values) < 2 else self._checked(values)
        self._lives_on = lives_on

    def _read(self) -> Any:
        if not self.values:
            raise PlacementError.at(
                "Mirrored",
                found="a read on a rank without the value",
                expected=f"a read on {self._lives_on}",
                fix="To have it on every rank, pass a variable, a value or the list of all devices as destination.",
            )
        return self.values[0]

    def __repr__(self) -> str:
        return super().__repr__() if self.values else f"Mirrored(<lives on {self._lives_on}>)"


class IndexedSlices:
    """A sparse array: row ``i`` of the dense array is the sum of all ``values[j]`` with ``indices[j] == i``.

    Args:
        values: array of shape ``(n, ...)``.
        indices: integer array of shape ``(n,)``; may repeat.
        dense_shape: the shape of the dense array, or None when unknown.
    """

    def __init__(self, values: Any, indices: Any, dense_shape: Any = None) -> None:
        self.values = values
        self.indices = indices
        self.dense_shape = dense_shape

    def to_dense(self) -> Any:
        """Return the dense array, on the device of `values`; repeated indices add up.  Needs `dense_shape`."""
        if self.dense_shape is None:
            raise UnsupportedError.at(
                "IndexedSlices.to_dense",
                found="dense_shape=None",
                expected="a dense_shape",
                fix="Pass one when creating it.",
            )
        values, indices = host_array(self.values), host_array(self.indices)
        dense = np.zeros(tuple(int(n) for n in host_array(self.dense_shape)), values.dtype)
        if indices.size and not (indices.min() >= 0 and indices.max() < len(dense)):
            raise ShapeError.at(
                "IndexedSlices.to_dense",
                found=f"indices from {indices.min()} to {indices.max()}",
                expected=f"indices from 0 to {len(dense) - 1}",
            )
        np.add.at(dense, indices, values)
        return like_given(dense, self.values)

    def __repr__(self) -> str:
        return f"IndexedSlices(values={self.values!r}, indices={self.indices!r}, dense_shape={self.dense_shape!r})"


def may_differ(value: Any) -> bool:
    """Return whether anything in a nest is a value of which each replica has its own: a PerReplica, say."""
    leaves = [part for leaf in nest.flatten(value)[0] for part in _parts(leaf)]
    return any(isinstance(leaf, ArrayLike) and leaf._may_differ() for leaf in leaves)


def local_component(value: Any) -> Any:
    """Return this rank's component of a DistributedValues; anything else unchanged."""
    return value._read() if isinstance(value, DistributedValues) else value


def contribution(value: Any) -> Any:
    """Return this replica's part of `value` in a reduction or a gather; of a variable, its own copy."""
    value = local_component(value)
    return value._contribution() if isinstance(value, ArrayLike) else value


class ArenaBase:
    """What tells a `mpistrategy.Arena`, which lies above, from a nest of arrays."""

    @property
    def values(self) -> Any:
        """The nest of this rank's arrays."""
        raise NotImplementedError


@dataclass(frozen=True)
class ValueContext:
    """What the function given to `experimental_distribute_values_from_function` is told.

    Attributes:
        replica_id_in_sync_group: the replica whose value is asked for: this rank's.
        num_replicas_in_sync: how many replicas there are.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


# --------------------------------------------------------------------------- memory of other libraries, when it is read


def event_of_reads(given: Iterable[Any]) -> Any:
    """Return an event behind what is on CuPy's current stream; None unless some arrays are other libraries'.

    Such a library knows nothing of CuPy's stream.  It may write the memory of an array, or use it for another one, as
    soon as the call that was given the array has returned.  So the call waits for the event.

    Args:
        given: the arrays, and IndexedSlices, that the work on the stream reads.
    """
    parts = [part for each in given for part in _parts(each)]
    found = next(filter(_has_other_streams, parts), None)
    if found is None:
        return None
    cupy = cupy_for("arrays in GPU memory")
    with as_device_array(found, "an array in GPU memory").device:
        event = cupy.cuda.Event(disable_timing=True)
        event.record(cupy.cuda.get_current_stream())
    return event


def _parts(value: Any) -> tuple[Any, ...]:
    return (value.values, value.indices) if isinstance(value, IndexedSlices) else (value,)


def _has_other_streams(value: Any) -> bool:
    """Return whether the library of an array in GPU memory works on another stream than CuPy's current one."""
    if type(value) is np.ndarray or is_cupy(value) or not is_in_gpu_memory(value):
        return False
    if library_of(value) != "torch":
        return True
    try:
        stream = sys.modules["torch"].cuda.current_stream().cuda_stream
    except AttributeError:  # a torch without CUDA
        return True
    return bool(stream != cupy_for("an array in GPU memory").cuda.get_current_stream().ptr)
