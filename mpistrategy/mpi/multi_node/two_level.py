"""The all-reduce over ranks on several nodes: within each node, between the nodes, and back, in pieces.

Every rank of a node is a lane, and owns a part of every piece.  A lane adds up its part over its node, combines it with
its counterparts on the other nodes by MPI's Allreduce, and shows its node the result.  So each byte crosses the network
as often as it must and no more.  A single piece takes a blocking call: nothing can fail on one rank between the
agreement and it.

Two pieces are under way at a time: while one is on the network, the node adds up the next.  Who adds what depends only
on the placement of the ranks: equal runs give equal bits.

Ranks that share no memory, and ranks of nodes with different numbers of them, count as nodes of their own.

`CommunicationOptions.wire` asks for less than full precision.  With "bfloat16", each node's float32 contribution is
rounded once, the contributions are added up in float32, and the sum is rounded once; all ranks get the same result.
With u = 2^-8, s_n the sum over the ranks of node n (ranks that share no memory count as nodes, and so do those of nodes
with different numbers of ranks) and S the sum of the s_n, the result differs from S by no more than

    (2 u + u^2) (|s_1| + |s_2| + ...)

plus float32's own rounding of the additions.  For values below 2^-126 each rounding errs by up to 2^-134 instead.
A magnitude of about 3.39e38 or more, of a node's contribution or of the sum, becomes infinite.

NCCL gets the wire's dtype, "float16" or "bfloat16", and rounds each of its sums to it, in an order of its own: see
`mpistrategy.mpi.gpu.transports.nccl`.  Nothing else sends "float16".
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import cycle
from typing import Any, TypeAlias

import numpy as np

from mpistrategy.arrays.dtypes import Array, divide_by, quietly
from mpistrategy.errors import OptionError
from mpistrategy.mpi.interface.ranks import Freed, Ranks, as_bytes
from mpistrategy.mpi.shared_memory.node_sum import (
    Exchange,
    Halves,
    NodeSum,
    in_rank_order,
    overlapped,
    segment_bytes,
    share,
)
from mpistrategy.mpi.shared_memory.segments import ALIGNMENT, private_memory

# ------------------------------------------------------------------------------------------ less than full precision

#: The dtype that travels; None is the arrays' own dtype.
Wire: TypeAlias = "np.dtype[Any] | None"
#: What NCCL can send.
BY_NCCL = ("bfloat16", "float16")


@cache
def bfloat16() -> np.dtype[Any]:
    """Return the dtype of ml_dtypes.

    Raises:
        OptionError: where ml_dtypes is not installed.
    """
    try:
        import ml_dtypes  # an optional extra, and only this wire needs it
    except ImportError as error:
        raise OptionError.at(
            "CommunicationOptions",
            found='wire="bfloat16" without the package ml_dtypes',
            expected="ml_dtypes on every rank",
            fix="Install it: pip install ml_dtypes.",
        ) from error
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def check_wire(wire: str | None) -> None:
    """Raise OptionError when this rank cannot send `wire`; call it before the ranks agree on a call."""
    if wire == "bfloat16":
        bfloat16()


def between_nodes(
    ranks: Ranks, wire: str | None, dtype: np.dtype[Any], op: str, sent: Sequence[str] = ("bfloat16",)
) -> Wire:
    """Return the dtype in which a buffer travels between the nodes; None for its own.

    Only sums of float32 are rounded, and nothing between simulated nodes, where nothing travels.

    Args:
        ranks: the ranks that take part.
        wire: what the options ask for.
        dtype, op: the buffer's dtype, and how it is combined.
        sent: what the path can send: `BY_NCCL`, or what the host can.
    """
    is_sum = dtype == np.float32 and op == "SUM"
    if wire not in sent or ranks.nodes == 1 or ranks.is_simulated or not is_sum:
        return None
    return bfloat16() if wire == "bfloat16" else np.dtype(np.float16)


class Rounded:
    """The exchange of one slice at a time.

    Args:
        link: MPI's communicator of the counterparts, one rank of each node.
        count: how many elements the slice has at most.
        wire: the dtype that travels.
    """

    def __init__(self, link: Any, count: int, wire: np.dtype[Any]) -> None:
        self._link, block = link, -(-count // link.size)
        self._send_buffer, self._receive_buffer = np.zeros(link.size * block, wire), np.zeros(link.size * block, wire)
        self._total = np.zeros(block, np.float32)

    def combine(self, values: Array, wait: Callable[[Callable[[], bool]], None]) -> Halves:
        """Replace the values by their sum over the counterparts; `wait` is called until a message is there.

        First this rank sends every counterpart a block of its values.  Then it adds up its own block in the order of
        the nodes, and sends all of them the sum.  One rank computes each element, so the bits are equal everywhere.
        """
        block = -(-values.size // self._link.size)
        size = self._link.size * block
        sent, received, total = self._send_buffer[:size], self._receive_buffer[:size], self._total[:block]
        sent[: values.size], sent[values.size :] = values, 0
        request = self._link.Ialltoall(as_bytes(sent), as_bytes(received))
        yield
        wait(request.Test)
        blocks = received.reshape(-1, block)
        total[...] = blocks[0]
        for part in blocks[1:]:
            total += part
        sent[:block] = total
        wait(self._link.Iallgather(as_bytes(sent[:block]), as_bytes(received)).Test)
        values[...] = received[: values.size]


# ------------------------------------------------------------------------------------------------- pieces and lanes

#: Larger buffers go in pieces of this.
PIECE_BYTES = 4 * 2**20
#: All buffers of a node together take no more; with many ranks on a node the pieces become smaller.
NODE_BYTES = 2**27
#: So many pieces are under way: one on the network, and one on which the node works.
_UNDER_WAY = 2
#: Looks before naps.  Ranks that outnumber their cores would take cores from working ranks: 4 nodes of 4 ranks on 2
#: cores, over a bare Allreduce: 1 MiB 1.7 by many looks, 1.0 by few; 4 MiB 1.0 and 0.75.
_LOOKS, _CROWDED_LOOKS = 500, 2


def piece_bytes_for(ranks: int) -> int:
    """Return how much of a buffer is one piece, where so many ranks of each node share memory."""
    pieces = (segment_bytes(1) - segment_bytes(0)) * ranks
    return min(PIECE_BYTES, NODE_BYTES // pieces // ALIGNMENT * ALIGNMENT)


def give_away(most: int, looks: int) -> None:
    """Give the core away before the next of `most` looks; nap before the later ones."""
    if looks < most:
        os.sched_yield()
    else:
        time.sleep(5e-5)


def across_nodes(communicator: Ranks) -> Lanes:
    """Return the two-level all-reduce of a communicator; the first call is collective."""
    return communicator.once(Lanes, partial(Lanes, communicator))


class Lanes(Freed):
    """The state of the two-level all-reduce; made once for a communicator.  Collective.

    Each rank of a node has a part of the data, which it exchanges with its counterparts: the ranks that have this part
    on the other nodes.  Where nodes have different numbers of ranks, each rank counts as a node.

    Attributes:
        piece_bytes: how much of a buffer is one piece.
        node_sum: adds up ordinary arrays of this node; None where each rank counts as a node.  Else arrays that all
            ranks of the node see can be combined by `in_place`.
        link: MPI's communicator of the counterparts; None on a single node.  Nothing else sends messages by it.
        ranks: the communicator.
    """

    def __init__(self, communicator: Any) -> None:
        self.ranks: Any = communicator
        memory = private_memory(0)
        if communicator.has_lanes:
            memory = communicator.shared(segment_bytes(piece_bytes_for(communicator.local_size)))
        self._part, self._parts = memory.local_rank, len(memory.segments)
        self.piece_bytes: int = piece_bytes_for(self._parts)
        self.node_sum: NodeSum | None = NodeSum(memory, self.piece_bytes, self._until) if memory.is_shared else None
        by_node = np.argsort(communicator.node_of, kind="stable").reshape(-1, self._parts)
        counterparts = by_node[:, self._part].tolist()
        self.link: Any = communicator.link(counterparts) if len(counterparts) > 1 else None
        #: How parts are exchanged where they are rounded, for each piece under way.
        self._rounded: list[Rounded] = []
        self._pause = communicator.pause or partial(give_away, _CROWDED_LOOKS if communicator.is_crowded else _LOOKS)

    @quietly
    def allreduce(self, source: Array, target: Array, op: str, wire: Wire) -> None:
        """Write the combination of all ranks' `source` into `target`; flat, of one dtype; may be the same.

        `op`, `wire`: see `mpistrategy.mpi.interface.ranks.Ranks.allreduce`.
        """
        if self.node_sum is None:
            self.in_place((source,), (target,), op, wire)
        else:
            self.node_sum.run(((source, target),), op, exchange=self._exchange(target, op, wire))

    def in_place(
        self,
        arrays: Sequence[Array],
        targets: Sequence[Array],
        op: str,
        wire: Wire,
        divisor: int = 1,
    ) -> None:
        """Combine the arrays of this node in place, and write the sums of all nodes into `targets`.

        All ranks of this node see them; the other nodes need not do likewise.  Nobody may read the results, or write
        the arrays again, before the next barrier of the node.

        Args:
            arrays: flat, by local rank.
            targets: flat, of the same size and dtype; may be the arrays themselves.
            op, wire: see `mpistrategy.mpi.interface.ranks.Ranks.allreduce`.
            divisor: the result is divided by it; floating dtypes only.
        """
        if self.node_sum is not None:
            self.node_sum.barrier()
        exchange, elements = self._exchange(arrays[0], op, wire), self.piece_bytes // arrays[0].itemsize
        places = [slice(start, start + elements) for start in range(0, arrays[0].size, elements)]
        overlapped(
            self._piece([array[at] for array in arrays], [array[at] for array in targets], op, exchange, divisor)
            for at in places
        )

    def _piece(
        self, arrays: Sequence[Array], targets: Sequence[Array], op: str, exchange: Exchange, divisor: int
    ) -> Halves:
        """Combine this rank's part of a piece on all nodes; then write it into all targets."""
        part = slice(*share(arrays[0].size, self._part, self._parts, arrays[0].itemsize))
        parts, totals = ([array[part] for array in group] for group in (arrays, targets))
        if totals[0].size:
            in_rank_order(parts, totals[:1], op, 1)
        yield from exchange(totals[0])
        divide_by(divisor, totals[0])
        for target in totals[1:]:
            target[...] = totals[0]

    def _exchange(self, target: Array, op: str, wire: Wire) -> Exchange:
        """Return the exchange of the pieces of one buffer, in their order."""
        if wire is not None and self.link is not None and not self._rounded:
            step = ALIGNMENT // np.dtype(np.float32).itemsize
            most = -(-self.piece_bytes // ALIGNMENT // self._parts) * step  # the longest part of a piece
            self._rounded = self.ranks.guard.on_all(lambda: [Rounded(self.link, most, wire) for _ in range(_UNDER_WAY)])
        # A single piece takes a call that blocks: nothing can fail on one rank between the agreement and it.
        blocks = self.ranks.pause is None and target.nbytes <= self.piece_bytes
        return partial(self._combine, op, blocks, None if wire is None else cycle(self._rounded))

    def _combine(self, op: str, blocks: bool, rounded: Iterator[Rounded] | None, total: Array) -> Halves:
        """Combine this rank's part of a piece with its counterparts' parts; see `Exchange`."""
        if self.link is None or not total.size:
            yield
            return
        memory: Any = total if rounded is None else next(rounded)
        self.ranks.under_way.append(memory)  # if this rank leaves the exchange, the results still come there
        if rounded is not None:
            yield from memory.combine(total, self.wait)
        else:
            request = self.ranks.begin_allreduce_over(self.link, total, op, blocks=blocks)
            yield
            self.wait(request.Test)
        self.ranks.under_way.pop(0)  # the exchanges end in the order in which they began

    def free(self) -> None:
        """Free the communicator of the counterparts, where all ranks are known to do so."""
        if self.link is not None:
            self.link.Free()

    def _until(self, numbers: memoryview, value: int) -> None:
        self.wait(lambda: bool(numbers[0] >= value))

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready()`, and let messages move on meanwhile."""
        looks = 0
        while not ready():
            looks += 1
            self._pause(looks)
            self.ranks.progress()
