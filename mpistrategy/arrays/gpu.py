"""Arrays in GPU memory: CuPy's, and those of other libraries, which are looked at as CuPy's and given back in kind.

CuPy is never imported for arrays on the host.  Whoever passes a CuPy array has imported it; for arrays of torch, jax or
numba in GPU memory it is imported here.  Everything follows the order of CuPy's current stream: what was put on it
before a call is done before the call reads, and what is put on it after the call sees the result.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import numpy as np

from mpistrategy.arrays.dtypes import Array, dtype_name, is_cupy, to_reducible
from mpistrategy.arrays.foreign import as_kind_of, closed_to, is_in_gpu_memory, library_of, on_host, unmarked
from mpistrategy.errors import DeviceError, LeafError, ShapeError, UnsupportedError

#: A cupy.ndarray; CuPy has no types that could be checked without it.
DeviceArray: TypeAlias = Any

_INTERFACE = "__cuda_array_interface__"
_NEVER_WRITTEN = ("jax", "jaxlib")
#: CUDA's handles up to this one are default streams; the legacy one cannot be asked while another is captured.
_DEFAULT_STREAMS = 2
_INSTALL = "Install the CuPy of your driver: pip install cupy-cuda12x, or cupy-cuda13x."


def is_on_device(value: object) -> bool:
    """Return whether `value` is an array in GPU memory, of whatever library."""
    if type(value) is np.ndarray:
        return False
    return is_cupy(value) or is_in_gpu_memory(value)


def cupy_for(where: str) -> Any:
    """Return the package cupy.

    Raises:
        UnsupportedError: when it cannot be imported.
    """
    try:
        import cupy
    except Exception as error:  # a missing package, or a CuPy for another CUDA: of many types
        raise UnsupportedError.at(
            where, found=f"an array in GPU memory, and no CuPy that works ({error})", expected="CuPy", fix=_INSTALL
        ) from error
    return cupy


def as_device_array(value: Any, where: str, path: str = "") -> DeviceArray:
    """Return an array in GPU memory as CuPy's, without a copy; one of another library is waited for in stream order.

    Raises:
        LeafError: when its library does not give it away.
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
            fix="A copy that its own library makes may do; `mpistrategy doctor` tells what is wrong with the GPU.",
        ) from error


def as_target(target: Any, where: str, name: str) -> Any:
    """Return an array that a result can be written to, as NumPy's or CuPy's; the same memory.

    Raises:
        ShapeError: for what is none, or may not be written.
    """
    found = type(target).__name__
    if isinstance(target, np.ndarray):
        if target.flags.writeable:
            return target
    elif library_of(target) == "torch":
        return as_device_array(target, where, name) if is_on_device(target) else on_host(target, where, name)
    elif is_on_device(target) and library_of(target) not in _NEVER_WRITTEN:
        array = None if _is_read_only(target) else as_device_array(target, where, name)
        if array is not None and not _overlaps_itself(array):
            return array
    raise ShapeError.at(where, found=f"{name} = {found}", expected="a writeable ndarray, or array in GPU memory")


def _is_read_only(array: Any) -> bool:
    """Return whether an array in GPU memory of any library says that it must not be written."""
    interface = getattr(array, _INTERFACE, None)
    data = interface.get("data") if isinstance(interface, dict) else None
    return isinstance(data, tuple) and len(data) == 2 and bool(data[1])


def _overlaps_itself(array: DeviceArray) -> bool:
    """Return whether elements share memory, as those of ``broadcast_to`` do; NumPy makes such arrays read-only."""
    return any(stride == 0 and length > 1 for length, stride in zip(array.shape, array.strides, strict=True))


def hand_back(written: Any, target: Any) -> None:
    """Let what the library of `target` does from now on with this array in GPU memory see what was written to it.

    Args:
        written: what `as_target` returned for `target`, to which something was written on CuPy's current stream.
        target: whose library may work on another stream, which is told to wait, as DLPack says.
    """
    if not is_cupy(target) and is_on_device(target):
        with written.device:
            as_kind_of(written, target)


def to_reducible_on_device(value: Any, where: str, path: str = "") -> DeviceArray:
    """Return an array in GPU memory as CuPy's, if it can be summed; the dtypes are those of the host.

    Raises:
        DTypeError, LeafError, UnsupportedError: as `mpistrategy.arrays.dtypes.to_reducible`.
    """
    array = as_device_array(value, where, path)
    to_reducible(np.empty(0, array.dtype), where, path)
    return array


def reducible(value: Any, where: str, path: str = "") -> Any:
    """Return `value` as an array that can be summed, where it is: in GPU memory as CuPy's, else as an ndarray.

    Raises:
        DTypeError, LeafError, UnsupportedError: as `mpistrategy.arrays.dtypes.to_reducible`.
    """
    return (to_reducible_on_device if is_on_device(value) else to_reducible)(value, where, path)


def to_host(array: DeviceArray) -> Array:
    """Return a copy of a CuPy array on the host, once all that was put on the current stream is done."""
    with array.device:
        copied: Array = array.get()
    return copied


def on_device_of(array: Any) -> AbstractContextManager[Any]:
    """Return what makes the GPU of an array the current one in a with block; nothing, for an array on the host."""
    device: AbstractContextManager[Any] = array.device if is_on_device(array) else _NOWHERE
    return device


_NOWHERE: AbstractContextManager[Any] = nullcontext()


def on_device_of_any(arrays: Sequence[Any]) -> AbstractContextManager[Any]:
    """Return what makes the GPU of those arrays that are on one the current one; nothing, where all are on the host."""
    return on_device_of(next(filter(is_on_device, arrays), None))


def copy_of(array: Any) -> Any:
    """Return a copy of an array of NumPy's or CuPy's, where it is."""
    with on_device_of(array):
        return array.copy()


def host_array(value: Any) -> Array:
    """Return an array, wherever it is, as one on the host; no copy of what is there already."""
    return to_host(as_device_array(value, "a value")) if is_on_device(value) else np.asarray(value)


def any_array(value: Any) -> Array:
    """Return a number or an array as an array: what is in GPU memory as it is, anything else as an ndarray."""
    array: Array = value if is_on_device(value) else np.asarray(value)
    return array


def placed_as(value: Any, place: Any) -> Array:
    """Return an array where another one is: on the host, or on that one's GPU; no copy of what is there already."""
    if not is_on_device(place):
        return host_array(value)
    with place.device:
        if is_on_device(value):
            placed: Array = as_device_array(value, "a value")
            if placed.device == place.device:
                return placed
            value = to_host(placed)  # of another GPU, whose streams are no concern of this one's
        return cupy_for("a value").asarray(value)  # type: ignore[no-any-return]


def write_from_host(array: Array, target: DeviceArray) -> None:
    """Write an ndarray into one in GPU memory of the same dtype and shape; takes no memory there."""
    with target.device:
        target.set(array)


def may_share_memory(one: Any, other: Any) -> bool:
    """Return whether two arrays, NumPy's or CuPy's, may have elements in common."""
    if is_on_device(one) != is_on_device(other):
        return False
    if not is_on_device(one):
        return np.may_share_memory(one, other)
    (begin, end), (first, last) = _span(one), _span(other)
    return begin < last and first < end


def _span(array: DeviceArray) -> tuple[int, int]:
    """Return the addresses between which the elements lie; as `mpistrategy.arrays.dtypes.span`."""
    begin = end = int(array.data.ptr)
    for length, stride in zip(array.shape, array.strides, strict=True):
        begin += min(0, (length - 1) * stride)
        end += max(0, (length - 1) * stride)
    return begin, end + array.itemsize


#: NumPy's reductions, as methods of CuPy's arrays.
_REDUCTIONS = {
    np.add: "sum",
    np.multiply: "prod",
    np.maximum: "max",
    np.minimum: "min",
    np.logical_and: "all",
    np.logical_or: "any",
}


def on_device(ufunc: np.ufunc, method: str, inputs: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Do what a ufunc of NumPy is asked for, where some of the inputs are in GPU memory.

    CuPy does calls of them; it has other names for reductions and products of matrices, and takes NumPy's scalars but
    no arrays.
    """
    plain = [value[()] if isinstance(value, np.ndarray) and value.ndim == 0 else value for value in inputs]
    if ufunc is np.matmul and method == "__call__" and not kwargs:
        return operator.matmul(*plain)
    if method == "reduce" and ufunc in _REDUCTIONS:
        given = {name: value for name, value in kwargs.items() if value is not None}
        return getattr(plain[0], _REDUCTIONS[ufunc])(**{"axis": 0, **given} if "axis" not in kwargs else given)
    return getattr(ufunc, method)(*plain, **kwargs)


def like_given(result: Any, given: Any) -> Any:
    """Return a result as the kind of array that was given: in GPU memory, and of the same library.

    Args:
        result: an ndarray or a CuPy array.
        given: what the caller passed; a NumPy array and a number leave the result as it is.
    """
    if type(given) is np.ndarray or isinstance(given, (np.generic, int, float, complex)):
        return result
    if is_on_device(given):
        result = _on_device_of(result, given)
    elif not isinstance(result, np.ndarray):
        return result
    return as_kind_of(result, given)


def _on_device_of(result: Any, given: Any) -> DeviceArray:
    if is_cupy(result):
        return result
    cupy = cupy_for("a result in GPU memory")
    with as_device_array(given, "a result in GPU memory").device:
        return cupy.asarray(result)


def check_device(arrays: Sequence[DeviceArray], index: int | None, where: str) -> None:
    """Raise DeviceError unless all arrays are on one GPU, the one with this index where it is known."""
    found = sorted({int(array.device.id) for array in arrays})
    if index is not None and found != [index]:
        raise DeviceError.at(
            where,
            found=f"arrays on {' and '.join(f'GPU:{number}' for number in found)}",
            expected=f"arrays on GPU:{index}, which this rank drives",
            fix=f"Make them inside `with cupy.cuda.Device({index}):`, or copy them there.",
        )
    if len(found) > 1:
        raise DeviceError.at(
            where,
            found=f"arrays on {' and '.join(f'GPU:{number}' for number in found)} in one structure",
            expected="arrays on one GPU",
        )


def check_no_capture(cupy: Any, where: str) -> None:
    """Raise UnsupportedError while a CUDA graph is made of what the current stream is given."""
    stream = cupy.cuda.get_current_stream()
    if stream.ptr > _DEFAULT_STREAMS and stream.is_capturing():
        raise UnsupportedError.at(
            where,
            found="a current stream whose work becomes a CUDA graph",
            expected="a stream that works: the ranks meet at each call, which no graph can replay",
            fix="Capture what comes before and behind the call.",
        )


def check_places(arrays: Sequence[Any], where: str) -> None:
    """Raise unless all arrays are on the same GPU, or all on the host: ShapeError or DeviceError."""
    if len({is_on_device(array) for array in arrays}) > 1:
        kinds = ["in GPU memory" if is_on_device(array) else "on the host" for array in arrays]
        raise ShapeError.at(where, found=f"an array {kinds[-1]}", expected=f"one {kinds[0]}, as the value is")
    check_device(arrays, None, where)


def layout_of(array: DeviceArray) -> tuple[str, tuple[int, ...]]:
    """Return what ranks compare: an array on the host does not fit one in GPU memory."""
    return f"{dtype_name(array.dtype)} on a GPU", tuple(array.shape)
