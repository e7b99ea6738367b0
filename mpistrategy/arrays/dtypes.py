"""What the library needs to know about an array: can it be reduced, in which dtype does it travel, what is its mean.

CuPy is looked up in `sys.modules` and never imported: whoever passes a CuPy array has imported it.
"""

from __future__ import annotations

import contextvars
import numbers
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mpistrategy.arrays import extremes
from mpistrategy.errors import DTypeError, LeafError

if TYPE_CHECKING:
    import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[Any]"

#: Writes the combination of two arrays to a third: ``combine(one, other, out=...)``.
Combine: TypeAlias = Callable[..., Any]
#: How two arrays are combined; NaN wins in all of them.
COMBINE: dict[str, Combine] = {
    "SUM": np.add,
    "MIN": extremes.minimum,
    "MAX": extremes.maximum,
    "PROD": np.multiply,
}

_SMALL_INTEGERS = ("int8", "int16", "uint8", "uint16")
_REDUCIBLE_KINDS = "iufc"
_NOT_FOREIGN = ("builtins", "numpy")


def is_cupy(value: object) -> bool:
    """Return whether `value` is a CuPy array, without importing CuPy."""
    kind = type(value)
    return kind.__module__.partition(".")[0] == "cupy" and hasattr(kind, "__cuda_array_interface__")


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    """Return whether `dtype` is the bfloat16 of ml_dtypes, without importing it."""
    return dtype.name == "bfloat16"


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return a name that is the same on every rank: ``float32``, ``bfloat16``, ``[('a', '<i4')]``."""
    if dtype.kind in "SU":
        return f"strings {dtype.str}"
    return str(dtype.descr) if dtype.names else dtype.name


def wire_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which values of `dtype` are combined in GPU memory, and over several steps.

    The 16-bit floats are summed in float32 and rounded once.  Integers of 8 and 16 bits are combined in 32, and wrap
    around at the end as NumPy's do.
    """
    if dtype.name in _SMALL_INTEGERS:
        return np.dtype(np.int32 if dtype.kind == "i" else np.uint32)
    return host_wire_dtype(dtype)


def host_wire_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which arrays of `dtype` on the host travel and are combined.

    The 16-bit floats as `wire_dtype` says.  Integers wrap around in their own dtype: a wider one would take several
    times the memory.
    """
    if dtype.itemsize == 2 and (dtype.kind == "f" or is_bfloat16(dtype)):
        return np.dtype(np.float32)
    return dtype


def mean_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a MEAN: integers become float32 (8 and 16 bits) or float64, as in TensorFlow."""
    if dtype.kind in "iu":
        return np.dtype(np.float32 if dtype.name in _SMALL_INTEGERS else np.float64)
    return dtype


def is_buffer(array: Array) -> bool:
    """Return whether MPI can be given an array as it is: contiguous, and at an address that suits its dtype.

    One read from the middle of a file may be contiguous and not aligned: mpi4py has no datatype for it.
    """
    flags = array.flags
    return flags.c_contiguous and flags.aligned


def to_array(value: Any, where: str, path: str = "") -> Array:
    """Return `value` as an ndarray in native byte order; no copy when it is one already.

    Args:
        value: an ndarray, a NumPy scalar, a Python number, a list of numbers, or anything with ``__array__``; an array
            in GPU memory is copied to the host, after what was put on the current stream.
        where: the public name to blame in the error.
        path: how the leaf is reached in the caller's structure.

    Raises:
        LeafError: for None and for objects that are no arrays, masked arrays among them.
    """
    leaf = f"leaf {path}" if path else "the value"
    if type(value).__module__ not in _NOT_FOREIGN:
        value = _from_elsewhere(value, where, path)
    if isinstance(value, np.ma.MaskedArray):
        raise LeafError.at(
            where,
            found=f"a masked array as {leaf}",
            expected="an ordinary array",
            fix="Pass x.filled(0): masks cannot travel.",
        )
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise LeafError.at(where, found=f"{leaf} = {_short(value)}", expected="an array or a number") from error
    if array.dtype.kind == "O":
        raise LeafError.at(where, found=f"{leaf} = {_short(value)}", expected="an array or a number")
    if array.dtype.hasobject:
        raise DTypeError.at(where, found=f"dtype {dtype_name(array.dtype)} as {leaf}", expected="a dtype of fixed size")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _from_elsewhere(value: Any, where: str, path: str) -> Any:
    """Return an array of another library as an ndarray; anything else as it is."""
    from mpistrategy.arrays import foreign, gpu  # they build on this module

    if gpu.is_on_device(value):
        return gpu.to_host(gpu.as_device_array(value, where, path))
    return foreign.on_host(value, where, path) if foreign.is_foreign(value) else value


def to_reducible(value: Any, where: str, path: str = "") -> Array:
    """Return `value` as an ndarray that can be summed: any integer, float, complex or 16-bit float dtype.

    Raises:
        DTypeError: for bool, strings, dates and structured dtypes, naming the leaf.
        LeafError: as `to_array`.
    """
    array = value if type(value) is np.ndarray and value.dtype.isnative else to_array(value, where, path)
    dtype = array.dtype
    numpys_own = dtype.type.__module__ == "numpy"  # not the 8-bit floats of ml_dtypes
    if (dtype.kind in _REDUCIBLE_KINDS and numpys_own) or is_bfloat16(dtype):
        return array
    if dtype.kind == "O":
        return to_array(value, where, path)
    fix = "Convert it first, e.g. x.astype(np.int64)." if dtype.kind == "b" else ""
    raise DTypeError.at(
        where,
        found=f"dtype {dtype_name(dtype)} {f'at leaf {path}' if path else ''}".rstrip(),
        expected="a numeric dtype (integer, float or complex)",
        fix=fix,
    )


def is_python_number(value: object) -> bool:
    """Return whether `value` is a plain Python number (bool excluded), which adapts to the dtype it meets."""
    return isinstance(value, numbers.Number) and not isinstance(value, (bool, np.generic))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def span(array: Array) -> tuple[int, int]:
    """Return the addresses between which the elements of an array lie."""
    first = last = array.__array_interface__["data"][0]
    for length, stride in zip(array.shape, array.strides, strict=True):
        first += min(0, (length - 1) * stride)
        last += max(0, (length - 1) * stride)
    return first, last + array.itemsize


def quiet_runner() -> Callable[..., Any]:
    """Return a function that calls ``function(*args)`` without NumPy's warnings of overflow; for one thread at a time.

    MPI does not warn either.  `np.errstate` does the same, but costs more than a small sum.
    """
    context = contextvars.copy_context()
    before = np.geterr()
    context.run(partial(np.seterr, all="ignore"))
    if np.geterr() == before:
        return context.run
    np.seterr(**before)  # NumPy 1 keeps this state elsewhere
    return _with_errstate


def _with_errstate(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with np.errstate(all="ignore"):
        return function(*args, **kwargs)
