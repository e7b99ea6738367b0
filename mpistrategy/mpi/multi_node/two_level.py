"""The all-reduce over ranks on several nodes: within each node, between the nodes, and back, in pieces.

Every rank of a node is a lane, and owns a part of every piece.  A lane adds up its part over its node, combines it with
its counterparts on the other nodes by MPI's Allreduce, and shows its node the result.  So each byte crosses the network
as often as it must and no more.  A single piece takes a blocking call: nothing can fail on one rank between the
agreement and it.

Two pieces are under way at a time: while one is on the network, the node adds up the next.  Who adds what depends only
on the placement of the ranks: equal runs give equal bits.

Where the ranks of a node share no memory, and in simulated jobs, the levels take turns with the whole array.
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
from mpistrategy.mpi.interface.communicator import Communicator, NodeGroups
from mpistrategy.mpi.multi_node.lanes import every_rank
from mpistrategy.mpi.multi_node.node_stage import BufferStage, InPlaceStage, NodeStage, Piece
from mpistrategy.mpi.multi_node.rounded_exchange import Rounded, Wire
from mpistrategy.mpi.shared_memory.segments import ALIGNMENT

#: Larger buffers go in pieces of this.
PIECE_BYTES = 4 * 2**20
#: All buffers of a node together take no more; with many ranks on a node the pieces become smaller.
NODE_BYTES = 2**26
#: So many pieces have memory: one on the network, and one on which the node works.
BUFFERS = 2
_LEAST_PIECE_BYTES = 2**12
_REMEMBERED = 128
#: A rank that waits for its node without a message under way calls MPI once in so many looks.
_LOOKS_WITHOUT_MPI = 16


def piece_bytes_for(node_of: Sequence[int]) -> int:
    """Return how much of a buffer is one piece; the same on all ranks."""
    most = NODE_BYTES // (BUFFERS * max(Counter(node_of).values())) // ALIGNMENT * ALIGNMENT
    return min(PIECE_BYTES, max(most, _LEAST_PIECE_BYTES))


def shared_bytes(node_of: Sequence[int]) -> int:
    """Return how much memory each rank of a node with several shares, from the first use on."""
    return BufferStage.bytes_of(piece_bytes_for(node_of), BUFFERS)


def eagerly(looks: int) -> None:
    """Give the core away before the next look; nap after many looks."""
    if looks < 500:
        os.sched_yield()
    else:
        time.sleep(5e-5)


def crowded(looks: int) -> None:
    """Nap before the next look but one: ranks that outnumber their cores would take them from those that work.

    4 nodes of 4 ranks on 2 cores, over a bare Allreduce: 1 MiB 1.7 by `eagerly`, 1.0 so; 4 MiB 1.0 and 0.75.
    """
    if looks == 1:
        os.sched_yield()
    else:
        time.sleep(5e-5)


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
        across_nodes(communicator).allreduce(mine, flat, op, wire)


def allreduce(ranks: Communicator, buffer: Array, op: str, source: Array | None, wire: Wire) -> None:
    """Do `Communicator.allreduce`; where there is a `wire`, `allreduce_across`."""
    if wire is None:
        ranks.allreduce(buffer, op, source)
    else:
        allreduce_across(ranks, buffer, op, source=source, wire=wire)


@dataclass(frozen=True)
class Manner:
    """How to wait for messages.

    Attributes:
        pause: called between two looks that found nothing new, with how many there have been.
        nudges: how often MPI is asked to move messages on after a pause, besides once for each piece under way.
        blocks: whether a single piece may take a blocking call of MPI.
    """

    pause: Callable[[int], None] = eagerly
    nudges: int = 0
    blocks: bool = True


EAGER = Manner()
CROWDED = Manner(crowded)


def across_nodes(communicator: Any) -> AcrossNodes:
    """Return the two-level all-reduce of a communicator; the first call is collective."""
    found: AcrossNodes = communicator.once(AcrossNodes, lambda: AcrossNodes(communicator))
    return found


class Flight:
    """The exchange of one piece between the nodes.

    Args:
        steps: yields the messages that must be done before the next step.
    """

    def __init__(self, steps: Iterator[list[Any]]) -> None:
        self._steps = steps
        self._messages: list[Any] = []
        self.is_over: bool = False
        self.advance()

    def nudge(self) -> None:
        """Let MPI move messages on."""
        if self._messages:
            self._messages[-1].Test()

    def advance(self) -> bool:
        """Go on as far as messages have arrived; return whether anything happened.  Never waits."""
        moved = False
        while not self.is_over:
            while self._messages:
                if not self._messages[-1].Test():
                    return moved
                self._messages.pop()
            following = next(self._steps, None)
            self.is_over, self._messages, moved = following is None, following or [], True
        return moved


class AcrossNodes(Freed):
    """The state of the two-level all-reduce; made once for a communicator.  Collective."""

    def __init__(self, communicator: Any) -> None:
        nodes = communicator.nodes
        usual = CROWDED if communicator.is_crowded else EAGER
        self._manner: Manner = getattr(communicator, "manner", None) or usual
        #: The pieces under way, and their exchange with other nodes.
        self._flights: deque[tuple[NodeStage, Piece, Flight]] = deque()
        self._number = 0
        self._progress: Callable[[], object] = communicator.progress
        self._on_all = communicator.guard.on_all
        self._links: list[Any] = []
        self._new_links: Callable[[], list[Any]] = list
        self._slices: dict[tuple[int, int], list[tuple[Any, slice]]] = {}
        #: How slices of this rank are exchanged where they are rounded, for each piece under way.
        self._rounded: list[list[Rounded]] = []
        self._groups: NodeGroups | None = None
        self._node = NodeStage()
        self._lanes = every_rank(communicator.node_of, communicator.rank)
        self.piece_bytes: int = piece_bytes_for(communicator.node_of)
        nbytes = BufferStage.bytes_of(self.piece_bytes, BUFFERS)
        memory = communicator.shared(nbytes) if communicator.size > nodes else None
        if not communicator.has_links or (memory is not None and not memory.is_shared):
            self._groups = communicator.node()
            return
        if memory is not None and len(memory.segments) > 1:
            self._node = BufferStage(memory, self.piece_bytes, BUFFERS, self._lanes, self._until)
        if nodes > 1:
            self._new_links = partial(communicator.links, self._lanes.counterparts)
            self._links = self._new_links()

    def within(
        self, arrays: Sequence[Array], targets: Sequence[Array], finish: Callable[[Array], object]
    ) -> InPlaceStage | None:
        """Return the stage that combines the arrays of this node where they are, for `allreduce`; see `InPlaceStage`.

        None where the ranks of this node share no counters; the other nodes need not know.
        """
        return InPlaceStage(self._node, arrays, targets, finish) if isinstance(self._node, BufferStage) else None

    def allreduce(self, source: Array, target: Array, op: str, wire: Wire, within: NodeStage | None = None) -> None:
        """Write the combination of all ranks' `source` into `target`; flat, of one dtype; may be the same.

        `wire` is that of `allreduce_across`.  With `within`, the arrays of that stage are combined; `source` and
        `target` are then this rank's own.
        """
        if self._groups is not None:
            self._in_turn(self._groups, source, target, op, wire)
            return
        node = self._node if within is None else within
        if wire is None and self._manner.blocks and 0 < target.nbytes <= self.piece_bytes:
            self._at_once(node, source, target, op)
            return
        if wire is not None and not self._rounded:
            self._rounded = self._new_rounded(wire)
        elements = self.piece_bytes // target.itemsize
        for start in range(0, target.size, elements):
            self._number += 1
            part = slice(start, start + elements)
            piece = Piece(self._number, start, source[part], target[part])
            node.contribute(piece)
            self._advance()
            result = _in_place(*node.add_up(piece, op))
            self._flights.append((node, piece, Flight(self._exchange(piece, result, op, wire))))
            self._advance()
            while len(self._flights) >= BUFFERS:
                self._end_first()
        while self._flights:
            self._end_first()

    def _new_rounded(self, wire: np.dtype[Any]) -> list[list[Rounded]]:
        """Return how the slices of this rank are exchanged, for each piece under way.  Collective."""
        itemsize = np.dtype(np.float32).itemsize
        most = self._lanes.longest_slice(self.piece_bytes // itemsize, itemsize)
        links = [self._new_links() for _ in range(BUFFERS)]  # ranks may start two pieces' messages in any order

        def made() -> list[list[Rounded]]:
            return [[Rounded(link, most, wire) for link in those] for those in links]

        rounded: list[list[Rounded]] = self._on_all(made)
        return rounded

    def _at_once(self, node: NodeStage, source: Array, target: Array, op: str) -> None:
        """Do `allreduce` with a single piece, by a blocking call of MPI for each slice of this rank."""
        self._number += 1
        piece = Piece(self._number, 0, source, target)
        node.contribute(piece)
        result = _in_place(*node.add_up(piece, op))
        for link, part in self._linked(piece):
            link.reduce_by_mpi(result[part], op)
        node.hand_out(piece)

    def _exchange(self, piece: Piece, result: Array, op: str, wire: Wire) -> Iterator[list[Any]]:
        """Combine the slices of this rank with those of its counterparts, without waiting."""
        if wire is None:
            yield [link.begin_to_reduce_by_mpi(result[part], op) for link, part in self._linked(piece)]
            return
        slices = self._lanes.slices_of(piece.target.size, piece.target.itemsize)
        for part, rounded in zip(slices, self._rounded[piece.number % BUFFERS], strict=True):
            if part.stop > part.start:
                yield from rounded.exchange(result[part])

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
        elif leaders.has_links:
            across_nodes(leaders).allreduce(target, target, op, wire)
        else:
            _round(target, wire)
            leaders.allreduce(target, op)
            _round(target, wire)
        groups.node.bcast(target, 0)

    def free(self) -> None:
        """Free the communicators of the counterparts, where all ranks are known to do so."""
        for link in (*self._links, *(each.link for those in self._rounded for each in those)):
            link.free()

    def _linked(self, piece: Piece) -> Sequence[tuple[Any, slice]]:
        """Return the counterparts of each slice of this rank, and the slice, counted from where its part begins.

        Slices without elements are left out.
        """
        key = (piece.target.size, piece.target.itemsize)
        found = self._slices.get(key)
        if found is None:
            if len(self._slices) >= _REMEMBERED:
                self._slices.clear()
            pairs = zip(self._links, self._lanes.slices_of(*key), strict=bool(self._links))
            found = self._slices[key] = [(link, part) for link, part in pairs if part.stop > part.start]
        return found

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
                if not self._flights and looks % _LOOKS_WITHOUT_MPI == 0:
                    self._progress()  # what this rank sent last may still lie in MPI's own memory
                for _ in range(self._manner.nudges if self._flights else 0):
                    self._flights[0][-1].nudge()


def _in_place(total: Array, result: Array) -> Array:
    if result is not total:
        result[...] = total
    return result


def _round(values: Array, wire: Wire) -> None:
    """Round values in place to the dtype that travels, where it is another one."""
    if wire is not None:
        values[...] = values.astype(wire)
