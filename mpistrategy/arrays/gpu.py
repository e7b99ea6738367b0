"""CuPy's arrays in GPU memory.

CuPy is never imported for arrays on the host.  A caller who passes a CuPy array has imported it; for arrays of torch,
jax or numba in GPU memory `cupy_for` imports it.  All work follows the order of CuPy's current stream: a call reads
after the work put on it before the call, and work put on it after the call sees the result.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from mpistrategy.arrays.dtypes import Array, dtype_name, span
from mpistrategy.errors import DeviceError, UnsupportedError

#: A cupy.ndarray; types cannot be checked without CuPy.
DeviceArray: TypeAlias = Any

#: CUDA's handles up to this one are default streams; the legacy one must not be queried during a capture.
_DEFAULT_STREAMS = 2
#: The place of an array in comparisons, after its dtype.
ON_A_GPU = " on a GPU"
#: CuPy's types for memory of cudaMalloc.
_CUDA_MALLOC = ("PooledMemory", "Memory", "MemoryPointer")
_INSTALL = "Install the CuPy of your driver: pip install cupy-cuda12x, or cupy-cuda13x."


def is_cupy(value: object) -> bool:
    """Return whether `value` is a CuPy array, without importing CuPy."""
    kind: Any = type(value)
    return _is_of_cupy(kind)


@lru_cache(maxsize=256)  # a step asks for all of its arrays
def _is_of_cupy(kind: Any) -> bool:
    return bool(kind.__module__.partition(".")[0] == "cupy" and hasattr(kind, "__cuda_array_interface__"))


def own_result(array: Any, out: Any) -> Any:
    """Return an array in GPU memory that is its own result, and can be reduced in place; else None.

    It is contiguous, and in memory of cudaMalloc: an MPI may not take other memory.
    """
    same = is_cupy(out) and array.data.ptr == out.data.ptr and array.shape == out.shape and array.dtype == out.dtype
    fits = same and array.flags.c_contiguous and out.flags.c_contiguous
    return array if fits and type(array.data.mem).__name__ in _CUDA_MALLOC else None


def cupy_for(where: str) -> Any:
    """Return the package cupy.

    Raises:
        UnsupportedError: when it cannot be imported.
    """
    try:
        import cupy
    except Exception as error:  # a missing package, or a CuPy for another CUDA: errors of many types
        raise UnsupportedError.at(
            where, found=f"an array in GPU memory, and no working CuPy ({error})", expected="CuPy", fix=_INSTALL
        ) from error
    return cupy


def by_value(argument: Array) -> Array:
    """Return an argument of a kernel as one element of bytes, which CuPy passes by value.

    CuPy would write out the names of fields in words, which takes 20 us for each launch.
    """
    return argument.reshape(-1).view(np.dtype((np.void, argument.nbytes)))


def to_host(array: DeviceArray) -> Array:
    """Return a copy of a CuPy array on the host, after the work on the current stream."""
    with array.device:
        host_copy: Array = array.get()
    return host_copy


def are_apart(arrays: Sequence[Any]) -> bool:
    """Return whether no two NumPy arrays, or CuPy arrays, have memory in common, as far as ranges of addresses show."""
    if len(arrays) == 2 and isinstance(arrays[0], np.ndarray):
        return not np.may_share_memory(arrays[0], arrays[1])  # the same, in a fifth of the time
    spans = sorted(span(array) for array in arrays if array.size)
    return all(before[1] <= after[0] for before, after in pairwise(spans))


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
    """Call a method of a NumPy ufunc on inputs, some of them in GPU memory.

    CuPy supports calls of ufuncs.  It has other names for reductions and matrix products, and takes NumPy's scalars but
    not its arrays.
    """
    plain = [value[()] if isinstance(value, np.ndarray) and value.ndim == 0 else value for value in inputs]
    if ufunc is np.matmul and method == "__call__" and not kwargs:
        return operator.matmul(*plain)
    if method == "reduce" and ufunc in _REDUCTIONS:
        options = {name: value for name, value in kwargs.items() if value is not None}
        return getattr(plain[0], _REDUCTIONS[ufunc])(**{"axis": 0, **options} if "axis" not in kwargs else options)
    return getattr(ufunc, method)(*plain, **kwargs)


def check_device(arrays: Sequence[DeviceArray], index: int | None, where: str) -> None:
    """Raise DeviceError unless all arrays are on one GPU: the GPU with this index, if given."""
    devices = sorted({int(array.data.device_id) for array in arrays})
    if len(devices) > 1 or (index is not None and devices != [index]):
        place = "one GPU" if index is None else f"GPU:{index}, which this rank drives"
        raise DeviceError.at(
            where,
            found=f"arrays on {' and '.join(f'GPU:{number}' for number in devices)}",
            expected=f"arrays on {place}",
            fix=f"Make them inside `with cupy.cuda.Device({devices[0] if index is None else index}):`, or copy them.",
        )


def check_no_capture(cupy: Any, where: str) -> None:
    """Raise UnsupportedError while the current stream is captured into a CUDA graph."""
    stream = cupy.cuda.get_current_stream()
    if stream.ptr > _DEFAULT_STREAMS and stream.is_capturing():
        raise UnsupportedError.at(
            where,
            found="a current stream that is captured into a CUDA graph",
            expected="a stream that is not captured: a graph cannot replay the communication between ranks",
            fix="Capture the work before and after the call.",
        )


def layout_of(array: Any) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and shape that ranks compare; the dtype says "on a GPU", since host arrays do not match."""
    return f"{dtype_name(array.dtype)}{ON_A_GPU if is_cupy(array) else ''}", tuple(array.shape)
