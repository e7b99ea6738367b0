"""The manifest: the contents of a checkpoint and the checksums of its files.  Written last, when all else is complete.

It is one JSON object on two lines.  The first line has the format and the checksum of the second line, which has the
rest.  Everything is checked before it is used.  Names of files are made from numbers, so that a forged manifest cannot
name other files.

It has nothing of single ranks but the number of each rank's node, in `layout`: what each rank has for itself is in the
shards.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

from mpistrategy.checkpoint.storage.files import Folder, checksum_of
from mpistrategy.checkpoint.storage.shards import (
    LONGEST_TEXT,
    MOST_BYTES,
    Entry,
    dtype_of,
    is_numeric,
    is_shape,
    loads,
    part_name,
)
from mpistrategy.errors import CheckpointDamagedError, CheckpointError
from mpistrategy.objects.text import printable

NAME = "manifest.json"
FORMAT, VERSION = "mpistrategy checkpoint", 1
#: How copies are saved: one for all ranks; one for each rank; rows of a global array, some on each rank; one for each
#: rank, combined on another number of ranks.
ONE, OWN, ROWS = "one", "own", "rows"
COMBINED = ("SUM", "MEAN", "ONLY_FIRST_REPLICA")
MOST_RANKS = 1_000_000
#: So many bytes, at least, a rank has for itself where ranks have anything.
_LEAST_OF_A_RANK = 64
_LONGEST_VERSION = 100
_HEAD = re.compile(rb'\{"format":"mpistrategy checkpoint","version":([0-9]{1,9}),"checksum":"([0-9a-f]{32})",\n')
_LONGEST_HEAD = 200
_BODY, _END = b'"body":', b"}\n"


@dataclass(frozen=True)
class Shard:
    """One file of arrays.

    Attributes:
        nbytes: its size in bytes.
        checksum: of all its bytes.
        writer: the rank that has written it.
    """

    nbytes: int
    checksum: str
    writer: int = 0


@dataclass(frozen=True)
class Item:
    """One item of a checkpoint: an array, a value, or an object that only holds other items.

    Attributes:
        kind: the name of its `mpistrategy.checkpoint.state.Kind`.
        copies: `ONE`, `OWN`, `ROWS` or one of `COMBINED`; "" for an object that only holds others.
        dtype: of an array.
        shape: of an array; where each rank has its own, that of rank 0: the first axis of rows, and all of `OWN`,
            may differ between the ranks.
        shards: the shards that have the only copy of an array: the next elements each, equally many.
        more: further data of its kind, equal on all ranks.
        values: of a value that was saved once: this one.
    """

    kind: str
    copies: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    shards: tuple[int, ...] = ()
    more: Any = None
    values: tuple[Any, ...] = ()

    @property
    def is_array(self) -> bool:
        """Whether it is an array, in the shards."""
        return self.dtype != ""

    @property
    def is_of_each_rank(self) -> bool:
        """Whether each rank has its own array or value."""
        return self.copies not in ("", ONE)

    @property
    def has_lines(self) -> bool:
        """Whether each rank has a value, or an array whose shape may differ from those of the others."""
        return self.copies in (OWN, ROWS)

    @property
    def elements(self) -> int:
        """How many elements an array of `shape` has."""
        return math.prod(self.shape)

    def parts(self, path: str) -> list[tuple[int, str, int, int]]:
        """Return the parts of the only copy: the shard, the name there, the first element, and how many."""
        if len(self.shards) == 1:
            return [(self.shards[0], path, 0, self.elements)]
        each = -(-self.elements // len(self.shards))
        starts = [min(number * each, self.elements) for number in range(len(self.shards) + 1)]
        return [
            (shard, part_name(path, start), start, stop - start)
            for shard, start, stop in zip(self.shards, starts[:-1], starts[1:], strict=True)
        ]

    def packed(self) -> list[Any]:
        """Return it as JSON."""
        return [self.kind, self.copies, self.dtype, self.shape, self.shards, self.more, self.values]


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint.

    Attributes:
        ranks: how many ranks saved it.
        shards: its files.
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

    @property
    def of_each_rank(self) -> dict[str, Item]:
        """The arrays and values of which each rank has its own."""
        return {path: item for path, item in self.items.items() if item.is_of_each_rank}

    def entries_of(self, number: int) -> dict[str, Entry]:
        """Return the arrays that were saved once, and parts of them, in a shard, by the name that they have there."""
        found = {}
        for path, item in self.items.items():
            for shard, name, _, count in item.parts(path) if item.shards else ():
                if shard == number:
                    found[name] = Entry(path, item.shape if len(item.shards) == 1 else (count,), item.dtype)
        return found

    def text(self) -> bytes:
        """Return the bytes of the file."""
        body = {
            "ranks": self.ranks,
            "shards": [[shard.nbytes, shard.checksum, shard.writer] for shard in self.shards],
            "names": self.names,
            "items": {path: item.packed() for path, item in self.items.items()},
            "layout": self.layout,
            "written_by": self.written_by,
        }
        inner = _BODY + json.dumps(body, separators=(",", ":")).encode() + _END
        head = {"format": FORMAT, "version": VERSION, "checksum": checksum_of(inner).hexdigest()}
        return json.dumps(head, separators=(",", ":")).encode()[:-1] + b",\n" + inner


def is_checkpoint(folder: Folder) -> bool:
    """Return whether a folder has a manifest of this package's, of any version, and no files but a checkpoint's."""
    if folder.foreign() or folder.kind_of(NAME) != "file":
        return False
    try:
        with folder.file(NAME, None, LONGEST_TEXT) as file:
            return _HEAD.match(file.read(0, min(file.size, _LONGEST_HEAD))) is not None
    except (CheckpointError, OSError):
        return False


def read_text(folder: Folder) -> bytes:
    """Return the bytes of the manifest in a folder.

    Raises:
        CheckpointDamagedError: if there is no such file.
    """
    try:
        return folder.read(NAME, LONGEST_TEXT)
    except FileNotFoundError as error:
        raise bad(folder.path, f"no {NAME}: it was not finished, or is not a checkpoint") from error


def parse(data: bytes, where: str) -> Manifest:
    """Return a manifest from its bytes.

    Raises:
        CheckpointDamagedError: for bytes that `Manifest.text` does not return.
    """
    head = _HEAD.match(data)
    if head is None:
        raise bad(where, "a manifest of another format, or a damaged one")
    version = int(head[1])
    if version != VERSION:
        raise CheckpointDamagedError.at(
            "a checkpoint",
            found=f"format version {version} in {where!r}",
            expected=f"version {VERSION}",
            fix="Read it with the version of mpistrategy that wrote it.",
        )
    inner = data[head.end() :]
    if checksum_of(inner).hexdigest().encode() != head[2] or not (inner.startswith(_BODY) and inner.endswith(_END)):
        raise bad(where, "a manifest with another checksum than it was written with")
    body = loads(inner[len(_BODY) : -len(_END)], where)
    try:
        return _checked(body)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        if isinstance(error, CheckpointDamagedError):
            raise
        raise bad(where, f"a manifest that contradicts itself ({type(error).__name__}: {str(error)[:80]})") from error


def _checked(body: Any) -> Manifest:
    ranks, layout, names, written_by = body["ranks"], body["layout"], body["names"], body["written_by"]
    _require(_is_count(ranks) and 1 <= ranks <= MOST_RANKS, "ranks")
    shards = tuple(Shard(*packed) for packed in body["shards"])
    _require(len(shards) >= 1 and all(_is_count(each.nbytes) and each.nbytes <= MOST_BYTES for each in shards), "sizes")
    _require(all(re.fullmatch(r"[0-9a-f]{32}", each.checksum) for each in shards), "checksums")
    _require(all(_is_count(each.writer) and each.writer < ranks for each in shards), "writers")
    _require(isinstance(layout, dict) and all(isinstance(name, str) for name in names), "names")
    items = {path: _item(len(shards), *packed) for path, packed in body["items"].items()}
    of_each = any(item.is_of_each_rank for item in items.values())
    # A small file cannot speak of many ranks: what each has for itself takes memory.
    _require(not of_each or ranks * _LEAST_OF_A_RANK <= sum(each.nbytes for each in shards), "ranks")
    _require(all(name in items for name in names) and len(set(names)) == len(names), "names")
    _require(not any(path.startswith("_") for path, item in items.items() if item.is_array), "paths")
    _require(isinstance(written_by, str) and len(written_by) <= _LONGEST_VERSION, "written_by")
    return Manifest(ranks, shards, items, tuple(names), layout, printable(written_by, ""))


def _item(count: int, kind: Any, copies: Any, dtype: Any, shape: Any, shards: Any, more: Any, values: Any) -> Item:
    """Return the item of which this is `Item.packed`, of a checkpoint of so many shards."""
    _require(isinstance(kind, str) and isinstance(dtype, str) and copies in ("", ONE, OWN, ROWS, *COMBINED), "copies")
    _require(all(type(each) is list for each in (shape, shards, values)) and len(values) <= 1, "lists")
    _require((kind == ROWS) == (copies == ROWS), "rows")
    if dtype:
        elements = dtype_of(dtype)
        _require(is_shape(shape, elements) and copies != "" and not values, "sizes")
        _require(copies not in COMBINED or is_numeric(elements), "copies")
        _require(all(_is_count(number) and number < count for number in shards), "shards")
        _require(len(set(shards)) == len(shards), "shards")
        _require(bool(shards) == (copies == ONE) and len(shards) <= max(1, math.prod(shape)), "shards")
        _require(copies != ROWS or bool(shape), "rows")
    else:
        _require(copies in ("", ONE, OWN) and len(values) == int(copies == ONE) and not shards, "values")
    return Item(kind, copies, dtype, tuple(shape), tuple(shards), more, tuple(values))


def _is_count(number: Any) -> bool:
    return type(number) is int and number >= 0


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def bad(where: str, found: str) -> CheckpointDamagedError:
    """Return the error for a damaged checkpoint."""
    return CheckpointDamagedError.at("a checkpoint", found=f"{found}, at {where!r}", expected="a whole checkpoint")
