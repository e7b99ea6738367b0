"""The manifest: the contents of a checkpoint and the checksums of its files.  Written last, when all else is complete.

It is one JSON object on two lines.  The first line has the format and the checksum of the second line, which has the
rest.  Everything is checked before it is used.  Names of files are made from numbers, so that a forged manifest cannot
name other files.

It says which bytes belong to which array.  The arrays that are saved once lie one after the other, those of the widest
dtypes first, and each shard has an equal part of these bytes, up to whole elements.  Before this part, a shard has the
data of some ranks.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mpistrategy.checkpoint.storage.files import checksum_of, damaged, foreign, is_folder, opened
from mpistrategy.checkpoint.storage.shards import LONGEST_TEXT, MOST_BYTES, dtype_of, dumps, is_shape, loads
from mpistrategy.errors import CheckpointDamagedError, CheckpointError
from mpistrategy.objects.text import printable

NAME = "manifest.json"
VERSION = 1
#: How copies are saved: one for all ranks; one for each rank; rows of a global array, some on each rank; one for each
#: rank, combined on another number of ranks.
ONE, OWN, ROWS = "one", "own", "rows"
COMBINED = ("SUM", "MEAN", "ONLY_FIRST_REPLICA")
MOST_RANKS = 1_000_000
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
    """

    nbytes: int
    checksum: str


@dataclass(frozen=True)
class Item:
    """One item of a checkpoint: an array, a value, or an object that only holds other items.

    Attributes:
        kind: a word of `mpistrategy.checkpoint.state`; `Kept._kept_as` of this package's own objects.
        copies: `ONE`, `OWN`, `ROWS` or one of `COMBINED`; "" for an object that only holds other items.
        dtype: of an array.
        shape: of an array; where each rank has its own array, of rank 0's: the first axis of rows, and all of `OWN`,
            may differ between the ranks.
        keys: of the items below it; None for positions.
        values: a tuple of the value, if it was saved once; else empty.
    """

    kind: str
    copies: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    keys: Any = None
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
        """Whether each rank has a value, or an array whose shape may differ between the ranks."""
        return self.copies in (OWN, ROWS)

    @property
    def elements(self) -> int:
        """How many elements an array of `shape` has."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return dtype_of(self.dtype).itemsize


def by_width(items: Mapping[str, Item]) -> list[str]:
    """Return the paths of the arrays among some items, those of the widest dtypes first."""
    return sorted((path for path, item in items.items() if item.is_array), key=lambda path: -items[path].itemsize)


def shares(items: Mapping[str, Item], count: int) -> list[dict[str, tuple[int, int]]]:
    """Return what each of so many shards has of the arrays that are saved once.

    For each array in the shard: its first element, and the element after its last one.
    """
    once = {path: item for path, item in items.items() if item.copies == ONE}
    paths = by_width(once)
    total = sum(once[path].elements * once[path].itemsize for path in paths)
    found: list[dict[str, tuple[int, int]]] = [{} for _ in range(count)]
    number = position = 0  # the shard, and the first byte of the array among those of all arrays
    for path in paths:
        begin, elements, itemsize = 0, once[path].elements, once[path].itemsize
        while position + elements * itemsize > (end := total * (number + 1) // count):
            if (stop := (end - position) // itemsize) > begin:
                found[number][path] = begin, stop
                begin = stop
            number += 1
        found[number][path] = begin, elements
        position += elements * itemsize
    return found


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint.

    Attributes:
        ranks: how many ranks saved it.
        shards: its files.
        items: the items, by path.
        own: of each rank's data, a list over the ranks: the shard that has them, how many bytes their values and all
            together have, and the number of rows of each `ROWS`.  Empty without per-rank data.
        layout: `Strategy.layout()` of the job that wrote it.
        written_by: the version of this package.
    """

    ranks: int
    shards: tuple[Shard, ...]
    items: dict[str, Item]
    own: list[list[int]] = field(default_factory=list)
    layout: dict[str, Any] = field(default_factory=dict)
    written_by: str = ""

    @property
    def names(self) -> list[str]:
        """The names of the objects."""
        return [path for path in self.items if "/" not in path]

    @property
    def of_each_rank(self) -> dict[str, Item]:
        """The arrays and values that differ between the ranks."""
        return {path: item for path, item in self.items.items() if item.is_of_each_rank}

    @property
    def rows(self) -> list[str]:
        """The paths of the rows of global arrays."""
        return [path for path, item in self.items.items() if item.copies == ROWS]

    def text(self, where: str) -> bytes:
        """Return the bytes of the file; raise OptionError for more names and plain values than `parse` accepts."""
        body = {
            "ranks": self.ranks,
            "shards": [[*vars(shard).values()] for shard in self.shards],
            "items": {path: [*vars(item).values()] for path, item in self.items.items()},
            "own": self.own,
            "layout": self.layout,
            "written_by": self.written_by,
        }
        return with_head(dumps(body, where))


def with_head(body: bytes) -> bytes:
    """Return the bytes of a manifest with this JSON."""
    inner = _BODY + body + _END
    checksum = checksum_of(inner).hexdigest()
    return f'{{"format":"mpistrategy checkpoint","version":{VERSION},"checksum":"{checksum}",\n'.encode() + inner


def is_checkpoint(folder: str) -> bool:
    """Return whether a folder has a manifest of this package's, of any version, and no files but a checkpoint's."""
    with suppress(CheckpointError, OSError):
        if is_folder(folder) and not foreign(folder):
            with opened(os.path.join(folder, NAME), LONGEST_TEXT) as file:
                return _HEAD.match(file.read(_LONGEST_HEAD)) is not None
    return False


def read_text(folder: str) -> bytes:
    """Return the bytes of the manifest in a folder; CheckpointDamagedError if there is none."""
    with opened(os.path.join(folder, NAME), LONGEST_TEXT) as file:
        return file.read()


def parse(data: bytes, where: str) -> Manifest:
    """Return a manifest from its bytes.

    Raises:
        CheckpointDamagedError: for bytes that `Manifest.text` does not return.
    """
    head = _HEAD.match(data)
    if head is None:
        raise damaged(where, "a manifest of another format, or a damaged one")
    version = int(head[1])
    if version != VERSION:
        raise damaged(where, f"format version {version} (this is {VERSION}; another mpistrategy wrote it)")
    inner = data[head.end() :]
    if checksum_of(inner).hexdigest().encode() != head[2] or not (inner.startswith(_BODY) and inner.endswith(_END)):
        raise damaged(where, "a manifest with another checksum than it was written with")
    body = loads(inner[len(_BODY) : -len(_END)], where)
    try:
        return _manifest(**body)
    except CheckpointDamagedError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        raise damaged(where, f"a manifest that contradicts itself ({str(error)[:80]})") from error


def _manifest(*, ranks: Any, shards: Any, items: Any, own: Any, layout: Any, written_by: Any) -> Manifest:
    _require(_is_count(ranks, MOST_RANKS) and ranks >= 1 and len(shards) >= 1, "ranks")
    for nbytes, checksum in shards:
        _require(_is_count(nbytes, MOST_BYTES) and re.fullmatch(r"[0-9a-f]{32}", checksum) is not None, "shards")
    checked = {path: _item(*packed) for path, packed in items.items()}
    _require(not any(path.startswith("_") for path, item in checked.items() if item.is_array), "paths")
    _require(all(path.rpartition("/")[0] in checked for path in checked if "/" in path), "paths")
    _require(isinstance(written_by, str) and len(written_by) <= _LONGEST_VERSION and isinstance(layout, dict), "layout")
    files = tuple(Shard(*packed) for packed in shards)
    manifest = Manifest(ranks, files, checked, own, layout, printable(written_by, ""))
    _require(len(own) == (3 + len(manifest.rows) if manifest.of_each_rank else 0), "data of the ranks")
    for column in own:
        _require(len(column) == ranks and all(_is_count(number, MOST_BYTES) for number in column), "data of a rank")
    _require(all(number < len(shards) for number in own[0]) if own else True, "data in no shard")
    return manifest


def _item(kind: Any, copies: Any, dtype: Any, shape: Any, keys: Any, values: Any) -> Item:
    """Return the item of these values."""
    _require(isinstance(kind, str) and isinstance(dtype, str) and copies in ("", ONE, OWN, ROWS, *COMBINED), "copies")
    _require(keys is None or type(keys) is list, "keys")
    _require((kind == ROWS) == (copies == ROWS), "rows")
    if dtype:
        elements = dtype_of(dtype)
        _require(is_shape(shape, elements.itemsize) and copies != "" and not values, "sizes")
        _require(copies not in COMBINED or elements.kind not in "mMSU", "copies")
        _require(copies != ROWS or bool(shape), "rows")
    else:
        _require(copies in ("", ONE, OWN) and len(values) == int(copies == ONE) and not shape, "values")
    return Item(kind, copies, dtype, tuple(shape), keys, tuple(values))


def _is_count(number: Any, most: int) -> bool:
    return type(number) is int and 0 <= number <= most


def _require(holds: bool, subject: str) -> None:
    if not holds:
        raise ValueError(subject)
