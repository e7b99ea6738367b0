"""The all-reduce over ranks on several nodes: within each node, between the nodes, and back, in pieces.

Some ranks of each node are lanes, and own a part of every piece.  A lane adds up its part over its node, combines it
with its counterparts on the other nodes, and shows its node the result.  So each byte crosses the network as often as
it must and no more.  There are two ways between the counterparts:

* "lanes": every rank is one, and MPI's Allreduce combines what the counterparts have.  A single piece takes a blocking
  call: nothing can fail on one rank between the agreement and it.
* "across": up to four ranks of a node are lanes, and exchange pairwise (`pairwise`).  It takes 2 (nodes - 1) messages a
  piece, for few nodes.  It can round what travels, and needs no promise of MPI that all ranks get the same bits.

Two or more pieces are under way at a time: while one is on the network, the node adds up those that follow.  Who adds
what depends only on the placement of the ranks: equal runs give equal bits, and all ranks get the same ones.

Where the ranks of a node share no memory, and in simulated jobs, the levels take turns with the whole array.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.interface.communicator import NodeGroups
from mpistrategy.mpi.multi_node.lanes import Lanes, every_rank, few_ranks
from mpistrategy.mpi.multi_node.node_stage import BufferStage, InPlaceStage, NodeStage, Piece
from mpistrategy.mpi.multi_node.pairwise import Flight, Request, Space, Steps, Wire, reduce_pairwise
from mpistrategy.mpi.shared_memory.segments import ALIGNMENT
from mpistrategy.mpi.tuning.costs import (
    LANES_PIECE_BYTES,
    MOST_NODES_PAIRWISE,
    PAIRWISE_FLIGHTS,
    PAIRWISE_LANES,
    pairwise_piece_bytes,
)
from mpistrategy.mpi.tuning.thresholds import Thresholds

#: How counterparts combine what they have: by MPI's Allreduce, or pairwise.
Way = Literal["lanes", "across"]

#: All buffers of a node together take no more; with many ranks on a node the pieces become smaller.
NODE_BYTES = 2**26
_LEAST_PIECE_BYTES = 2**12
_TAGS = 2**12
_REMEMBERED = 128
#: A rank that waits for its node without a message under way calls MPI once in so many looks.
_LOOKS_WITHOUT_MPI = 16


def lanes_of(way: Way, node_of: Sequence[int], rank: int) -> Lanes:
    """Return who the lanes are."""
    return every_rank(node_of, rank) if way == "lanes" else few_ranks(node_of, rank)


def buffers_for(way: Way, flights: int) -> int:
    """Return how many pieces have memory: those on the network, and one on which the node works.

    MPI's own Allreduce fills the network with one piece.
    """
    return 2 if way == "lanes" else flights + 1


def piece_bytes_for(way: Way, node_of: Sequence[int], thresholds: Thresholds, flights: int = PAIRWISE_FLIGHTS) -> int:
    """Return how much of a buffer is one piece; the same on all ranks."""
    buffers = buffers_for(way, flights)
    sizes, wanted = Counter(node_of).values(), LANES_PIECE_BYTES
    if way == "across":
        wanted = pairwise_piece_bytes(min(PAIRWISE_LANES, *sizes), len(sizes), thresholds)
    most = NODE_BYTES // (buffers * max(sizes)) // ALIGNMENT * ALIGNMENT
    return min(wanted, max(most, _LEAST_PIECE_BYTES))


def shared_bytes(way: Way, node_of: Sequence[int], thresholds: Thresholds, flights: int = PAIRWISE_FLIGHTS) -> int:
    """Return how much memory each rank of a node with several shares for a way, from its first use on."""
    piece_bytes = piece_bytes_for(way, node_of, thresholds, flights)
    return BufferStage.bytes_of(piece_bytes, buffers_for(way, flights))


def way_between(nodes: int, *, rounds: bool = False) -> Way:
    """Return the way of those who want the two levels at any size: pairwise between few nodes.

    The engine of `all_reduce_async` does.  8 nodes of one rank, wall time over a bare Allreduce, pairwise and by lanes:
    256 KiB 3.4 and 5.3, 1 MiB 1.6 and 2.4, 16 MiB 0.9 and 1.0; 4 nodes 1.7 and 2.1, 1.4 and 1.9, 0.6 and 0.7.
    """
    return "across" if rounds or nodes <= MOST_NODES_PAIRWISE else "lanes"


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
    communicator: Any, buffer: Array, op: str = "SUM", *, source: Array | None = None, way: Way | None = None
) -> None:
    """Replace `buffer` on every rank by the sum (MIN, MAX, PROD) over the ranks; NaN wins.  Collective.

    Args:
        communicator: the ranks, on any number of nodes.  With a view that `reduced_precision.on` returned, float32 sums
            are rounded between the nodes.
        buffer: contiguous; equal size and dtype on all ranks.
        op: "SUM", "MIN", "MAX" or "PROD".
        source: this rank's contribution, where it is not `buffer`; stays as it is.
        way: between the nodes; None means that of `way_between`.
    """
    flat = buffer.reshape(-1)
    mine = flat if source is None else source.reshape(-1)
    wire = wire_between_nodes(communicator, buffer.dtype, op)
    if way is None:
        way = way_between(communicator.nodes, rounds=wire is not None)
        if way == "lanes" and hasattr(communicator, "tried"):
            way = communicator.tried(way)
    with np.errstate(all="ignore"):
        across_nodes(communicator, way).allreduce(mine, flat, op, wire)


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
        flights: how many pieces may be on the network while the node works on one.
        blocks: whether a single piece may take a blocking call of MPI.
    """

    pause: Callable[[int], None] = eagerly
    nudges: int = 0
    flights: int = PAIRWISE_FLIGHTS
    blocks: bool = True


EAGER = Manner()
CROWDED = Manner(crowded)


def across_nodes(communicator: Any, way: Way, manner: Manner | None = None) -> AcrossNodes:
    """Return the two-level exchange of a communicator; the first call for each way is collective."""
    usual = CROWDED if getattr(communicator, "is_crowded", False) else EAGER
    chosen: Manner = manner or getattr(communicator, "manner", None) or usual
    found: AcrossNodes = communicator.once((AcrossNodes, way), lambda: AcrossNodes(communicator, way, chosen))
    return found


class AcrossNodes:
    """The state of the two-level all-reduce; made once for a communicator and a way.  Collective."""

    def __init__(self, communicator: Any, way: Way, manner: Manner) -> None:
        nodes = communicator.nodes
        self._way, self._manner = way, manner
        #: The pieces under way: who adds them up on this node, what they are, and their exchange with other nodes.
        self._flights: deque[tuple[NodeStage, Piece, Flight]] = deque()
        self._number = 0
        self._progress: Callable[[], object] = getattr(communicator, "progress", lambda: None)
        self._links: list[Any] = []
        self._slices: dict[tuple[int, int], list[tuple[Any, slice]]] = {}
        self._groups: NodeGroups | None = None
        self._node = NodeStage()
        self._lanes = lanes_of(way, communicator.node_of, communicator.rank)
        self._buffers = buffers_for(way, manner.flights)
        self.piece_bytes: int = piece_bytes_for(way, communicator.node_of, communicator.thresholds, manner.flights)
        self._spaces: list[Space] = communicator.guard.on_all(partial(self._new_spaces, nodes))
        nbytes = BufferStage.bytes_of(self.piece_bytes, self._buffers)
        memory = communicator.shared(nbytes) if communicator.size > nodes else None
        if not hasattr(communicator, "links") or (memory is not None and not memory.is_shared):
            self._groups = communicator.node()
            return
        if memory is not None and len(memory.segments) > 1:
            self._node = BufferStage(memory, self.piece_bytes, self._buffers, self._lanes, self._until)
        if nodes > 1:
            self._links = communicator.links(self._lanes.counterparts)

    def _new_spaces(self, nodes: int) -> list[Space]:
        """Return memory for blocks that the pairwise exchange receives."""
        if self._way == "lanes":
            return []
        slice_bytes = self.piece_bytes // self._lanes.slices + ALIGNMENT
        # Twice a slice: bfloat16 takes half of one for what it sends, as much to receive, and two blocks of sums.
        return [Space(2 * slice_bytes + 2 * ALIGNMENT * nodes) for _ in range(self._buffers)]

    @property
    def in_turn(self) -> bool:
        """Whether the levels take turns with the whole array, since the ranks of a node share no memory."""
        return self._groups is not None

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
        if self._is_one_piece(target):
            self._at_once(node, source, target, op)
            return
        elements = self.piece_bytes // target.itemsize
        for start in range(0, target.size, elements):
            self._number += 1
            part = slice(start, start + elements)
            piece = Piece(self._number, start, source[part], target[part])
            node.contribute(piece)
            self._advance()
            self._flights.append((node, piece, self._begin(piece, *node.add_up(piece, op), op, wire)))
            self._advance()
            while len(self._flights) >= self._buffers:
                self._end_first()
        while self._flights:
            self._end_first()

    def _is_one_piece(self, array: Array) -> bool:
        """Return whether `allreduce` takes one blocking call of MPI for a slice of this rank."""
        return self._way == "lanes" and self._manner.blocks and 0 < array.nbytes <= self.piece_bytes

    def _at_once(self, node: NodeStage, source: Array, target: Array, op: str) -> None:
        """Do `allreduce` with a single piece, by a blocking call of MPI for each slice of this rank."""
        self._number += 1
        piece = Piece(self._number, 0, source, target)
        node.contribute(piece)
        result = _in_place(*node.add_up(piece, op))
        for link, part in self._linked(piece):
            link.reduce_by_mpi(result[part], op)
        node.hand_out(piece)

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
            across_nodes(leaders, self._way, self._manner).allreduce(target, target, op, wire)
        else:
            _round(target, wire)
            leaders.allreduce(target, op)
            _round(target, wire)
        groups.node.bcast(target, 0)

    def free(self) -> None:
        """Free the communicators of the counterparts, where all ranks are known to do so."""
        for link in self._links:
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

    def _begin(self, piece: Piece, total: Array, result: Array, op: str, wire: Wire) -> Flight:
        if not self._links:
            _in_place(total, result)
            return Flight(None)
        if self._way == "lanes":
            return Flight(self._by_mpi(piece, _in_place(total, result), op))
        tag = 2 * (self._number % _TAGS)
        space = self._spaces[self._number % self._buffers]
        space.clear()
        return Flight(reduce_pairwise(self._links[0], total, result, op, tag, space, wire))

    def _by_mpi(self, piece: Piece, result: Array, op: str) -> Steps:
        """Combine the slices of this rank with those of its counterparts by MPI, without waiting."""
        begun: list[Request] = [link.begin_to_reduce_by_mpi(result[part], op) for link, part in self._linked(piece)]
        yield begun

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
