"""The dtypes of arrays: how elements are combined, in which dtype they are sent, and which dtype a mean has."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable
from typing import Any, ParamSpec, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
P = ParamSpec("P")
R = TypeVar("R")


def quietly(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function add numbers as MPI does: without NumPy's warnings, which may be errors, on some ranks only.

    ``errstate`` as a decorator takes half the time.  In NumPy 1 the threads of a process share what it remembers.
    """
    if not np.__version__.startswith("1."):
        return np.errstate(all="ignore")(function)

    @functools.wraps(function)
    def quiet(*args: P.args, **kwargs: P.kwargs) -> R:
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return quiet


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    """Return whether `dtype` is the bfloat16 of ml_dtypes, without importing it."""
    return dtype.name == "bfloat16"


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return a name that is the same on every rank: ``float32``, ``bfloat16``, ``[('a', '<i4')]``."""
    if dtype.kind in "SU":
        return f"strings {dtype.str}"
    return str(dtype) if dtype.names else dtype.name


def wire_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which values of `dtype` are combined in GPU memory, and over several steps.

    The 16-bit floats are summed in float32 and rounded once.  Integers of 8 and 16 bits are combined in 32 bits, and
    wrap around at the end as in NumPy.
    """
    if dtype.kind in "iu" and dtype.itemsize < 4:
        return np.dtype(np.int32 if dtype.kind == "i" else np.uint32)
    return host_wire_dtype(dtype)


def host_wire_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which arrays of `dtype` on the host are sent and combined.

    The 16-bit floats as in `wire_dtype`.  Integers wrap around in their own dtype: a wider one would take several times
    the memory.
    """
    if dtype.itemsize == 2 and (dtype.kind == "f" or is_bfloat16(dtype)):
        return np.dtype(np.float32)
    return dtype


def sum_dtype_of_mean(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which values of `dtype` are summed for a MEAN: integers become integers of 64 bits.

    So a mean of integers that fits is right, though their sum would not fit.
    """
    return np.dtype(f"{dtype.kind}8") if dtype.kind in "iu" else dtype


def mean_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a MEAN: integers become float32 (8 and 16 bits) or float64, as in TensorFlow."""
    if dtype.kind in "iu":
        return np.dtype(np.float32 if dtype.itemsize < 4 else np.float64)
    return dtype


def is_buffer(array: Array) -> bool:
    """Return whether an array can be passed to MPI as it is: contiguous and aligned.

    An array in the middle of a file's bytes may be contiguous and not aligned: mpi4py has no datatype for it.
    """
    return array.flags.c_contiguous and array.flags.aligned


def is_python_number(value: object) -> bool:
    """Return whether `value` is a plain Python number (bool excluded), which takes the dtype of the other operand."""
    return isinstance(value, numbers.Number) and not isinstance(value, (bool, np.generic))


def span(array: Any) -> tuple[int, int]:
    """Return the addresses between which the elements of a NumPy or CuPy array lie."""
    on_host = isinstance(array, np.ndarray)
    first = last = array.__array_interface__["data"][0] if on_host else int(array.data.ptr)
    for length, stride in zip(array.shape, array.strides, strict=True):
        first += min(0, (length - 1) * stride)
        last += max(0, (length - 1) * stride)
    return first, last + array.itemsize


def division(divisor: int | float, dtype: np.dtype[Any]) -> tuple[np.ufunc, Any]:
    """Return how arrays of a floating or complex dtype are divided: ``ufunc(array, operand)`` has a division's bits."""
    if type(divisor) is int and divisor > 1 and divisor & (divisor - 1) == 0 and dtype.kind == "f":
        return np.multiply, dtype.type(1 / divisor)  # exact, and faster
    return np.true_divide, dtype.type(divisor)


def divide_by(divisor: int | float, array: Array) -> None:
    """Divide an array of a floating or complex dtype in place."""
    if divisor != 1:
        ufunc, operand = division(divisor, array.dtype)
        ufunc(array, operand, out=array)


# --------------------------------------------------------------------------------------------- combination


class Extreme:
    """MIN or MAX of two arrays of one dtype and shape, with bits that do not depend on the order; called as a ufunc is.

    -0.0 is less than +0.0.  NaN wins, and becomes the positive quiet NaN of the dtype, as `np.nan` is.  So both are
    commutative and associative in every bit.  `np.minimum` and `np.maximum` are not: of two zeros or two NaNs they
    return either, depending on the processor and the position in the array.

    Args:
        ufunc: `np.minimum` or `np.maximum`.
    """

    def __init__(self, ufunc: np.ufunc) -> None:
        self._ufunc = ufunc
        # A minimum that is 0 is negative where either operand is, a maximum where both are.
        self._join = np.logical_or if ufunc is np.minimum else np.logical_and

    def __call__(self, first: Array, second: Array, out: Array | None = None) -> Array:
        """Return the combination in `out`, which may be one of the operands, or in new memory."""
        target = np.empty(first.shape, first.dtype) if out is None else out
        if first.dtype.kind != "f":
            return self._ufunc(first, second, out=target)  # type: ignore[no-any-return]
        result = self._ufunc(first, second, out=np.empty(first.shape, first.dtype))
        # The ufunc leaves open the bits of zeros and of NaN, which also fails the comparison.
        if result.size and not np.minimum.reduce(np.abs(result), axis=None) > 0:
            _set_zeros_and_nan(result, self._join(np.signbit(first), np.signbit(second)))
        target[...] = result
        return target

    def reduce(self, array: Any, axes: tuple[int, ...]) -> Any:
        """Return the combination of an array of NumPy's or CuPy's along some axes, which are not empty."""
        is_least, signs = self._ufunc is np.minimum, np.signbit(array) if array.dtype.kind == "f" else None
        result = array.min(axis=axes) if is_least else array.max(axis=axes)
        result = np.asarray(result) if isinstance(array, np.ndarray) else result
        if signs is not None:
            _set_zeros_and_nan(result, signs.any(axis=axes) if is_least else signs.all(axis=axes))
        return result


def _set_zeros_and_nan(array: Array, negative: Any) -> None:
    """Set the signs of zeros, and the bits of NaN."""
    number, zero, is_nan = array.dtype.type, array == 0, np.isnan(array)
    np.copyto(array, number(0), where=zero)
    np.copyto(array, -number(0), where=zero & negative)
    np.copyto(array, number(np.nan), where=is_nan)


#: Writes the combination of two arrays to a third: ``combine(first, second, out=third)``.
Combine: TypeAlias = Callable[..., Any]
#: How two arrays are combined; NaN wins in all of them.
COMBINE: dict[str, Any] = {
    "SUM": np.add,
    "MIN": Extreme(np.minimum),
    "MAX": Extreme(np.maximum),
    "PROD": np.multiply,
}
