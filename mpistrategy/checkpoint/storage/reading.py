"""Reading one shard of a checkpoint, as its manifest describes it: sizes first, then all bytes, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.checkpoint.storage.files import Folder, OpenFile, checksum_of
from mpistrategy.checkpoint.storage.manifest import Item, Manifest, bad, shard_name
from mpistrategy.checkpoint.storage.plain_values import dtype_of
from mpistrategy.checkpoint.storage.shards import MOST_BYTES, byte_count, parsed
from mpistrategy.errors import CheckpointReadError


class OpenShard:
    """A shard that is open, and has the arrays that the manifest speaks of; whether its bytes are right is not known.

    Args:
        file: the open file.
        checksum: of all its bytes.
        items: the arrays in it.

    Attributes:
        items: the same.
        stored: where they lie in it.

    Raises:
        CheckpointDamagedError: unless it has them.
    """

    def __init__(self, file: OpenFile, checksum: str, items: Mapping[str, Item]) -> None:
        self.file = file
        self.stored = parsed(file.read, file.size, file.path)
        self._checksum = checksum
        self.items = items
        for path, item in items.items():
            nbytes = byte_count(item.shape, dtype_of(item.dtype))
            if path not in self.stored or self.stored[path].nbytes != nbytes:
                raise bad(file.path, f"no {nbytes} bytes for {path[:80]!r}")

    def check(self) -> None:
        """Raise CheckpointDamagedError unless all bytes are those that were written."""
        self.read(())

    def read(self, wanted: Iterable[str]) -> dict[str, Array]:
        """Return arrays, in native byte order, once all bytes were found right; no memory is taken for others.

        Raises:
            CheckpointDamagedError: as `check`.
            CheckpointReadError: where there is no memory for them.
        """
        places = sorted((self.stored[path].start, path) for path in wanted)
        arrays = {path: self._room_for(path) for _, path in places}
        buffers = [(start, arrays[path].reshape(-1).view(np.uint8)) for start, path in places if arrays[path].nbytes]
        checksum, begin, place = checksum_of(), 0, 0
        for piece in self.file.pieces(0, self.file.size):
            checksum.update(piece)
            end, data = begin + len(piece), np.frombuffer(piece, np.uint8)
            while place < len(buffers) and buffers[place][0] < end:
                start, buffer = buffers[place]
                first, last = max(start, begin), min(start + buffer.size, end)
                buffer[first - start : last - start] = data[first - begin : last - begin]
                if start + buffer.size > end:
                    break  # the rest is in the next piece
                place += 1
            begin = end
        if checksum.hexdigest() != self._checksum:
            raise bad(self.file.path, "a file with another checksum than it was written with")
        return {path: array.astype(array.dtype.newbyteorder("="), copy=False) for path, array in arrays.items()}

    def _room_for(self, path: str) -> Array:
        item = self.items[path]
        try:
            return np.empty(item.shape, dtype_of(item.dtype))
        except MemoryError as error:
            raise CheckpointReadError.at(
                "a checkpoint",
                found=f"no memory for {path[:80]!r}, {item.dtype}{list(item.shape)}",
                expected="room for what is restored",
            ) from error


@contextmanager
def open_shard(folder: Folder, manifest: Manifest, rank: int) -> Iterator[OpenShard]:
    """Open one shard.

    Raises:
        CheckpointDamagedError: unless the file has the size and the arrays that the manifest says.
    """
    name, shard = shard_name(rank), manifest.shards[rank]
    with ExitStack() as stack:
        try:
            file = stack.enter_context(folder.file(name, shard.nbytes, MOST_BYTES))
        except FileNotFoundError as error:
            raise bad(f"{folder.path}/{name}", "a missing file") from error
        yield OpenShard(file, shard.checksum, manifest.arrays_in(rank))
