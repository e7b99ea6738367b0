"""Who reads which part of a checkpoint, and what the ranks tell each other of it.

Rank 0 reads and parses the manifest.  Each shard is read by one rank of the job: on as many ranks as saved, by the one
that has written it; else the shards are spread over the nodes.  So each byte is read once, and then sent: networks are
faster than the file system that the nodes share.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.checkpoint.saving import REPORT, replaced_names
from mpistrategy.checkpoint.storage.files import Folder
from mpistrategy.checkpoint.storage.manifest import NAME, Manifest, bad, of_contents, parse, read_text
from mpistrategy.checkpoint.storage.shards import VALUES, loads, open_shard
from mpistrategy.errors import CheckpointMissingError
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.own_files import is_trusted


class Reading:
    """A checkpoint that some ranks read together.

    Args:
        communicator: the ranks.
        path: the checkpoint.

    Attributes:
        communicator: as given.
        manifest: what all ranks know of the manifest: no files, and no values that each rank had for itself.
        readers: the rank that reads each shard.
        shard_of: the shard that has what each rank that saved had for itself; empty if there is nothing.
        arrays: the arrays that this rank has read, by shard and by the name that they have there.
    """

    manifest: Manifest
    readers: Array
    shard_of: Array

    def __init__(self, communicator: Communicator, path: str) -> None:
        self.communicator = communicator
        self.arrays: dict[int, dict[str, Array]] = {}
        self._path = path
        self._folder = ""
        self._told = b""
        self._files: dict[int, tuple[int, str]] = {}
        self._whole: Manifest | None = None
        self._lines: dict[int, bytes] = {}

    @property
    def same_ranks(self) -> bool:
        """Whether as many ranks saved as there are now."""
        return self.manifest.ranks == self.communicator.size

    def members_of(self, shard: int) -> Array:
        """Return the ranks of which a shard has what they had for themselves, in the order in which it is there."""
        return np.flatnonzero(self.shard_of == shard)

    def parts_of(self, shard: int, path: str) -> list[Array]:
        """Return the flat array of each of `members_of`, on the rank that has read the shard."""
        stack, item = self.arrays[shard][path], self.manifest.items[path]
        if not item.shapes:
            return list(stack)
        return np.split(stack, np.cumsum(item.counts(self.members_of(shard)))[:-1])

    # ------------------------------------------------------------------------------------------- the manifest

    def read_manifest(self) -> None:
        """Read the manifest, on rank 0."""
        with Folder.parent_of(self._path) as parent:
            name = _name_of(parent, os.path.basename(self._path))
            with parent.trusted_folder(name) as folder:
                whole = self._whole = parse(read_text(folder), self._path)
        more = {"folder": name, "shards": len(whole.shards)}
        self._told = json.dumps(whole.contents() | more, separators=(",", ":")).encode()

    def tell_manifest(self) -> Manifest:
        """Return on every rank what all need of the manifest, and tell each reader of its shards.  Collective."""
        communicator, whole = self.communicator, self._whole
        contents = loads(self._from(0, self._told), self._path)
        manifest = self.manifest = of_contents(contents)
        self._folder, count = contents["folder"], contents["shards"]
        numbers = np.empty(count + (manifest.ranks if manifest.of_each_rank or manifest.lines else 0), np.int32)
        if whole is not None:
            self.shard_of = whole.shard_of[: numbers.size - count]
            numbers[:count], numbers[count:] = self._readers(count), self.shard_of
        communicator.bcast(numbers, 0)
        self.readers, self.shard_of = numbers[:count], numbers[count:]
        mine = np.flatnonzero(self.readers == communicator.rank)
        files, blocks = np.zeros(mine.size, REPORT), None
        if whole is not None:
            reports = np.zeros(count, REPORT)
            for number, shard in enumerate(whole.shards):
                reports[number] = shard.nbytes, np.frombuffer(bytes.fromhex(shard.checksum), np.uint8)
            blocks = [reports[:0]] * communicator.size
            for reader in np.unique(self.readers).tolist():
                blocks[reader] = reports[self.readers == reader]
        communicator.scatter_blocks(blocks, files, 0)
        found = zip(files["nbytes"].tolist(), files["checksum"], strict=True)
        self._files = {
            number: (nbytes, checksum.tobytes().hex())
            for number, (nbytes, checksum) in zip(mine.tolist(), found, strict=True)
        }
        return manifest

    def _readers(self, count: int) -> Array:
        """Return which rank is to read each of the shards."""
        communicator = self.communicator
        if self.same_ranks and self.shard_of.size:
            found = np.zeros(count, np.int32)
            first, indices = np.unique(self.shard_of, return_index=True)
            found[first] = indices
            return found
        nodes = np.asarray(communicator.node_of)
        by_node = np.argsort(nodes, kind="stable")
        begins = np.cumsum(np.bincount(nodes)) - np.bincount(nodes)
        within = np.empty(communicator.size, np.int64)
        within[by_node] = np.arange(communicator.size) - begins[nodes[by_node]]
        spread = np.lexsort((nodes, within))  # the first rank of each node, then the second ones
        return spread[np.arange(count) % communicator.size]

    # ------------------------------------------------------------------------------------------- shards

    def read_shards(self, names: Collection[str]) -> None:
        """Read the shards that this rank reads, whole; keep the arrays below some names.

        Raises:
            CheckpointDamagedError: for another size or checksum than the manifest says, or missing arrays.
        """
        if not self._files:
            return
        with Folder.parent_of(self._path) as parent, parent.trusted_folder(self._folder) as folder:
            for number, (nbytes, checksum) in self._files.items():
                members = self.members_of(number)
                entries = self.manifest.entries_of(number, members)
                wanted = [name for name, entry in entries.items() if entry.path.partition("/")[0] in names]
                has_lines = bool(members.size and self.manifest.lines)
                with open_shard(folder, number, nbytes, checksum, entries, members.size) as shard:
                    arrays = shard.read([*wanted, VALUES] if has_lines else wanted)
                    if has_lines:
                        self._lines |= zip(members.tolist(), shard.lines_in(arrays.pop(VALUES)), strict=True)
                self.arrays[number] = arrays

    # ------------------------------------------------------------------------------------------- plain values

    def tell_values(self) -> tuple[bytes, bytes]:
        """Return the line of the first rank that saved, and the one of the rank nearest to this one.  Collective.

        That is this rank, if it was there.  Nothing, if there are no values that each rank had for itself.
        """
        communicator, manifest = self.communicator, self.manifest
        if not manifest.lines:
            return b"", b""
        keepers = self.readers[self.shard_of]
        first = self._from(int(keepers[0]), self._lines.get(0, b""))
        me, nearest = communicator.rank, np.arange(communicator.size) % manifest.ranks
        line = self._lines.get(int(nearest[me]), b"")
        roots = keepers[nearest]
        for root in np.unique(roots[roots != np.arange(communicator.size)]).tolist():
            length, lines, lengths = np.zeros(int(root == roots[me] != me), np.int64), None, None
            if root == me:
                sent = [b"" if rank == me else self._lines.get(near, b"") for rank, near in enumerate(nearest.tolist())]
                lines = [np.frombuffer(each, np.uint8) for each in sent]
                lengths = [np.array([each.size][: each.size], np.int64) for each in lines]
            communicator.scatter_blocks(lengths, length, root)
            block = np.empty(int(length.sum()), np.uint8)
            communicator.scatter_blocks(lines, block, root)
            line = block.tobytes() or line
        return first, line

    def parsed(self, lines: tuple[bytes, bytes]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what is in the lines of `tell_values`; CheckpointDamagedError for other values than the manifest's."""
        if not self.manifest.lines:
            return {}, {}
        first, nearest = (loads(line, self._path) for line in lines)
        for values in (first, nearest):
            if not isinstance(values, dict) or values.keys() != self.manifest.lines.keys():
                raise bad(self._path, "other plain values of a rank than the manifest names")
        return first, nearest

    def _from(self, root: int, data: bytes) -> bytes:
        """Return the bytes of one rank.  Collective."""
        length = np.array([len(data)], np.int64)
        self.communicator.bcast(length, root)
        buffer = np.empty(int(length[0]), np.uint8)
        if self.communicator.rank == root:
            buffer[...] = np.frombuffer(data, np.uint8)
        self.communicator.bcast(buffer, root)
        return buffer.tobytes()


def _name_of(parent: Folder, name: str) -> str:
    """Return the name of the checkpoint's folder: a replaced one if a job ended between the two renames."""
    if parent.kind_of(name):
        return name
    for other in parent.names():
        if replaced_names(name).fullmatch(other) and parent.kind_of(other) == "folder":
            with parent.folder(other) as folder:
                if folder.kind_of(NAME) == "file" and is_trusted(folder.state, parent.state):
                    return other
    raise CheckpointMissingError.at(
        "a checkpoint", found=f"nothing at {os.path.join(parent.path, name)!r}", expected="a checkpoint"
    )
