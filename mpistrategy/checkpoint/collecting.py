"""Which ranks write a checkpoint, what they write, and how it comes to them from the other ranks.

One rank writes a small checkpoint, some on each node a large one.  Each writer writes one shard: some of the arrays
that are saved once, which it has already, and what a group of ranks has for itself.  All ranks make the same plan.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrategy.arrays.convert import host_array
from mpistrategy.arrays.dtypes import Array
from mpistrategy.checkpoint.state import State
from mpistrategy.checkpoint.storage.manifest import ONE, Item
from mpistrategy.checkpoint.storage.shards import own_pieces, pieces_of
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.ranks import Ranks

#: About how many bytes a writer writes where there are few: one for so many bytes.
BYTES_A_WRITER = 2**26
#: Larger arrays are split.
BYTES_A_PART = 2**26
#: The most writers of a node, and of the job if it has fewer nodes.  There are more where the ranks have so much for
#: themselves that a writer should not gather it.
MOST_A_NODE, MOST_WRITERS = 8, 1024


class Plan(NamedTuple):
    """Who writes what.

    Attributes:
        writers: the rank that writes each shard; the first is rank 0.
        writer_of: the rank that writes what each rank has for itself.
        shards: of each array that is saved once: `Item.shards`.
    """

    writers: list[int]
    writer_of: Array
    shards: dict[str, tuple[int, ...]]


def plan(node_of: Sequence[int], once: Mapping[str, Array], own_bytes: int) -> Plan:
    """Return who writes what.

    Args:
        node_of: the node of each rank.
        once: the arrays that are saved once, by path.
        own_bytes: what all ranks together have for themselves, in bytes.
    """
    nodes = max(node_of) + 1
    total = own_bytes + sum(array.nbytes for array in once.values())
    most = max(min(MOST_A_NODE * nodes, max(nodes, MOST_WRITERS)), _over(own_bytes, BYTES_A_WRITER))
    count = min(_over(total, BYTES_A_WRITER), most, len(node_of))
    writer_of = np.empty(len(node_of), np.int64)
    writers = []
    for group in np.array_split(np.argsort(node_of, kind="stable"), count):
        writers.append(int(group.min()))
        writer_of[group] = writers[-1]
    return Plan(writers, writer_of, _shards(once, count))


def _over(number: int, divisor: int) -> int:
    return max(1, -(-number // divisor))


def _shards(once: Mapping[str, Array], count: int) -> dict[str, tuple[int, ...]]:
    """Return where the arrays go: the largest first, each part of them to the shard with the fewest bytes."""
    loads = [(0, number) for number in range(count)]
    found = {}
    for path, array in sorted(once.items(), key=lambda item: -item[1].nbytes):
        parts = min(count, _over(array.nbytes, BYTES_A_PART), max(1, array.size))
        taken = [heapq.heappop(loads) for _ in range(parts)]
        found[path] = tuple(number for _, number in taken)
        for nbytes, number in taken:
            heapq.heappush(loads, (nbytes + array.nbytes // parts, number))
    return found


class Collected:
    """What the ranks save together, once they have agreed on what is saved once.  Making it is collective.

    When it is made, the ranks expect one more agreement: a rank that has no memory for its part tells the others.

    Args:
        state: this rank's objects.
        communicator: the ranks.
        call: the public call.

    Attributes:
        items: the table, with the shards of arrays that are saved once.
        writers: the rank that writes each shard.
        shard: the number of the shard that this rank writes; None if it writes none.
        pieces: the bytes of this shard.

    Raises:
        OptionError: on every rank, for more plain values of a rank than `restore` accepts.
    """

    def __init__(self, state: State, communicator: Ranks, call: Call) -> None:
        self._communicator = communicator
        self.items: dict[str, Item] = dict(state.items)
        once = {path: array for path, array in state.arrays.items() if self.items[path].copies == ONE}
        own, lengths = self._own(state, call), np.zeros(communicator.size, np.int64)
        if own:
            nbytes = sum(memoryview(piece).nbytes for piece in own)
            communicator.allgatherv(np.array([nbytes], np.int64), [1] * communicator.size, lengths)
        planned = plan(communicator.node_of, once, int(lengths.sum()))
        self.writers: list[int] = planned.writers
        self.shard: int | None = None
        if communicator.rank in self.writers:
            self.shard = self.writers.index(communicator.rank)
        for path, shards in planned.shards.items():
            self.items[path] = dataclasses.replace(self.items[path], shards=shards)
        gathered = self._gathered(own, lengths, planned.writer_of, call) if own else {}
        call.expect_more()  # parts of arrays that are not contiguous take memory
        self.pieces: list[Any] = []
        if self.shard is not None:
            self.pieces = list(pieces_of(self._parts(once), gathered))

    def _own(self, state: State, call: Call) -> list[Any]:
        """Return the bytes of what this rank has for itself; nothing if no rank has anything."""
        own = {path: item for path, item in self.items.items() if item.is_of_each_rank}
        if not own:
            return []
        call.expect_more()
        arrays = {path: host_array(state.arrays[path]) for path, item in own.items() if item.is_array}
        values: dict[str, Any] = {path: arrays[path].shape for path in arrays if own[path].has_lines}
        values |= {path: state.values[path] for path in own if path not in arrays}
        pieces = own_pieces(arrays, values, call.where)
        call.agree("take what each rank has")
        return pieces

    def _gathered(self, own: list[Any], lengths: Array, writer_of: Array, call: Call) -> dict[int, list[Any]]:
        """Return the bytes of what each rank of a group has for itself, on its writer; nothing on the other ranks."""
        me, size = self._communicator.rank, self._communicator.size
        group = np.flatnonzero(writer_of == me)
        if len(self.writers) == size:
            return {me: own}
        call.expect_more()
        counts, taken = np.zeros((2, size), np.int64)
        sent = np.empty(0, np.uint8)
        if writer_of[me] != me:
            sent = np.concatenate([np.frombuffer(piece, np.uint8) for piece in own])
            counts[writer_of[me]] = sent.size
        taken[group] = lengths[group]
        taken[me] = 0
        received = np.empty(int(taken.sum()), np.uint8)
        call.agree("gather what each rank has")
        self._communicator.alltoallv(sent, counts.tolist(), received, taken.tolist())
        blocks = np.split(received, np.cumsum(taken)[:-1])
        return {rank: own if rank == me else [blocks[rank]] for rank in group.tolist()}

    def _parts(self, once: Mapping[str, Array]) -> dict[str, Array]:
        """Return the arrays, and parts of them, in the shard that this rank writes."""
        found = {}
        for path, array in once.items():
            parts = self.items[path].parts
            for shard, start, stop in parts:
                if shard == self.shard:
                    found[path] = host_array(array if len(parts) == 1 else array.reshape(-1)[start:stop])
        return found
