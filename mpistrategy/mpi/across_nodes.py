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

from mpistrategy.arrays import Array
from mpistrategy.mpi import bfloat16, counters
from mpistrategy.mpi.counters import Counter
from mpistrategy.mpi.exchange import Flight, Link, Space, blocks_of, combined, exact
from mpistrategy.mpi.shared_memory import ALIGNMENT, SharedMemory
from mpistrategy.mpi.transport import Communicator
from mpistrategy.mpi.window import share

#: From here on `MpiCommunicator.allreduce` comes here; one call of MPI is faster with less (measured at 1 Gbit/s).
LEAST_BYTES = 256 * 2**10
#: More lanes than this do not fill a network better, and make short messages.
MOST_LANES = 4
#: How much of the buffer is one piece; more where blocks of it would become short messages.
PIECE_BYTES = 2**20
_LEAST_BLOCK_BYTES = 32 * 2**10
_LARGEST_PIECE_BYTES = 2**22
#: How many pieces may be on the network at a time.
FLIGHTS = 4
# Besides the pieces on the network, the node works on one before and one after.
_MORE_SLOTS = 2
_COUNTERS = 3
_TAGS = 2**12


def lanes_of(node_of: Sequence[int], most: int = MOST_LANES) -> int:
    """Return how many ranks of each node have a counterpart on every node, up to `most`."""
    return min(most, *map(node_of.count, node_of))


def piece_bytes_for(lanes: int, nodes: int) -> int:
    """Return how much of a buffer is one piece."""
    return max(PIECE_BYTES, min(lanes * nodes * _LEAST_BLOCK_BYTES, _LARGEST_PIECE_BYTES))


#: Called between two looks that found nothing new, with how many there have been.
Pause = Callable[[int], None]


class Ranks(Communicator, Protocol):
    """What the two-level exchange needs of a communicator besides the verbs."""

    across: Any

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
        communicator: the ranks, on several nodes (right, too, on one).  A view of them that `mpistrategy.mpi.wire.on`
            returned has sums of float32 rounded between the nodes.
        buffer: contiguous; equal size and dtype on all ranks.
        op: "SUM", "MIN", "MAX" or "PROD".
        source: this rank's contribution, where it is not `buffer`; stays as it is.
    """
    flat = buffer.reshape(-1)
    brought = flat if source is None else source.reshape(-1)
    rounds = getattr(communicator, "rounds", False) and bfloat16.travels(buffer.dtype, op)
    with np.errstate(all="ignore"):
        if hasattr(communicator, "links"):
            across_nodes(communicator).allreduce(brought, flat, op, rounds)
        else:
            _in_turn(communicator, brought, flat, op, rounds)


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
    if communicator.across is None:
        communicator.across = AcrossNodes(communicator, manner)
    found: AcrossNodes = communicator.across
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
        self._link = link if link is not None and link.size > 1 else None
        self._manner = manner
        nodes = max(communicator.node_of) + 1  # the same on ranks that have no counterparts
        self.piece_bytes = piece_bytes_for(self.lanes, nodes)
        self._flights: deque[_Piece] = deque()
        slice_bytes = self.piece_bytes // self.lanes + ALIGNMENT
        # Twice a slice: bfloat16 takes half of one for what it sends, as much to receive, and two blocks of sums.
        self._spaces = [Space(2 * slice_bytes + 2 * ALIGNMENT * nodes) for _ in range(manner.flights)]
        self._number = 0
        self._node: _Alone | _Window | _Messages = _Alone()
        memory = communicator.shared(_Window.bytes_of(self.piece_bytes, manner.flights))
        if node.size > 1:
            self._node = (
                _Window(memory, self.piece_bytes, manner.flights, self.lanes, self._until)
                if memory.is_shared
                else _Messages(node, self.lanes)
            )

    def allreduce(self, source: Array, target: Array, op: str, rounds: bool) -> None:
        """Write the combination of all ranks' `source` into `target`; flat, of one dtype; may be the same."""
        elements = self.piece_bytes // target.itemsize
        for start in range(0, target.size, elements):
            piece = target[start : start + elements]
            self._number += 1
            self._node.bring(self._number, source[start : start + elements], piece)
            if len(self._flights) == self._manner.flights:
                self._land()
            brought, mine = self._node.add_up(self._number, piece, op)
            self._flights.append(_Piece(self._number, piece, self._take_off(brought, mine, op, rounds)))
            self._advance()
        while self._flights:
            self._land()

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
        self._node.hand_out(piece.number, piece.target)

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


class _Alone:
    """The only rank of its node."""

    def bring(self, number: int, source: Array, target: Array) -> None:
        self._source = source

    def add_up(self, number: int, target: Array, op: str) -> tuple[Array, Array]:
        return self._source, target

    def hand_out(self, number: int, target: Array) -> None:
        pass


class _Messages:
    """The node's ranks by MPI's Reduce and Bcast, where they share no memory."""

    def __init__(self, node: Communicator, lanes: int) -> None:
        self._node = node
        self._lanes = lanes

    def bring(self, number: int, source: Array, target: Array) -> None:
        if source is not target:
            target[...] = source

    def add_up(self, number: int, target: Array, op: str) -> tuple[Array, Array]:
        slices = self._slices(target)
        for lane, part in enumerate(slices):
            if part.size:
                self._node.reduce(part, lane, op)
        mine = slices[self._node.rank] if self._node.rank < self._lanes else target[:0]
        return mine, mine

    def hand_out(self, number: int, target: Array) -> None:
        for lane, part in enumerate(self._slices(target)):
            if part.size:
                self._node.bcast(part, lane)

    def _slices(self, target: Array) -> list[Array]:
        return blocks_of(target, self._lanes)


class _Window:
    """The node's ranks through memory that all of them see.

    A slot holds what each rank has brought of one piece, and afterwards, in the owner's segment, each lane's result.
    Each rank counts the pieces that it has brought, those whose result it has shown, and those it is done with.
    """

    def __init__(
        self,
        memory: SharedMemory,
        piece_bytes: int,
        flights: int,
        lanes: int,
        until: Callable[[Callable[[], bool]], None],
    ) -> None:
        self._me, self._ranks = memory.local_rank, len(memory.segments)
        self._lanes = lanes
        self._until = until
        self._brought, self._shown, self._done = (Counter(memory, line) for line in range(_COUNTERS))
        start = counters.bytes_of(_COUNTERS)
        self._slots = [
            [segment[start + slot * piece_bytes :][:piece_bytes] for segment in memory.segments]
            for slot in range(flights + _MORE_SLOTS)
        ]

    @staticmethod
    def bytes_of(piece_bytes: int, flights: int) -> int:
        return counters.bytes_of(_COUNTERS) + (flights + _MORE_SLOTS) * piece_bytes

    def bring(self, number: int, source: Array, target: Array) -> None:
        self._wait_for(self._done, number - len(self._slots), self._ranks)
        self._slot(number, source)[self._me][...] = source
        self._brought.tell(number)

    def add_up(self, number: int, target: Array, op: str) -> tuple[Array, Array]:
        begin, end = self._borders(target)[self._me] if self._me < self._lanes else (0, 0)
        mine = target[begin:end]
        if mine.size:
            self._wait_for(self._brought, number, self._ranks)
            combined([brought[begin:end] for brought in self._slot(number, target)], op, out=mine)
        return mine, mine

    def hand_out(self, number: int, target: Array) -> None:
        slot, borders = self._slot(number, target), self._borders(target)
        if self._me < self._lanes:
            begin, end = borders[self._me]
            slot[self._me][begin:end] = target[begin:end]
            self._shown.tell(number)
        self._wait_for(self._shown, number, self._lanes)
        for lane, (begin, end) in enumerate(borders):
            if lane != self._me:
                target[begin:end] = slot[lane][begin:end]
        self._done.tell(number)

    def _borders(self, target: Array) -> list[tuple[int, int]]:
        return [share(target.size, lane, self._lanes, target.itemsize) for lane in range(self._lanes)]

    def _slot(self, number: int, like: Array) -> list[Array]:
        return [part[: like.nbytes].view(like.dtype) for part in self._slots[number % len(self._slots)]]

    def _wait_for(self, counter: Counter, number: int, ranks: int) -> None:
        """Wait until the first `ranks` of the node have come to `number`."""
        self._until(lambda: all(theirs[0] >= number for theirs in counter.numbers[:ranks]))
        if counter.fence is not None:
            counter.fence()
