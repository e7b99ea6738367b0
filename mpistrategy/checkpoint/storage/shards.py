"""Shards: files of arrays in the format safetensors, which many programs read.

Eight bytes have the length of a JSON header.  The header has the dtype, shape and offsets of each array.  The bytes of
the arrays follow.  Nothing in it is executed.  An array of a dtype that safetensors does not have is stored as bytes;
the manifest has the dtype.

What a rank has for itself, its arrays and a line of JSON, is a shard of its own within a shard: the entry `_rank N`.

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
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.checkpoint.storage.files import Folder, OpenFile, checksum_of
from mpistrategy.errors import CheckpointDamagedError, CheckpointReadError, DTypeError, OptionError

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
#: The entry with the line of JSON of a rank, in what it has for itself; and that of what a rank has for itself.
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

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.stop - self.start


def pieces_of(arrays: Mapping[str, Array], own: Mapping[int, Sequence[Any]] | None = None) -> Iterator[Any]:
    """Yield the bytes of a shard.

    Args:
        arrays: by name.
        own: of some ranks, what `own_pieces` returned.
    """
    header: dict[str, Any] = {_METADATA: {"format": "mpistrategy"}}
    start = 0

    def enter(path: str, name: str, shape: list[int], nbytes: int) -> None:
        nonlocal start
        header[path] = {"dtype": name, "shape": shape, "data_offsets": [start, start + nbytes]}
        start += nbytes

    for rank, pieces in (own or {}).items():
        nbytes = sum(memoryview(piece).nbytes for piece in pieces)
        enter(_RANK.format(rank), "U8", [nbytes], nbytes)
    ordered = sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize)
    for path, array in ordered:
        name = NAMES.get(dtype_text(array.dtype, path))
        enter(path, name or "U8", list(array.shape) if name else [array.nbytes], array.nbytes)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode(errors="surrogatepass")
    check_can_be_read(text, "Checkpoint.save")
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
    yield len(text).to_bytes(_LENGTH_BYTES, "little") + text
    for pieces in (own or {}).values():
        yield from pieces
    for _, array in ordered:
        if array.nbytes:
            little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
            yield little.reshape(-1).view(np.uint8).data


def own_pieces(arrays: Mapping[str, Array], values: Mapping[str, Any], where: str) -> list[Any]:
    """Return the bytes of what a rank has for itself: arrays, and values as JSON; their number is a multiple of 64.

    Raises:
        OptionError: for more plain values than `loads` accepts.
    """
    line = json.dumps(values, separators=(",", ":")).encode()
    check_can_be_read(line, where)
    line += b" " * (-(len(line) + sum(array.nbytes for array in arrays.values())) % _ALIGNMENT)
    return list(pieces_of({**arrays, _LINE: np.frombuffer(line, np.uint8)}))


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


# ------------------------------------------------------------------------------------------------ open shards


class Entry(NamedTuple):
    """An array in a shard.

    Attributes:
        path: of the item.
        shape: its shape.
        dtype: its dtype.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str


def part_name(path: str, start: int) -> str:
    """Return the name of a part of an array in a shard.  No path begins with an underscore."""
    return f"_from {start}/{path}"


def shard_name(number: int) -> str:
    """Return the name of a shard."""
    return f"shard-{number:05}.safetensors"


class OpenShard:
    """An open shard with the arrays that the manifest names; its checksum is compared later.

    Args:
        file: the open file.
        checksum: of all its bytes, as the manifest says.
        entries: the arrays in it by name, as the manifest says.

    Attributes:
        stored: the entries in the header.
        ranks: the names of what ranks have for themselves, by rank.

    Raises:
        CheckpointDamagedError: if one is missing or has another size.
    """

    def __init__(self, file: OpenFile, checksum: str, entries: Mapping[str, Entry]) -> None:
        self.file = file
        self._head = bytearray()
        self.stored: dict[str, Stored] = parsed(self._read_head, file.size, file.path)
        matches = map(_RANKS.fullmatch, self.stored)
        self.ranks: dict[int, str] = {int(match[1]): match[0] for match in matches if match is not None}
        self._checksum = checksum
        self._entries = entries
        for name, entry in entries.items():
            nbytes = byte_count(entry.shape, dtype_of(entry.dtype))
            if name not in self.stored or self.stored[name].nbytes != nbytes:
                raise _damaged(file.path, f"no {nbytes} bytes for {name[:80]!r}")

    def check(self) -> None:
        """Read all bytes; raise CheckpointDamagedError if the checksum is wrong."""
        self.read(())

    def read(self, wanted: Iterable[str]) -> dict[str, Array]:
        """Return arrays in native byte order, by name, and do `check`; other arrays take no memory.

        Raises:
            CheckpointDamagedError: as `check`.
            CheckpointReadError: if there is not enough memory.
        """
        places = sorted((self.stored[name].start, name) for name in wanted)
        arrays = {name: self._room_for(name) for _, name in places}
        buffers = [(start, arrays[name].reshape(-1).view(np.uint8)) for start, name in places if arrays[name].nbytes]
        checksum, begin, place = checksum_of(self._head), len(self._head), 0
        for piece in self.file.pieces(begin, self.file.size):
            checksum.update(piece)
            end, data = begin + len(piece), np.frombuffer(piece, np.uint8)
            while place < len(buffers) and buffers[place][0] < end:
                start, buffer = buffers[place]
                first, last = max(start, begin), min(start + buffer.size, end)
                buffer[first - start : last - start] = data[first - begin : last - begin]
                if start + buffer.size > end:
                    break  # the rest is in the next piece
                place += 1
            begin = end
        if checksum.hexdigest() != self._checksum:
            raise _damaged(self.file.path, "a file with another checksum than it was written with")
        return {name: array.astype(array.dtype.newbyteorder("="), copy=False) for name, array in arrays.items()}

    def _read_head(self, start: int, count: int) -> bytes:
        """Read the header, whose bytes are not read again."""
        data = self.file.read(start, count)
        self._head += data
        return data

    def _room_for(self, name: str) -> Array:
        _, shape, dtype = self._entries.get(name) or Entry("", (self.stored[name].nbytes,), "|u1")
        try:
            return np.empty(shape, dtype_of(dtype))
        except MemoryError as error:
            raise CheckpointReadError.at(
                "a checkpoint", found=f"no memory for {name[:80]!r}, {dtype}{list(shape)}", expected="enough memory"
            ) from error


@contextmanager
def open_shard(
    folder: Folder, number: int, nbytes: int, checksum: str, entries: Mapping[str, Entry]
) -> Iterator[OpenShard]:
    """Open a shard of `nbytes`; the rest as of `OpenShard`.

    Raises:
        CheckpointDamagedError: if the file has another size or other arrays than the manifest says.
    """
    name = shard_name(number)
    with ExitStack() as stack:
        try:
            file = stack.enter_context(folder.file(name, nbytes, MOST_BYTES))
        except FileNotFoundError as error:
            raise _damaged(f"{folder.path}/{name}", "a missing file") from error
        yield OpenShard(file, checksum, entries)


# ------------------------------------------------------------------------------------------------ of one rank


class Own:
    """What a rank had for itself, in the bytes of `own_pieces`.

    Args:
        data: the bytes.
        where: the name of the file, for errors.

    Attributes:
        line: the bytes of the values.
        values: by path; of arrays whose shape may differ between ranks, the shape.

    Raises:
        CheckpointDamagedError: for other bytes.
    """

    def __init__(self, data: Array, where: str) -> None:
        self._data = data
        self.where = where
        self._stored = parsed(lambda start, count: data[start : start + count].tobytes(), data.size, where)
        if _LINE not in self._stored:
            raise _damaged(where, "no values of a rank")
        self.line: Array = data[self._stored[_LINE].start : self._stored[_LINE].stop]
        self.values: dict[str, Any] = values_in(self.line, where)

    def array(self, path: str, dtype: str, shape: tuple[int, ...] | None) -> Array:
        """Return an array in native byte order, not copied where that can be; `shape` is None where ranks may differ.

        Raises:
            CheckpointDamagedError: for another size.
        """
        kind, found = dtype_of(dtype), self.values[path] if shape is None else shape
        stored = self._stored.get(path)
        if stored is None or not is_shape(found, kind) or byte_count(found, kind) != stored.nbytes:
            raise _damaged(self.where, f"no {dtype}{shown(found)} for {path[:80]!r} of a rank")
        flat = self._data[stored.start : stored.stop].view(kind) if stored.nbytes else np.empty(0, kind)
        return flat.reshape(found).astype(kind.newbyteorder("="), copy=False)


def values_in(line: Array, where: str) -> dict[str, Any]:
    """Return the values of a rank from their bytes; CheckpointDamagedError for other bytes."""
    values = loads(line.tobytes(), where)
    if not isinstance(values, dict):
        raise _damaged(where, "values of a rank that are no JSON object")
    return values


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
    if found is None or dtype_text(found, "") != text or not found.itemsize:
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


def byte_count(shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    """Return how many bytes an array has."""
    return math.prod(shape) * dtype.itemsize


def is_shape(shape: Any, dtype: np.dtype[Any]) -> bool:
    """Return whether it is the shape of an array that NumPy can make, and is not too large.

    An axis of length 0 does not lift the limit for the others.
    """
    if not (isinstance(shape, (list, tuple)) and len(shape) <= MOST_AXES):
        return False
    if not all(type(count) is int and 0 <= count <= MOST_BYTES for count in shape):
        return False
    elements = math.prod(max(count, 1) for count in shape)
    return byte_count(tuple(shape), dtype) <= MOST_BYTES and elements * dtype.itemsize <= sys.maxsize
