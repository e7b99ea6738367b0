"""Reading a checkpoint on all ranks: each shard by one rank; then the arrays go where they are needed.

1. Rank 0 reads the manifest, and tells the others.
2. Each shard is read by one rank, on as many ranks as saved by its writer, and its checksum is compared.  The readers
   are spread over the nodes.  So each byte is read once, and then sent: networks are faster than the file system that
   the nodes share.
3. Each rank gets the plain values that it had.  With these it can compare the checkpoint with its objects.
4. The arrays go to the ranks.

An array that was saved once goes to all ranks.  If each rank had a copy, each rank gets its own copy back; on another
number of ranks all ranks get the combined copies, and keep their shares of a sum.  The rows of a global array are split
again, equally many for each rank.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array, quietly, wire_dtype
from mpistrategy.checkpoint.files import check_is_trusted, damaged, reading
from mpistrategy.checkpoint.format import (
    COMBINED,
    LENGTH_BYTES,
    OWN,
    REPLACED,
    ROWS,
    Item,
    Items,
    Manifest,
    Parts,
    as_array,
    by_width,
    dtype_of,
    is_shape,
    loads,
    manifest_in,
    of_each_rank,
    parse,
    places,
    raw,
    read_shard,
    require,
    shard_name,
    shares,
)
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.objects.text import decoded, encoded
from mpistrategy.variables.variable import share_of

NOTHING = np.empty(0, np.uint8)


class Own:
    """The data of a rank, as its shard has them.

    Args:
        data: the bytes: the arrays, those of the widest dtypes first; the values as JSON; the length of that.
        items: the arrays and values that differ between the ranks.
        where: the name of the checkpoint, for errors.

    Attributes:
        data: as given.
        end: the bytes of the values and the length: the data of a rank without arrays.
        values: by path; of arrays whose shape may differ between ranks, the shape.
        arrays: by path, in native byte order, not copied where that can be.

    Raises:
        CheckpointDamagedError: for other data than the items say.
    """

    def __init__(self, data: Array, items: Items, where: str) -> None:
        self.data = rest = data
        length = int.from_bytes(data[-LENGTH_BYTES:].tobytes(), "little")
        self.end: Array = data[data.size - LENGTH_BYTES - length :]
        self.values: dict[str, Any] = loads(self.end[:-LENGTH_BYTES].tobytes(), where)
        self.arrays: dict[str, Array] = {}
        try:
            for path in by_width(items):
                item = items[path]
                shape = self.values[path] if item.copies in (OWN, ROWS) else item.shape
                require(is_shape(shape, item.itemsize), "shape")
                require(item.copies != ROWS or tuple(shape[1:]) == item.shape[1:], "rows")
                part, rest = np.split(rest, [math.prod(shape) * item.itemsize])
                self.arrays[path] = as_array(part, item.dtype, shape)
            require(rest.size == self.end.size, "size")
        except (TypeError, ValueError, LookupError) as error:
            raise damaged(where, f"other data of a rank than the manifest names ({error!s:.80})") from error


_NO_DATA = Own(np.frombuffer(b"{}" + (2).to_bytes(LENGTH_BYTES, "little"), np.uint8), {}, "")


class Reading:
    """A checkpoint that some ranks read together.  Making it is collective.

    Args:
        ranks: the ranks.
        path: the checkpoint.
        names: of the objects whose arrays are kept; None for all.
        call: the public call.  The ranks expect one more agreement then.

    Attributes:
        ranks, path, call: as given.
        manifest: as all ranks know it.
        same_ranks: whether as many ranks saved as there are now.
        readers: the rank that reads each shard.
        parts: of each array that was saved once: `shares`.
        arrays: the parts that this rank has read, by path and first element.
        owns: the per-rank data that this rank has read, by the rank that saved them.
        own: the data of this rank; without arrays and of some rank, if not as many ranks saved.

    Raises:
        CheckpointMissingError, CheckpointReadError: if files are missing or cannot be read.
        CheckpointDamagedError: for a manifest of no save, and for another size or checksum than it says.
    """

    def __init__(self, ranks: Ranks, path: str, names: Collection[str] | None, call: Call) -> None:
        self.ranks = ranks
        self.path = path
        self.call = call
        text = ""
        if ranks.rank == 0:
            above, name = os.path.split(path)
            # A job may have ended between the two renames.
            folder = path if os.path.lexists(path) else os.path.join(above, REPLACED.format(name))
            with reading(call.where, path):
                check_is_trusted(folder)
                text = f"{folder}\0{decoded(manifest_in(folder))}"
        call.agree("read a manifest")
        folder, _, manifest = ranks.allgather_text(text)[0].partition("\0")
        self.arrays: dict[tuple[str, int], Array] = {}
        self.owns: dict[int, Own] = {}
        call.expect_more()
        with reading(call.where, path):
            self.manifest: Manifest = parse(encoded(manifest), path)
            self.same_ranks: bool = self.manifest.ranks == ranks.size
            readers, shard_of = places(ranks.node_of, len(self.manifest.shards), self.manifest.ranks)
            self.readers: list[int] = readers
            self.parts: Parts = shares(self.manifest.items, len(readers))
            for number, reader in enumerate(readers):
                if reader == ranks.rank:
                    saved = np.flatnonzero(shard_of == number).tolist() if self.manifest.own else []
                    self._read(folder, number, saved, self.manifest.names if names is None else names)
        call.agree("read shards", patiently=True)
        call.expect_more()
        self.own: Own = self.owns.get(ranks.rank, _NO_DATA)
        if self.manifest.own and not (self.same_ranks and len(readers) == ranks.size):  # else each has read its own
            read = {rank: each.data if self.same_ranks else each.end for rank, each in self.owns.items()}
            outgoing = [read.get(rank if rank < self.manifest.ranks else 0, NOTHING) for rank in range(ranks.size)]
            received, _ = ranks.exchange(call, np.concatenate([NOTHING, *outgoing]), [part.size for part in outgoing])
            call.expect_more()
            self.own = Own(received, of_each_rank(self.manifest.items) if self.same_ranks else {}, path)

    def _read(self, folder: str, number: int, saved: Sequence[int], names: Collection[str]) -> None:
        """Read a shard whole, with the data of some ranks; keep these, and the arrays below some names."""
        items = self.manifest.items
        sizes: dict[Any, int] = {rank: self.manifest.own[rank] for rank in saved}
        for path, parts in self.parts.items():
            for shard, begin, stop in parts:
                if shard == number:
                    sizes[path, begin] = (stop - begin) * items[path].itemsize
        for key, data in read_shard(os.path.join(folder, shard_name(number)), *self.manifest.shards[number], sizes):
            if isinstance(key, int):
                self.owns[key] = Own(data, of_each_rank(items), self.path)
            elif key[0].partition("/")[0] in names:
                self.arrays[key] = as_array(data, items[key[0]].dtype, [-1])


def fetched(source: Reading, path: str, copies: str) -> Array:
    """Return the array of an item, as this rank gets it.  Collective.

    Args:
        source, path: the checkpoint, and where the array is in it.
        copies: how copies are saved (`Item.copies`) there that the array goes to.
    """
    ranks, item = source.ranks, source.manifest.items[path]
    if item.copies == OWN or (source.same_ranks and item.copies == copies in COMBINED):
        return source.own.arrays[path]  # this rank gets its own copy back
    if item.copies == ROWS:
        return _rows(source, path, item)
    array = (_total if item.copies in COMBINED else _copy)(source, path, item)
    return share_of(array, ranks.rank, ranks.size) if copies == "SUM" else array


def _copy(source: Reading, path: str, item: Item) -> Array:
    """Return the only copy on all ranks; the ranks that have read its parts send them."""
    array, parts = np.empty(math.prod(item.shape), dtype_of(item.dtype)), source.parts.get(path, [])
    for number, begin, stop in parts:
        root = source.readers[number]
        if root == source.ranks.rank and len(parts) == 1:
            array = source.arrays.pop((path, begin))  # which need not be copied
        elif root == source.ranks.rank:
            array[begin:stop] = source.arrays.pop((path, begin))
        source.ranks.bcast(array[begin:stop], root)
    return array.reshape(item.shape)


@quietly
def _total(source: Reading, path: str, item: Item) -> Array:
    """Return the sum or mean of all copies, or the first one: added in rank order by each reader, then by all."""
    dtype = wire_dtype(dtype_of(item.dtype))
    if dtype.kind not in "iufc":  # of bools, their number; of the smallest floats
        dtype = np.dtype(np.int32 if dtype.kind == "b" else np.float32)
    # -0.0: from 0.0 on, a copy's -0.0 would come back as 0.0
    total = np.asarray(-np.zeros(item.shape, dtype))
    for rank, own in sorted(source.owns.items()):
        if rank == 0 or item.copies != "ONLY_FIRST_REPLICA":
            total += own.arrays[path].astype(dtype, copy=False)
    source.ranks.allreduce(total.reshape(-1))
    return (total / source.manifest.ranks if item.copies == "MEAN" else total).astype(dtype_of(item.dtype))


def _rows(source: Reading, path: str, item: Item) -> Array:
    """Return this rank's part of a global array: the next rows, equally many on each rank but the last ranks."""
    ranks, axes = source.ranks, item.shape[1:]
    blocks = [own.arrays[path] for _, own in sorted(source.owns.items())]
    counts = [*map(int, ranks.allgather_text(str(sum(map(len, blocks)))))]  # readers are in the order of rows
    source.call.expect_more()
    length = -(-sum(counts) // ranks.size)
    stops = np.arange(1, ranks.size + 1) * length - sum(counts[: ranks.rank])
    sent = np.diff(np.clip(stops, 0, counts[ranks.rank]), prepend=0)
    received, taken = ranks.exchange(
        source.call, np.concatenate([NOTHING, *map(raw, blocks)]), sent.tolist(), math.prod(axes) * item.itemsize
    )
    return as_array(received, item.dtype, (sum(taken), *axes))
