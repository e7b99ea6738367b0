"""Arrays of other libraries: torch, jax, and any library with DLPack.

They are used as NumPy or CuPy arrays of the same memory, and results are returned as the same kind.  None of these
libraries is imported here: a caller who passes its array has imported it.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array, is_bfloat16
from mpistrategy.errors import LeafError
from mpistrategy.objects.jax_traces import refuse_in_jax_trace

_LIBRARIES = ("cupy", "torch", "jax", "jaxlib")
_JAX = ("jax", "jaxlib")
_IN_GPU_MEMORY = (2, 13)  # DLPack's kDLCUDA and kDLCUDAManaged


def library_of(value: object) -> str:
    """Return the library of the type of `value`; of a derived class, the library of its base."""
    kind: Any = type(value)
    return _library_of(kind)


@lru_cache(maxsize=512)
def _library_of(kind: type) -> str:
    roots = [base.__module__.partition(".")[0] for base in kind.__mro__]
    return next((root for root in roots if root in _LIBRARIES), roots[0])


def is_foreign(value: object) -> bool:
    """Return whether `value` is an array of another library than NumPy, on the host or on a GPU; or anything of JAX's.

    NumPy cannot read all values of JAX: see `without_data`.
    """
    kind = type(value)  # variables and containers have __dlpack__, too, and a _contribution that returns their array
    if issubclass(kind, (np.ndarray, np.generic)) or hasattr(kind, "_contribution"):
        return False
    return hasattr(kind, "__dlpack__") or library_of(value) in _JAX


def is_in_gpu_memory(value: Any) -> bool:
    """Return whether a value of another library than CuPy is an array in GPU memory."""
    if library_of(value) == "torch":  # its interface raises for tensors that require gradients
        return bool(getattr(value, "is_cuda", False))
    try:
        has_interface = hasattr(value, "__cuda_array_interface__")
        return has_interface or (is_foreign(value) and value.__dlpack_device__()[0] in _IN_GPU_MEMORY)
    except Exception:  # libraries raise errors of many types; `on_host` tells them
        return False


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
        if library_of(value) in _JAX:
            refuse_in_jax_trace(where)
        found = closed_to("NumPy", value, path, error)
        failure = LeafError.at(where, found=found, expected="a dense array")
        raise without_data(value, where, path) or failure from error
    return array


def without_data(value: Any, where: str, path: str = "") -> LeafError | None:
    """Return the error for a value of JAX's that NumPy cannot read: traced, keys, or donated; None for others."""
    if library_of(value) not in _JAX or isinstance(value, np.ndarray):
        return None
    leaf = f" at leaf {path}" if path else ""
    if isinstance(value, sys.modules["jax"].core.Tracer):
        found = f"a value{leaf} of a function that JAX has traced, which stands for no numbers"
        fix = "Return it from the function, and pass what the compiled function returns."
    elif not hasattr(value, "__dlpack__"):
        found = f"{type(value).__name__}{leaf}, of dtype {getattr(value, 'dtype', None)}, which NumPy cannot read"
        fix = "Of random keys pass jax.random.key_data(keys), and give the result to jax.random.wrap_key_data."
    elif value.is_deleted():
        found = f"a JAX array{leaf} that was donated to a compiled function, or deleted"
        fix = "Pass what the function returned in its place, or leave it out of donate_argnums."
    else:
        return None
    return LeafError.at(where, found=found, expected="an array with its data on this rank", fix=fix)


def closed_to(library: str, value: Any, path: str, error: Exception) -> str:
    """Return the text that a library cannot read a leaf."""
    reason = str(error).strip().partition("\n")[0]
    leaf = f"at leaf {path} " if path else ""
    return f"{type(value).__module__}.{type(value).__name__} {leaf}that {library} cannot read ({reason})"


def as_kind_of(result: Any, like: Any) -> Any:
    """Return a NumPy or CuPy result as an array of the library of `like`; unchanged for unknown libraries."""
    wrap, library = _KINDS.get(library_of(like)), library_of(like)
    return wrap(result) if wrap is not None and library in sys.modules else result


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


_KINDS = {"torch": as_tensor, "jax": in_jax, "jaxlib": in_jax}
