"""The recordings' spelling of values: decoding inputs, encoding observations, and the part that one rank
sees.

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
import enum
import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

import mpistrategy as ms
from mpistrategy.arrays.convert import is_on_device

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


class Caught:
    """An exception that a program caught and reports as an observation."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Raw:
    """An observation that is already in the recordings' spelling."""

    def __init__(self, value: Json) -> None:
        self.value = value


# ------------------------------------------------------------------------------------------------ decoding


def array_of(node: Json) -> np.ndarray[Any, Any]:
    """Return the array that an encoded tensor, ndarray, variable or NumPy scalar stands for."""
    key = next(k for k in ARRAY_KEYS if k in node)
    if node["dtype"] == "string":
        return np.array(node[key], dtype=object).reshape(node.get("shape", ()))
    array = np.array(_numbers(node[key]), dtype=dtype_of(node["dtype"]))
    return array.reshape(node["shape"]) if node.get("shape") is not None else array


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a recorded dtype name."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def decode(node: Json) -> Any:
    """Return the Python value of an encoded input; tensors become arrays, new ones at every call."""
    if isinstance(node, list):
        return [decode(child) for child in node]
    if not isinstance(node, dict):
        return node
    if is_array(node):
        array = array_of(node)
        if node["dtype"] == "string":
            return array.astype(str)
        return array[()] if "numpy_scalar" in node else on_device.place(array)
    for key, decoder in _DECODERS.items():
        if key in node:
            return decoder(node)
    raise UnsupportedProgramError(f"no value is known that is written {node!r}")


def _decode_mapping(node: Json) -> Any:
    kind = collections.OrderedDict if node.get("type") == "OrderedDict" else dict
    return kind((key, decode(child)) for key, child in node["dict"].items())


def _decode_slices(node: Json) -> ms.IndexedSlices:
    fields = node["IndexedSlices"]
    return ms.IndexedSlices(decode(fields["values"]), decode(fields["indices"]), decode(fields.get("dense_shape")))


_DECODERS: dict[str, Any] = {
    "tuple": lambda node: tuple(decode(child) for child in node["tuple"]),
    "namedtuple": lambda node: Pt(**{key: decode(child) for key, child in node["fields"].items()}),
    "dict": _decode_mapping,
    "IndexedSlices": _decode_slices,
    "float": lambda node: NON_FINITE[node["float"]],
    "aggregation": lambda node: ms.VariableAggregation[node["aggregation"]],
    "synchronization": lambda node: ms.VariableSynchronization[node["synchronization"]],
    "reduce_op": lambda node: ms.ReduceOp[node["reduce_op"]],
    "object": lambda node: object(),
}


def _numbers(value: Json) -> Any:
    if isinstance(value, list):
        return [_numbers(child) for child in value]
    if isinstance(value, dict):
        return complex(_numbers(value["re"]), _numbers(value["im"]))
    return NON_FINITE.get(value, value) if isinstance(value, str) else value


def is_array(node: Json) -> bool:
    """Return whether an encoded value is an array of any spelling."""
    return isinstance(node, dict) and "dtype" in node and any(key in node for key in ARRAY_KEYS)


# ------------------------------------------------------------------------------------------------ encoding


def encode(value: Any) -> Json:
    """Return an observation in the recordings' spelling, as this rank sees it.  Never communicates."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return _number(value)
    if isinstance(value, Raw):
        return value.value
    if isinstance(value, Caught):
        return encode_error(value.error)
    if isinstance(value, ms.DistributedValues):
        return encode(value.values[0]) if value.values else {"elsewhere": getattr(value, "_lives_on", "another rank")}
    if isinstance(value, ms.Variable):
        return _encode_array("variable", on_device.host(value.local_copy()))
    if isinstance(value, ms.IndexedSlices):
        names = ("values", "indices", "dense_shape")
        return {"IndexedSlices": {name: encode(getattr(value, name)) for name in names}}
    if isinstance(value, np.ndarray) or is_on_device(value):
        return _encode_array("ndarray", on_device.host(value))
    if isinstance(value, np.generic):
        return _encode_array("numpy_scalar", np.asarray(value))
    if isinstance(value, (tuple, list, Mapping)):
        return _encode_container(value)
    if isinstance(value, complex):
        return {"complex": _number(value)}
    if isinstance(value, type):
        return {"class": value.__name__}
    if isinstance(value, enum.Enum):
        return {"enum": f"{type(value).__name__}.{value.name}"}
    return {"object": type(value).__name__}


def encode_error(error: BaseException) -> Json:
    """Return an exception with its base classes, so that the judge can ask what it is a subclass of."""
    bases = [base.__name__ for base in type(error).__mro__[1:-1]]
    return {"error": {"type": type(error).__name__, "bases": bases, "message": str(error)[:2000]}}


def _encode_container(value: Any) -> Json:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = {name: encode(child) for name, child in zip(value._fields, value, strict=True)}
        return {"namedtuple": type(value).__name__, "fields": fields}
    if isinstance(value, tuple):
        return {"tuple": [encode(child) for child in value]}
    if isinstance(value, list):
        return [encode(child) for child in value]
    node: Json = {"dict": {str(key): encode(child) for key, child in value.items()}}
    return node if type(value) is dict else {**node, "type": type(value).__name__}


def _encode_array(key: str, array: np.ndarray[Any, Any]) -> Json:
    text = array.dtype.kind in "OSU"
    return {key: nested(array), "dtype": "string" if text else array.dtype.name, "shape": list(array.shape)}


def nested(value: Any) -> Json:
    """Return the numbers of an array as nested lists, without dtype and shape."""
    array = on_device.host(value)
    return _number(array[()]) if array.ndim == 0 else [nested(row) for row in array]


def _number(x: Any) -> Json:
    if isinstance(x, (bool, np.bool_)):
        return bool(x)
    if isinstance(x, (int, np.integer)):
        return int(x)
    if isinstance(x, (complex, np.complexfloating)):
        return {"re": _number(float(x.real)), "im": _number(float(x.imag))}
    if isinstance(x, bytes):
        return x.decode("utf-8", "replace")
    if isinstance(x, str):
        return x
    number = float(x)
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return number


# ------------------------------------------------------------------------------------------------ views


def local_view(node: Json, rank: int) -> Json:
    """Return what replica `rank` sees of a recorded value: of each container of n entries, its own."""
    if isinstance(node, list):
        return [local_view(child, rank) for child in node]
    if not isinstance(node, dict) or is_array(node):
        return node
    for key in CONTAINER_KEYS:
        if key in node and isinstance(node[key], list):
            entries = node[key]
            return local_view(entries[rank] if len(entries) > 1 else entries[0], rank)
    return {key: local_view(child, rank) for key, child in node.items()}


def own_copy(node: Json, rank: int, num_replicas: int) -> Json:
    """Return this replica's entry of a recorded list or tuple with one entry a replica, as a list of one."""
    if isinstance(node, dict) and "tuple" in node:
        return {"tuple": own_copy(node["tuple"], rank, num_replicas)}
    if isinstance(node, list) and len(node) == num_replicas:
        return [node[rank]]
    return node


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
