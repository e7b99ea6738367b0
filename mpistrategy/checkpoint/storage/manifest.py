"""The manifest: what a checkpoint holds and the checksums of its files; written last, so that it says "whole".

It is one JSON object on two lines.  The first says what it is and holds the checksum of the second, which holds the
rest: every bit counts.  What is read is checked before anything is done with it; names of files come from numbers
alone, so that no manifest leads elsewhere.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, field
from typing import Any

from mpistrategy.checkpoint.storage.files import Folder, checksum_of
from mpistrategy.checkpoint.storage.plain_values import (
    LONGEST_TEXT,
    MOST_AXES,
    MOST_BYTES,
    byte_count,
    dtype_of,
    is_numeric,
    is_possible,
    loads,
)
from mpistrategy.errors import CheckpointDamagedError
from mpistrategy.own_files import printable

NAME = "manifest.json"
FORMAT, VERSION = "mpistrategy checkpoint", 1
#: How the copies of an array were kept: once for all ranks; each rank's own; and each rank's own, to be combined.
ONE, OWN = "one", "own"
COMBINED = ("SUM", "MEAN", "ONLY_FIRST_REPLICA")
MOST_RANKS = 10_000_000
_LONGEST_VERSION = 100
_HEAD = re.compile(rb'\{"format":"mpistrategy checkpoint","version":([0-9]{1,9}),"checksum":"([0-9a-f]{32})",\n')
_BODY, _END = b'"body":', b"}\n"


@dataclass(frozen=True)
class Shard:
    """A file of a checkpoint: how many bytes it has, and their checksum."""

    nbytes: int
    checksum: str


@dataclass(frozen=True)
class Item:
    """One thing that a checkpoint holds, an array or a value.

    Attributes:
        kind: "variable", "array", "scalar" (arrays); "plain", "rng", "streams", "iterator" (values); "dict", "list",
            "tuple", "object", "variables", "optimizer", "accumulator" (which only hold others).
        copies: `ONE`, `OWN` or one of `COMBINED`; "" for what only holds others.
        dtype, shape: of an array.
        shard: which shard has an array that is there once.
        more: what else there is to say of it, equal on all ranks.
        values: a value, of which there is one, or one of each rank.
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
    """What a checkpoint holds.

    Attributes:
        ranks: how many ranks have written it; each one shard.
        shards: their files, in rank order.
        items: what it holds, by path.
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
        """The arrays that all shards have, and those that only one has."""
        everywhere: dict[str, Item] = {}
        only_there: dict[int, dict[str, Item]] = {}
        for path, item in self.items.items():
            if item.is_array:
                into = everywhere if item.copies != ONE else only_there.setdefault(item.shard, {})
                into[path] = item
        return everywhere, only_there

    def text(self) -> bytes:
        """Return what is written to the file."""
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
        CheckpointDamagedError: when there is none, or what is there is no file.
    """
    try:
        return folder.read(NAME, LONGEST_TEXT)
    except FileNotFoundError as error:
        raise bad(folder.path, f"no {NAME}: it was not finished, or is no checkpoint") from error


def parse(data: bytes, where: str) -> Manifest:
    """Return what the bytes of a manifest say.

    Raises:
        CheckpointDamagedError: for anything else than what `Manifest.text` returns.
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
    """Return what to raise over a checkpoint that is not whole."""
    return CheckpointDamagedError.at("a checkpoint", found=f"{found}, at {where!r}", expected="a whole checkpoint")
