"""Values that act as arrays, and distributed values: PerReplica, Mirrored, IndexedSlices.

A rank has only its own component.  Most values are plain arrays; a container is used where it adds information, and
acts as an array.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import contains, index
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from mpistrategy.arrays.convert import (
    any_array,
    array_where_it_is,
    as_device_array,
    copy_of,
    cupy_for,
    host_array,
    in_jax,
    is_cupy,
    is_in_gpu_memory,
    is_on_device,
    library_of,
    like_given,
)
from mpistrategy.arrays.dtypes import Array
from mpistrategy.errors import OptionTypeError, PlacementError, ShapeError, UnsupportedError

T = TypeVar("T")
Method: TypeAlias = Callable[..., Any]
#: What NumPy's methods return, as far as it is one type.
ArrayMethod: TypeAlias = Callable[..., Array]
Refused: TypeAlias = Callable[..., NoReturn]

#: Arguments of NumPy's methods that may be None, which has no effect.
_NONE_BY_DEFAULT = {"dtype", "out", "kind", "order", "mode", "side", "sorter", "min", "max", "stable"}


def _reads(name: str, gives: str) -> Any:
    """Return a method of this rank's array, which takes the arguments of NumPy's method.

    Args:
        name: its name.
        gives: its result, for help().
    """

    def method(self: ArrayLike, *args: Any, **named: Any) -> Any:
        plain = [argument._read() if isinstance(argument, ArrayLike) else argument for argument in args]
        # None is the default of these arguments, and CuPy's methods lack some of them.
        options = {key: value for key, value in named.items() if value is not None or key not in _NONE_BY_DEFAULT}
        return getattr(self._array(name), name)(*plain, **options)

    return _named(method, name, f"Return {gives}.")


def _refused(name: str) -> Any:
    """Return a method that is refused, since it would write."""

    def method(self: ArrayLike, *args: Any, **named: Any) -> NoReturn:
        self._refuse(f".{name}")

    return _named(method, name, "Refused: it would write.")


def _named(method: Any, name: str, words: str) -> Any:
    method.__name__, method.__qualname__ = name, f"ArrayLike.{name}"
    method.__doc__ = f"{words}  Takes what `numpy.ndarray.{name}` takes."
    return method


def _converts(function: Callable[..., Any]) -> Any:
    """Return a method that gives `function` of the value, and of its arguments."""
    return lambda self, *arguments: function(self._read(), *arguments)


def _attribute(name: str, words: str) -> Any:
    """Return an attribute of this rank's array as a property."""
    return property(lambda self: getattr(self._array(name), name), doc=words)


class ArrayLike(NDArrayOperatorsMixin):
    """Arithmetic, comparison, indexing, conversion and NumPy's methods for anything with a `_read` method.

    The methods and attributes of `numpy.ndarray` that only read are each done by this rank's array.  They take what
    NumPy's take and return what NumPy's return: an array, often a view, or a scalar.  For a value in GPU memory they
    are CuPy's.  A view of a variable on the host is read-only, and shows later writes.  The methods that write are
    refused, and say what to write instead; so is a result in this object's memory (``out=``).  The guide's page on
    variables has the same table, and a test compares both with `numpy.ndarray`.
    """

    #: What to write in place of a write into the array `v`.
    _written_by = "Make a new array: v = v + x."

    def _read(self) -> Any:
        """Return the value, which may be a collective."""
        raise NotImplementedError

    def _array(self, name: str) -> Any:
        """Return this rank's value as a NumPy or CuPy array, for the method or attribute `name`."""
        return array_where_it_is(self._read(), f"{type(self).__name__}.{name}")

    def _contribution(self) -> Any:
        """Return this replica's value in a reduction, also in a function that JAX traces; never communicates."""
        return self._read()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        array = host_array(self._read())
        return np.asarray(array, dtype) if copy is None else np.array(array, dtype, copy=copy)  # NumPy 1 has no None

    def __dlpack__(self, **options: Any) -> Any:
        """Share the value's memory, on the host or on a GPU; read-only where it is, which torch does not heed."""
        return any_array(self._read()).__dlpack__(
            **{key: option for key, option in options.items() if option is not None}
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return any_array(self._read()).__dlpack_device__()

    def __jax_array__(self) -> Any:
        """Return a copy for JAX, whose arrays never change.

        NumPy or CuPy copies before JAX sees the memory: JAX itself may read it later, when it has been written again.
        """
        value = copy_of(any_array(self._read()))
        return sys.modules["jax"].numpy.asarray(value) if isinstance(value, np.ndarray) else in_jax(value)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        targets = (*kwargs.get("out", ()), *(inputs[:1] if method == "at" else ()))  # `at` writes to read-only views
        for target in targets:
            if isinstance(target, ArrayLike):
                target._refuse(f" as the result of np.{ufunc.__name__}")
        plain = [value._read() if isinstance(value, ArrayLike) else value for value in inputs]
        if any(map(is_on_device, plain)):  # CuPy takes NumPy's scalars but not its arrays
            plain = [value[()] if isinstance(value, np.ndarray) and value.ndim == 0 else value for value in plain]
        return getattr(ufunc, method)(*plain, **kwargs)

    def __getitem__(self, key: Any) -> Array:
        return self._read()[key]  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return len(self._contribution())

    __bool__: Callable[..., bool] = _converts(bool)
    __float__: Callable[..., float] = _converts(float)
    __int__: Callable[..., int] = _converts(int)
    __complex__: Callable[..., complex] = _converts(complex)
    __index__: Callable[..., int] = _converts(index)
    __iter__: Callable[..., Iterator[Any]] = _converts(iter)
    __contains__: Callable[..., bool] = _converts(contains)

    def __format__(self, spec: str) -> str:
        return format(self._read(), spec) if spec else str(self)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the local component; reading it never communicates."""
        return np.shape(self._contribution())

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the local component; reading it never communicates."""
        return any_array(self._contribution()).dtype

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

    def _refuse(self, what: str) -> NoReturn:
        """Raise UnsupportedError: the call `what` would write into this object."""
        raise UnsupportedError.at(
            f"{type(self).__name__}{what}",
            found="a write into the memory of the array",
            expected="a new value",
            fix=f"{self._written_by}  To change parts, first x = v.copy().",
        )

    # ------------------------------------------------------------------------------------------ attributes

    T: Array = _attribute("T", "The array with its axes reversed.")
    real: Array = _attribute("real", "The real parts.")
    imag: Array = _attribute("imag", "The imaginary parts.")
    flat: Any = _attribute("flat", "An iterator over the elements.")
    flags: Any = _attribute("flags", "How the array lies in memory.")
    strides: tuple[int, ...] = _attribute("strides", "The bytes from one element to the next, for each axis.")

    # ------------------------------------------------------------------------------- the methods that read

    transpose: ArrayMethod = _reads("transpose", "the array with its axes permuted")
    reshape: ArrayMethod = _reads("reshape", "the array in another shape")
    ravel: ArrayMethod = _reads("ravel", "the elements in one axis, a view where that is possible")
    flatten: ArrayMethod = _reads("flatten", "a copy of the elements in one axis")
    squeeze: ArrayMethod = _reads("squeeze", "the array without axes of length 1")
    swapaxes: ArrayMethod = _reads("swapaxes", "the array with two axes exchanged")
    diagonal: ArrayMethod = _reads("diagonal", "a diagonal")
    view: Method = _reads("view", "a view, of another dtype or type where one is given")
    copy: ArrayMethod = _reads("copy", "a copy, which may be written to")
    astype: ArrayMethod = _reads("astype", "the array in another dtype; a copy unless ``copy=False``")
    item: Method = _reads("item", "one element as a Python number")
    tolist: Method = _reads("tolist", "the elements as nested lists of Python numbers")
    tobytes: Callable[..., bytes] = _reads("tobytes", "the bytes of the elements")
    sum: Method = _reads("sum", "the sum of this rank's elements, over all axes or those given")
    prod: Method = _reads("prod", "the product, over all axes or those given")
    mean: Method = _reads("mean", "the mean of this rank's elements, over all axes or those given")
    std: Method = _reads("std", "the standard deviation, over all axes or those given")
    var: Method = _reads("var", "the variance, over all axes or those given")
    max: Method = _reads("max", "the greatest element, over all axes or those given")
    min: Method = _reads("min", "the least element, over all axes or those given")
    all: Method = _reads("all", "whether all elements are true, over all axes or those given")
    any: Method = _reads("any", "whether an element is true, over all axes or those given")
    argmax: Method = _reads("argmax", "where the greatest element is")
    argmin: Method = _reads("argmin", "where the least element is")
    cumsum: ArrayMethod = _reads("cumsum", "the sums of the elements up to each")
    cumprod: ArrayMethod = _reads("cumprod", "the products of the elements up to each")
    trace: Method = _reads("trace", "the sum of a diagonal")
    dot: Method = _reads("dot", "the matrix product with `b`, as ``numpy.dot``")
    clip: Method = _reads("clip", "the elements, those outside the limits replaced by the limits")
    round: Method = _reads("round", "the elements rounded")
    conj: Method = _reads("conj", "the complex conjugates")
    conjugate: Method = _reads("conjugate", "the complex conjugates")
    take: Method = _reads("take", "the elements at `indices`")
    choose: Method = _reads("choose", "elements of `choices`, each from the array that this array's element names")
    compress: ArrayMethod = _reads("compress", "the parts along an axis where `condition` is true")
    repeat: ArrayMethod = _reads("repeat", "the elements, each repeated")
    nonzero: Callable[..., tuple[Array, ...]] = _reads(
        "nonzero", "where the elements are not zero, an array for each axis"
    )
    searchsorted: Method = _reads("searchsorted", "where `v` would be inserted into this sorted array")
    argsort: ArrayMethod = _reads("argsort", "the indices that would sort the array")
    argpartition: ArrayMethod = _reads("argpartition", "the indices that would partition the array")

    byteswap: ArrayMethod = _reads("byteswap", "a copy with the bytes of each element in the other order")
    tofile: Callable[..., None] = _reads("tofile", "nothing, and write a file.  Each rank that calls it needs its own")

    # -------------------------------------------------------------------------------------- what would write

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        self._refuse("[...] = value")

    fill: Refused = _refused("fill")
    sort: Refused = _refused("sort")
    partition: Refused = _refused("partition")
    put: Refused = _refused("put")
    itemset: Refused = _refused("itemset")
    setfield: Refused = _refused("setfield")
    setflags: Refused = _refused("setflags")
    resize: Refused = _refused("resize")


class DistributedValues(ArrayLike):
    """A value with one component on each replica; this rank holds its own.

    Attributes:
        values: the components that live on this rank: a tuple of one, or an empty tuple where none does.
    """

    _lives_on: str = "a rank that has a component"

    def __init__(self, values: Sequence[Any]) -> None:
        if not isinstance(values, (tuple, list)) or len(values) > 1:
            raise OptionTypeError.at(
                type(self).__name__,
                found=f"values={values!r}",
                expected="a tuple of one: this rank's own component",
                fix="The other components live on the other ranks.",
            )
        self.values: tuple[Any, ...] = tuple(values)

    def _read(self) -> Any:
        if not self.values:
            raise PlacementError.at(
                type(self).__name__,
                found="a read on a rank without the value",
                expected=f"a read on {self._lives_on}",
                fix="To have it on every rank, pass a variable, a value or the list of all devices as destination.",
            )
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

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_group": None}  # the ranks belong to this process


class Mirrored(DistributedValues):
    """A value that is the same on every replica that has it.

    Args:
        values: a tuple of one component, or an empty tuple on a rank without the value.
        lives_on: text that names the ranks with the value, for the error of a read on another rank.
    """

    def __init__(self, values: tuple[Any, ...] | list[Any], lives_on: str = "every rank") -> None:
        if type(values) is tuple and len(values) < 2:
            self.values = values
        else:
            super().__init__(values)
        self._lives_on = lives_on

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


def local_component(value: Any) -> Any:
    """Return this rank's component of a DistributedValues; anything else unchanged."""
    return value._read() if isinstance(value, DistributedValues) else value


def contribution(value: Any) -> Any:
    """Return this replica's part of `value` in a reduction or a gather; of a variable, its own copy."""
    value = local_component(value)
    return value._contribution() if isinstance(value, ArrayLike) else value


class Reducible(Generic[T]):
    """Base of values whose reduction has another type, `T`: of an arena its nest, of a variable an array."""


class ArenaBase(Reducible[T]):
    """The base of `mpistrategy.Arena`, which lies above: it tells an arena from a nest of arrays."""


def is_arena(value: Any) -> bool:
    """Return whether `value` is a `mpistrategy.Arena`."""
    return isinstance(value, ArenaBase)


@dataclass(frozen=True)
class ValueContext:
    """The argument of the function of `experimental_distribute_values_from_function`.

    Attributes:
        replica_id_in_sync_group: the replica whose value is asked for: this rank's.
        num_replicas_in_sync: how many replicas there are.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


# --------------------------------------------------------------------------- memory of other libraries, when it is read


def event_of_reads(arrays: Iterable[Any]) -> Any:
    """Return an event behind the work on CuPy's current stream; None unless some arrays are of other libraries.

    Such a library knows nothing of CuPy's stream.  It may write the memory of an array, or use it for another array, as
    soon as the call with the array has returned.  So the call waits for the event.

    Args:
        arrays: the arrays, and IndexedSlices, that the work on the stream reads.
    """
    parts = [part for array in arrays for part in parts_of(array)]
    foreign_array = next(filter(_has_other_streams, parts), None)
    if foreign_array is None:
        return None
    cupy = cupy_for("arrays in GPU memory")
    with as_device_array(foreign_array, "an array in GPU memory").device:
        event = cupy.cuda.Event(disable_timing=True)
        event.record(cupy.cuda.get_current_stream())
    return event


def parts_of(value: Any) -> tuple[Any, ...]:
    return (value.values, value.indices) if isinstance(value, IndexedSlices) else (value,)


def _has_other_streams(value: Any) -> bool:
    """Return whether the library of an array in GPU memory works on another stream than CuPy's current one."""
    if type(value) is np.ndarray or is_cupy(value) or not is_in_gpu_memory(value):
        return False
    if library_of(value) != "torch":
        return True
    stream = sys.modules["torch"].cuda.current_stream().cuda_stream
    return bool(stream != cupy_for("an array in GPU memory").cuda.get_current_stream().ptr)
