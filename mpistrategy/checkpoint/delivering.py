"""How the arrays of a checkpoint come from the ranks that have read them to all ranks, and into the objects.

An array that was saved once goes to all ranks; small ones travel together.  Of an array of which each rank had a copy,
each rank gets its own back; on another number of ranks all get the combined copies, the total by one collective for all
of one dtype, and each keeps its share of a sum.  Of rows of a global array each rank gets the next ones, equally many.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrategy.arrays.convert import is_on_device
from mpistrategy.arrays.dtypes import Array, wire_dtype
from mpistrategy.checkpoint.kinds.variables import store
from mpistrategy.checkpoint.reading import Reading
from mpistrategy.checkpoint.state import Fitting
from mpistrategy.checkpoint.storage.manifest import ONE, OWN, ROWS, Item
from mpistrategy.checkpoint.storage.shards import dtype_of, part_name
from mpistrategy.options import VariableAggregation, VariableSynchronization
from mpistrategy.reduction.routes.on_device import write_from_host_of
from mpistrategy.variables.policies import share_of
from mpistrategy.variables.variable import Variable

#: Arrays below this size travel together, in messages of about this size.
_TOGETHER_BYTES = 2**20
#: Arrays that travel together begin at multiples of this.
_ALIGNMENT = 16
_NOTHING = np.empty(0, np.uint8)
_OWN, _PARTS, _TOTALS, _COPIES = "own", "parts", "totals", "copies"


def deliver(source: Reading, fit: Fitting) -> None:
    """Put the arrays that `fit` has fetched into variables and into ``fit.staged``.  Collective."""
    rank, size = source.communicator.rank, source.communicator.size
    variables = {path: None if make is None else make() for path, make in fit.fetched.items()}
    ways = {path: _way_of(source, path, variables[path], path in fit.shared) for path in variables}
    for path in sorted(path for path, way in ways.items() if way == (_COPIES, False)):
        if _goes_to_gpu(source, path, variables[path]):
            _send_to_gpus(source, path, variables[path])
            del ways[path]
    for way, arrays_of in ((_OWN, _own), (_PARTS, _parts), (_TOTALS, _totals), (_COPIES, _copies)):
        for path, array in arrays_of(source, [path for path in ways if ways[path][0] == way]):
            share = share_of(array, rank, size) if ways[path][1] else array
            variable = variables[path]
            if variable is None:
                fit.staged[path] = share
            else:
                store(variable, share)


def _way_of(source: Reading, path: str, variable: Variable | None, is_shared: bool) -> tuple[str, bool]:
    """Return which copy or combination of copies a rank gets, and whether it keeps only its share."""
    item = source.manifest.items[path]
    if item.copies in (OWN, ROWS):
        return _OWN if item.copies == OWN else _PARTS, False
    combined = _TOTALS if item.copies in ("SUM", "MEAN") else _COPIES
    if variable is None:
        if is_shared:
            return (_OWN, False) if item.copies != ONE and source.same_ranks else (combined, True)
        return combined, False
    if variable.synchronization is VariableSynchronization.ON_READ and not variable.strategy.extended._is_local:
        if item.copies == variable.aggregation.name and source.same_ranks:
            return _OWN, False
        return combined, variable.aggregation is VariableAggregation.SUM
    return combined, False


def _room_for(item: Item, shape: tuple[int, ...]) -> Array:
    return np.empty(shape, _dtype(item))


def _dtype(item: Item) -> np.dtype[Any]:
    return dtype_of(item.dtype).newbyteorder("=")


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8) if array.nbytes else _NOTHING


# ------------------------------------------------------------------------------------------------ each rank its own


def _own(source: Reading, paths: Sequence[str]) -> Iterator[tuple[str, Array]]:
    """Yield this rank's own copies, where as many ranks saved as there are now."""
    communicator, me, items = source.communicator, source.communicator.rank, source.manifest.items
    if not paths:
        return
    found = {path: _room_for(items[path], items[path].shape_of(me)) for path in paths}
    ranks = np.arange(communicator.size)
    own, readers = int(source.shard_of[me]), source.readers[source.shard_of]
    if readers[me] == me:
        number = int(np.searchsorted(source.members_of(own), me))
        for path, array in found.items():
            array.reshape(-1)[...] = source.parts_of(own, path)[number]
    moves = any(int(items[path].counts(ranks).sum()) for path in paths)
    elsewhere = np.flatnonzero(readers != ranks) if moves else readers[:0]
    for shard in np.unique(source.shard_of[elsewhere]).tolist():
        root, blocks = int(source.readers[shard]), None
        is_mine = shard == own and root != me
        block = np.empty(sum(array.nbytes for array in found.values()) if is_mine else 0, np.uint8)
        if root == me:
            blocks = [_NOTHING] * communicator.size
            parts = [source.parts_of(shard, path) for path in paths]
            for number, rank in enumerate(source.members_of(shard).tolist()):
                if rank != me:
                    blocks[rank] = _joined(part[number] for part in parts)
        communicator.scatter_blocks(blocks, block, root)
        if is_mine:
            start = 0
            for array in found.values():
                _bytes(array)[...] = block[start : start + array.nbytes]
                start += array.nbytes
    yield from found.items()


# ------------------------------------------------------------------------------------------------ rows of a whole


class _Whole:
    """A global array whose rows are in the shards, as all ranks know it.

    Args:
        source: the checkpoint.
        path: of the array.

    Attributes:
        item: as the manifest has it.
        row: how many elements a row has.
        begins, ends: the first row of each rank that saved, and the one after its last.
    """

    def __init__(self, source: Reading, path: str) -> None:
        self.item: Item = source.manifest.items[path]
        self.row: int = math.prod(self.item.shape[1:])
        lengths = np.array([shape[0] for shape in self.item.shapes], np.int64)
        self.ends: Array = np.cumsum(lengths)
        self.begins: Array = self.ends - lengths
        self._each: int = -(-self.item.shape[0] // source.communicator.size)

    def part(self, rank: int) -> tuple[int, int]:
        """Return the first row that a rank gets, and the one after its last."""
        rows = self.item.shape[0]
        return min(rank * self._each, rows), min((rank + 1) * self._each, rows)

    def stay(self, members: Array, reader: int) -> bool:
        """Return whether only the rank that has read the rows of these ranks gets any of them."""
        first, last = self.part(reader)
        begins, ends = self.begins[members], self.ends[members]
        return not self.row or bool(((begins == ends) | ((begins >= first) & (ends <= last))).all())

    def pieces(self, members: Array, rank: int) -> list[tuple[int, int, int]]:
        """Return what a rank gets of the rows of these ranks: elements in the shard, in its own part, and how many."""
        first, last = self.part(rank)
        begins, ends = self.begins[members], self.ends[members]
        there = np.cumsum(ends - begins) - (ends - begins)
        starts, stops = np.maximum(begins, first), np.minimum(ends, last)
        columns = np.stack([there + starts - begins, starts - first, stops - starts]) * self.row
        return [(at, to, count) for at, to, count in columns[:, starts < stops].T.tolist() if count]


def _parts(source: Reading, paths: Sequence[str]) -> Iterator[tuple[str, Array]]:
    """Yield this rank's part of each global array: the next rows, equally many on each rank but the last ones."""
    communicator, me = source.communicator, source.communicator.rank
    wholes = {path: _Whole(source, path) for path in paths}
    found = {}
    for path, whole in wholes.items():
        first, last = whole.part(me)
        found[path] = _room_for(whole.item, (last - first, *whole.item.shape[1:]))
    for shard in np.unique(source.shard_of).tolist() if paths else ():
        members, root = source.members_of(shard), int(source.readers[shard])
        pieces = [(path, piece) for path, whole in wholes.items() for piece in whole.pieces(members, me)]
        arrays = source.arrays.get(shard, {})
        if root == me:
            for path, (at, to, count) in pieces:
                found[path].reshape(-1)[to : to + count] = arrays[path][at : at + count]
        if all(whole.stay(members, root) for whole in wholes.values()):
            continue
        blocks, nbytes = None, 0
        if root == me:
            blocks = [_NOTHING] * communicator.size
            for rank in range(communicator.size):
                if rank != me:
                    theirs = [(path, piece) for path, whole in wholes.items() for piece in whole.pieces(members, rank)]
                    blocks[rank] = _joined(arrays[path][at : at + count] for path, (at, _, count) in theirs)
        else:
            nbytes = sum(count * found[path].itemsize for path, (_, _, count) in pieces)
        block = np.empty(nbytes, np.uint8)
        communicator.scatter_blocks(blocks, block, root)
        start = 0
        for path, (_, to, count) in pieces if root != me else ():
            part = _bytes(found[path].reshape(-1)[to : to + count])
            part[...] = block[start : start + part.size]
            start += part.size
    yield from found.items()


def _joined(arrays: Iterable[Array]) -> Array:
    """Return the bytes of arrays, one after the other."""
    return np.concatenate([_NOTHING, *map(_bytes, arrays)])


# ------------------------------------------------------------------------------------------------ combined copies


def _totals(source: Reading, paths: Sequence[str]) -> Iterator[tuple[str, Array]]:
    """Yield the sums and means of all copies: added in rank order within a shard, then by one collective a dtype."""
    by_dtype: dict[np.dtype[Any], list[str]] = {}
    for path in paths:
        by_dtype.setdefault(_dtype_of_sums(source.manifest.items[path]), []).append(path)
    for dtype, same in by_dtype.items():
        items = [source.manifest.items[path] for path in same]
        total = np.zeros(sum(item.elements for item in items), dtype)
        parts = np.split(total, np.cumsum([item.elements for item in items])[:-1])
        for arrays in source.arrays.values():
            for path, part in zip(same, parts, strict=True):
                if path in arrays:
                    with np.errstate(over="ignore", invalid="ignore"):
                        part += np.add.reduce(arrays[path].astype(dtype, copy=False), axis=0)
        if total.size:
            source.communicator.allreduce(total)
        for path, item, part in zip(same, items, parts, strict=True):
            with np.errstate(over="ignore", invalid="ignore"):
                found = part / source.manifest.ranks if item.copies == "MEAN" else part
                yield path, found.astype(_dtype(item)).reshape(item.shape)


def _dtype_of_sums(item: Item) -> np.dtype[Any]:
    """Return the dtype in which copies are added: of bools, their number; of the smallest floats, float32."""
    dtype = wire_dtype(_dtype(item))
    if dtype.kind == "b":
        return np.dtype(np.int32)
    return dtype if dtype.kind in "iufc" else np.dtype(np.float32)


# ------------------------------------------------------------------------------------------------ one copy for all


class _Piece(NamedTuple):
    """A part of an array on the rank that has read it."""

    root: int
    shard: int
    start: int
    elements: int


def _copies(source: Reading, paths: Sequence[str]) -> Iterator[tuple[str, Array]]:
    """Yield the only copy, or the first rank's."""
    pieces = {path: _pieces_of(source, path) for path in paths}
    batch: list[str] = []
    together = 0
    for path in sorted(paths, key=lambda path: pieces[path][0]):  # equal on all ranks, what one rank sends in a row
        nbytes = _nbytes(source, path)
        if len(pieces[path]) > 1 or nbytes >= _TOGETHER_BYTES:
            yield path, _sent(source, path, pieces[path])
            continue
        if batch and (pieces[path][0].root != pieces[batch[0]][0].root or together + nbytes > _TOGETHER_BYTES):
            yield from _sent_together(source, batch, pieces)
            batch, together = [], 0
        batch.append(path)
        together += nbytes
    if batch:
        yield from _sent_together(source, batch, pieces)


def _pieces_of(source: Reading, path: str) -> list[_Piece]:
    item = source.manifest.items[path]
    if item.is_of_each_rank:
        shard = int(source.shard_of[0])
        return [_Piece(int(source.readers[shard]), shard, 0, item.elements)]
    return [_Piece(int(source.readers[shard]), shard, start, count) for shard, start, count in item.places]


def _nbytes(source: Reading, path: str) -> int:
    item = source.manifest.items[path]
    return item.elements * dtype_of(item.dtype).itemsize


def _read(source: Reading, path: str, piece: _Piece) -> Array:
    """Return a part of an array, flat, on the rank that has read it."""
    item, arrays = source.manifest.items[path], source.arrays[piece.shard]
    if item.is_of_each_rank:
        first: Array = arrays[path][0]
        return first
    return arrays.pop(part_name(path, piece.start) if item.parts else path).reshape(-1)


def _goes_to_gpu(source: Reading, path: str, variable: Variable | None) -> bool:
    """Return whether an array goes into a variable in GPU memory by a message of its own; equal on all ranks."""
    return variable is not None and _nbytes(source, path) >= _TOGETHER_BYTES and is_on_device(variable.local_view)


def _send_to_gpus(source: Reading, path: str, variable: Any) -> None:
    """Write an array into every rank's variable in GPU memory; its parts are copied there where they were read."""
    communicator = source.communicator
    target = variable._storage.reshape(-1)
    for piece in _pieces_of(source, path):
        part = _read(source, path, piece) if piece.root == communicator.rank else None
        write_from_host_of(communicator, piece.root, part, target[piece.start : piece.start + piece.elements])


def _sent(source: Reading, path: str, pieces: Sequence[_Piece]) -> Array:
    """Return an array; its parts are sent where they were read."""
    me, item = source.communicator.rank, source.manifest.items[path]
    if len(pieces) == 1 and pieces[0].root == me:
        array = _read(source, path, pieces[0]).reshape(item.shape)
    else:
        array = _room_for(item, item.shape)
    for piece in pieces:
        part = array.reshape(-1)[piece.start : piece.start + piece.elements]
        if piece.root == me and len(pieces) > 1:
            part[...] = _read(source, path, piece)
        source.communicator.bcast(part, piece.root)
    return array


def _sent_together(
    source: Reading, paths: Sequence[str], pieces: dict[str, list[_Piece]]
) -> Iterator[tuple[str, Array]]:
    """Yield arrays that one rank has read, sent in one message."""
    root = pieces[paths[0]][0].root
    items = source.manifest.items
    arrays = {path: _room_for(items[path], items[path].shape) for path in paths}
    ends = np.cumsum([-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays.values()])
    buffer = np.zeros(int(ends[-1]), np.uint8)
    parts = np.split(buffer, ends[:-1])
    if root == source.communicator.rank:
        for path, part in zip(paths, parts, strict=True):
            data = _bytes(_read(source, path, pieces[path][0]))
            part[: data.size] = data
    if buffer.size:
        source.communicator.bcast(buffer, root)
    for (path, array), part in zip(arrays.items(), parts, strict=True):
        _bytes(array)[...] = part[: array.nbytes]
        yield path, array
