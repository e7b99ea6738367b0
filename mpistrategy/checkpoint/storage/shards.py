"""Shards: the arrays that one rank has written, in the layout of safetensors, which many programs read.

Eight bytes tell the length of a JSON header, the header tells dtype, shape and place of each array, then the bytes of
the arrays follow, one array's after the other's.  Nothing in it is ever executed.  A dtype that safetensors has no word
for is kept as bytes, and the manifest says what they are.

What is read may be made up to harm: sizes are checked before memory is taken for them.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.checkpoint.storage.plain_values import dtype_text
from mpistrategy.errors import CheckpointDamagedError, OptionError

#: What a dtype is called in safetensors.
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
#: Where the arrays begin: at a multiple of this, and those of the widest dtypes first, so that each is aligned.
_ALIGNMENT = 64
#: The longest text in JSON, in bytes, and how many lists and objects, and commas, it may have: a header, or a manifest.
LONGEST_TEXT = 2**26
_MOST_HOLDERS, _MOST_COMMAS = 2**21, 2**22
#: About how many bytes an object, a list, and what stands between commas take once they are read; and how many a text
#: may take: so many, and so many times its length.
_OBJECT_BYTES, _LIST_BYTES, _VALUE_BYTES = 256, 88, 64
_ROOM_BYTES, _ROOM_TIMES = 2**26, 8
#: The largest array, in bytes, and the number of axes that NumPy's may have.
MOST_BYTES, MOST_AXES = 2**46, 32 if np.__version__.startswith("1.") else 64
_METADATA = "__metadata__"


class Stored(NamedTuple):
    """Where an array lies in a shard, and what the header says that it is.

    Attributes:
        start, stop: its bytes, counted from the beginning of the file.
        name: of its dtype, as safetensors calls it.
        shape: its shape.
    """

    start: int
    stop: int
    name: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
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
    """Return where the arrays of a shard lie, by their names.

    Args:
        read: returns so many bytes from there on.
        size: how many bytes the shard has.
        where: its name, for errors.

    Raises:
        CheckpointDamagedError: for what is no shard; nothing beyond its header is read.
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


def loads(data: bytes, where: str) -> Any:
    """Return parsed JSON; CheckpointDamagedError if it is invalid, too deep or too large, or if a key stands twice."""
    trouble = _too_much(data)
    if trouble:
        raise _damaged(where, trouble)
    try:
        return json.loads(data.decode(errors="surrogatepass"), object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise _damaged(where, f"no JSON ({str(error)[:80]})") from error


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


def byte_count(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Return how many bytes an array has."""
    return math.prod(shape) * dtype.itemsize


def is_possible(shape: Sequence[int], dtype: np.dtype[Any]) -> bool:
    """Return whether NumPy can have such an array: even one of no elements must not have too many in one direction."""
    elements = math.prod(max(count, 1) for count in shape)
    return len(shape) <= MOST_AXES and elements * max(dtype.itemsize, 1) <= sys.maxsize


def _damaged(where: str, found: str) -> CheckpointDamagedError:
    return CheckpointDamagedError.at("a checkpoint", found=f"{found} in {where!r}", expected="a file as it was written")
