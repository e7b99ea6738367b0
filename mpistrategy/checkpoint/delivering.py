"""How the arrays of a checkpoint come from the ranks that have read them to all ranks, and into the objects.

An array that was saved once goes to all ranks; small ones travel together.  Of an array of which each rank had a copy,
each rank gets its own back; on another number of ranks all get the combined copies, the total by one collective for all
of one dtype, and each keeps its share of a sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrategy.arrays.convert import is_on_device
from mpistrategy.arrays.dtypes import Array, wire_dtype
from mpistrategy.checkpoint.kinds.variables import store
from mpistrategy.checkpoint.reading import Reading
from mpistrategy.checkpoint.state import Fitting
from mpistrategy.checkpoint.storage.manifest import ONE, OWN, Item
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
_ROWS, _TOTALS, _COPIES = "rows", "totals", "copies"


def deliver(source: Reading, fit: Fitting) -> None:
    """Put the arrays that `fit` has fetched into variables and into ``fit.staged``.  Collective."""
    rank, size = source.communicator.rank, source.communicator.size
    variables = {path: None if make is None else make() for path, make in fit.fetched.items()}
    ways = {path: _way_of(source, path, variables[path], path in fit.shared) for path in variables}
    for path in sorted(path for path, way in ways.items() if way == (_COPIES, False)):
        if _goes_to_gpu(source, path, variables[path]):
            _send_to_gpus(source, path, variables[path])
            del ways[path]
    for way, arrays_of in ((_ROWS, _rows), (_TOTALS, _totals), (_COPIES, _copies)):
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
    combined = _TOTALS if item.copies in ("SUM", "MEAN") else _ROWS if item.copies == OWN else _COPIES
    if variable is None:
        if is_shared:
            return (_ROWS, False) if item.copies != ONE and source.same_ranks else (combined, True)
        return combined, False
    if variable.synchronization is VariableSynchronization.ON_READ and not variable.strategy.extended._is_local:
        if item.copies == variable.aggregation.name and source.same_ranks:
            return _ROWS, False
        return combined, variable.aggregation is VariableAggregation.SUM
    return combined, False


def _room_for(item: Item) -> Array:
    return np.empty(item.shape, dtype_of(item.dtype).newbyteorder("="))


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8) if array.nbytes else _NOTHING


# ------------------------------------------------------------------------------------------------ one row a rank


def _rows(source: Reading, paths: Sequence[str]) -> Iterator[tuple[str, Array]]:
    """Yield this rank's own copies, where as many ranks saved as there are now."""
    communicator, me = source.communicator, source.communicator.rank
    if not paths:
        return
    found = {path: _room_for(source.manifest.items[path]) for path in paths}
    nbytes = sum(array.nbytes for array in found.values())
    own, readers = int(source.shard_of[me]), source.readers[source.shard_of]
    if readers[me] == me:
        number = int(np.searchsorted(source.members_of(own), me))
        for path, array in found.items():
            array.reshape(-1)[...] = source.arrays[own][path][number]
    elsewhere = np.flatnonzero(readers != np.arange(communicator.size)) if nbytes else readers[:0]
    for shard in np.unique(source.shard_of[elsewhere]).tolist():
        root, blocks = int(source.readers[shard]), None
        block = np.empty(nbytes if shard == own and root != me else 0, np.uint8)
        if root == me:
            members, blocks = source.members_of(shard).tolist(), [_NOTHING] * communicator.size
            stacks = [source.arrays[shard][path] for path in paths if found[path].nbytes]
            rows = np.concatenate([_bytes(stack).reshape(len(members), -1) for stack in stacks], axis=1)
            for row, rank in zip(rows, members, strict=True):
                if rank != me:
                    blocks[rank] = row
        communicator.scatter_blocks(blocks, block, root)
        if block.size:
            start = 0
            for array in found.values():
                _bytes(array)[...] = block[start : start + array.nbytes]
                start += array.nbytes
    yield from found.items()


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
                yield path, found.astype(_room_for(item).dtype).reshape(item.shape)


def _dtype_of_sums(item: Item) -> np.dtype[Any]:
    """Return the dtype in which copies are added: of bools, their number; of the smallest floats, float32."""
    dtype = wire_dtype(dtype_of(item.dtype).newbyteorder("="))
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
    if item.has_rows:
        shard = int(source.shard_of[0])
        return [_Piece(int(source.readers[shard]), shard, 0, item.elements)]
    return [_Piece(int(source.readers[shard]), shard, start, count) for shard, start, count in item.places]


def _nbytes(source: Reading, path: str) -> int:
    item = source.manifest.items[path]
    return item.elements * dtype_of(item.dtype).itemsize


def _read(source: Reading, path: str, piece: _Piece) -> Array:
    """Return a part of an array, flat, on the rank that has read it."""
    item, arrays = source.manifest.items[path], source.arrays[piece.shard]
    if item.has_rows:
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
        array = _room_for(item)
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
    arrays = {path: _room_for(source.manifest.items[path]) for path in paths}
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
