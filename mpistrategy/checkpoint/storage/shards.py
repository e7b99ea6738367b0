"""Shards: the arrays that one rank writes, in the format safetensors, which many programs read.

Eight bytes have the length of a JSON header.  The header has the dtype, shape and offsets of each array.  The bytes of
the arrays follow.  Nothing in it is executed.  An array of a dtype that safetensors does not have is stored as bytes;
the manifest has the dtype.

A file may be forged: sizes are checked before memory is allocated for them.  The limits of JSON texts, and the names of
dtypes, are those of manifests, too.
"""

from __future__ import annotations

import functools
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrategy.arrays.dtypes import Array, wire_dtype
from mpistrategy.errors import CheckpointDamagedError, DTypeError, OptionError

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
#: The names of dtypes in safetensors.
NAMES = {
    "|b1": "BOOL",
    "|u1": "U8",
    "|i1": "I8",
    "<u2": "U16",
    "<i2": "I16",
    "<f2": "F16",
    "bfloat16": "BF16",
    "<u4": "U32",
    "<i4": "I32",
    "<f4": "F32",
    "<u8": "U64",
    "<i8": "I64",
    "<f8": "F64",
    "<c8": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_LENGTH_BYTES = 8
#: The arrays begin at a multiple of this.  Those of the widest dtypes come first, so that each is aligned.
_ALIGNMENT = 64
_METADATA = "__metadata__"


class Stored(NamedTuple):
    """The entry of an array in the header of a shard.

    Attributes:
        start, stop: its bytes, from the beginning of the file.
        name: its dtype, as safetensors names it.
        shape: its shape.
    """

    start: int
    stop: int
    name: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.stop - self.start


def pieces_of(arrays: Mapping[str, Array]) -> Iterator[Any]:
    """Yield the bytes of a shard."""
    header: dict[str, Any] = {_METADATA: {"format": "mpistrategy"}}
    start = 0
    ordered = sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize)
    for path, array in ordered:
        name, shape = NAMES.get(dtype_text(array.dtype, path)), list(array.shape)
        if name is None:
            name, shape = "U8", [array.nbytes]
        header[path] = {"dtype": name, "shape": shape, "data_offsets": [start, start + array.nbytes]}
        start += array.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode(errors="surrogatepass")
    check_can_be_read(text, "Checkpoint.save")
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
    yield len(text).to_bytes(_LENGTH_BYTES, "little") + text
    for _, array in ordered:
        if array.nbytes:
            little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
            yield little.reshape(-1).view(np.uint8).data


def parsed(read: Callable[[int, int], bytes], size: int, where: str) -> dict[str, Stored]:
    """Return the entries of a shard's header by name; read nothing else.

    Args:
        read: given a start and a count, returns that many bytes.
        size: the size of the shard in bytes.
        where: its name, for errors.

    Raises:
        CheckpointDamagedError: for an invalid header.
    """
    length = int.from_bytes(read(0, _LENGTH_BYTES), "little") if size >= _LENGTH_BYTES else 0
    begin = _LENGTH_BYTES + length
    if size < _LENGTH_BYTES or length > LONGEST_TEXT or begin > size:
        raise _damaged(where, f"a header of {length} bytes in {size}")
    header = loads(read(_LENGTH_BYTES, length), where)
    if not isinstance(header, dict):
        raise _damaged(where, "a header that is no JSON object")
    found = {path: _stored(where, path, entry, begin) for path, entry in header.items() if path != _METADATA}
    end = begin
    for path, stored in sorted(found.items(), key=lambda item: item[1][:2]):
        if stored.start != end:
            raise _damaged(where, f"{path[:80]!r} from byte {stored.start} on, where byte {end} comes next")
        end = stored.stop
    if end != size:
        raise _damaged(where, f"{size} bytes, of which the arrays have {end}")
    return found


def _stored(where: str, path: str, entry: Any, begin: int) -> Stored:
    try:
        name, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [start, stop, *shape]
        is_sound = isinstance(name, str) and len(shape) <= MOST_AXES
        is_sound = is_sound and all(type(number) is int and 0 <= number <= MOST_BYTES for number in numbers)
    except (TypeError, KeyError, ValueError):
        is_sound = False
    if not is_sound or start > stop:
        raise _damaged(where, f"the entry {shown(entry)} for {path[:80]!r}")
    return Stored(begin + start, begin + stop, name, tuple(shape))


def _damaged(where: str, found: str) -> CheckpointDamagedError:
    return CheckpointDamagedError.at("a checkpoint", found=f"{found} in {where!r}", expected="a file as it was written")


# ------------------------------------------------------------------------------------------------ JSON text


def loads(data: bytes, where: str) -> Any:
    """Return parsed JSON; CheckpointDamagedError if it is invalid, too deep or too large, or has a key twice."""
    trouble = _too_much(data)
    if trouble:
        raise _damaged(where, trouble)
    try:
        return json.loads(data.decode(errors="surrogatepass"), object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise _damaged(where, f"no JSON ({str(error)[:80]})") from error


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


# ------------------------------------------------------------------------------------------------ copies


def combined(copies: Iterable[Array], how: str, count: int) -> Array:
    """Return the combined copies of a variable, added in rank order; integers wrap around, as everywhere."""
    total, dtype = None, np.dtype(bool)
    for copy in copies:
        if total is None:
            total, dtype = copy.astype(wire_dtype(copy.dtype)), copy.dtype
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                np.add(total, copy, out=total)
    assert total is not None
    with np.errstate(over="ignore"):
        return np.asarray(total / count if how == "MEAN" else total).astype(dtype)
