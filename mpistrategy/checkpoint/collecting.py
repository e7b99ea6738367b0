"""Which ranks write a checkpoint, what they write, and how they get the data of the other ranks.

One rank writes a small checkpoint, some on each node a large one.  Each writer writes one shard: some of the arrays
that are saved once, which every rank has, and the per-rank data of a group of ranks.  All ranks make the same plan.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import host_array
from mpistrategy.arrays.dtypes import Array
from mpistrategy.checkpoint.state import State
from mpistrategy.checkpoint.storage.manifest import ONE
from mpistrategy.checkpoint.storage.shards import own_pieces, pieces_of
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.ranks import Ranks

#: A checkpoint gets one writer for so many bytes.
BYTES_A_WRITER = 2**26
#: Larger arrays are split.
BYTES_A_PART = 2**26
#: The most writers of a node, and of the job if it has fewer nodes.  There are more where the ranks have too much
#: per-rank data for one writer to gather.
MOST_A_NODE, MOST_WRITERS = 8, 1024


def plan(
    node_of: Sequence[int], once: Mapping[str, Array], own_bytes: int
) -> tuple[list[int], Array, dict[str, tuple[int, ...]]]:
    """Return the rank that writes each shard, the first is 0; the rank that writes each rank's data; `Item.shards`.

    Args:
        node_of: the node of each rank.
        once: the arrays that are saved once, by path.
        own_bytes: the bytes of the per-rank data of all ranks together.
    """
    nodes = max(node_of) + 1
    total = own_bytes + sum(array.nbytes for array in once.values())
    most = max(min(MOST_A_NODE * nodes, max(nodes, MOST_WRITERS)), _over(own_bytes, BYTES_A_WRITER))
    count = min(_over(total, BYTES_A_WRITER), most, len(node_of))
    groups = np.array_split(np.argsort(node_of, kind="stable"), count)
    writers = [int(group.min()) for group in groups]
    writer_of = np.empty(len(node_of), np.int64)
    for writer, group in zip(writers, groups, strict=True):
        writer_of[group] = writer
    loads, shards = [(0, number) for number in range(count)], {}
    for path, array in sorted(once.items(), key=lambda item: -item[1].nbytes):  # to the shards with the fewest bytes
        parts = min(count, _over(array.nbytes, BYTES_A_PART), max(1, array.size))
        loads_of_parts = [heapq.heappop(loads) for _ in range(parts)]
        shards[path] = tuple(number for _, number in loads_of_parts)
        for nbytes, number in loads_of_parts:
            heapq.heappush(loads, (nbytes + array.nbytes // parts, number))
    return writers, writer_of, shards


def _over(number: int, divisor: int) -> int:
    return max(1, -(-number // divisor))


def collect(state: State, communicator: Ranks, call: Call) -> tuple[list[int], list[Any] | None]:
    """Return the writers, and the bytes of the shard that this rank writes; None if it writes none.  Collective.

    The ranks have agreed on the items that are saved once; afterwards the state knows its shards.  The ranks expect one
    more agreement: a rank that has no memory for its part tells the other ranks.

    Raises:
        OptionError: on every rank, for more plain values of a rank than `restore` accepts.
    """
    me, size = communicator.rank, communicator.size
    once = {path: array for path, array in state.arrays.items() if state.items[path].copies == ONE}
    call.expect_more()
    own = _own(state, call.where)
    call.agree("take what each rank has")
    lengths = np.zeros(size, np.int64)
    if own:
        communicator.allgatherv(np.array([_nbytes(own)], np.int64), [1] * size, lengths)
    writers, writer_of, shards_of = plan(communicator.node_of, once, int(lengths.sum()))
    for path, shards in shards_of.items():
        state.items[path] = dataclasses.replace(state.items[path], shards=shards)
    call.expect_more()
    blocks = {me: own} if own else {}
    if own and len(writers) < size:
        send_counts, receive_counts = np.zeros((2, size), np.int64)
        outgoing, writer = np.empty(0, np.uint8), writer_of[me]
        if writer != me:
            outgoing = np.concatenate([np.frombuffer(piece, np.uint8) for piece in own])
            send_counts[writer] = outgoing.size
        group = np.flatnonzero((writer_of == me) & (np.arange(size) != me))
        receive_counts[group] = lengths[group]
        received = np.empty(int(receive_counts.sum()), np.uint8)
        call.agree("gather what each rank has")
        communicator.alltoallv(outgoing, send_counts.tolist(), received, receive_counts.tolist())
        call.expect_more()
        others_blocks = np.split(received, np.cumsum(lengths[group])[:-1])
        blocks |= {rank: [block] for rank, block in zip(group.tolist(), others_blocks, strict=False)}
    if me not in writers:
        return writers, None
    own_parts = _parts_of(state, once, writers.index(me))
    return writers, pieces_of(own_parts, dict(sorted(blocks.items())))


def _own(state: State, where: str) -> list[Any]:
    """Return the bytes of this rank's data; nothing if no rank has data of its own."""
    own = {path: item for path, item in state.items.items() if item.is_of_each_rank}
    arrays = {path: host_array(state.arrays[path]) for path, item in own.items() if item.is_array}
    values: dict[str, Any] = {path: arrays[path].shape for path in arrays if own[path].has_lines}
    values |= {path: state.values[path] for path in own if path not in arrays}
    return own_pieces(arrays, values, where) if own else []


def _nbytes(pieces: Sequence[Any]) -> int:
    return sum(memoryview(piece).nbytes for piece in pieces)


def _parts_of(state: State, once: Mapping[str, Array], number: int) -> dict[str, Array]:
    """Return the arrays, and parts of them, in the shard of a number."""
    parts = {}
    for path, array in once.items():
        item = state.items[path]
        for shard, start, stop in item.parts:
            if shard == number:
                parts[path] = host_array(array if len(item.shards) == 1 else array.reshape(-1)[start:stop])
    return parts
