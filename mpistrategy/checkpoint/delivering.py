"""How the arrays of a checkpoint come from the ranks that have read them to all ranks, and into the objects.

An array that was saved once goes to all ranks; small ones travel together.  Of an array of which each rank had a copy,
each rank gets its own back; on another number of ranks all get the combined copies, the total by one collective for all
of one dtype, and each keeps its share of a sum.  Of rows of a global array each rank gets the next ones, equally many.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrategy.arrays.convert import is_on_device
from mpistrategy.arrays.dtypes import Array, wire_dtype
from mpistrategy.checkpoint.kinds.variables import store
from mpistrategy.checkpoint.reading import Reading, array_of
from mpistrategy.checkpoint.state import Fit
from mpistrategy.checkpoint.storage.manifest import ONE, OWN, ROWS, Item
from mpistrategy.checkpoint.storage.shards import dtype_of
from mpistrategy.options import VariableAggregation, VariableSynchronization
from mpistrategy.reduction.routes.on_device import write_that_of
from mpistrategy.variables.policies import share_of
from mpistrategy.variables.variable import Variable

#: Arrays below this size travel together, in messages of about this size.
_TOGETHER_BYTES = 2**20
_NOTHING = np.empty(0, np.uint8)
_OWN, _ROWS, _TOTALS, _COPIES = "own", "rows", "totals", "copies"


def deliver(source: Reading, fit: Fit) -> None:
    """Put the arrays that `fit` has fetched into variables and into ``fit.staged``.  Collective."""
    rank, size = source.communicator.rank, source.communicator.size
    variables = {path: None if make is None else make() for path, make in fit.fetched.items()}
    ways = {path: _way_of(source, path, variables[path], path in fit.shared) for path in variables}
    for path in sorted(path for path, way in ways.items() if way == (_COPIES, False)):
        if _goes_to_gpu(source, path, variables[path]):
            _send_to_gpus(source, path, variables[path])
            del ways[path]
    for way, arrays_of in ((_OWN, _own), (_ROWS, _rows), (_TOTALS, _totals), (_COPIES, _copies)):
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
        return _OWN if item.copies == OWN else _ROWS, False
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


def _dtype(item: Item) -> np.dtype[Any]:
    return dtype_of(item.dtype).newbyteorder("=")


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8) if array.nbytes else _NOTHING


def _own(source: Reading, paths: Sequence[str]) -> Iterator[tuple[str, Array]]:
    """Yield this rank's own copies, where as many ranks saved as there are now."""
    for path in paths:
        assert source.own is not None
        yield path, array_of(source.own, path, source.manifest)


def _rows(source: Reading, paths: Sequence[str]) -> Iterator[tuple[str, Array]]:
    """Yield this rank's part of each global array: the next rows, equally many on each rank but the last ones."""
    communicator, me, size = source.communicator, source.communicator.rank, source.communicator.size
    for path in paths:
        item, counts, readers = source.manifest.items[path], source.rows[path], source.reader_of
        ends = np.cumsum(counts)
        begins, each = ends - counts, max(1, -(-int(ends[-1]) // size))
        nbytes = math.prod(item.shape[1:]) * _dtype(item).itemsize
        parts: dict[int, list[Array]] = {rank: [_NOTHING] for rank in range(size)}
        for saved in sorted(source.owns):
            data, begin, end = _bytes(array_of(source.own_of(saved), path, source.manifest)), begins[saved], ends[saved]
            for rank in range(begin // each, -(-end // each) if end > begin else 0):
                start, stop = max(begin, rank * each), min(end, (rank + 1) * each)
                parts[rank].append(data[(start - begin) * nbytes : (stop - begin) * nbytes])
        sent = {rank: np.concatenate(pieces) for rank, pieces in parts.items()}
        first, last = min(me * each, int(ends[-1])), min((me + 1) * each, int(ends[-1]))
        there = np.flatnonzero((ends > first) & (begins < last) & (counts > 0))
        there = there[np.argsort(readers[there], kind="stable")]  # the order in which they come
        starts, stops = np.maximum(begins[there], first), np.minimum(ends[there], last)
        taken = np.zeros(size, np.int64)
        np.add.at(taken, readers[there], (stops - starts) * nbytes)
        received = np.empty(int(taken.sum()), np.uint8)
        lengths = [block.size for block in sent.values()]
        communicator.alltoallv(np.concatenate([*sent.values()]), lengths, received, taken.tolist())
        array, at = np.empty((last - first, *item.shape[1:]), _dtype(item)), 0
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            part = _bytes(array[start - first : stop - first])
            part[...] = received[at : at + part.size]
            at += part.size
        yield path, array


# ------------------------------------------------------------------------------------------------ combined copies


def _totals(source: Reading, paths: Sequence[str]) -> Iterator[tuple[str, Array]]:
    """Yield the sums and means of all copies: added in rank order by each reader, then by one collective a dtype."""
    by_dtype: dict[np.dtype[Any], list[str]] = {}
    for path in paths:
        by_dtype.setdefault(_dtype_of_sums(source.manifest.items[path]), []).append(path)
    for dtype, same in by_dtype.items():
        items = [source.manifest.items[path] for path in same]
        total = np.zeros(sum(item.elements for item in items), dtype)
        parts = np.split(total, np.cumsum([item.elements for item in items])[:-1])
        for rank in sorted(source.owns):
            own = source.own_of(rank)
            for path, part in zip(same, parts, strict=True):
                with np.errstate(over="ignore", invalid="ignore"):
                    part += array_of(own, path, source.manifest).reshape(-1).astype(dtype, copy=False)
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
    name: str
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
        return [_Piece(int(source.reader_of[0]), -1, path, 0, item.elements)]
    return [_Piece(source.readers[shard], shard, path, start, stop - start) for shard, start, stop in item.parts]


def _nbytes(source: Reading, path: str) -> int:
    item = source.manifest.items[path]
    return item.elements * dtype_of(item.dtype).itemsize


def _read(source: Reading, path: str, piece: _Piece) -> Array:
    """Return a part of an array, flat, on the rank that has read it."""
    if piece.shard < 0:
        return array_of(source.own_of(0), path, source.manifest).reshape(-1)
    return source.arrays[piece.shard].pop(piece.name).reshape(-1)


def _goes_to_gpu(source: Reading, path: str, variable: Variable | None) -> bool:
    """Return whether an array goes into a variable in GPU memory by a message of its own; equal on all ranks."""
    return variable is not None and _nbytes(source, path) >= _TOGETHER_BYTES and is_on_device(variable.local_view)


def _send_to_gpus(source: Reading, path: str, variable: Any) -> None:
    """Write an array into every rank's variable in GPU memory; its parts are copied there where they were read."""
    communicator = source.communicator
    target = variable._storage.reshape(-1)
    for piece in _pieces_of(source, path):
        part = _read(source, path, piece) if piece.root == communicator.rank else None
        write_that_of(communicator, piece.root, part, target[piece.start : piece.start + piece.elements])


def _sent(source: Reading, path: str, pieces: Sequence[_Piece]) -> Array:
    """Return an array; its parts are sent where they were read."""
    me, item = source.communicator.rank, source.manifest.items[path]
    if len(pieces) == 1 and pieces[0].root == me:
        array = _read(source, path, pieces[0])
    else:
        array = np.empty(item.elements, _dtype(item))
    for piece in pieces:
        part = array[piece.start : piece.start + piece.elements]
        if piece.root == me and len(pieces) > 1:
            part[...] = _read(source, path, piece)
        source.communicator.bcast(part, piece.root)
    return array.reshape(item.shape)


def _sent_together(
    source: Reading, paths: Sequence[str], pieces: dict[str, list[_Piece]]
) -> Iterator[tuple[str, Array]]:
    """Yield arrays that one rank has read, sent in one message."""
    root, ends = pieces[paths[0]][0].root, np.cumsum([_nbytes(source, path) for path in paths])
    buffer = np.empty(int(ends[-1]), np.uint8)
    if root == source.communicator.rank:
        np.concatenate([_bytes(_read(source, path, pieces[path][0])) for path in paths], out=buffer)
    if buffer.size:
        source.communicator.bcast(buffer, root)
    for path, part in zip(paths, np.split(buffer, ends[:-1]), strict=True):
        item = source.manifest.items[path]
        yield path, part.copy().view(_dtype(item)).reshape(item.shape)
