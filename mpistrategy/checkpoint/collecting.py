"""Which ranks write a checkpoint, what they write, and how they get the data of the other ranks.

One rank writes a small checkpoint, some on each node a large one.  Each writer writes one shard: the data of some
ranks, and a part of the arrays that are saved once, which every rank has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import host_array
from mpistrategy.arrays.dtypes import Array
from mpistrategy.checkpoint.state import State
from mpistrategy.checkpoint.storage.manifest import ONE, ROWS, by_width, shares
from mpistrategy.checkpoint.storage.shards import ALIGNMENT, dumps, pieces_of, raw
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.ranks import Ranks

#: A checkpoint gets one writer for so many bytes.
BYTES_A_WRITER = 2**26
#: The most writers of a node, and of the job if it has fewer nodes.  There are more where the ranks have too much
#: per-rank data for one writer to gather.
MOST_A_NODE, MOST_WRITERS = 8, 1024


def count_of_writers(node_of: Sequence[int], nbytes: int, own_bytes: int) -> int:
    """Return how many ranks write so many bytes, of which the ranks have some for themselves."""
    nodes = max(node_of) + 1
    most = max(min(MOST_A_NODE * nodes, max(nodes, MOST_WRITERS)), -(-own_bytes // BYTES_A_WRITER))
    return max(1, min(-(-nbytes // BYTES_A_WRITER), most, len(node_of)))


def places(node_of: Sequence[int], count: int) -> tuple[list[int], Array]:
    """Return the rank that writes or reads each of so many shards, and the shard of each rank's data.

    The ranks are spread over the nodes; the first is rank 0.
    """
    by_node, size = np.argsort(node_of, kind="stable"), len(node_of)
    shard_of = np.empty(size, np.int64)
    shard_of[by_node] = (np.arange(1, size + 1) * count - 1) // size
    return by_node[np.arange(count) * max(size, count) // count % size].tolist(), shard_of


def collect(state: State, communicator: Ranks, call: Call) -> tuple[list[int], list[list[int]], list[Any] | None]:
    """Return the writers, `Manifest.own`, and the bytes of the shard that this rank writes; None if it writes none.

    Collective.  The ranks have agreed on the items that are saved once.  They expect one more agreement: a rank that
    has no memory for its part tells the other ranks.

    Raises:
        OptionError: on every rank, for more plain values of a rank than `restore` accepts.
    """
    me, size = communicator.rank, communicator.size
    call.expect_more()
    own, sizes = _own(state, call.where)
    call.agree("take what each rank has")
    table = np.zeros((size, len(sizes)), np.int64)
    if own:
        communicator.allgatherv(np.array(sizes, np.int64), [len(sizes)] * size, table)
    lengths, items = table[:, 1], state.items
    once = sum(state.arrays[path].nbytes for path, item in items.items() if item.is_array and item.copies == ONE)
    own_bytes = int(lengths.sum())
    count = count_of_writers(communicator.node_of, once + own_bytes, own_bytes)
    writers, shard_of = places(communicator.node_of, count)
    call.expect_more()
    blocks = {me: own} if own else {}
    if own and count < size:
        writer_of = np.array(writers)[shard_of]
        is_sent, is_here = writer_of[me] != me, (writer_of == me) & (np.arange(size) != me)
        outgoing = np.concatenate(own) if is_sent else np.empty(0, np.uint8)
        taken = np.where(is_here, lengths, 0)
        received = np.empty(int(taken.sum()), np.uint8)
        call.agree("gather what each rank has")
        counts = np.where(np.arange(size) == writer_of[me], outgoing.size, 0)
        communicator.alltoallv(outgoing, counts.tolist(), received, taken.tolist())
        call.expect_more()
        others = np.split(received, np.cumsum(taken[is_here])[:-1])
        blocks |= {rank: [block] for rank, block in zip(np.flatnonzero(is_here).tolist(), others, strict=False)}
    own_table = np.column_stack([shard_of, table]).T.tolist() if own else []
    if me not in writers:
        return writers, own_table, None
    arrays = {}
    for path, (begin, stop) in shares(items, count)[writers.index(me)].items():
        array = state.arrays[path]
        is_whole = stop - begin == items[path].elements
        arrays[path] = host_array(array if is_whole else array.reshape(-1)[begin:stop])
    return writers, own_table, pieces_of(dict(sorted(blocks.items())), arrays)


def _own(state: State, where: str) -> tuple[list[Array], list[int]]:
    """Return the bytes of this rank's data, and their numbers in `Manifest.own`; nothing if no rank has any."""
    items = {path: item for path, item in state.items.items() if item.is_of_each_rank}
    values = {
        path: state.arrays[path].shape if item.is_array else state.values[path]
        for path, item in items.items()
        if item.has_lines
    }
    if not items:
        return [], [0, 0]
    pieces = [raw(host_array(state.arrays[path])) for path in by_width(items)]
    line = dumps(values, where)
    line += b" " * (-(len(line) + sum(piece.size for piece in pieces)) % ALIGNMENT)
    pieces.append(np.frombuffer(line, np.uint8))
    rows = [len(state.arrays[path]) for path, item in items.items() if item.copies == ROWS]
    return pieces, [len(line), sum(piece.size for piece in pieces), *rows]
