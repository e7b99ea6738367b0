"""Arrays of every kind, used as NumPy's or CuPy's arrays: the only module that knows all kinds and libraries.

An array on the host is used as an ndarray.  An array in GPU memory, of whatever library, is used as a CuPy array.  Both
share the memory of the original where that is possible, and results are returned in the kind of the input.  Neither
torch nor JAX is imported here: a caller who passes its array has imported it.  CuPy is imported for their arrays in GPU
memory, never for arrays on the host.

All work with CuPy's arrays follows the order of CuPy's current stream: a call reads after the work put on it before the
call, and work put on it after the call sees the result.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from mpistrategy.arrays.dtypes import Array, dtype_name, is_bfloat16, span
from mpistrategy.errors import DeviceError, DTypeError, LeafError, ShapeError, UnsupportedError
from mpistrategy.objects.jax_traces import refuse_in_jax_trace

#: A cupy.ndarray; types cannot be checked without CuPy.
DeviceArray: TypeAlias = Any

#: CUDA's handles up to this one are default streams; the legacy one must not be queried during a capture.
_DEFAULT_STREAMS = 2
#: The place of an array in comparisons, after its dtype.
ON_A_GPU = " on a GPU"
#: CuPy's types for memory of cudaMalloc.
_CUDA_MALLOC = ("PooledMemory", "Memory", "MemoryPointer")
#: The names of libraries, by the first part of the module of their arrays.
_LIBRARIES = {"cupy": "cupy", "torch": "torch", "jax": "jax", "jaxlib": "jax"}
_IN_GPU_MEMORY = (2, 13)  # DLPack's kDLCUDA and kDLCUDAManaged
_ON_HOST: AbstractContextManager[Any] = nullcontext()
_CONVERT = "Convert it first, e.g. x.astype(np.float32); broadcast and all_gather take any dtype of fixed size."


def is_cupy(value: object) -> bool:
    """Return whether `value` is a CuPy array, without importing CuPy."""
    return library_of(value) == "cupy"


def library_of(value: object) -> str:
    """Return the library of the type of `value`; of a derived class, the library of its base."""
    kind: Any = type(value)
    return _library_of(kind)


@lru_cache(maxsize=512)  # a step asks for all of its arrays
def _library_of(kind: type) -> str:
    roots = [base.__module__.partition(".")[0] for base in kind.__mro__]
    return next((_LIBRARIES[root] for root in roots if root in _LIBRARIES), roots[0])


def is_foreign(value: object) -> bool:
    """Return whether `value` is an array of another library than NumPy, on the host or on a GPU; or anything of JAX's.

    NumPy cannot read all values of JAX: see `without_data`.
    """
    kind = type(value)  # variables and containers have __dlpack__, too, and a _contribution that returns their array
    if issubclass(kind, (np.ndarray, np.generic)) or hasattr(kind, "_contribution"):
        return False
    return hasattr(kind, "__dlpack__") or library_of(value) == "jax"


def is_in_gpu_memory(value: Any) -> bool:
    """Return whether a value of another library than CuPy is an array in GPU memory."""
    if library_of(value) == "torch":  # its interface raises for tensors that require gradients
        return bool(getattr(value, "is_cuda", False))
    try:
        has_interface = hasattr(value, "__cuda_array_interface__")
        return has_interface or (is_foreign(value) and value.__dlpack_device__()[0] in _IN_GPU_MEMORY)
    except Exception:  # libraries raise errors of many types; `on_host` tells them
        return False


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
    if type(value).__module__ not in ("builtins", "numpy") and (is_on_device(value) or is_foreign(value)):
        value = host_array(value, where, path)
    # NumPy loads numpy.ma when somebody asks for it: no masked array exists before.
    if "ma" in vars(np) and isinstance(value, np.ma.MaskedArray):
        raise LeafError.at(
            where,
            found=f"a masked array as {leaf}",
            expected="an ordinary array",
            fix="Pass x.filled(0): masks are not sent.",
        )
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
    if (dtype.kind in "iufc" and numpys_own) or is_bfloat16(dtype):
        return array
    raise DTypeError.at(
        where,
        found=f"dtype {dtype_name(dtype)}{f' at leaf {path}' if path else ''}",
        expected="a numeric dtype (integer, float or complex)",
        fix=_CONVERT,
    )


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
    # The result would go into the copy that torch makes of a lazy conjugate.
    is_lazy = library_of(target) == "torch" and (target.is_conj() or target.is_neg())
    if isinstance(target, np.ndarray):
        array = target if target.flags.writeable else None
    elif not is_lazy and (library_of(target) == "torch" or (is_on_device(target) and library_of(target) != "jax")):
        array = array_where_it_is(target, where, name)
    # Elements that share memory, as after ``broadcast_to``; NumPy makes such arrays read-only.
    is_repeated = (
        array is not None
        and array.size
        and any(step == 0 and length > 1 for length, step in zip(array.shape, array.strides, strict=True))
    )
    if array is None or is_repeated:
        raise ShapeError.at(
            where,
            found=f"{name} = {type(target).__name__}",
            expected="a writeable ndarray, or another array that is no lazy conjugate",
        )
    return array


def hand_back(array: Any, target: Any) -> None:
    """Let the library of `target` wait for the write; it may work on another stream.

    Args:
        array: the array that `as_target` returned for `target`; written to on CuPy's current stream.
        target: the array of the other library; its stream waits as DLPack says.
    """
    if library_of(target) == "torch":
        sys.modules["torch"].autograd.graph.increment_version(target)  # as each write of torch's own does
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
    """Return a copy of an array on the same device; of any library whose arrays can copy themselves."""
    with on_device_of(array):
        return array.clone() if library_of(array) == "torch" else array.copy()


def host_array(value: Any, where: str = "a value", path: str = "") -> Array:
    """Return an array as an ndarray on the host; no copy when it is there already.  Errors name `where` and `path`.

    An array in GPU memory is copied after the work on the current stream.
    """
    if type(value) is np.ndarray:
        return value
    if is_on_device(value):
        array = as_device_array(value, where, path)
        with array.device:
            return array.get()  # type: ignore[no-any-return]
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
            value = host_array(array)  # on another GPU, with streams of its own
        return cupy_for("a value").asarray(value)  # type: ignore[no-any-return]


def check_places(arrays: Sequence[Any], where: str) -> None:
    """Raise ShapeError or DeviceError unless all arrays are on the same GPU, or all on the host."""
    if len({is_on_device(array) for array in arrays}) > 1:
        kinds = ["in GPU memory" if is_on_device(array) else "on the host" for array in arrays]
        raise ShapeError.at(where, found=f"an array {kinds[-1]}", expected=f"one {kinds[0]}, as the value is")
    check_device(arrays, None, where)


# ------------------------------------------------------------------------------------------------------ CuPy's arrays


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
            where,
            found=f"an array in GPU memory, and no working CuPy ({error})",
            expected="CuPy",
            fix="Install the CuPy of your driver: pip install cupy-cuda12x, or cupy-cuda13x.",
        ) from error
    return cupy


def by_value(argument: Array) -> Array:
    """Return an argument of a kernel as one element of bytes, which CuPy passes by value.

    CuPy would write out the names of fields in words, which takes 20 us for each launch.
    """
    return argument.reshape(-1).view(np.dtype((np.void, argument.nbytes)))


def are_apart(arrays: Sequence[Any]) -> bool:
    """Return whether no two NumPy or CuPy arrays have memory in common, as far as ranges of addresses show."""
    if len(arrays) == 2 and isinstance(arrays[0], np.ndarray) and isinstance(arrays[1], np.ndarray):
        return not np.may_share_memory(arrays[0], arrays[1])  # the same, in a fifth of the time
    spans = sorted(span(array) for array in arrays if array.size)
    return all(before[1] <= after[0] for before, after in pairwise(spans))


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


# ----------------------------------------------------------------------------- arrays of torch, JAX and other libraries


def unmarked(value: Any) -> Any:
    """Return an array that other libraries can read: a torch tensor detached, with lazy conj and neg resolved."""
    return value.detach().resolve_conj().resolve_neg() if library_of(value) == "torch" else value


def on_host(value: Any, where: str, path: str = "") -> Array:
    """Return an array of another library on the host as an ndarray; the same memory where possible.

    Raises:
        LeafError: for arrays that NumPy cannot read: sparse arrays, arrays without data or on several hosts.
        ContextError: for JAX's values in a function that it traces.
    """
    try:
        value = unmarked(value)
        if library_of(value) == "torch" and value.dtype is sys.modules["torch"].bfloat16:
            from ml_dtypes import bfloat16  # NumPy has none of its own

            bits: Array = value.view(sys.modules["torch"].int16).numpy()
            return bits.view(bfloat16)
        array: Array = np.asarray(value) if hasattr(value, "__array__") else np.from_dlpack(value)
    except Exception as error:  # libraries raise errors of many types
        if library_of(value) == "jax":
            refuse_in_jax_trace(where)
        found = closed_to("NumPy", value, path, error)
        failure = LeafError.at(where, found=found, expected="a dense array")
        raise without_data(value, where, path) or failure from error
    return array


def without_data(value: Any, where: str, path: str = "") -> LeafError | None:
    """Return the error for a value of JAX's that NumPy cannot read: traced, keys, or donated; None for others."""
    if library_of(value) != "jax" or isinstance(value, np.ndarray):
        return None
    is_traced = isinstance(value, sys.modules["jax"].core.Tracer)
    if hasattr(value, "__dlpack__") and not is_traced and not value.is_deleted():
        return None
    leaf = f" at leaf {path}" if path else ""
    return LeafError.at(
        where,
        found=f"{type(value).__name__}{leaf}, of dtype {getattr(value, 'dtype', None)}, whose numbers cannot be read",
        expected="an array with its data on this rank",
        fix="In place of an array that was traced, deleted, or donated to a compiled function (donate_argnums), pass "
        "what the function returned. Of random keys pass jax.random.key_data(keys), and give the result to "
        "jax.random.wrap_key_data.",
    )


def closed_to(library: str, value: Any, path: str, error: Exception) -> str:
    """Return the text that a library cannot read a leaf."""
    reason = str(error).strip().partition("\n")[0]
    leaf = f"at leaf {path} " if path else ""
    return f"{type(value).__module__}.{type(value).__name__} {leaf}that {library} cannot read ({reason})"


def as_kind_of(result: Any, like: Any) -> Any:
    """Return a NumPy or CuPy result as an array of the library of `like`; unchanged for unknown libraries."""
    library = library_of(like)
    if library == "torch":
        return as_tensor(result)
    return in_jax(result) if library == "jax" and library in sys.modules else result


def as_tensor(result: Any) -> Any:
    """Return a NumPy or CuPy array as a tensor; unchanged before torch is imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        return result
    if not isinstance(result, np.ndarray):
        return torch.from_dlpack(result)
    if not result.flags.writeable:
        result = result.copy()
    if is_bfloat16(result.dtype):
        return torch.from_numpy(result.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(result)


def in_jax(result: Any) -> Any:
    """Return a NumPy or CuPy array as a JAX array; of the same memory where that is possible: nobody else has it."""
    jax: Any = sys.modules["jax"]
    if isinstance(result, np.ndarray) and (result.dtype.isbuiltin != 1 or not result.flags.writeable):
        return jax.numpy.asarray(result)  # DLPack knows neither bfloat16 nor float8 nor int4
    return jax.dlpack.from_dlpack(result)
