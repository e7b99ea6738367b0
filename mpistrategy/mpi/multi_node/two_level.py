"""The all-reduce over ranks on several nodes: within each node, between the nodes, and back, in pieces.

Of every piece the first ranks of each node (as many as the smallest node has, up to `MOST_LANES`) own a slice each: a
lane.  A rank adds up its slice over its node, exchanges it with its counterparts on the other nodes, and shows its node
the result.  So each byte crosses the network as often as it must and no more, whoever sits on a node.

Several pieces are under way at a time: while one is on the network, the node adds up those that follow.  Who adds what
depends on the placement of the ranks and on nothing else: equal runs give equal bits, and all ranks get the same ones.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.multi_node import bfloat16
from mpistrategy.mpi.multi_node.node_stage import Alone, Messages, Visible, Window, WithinNode
from mpistrategy.mpi.multi_node.pairwise import Flight, Link, Space, exact
from mpistrategy.mpi.shared_memory.segments import ALIGNMENT, SharedMemory
from mpistrategy.mpi.tuning.thresholds import Thresholds

#: More lanes than this do not fill a network better, and make short messages.
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
    """Return how much of a buffer is one piece; more than is wanted where blocks of it would become short messages."""
    return max(thresholds.across_piece_bytes, min(lanes * nodes * _LEAST_BLOCK_BYTES, _LARGEST_PIECE_BYTES))


#: Called between two looks that found nothing new, with how many there have been.
Pause = Callable[[int], None]


class Ranks(Communicator, Protocol):
    """What the two-level exchange needs of a communicator besides its collectives."""

    def links(self, most: int) -> tuple[int, Link | None]:
        """Return how many ranks of each node have counterparts on all nodes, and this rank's counterparts."""

    def shared(self, nbytes: int) -> SharedMemory:
        """Return memory that the node's ranks see."""


def eagerly(looks: int) -> None:
    """Give the core to whoever wants it before the next look, and nap after many."""
    if looks < 500:
        os.sched_yield()
    else:
        time.sleep(5e-5)


def allreduce_across(communicator: Any, buffer: Array, op: str = "SUM", *, source: Array | None = None) -> None:
    """Replace `buffer` on every rank by the sum (MIN, MAX, PROD) over the ranks; NaN wins.  Collective.

    Args:
        communicator: the ranks, on several nodes (right, too, on one).  A view of them that `reduced_precision.on`
            returned has sums of float32 rounded between the nodes.
        buffer: contiguous; equal size and dtype on all ranks.
        op: "SUM", "MIN", "MAX" or "PROD".
        source: this rank's contribution, where it is not `buffer`; stays as it is.
    """
    flat = buffer.reshape(-1)
    brought = flat if source is None else source.reshape(-1)
    rounds = is_rounded(communicator, buffer.dtype, op)
    with np.errstate(all="ignore"):
        if hasattr(communicator, "links"):
            across_nodes(communicator).allreduce(brought, flat, op, rounds)
        else:
            _in_turn(communicator, brought, flat, op, rounds)


def is_rounded(communicator: Any, dtype: np.dtype[Any], op: str) -> bool:
    """Return whether sums travel between the nodes with fewer digits."""
    return getattr(communicator, "rounds", False) and bfloat16.travels(dtype, op)


@dataclass(frozen=True)
class Manner:
    """How to wait for messages.

    Attributes:
        pause: called between two looks that found nothing new.
        nudges: how often MPI is asked to move messages on after a pause, besides once for each piece under way.
        flights: how many pieces may be on the network at a time.
    """

    pause: Pause = eagerly
    nudges: int = 0
    flights: int = FLIGHTS


EAGER = Manner()


def across_nodes(communicator: Any, manner: Manner = EAGER) -> AcrossNodes:
    """Return the two-level exchange of a communicator; the first call is collective."""
    found: AcrossNodes = communicator.once(AcrossNodes, lambda: AcrossNodes(communicator, manner))
    return found


def _in_turn(communicator: Communicator, source: Array, target: Array, op: str, rounds: bool) -> None:
    """One step after another, for a transport that has no messages between two ranks."""
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
    node: WithinNode
    target: Array
    flight: Flight


class AcrossNodes:
    """The state of the two-level exchange; made once for a communicator.  Collective.

    Args:
        communicator: the ranks.
        manner: how to wait.
    """

    def __init__(self, communicator: Ranks, manner: Manner) -> None:
        node = communicator.node().node
        self.lanes, link = communicator.links(MOST_LANES)
        self._counterparts = link
        self._link = link if link is not None and link.size > 1 else None
        self._manner = manner
        nodes = max(communicator.node_of) + 1  # the same on ranks that have no counterparts
        self.piece_bytes = piece_bytes_for(self.lanes, nodes, communicator.thresholds)
        self._flights: deque[_Piece] = deque()
        slice_bytes = self.piece_bytes // self.lanes + ALIGNMENT
        # Twice a slice: bfloat16 takes half of one for what it sends, as much to receive, and two blocks of sums.
        self._spaces = [Space(2 * slice_bytes + 2 * ALIGNMENT * nodes) for _ in range(manner.flights)]
        self._number = 0
        self._node: WithinNode = Alone()
        memory = communicator.shared(Window.bytes_of(self.piece_bytes, manner.flights))
        if node.size > 1:
            self._node = (
                Window(memory, self.piece_bytes, manner.flights, self.lanes, self._until)
                if memory.is_shared
                else Messages(node, self.lanes)
            )

    def within(
        self, arrays: Sequence[Array], targets: Sequence[Array], finish: Callable[[Array], object]
    ) -> Visible | None:
        """Return how the arrays of a node are combined where they are, for `allreduce`; see `Visible`.

        None where the ranks of this node cannot tell each other how far they are; the other nodes need not know.
        """
        return Visible(self._node, arrays, targets, finish) if isinstance(self._node, Window) else None

    def allreduce(self, source: Array, target: Array, op: str, rounds: bool, within: WithinNode | None = None) -> None:
        """Write the combination of all ranks' `source` into `target`; flat, of one dtype; may be the same.

        With `within`, what it says is combined; both arrays are this rank's own of it then.
        """
        node = self._node if within is None else within
        elements = self.piece_bytes // target.itemsize
        for start in range(0, target.size, elements):
            piece = target[start : start + elements]
            self._number += 1
            node.bring(self._number, source[start : start + elements], piece)
            if len(self._flights) == self._manner.flights:
                self._land()
            brought, mine = node.add_up(self._number, piece, op)
            self._flights.append(_Piece(self._number, node, piece, self._take_off(brought, mine, op, rounds)))
            self._advance()
        while self._flights:
            self._land()

    def free(self) -> None:
        """Free the communicator of the counterparts, where all ranks are known to do so."""
        if self._counterparts is not None:
            self._counterparts.free()

    def _take_off(self, brought: Array, mine: Array, op: str, rounds: bool) -> Flight:
        if self._link is None:
            if mine is not brought:
                mine[...] = brought
            return Flight(None)
        tag = 2 * (self._number % _TAGS)
        space = self._spaces[self._number % self._manner.flights]
        space.clear()
        if rounds:
            return Flight(bfloat16.halved(self._link, brought, mine, tag, space))
        return Flight(exact(self._link, brought, mine, op, tag, space))

    def _land(self) -> None:
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
