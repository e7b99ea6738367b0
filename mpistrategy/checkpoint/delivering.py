"""How the arrays of a checkpoint come from the ranks that have read them to all ranks, and into the objects.

An array that was saved once goes to all ranks.  If each rank had a copy, each rank gets its own copy back; on another
number of ranks all ranks get the combined copies, by one collective for each dtype, and keep their shares of a sum.
The rows of a global array are split again, equally many for each rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import on_device_of, placed_as
from mpistrategy.arrays.dtypes import Array, quietly, wire_dtype
from mpistrategy.checkpoint.reading import Reading, array_of
from mpistrategy.checkpoint.storage.files import reading
from mpistrategy.checkpoint.storage.manifest import ONE, OWN, ROWS, Item
from mpistrategy.checkpoint.storage.shards import dtype_of
from mpistrategy.mpi.interface.ranks import Alone
from mpistrategy.options import VariableSynchronization
from mpistrategy.variables.policies import share_of
from mpistrategy.variables.variable import Variable


def arrays_of(path: str) -> dict[str, Array]:
    """Return the arrays of a checkpoint by path, per-rank arrays by ``path@rank``; other copies are combined."""
    source = Reading(Alone(), path)
    with reading("Checkpoint.arrays", path):
        manifest = source.tell_manifest(source.read_manifest())
        source.read_shards(manifest.names)
        if manifest.of_each_rank:
            source.note_owns()
        items = {name: item for name, item in manifest.items.items() if item.is_array}
        arrays = deliver(source, {name: None for name, item in items.items() if item.copies != OWN})
        for name, item in items.items():
            for rank, own in sorted(source.owns.items()) if item.copies == OWN else ():
                arrays[f"{name}@{rank}"] = array_of(own, name, manifest)
    return arrays


def deliver(source: Reading, targets: Mapping[str, Variable | None]) -> dict[str, Array]:
    """Write arrays into variables; return the arrays without a variable, by path.  Collective."""
    ranks, items = source.communicator, source.manifest.items
    combined = {path: var for path, var in targets.items() if not _is_own(source, items[path], var)}
    totals = _totals(source, [path for path in combined if items[path].copies in ("SUM", "MEAN")])
    staged: dict[str, Array] = {}
    for path, variable in targets.items():
        item = items[path]
        if path not in combined:
            assert source.own is not None
            array = array_of(source.own, path, source.manifest)
        elif item.copies == ROWS:
            array = _rows(source, path, item)
        else:
            array = totals.pop(path) if path in totals else _copy(source, path, item)
            if _aggregation(item, variable) == "SUM":
                array = share_of(array, ranks.rank, ranks.size)
        if variable is None:
            staged[path] = array
        else:
            store(variable, array)
    return staged


def _is_own(source: Reading, item: Item, variable: Variable | None) -> bool:
    """Return whether this rank gets its own copy back."""
    is_kept = item.copies not in (ONE, ROWS) and item.copies == _aggregation(item, variable)
    return item.copies == OWN or (is_kept and source.same_ranks)


def _aggregation(item: Item, variable: Variable | None) -> str:
    """Return how copies are combined: as the variable says, or for an array, as the checkpoint says."""
    if variable is None:
        return item.copies
    is_local = variable.strategy.extended._is_local
    has_copies = variable.synchronization is VariableSynchronization.ON_READ and not is_local
    return variable.aggregation.name if has_copies else ""


def store(var: Variable, array: Array) -> None:
    """Write an ndarray of its dtype and shape into this rank's copy of a variable, whatever its policy is."""
    storage = var._storage
    with on_device_of(storage):
        storage[...] = placed_as(array, storage)


def _dtype(item: Item) -> np.dtype[Any]:
    return dtype_of(item.dtype).newbyteorder("=")


def _copy(source: Reading, path: str, item: Item) -> Array:
    """Return the only copy, or the first rank's, on all ranks; the ranks that have read its parts send them."""
    ranks, parts = (
        source.communicator,
        [(source.readers[shard], shard, start, stop) for shard, start, stop in item.parts],
    )
    if item.is_of_each_rank:
        parts = [(int(source.reader_of[0]), -1, 0, item.elements)]
    array = np.empty(item.elements, _dtype(item))
    for root, shard, start, stop in parts:
        part = array[start:stop]
        if root == ranks.rank:
            stored = array_of(source.owns[0], path, source.manifest) if shard < 0 else source.arrays[shard].pop(path)
            if len(parts) == 1:
                array = part = stored.reshape(-1)  # which need not be copied
            else:
                part[...] = stored
        if part.size:
            ranks.bcast(part, root)
    return array.reshape(item.shape)


@quietly
def _totals(source: Reading, paths: Sequence[str]) -> dict[str, Array]:
    """Return the sums and means of all copies: added in rank order by each reader, then by one collective a dtype."""
    by_dtype: dict[np.dtype[Any], list[str]] = {}
    for path in paths:
        by_dtype.setdefault(_dtype_of_sums(source.manifest.items[path]), []).append(path)
    totals = {}
    for dtype, paths_of_dtype in by_dtype.items():
        items = [source.manifest.items[path] for path in paths_of_dtype]
        ends = np.cumsum([item.elements for item in items])
        total = np.zeros(ends[-1], dtype)
        parts = np.split(total, ends[:-1])
        for _, own in sorted(source.owns.items()):
            for path, part in zip(paths_of_dtype, parts, strict=True):
                part += array_of(own, path, source.manifest).reshape(-1).astype(dtype, copy=False)
        if total.size:
            source.communicator.allreduce(total)
        for path, item, part in zip(paths_of_dtype, items, parts, strict=True):
            combined = part / source.manifest.ranks if item.copies == "MEAN" else part
            totals[path] = combined.astype(_dtype(item)).reshape(item.shape)
    return totals


def _dtype_of_sums(item: Item) -> np.dtype[Any]:
    """Return the dtype in which copies are added: of bools, their number; of the smallest floats, float32."""
    dtype = wire_dtype(_dtype(item))
    if dtype.kind == "b":
        return np.dtype(np.int32)
    return dtype if dtype.kind in "iufc" else np.dtype(np.float32)


def _rows(source: Reading, path: str, item: Item) -> Array:
    """Return this rank's part of a global array: the next rows, equally many on each rank but the last ranks."""
    ranks, counts, readers = source.communicator, source.rows[path], source.reader_of
    begins = np.cumsum(counts) - counts
    send_counts, receive_counts = np.zeros((2, ranks.size), np.int64)
    outgoing = [np.empty(0, np.uint8)]
    for rank in range(ranks.size):
        for saved, start, stop in _parts_of(counts, rank, ranks.size):
            if saved in source.owns:
                block = array_of(source.owns[saved], path, source.manifest)[
                    start - begins[saved] : stop - begins[saved]
                ]
                outgoing.append(_bytes(block))
                send_counts[rank] += block.nbytes
    own_parts = _parts_of(counts, ranks.rank, ranks.size)
    own_parts.sort(key=lambda part: int(readers[part[0]]))  # the order of arrival
    first, last = _part(int(counts.sum()), ranks.rank, ranks.size)
    array = np.empty((last - first, *item.shape[1:]), _dtype(item))
    places = [_bytes(array[start - first : stop - first]) for _, start, stop in own_parts]
    for (saved, _, _), place in zip(own_parts, places, strict=True):
        receive_counts[readers[saved]] += place.size
    received = np.empty(array.nbytes, np.uint8)
    ranks.alltoallv(np.concatenate(outgoing), send_counts.tolist(), received, receive_counts.tolist())
    for place, block in zip(places, np.split(received, np.cumsum([place.size for place in places])[:-1]), strict=False):
        place[...] = block
    return array


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8) if array.nbytes else np.empty(0, np.uint8)


def _part(count: int, rank: int, size: int) -> tuple[int, int]:
    """Return the first row of a rank's part of a global array, and the row after the last."""
    length = max(1, -(-count // size))
    return min(rank * length, count), min((rank + 1) * length, count)


def _parts_of(counts: Array, rank: int, size: int) -> list[tuple[int, int, int]]:
    """Return the sources of a rank's part: a rank that saved, the first row, and the row after the last."""
    ends = np.cumsum(counts)
    begins, (first, last) = ends - counts, _part(int(ends[-1]), rank, size)
    sources = np.flatnonzero((ends > first) & (begins < last) & (counts > 0)).tolist()
    return [(saved, max(int(begins[saved]), first), min(int(ends[saved]), last)) for saved in sources]
