"""The all-reduce over ranks on several nodes: within each node, between the nodes, and back, in pieces.

Each rank of a node (as many of them as the smallest node has, up to `MOST_LANES`) owns a slice of every piece: these
ranks are the lanes.  A lane adds up its slice over its node, exchanges it with its counterparts on the other nodes, and
shows its node the result.  So each byte crosses the network as often as it must and no more.

Several pieces are under way at a time: while one is on the network, the node adds up those that follow.  Who adds what
depends only on the placement of the ranks: equal runs give equal bits, and all ranks get the same ones.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.multi_node import bfloat16
from mpistrategy.mpi.multi_node.node_stage import BufferStage, InPlaceStage, MessageStage, NodeStage
from mpistrategy.mpi.multi_node.pairwise import Flight, Link, Space, pairwise_allreduce
from mpistrategy.mpi.shared_memory.segments import ALIGNMENT
from mpistrategy.mpi.tuning.thresholds import Thresholds

#: More lanes do not fill a network better, and their messages are short.
MOST_LANES = 4
_LEAST_BLOCK_BYTES = 32 * 2**10
_LARGEST_PIECE_BYTES = 2**22
#: How many pieces may be on the network at a time.
FLIGHTS = 4
_TAGS = 2**12


def lanes_of(node_of: Sequence[int], most: int = MOST_LANES) -> int:
    """Return how many ranks of each node have a counterpart on every node, up to `most`."""
    return min(most, *map(node_of.count, node_of))


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
    rounds = is_rounded(communicator, buffer.dtype, op)
    with np.errstate(all="ignore"):
        if hasattr(communicator, "links"):
            across_nodes(communicator).allreduce(mine, flat, op, rounds)
        else:
            _in_turn(communicator, mine, flat, op, rounds)


def is_rounded(communicator: Any, dtype: np.dtype[Any], op: str) -> bool:
    """Return whether the sums are rounded between the nodes."""
    return getattr(communicator, "rounds", False) and bfloat16.travels(dtype, op)


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
    owner = getattr(communicator, "unrounded", communicator)
    if owner.across is None:
        owner.across = AcrossNodes(owner, manner)
    found: AcrossNodes = owner.across
    return found


def _in_turn(communicator: Communicator, source: Array, target: Array, op: str, rounds: bool) -> None:
    """Do one step after another, for a communicator that has no messages between two ranks."""
    if target is not source:
        target[...] = source
    groups = communicator.node()
    groups.node.reduce(target, 0, op)
    if groups.leaders is not None and groups.leaders.size > 1:
        if rounds:
            bfloat16.rounded(target)
        groups.leaders.allreduce(target, op)
        if rounds:
            bfloat16.rounded(target)
    groups.node.bcast(target, 0)


@dataclass
class _Piece:
    number: int
    node: NodeStage
    target: Array
    flight: Flight


class AcrossNodes:
    """The state of the two-level all-reduce; made once for a communicator.  Collective."""

    def __init__(self, communicator: Any, manner: Manner) -> None:
        node = communicator.node().node
        self.lanes, link = communicator.links(MOST_LANES)
        self._link: Link | None = link if link is not None and link.size > 1 else None
        self._manner = manner
        nodes = max(communicator.node_of) + 1  # the same on ranks that have no counterparts
        self.piece_bytes = piece_bytes_for(self.lanes, nodes, communicator.thresholds)
        self._flights: deque[_Piece] = deque()
        slice_bytes = self.piece_bytes // self.lanes + ALIGNMENT
        # Twice a slice: bfloat16 takes half of one for what it sends, as much to receive, and two blocks of sums.
        self._spaces = [Space(2 * slice_bytes + 2 * ALIGNMENT * nodes) for _ in range(manner.flights)]
        self._number = 0
        self._node = NodeStage()
        memory = communicator.shared(BufferStage.bytes_of(self.piece_bytes, manner.flights))
        if node.size > 1 and memory.is_shared:
            self._node = BufferStage(memory, self.piece_bytes, manner.flights, self.lanes, self._until)
        elif node.size > 1:
            self._node = MessageStage(node, self.lanes)

    def within(
        self, arrays: Sequence[Array], targets: Sequence[Array], finish: Callable[[Array], object]
    ) -> InPlaceStage | None:
        """Return the stage that combines the arrays of this node where they are, for `allreduce`; see `InPlaceStage`.

        None where the ranks of this node share no counters; the other nodes need not know.
        """
        return InPlaceStage(self._node, arrays, targets, finish) if isinstance(self._node, BufferStage) else None

    def allreduce(self, source: Array, target: Array, op: str, rounds: bool, within: NodeStage | None = None) -> None:
        """Write the combination of all ranks' `source` into `target`; flat, of one dtype; may be the same.

        With `within`, the arrays of that stage are combined; `source` and `target` are then this rank's own.
        """
        node = self._node if within is None else within
        elements = self.piece_bytes // target.itemsize
        for start in range(0, target.size, elements):
            piece = target[start : start + elements]
            self._number += 1
            node.contribute(self._number, source[start : start + elements], piece)
            if len(self._flights) == self._manner.flights:
                self._end_first()
            total, result = node.add_up(self._number, piece, op)
            self._flights.append(_Piece(self._number, node, piece, self._begin(total, result, op, rounds)))
            self._advance()
        while self._flights:
            self._end_first()

    def _begin(self, total: Array, result: Array, op: str, rounds: bool) -> Flight:
        if self._link is None:
            if result is not total:
                result[...] = total
            return Flight(None)
        tag = 2 * (self._number % _TAGS)
        space = self._spaces[self._number % self._manner.flights]
        space.clear()
        wire = bfloat16.bfloat16() if rounds else None
        return Flight(pairwise_allreduce(self._link, total, result, op, tag, space, wire))

    def _end_first(self) -> None:
        piece = self._flights[0]
        self._until(lambda: piece.flight.is_over)
        self._flights.popleft()
        piece.node.hand_out(piece.number, piece.target)

    def _advance(self) -> bool:
        moved = False
        for piece in self._flights:
            moved = piece.flight.advance() or moved
        return moved

    def _until(self, ready: Callable[[], bool]) -> None:
        looks = 0
        while not ready():
            if not self._advance():
                looks += 1
                self._manner.pause(looks)
                for _ in range(self._manner.nudges if self._flights else 0):
                    self._flights[0].flight.nudge()
