"""The manifest: the contents of a checkpoint and the checksums of its files.  Written last, when all else is complete.

It is one JSON object on two lines.  The first line has the format and the checksum of the second line, which has the
rest.  Everything is checked before it is used.  Names of files are made from numbers, so that a forged manifest cannot
name other files.

Plain values are restored exactly: ints of any size, all bits of floats, tuples as tuples.  A type that JSON does not
have is an object with one key, which names the type; a dict is a list of pairs, so that its keys cannot be mistaken for
such a name.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.checkpoint.storage.files import Folder, OpenFile, checksum_of
from mpistrategy.checkpoint.storage.shards import (
    LONGEST_TEXT,
    MOST_AXES,
    MOST_BYTES,
    Stored,
    byte_count,
    dtype_of,
    is_numeric,
    is_possible,
    loads,
    parsed,
)
from mpistrategy.errors import CheckpointDamagedError, CheckpointReadError
from mpistrategy.own_files import printable

#: Returned for a value that is not plain; None is plain.
NOT_PLAIN = object()
#: Stands for an object that is not there; None is a value.
ABSENT = object()
#: The deepest nest of plain values.
_DEEPEST = 100
NAME = "manifest.json"
FORMAT, VERSION = "mpistrategy checkpoint", 1
#: How copies are saved: one for all ranks; one for each rank; one for each rank, combined on another number of ranks.
ONE, OWN = "one", "own"
COMBINED = ("SUM", "MEAN", "ONLY_FIRST_REPLICA")
MOST_RANKS = 10_000_000
_LONGEST_VERSION = 100
_HEAD = re.compile(rb'\{"format":"mpistrategy checkpoint","version":([0-9]{1,9}),"checksum":"([0-9a-f]{32})",\n')
_BODY, _END = b'"body":', b"}\n"


@dataclass(frozen=True)
class Shard:
    """The file of one rank: its size in bytes and its checksum."""

    nbytes: int
    checksum: str


@dataclass(frozen=True)
class Item:
    """One item of a checkpoint: an array, a value, or an object that only holds other items.

    Attributes:
        kind: the name of its `mpistrategy.checkpoint.state.Kind`.
        copies: `ONE`, `OWN` or one of `COMBINED`; "" for an object that only holds others.
        dtype, shape: of an array.
        shard: the shard that has the only copy of an array.
        more: further data of its kind, equal on all ranks.
        values: of a value: one, or one for each rank.
    """

    kind: str
    copies: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    shard: int = 0
    more: Any = None
    values: tuple[Any, ...] = ()

    @property
    def is_array(self) -> bool:
        """Whether it is an array, in the shards."""
        return self.dtype != ""

    def packed(self) -> list[Any]:
        """Return it as JSON."""
        return [self.kind, self.copies, self.dtype, list(self.shape), self.shard, self.more, list(self.values)]


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint.

    Attributes:
        ranks: how many ranks saved it, one shard each.
        shards: their files, in rank order.
        items: the items, by path.
        names: the names of the objects.
        layout: `Strategy.layout()` of the job that wrote it.
        written_by: the version of this package.
    """

    ranks: int
    shards: tuple[Shard, ...]
    items: dict[str, Item]
    names: tuple[str, ...]
    layout: dict[str, Any] = field(default_factory=dict)
    written_by: str = ""

    def arrays_in(self, shard: int) -> dict[str, Item]:
        """Return the items that are arrays in a shard."""
        everywhere, only_there = self._arrays
        return everywhere | only_there.get(shard, {})

    @functools.cached_property
    def _arrays(self) -> tuple[dict[str, Item], dict[int, dict[str, Item]]]:
        """The arrays in all shards, and those in one shard only."""
        everywhere: dict[str, Item] = {}
        only_there: dict[int, dict[str, Item]] = {}
        for path, item in self.items.items():
            if item.is_array:
                into = everywhere if item.copies != ONE else only_there.setdefault(item.shard, {})
                into[path] = item
        return everywhere, only_there

    def text(self) -> bytes:
        """Return the bytes of the file."""
        body = {
            "ranks": self.ranks,
            "shards": [[shard.nbytes, shard.checksum] for shard in self.shards],
            "names": list(self.names),
            "items": {path: item.packed() for path, item in self.items.items()},
            "layout": self.layout,
            "written_by": self.written_by,
        }
        inner = _BODY + json.dumps(body, separators=(",", ":")).encode() + _END
        head = {"format": FORMAT, "version": VERSION, "checksum": checksum_of(inner).hexdigest()}
        return json.dumps(head, separators=(",", ":")).encode()[:-1] + b",\n" + inner


def shard_name(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"shard-{rank:05}.safetensors"


def read_text(folder: Folder) -> bytes:
    """Return the bytes of the manifest in a folder.

    Raises:
        CheckpointDamagedError: if there is no such file.
    """
    try:
        return folder.read(NAME, LONGEST_TEXT)
    except FileNotFoundError as error:
        raise bad(folder.path, f"no {NAME}: it was not finished, or is no checkpoint") from error


def parse(data: bytes, where: str) -> Manifest:
    """Return a manifest from its bytes.

    Raises:
        CheckpointDamagedError: for bytes that `Manifest.text` does not return.
    """
    head = _HEAD.match(data)
    if head is None:
        raise bad(where, "a manifest of another format, or a damaged one")
    if int(head[1]) != VERSION:
        raise CheckpointDamagedError.at(
            "a checkpoint",
            found=f"format version {int(head[1])} in {where!r}",
            expected=f"version {VERSION}",
            fix="Read it with the version of mpistrategy that wrote it, or a later one.",
        )
    inner = data[head.end() :]
    if checksum_of(inner).hexdigest().encode() != head[2] or not (inner.startswith(_BODY) and inner.endswith(_END)):
        raise bad(where, "a manifest with another checksum than it was written with")
    body = loads(inner[len(_BODY) : -len(_END)], where)
    try:
        return _checked(body, where)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        if isinstance(error, CheckpointDamagedError):
            raise
        raise bad(where, f"a manifest that contradicts itself ({type(error).__name__}: {str(error)[:80]})") from error


def _checked(body: Any, where: str) -> Manifest:
    ranks, layout, names = body["ranks"], body["layout"], body["names"]
    _require(_is_count(ranks) and 1 <= ranks <= MOST_RANKS, "ranks")
    shards = tuple(Shard(nbytes, checksum) for nbytes, checksum in body["shards"])
    _require(len(shards) == ranks and all(_is_count(s.nbytes) and s.nbytes <= MOST_BYTES for s in shards), "shards")
    _require(all(re.fullmatch(r"[0-9a-f]{32}", s.checksum) for s in shards), "checksums")
    _require(isinstance(layout, dict) and all(isinstance(name, str) for name in names), "names")
    items = {path: _item(ranks, *packed) for path, packed in body["items"].items()}
    _require(all(name in items for name in names) and len(set(names)) == len(names), "names")
    written_by = body["written_by"]
    _require(isinstance(written_by, str) and len(written_by) <= _LONGEST_VERSION, "written_by")
    return Manifest(ranks, shards, items, tuple(names), layout, printable(written_by, ""))


def _item(
    ranks: int, kind: Any, copies: Any, dtype: Any, shape: list[Any], shard: Any, more: Any, values: list[Any]
) -> Item:
    _require(isinstance(kind, str) and isinstance(dtype, str) and copies in ("", ONE, OWN, *COMBINED), "copies")
    _require(type(shape) is list and type(values) is list and len(shape) <= MOST_AXES, "lists")
    _require(all(_is_count(count) and count <= MOST_BYTES for count in shape), "shapes")
    _require(_is_count(shard) and shard < ranks and len(values) in (0, 1, ranks), "numbers")
    if dtype:
        elements = dtype_of(dtype)
        _require(byte_count(tuple(shape), elements) <= MOST_BYTES and is_possible(shape, elements), "sizes")
        _require(copies != "", "copies")
        _require(copies not in COMBINED or is_numeric(elements), "copies")
    elif copies:
        _require(len(values) == (1 if copies == ONE else ranks), "values")
    return Item(kind, copies, dtype, tuple(shape), shard, more, tuple(values))


def _is_count(number: Any) -> bool:
    return type(number) is int and number >= 0


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def bad(where: str, found: str) -> CheckpointDamagedError:
    """Return the error for a damaged checkpoint."""
    return CheckpointDamagedError.at("a checkpoint", found=f"{found}, at {where!r}", expected="a whole checkpoint")


# ------------------------------------------------------------------------------------------------ plain values


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


def below(path: str, key: Any) -> str:
    """Return the path of the element `key` of the object at `path`."""
    return f"{path}/{str(key).replace('~', '~0').replace('/', '~1')}"


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
        self.stored: dict[str, Stored] = parsed(file.read, file.size, file.path)
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
