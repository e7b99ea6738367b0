"""Arrays of every kind, used as NumPy's or CuPy's arrays: the only module that knows all kinds.

An array on the host is used as an ndarray.  An array in GPU memory, of whatever library, is used as a CuPy array.  Both
share the memory of the original where that is possible, and results are returned in the kind of the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrategy.arrays.dtypes import Array, dtype_name, is_bfloat16, span
from mpistrategy.arrays.foreign import (
    as_kind_of,
    closed_to,
    is_foreign,
    is_in_gpu_memory,
    library_of,
    on_host,
    unmarked,
)
from mpistrategy.arrays.gpu import check_device, cupy_for, is_cupy, to_host
from mpistrategy.errors import DTypeError, LeafError, ShapeError

if TYPE_CHECKING:
    from mpistrategy.arrays.gpu import DeviceArray

#: The libraries whose arrays are never written.
NEVER_WRITTEN = ("jax", "jaxlib")
_REDUCIBLE_KINDS = "iufc"
_NOT_FOREIGN = ("builtins", "numpy")
_ON_HOST: AbstractContextManager[Any] = nullcontext()
_CONVERT = "Convert it first, e.g. x.astype(np.float32); broadcast and all_gather take any dtype of fixed size."


def is_on_device(value: object) -> bool:
    """Return whether `value` is an array in GPU memory, of whatever library."""
    return type(value) is not np.ndarray and (is_cupy(value) or is_in_gpu_memory(value))


# ------------------------------------------------------------------------------------- values of the user's


def to_array(value: Any, where: str, path: str = "", name: str = "the value") -> Array:
    """Return `value` as an ndarray in native byte order; no copy when it is one already.

    Args:
        value: an ndarray, a NumPy scalar, a Python number, a list of numbers, or anything with ``__array__``.  An array
            in GPU memory is copied to the host after the work on the current stream.
        where: the public name in the error.
        path: how the leaf is reached in the caller's structure.
        name: the name of a value without a path, in the error.

    Raises:
        LeafError: for None, masked arrays, and other objects that are not arrays.
        DTypeError: for dtypes with Python objects in their fields.
    """
    leaf = f"leaf {path}" if path else name
    if type(value).__module__ not in _NOT_FOREIGN and (is_on_device(value) or is_foreign(value)):
        value = host_array(value, where, path)
    if isinstance(value, np.ma.MaskedArray):
        fix = "Pass x.filled(0): masks are not sent."
        raise LeafError.at(where, found=f"a masked array as {leaf}", expected="an ordinary array", fix=fix)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise LeafError.at(where, found=f"{leaf} = {value!r:.60}", expected="an array or a number") from error
    if array.dtype.kind == "O":
        expected = "a number of 64 bits" if isinstance(value, int) else "an array of a numeric dtype, or a number"
        raise LeafError.at(where, found=f"{leaf} = {value!r:.60}, of dtype object", expected=expected, fix=_CONVERT)
    if array.dtype.hasobject:
        raise DTypeError.at(where, found=f"dtype {dtype_name(array.dtype)} as {leaf}", expected="a dtype of fixed size")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def reducible(value: Any, where: str, path: str = "") -> Any:
    """Return `value` as an array that can be reduced, where it is: in GPU memory as CuPy's, else as an ndarray.

    Any integer, float, complex or bfloat16 dtype can be reduced.

    Raises:
        DTypeError: for bool, strings, dates and structured dtypes.
        LeafError, UnsupportedError: as `to_array` and `as_device_array`.
    """
    array = value
    if type(value) is not np.ndarray or not value.dtype.isnative or value.dtype.kind == "O":
        array = array_where_it_is(value, where, path)
    dtype = array.dtype
    numpys_own = dtype.type.__module__ == "numpy"  # not the 8-bit floats of ml_dtypes
    if (dtype.kind in _REDUCIBLE_KINDS and numpys_own) or is_bfloat16(dtype):
        return array
    found = f"dtype {dtype_name(dtype)}{f' at leaf {path}' if path else ''}"
    raise DTypeError.at(where, found=found, expected="a numeric dtype (integer, float or complex)", fix=_CONVERT)


def array_where_it_is(value: Any, where: str, path: str = "", name: str = "the value") -> Any:
    """Return `value` as an array of any dtype of fixed size: in GPU memory as CuPy's, else as an ndarray.

    Raises:
        DTypeError, LeafError, UnsupportedError: as `to_array` and `as_device_array`.
    """
    if type(value) is not np.ndarray and is_on_device(value):
        return as_device_array(value, where, path)
    return to_array(value, where, path, name)


def as_device_array(value: Any, where: str, path: str = "") -> DeviceArray:
    """Return an array in GPU memory as a CuPy array of the same memory, in the order of CuPy's current stream.

    Raises:
        LeafError: when its library does not export it.
        UnsupportedError: without CuPy.
    """
    if is_cupy(value):
        return value
    cupy = cupy_for(where)
    try:
        if hasattr(value, "__dlpack__"):
            return cupy.from_dlpack(unmarked(value))
        return cupy.asarray(value)
    except Exception as error:  # of many types
        raise LeafError.at(
            where,
            found=closed_to("CuPy", value, path, error),
            expected="an array of a dtype that CuPy knows, on a GPU that this process sees",
            fix="Pass a copy made by its own library; check the GPU with `mpistrategy doctor`.",
        ) from error


def as_target(target: Any, where: str, name: str) -> Any:
    """Return an array for a result as a NumPy or CuPy array of the same memory.

    Raises:
        ShapeError: when it is not an array, or read-only.
    """
    array: Any = None
    if isinstance(target, np.ndarray):
        array = target if target.flags.writeable else None
    elif library_of(target) == "torch" or (is_on_device(target) and library_of(target) not in NEVER_WRITTEN):
        array = array_where_it_is(target, where, name)
    # Elements that share memory, as after ``broadcast_to``; NumPy makes such arrays read-only.
    is_repeated = (
        array is not None
        and array.size
        and any(step == 0 and length > 1 for length, step in zip(array.shape, array.strides, strict=True))
    )
    if array is None or is_repeated:
        found = f"{name} = {type(target).__name__}"
        raise ShapeError.at(where, found=found, expected="a writeable ndarray, or array in GPU memory")
    return array


def hand_back(array: Any, target: Any) -> None:
    """Let the library of `target` wait for the write; it may work on another stream.

    Args:
        array: the array that `as_target` returned for `target`; written to on CuPy's current stream.
        target: the array of the other library; its stream waits as DLPack says.
    """
    if not is_cupy(target) and is_on_device(target):
        with array.device:
            as_kind_of(array, target)


def like_given(result: Any, like: Any) -> Any:
    """Return a result as the kind of array of `like`: on the same device, and of the same library.

    Args:
        result: an ndarray or a CuPy array.
        like: the caller's value; for a NumPy array and a number, the result is returned unchanged.
    """
    if type(like) is np.ndarray or isinstance(like, (np.generic, int, float, complex)):
        return result
    if is_on_device(like):
        result = result if is_cupy(result) else placed_as(result, as_device_array(like, "a result in GPU memory"))
    elif not isinstance(result, np.ndarray):
        return result
    return as_kind_of(result, like)


# ------------------------------------------------------------------------ arrays of NumPy's or CuPy's: where they are


def on_device_of(array: Any) -> AbstractContextManager[Any]:
    """Return a context manager that makes the GPU of an array current; it does nothing for an array on the host."""
    return array.device if is_on_device(array) else _ON_HOST


def on_device_of_any(arrays: Sequence[Any]) -> AbstractContextManager[Any]:
    """Return `on_device_of` the first array that is on a GPU; it does nothing where all are on the host."""
    return on_device_of(next(filter(is_on_device, arrays), None))


def copy_of(array: Any) -> Any:
    """Return a copy of a NumPy or CuPy array on the same device."""
    with on_device_of(array):
        return array.copy()


def host_array(value: Any, where: str = "a value", path: str = "") -> Array:
    """Return an array as an ndarray on the host; no copy when it is there already.  Errors name `where` and `path`."""
    if type(value) is np.ndarray:
        return value
    if is_on_device(value):
        return to_host(as_device_array(value, where, path))
    return on_host(value, where, path) if is_foreign(value) else np.asarray(value)


def any_array(value: Any) -> Array:
    """Return an array in GPU memory as it is, and a number or an array on the host as an ndarray."""
    return value if is_on_device(value) else host_array(value)


def placed_as(value: Any, place: Any) -> Array:
    """Return an array on the device of `place`: the host or a GPU; no copy when it is there already."""
    if not is_on_device(place):
        return host_array(value)
    with place.device:
        if is_on_device(value):
            array: Array = as_device_array(value, "a value")
            if array.device == place.device:
                return array
            value = to_host(array)  # on another GPU, with streams of its own
        return cupy_for("a value").asarray(value)  # type: ignore[no-any-return]


def may_share_memory(first_array: Any, second_array: Any) -> bool:
    """Return whether two NumPy or CuPy arrays may share memory."""
    if is_on_device(first_array) != is_on_device(second_array) or not (first_array.size and second_array.size):
        return False
    (begin, end), (first, last) = span(first_array), span(second_array)
    return begin < last and first < end


def check_places(arrays: Sequence[Any], where: str) -> None:
    """Raise ShapeError or DeviceError unless all arrays are on the same GPU, or all on the host."""
    if len({is_on_device(array) for array in arrays}) > 1:
        kinds = ["in GPU memory" if is_on_device(array) else "on the host" for array in arrays]
        raise ShapeError.at(where, found=f"an array {kinds[-1]}", expected=f"one {kinds[0]}, as the value is")
    check_device(arrays, None, where)
