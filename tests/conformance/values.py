"""The recordings' spelling of values: decoding inputs, encoding observations, and the part that one rank sees.

    [..] {"tuple": []} {"dict": {}} {"namedtuple": name, "fields": {}}   Python containers
    {"tensor" | "ndarray" | "variable" | "numpy_scalar": v, "dtype", "shape"}   arrays
    {"IndexedSlices": {"values", "indices", "dense_shape"}}   sparse arrays
    {"PerReplica" | "Mirrored" | "MirroredVariable" | "SyncOnReadVariable": [..]}   containers, one entry a
    replica
    {"error": {"type", "bases", "message"}}   a caught exception;  {"object": name}   anything else

Not-a-number and the infinities are strings; complex numbers are ``{"re", "im"}``.  Ours adds one spelling:
``{"elsewhere": where}`` for a value that does not live on this rank.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import ml_dtypes
import numpy as np

import mpistrategy as ms
from mpistrategy.arrays.convert import host_array, is_on_device

from . import on_device

Json = Any
ARRAY_KEYS = ("tensor", "ndarray", "variable", "numpy_scalar")
CONTAINER_KEYS = ("PerReplica", "Mirrored", "MirroredVariable", "SyncOnReadVariable")
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

Pt = collections.namedtuple("Pt", ["x", "y"])


class UnsupportedProgramError(BaseException):
    """What the program or its inputs need is not known here; its text says what.

    Not an Exception: a program that catches what the operation under test raises must not catch this.
    """


@dataclasses.dataclass(frozen=True)
class Caught:
    """An exception that a program caught and reports as an observation."""

    error: Exception


@dataclasses.dataclass(frozen=True)
class Raw:
    """An observation that is already in the recordings' spelling."""

    value: Json


# ------------------------------------------------------------------------------------------------ decoding


def is_array(node: Json) -> bool:
    """Return whether an encoded value is an array of any spelling."""
    return isinstance(node, dict) and "dtype" in node and any(key in node for key in ARRAY_KEYS)


def array_of(node: Json) -> np.ndarray[Any, Any]:
    """Return the array that an encoded tensor, ndarray, variable or NumPy scalar stands for."""
    key = next(k for k in ARRAY_KEYS if k in node)
    dtype = object if node["dtype"] == "string" else dtype_of(node["dtype"])
    array = np.array(_numbers(node[key]) if dtype is not object else node[key], dtype=dtype)
    return array.reshape(node["shape"]) if node.get("shape") is not None else array


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a recorded dtype name."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def _numbers(value: Json) -> Any:
    if isinstance(value, list):
        return [_numbers(child) for child in value]
    if isinstance(value, dict):
        return complex(_numbers(value["re"]), _numbers(value["im"]))
    return NON_FINITE.get(value, value) if isinstance(value, str) else value


def decode(node: Json) -> Any:
    """Return the Python value of an encoded input; tensors become arrays, new ones at every call."""
    if is_array(node):
        array = array_of(node)
        if node["dtype"] == "string":
            return array.astype(str)
        return array[()] if "numpy_scalar" in node else on_device.place(array)
    match node:
        case list():
            return [decode(child) for child in node]
        case {"tuple": children}:
            return tuple(decode(child) for child in children)
        case {"namedtuple": _, "fields": fields}:
            return Pt(**{key: decode(child) for key, child in fields.items()})
        case {"dict": children}:
            kind = collections.OrderedDict if node.get("type") == "OrderedDict" else dict
            return kind((key, decode(child)) for key, child in children.items())
        case {"IndexedSlices": parts}:
            shape = decode(parts.get("dense_shape"))
            return ms.IndexedSlices(decode(parts["values"]), decode(parts["indices"]), shape)
        case {"float": name}:
            return NON_FINITE[name]
        case {"aggregation": name}:
            return ms.VariableAggregation[name]
        case {"synchronization": name}:
            return ms.VariableSynchronization[name]
        case {"reduce_op": name}:
            return ms.ReduceOp[name]
        case {"object": _}:
            return object()
        case dict():
            raise UnsupportedProgramError(f"no value is known that is written {node!r}")
    return node


# ------------------------------------------------------------------------------------------------ encoding


def encode(value: Any) -> Json:
    """Return an observation in the recordings' spelling, as this rank sees it.  Never communicates."""
    if value is None or type(value) in (bool, int, str):
        return value
    match value:
        case Raw():
            return value.value
        case Caught():
            return encode_error(value.error)
        case ms.DistributedValues():
            lives_on = getattr(value, "_lives_on", "another rank")
            return encode(value.values[0]) if value.values else {"elsewhere": lives_on}
        case ms.Variable():
            return _encode_array("variable", host_array(value.local_copy()))
        case ms.IndexedSlices():
            names = ("values", "indices", "dense_shape")
            return {"IndexedSlices": {name: encode(getattr(value, name)) for name in names}}
        case np.generic():
            return _encode_array("numpy_scalar", np.asarray(value))
        case tuple() | list() | Mapping():
            return _encode_container(value)
        case complex():
            return {"complex": _number(value)}
        case float():
            return _number(value)
        case type():
            return {"class": value.__name__}
        case enum.Enum():
            return {"enum": f"{type(value).__name__}.{value.name}"}
    if isinstance(value, np.ndarray) or is_on_device(value):
        return _encode_array("ndarray", host_array(value))
    return {"object": type(value).__name__}


def encode_error(error: BaseException) -> Json:
    """Return an exception with its base classes, so that the judge can ask what it is a subclass of."""
    bases = [base.__name__ for base in type(error).__mro__[1:-1]]
    return {"error": {"type": type(error).__name__, "bases": bases, "message": str(error)[:2000]}}


def _encode_container(value: Any) -> Json:
    if isinstance(value, Mapping):
        node: Json = {"dict": {str(key): encode(child) for key, child in value.items()}}
        return node if type(value) is dict else {**node, "type": type(value).__name__}
    children = [encode(child) for child in value]
    if isinstance(value, list):
        return children
    if hasattr(value, "_fields"):
        return {"namedtuple": type(value).__name__, "fields": dict(zip(value._fields, children, strict=True))}
    return {"tuple": children}


def _encode_array(key: str, array: np.ndarray[Any, Any]) -> Json:
    text = array.dtype.kind in "OSU"
    return {key: nested(array), "dtype": "string" if text else array.dtype.name, "shape": list(array.shape)}


def nested(value: Any) -> Json:
    """Return the numbers of an array as nested lists, without dtype and shape."""
    array = host_array(value)
    return _number(array[()]) if array.ndim == 0 else [nested(row) for row in array]


def _number(x: Any) -> Json:
    if isinstance(x, bytes):
        return x.decode("utf-8", "replace")
    plain = x.item() if isinstance(x, np.generic) else x
    if isinstance(plain, (bool, int, str)):
        return plain
    if isinstance(plain, complex):
        return {"re": _number(plain.real), "im": _number(plain.imag)}
    number = float(plain)
    if math.isfinite(number):
        return number
    return str(number).replace("inf", "Infinity").replace("nan", "NaN")


# ------------------------------------------------------------------------------------------------ views


def local_view(node: Json, rank: int) -> Json:
    """Return what replica `rank` sees of a recorded value: of each container of n entries, its own."""
    if isinstance(node, list):
        return [local_view(child, rank) for child in node]
    if not isinstance(node, dict) or is_array(node):
        return node
    for key in CONTAINER_KEYS:
        if isinstance(node.get(key), list):
            entries = node[key]
            return local_view(entries[rank] if len(entries) > 1 else entries[0], rank)
    return {key: local_view(child, rank) for key, child in node.items()}


def at_path(node: Json, path: list[str], change: Callable[[Json], Json]) -> Json:
    """Return a recorded value, changed wherever the path leads; a step is a pattern of keys, and any for a list."""
    if not path:
        return change(node)
    if isinstance(node, list):
        return [at_path(child, path[1:], change) for child in node]
    if not isinstance(node, dict):
        return node
    return {
        key: at_path(child, path[1:], change) if fnmatchcase(key, path[0]) else child for key, child in node.items()
    }


def leaves(node: Json) -> list[Json]:
    """Return the leaves of an encoded nest: arrays, sparse arrays, Python scalars, None, objects."""
    if isinstance(node, list):
        return [leaf for child in node for leaf in leaves(child)]
    if not isinstance(node, dict) or is_array(node) or "object" in node or "IndexedSlices" in node:
        return [node]
    for key in ("tuple", "dict", "fields", *CONTAINER_KEYS):
        if key in node:
            children = node[key]
            return leaves(list(children.values()) if isinstance(children, dict) else children)
    return [leaf for child in node.values() for leaf in leaves(child)]


def elsewhere_paths(node: Json, path: str = "") -> Iterator[str]:
    """Yield where an encoded outcome has values that live on other ranks."""
    if isinstance(node, dict) and "elsewhere" in node:
        yield path
    elif isinstance(node, (dict, list)) and not is_array(node):
        children = node.items() if isinstance(node, dict) else enumerate(node)
        for key, child in children:
            yield from elsewhere_paths(child, f"{path}[{key}]" if path else str(key))
