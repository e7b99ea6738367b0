"""Shards: files of arrays in the format safetensors, which many programs read.

Eight bytes have the length of a JSON header.  The header has the dtype, shape and offsets of each array.  The bytes of
the arrays follow.  Nothing in it is executed.  An array of a dtype that safetensors does not have is stored as bytes.

The header is for other programs: the manifest says which bytes belong to which array.  The data of a rank, its arrays
and a line of JSON, are one entry: `_rank N`.

A file may be forged: sizes are checked before memory is allocated for them.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.checkpoint.storage.files import PIECE_BYTES, checksum_of, damaged, moves_on, opened
from mpistrategy.errors import DTypeError, OptionError

#: The largest array, in bytes, and the most axes of a NumPy array.
MOST_BYTES, MOST_AXES = 2**46, 32 if np.__version__.startswith("1.") else 64
#: The longest JSON text (a header or a manifest) in bytes.
LONGEST_TEXT = 2**26
#: NumPy's names of dtypes.  NumPy would also accept whole structures.
_NUMPYS = re.compile(r"[<|](?:[biufcSU][0-9]{1,9}|[mM]8(?:\[[0-9]{0,9}[A-Za-z]{1,8}\])?)")
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
#: The arrays begin at a multiple of this.  Arrays of the widest dtypes come first, so that each array is aligned.
ALIGNMENT = 64


def shard_name(number: int) -> str:
    """Return the name of a shard."""
    return f"shard-{number:05}.safetensors"


# ------------------------------------------------------------------------------------------------ writing


def raw(array: Array) -> Array:
    """Return the bytes of an array, little-endian."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)


def pieces_of(owns: Mapping[int, list[Array]], arrays: Mapping[str, Array]) -> list[Any]:
    """Return the bytes of a shard, in pieces.

    Args:
        owns: the bytes of the data of some ranks, in pieces.
        arrays: by name.
    """
    entries: list[tuple[str, str, Sequence[int] | None, list[Array]]] = [
        (f"_rank {rank}", "U8", None, pieces) for rank, pieces in owns.items()
    ]
    for path, array in arrays.items():
        name = NAMES.get(dtype_text(array.dtype, path))
        entries.append((path, name or "U8", array.shape if name else None, [raw(array)]))
    header: dict[str, Any] = {"__metadata__": {"format": "mpistrategy"}}
    start = 0
    for path, name, shape, pieces in entries:
        stop = start + sum(piece.size for piece in pieces)
        places = [start, stop]
        header[path] = {"dtype": name, "shape": [stop - start] if shape is None else shape, "data_offsets": places}
        start = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode(errors="surrogatepass")
    text += b" " * (-(_LENGTH_BYTES + len(text)) % ALIGNMENT)
    head = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return [head, *(piece for *_, pieces in entries for piece in pieces)]


# ------------------------------------------------------------------------------------------------ reading


def read_shard(path: str, nbytes: int, checksum: str, entries: Sequence[tuple[str, int, bool]]) -> dict[str, Array]:
    """Read a shard whole, once.

    Args:
        path: the file.
        nbytes, checksum: its size and its checksum, as the manifest says.
        entries: what is in it after the header: a name, how many bytes, and whether to return them.  Other bytes take
            no memory.

    Returns:
        The bytes by name.

    Raises:
        CheckpointDamagedError: for another size or checksum, and for other sizes of what is in it.
        OSError, MemoryError: if it cannot be read.
    """
    contents: dict[str, Array] = {}
    with opened(path, nbytes, nbytes) as file:
        head = file.read(_LENGTH_BYTES)
        length, running_checksum = int.from_bytes(head, "little"), checksum_of(head)
        if _LENGTH_BYTES + length + sum(size for _, size, _ in entries) != nbytes:
            raise damaged(path, f"a header of {length} bytes in {nbytes}, which do not leave what the manifest names")
        for name, size, is_kept in [("", length, False), *entries]:
            data = np.empty(size if is_kept else min(size, PIECE_BYTES), np.uint8)
            for first in range(0, size, PIECE_BYTES):
                part = data[first : first + PIECE_BYTES] if is_kept else data[: size - first]
                if file.readinto(part.data) != part.size:  # type: ignore[attr-defined]
                    raise damaged(path, "a file that ends too early")
                running_checksum.update(part)
                moves_on()
            if is_kept:
                contents[name] = data
    if running_checksum.hexdigest() != checksum:
        raise damaged(path, "a file with another checksum than it was written with")
    return contents


def as_array(data: Array, dtype: str, shape: Sequence[int]) -> Array:
    """Return an array of these bytes in native byte order, not copied where that can be."""
    kind = dtype_of(dtype)
    return data.view(kind).reshape(shape).astype(kind.newbyteorder("="), copy=False)


# ------------------------------------------------------------------------------------------------ JSON text


def loads(data: bytes, where: str) -> Any:
    """Return parsed JSON; CheckpointDamagedError if it is invalid, too deep or too large."""
    if not _can_be_read(data):
        raise damaged(where, f"{len(data)} bytes of names and plain values, which is too much")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise damaged(where, f"no JSON ({str(error)[:80]})") from error


def dumps(value: Any, where: str) -> bytes:
    """Return JSON; raise OptionError for a text that `loads` would refuse as too large."""
    text = json.dumps(value, separators=(",", ":")).encode()
    if not _can_be_read(text):
        raise OptionError.at(
            where,
            found=f"{len(text)} bytes of names and plain values",
            expected="less, to be read again",
            fix="Keep long lists of numbers in arrays.",
        )
    return text


def _can_be_read(text: bytes) -> bool:
    """Return whether a JSON text is not too long.

    Parsed, it must not take more than a constant and 8 times its length: an empty list is two bytes of text, and 88 of
    memory.
    """
    memory = 256 * text.count(b"{") + 88 * text.count(b"[") + 64 * text.count(b",")
    return len(text) <= LONGEST_TEXT and memory <= 2**26 + 8 * len(text)


def shown(value: Any) -> str:
    """Return the beginning of a value's repr."""
    try:
        return repr(value)[:80]
    except (ValueError, RecursionError) as error:  # too many digits, or too deep
        return f"({error})"


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
        CheckpointDamagedError: for a name that `dtype_text` does not return, or an unknown name.
    """
    try:
        name = text if _NUMPYS.fullmatch(text) else getattr(importlib.import_module("ml_dtypes"), text)
        dtype: np.dtype[Any] = np.dtype(name)
        if dtype_text(dtype, "") == text and dtype.itemsize:
            return dtype
    except (ImportError, AttributeError, TypeError, ValueError, OverflowError):
        pass
    raise damaged("a manifest", f"the dtype {shown(text)}")


def is_shape(shape: Any, itemsize: int) -> bool:
    """Return whether it is the shape of an array that NumPy can make, and is not too large.

    An axis of length 0 does not lift the limit for the other axes.
    """
    return (
        isinstance(shape, (list, tuple))
        and len(shape) <= MOST_AXES
        and all(type(count) is int and 0 <= count <= MOST_BYTES for count in shape)
        and math.prod(max(count, 1) for count in shape) * itemsize <= MOST_BYTES
    )
