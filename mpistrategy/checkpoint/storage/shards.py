"""Shards: the arrays that one rank writes, in the format safetensors, which many programs read.

Eight bytes have the length of a JSON header.  The header has the dtype, shape and offsets of each array.  The bytes of
the arrays follow.  Nothing in it is executed.  An array of a dtype that safetensors does not have is stored as bytes;
the manifest has the dtype.

A file may be forged: sizes are checked before memory is allocated for them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.checkpoint.storage.files import Folder, OpenFile, checksum_of
from mpistrategy.checkpoint.storage.manifest import Item, Manifest, bad, shard_name
from mpistrategy.checkpoint.storage.plain_values import (
    LONGEST_TEXT,
    MOST_AXES,
    MOST_BYTES,
    byte_count,
    check_can_be_read,
    dtype_of,
    dtype_text,
    loads,
    shown,
)
from mpistrategy.errors import CheckpointDamagedError, CheckpointReadError

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


# ------------------------------------------------------------------------------------------------ reading a checkpoint


class OpenShard:
    """An open shard with the arrays that the manifest names; its checksum is compared later.

    Args:
        file: the open file.
        checksum: of all its bytes, as the manifest says.
        items: the arrays in it, as the manifest says.

    Attributes:
        items: as given.
        stored: their entries in the header.

    Raises:
        CheckpointDamagedError: if one is missing or has another size.
    """

    def __init__(self, file: OpenFile, checksum: str, items: Mapping[str, Item]) -> None:
        self.file = file
        self.stored = parsed(file.read, file.size, file.path)
        self._checksum = checksum
        self.items = items
        for path, item in items.items():
            nbytes = byte_count(item.shape, dtype_of(item.dtype))
            if path not in self.stored or self.stored[path].nbytes != nbytes:
                raise bad(file.path, f"no {nbytes} bytes for {path[:80]!r}")

    def check(self) -> None:
        """Read all bytes; raise CheckpointDamagedError if the checksum is wrong."""
        self.read(())

    def read(self, wanted: Iterable[str]) -> dict[str, Array]:
        """Return arrays in native byte order, and do `check`; other arrays take no memory.

        Raises:
            CheckpointDamagedError: as `check`.
            CheckpointReadError: if there is not enough memory.
        """
        places = sorted((self.stored[path].start, path) for path in wanted)
        arrays = {path: self._room_for(path) for _, path in places}
        buffers = [(start, arrays[path].reshape(-1).view(np.uint8)) for start, path in places if arrays[path].nbytes]
        checksum, begin, place = checksum_of(), 0, 0
        for piece in self.file.pieces(0, self.file.size):
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
            raise bad(self.file.path, "a file with another checksum than it was written with")
        return {path: array.astype(array.dtype.newbyteorder("="), copy=False) for path, array in arrays.items()}

    def _room_for(self, path: str) -> Array:
        item = self.items[path]
        try:
            return np.empty(item.shape, dtype_of(item.dtype))
        except MemoryError as error:
            raise CheckpointReadError.at(
                "a checkpoint",
                found=f"no memory for {path[:80]!r}, {item.dtype}{list(item.shape)}",
                expected="enough memory",
            ) from error


@contextmanager
def open_shard(folder: Folder, manifest: Manifest, rank: int) -> Iterator[OpenShard]:
    """Open one shard.

    Raises:
        CheckpointDamagedError: if the file has another size or other arrays than the manifest says.
    """
    name, shard = shard_name(rank), manifest.shards[rank]
    with ExitStack() as stack:
        try:
            file = stack.enter_context(folder.file(name, shard.nbytes, MOST_BYTES))
        except FileNotFoundError as error:
            raise bad(f"{folder.path}/{name}", "a missing file") from error
        yield OpenShard(file, shard.checksum, manifest.arrays_in(rank))
