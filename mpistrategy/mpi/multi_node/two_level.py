"""The all-reduce over ranks on several nodes: within each node, between the nodes, and back, in pieces.

Every rank of a node is a lane, and owns a part of every piece.  A lane adds up its part over its node, combines it with
its counterparts on the other nodes by MPI's Allreduce, and shows its node the result.  So each byte crosses the network
as often as it must and no more.  A single piece takes a blocking call: nothing can fail on one rank between the
agreement and it.

Two pieces are under way at a time: while one is on the network, the node adds up the next.  Who adds what depends only
on the placement of the ranks: equal runs give equal bits.

Ranks that share no memory, and ranks of nodes with different numbers of them, count as nodes of their own.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.interface.buffers import Freed
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.multi_node.rounded_exchange import Rounded, Wire
from mpistrategy.mpi.shared_memory.node_sum import Exchange, NodeSum, in_rank_order, segment_bytes, share
from mpistrategy.mpi.shared_memory.segments import ALIGNMENT
from mpistrategy.mpi.shared_memory.spin_wait import Waiting

#: Larger buffers go in pieces of this.
PIECE_BYTES = 4 * 2**20
#: All buffers of a node together take no more; with many ranks on a node the pieces become smaller.
NODE_BYTES = 2**27
#: So many pieces are under way: one on the network, and one on which the node works.
BUFFERS = 2
_LEAST_PIECE_BYTES = 2**12
#: A rank that waits for its node without a message under way calls MPI once in so many looks.
_LOOKS_WITHOUT_MPI = 16


def piece_bytes_for(node_of: Sequence[int]) -> int:
    """Return how much of a buffer is one piece; the same on all ranks."""
    pieces = (segment_bytes(1) - segment_bytes(0)) * max(Counter(node_of).values())
    most = NODE_BYTES // pieces // ALIGNMENT * ALIGNMENT
    return min(PIECE_BYTES, max(most, _LEAST_PIECE_BYTES))


def shared_bytes(node_of: Sequence[int]) -> int:
    """Return how much memory each rank of a node with several shares, from the first use on."""
    return segment_bytes(piece_bytes_for(node_of))


def give_away(most: int, looks: int) -> None:
    """Give the core away before the next of `most` looks; nap before the later ones."""
    if looks < most:
        os.sched_yield()
    else:
        time.sleep(5e-5)


_EAGERLY = partial(give_away, 500)


def allreduce_across(
    communicator: Any, buffer: Array, op: str = "SUM", *, source: Array | None = None, wire: Wire = None
) -> None:
    """Replace `buffer` on every rank by the sum (MIN, MAX, PROD) over the ranks; NaN wins.  Collective.

    Args:
        communicator: the ranks, on any number of nodes.
        buffer: contiguous; equal size and dtype on all ranks.
        op: "SUM", "MIN", "MAX" or "PROD".
        source: this rank's contribution, where it is not `buffer`; stays as it is.
        wire: the dtype in which sums travel between the nodes, where it is another one.
    """
    flat = buffer.reshape(-1)
    mine = flat if source is None else source.reshape(-1)
    with np.errstate(all="ignore"):
        if communicator.has_links:
            across_nodes(communicator).allreduce(mine, flat, op, wire)
        elif wire is None:
            communicator.allreduce(flat, op, mine)
        else:
            _rounded_in_one_process(communicator, mine, flat, wire)


@dataclass(frozen=True)
class Manner:
    """How to wait for messages.

    Attributes:
        pause: called between two looks that found nothing new, with how many there have been.
        nudges: how often MPI is asked to move messages on after a pause, besides once for each piece under way.
        blocks: whether a single piece may take a blocking call of MPI.
    """

    pause: Callable[[int], None] = _EAGERLY
    nudges: int = 0
    blocks: bool = True


EAGER = Manner()
#: Ranks that outnumber their cores would take them from those that work.  4 nodes of 4 ranks on 2 cores, over a bare
#: Allreduce: 1 MiB 1.7 by `EAGER`, 1.0 so; 4 MiB 1.0 and 0.75.
CROWDED = Manner(partial(give_away, 2))


def across_nodes(communicator: Any) -> Lanes:
    """Return the two-level all-reduce of a communicator; the first call is collective."""
    found: Lanes = communicator.once(Lanes, lambda: Lanes(communicator))
    return found


class Flight:
    """The exchange of one piece between the nodes.

    Args:
        steps: yields the request that must be done before the next step.
    """

    def __init__(self, steps: Iterator[Any]) -> None:
        self._steps = steps
        self._request: Any = None
        self.is_over: bool = False
        self.advance()

    def nudge(self) -> None:
        """Let MPI move messages on."""
        if self._request is not None:
            self._request.Test()

    def advance(self) -> bool:
        """Go on as far as messages have arrived; return whether anything happened.  Never waits."""
        moved = False
        while not self.is_over and (self._request is None or self._request.Test()):
            self._request = next(self._steps, None)
            self.is_over, moved = self._request is None, True
        return moved


class Lanes(Freed):
    """The state of the two-level all-reduce; made once for a communicator.  Collective.

    Each rank of a node has a part of the data, which it exchanges with its counterparts: the ranks that have this part
    on the other nodes.  Where nodes have different numbers of ranks, each rank counts as a node.

    Attributes:
        piece_bytes: how much of a buffer is one piece.
        node_sum: adds up ordinary arrays of this node; None where each rank counts as a node.
        sees_node: whether arrays that all ranks of the node see can be combined by `in_place`.
        ranks: the communicator.
        link: MPI's communicator of the counterparts; None on a single node.
        rounded: how parts are exchanged where they are rounded, for each piece under way.
        flights: the exchanges with other nodes that are under way.
    """

    def __init__(self, communicator: Any) -> None:
        node_of, memory = communicator.node_of, None
        if communicator.has_lanes:
            memory = communicator.shared(shared_bytes(node_of))
        self.sees_node: bool = memory is not None and memory.is_shared
        self.piece_bytes: int = piece_bytes_for(node_of if self.sees_node else [0])
        self.node_sum: NodeSum | None = None
        self.link: Any = None
        self.rounded: list[Rounded] = []
        self._manner: Manner = communicator.manner or (CROWDED if communicator.is_crowded else EAGER)
        self.flights: list[Flight] = []
        self._part, self._parts, counterparts = 0, 1, [*range(communicator.size)]
        if memory is not None and self.sees_node:
            self._part, self._parts = memory.local_rank, len(memory.segments)
            by_node = np.argsort(node_of, kind="stable").reshape(-1, self._parts)
            counterparts = by_node[:, self._part].tolist()
            self.node_sum = NodeSum(memory, self.piece_bytes, _AmongMessages(self.wait))
        self.ranks: Any = communicator
        self._counterparts = counterparts
        if len(counterparts) > 1:
            self.link = communicator.link(counterparts)

    def allreduce(self, source: Array, target: Array, op: str, wire: Wire) -> None:
        """Write the combination of all ranks' `source` into `target`; flat, of one dtype; may be the same.

        `wire` is that of `allreduce_across`.
        """
        if self.node_sum is None:
            self.in_place((source,), (target,), op, wire, _as_it_is)
        else:
            self.node_sum.run(((source, target),), op, exchange=self._exchange(target, op, wire))

    def in_place(
        self,
        arrays: Sequence[Array],
        targets: Sequence[Array],
        op: str,
        wire: Wire,
        finish: Callable[[Array], object],
    ) -> None:
        """Combine the arrays of this node where they are, and the sums of all nodes into `targets`.

        All ranks of this node see them; the other nodes need not do likewise.  Nobody may read the results, or write
        the arrays again, before the next barrier of the node.

        Args:
            arrays: flat, by local rank.
            targets: flat, of the same size and dtype; may be the arrays themselves.
            op, wire: those of `allreduce_across`.
            finish: what is done to a part of the result before it is written.
        """
        if self.node_sum is not None:
            self.node_sum.barrier()
        exchange, itemsize = self._exchange(arrays[0], op, wire), arrays[0].itemsize
        elements, under_way = self.piece_bytes // itemsize, deque[tuple[Flight, slice]]()
        for start in range(0, arrays[0].size, elements):
            count = min(elements, arrays[0].size - start)
            begin, end = share(count, self._part, self._parts, itemsize)
            own = slice(start + begin, start + end)
            total = targets[0][own]
            if total.size:
                in_rank_order([array[own] for array in arrays], (total,), op, 1)
            under_way.append((exchange.begin(total), own))
            if len(under_way) == BUFFERS:
                _write(exchange, *under_way.popleft(), targets, finish)
        while under_way:
            _write(exchange, *under_way.popleft(), targets, finish)

    def _exchange(self, target: Array, op: str, wire: Wire) -> _Pieces:
        if wire is not None and self.link is not None and not self.rounded:
            self.rounded = self._new_rounded(wire)
        return _Pieces(self, op, wire, blocks=self._manner.blocks and target.nbytes <= self.piece_bytes)

    def _new_rounded(self, wire: np.dtype[Any]) -> list[Rounded]:
        """Return how this rank's part is exchanged, for each piece under way.  Collective."""
        step = ALIGNMENT // np.dtype(np.float32).itemsize
        most = -(-self.piece_bytes // ALIGNMENT // self._parts) * step  # the longest part of a piece
        links = [
            self.ranks.link(self._counterparts) for _ in range(BUFFERS)
        ]  # ranks may start two pieces' messages in any order
        rounded: list[Rounded] = self.ranks.guard.on_all(lambda: [Rounded(link, most, wire) for link in links])
        return rounded

    def free(self) -> None:
        """Free the communicators of the counterparts, where all ranks are known to do so."""
        for link in (self.link, *(each.link for each in self.rounded)):
            if link is not None:
                link.Free()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready()`, and let messages move on meanwhile."""
        looks = 0
        while not ready():
            moved = [flight.advance() for flight in self.flights]
            if not any(moved):
                looks += 1
                self._manner.pause(looks)
                if not self.flights and looks % _LOOKS_WITHOUT_MPI == 0:
                    self.ranks.progress()  # what this rank sent last may still lie in MPI's own memory
                for _ in range(self._manner.nudges if self.flights else 0):
                    self.flights[0].nudge()


class _Pieces(Exchange):
    """The exchange of the pieces of one buffer, in their order.

    Args:
        across: with whom.
        op, wire: those of `allreduce_across`.
        blocks: whether there is a single piece, which takes blocking calls of MPI.
    """

    def __init__(self, across: Lanes, op: str, wire: Wire, *, blocks: bool) -> None:
        self._across, self._op, self._wire, self._blocks = across, op, wire, blocks
        self._count = 0

    def begin(self, total: Array) -> Flight:
        """Begin to combine this rank's part of a piece with those of its counterparts."""
        self._count += 1
        flight = Flight(self._requests(total))
        self._across.flights.append(flight)
        return flight

    def _requests(self, total: Array) -> Iterator[Any]:
        across, link = self._across, self._across.link
        if link is None or total.size == 0:
            return
        if self._wire is not None:
            yield from across.rounded[self._count % BUFFERS].exchange(total)
        elif self._blocks:  # nothing can fail on one rank between the agreement and this
            across.ranks.allreduce_over(link, total, self._op)
        else:
            yield across.ranks.begin_allreduce_over(link, total, self._op)

    def end(self, begun: Flight) -> None:
        """Wait until it has been combined."""
        self._across.wait(lambda: begun.is_over)
        self._across.flights.remove(begun)


class _AmongMessages(Waiting):
    """Waits for a rank of the node, and lets messages between the nodes move on."""

    def __init__(self, wait: Callable[[Callable[[], bool]], None]) -> None:
        self._wait = wait

    def until(self, numbers: memoryview, value: int) -> None:
        """Return when ``numbers[0] >= value``."""
        self._wait(lambda: bool(numbers[0] >= value))


def _write(
    exchange: _Pieces, flight: Flight, own: slice, targets: Sequence[Array], finish: Callable[[Array], object]
) -> None:
    """Write this rank's part of a piece into all targets when it has been combined: it is in the first one."""
    exchange.end(flight)
    finish(targets[0][own])
    for target in targets[1:]:
        target[own] = targets[0][own]


def _as_it_is(total: Array) -> None:
    """Finish nothing."""


def _rounded_in_one_process(communicator: Ranks, source: Array, target: Array, wire: np.dtype[Any]) -> None:
    """Do `allreduce_across` with ranks that are threads: round what each node has, and the sum."""
    together = np.empty((communicator.size, source.size), source.dtype)
    communicator.allgatherv(source, [source.size] * communicator.size, together)
    node_of = communicator.node_of if communicator.has_lanes else range(communicator.size)
    sums = [together[np.equal(node_of, node)].sum(axis=0) for node in sorted(set(node_of))]
    rounded = np.add.reduce([each.astype(wire).astype(source.dtype) for each in sums])
    target[...] = rounded.astype(wire)
