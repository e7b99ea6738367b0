"""Which rank reads which part of a checkpoint, and how the arrays and values come to all ranks.

Rank 0 reads the manifest.  Each shard is read by one rank: by its writer if the job has as many ranks as saved; else
the shards are spread over the nodes.  So each byte is read once, and then sent: networks are faster than the file
system that the nodes share.

An array that was saved once goes to all ranks.  If each rank had a copy, each rank gets its own copy back; on another
number of ranks all ranks get the combined copies, and keep their shares of a sum.  The rows of a global array are split
again, equally many for each rank.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import on_device_of, placed_as
from mpistrategy.arrays.dtypes import Array, quietly, wire_dtype
from mpistrategy.checkpoint.saving import REPLACED
from mpistrategy.checkpoint.storage.files import check_is_trusted, damaged, reading
from mpistrategy.checkpoint.storage.manifest import ONE, OWN, ROWS, Item, Manifest, parse, read_text
from mpistrategy.checkpoint.storage.shards import Own, dtype_of, read_shard, shard_name, values_in
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.ranks import Alone, Ranks
from mpistrategy.options import VariableSynchronization
from mpistrategy.variables.policies import share_of
from mpistrategy.variables.variable import Variable

_NOTHING = np.empty(0, np.uint8)


class Reading:
    """A checkpoint that some ranks read together.

    Args:
        communicator: the ranks.
        path: the checkpoint.

    Attributes:
        communicator, path: as given.
        manifest: as all ranks know it.
        readers: the rank that reads each shard.
        arrays: the arrays that were saved once and that this rank has read, by shard and name.
        owns: the per-rank data that this rank has read, by the rank that saved them.
        reader_of: for each rank that saved, the rank that has read its data; empty without per-rank data.
        rows: by path, how many rows of a global array each rank that saved had.
        own: the data of this rank, on as many ranks as saved, if there are per-rank data.
        values: the plain values of this rank; of another rank if this rank did not save.
    """

    manifest: Manifest
    readers: list[int]
    own: Own

    def __init__(self, communicator: Ranks, path: str) -> None:
        self.communicator = communicator
        self.path = path
        self.arrays: dict[int, dict[str, Array]] = {}
        self.owns: dict[int, Own] = {}
        self.reader_of: Array = np.empty(0, np.int64)
        self.rows: dict[str, Array] = {}
        self.values: dict[str, Any] = {}
        self._folder = ""
        self._own_table: Array = np.empty((0, 0), np.int64)

    @property
    def same_ranks(self) -> bool:
        """Whether as many ranks saved as there are now."""
        return self.manifest.ranks == self.communicator.size

    def read_manifest(self) -> bytes:
        """Return the folder and the manifest, on rank 0."""
        folder = self.path
        if not os.path.lexists(folder):  # a job may have ended between the two renames
            above, name = os.path.split(folder)
            replaced = os.path.join(above, REPLACED.format(name))
            folder = replaced if os.path.lexists(replaced) else folder
        check_is_trusted(folder)
        text = read_text(folder)
        parse(text, self.path)
        return os.fsencode(folder) + b"\0" + text

    def tell_manifest(self, data: bytes) -> Manifest:
        """Return the manifest on every rank; `data` is the text that rank 0 has read.  Collective."""
        ranks, length = self.communicator, np.array([len(data)], np.int64)
        ranks.bcast(length, 0)
        message = np.empty(int(length[0]), np.uint8)
        if ranks.rank == 0:
            message[...] = np.frombuffer(data, np.uint8)
        ranks.bcast(message, 0)
        folder, _, text = message.tobytes().partition(b"\0")
        self._folder, self.manifest = os.fsdecode(folder), parse(text, self.path)
        shards, by_node = self.manifest.shards, np.argsort(ranks.node_of, kind="stable")
        spread = np.arange(len(shards)) * max(len(by_node), len(shards)) // len(shards) % len(by_node)
        self.readers = [shard.writer for shard in shards] if self.same_ranks else by_node[spread].tolist()
        return self.manifest

    def read_shards(self, names: Collection[str]) -> None:
        """Read this rank's shards, whole; keep the arrays below some names, and the per-rank data.

        Raises:
            CheckpointDamagedError: for another size or checksum than the manifest says, or missing arrays.
        """
        of_each, me = self.manifest.of_each_rank, self.communicator.rank
        rows = [path for path, item in of_each.items() if item.copies == ROWS]
        self._own_table = np.zeros((4 + len(rows), self.manifest.ranks if of_each else 0), np.int64)
        for number, shard in enumerate(self.manifest.shards):
            if self.readers[number] == me:
                entries = self.manifest.entries_of(number).items()
                selection = {name: entry for name, entry in entries if name.partition("/")[0] in names}
                file = os.path.join(self._folder, shard_name(number))
                self.arrays[number], blocks = read_shard(file, shard.nbytes, shard.checksum, selection)
                for rank in [rank for rank in blocks if rank < self._own_table.shape[1]]:
                    own = self.owns[rank] = Own(blocks[rank], self.path)
                    check_own(own, self.manifest)
                    sizes = own.data.size, own.line.size, *[own.values[path][0] for path in rows]
                    self._own_table[:, rank] = 1, me, *sizes

    def note_owns(self) -> None:
        """Note which rank has read the data of each rank that saved; CheckpointDamagedError if data are missing."""
        table = self._own_table
        if not (table[0] == 1).all():
            raise damaged(self.path, "more or less of a rank than it had for itself")
        rows = [path for path, item in self.manifest.items.items() if item.copies == ROWS]
        self.reader_of, self.rows = table[1], dict(zip(rows, table[4:], strict=True))
        if self.communicator.rank in self.owns:
            self.own = self.owns[self.communicator.rank]

    def tell_owns(self, call: Call) -> None:
        """Make `own` and `values`.  Collective; the ranks expect one more agreement then.

        Raises:
            CheckpointDamagedError: on every rank, if the data of a rank are missing.
        """
        ranks, table, me = self.communicator, self._own_table, self.communicator.rank
        call.expect_more()
        if not table.size:
            return
        ranks.allreduce(table)
        self.note_owns()
        call.agree("find what each rank had")
        nearest = np.arange(ranks.size) % table.shape[1]
        readers, lengths = table[1][nearest], table[2 if self.same_ranks else 3][nearest]
        if self.same_ranks and (readers == np.arange(ranks.size)).all():
            received = self.owns[me].data
        else:
            owns = [self.owns[rank] for rank in nearest[readers == me].tolist()]
            pieces = [own.data if self.same_ranks else own.line for own in owns]
            counts = np.where(readers == me, lengths, 0), np.where(np.arange(ranks.size) == readers[me], lengths[me], 0)
            received = np.empty(int(lengths[me]), np.uint8)
            ranks.alltoallv(np.concatenate([_NOTHING, *pieces]), counts[0].tolist(), received, counts[1].tolist())
        call.expect_more()
        if self.same_ranks:
            self.own = Own(received, self.path)
        self.values = self.own.values if self.same_ranks else values_in(received, self.path)


def check_own(own: Own, manifest: Manifest) -> None:
    """Raise CheckpointDamagedError unless the data of a rank are as the manifest says."""
    of_each = manifest.of_each_rank
    if own.values.keys() != {path for path, item in of_each.items() if item.has_lines}:
        raise damaged(own.where, "other plain values of a rank than the manifest names")
    for path, item in of_each.items():
        if item.is_array:
            array = array_of(own, path, manifest)
            if item.copies == ROWS and (not array.ndim or array.shape[1:] != item.shape[1:]):
                raise damaged(own.where, f"rows of another shape than the others of {path[:80]!r}")


def array_of(own: Own, path: str, manifest: Manifest) -> Array:
    """Return an array of a rank; CheckpointDamagedError for another size than the manifest says."""
    item = manifest.items[path]
    return own.array(path, item.dtype, None if item.has_lines else item.shape)


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
    ranks, staged = source.communicator, {}
    for path, variable in targets.items():
        item = source.manifest.items[path]
        aggregation = _aggregation(item, variable)
        is_kept = item.copies not in (ONE, ROWS) and item.copies == aggregation
        if item.copies == OWN or (is_kept and source.same_ranks):  # this rank gets its own copy back
            array = array_of(source.own, path, source.manifest)
        elif item.copies == ROWS:
            array = _rows(source, path, item)
        else:
            array = (_total if item.copies in ("SUM", "MEAN") else _copy)(source, path, item)
            if aggregation == "SUM":
                array = share_of(array, ranks.rank, ranks.size)
        if variable is None:
            staged[path] = array
        else:
            store(variable, array)
    return staged


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
    ranks, parts = source.communicator, [(source.readers[part[0]], *part) for part in item.parts]
    if item.is_of_each_rank:
        parts = [(int(source.reader_of[0]), -1, 0, item.elements)]
    array = np.empty(item.elements, _dtype(item))
    for root, shard, start, stop in parts:
        if root == ranks.rank:
            stored = array_of(source.owns[0], path, source.manifest) if shard < 0 else source.arrays[shard].pop(path)
            if len(parts) == 1:
                array = stored.reshape(-1)  # which need not be copied
            else:
                array[start:stop] = stored
        if stop > start:
            ranks.bcast(array[start:stop], root)
    return array.reshape(item.shape)


@quietly
def _total(source: Reading, path: str, item: Item) -> Array:
    """Return the sum or mean of all copies: added in rank order by each reader, then by all."""
    dtype = wire_dtype(_dtype(item))
    if dtype.kind not in "iufc":  # of bools, their number; of the smallest floats
        dtype = np.dtype(np.int32 if dtype.kind == "b" else np.float32)
    total = np.zeros(item.shape, dtype)
    for _, own in sorted(source.owns.items()):
        total += array_of(own, path, source.manifest).astype(dtype, copy=False)
    if total.size:
        source.communicator.allreduce(total.reshape(-1))
    return (total / source.manifest.ranks if item.copies == "MEAN" else total).astype(_dtype(item))


def _rows(source: Reading, path: str, item: Item) -> Array:
    """Return this rank's part of a global array: the next rows, equally many on each rank but the last ranks."""
    ranks, counts, readers = source.communicator, source.rows[path], source.reader_of
    ends = np.cumsum(counts)
    begins, total, length = ends - counts, int(ends[-1]), max(1, -(-int(ends[-1]) // ranks.size))
    outgoing: list[list[Array]] = [[_NOTHING] for _ in range(ranks.size)]
    for saved, own in sorted(source.owns.items()):
        block, begin = array_of(own, path, source.manifest), int(begins[saved])
        for rank in range(begin // length, -(-int(ends[saved]) // length)):
            outgoing[rank].append(_bytes(block[max(0, rank * length - begin) : (rank + 1) * length - begin]))
    first = min(ranks.rank * length, total)
    array = np.empty((min(length, total - first), *item.shape[1:]), _dtype(item))
    lows, highs = np.clip(begins, first, first + len(array)) - first, np.clip(ends, first, first + len(array)) - first
    sources = np.flatnonzero(highs > lows)
    sources = sources[np.argsort(readers[sources], kind="stable")]  # the order of arrival
    places = [_bytes(array[lows[saved] : highs[saved]]) for saved in sources]
    receive_counts = np.zeros(ranks.size, np.int64)
    np.add.at(receive_counts, readers[sources], np.array([place.size for place in places], np.int64))
    received = np.empty(array.nbytes, np.uint8)
    send_counts = [sum(piece.size for piece in pieces) for pieces in outgoing]
    sent = np.concatenate([piece for pieces in outgoing for piece in pieces])
    ranks.alltoallv(sent, send_counts, received, receive_counts.tolist())
    for place in places:
        place[...], received = np.split(received, [place.size])
    return array


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8) if array.nbytes else _NOTHING
