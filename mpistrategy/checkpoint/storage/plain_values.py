"""What a checkpoint's manifest can say in JSON: plain values, dtypes, and the paths that things stand at.

Plain values come back as they were: ints of any size, floats with every bit, tuples as tuples.  What JSON has no word
for is an object with one key that says what it is; objects of the user's are lists of pairs, so that no key of theirs
can be taken for one.
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

#: What `None` cannot stand for: a value that is no plain one.
NOT_PLAIN = object()
#: What `None` cannot stand for, either: there is no object here, and what is plain is made anew.
ABSENT = object()

_DEEPEST = 100
#: The largest array, in bytes, and the number of axes that NumPy's may have.
MOST_BYTES, MOST_AXES = 2**46, 32 if np.__version__.startswith("1.") else 64
#: The longest text in JSON, in bytes, and how many lists and objects, and commas, it may have: a header, or a manifest.
LONGEST_TEXT = 2**26
_MOST_HOLDERS, _MOST_COMMAS = 2**21, 2**22
#: About how many bytes an object, a list, and what stands between commas take once they are read; and how many a text
#: may take: so many, and so many times its length.
_OBJECT_BYTES, _LIST_BYTES, _VALUE_BYTES = 256, 88, 64
_ROOM_BYTES, _ROOM_TIMES = 2**26, 8
#: Names of dtypes: NumPy's, which takes whole structures for such names, and those of ml_dtypes.
_NUMPYS = re.compile(r"[<|](?:[biufcSU][0-9]{1,9}|[mM]8(?:\[[0-9]{0,9}[A-Za-z]{1,8}\])?)")
_OTHERS = re.compile(r"[a-z][a-z0-9_]{0,30}")


def to_json(value: Any, inside: tuple[int, ...] = ()) -> Any:
    """Return a nest of Python's own numbers, strings, None, lists, tuples and dicts as JSON; else `NOT_PLAIN`.

    Keys of dicts are strings or ints.  Subclasses (named tuples, enums) are not plain: they would come back as others.
    `inside` are the ids of what it stands in.
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
    """Return what `to_json` was given.

    Raises:
        ValueError, TypeError, KeyError, AttributeError, RecursionError: for what it did not write.
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


# ------------------------------------------------------------------------------------------------ its text


def loads(data: bytes, where: str) -> Any:
    """Return parsed JSON; CheckpointDamagedError if it is invalid, too deep or too large, or if a key stands twice."""
    trouble = _too_much(data)
    if trouble:
        raise _invalid(where, trouble)
    try:
        return json.loads(data.decode(errors="surrogatepass"), object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise _invalid(where, f"no JSON ({str(error)[:80]})") from error


def check_can_be_read(text: bytes, where: str) -> None:
    """Raise OptionError for a text in JSON that `loads` would refuse for its length."""
    trouble = _too_much(text)
    if trouble:
        raise OptionError.at(
            where, found=trouble, expected="what can be read again", fix="Keep long lists of numbers in arrays."
        )


def _too_much(text: bytes) -> str:
    """Return what there is too much of in a text in JSON; "" when it may be read.

    A list of nothing takes two bytes there, and thirty times as many in memory.
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
    """Return the beginning of what a value prints as."""
    try:
        return repr(value)[:80]
    except (ValueError, RecursionError) as error:  # an int of too many digits, a nest that is too deep
        return f"({error})"


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice")
    return found


def _invalid(where: str, found: str) -> CheckpointDamagedError:
    return CheckpointDamagedError.at("a checkpoint", found=f"{found} in {where!r}", expected="a file as it was written")


# ------------------------------------------------------------------------------------------------ dtypes


def dtype_text(dtype: np.dtype[Any], where: str) -> str:
    """Return the name of a dtype in a manifest: ``<f8``, ``|b1``, ``bfloat16``; little-endian whatever the machine.

    Raises:
        DTypeError: for objects, structures and other dtypes whose bytes do not say what they mean.
    """
    if dtype.kind in "biufcmMSU":
        return dtype.newbyteorder("<").str
    if dtype.type.__module__ == "ml_dtypes":
        return dtype.name
    raise DTypeError.at(where, found=f"an array of dtype {dtype}", expected="numbers, bools, strings or times")


def dtype_of(text: Any) -> np.dtype[Any]:
    """Return the dtype of a name, little-endian.

    Raises:
        CheckpointDamagedError: for a name that `dtype_text` does not give, or that this machine does not know.
    """
    found = _dtype_of(text) if isinstance(text, str) else None
    if found is None or dtype_text(found, "") != text:
        shown = repr(text)[:80] if isinstance(text, str) else f"of type {type(text).__name__}"
        raise CheckpointDamagedError.at("a checkpoint", found=f"the dtype {shown}", expected="a dtype of numbers")
    return found


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Return whether it is a dtype of numbers, or of truth values, that can be added."""
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
    """Return whether NumPy can have such an array: even one of no elements must not have too many in one direction."""
    elements = math.prod(max(count, 1) for count in shape)
    return len(shape) <= MOST_AXES and elements * max(dtype.itemsize, 1) <= sys.maxsize


# ------------------------------------------------------------------------------------------------ paths


def below(path: str, key: Any) -> str:
    """Return the path of what stands under `key` in what stands at `path`."""
    return f"{path}/{str(key).replace('~', '~0').replace('/', '~1')}"
