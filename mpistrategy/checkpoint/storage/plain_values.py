"""Plain values, dtypes, sizes and paths as a manifest has them, and the limits of its JSON text.

Plain values are restored exactly: ints of any size, all bits of floats, tuples as tuples.  A type that JSON does not
have is an object with one key, which names the type; a dict is a list of pairs, so that its keys cannot be mistaken for
such a name.
"""

from __future__ import annotations

import functools
import json
import math
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrategy.errors import CheckpointDamagedError, DTypeError, OptionError

#: Returned for a value that is not plain; None is plain.
NOT_PLAIN = object()
#: Stands for an object that is not there; None is a value.
ABSENT = object()

_DEEPEST = 100
#: The largest array, in bytes, and the most axes of a NumPy array.
MOST_BYTES, MOST_AXES = 2**46, 32 if np.__version__.startswith("1.") else 64
#: The longest JSON text (a header or a manifest) in bytes, and the most lists and objects, and commas, in it.
LONGEST_TEXT = 2**26
_MOST_HOLDERS, _MOST_COMMAS = 2**21, 2**22
#: About how many bytes an object, a list and an element take when parsed; and how many the whole text may take: a
#: constant, plus this many times its length.
_OBJECT_BYTES, _LIST_BYTES, _VALUE_BYTES = 256, 88, 64
_ROOM_BYTES, _ROOM_TIMES = 2**26, 8
#: Names of dtypes, NumPy's and those of ml_dtypes.  NumPy would also accept whole structures.
_NUMPYS = re.compile(r"[<|](?:[biufcSU][0-9]{1,9}|[mM]8(?:\[[0-9]{0,9}[A-Za-z]{1,8}\])?)")
_OTHERS = re.compile(r"[a-z][a-z0-9_]{0,30}")


def to_json(value: Any, inside: tuple[int, ...] = ()) -> Any:
    """Return a nest of Python's own numbers, strings, None, lists, tuples and dicts as JSON; else `NOT_PLAIN`.

    Keys of dicts are strings or ints.  Subclasses (named tuples, enums) are not plain: they would lose their class.
    `inside` has the ids of the containers around the value.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return {"float": value.hex()}
    if type(value) is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if type(value) is bytes:
        return {"bytes": value.hex()}
    if len(inside) > _DEEPEST or id(value) in inside:
        return NOT_PLAIN
    inside = (*inside, id(value))
    if type(value) in (list, tuple):
        items = [to_json(item, inside) for item in value]
        if any(item is NOT_PLAIN for item in items):
            return NOT_PLAIN
        return items if type(value) is list else {"tuple": items}
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        pairs = [[key, to_json(item, inside)] for key, item in value.items()]
        return NOT_PLAIN if any(item is NOT_PLAIN for _, item in pairs) else {"dict": pairs}
    return NOT_PLAIN


def from_json(value: Any) -> Any:
    """Return the value that `to_json` was given.

    Raises:
        ValueError, TypeError, KeyError, AttributeError, RecursionError: for JSON that it does not return.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, list):
        return [from_json(item) for item in value]
    ((kind, inner),) = value.items()
    if kind == "float":
        return float.fromhex(inner)
    if kind == "complex":
        real, imaginary = inner
        return complex(float.fromhex(real), float.fromhex(imaginary))
    if kind == "bytes":
        return bytes.fromhex(inner)
    if kind == "tuple":
        return tuple(from_json(item) for item in inner)
    if kind == "dict":
        return {key: from_json(item) for key, item in inner}
    raise ValueError(f"a value of kind {kind!r}")


# ------------------------------------------------------------------------------------------------ JSON text


def loads(data: bytes, where: str) -> Any:
    """Return parsed JSON; CheckpointDamagedError if it is invalid, too deep or too large, or has a key twice."""
    trouble = _too_much(data)
    if trouble:
        raise _invalid(where, trouble)
    try:
        return json.loads(data.decode(errors="surrogatepass"), object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise _invalid(where, f"no JSON ({str(error)[:80]})") from error


def check_can_be_read(text: bytes, where: str) -> None:
    """Raise OptionError for a JSON text that `loads` would refuse as too large."""
    trouble = _too_much(text)
    if trouble:
        raise OptionError.at(
            where, found=trouble, expected="less, to be read again", fix="Keep long lists of numbers in arrays."
        )


def _too_much(text: bytes) -> str:
    """Return what a JSON text has too much of; "" if it may be parsed.

    Parsed values take more memory than their text: an empty list takes two bytes of text and 56 of memory.
    """
    objects, lists, commas = text.count(b"{"), text.count(b"["), text.count(b",")
    memory = objects * _OBJECT_BYTES + lists * _LIST_BYTES + commas * _VALUE_BYTES
    for count, most, what in (
        (len(text), LONGEST_TEXT, "bytes of names and plain values"),
        (objects + lists, _MOST_HOLDERS, "lists and dicts"),
        (commas, _MOST_COMMAS, "numbers and words"),
        (memory, _ROOM_BYTES + _ROOM_TIMES * len(text), "bytes of memory for plain values"),
    ):
        if count > most:
            return f"{count} {what} (at most {most})"
    return ""


def shown(value: Any) -> str:
    """Return the beginning of a value's repr."""
    try:
        return repr(value)[:80]
    except (ValueError, RecursionError) as error:  # too many digits, or too deep
        return f"({error})"


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _invalid(where: str, found: str) -> CheckpointDamagedError:
    return CheckpointDamagedError.at("a checkpoint", found=f"{found} in {where!r}", expected="a file as it was written")


# ------------------------------------------------------------------------------------------------ dtypes


def dtype_text(dtype: np.dtype[Any], where: str) -> str:
    """Return the name of a dtype in a manifest: ``<f8``, ``|b1``, ``bfloat16``; little-endian whatever the machine.

    Raises:
        DTypeError: for objects, structures and other dtypes that have no such name.
    """
    if dtype.kind in "biufcmMSU":
        return dtype.newbyteorder("<").str
    if dtype.type.__module__ == "ml_dtypes":
        return dtype.name
    raise DTypeError.at(where, found=f"an array of dtype {dtype}", expected="numbers, bools, strings or times")


def dtype_of(text: Any) -> np.dtype[Any]:
    """Return the dtype of a name, little-endian.

    Raises:
        CheckpointDamagedError: for a name that `dtype_text` does not return, or an unknown one.
    """
    found = _dtype_of(text) if isinstance(text, str) else None
    if found is None or dtype_text(found, "") != text:
        shown = repr(text)[:80] if isinstance(text, str) else f"of type {type(text).__name__}"
        raise CheckpointDamagedError.at("a checkpoint", found=f"the dtype {shown}", expected="a dtype of numbers")
    return found


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Return whether it is a dtype of numbers or bools, which can be added."""
    return dtype.kind not in "mMSU"


@functools.lru_cache
def _dtype_of(text: str) -> np.dtype[Any] | None:
    try:
        if _NUMPYS.fullmatch(text):
            return np.dtype(text)
        import ml_dtypes

        kind = getattr(ml_dtypes, text) if _OTHERS.fullmatch(text) else None
        return np.dtype(kind) if isinstance(kind, type) and issubclass(kind, np.generic) else None
    except (ImportError, AttributeError, TypeError, ValueError, OverflowError):
        return None


def byte_count(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Return how many bytes an array has."""
    return math.prod(shape) * dtype.itemsize


def is_possible(shape: Sequence[int], dtype: np.dtype[Any]) -> bool:
    """Return whether NumPy can make such an array; an axis of length 0 does not lift the limit for the others."""
    elements = math.prod(max(count, 1) for count in shape)
    return len(shape) <= MOST_AXES and elements * max(dtype.itemsize, 1) <= sys.maxsize


# ------------------------------------------------------------------------------------------------ paths


def below(path: str, key: Any) -> str:
    """Return the path of the element `key` of the object at `path`."""
    return f"{path}/{str(key).replace('~', '~0').replace('/', '~1')}"
