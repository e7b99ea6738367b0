"""Which rank reads which part of a checkpoint, and how the arrays and values come to all ranks.

Rank 0 reads the manifest.  Each shard is read by one rank, on as many ranks as saved by its writer; the readers are
spread over the nodes.  So each byte is read once, and then sent: networks are faster than the file system that the
nodes share.

An array that was saved once goes to all ranks.  If each rank had a copy, each rank gets its own copy back; on another
number of ranks all ranks get the combined copies, and keep their shares of a sum.  The rows of a global array are split
again, equally many for each rank.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import on_device_of, placed_as
from mpistrategy.arrays.dtypes import Array, quietly, wire_dtype
from mpistrategy.checkpoint.saving import REPLACED, places
from mpistrategy.checkpoint.storage.files import check_is_trusted, damaged, opened, reading
from mpistrategy.checkpoint.storage.format import (
    COMBINED,
    LONGEST_TEXT,
    NAME,
    OWN,
    ROWS,
    Item,
    Manifest,
    as_array,
    by_width,
    dtype_of,
    is_shape,
    loads,
    parse,
    read_shard,
    require,
    shard_name,
    shares,
)
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.ranks import Alone, Ranks
from mpistrategy.variables.policies import share_of
from mpistrategy.variables.variable import Variable

_NOTHING = np.empty(0, np.uint8)


def read_text(path: str) -> bytes:
    """Return the folder of a checkpoint and its manifest; on one rank."""
    above, name = os.path.split(path)
    replaced = os.path.join(above, REPLACED.format(name))  # a job may have ended between the two renames
    folder = replaced if os.path.lexists(replaced) and not os.path.lexists(path) else path
    check_is_trusted(folder)
    with opened(os.path.join(folder, NAME), LONGEST_TEXT) as file:
        return os.fsencode(folder) + b"\0" + file.read()


def from_rank_0(ranks: Ranks, text: bytes) -> bytes:
    """Return the text of rank 0 on every rank.  Collective."""
    length = np.array([len(text)], np.int64)
    ranks.bcast(length, 0)
    message = np.frombuffer(text, np.uint8).copy() if ranks.rank == 0 else np.empty(int(length[0]), np.uint8)
    ranks.bcast(message, 0)
    return message.tobytes()


class Own:
    """The data of a rank, as its shard has them.

    Args:
        data: the bytes: the arrays, those of the widest dtypes first, and the values as JSON.
        manifest: of the checkpoint.
        rank: the rank that saved them.
        where: the name of the checkpoint, for errors.

    Attributes:
        data: as given.
        line: the bytes of the values.
        values: by path; of arrays whose shape may differ between ranks, the shape.
        arrays: by path, in native byte order, not copied where that can be.

    Raises:
        CheckpointDamagedError: for other data than the manifest says.
    """

    def __init__(self, data: Array, manifest: Manifest, rank: int, where: str) -> None:
        self.data = data
        self.line: Array = data[max(0, data.size - manifest.own[1][rank]) :]
        self.values: dict[str, Any] = loads(self.line.tobytes(), where)
        self.arrays: dict[str, Array] = {}
        items, start = manifest.of_each_rank, 0
        rows = dict(zip(manifest.rows, manifest.own[3:], strict=True))
        try:
            for path in by_width(items):
                item = items[path]
                shape = self.values[path] if item.copies == OWN else item.shape
                if path in rows:
                    shape = [rows[path][rank], *item.shape[1:]]
                require(is_shape(shape, item.itemsize), "shape")
                stop = start + math.prod(shape) * item.itemsize
                self.arrays[path] = as_array(data[start:stop], item.dtype, shape)
                start = stop
            require(start + manifest.own[1][rank] == data.size, "size")
        except (TypeError, ValueError, LookupError) as error:
            raise damaged(where, f"other data of a rank than the manifest names ({str(error)[:80]})") from error


class Reading:
    """A checkpoint that some ranks read together.

    Args:
        communicator: the ranks.
        path: the checkpoint.
        text: what `read_text` has returned on rank 0.

    Attributes:
        communicator, path: as given.
        manifest: as all ranks know it.
        parts: of each array that was saved once: the ranks that read it, its first elements for them, and those after.
        arrays: the parts that this rank has read, by path and first element.
        owns: the per-rank data that this rank has read, by the rank that saved them.
        own_table: `Manifest.own`, with the rank that reads the data in the place of their shard.
        own_arrays: the arrays of this rank, on as many ranks as saved.
        values: the plain values of this rank; of another rank if this rank did not save.

    Raises:
        CheckpointDamagedError: for a manifest of no save.
    """

    def __init__(self, communicator: Ranks, path: str, text: bytes) -> None:
        self.communicator = communicator
        self.path = path
        self.parts: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        self.arrays: dict[tuple[str, int], Array] = {}
        self.owns: dict[int, Own] = {}
        self.own_arrays: dict[str, Array] = {}
        self.values: dict[str, Any] = {}
        folder, _, data = text.partition(b"\0")
        self._folder = os.fsdecode(folder)
        self.manifest: Manifest = parse(data, path)
        self._readers, _ = places(communicator.node_of, len(self.manifest.shards))
        self.own_table: Array = np.array(self.manifest.own or np.empty((3, 0)), np.int64)
        self.own_table[0] = np.array(self._readers)[self.own_table[0]]

    @property
    def same_ranks(self) -> bool:
        """Whether as many ranks saved as there are now."""
        return self.manifest.ranks == self.communicator.size

    def read_shards(self, names: Collection[str]) -> None:
        """Read this rank's shards, whole; keep the arrays below some names, and the per-rank data.

        Raises:
            CheckpointDamagedError: for another size or checksum than the manifest says.
        """
        items, own = self.manifest.items, self.manifest.own
        shared = shares(items, len(self.manifest.shards))
        for number, (reader, size_and_sum) in enumerate(zip(self._readers, self.manifest.shards, strict=True)):
            for path, (begin, stop) in shared[number].items():
                self.parts[path].append((reader, begin, stop))
            if reader == self.communicator.rank:
                ranks = [rank for rank, place in enumerate(own[0]) if place == number] if own else []
                entries = [(f"_rank {rank}", own[2][rank], True) for rank in ranks]
                for path, (begin, stop) in shared[number].items():
                    is_kept = path.partition("/")[0] in names
                    entries.append((path, (stop - begin) * items[path].itemsize, is_kept))
                file = os.path.join(self._folder, shard_name(number))
                contents = read_shard(file, *size_and_sum, entries)
                self.owns |= {
                    rank: Own(contents.pop(f"_rank {rank}"), self.manifest, rank, self.path) for rank in ranks
                }
                for path, data in contents.items():
                    shape = [data.size // items[path].itemsize]
                    self.arrays[path, shared[number][path][0]] = as_array(data, items[path].dtype, shape)

    def tell_owns(self, call: Call) -> None:
        """Make `own_arrays` and `values`.  Collective; the ranks expect one more agreement then."""
        ranks, table, me = self.communicator, self.own_table, self.communicator.rank
        call.expect_more()
        if not table.size:
            return
        nearest = np.arange(ranks.size) % self.manifest.ranks
        readers, lengths = table[0][nearest], table[2 if self.same_ranks else 1][nearest]
        if self.same_ranks and (readers == np.arange(ranks.size)).all():
            received = self.owns[me].data
        else:
            owns = [self.owns[rank] for rank in nearest[readers == me].tolist()]
            pieces = [own.data if self.same_ranks else own.line for own in owns]
            counts = np.where(readers == me, lengths, 0), np.where(np.arange(ranks.size) == readers[me], lengths[me], 0)
            outgoing, received = np.concatenate([_NOTHING, *pieces]), np.empty(int(lengths[me]), np.uint8)
            call.agree("send what each rank had")
            ranks.alltoallv(outgoing, counts[0].tolist(), received, counts[1].tolist())
            call.expect_more()
        if self.same_ranks:
            own = Own(received, self.manifest, me, self.path)
            self.own_arrays, self.values = own.arrays, own.values
        else:
            self.values = loads(received.tobytes(), self.path)


def arrays_of(path: str) -> dict[str, Array]:
    """Return the arrays of a checkpoint by path, per-rank arrays by ``path@rank``; other copies are combined."""
    with reading("Checkpoint.arrays", path):
        source = Reading(Alone(), path, read_text(path))
        manifest = source.manifest
        source.read_shards(manifest.names)
        source.own_arrays = source.owns[0].arrays if source.owns else {}
        items = {name: item for name, item in manifest.items.items() if item.is_array}
        arrays = deliver(source, {name: (None, item.copies) for name, item in items.items() if item.copies != OWN})
        for name, item in items.items():
            for rank, own in sorted(source.owns.items()) if item.copies == OWN else ():
                arrays[f"{name}@{rank}"] = own.arrays[name]
    return arrays


def deliver(source: Reading, targets: Mapping[str, tuple[Variable | None, str]]) -> dict[str, Array]:
    """Write arrays into variables; return the arrays without a variable, by path.  Collective.

    Args:
        source: the checkpoint.
        targets: by path, the variable or None, and how copies are saved (`Item.copies`) there.
    """
    ranks, staged = source.communicator, {}
    for path, (variable, copies) in targets.items():
        item = source.manifest.items[path]
        if item.copies == OWN or (source.same_ranks and item.copies == copies in COMBINED):
            array = source.own_arrays[path]  # this rank gets its own copy back
        elif item.copies == ROWS:
            array = _rows(source, path, item)
        else:
            array = (_total if item.copies in ("SUM", "MEAN") else _copy)(source, path, item)
            if copies == "SUM":
                array = share_of(array, ranks.rank, ranks.size)
        if variable is None:
            staged[path] = array
        else:
            store(variable, array)
    return staged


def store(var: Variable, array: Array) -> None:
    """Write an ndarray of its dtype and shape into this rank's copy of a variable, whatever its policy is."""
    storage = var._storage
    with on_device_of(storage):
        storage[...] = placed_as(array, storage)


def _copy(source: Reading, path: str, item: Item) -> Array:
    """Return the only copy, or the first rank's, on all ranks; the ranks that have read its parts send them."""
    ranks, parts = source.communicator, source.parts[path]
    if item.is_of_each_rank:
        parts = [(int(source.own_table[0][0]), 0, item.elements)]
    array = np.empty(item.elements, dtype_of(item.dtype))
    for root, begin, stop in parts:
        if root == ranks.rank:
            own = item.is_of_each_rank
            stored = source.owns[0].arrays[path] if own else source.arrays.pop((path, begin))
            if len(parts) == 1:
                array = stored.reshape(-1)  # which need not be copied
            else:
                array[begin:stop] = stored
        if stop > begin:
            ranks.bcast(array[begin:stop], root)
    return array.reshape(item.shape)


@quietly
def _total(source: Reading, path: str, item: Item) -> Array:
    """Return the sum or mean of all copies: added in rank order by each reader, then by all."""
    dtype = wire_dtype(dtype_of(item.dtype))
    if dtype.kind not in "iufc":  # of bools, their number; of the smallest floats
        dtype = np.dtype(np.int32 if dtype.kind == "b" else np.float32)
    total = np.zeros(item.shape, dtype)
    for _, own in sorted(source.owns.items()):
        total += own.arrays[path].astype(dtype, copy=False)
    if total.size:
        source.communicator.allreduce(total.reshape(-1))
    return (total / source.manifest.ranks if item.copies == "MEAN" else total).astype(dtype_of(item.dtype))


def _rows(source: Reading, path: str, item: Item) -> Array:
    """Return this rank's part of a global array: the next rows, equally many on each rank but the last ranks."""
    ranks, readers = source.communicator, source.own_table[0]
    ends = np.cumsum(source.own_table[3 + source.manifest.rows.index(path)])
    begins, total = np.append(0, ends[:-1]), int(ends[-1])
    length = max(1, -(-total // ranks.size))
    outgoing: list[list[Array]] = [[_NOTHING] for _ in range(ranks.size)]
    for saved, own in sorted(source.owns.items()):
        block, begin = own.arrays[path], int(begins[saved])
        for rank in range(begin // length, -(-int(ends[saved]) // length)):
            outgoing[rank].append(_bytes(block[max(0, rank * length - begin) : (rank + 1) * length - begin]))
    first = min(ranks.rank * length, total)
    array = np.empty((min(length, total - first), *item.shape[1:]), dtype_of(item.dtype))
    received, taken = np.empty(array.nbytes, np.uint8), np.zeros(ranks.size, np.int64)
    lows, highs = np.clip(begins, first, first + len(array)) - first, np.clip(ends, first, first + len(array)) - first
    np.add.at(taken, readers, (highs - lows) * (array.nbytes // max(1, len(array))))
    sent = [np.concatenate(pieces) for pieces in outgoing]
    ranks.alltoallv(np.concatenate(sent), [piece.size for piece in sent], received, taken.tolist())
    for saved in np.argsort(readers, kind="stable"):  # the order of arrival
        place = _bytes(array[lows[saved] : highs[saved]])
        place[...], received = np.split(received, [place.size])
    return array


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8) if array.nbytes else _NOTHING
