"""Who reads which part of a checkpoint, and how each rank gets what it had for itself.

Rank 0 reads the manifest.  Each shard is read by one rank of the job: on as many ranks as saved, by the one that has
written it; else the shards are spread over the nodes.  So each byte is read once, and then sent: networks are faster
than the file system that the nodes share.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.checkpoint.saving import REPLACED
from mpistrategy.checkpoint.storage.files import check_is_trusted, damaged
from mpistrategy.checkpoint.storage.manifest import ROWS, Manifest, is_checkpoint, parse, read_text
from mpistrategy.checkpoint.storage.shards import MOST_BYTES, Own, read_shard, shard_name, values_in
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
        arrays: the arrays that were saved once and that this rank has read, by shard and by the name that they have
            there.
        owns: the bytes that this rank has read of what ranks that saved had for themselves, by rank.
        reader_of: the rank that has read what each rank that saved had for itself; empty if there is nothing.
        rows: by path, how many rows of a global array each rank that saved had.
        own: what this rank had for itself, on as many ranks as saved; None on another number.
        first: the values of the first rank that saved.
        nearest: those of this rank; if it was not there, those of another one.
    """

    manifest: Manifest
    readers: list[int]

    def __init__(self, communicator: Ranks, path: str) -> None:
        self.communicator = communicator
        self.path = path
        self.arrays: dict[int, dict[str, Array]] = {}
        self.owns: dict[int, Array] = {}
        self.reader_of: Array = np.empty(0, np.int64)
        self.rows: dict[str, Array] = {}
        self.own: Own | None = None
        self.first: dict[str, Any] = {}
        self.nearest: dict[str, Any] = {}
        self._text = self._folder = self._first = b""
        self._nearest: Array = _NOTHING
        self._told: Array = np.empty((0, 0), np.int64)
        self._lines: dict[int, Array] = {}

    @property
    def same_ranks(self) -> bool:
        """Whether as many ranks saved as there are now."""
        return self.manifest.ranks == self.communicator.size

    def own_of(self, rank: int) -> Own:
        """Return what a rank that saved had for itself, where it was read."""
        return Own(self.owns[rank], self.path)

    # ------------------------------------------------------------------------------------------- the manifest

    def read_manifest(self) -> None:
        """Read the manifest, on rank 0."""
        folder = self.path
        if not os.path.lexists(folder):  # a job has ended between the two renames
            parent, name = os.path.split(folder)
            replaced = os.path.join(parent, REPLACED.format(name))
            folder = replaced if is_checkpoint(replaced) else folder
        check_is_trusted(folder)
        self._text = read_text(folder)
        parse(self._text, self.path)
        self._folder = os.fsencode(folder)

    def tell_manifest(self) -> Manifest:
        """Return the manifest on every rank.  Collective."""
        self._folder, self._text = self._from(0, self._folder), self._from(0, self._text)
        self.manifest = parse(self._text, self.path)
        shards, by_node = self.manifest.shards, np.argsort(self.communicator.node_of, kind="stable")
        spread = np.arange(len(shards)) * max(len(by_node), len(shards)) // len(shards) % len(by_node)
        self.readers = [shard.writer for shard in shards] if self.same_ranks else by_node[spread].tolist()
        return self.manifest

    # ------------------------------------------------------------------------------------------- shards

    def read_shards(self, names: Collection[str]) -> None:
        """Read the shards that this rank reads, whole; keep the arrays below some names, and what ranks have.

        Raises:
            CheckpointDamagedError: for another size or checksum than the manifest says, or missing arrays.
        """
        of_each, manifest = self.manifest.of_each_rank, self.manifest
        rows = [path for path, item in of_each.items() if item.copies == ROWS]
        self._told = np.zeros((4 + len(rows), manifest.ranks if of_each else 0), np.int64)
        mine = [number for number, reader in enumerate(self.readers) if reader == self.communicator.rank]
        for number in mine:
            self._read_shard(number, names)
        for rank in self.owns:
            own = self.own_of(rank)
            check_own(own, manifest)
            self._lines[rank] = own.line
            counts = [own.values[path][0] for path in rows]
            self._told[:, rank] = 1, self.communicator.rank, self.owns[rank].size, own.line.size, *counts

    def _read_shard(self, number: int, names: Collection[str]) -> None:
        shard, path = self.manifest.shards[number], os.path.join(os.fsdecode(self._folder), shard_name(number))
        entries = self.manifest.entries_of(number)
        wanted = {path: entry for path, entry in entries.items() if path.partition("/")[0] in names}
        self.arrays[number], owns = read_shard(path, shard.nbytes, shard.checksum, wanted)
        self.owns |= {rank: data for rank, data in owns.items() if rank < self._told.shape[1]}

    def tell_owns(self, call: Call) -> None:
        """Send each rank what it had for itself, or the values of another rank: see `parse_owns`.  Collective.

        Raises:
            CheckpointDamagedError: on every rank, if what a rank had is nowhere.
        """
        communicator, told = self.communicator, self._told
        if not told.size:
            return
        me, size, ranks = communicator.rank, communicator.size, told.shape[1]
        communicator.allreduce(told)
        rows = [path for path, item in self.manifest.items.items() if item.copies == ROWS]
        self.reader_of, self.rows = told[1], dict(zip(rows, told[4:], strict=True))
        call.expect_more()
        if not (told[0] == 1).all() or any(sum(counts.tolist()) > MOST_BYTES for counts in told[4:]):
            raise damaged(self.path, "more or less of a rank than it had for itself")
        call.agree("find what each rank had")
        self._first = self._from(int(self.reader_of[0]), self._lines.get(0, _NOTHING).tobytes())
        nearest = np.arange(size) % ranks
        blocks, lengths = (self.owns, told[2]) if self.same_ranks else (self._lines, told[3])
        readers = self.reader_of[nearest]
        if self.same_ranks and (readers == np.arange(size)).all():
            self._nearest = self.owns[me]
            return
        sent = [blocks[rank] for rank in nearest[readers == me].tolist()]
        counts, taken = np.where(readers == me, lengths[nearest], 0), np.zeros(size, np.int64)
        taken[readers[me]] = lengths[nearest[me]]
        self._nearest = np.empty(int(taken.sum()), np.uint8)
        communicator.alltoallv(np.concatenate([_NOTHING, *sent]), counts.tolist(), self._nearest, taken.tolist())

    def parse_owns(self) -> None:
        """Make `own`, `first` and `nearest`, and the shapes of global arrays, of what was told."""
        if not self._told.size:
            return
        self.first = values_in(np.frombuffer(self._first, np.uint8), self.path)
        self.own = Own(self._nearest, self.path) if self.same_ranks else None
        self.nearest = values_in(self._nearest, self.path) if self.own is None else self.own.values
        for path, counts in self.rows.items():
            item = self.manifest.items[path]
            self.manifest.items[path] = dataclasses.replace(item, shape=(int(counts.sum()), *item.shape[1:]))

    def _from(self, root: int, data: bytes) -> bytes:
        """Return the bytes of one rank.  Collective."""
        length = np.array([len(data)], np.int64)
        self.communicator.bcast(length, root)
        buffer = np.empty(int(length[0]), np.uint8)
        if self.communicator.rank == root:
            buffer[...] = np.frombuffer(data, np.uint8)
        self.communicator.bcast(buffer, root)
        return buffer.tobytes()


def check_own(own: Own, manifest: Manifest) -> None:
    """Raise CheckpointDamagedError unless a rank has for itself what the manifest says."""
    expected = {path for path, item in manifest.of_each_rank.items() if item.has_lines}
    if own.values.keys() != expected:
        raise damaged(own.where, "other plain values of a rank than the manifest names")
    for path, item in manifest.of_each_rank.items():
        if item.is_array:
            array = array_of(own, path, manifest)
            if item.copies == ROWS and (not array.ndim or array.shape[1:] != item.shape[1:]):
                raise damaged(own.where, f"rows of another shape than the others of {path[:80]!r}")


def array_of(own: Own, path: str, manifest: Manifest) -> Array:
    """Return an array of a rank; CheckpointDamagedError for another size than the manifest says."""
    item = manifest.items[path]
    return own.array(path, item.dtype, None if item.has_lines else item.shape)
