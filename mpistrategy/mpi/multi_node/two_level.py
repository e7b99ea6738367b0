"""The all-reduce over ranks on several nodes: within each node, between the nodes, and back, in pieces.

Each rank of a node (as many of them as the smallest node has, up to `MOST_LANES`) owns a slice of every piece: these
ranks are the lanes.  A lane adds up its slice over its node, exchanges it with its counterparts on the other nodes, and
shows its node the result.  So each byte crosses the network as often as it must and no more.

Several pieces are under way at a time: while one is on the network, the node adds up those that follow.  Who adds what
depends only on the placement of the ranks: equal runs give equal bits, and all ranks get the same ones.

Where the ranks of a node share no memory, and in simulated jobs, the levels take turns with the whole array.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.interface.communicator import NodeGroups
from mpistrategy.mpi.multi_node.node_stage import BufferStage, InPlaceStage, NodeStage, Piece
from mpistrategy.mpi.multi_node.pairwise import Flight, Link, Space, Wire, reduce_pairwise
from mpistrategy.mpi.shared_memory.segments import ALIGNMENT
from mpistrategy.mpi.tuning.thresholds import Thresholds

#: More lanes do not fill a network better, and their messages are short.
MOST_LANES = 4
_LEAST_BLOCK_BYTES = 32 * 2**10
_LARGEST_PIECE_BYTES = 2**22
#: How many pieces may be on the network at a time.
FLIGHTS = 4
_TAGS = 2**12


def lanes_of(node_of: Sequence[int]) -> int:
    """Return how many ranks of each node have a counterpart on every node, up to `MOST_LANES`."""
    return min(MOST_LANES, *Counter(node_of).values())


def piece_bytes_for(lanes: int, nodes: int, thresholds: Thresholds) -> int:
    """Return how much of a buffer is one piece; more than the threshold where blocks of it would be short."""
    return max(thresholds.across_piece_bytes, min(lanes * nodes * _LEAST_BLOCK_BYTES, _LARGEST_PIECE_BYTES))


def eagerly(looks: int) -> None:
    """Give the core away before the next look; nap after many looks."""
    if looks < 500:
        os.sched_yield()
    else:
        time.sleep(5e-5)


def allreduce_across(communicator: Any, buffer: Array, op: str = "SUM", *, source: Array | None = None) -> None:
    """Replace `buffer` on every rank by the sum (MIN, MAX, PROD) over the ranks; NaN wins.  Collective.

    Args:
        communicator: the ranks, on any number of nodes.  With a view that `reduced_precision.on` returned, float32 sums
            are rounded between the nodes.
        buffer: contiguous; equal size and dtype on all ranks.
        op: "SUM", "MIN", "MAX" or "PROD".
        source: this rank's contribution, where it is not `buffer`; stays as it is.
    """
    flat = buffer.reshape(-1)
    mine = flat if source is None else source.reshape(-1)
    wire = wire_between_nodes(communicator, buffer.dtype, op)
    with np.errstate(all="ignore"):
        across_nodes(communicator).allreduce(mine, flat, op, wire)


def wire_between_nodes(communicator: Any, dtype: np.dtype[Any], op: str) -> Wire:
    """Return the dtype that travels between the nodes where it is another one than `dtype`."""
    own: Callable[..., Wire] | None = getattr(communicator, "wire_between_nodes", None)
    return None if own is None else own(dtype, op)


@dataclass(frozen=True)
class Manner:
    """How to wait for messages.

    Attributes:
        pause: called between two looks that found nothing new, with how many there have been.
        nudges: how often MPI is asked to move messages on after a pause, besides once for each piece under way.
        flights: how many pieces may be on the network at a time.
    """

    pause: Callable[[int], None] = eagerly
    nudges: int = 0
    flights: int = FLIGHTS


EAGER = Manner()


def across_nodes(communicator: Any, manner: Manner = EAGER) -> AcrossNodes:
    """Return the two-level exchange of a communicator; the first call is collective."""
    found: AcrossNodes = communicator.once(AcrossNodes, lambda: AcrossNodes(communicator, manner))
    return found


class AcrossNodes:
    """The state of the two-level all-reduce; made once for a communicator.  Collective."""

    def __init__(self, communicator: Any, manner: Manner) -> None:
        nodes = communicator.nodes
        self._manner = manner
        #: The pieces under way: who adds them up on this node, what they are, and their exchange with other nodes.
        self._flights: deque[tuple[NodeStage, Piece, Flight]] = deque()
        self._number = 0
        self._link: Link | None = None
        self._groups: NodeGroups | None = None
        self._node = NodeStage()
        lanes = lanes_of(communicator.node_of)
        self.piece_bytes: int = piece_bytes_for(lanes, nodes, communicator.thresholds)
        nbytes = BufferStage.bytes_of(self.piece_bytes, manner.flights)
        memory = communicator.shared(nbytes) if communicator.size > nodes else None
        if not hasattr(communicator, "links") or (memory is not None and not memory.is_shared):
            self._groups = communicator.node()
            return
        if memory is not None and len(memory.segments) > 1:
            self._node = BufferStage(memory, self.piece_bytes, manner.flights, lanes, self._until)
        slice_bytes = self.piece_bytes // lanes + ALIGNMENT
        # Twice a slice: bfloat16 takes half of one for what it sends, as much to receive, and two blocks of sums.
        self._spaces = [Space(2 * slice_bytes + 2 * ALIGNMENT * nodes) for _ in range(manner.flights)]
        if nodes > 1:
            self._link = communicator.links(lanes)

    def within(
        self, arrays: Sequence[Array], targets: Sequence[Array], finish: Callable[[Array], object]
    ) -> InPlaceStage | None:
        """Return the stage that combines the arrays of this node where they are, for `allreduce`; see `InPlaceStage`.

        None where the ranks of this node share no counters; the other nodes need not know.
        """
        return InPlaceStage(self._node, arrays, targets, finish) if isinstance(self._node, BufferStage) else None

    def allreduce(self, source: Array, target: Array, op: str, wire: Wire, within: NodeStage | None = None) -> None:
        """Write the combination of all ranks' `source` into `target`; flat, of one dtype; may be the same.

        `wire` is that of `wire_between_nodes`.  With `within`, the arrays of that stage are combined; `source` and
        `target` are then this rank's own.
        """
        if self._groups is not None:
            self._in_turn(self._groups, source, target, op, wire)
            return
        node = self._node if within is None else within
        elements = self.piece_bytes // target.itemsize
        for start in range(0, target.size, elements):
            self._number += 1
            part = slice(start, start + elements)
            piece = Piece(self._number, start, source[part], target[part])
            node.contribute(piece)
            if len(self._flights) == self._manner.flights:
                self._end_first()
            self._flights.append((node, piece, self._begin(*node.add_up(piece, op), op, wire)))
            self._advance()
        while self._flights:
            self._end_first()

    def _in_turn(self, groups: NodeGroups, source: Array, target: Array, op: str, wire: Wire) -> None:
        """Combine within each node, then between their first ranks, and hand out, each by its own collective."""
        if not target.size:
            return
        if target is not source:
            target[...] = source
        groups.node.reduce(target, 0, op)
        leaders = groups.leaders
        if leaders is None or leaders.size == 1:
            pass
        elif hasattr(leaders, "links"):
            across_nodes(leaders, self._manner).allreduce(target, target, op, wire)
        else:
            _round(target, wire)
            leaders.allreduce(target, op)
            _round(target, wire)
        groups.node.bcast(target, 0)

    def free(self) -> None:
        """Free the communicator of the counterparts, where all ranks are known to do so."""
        if self._link is not None:
            self._link.free()

    def _begin(self, total: Array, result: Array, op: str, wire: Wire) -> Flight:
        if self._link is None:
            if result is not total:
                result[...] = total
            return Flight(None)
        tag = 2 * (self._number % _TAGS)
        space = self._spaces[self._number % self._manner.flights]
        space.clear()
        return Flight(reduce_pairwise(self._link, total, result, op, tag, space, wire))

    def _end_first(self) -> None:
        node, piece, flight = self._flights[0]
        self._until(lambda: flight.is_over)
        self._flights.popleft()
        node.hand_out(piece)

    def _advance(self) -> bool:
        moved = False
        for *_, flight in self._flights:
            moved = flight.advance() or moved
        return moved

    def _until(self, ready: Callable[[], bool]) -> None:
        looks = 0
        while not ready():
            if not self._advance():
                looks += 1
                self._manner.pause(looks)
                for _ in range(self._manner.nudges if self._flights else 0):
                    self._flights[0][-1].nudge()


def _round(values: Array, wire: Wire) -> None:
    """Round values in place to the dtype that travels, where it is another one."""
    if wire is not None:
        values[...] = values.astype(wire)
