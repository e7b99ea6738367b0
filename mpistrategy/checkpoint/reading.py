"""Which rank reads which part of a checkpoint, and how each rank gets its per-rank data.

Rank 0 reads the manifest.  Each shard is read by one rank: by its writer if the job has as many ranks as saved; else
the shards are spread over the nodes.  So each byte is read once, and then sent: networks are faster than the file
system that the nodes share.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.checkpoint.saving import REPLACED
from mpistrategy.checkpoint.storage.files import check_is_trusted, damaged
from mpistrategy.checkpoint.storage.manifest import ROWS, Manifest, parse, read_text
from mpistrategy.checkpoint.storage.shards import Own, read_shard, shard_name, values_in
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.ranks import Ranks

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
        own: the data of this rank, on as many ranks as saved; None on another number.
        values: the plain values of this rank; of another rank if this rank did not save.
    """

    manifest: Manifest
    readers: list[int]

    def __init__(self, communicator: Ranks, path: str) -> None:
        self.communicator = communicator
        self.path = path
        self.arrays: dict[int, dict[str, Array]] = {}
        self.owns: dict[int, Own] = {}
        self.reader_of: Array = np.empty(0, np.int64)
        self.rows: dict[str, Array] = {}
        self.own: Own | None = None
        self.values: dict[str, Any] = {}
        self._folder = ""
        self._blocks: dict[int, Array] = {}
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
                self._blocks |= {rank: block for rank, block in blocks.items() if rank < self._own_table.shape[1]}
        for rank, block in self._blocks.items():
            own = self.owns[rank] = Own(block, self.path)
            check_own(own, self.manifest)
            self._own_table[:, rank] = 1, me, block.size, own.line.size, *[own.values[path][0] for path in rows]

    def note_owns(self) -> None:
        """Note which rank has read the data of each rank that saved; CheckpointDamagedError if data are missing."""
        table = self._own_table
        if not (table[0] == 1).all():
            raise damaged(self.path, "more or less of a rank than it had for itself")
        rows = [path for path, item in self.manifest.items.items() if item.copies == ROWS]
        self.reader_of, self.rows = table[1], dict(zip(rows, table[4:], strict=True))
        self.own = self.owns.get(self.communicator.rank) if self.same_ranks else None

    def tell_owns(self, call: Call) -> None:
        """Make `own` and `values`.  Collective; the ranks expect one more agreement then.

        Raises:
            CheckpointDamagedError: on every rank, if the data of a rank are missing.
        """
        ranks, table = self.communicator, self._own_table
        call.expect_more()
        if not table.size:
            return
        ranks.allreduce(table)
        self.note_owns()
        call.agree("find what each rank had")
        nearest = np.arange(ranks.size) % table.shape[1]
        readers, lengths = table[1][nearest], table[2 if self.same_ranks else 3][nearest]
        blocks = self._blocks if self.same_ranks else {rank: own.line for rank, own in self.owns.items()}
        pieces = [blocks[rank] for rank in nearest[readers == ranks.rank].tolist()]
        receive_counts = np.where(np.arange(ranks.size) == readers[ranks.rank], lengths[ranks.rank], 0)
        received = np.empty(int(lengths[ranks.rank]), np.uint8)
        send_counts = np.where(readers == ranks.rank, lengths, 0)
        if self.same_ranks and (readers == np.arange(ranks.size)).all():
            received = blocks[ranks.rank]
        else:
            ranks.alltoallv(
                np.concatenate([_NOTHING, *pieces]), send_counts.tolist(), received, receive_counts.tolist()
            )
        call.expect_more()
        if self.same_ranks:
            self.own = Own(received, self.path)
        self.values = values_in(received, self.path) if self.own is None else self.own.values


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
