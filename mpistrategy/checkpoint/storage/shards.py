"""Shards: files of arrays in the format safetensors, which many programs read.

Eight bytes have the length of a JSON header.  The header has the dtype, shape and offsets of each array.  The bytes of
the arrays follow.  Nothing in it is executed.  An array of a dtype that safetensors does not have is stored as bytes;
the manifest has the dtype.

The data of a rank, its arrays and a line of JSON, are a shard within a shard: the entry `_rank N`.

A file may be forged: sizes are checked before memory is allocated for them.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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
_ALIGNMENT = 64
_METADATA = "__metadata__"
#: The entry with the line of JSON, in the data of a rank; and the entry with the data of a rank.
_LINE, _RANK = "_line", "_rank {}"
_RANKS = re.compile(r"_rank (0|[1-9][0-9]{0,6})")


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


def shard_name(number: int) -> str:
    """Return the name of a shard."""
    return f"shard-{number:05}.safetensors"


# ------------------------------------------------------------------------------------------------ writing


def pieces_of(arrays: Mapping[str, Array], own: Mapping[int, Sequence[Any]] | None = None) -> list[Any]:
    """Return the bytes of a shard, in pieces.

    Args:
        arrays: by name.
        own: of some ranks, what `own_pieces` returned.
    """
    entries: list[tuple[str, str, Sequence[int] | None, Sequence[Any]]] = [
        (_RANK.format(rank), "U8", None, pieces) for rank, pieces in (own or {}).items()
    ]
    for path, array in sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize):
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        name = NAMES.get(dtype_text(array.dtype, path))
        data = [little.reshape(-1).view(np.uint8)] if array.nbytes else []
        entries.append((path, name or "U8", array.shape if name else None, data))
    header: dict[str, Any] = {_METADATA: {"format": "mpistrategy"}}
    start = 0
    for path, name, shape, pieces in entries:
        stop = start + sum(memoryview(piece).nbytes for piece in pieces)
        places = [start, stop]
        header[path] = {"dtype": name, "shape": [stop - start] if shape is None else shape, "data_offsets": places}
        start = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode(errors="surrogatepass")
    check_can_be_read(text, "Checkpoint.save")
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
    head = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return [head, *(piece for *_, pieces in entries for piece in pieces)]


def own_pieces(arrays: Mapping[str, Array], values: Mapping[str, Any], where: str) -> list[Any]:
    """Return the bytes of the data of a rank: arrays, and values as JSON; their number is a multiple of 64.

    Raises:
        OptionError: for more plain values than `loads` accepts.
    """
    line = json.dumps(values, separators=(",", ":")).encode()
    check_can_be_read(line, where)
    line += b" " * (-(len(line) + sum(array.nbytes for array in arrays.values())) % _ALIGNMENT)
    return pieces_of({**arrays, _LINE: np.frombuffer(line, np.uint8)})


# ------------------------------------------------------------------------------------------------ reading


def parsed(read: Callable[[int, int], bytes], size: int, where: str) -> dict[str, Stored]:
    """Return the entries of a shard's header by name, in the order of their bytes; read nothing else.

    Args:
        read: given a start and a count, returns that many bytes.
        size: the size of the shard in bytes.
        where: its name, for errors.

    Raises:
        CheckpointDamagedError: for an invalid header, and for arrays that overlap or leave bytes out.
    """
    length = int.from_bytes(read(0, _LENGTH_BYTES), "little") if size >= _LENGTH_BYTES else size
    end = _LENGTH_BYTES + length
    if length > LONGEST_TEXT or end > size:
        raise damaged(where, f"a header of {length} bytes in {size}")
    header = loads(read(_LENGTH_BYTES, length), where)
    try:
        entries = [(path, _stored(end, **entry)) for path, entry in header.items() if path != _METADATA]
    except (TypeError, ValueError, AttributeError) as error:
        raise damaged(where, "a header with an entry that is no array") from error
    entries.sort(key=lambda item: item[1][:2])
    for path, stored in entries:
        if stored.start != end:
            raise damaged(where, f"{path[:80]!r} from byte {stored.start} on, where byte {end} comes next")
        end = stored.stop
    if end != size:
        raise damaged(where, f"{size} bytes, of which the arrays have {end}")
    return dict(entries)


def _stored(begin: int, *, dtype: Any, shape: Any, data_offsets: Any) -> Stored:
    """Return an entry of a header, of a shard whose arrays begin at a byte."""
    start, stop = data_offsets
    if not (isinstance(dtype, str) and is_shape([start, stop], 0) and start <= stop and is_shape(shape, 0)):
        raise ValueError("no array")
    return Stored(begin + start, begin + stop, dtype, tuple(shape))


def as_array(data: Array | None, dtype: str, shape: Any, where: str) -> Array:
    """Return an array of these bytes in native byte order, not copied where that can be.

    Raises:
        CheckpointDamagedError: for None, and for another number of bytes than such an array has.
    """
    kind = dtype_of(dtype)
    if data is None or not is_shape(shape, kind.itemsize) or math.prod(shape) * kind.itemsize != data.size:
        raise damaged(where, f"no bytes of {dtype}{shown(shape)}")
    return data.view(kind).reshape(shape).astype(kind.newbyteorder("="), copy=False)


def read_shard(
    path: str, nbytes: int, checksum: str, layouts: Mapping[str, tuple[Sequence[int], str]]
) -> tuple[dict[str, Array], dict[int, Array]]:
    """Read a shard whole, once.  Arrays that are not returned take no memory.

    Args:
        path: the file.
        nbytes, checksum: its size and its checksum, as the manifest says.
        layouts: the shapes and dtypes of the arrays to return, by name.

    Returns:
        The arrays by name, and the bytes of the data of ranks, by rank.

    Raises:
        CheckpointDamagedError: for another size or checksum, an invalid header, and missing arrays.
        OSError, MemoryError: if it cannot be read.
    """
    contents: dict[str, Array] = {}
    with opened(path, MOST_BYTES, nbytes) as file:
        stored = parsed(lambda start, count: file.read(count), nbytes, path)
        ranks = {int(match[1]): match[0] for match in map(_RANKS.fullmatch, stored) if match is not None}
        file.seek(0)
        running_checksum = checksum_of(file.read(min((entry.start for entry in stored.values()), default=nbytes)))
        for name, (start, stop, _, _) in stored.items():
            is_kept, count = name in layouts or name in ranks.values(), stop - start
            data = np.empty(count if is_kept else min(count, PIECE_BYTES), np.uint8)
            for first in range(0, count, PIECE_BYTES):
                part = data[first : first + PIECE_BYTES] if is_kept else data[: count - first]
                if file.readinto(part.data) != part.size:  # type: ignore[attr-defined]
                    raise damaged(path, "a file that ends too early")
                running_checksum.update(part)
                moves_on()
            if is_kept:
                contents[name] = data
    if running_checksum.hexdigest() != checksum:
        raise damaged(path, "a file with another checksum than it was written with")
    arrays = {name: as_array(contents.get(name), dtype, shape, path) for name, (shape, dtype) in layouts.items()}
    return arrays, {rank: contents[name] for rank, name in ranks.items()}


class Own:
    """The data of a rank, in the bytes of `own_pieces`.

    Args:
        data: the bytes.
        where: the name of the file, for errors.

    Attributes:
        data, where: as given.
        line: the bytes of the values.
        values: by path; of arrays whose shape may differ between ranks, the shape.

    Raises:
        CheckpointDamagedError: for other bytes.
    """

    def __init__(self, data: Array, where: str) -> None:
        self.data = data
        self.where = where
        stored = parsed(lambda start, count: data[start : start + count].tobytes(), data.size, where)
        self._parts = {name: data[entry.start : entry.stop] for name, entry in stored.items()}
        if _LINE not in self._parts:
            raise damaged(where, "no values of a rank")
        self.line: Array = self._parts[_LINE]
        self.values: dict[str, Any] = values_in(self.line, where)

    def array(self, path: str, dtype: str, shape: tuple[int, ...] | None) -> Array:
        """Return an array in native byte order, not copied where that can be; `shape` is None where ranks may differ.

        Raises:
            CheckpointDamagedError: for another size.
        """
        return as_array(self._parts.get(path), dtype, self.values[path] if shape is None else shape, self.where)


def values_in(line: Array, where: str) -> dict[str, Any]:
    """Return the values of a rank from their bytes; CheckpointDamagedError for other bytes."""
    values: dict[str, Any] = loads(line.tobytes(), where)
    if type(values) is not dict:
        raise damaged(where, "no values of a rank")
    return values


# ------------------------------------------------------------------------------------------------ JSON text


def loads(data: bytes, where: str) -> Any:
    """Return parsed JSON; CheckpointDamagedError if it is invalid, too deep or too large."""
    if not _can_be_read(data):
        raise damaged(where, f"{len(data)} bytes of names and plain values, which is too much")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise damaged(where, f"no JSON ({str(error)[:80]})") from error


def check_can_be_read(text: bytes, where: str) -> None:
    """Raise OptionError for a JSON text that `loads` would refuse as too large."""
    if not _can_be_read(text):
        raise OptionError.at(
            where,
            found=f"{len(text)} bytes of names and plain values",
            expected="less, to be read again",
            fix="Keep long lists of numbers in arrays.",
        )


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
