"""The manifest: the contents of a checkpoint and the checksums of its files.  Written last, when all else is complete.

It is one JSON object on two lines.  The first line has the format and the checksum of the second line, which has the
rest.  Everything is checked before it is used.  Names of files are made from numbers, so that a forged manifest cannot
name other files.

Of each rank it has the number of its node, in `layout`, and the shapes of arrays whose shapes differ between ranks.
What each rank has for itself is in the shards: of arrays of one shape, a row for each rank; of arrays whose shapes
differ, and of rows of a global array, the elements, rank after rank; of plain values, a line of JSON for each rank.  A
large array that was saved once may have parts in several shards.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.checkpoint.storage.files import Folder, checksum_of
from mpistrategy.checkpoint.storage.shards import (
    LEAST_LINE,
    LONGEST_TEXT,
    MOST_AXES,
    MOST_BYTES,
    Entry,
    byte_count,
    dtype_of,
    is_numeric,
    is_possible,
    loads,
    part_name,
)
from mpistrategy.errors import CheckpointDamagedError, CheckpointError
from mpistrategy.objects.text import printable

NAME = "manifest.json"
FORMAT, VERSION = "mpistrategy checkpoint", 3
#: How copies are saved: one for all ranks; one for each rank; rows of a global array, some on each rank; one for each
#: rank, combined on another number of ranks.
ONE, OWN, ROWS = "one", "own", "rows"
COMBINED = ("SUM", "MEAN", "ONLY_FIRST_REPLICA")
MOST_RANKS = 1_000_000
_LONGEST_VERSION = 100
_HEAD = re.compile(rb'\{"format":"mpistrategy checkpoint","version":([0-9]{1,9}),"checksum":"([0-9a-f]{32})",\n')
_LONGEST_HEAD = 200
_BODY, _END = b'"body":', b"}\n"


class Run(NamedTuple):
    """Ranks at equal distances: `first`, ``first + step``, and so on."""

    first: int
    length: int
    step: int


@dataclass(frozen=True)
class Shard:
    """One file of arrays.

    Attributes:
        nbytes: its size in bytes.
        checksum: of all its bytes.
        runs: the ranks of which it has rows and lines, in ascending order.
    """

    nbytes: int
    checksum: str
    runs: tuple[Run, ...] = ()

    @property
    def members(self) -> int:
        """Of how many ranks it has rows and lines."""
        return sum(run.length for run in self.runs)


@dataclass(frozen=True)
class Item:
    """One item of a checkpoint: an array, a value, or an object that only holds other items.

    Attributes:
        kind: the name of its `mpistrategy.checkpoint.state.Kind`.
        copies: `ONE`, `OWN` or one of `COMBINED`; "" for an object that only holds others.
        dtype: of an array.
        shape: of an array; of rows, that of the global array.
        shard: the shard that has the only copy of an array, or its first part.
        more: further data of its kind, equal on all ranks.
        values: of a value that was saved once: this one.
        parts: how many elements of the only copy are in `shard` and in those after it; () for a whole one in `shard`.
        shapes: the shape of each rank's array; () where all have `shape`.
    """

    kind: str
    copies: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    shard: int = 0
    more: Any = None
    values: tuple[Any, ...] = ()
    parts: tuple[int, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def is_array(self) -> bool:
        """Whether it is an array, in the shards."""
        return self.dtype != ""

    @property
    def is_of_each_rank(self) -> bool:
        """Whether it is an array of which each rank has its own."""
        return self.is_array and self.copies != ONE

    @property
    def has_lines(self) -> bool:
        """Whether it is a value of each rank."""
        return not self.is_array and self.copies == OWN

    @property
    def elements(self) -> int:
        """How many elements an array of `shape` has."""
        return math.prod(self.shape)

    def shape_of(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the array of a rank that saved."""
        return self.shapes[rank] if self.shapes else self.shape

    def counts(self, ranks: Array) -> Array:
        """Return how many elements the arrays of these ranks have."""
        if not self.shapes:
            return np.full(len(ranks), self.elements, np.int64)
        return np.array([math.prod(self.shapes[rank]) for rank in ranks.tolist()], np.int64)

    @property
    def places(self) -> tuple[tuple[int, int, int], ...]:
        """The parts of the only copy of an array: the shard, the first element, and how many."""
        counts = self.parts or (self.elements,)
        starts = accumulate(counts, initial=0)
        return tuple((self.shard + number, next(starts), count) for number, count in enumerate(counts))

    def packed(self) -> list[Any]:
        """Return it as JSON."""
        packed = [self.kind, self.copies, self.dtype, list(self.shape), self.shard, self.more, list(self.values)]
        return [*packed, list(self.parts), [list(shape) for shape in self.shapes]]


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

    @functools.cached_property
    def of_each_rank(self) -> dict[str, Item]:
        """The arrays of which each rank has its own."""
        return {path: item for path, item in self.items.items() if item.is_of_each_rank}

    @functools.cached_property
    def lines(self) -> dict[str, Item]:
        """The plain values of each rank."""
        return {path: item for path, item in self.items.items() if item.has_lines}

    @functools.cached_property
    def shard_of(self) -> Array:
        """The shard that has what each rank had for itself; in it that is in the order of the ranks."""
        found = np.full(self.ranks, -1, np.int32)
        for number, shard in enumerate(self.shards):
            for first, count, step in shard.runs:
                found[first : first + count * step : step] = number
        return found

    def members_of(self, number: int) -> Array:
        """Return the ranks of which a shard has what they had for themselves, in the order in which it is there."""
        return np.flatnonzero(self.shard_of == number)

    def entries_of(self, number: int, members: Array) -> dict[str, Entry]:
        """Return the arrays in a shard, which has what these ranks have, by the name that they have there."""
        found = {}
        for path, item in self.of_each_rank.items() if members.size else ():
            shape = (int(item.counts(members).sum()),) if item.shapes else (members.size, item.elements)
            found[path] = Entry(path, 0, shape, item.dtype)
        return found | self._parts.get(number, {})

    @functools.cached_property
    def _parts(self) -> dict[int, dict[str, Entry]]:
        """The arrays that were saved once, and parts of them, by shard."""
        found: dict[int, dict[str, Entry]] = {}
        for path, item in self.items.items():
            if item.is_array and not item.is_of_each_rank:
                for shard, start, count in item.places:
                    name, shape = (part_name(path, start), (count,)) if item.parts else (path, item.shape)
                    found.setdefault(shard, {})[name] = Entry(path, start, shape, item.dtype)
        return found

    def text(self) -> bytes:
        """Return the bytes of the file."""
        body = self.contents() | {"shards": [[s.nbytes, s.checksum, [list(r) for r in s.runs]] for s in self.shards]}
        inner = _BODY + json.dumps(body, separators=(",", ":")).encode() + _END
        head = {"format": FORMAT, "version": VERSION, "checksum": checksum_of(inner).hexdigest()}
        return json.dumps(head, separators=(",", ":")).encode()[:-1] + b",\n" + inner

    def contents(self) -> dict[str, Any]:
        """Return what every rank needs that restores, as JSON: all but the files and what each rank has for itself."""
        items = {p: dataclasses.replace(i, values=()) if i.has_lines else i for p, i in self.items.items()}
        return {
            "ranks": self.ranks,
            "names": list(self.names),
            "items": {path: item.packed() for path, item in items.items()},
            "layout": self.layout,
            "written_by": self.written_by,
        }


def _unpacked(
    kind: str,
    copies: str,
    dtype: str,
    shape: list[int],
    shard: int,
    more: Any,
    values: list[Any],
    parts: list[int],
    shapes: list[list[int]],
) -> Item:
    """Return the item of which this is `Item.packed`."""
    of_ranks = tuple(map(tuple, shapes))
    return Item(kind, copies, dtype, tuple(shape), shard, more, tuple(values), tuple(parts), of_ranks)


def of_contents(contents: dict[str, Any]) -> Manifest:
    """Return a manifest from `Manifest.contents` of one that was checked."""
    items = {path: _unpacked(*packed) for path, packed in contents["items"].items()}
    names, layout = tuple(contents["names"]), contents["layout"]
    return Manifest(contents["ranks"], (), items, names, layout, contents["written_by"])


def runs_of(ranks: Iterable[int]) -> tuple[Run, ...]:
    """Return ascending ranks as runs."""
    runs: list[Run] = []
    for rank in ranks:
        first, count, step = runs[-1] if runs else Run(0, 0, 0)
        if count == 1:
            runs[-1] = Run(first, 2, rank - first)
        elif count and rank == first + count * step:
            runs[-1] = Run(first, count + 1, step)
        else:
            runs.append(Run(rank, 1, 1))
    return tuple(runs)


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
    ranks, layout, names = body["ranks"], body["layout"], body["names"]
    _require(_is_count(ranks) and 1 <= ranks <= MOST_RANKS, "ranks")
    shards = tuple(Shard(size, text, tuple(Run(*run) for run in runs)) for size, text, runs in body["shards"])
    _require(len(shards) >= 1, "shards")
    _require(all(_is_count(s.nbytes) and s.nbytes <= MOST_BYTES for s in shards), "shards")
    _require(all(re.fullmatch(r"[0-9a-f]{32}", s.checksum) for s in shards), "checksums")
    _require(isinstance(layout, dict) and all(isinstance(name, str) for name in names), "names")
    items = {path: _item(ranks, len(shards), *packed) for path, packed in body["items"].items()}
    _require(all(name in items for name in names) and len(set(names)) == len(names), "names")
    _require(not any(path.startswith("_") for path, item in items.items() if item.is_array), "paths")
    written_by = body["written_by"]
    _require(isinstance(written_by, str) and len(written_by) <= _LONGEST_VERSION, "written_by")
    manifest = Manifest(ranks, shards, items, tuple(names), layout, printable(written_by, ""))
    _check_runs(manifest)
    return manifest


def _check_runs(manifest: Manifest) -> None:
    """Raise ValueError unless what each rank had for itself is in one shard, if there is any."""
    for shard in manifest.shards:
        _require(all(_is_count(number) for run in shard.runs for number in run), "runs")
        _require(all(count and step for _, count, step in shard.runs), "runs")
        _require(all(first + (count - 1) * step < manifest.ranks for first, count, step in shard.runs), "runs")
        last = -1
        for first, count, step in shard.runs:
            _require(first > last, "runs")
            last = first + (count - 1) * step
        _require(shard.members * LEAST_LINE <= shard.nbytes, "runs")  # so that a small file cannot speak of many
    members = sum(shard.members for shard in manifest.shards)
    _require(members in (0, manifest.ranks), "runs")
    _require(bool(members) or not (manifest.of_each_rank or manifest.lines), "runs")
    _require(not members or bool((manifest.shard_of >= 0).all()), "runs")


def _item(
    ranks: int,
    shards: int,
    kind: Any,
    copies: Any,
    dtype: Any,
    shape: list[Any],
    shard: Any,
    more: Any,
    values: list[Any],
    parts: list[Any],
    shapes: list[Any],
) -> Item:
    _require(isinstance(kind, str) and isinstance(dtype, str) and copies in ("", ONE, OWN, ROWS, *COMBINED), "copies")
    _require(all(type(each) is list for each in (shape, values, parts, shapes, *shapes)), "lists")
    _require(len(shapes) in (0, ranks) and len(values) <= 1, "lists")
    _require(_is_count(shard) and shard < shards, "numbers")
    item = _unpacked(kind, copies, dtype, shape, shard, more, values, parts, shapes)
    _require((kind == ROWS) == (copies == ROWS), "rows")
    if dtype:
        elements = dtype_of(dtype)
        _require(all(_is_shape(each, elements) for each in (shape, *shapes)), "sizes")
        _require(copies != "", "copies")
        _require(copies not in COMBINED or is_numeric(elements), "copies")
        _require(not parts or (copies == ONE and shard + len(parts) <= shards), "parts")
        _require(all(_is_count(count) for count in parts) and sum(parts) in (0, item.elements), "parts")
        _require(not parts or sum(parts) > 0, "parts")
        _require(not shapes or copies in (OWN, ROWS), "shapes")
        if copies == ROWS:
            _require(bool(shapes) and all(each[1:] == shape[1:] and each for each in shapes), "rows")
            _require(sum(each[0] for each in shapes) == shape[0], "rows")
    elif copies:
        _require(copies in (ONE, OWN) and len(values) == int(copies == ONE) and not (parts or shapes), "values")
    return item


def _is_shape(shape: list[Any], dtype: np.dtype[Any]) -> bool:
    """Return whether it is the shape of an array that NumPy can make, and is not too large."""
    if not (len(shape) <= MOST_AXES and all(_is_count(count) and count <= MOST_BYTES for count in shape)):
        return False
    return byte_count(tuple(shape), dtype) <= MOST_BYTES and is_possible(shape, dtype)


def _is_count(number: Any) -> bool:
    return type(number) is int and number >= 0


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def bad(where: str, found: str) -> CheckpointDamagedError:
    """Return the error for a damaged checkpoint."""
    return CheckpointDamagedError.at("a checkpoint", found=f"{found}, at {where!r}", expected="a whole checkpoint")
