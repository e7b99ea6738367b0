"""The broadcast of large arrays to nodes of several ranks: one rank of each node gets them, and shows them to its node.

Between the nodes the data go from leader to leader in pieces, several of them at a time, by MPI's Ibcast; within a node
through shared memory, piece by piece, while the next ones are on the network.  Where the sender is not the leader of
its node, the leader is one of those that it shows them to.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.interface import buffers
from mpistrategy.mpi.shared_memory import node_broadcast
from mpistrategy.mpi.shared_memory.node_broadcast import NodeBroadcast

#: Smaller arrays go by one MPI Bcast.
LEAST_BYTES = 2**16
#: The least size of a piece between nodes; with many nodes pieces grow, since MPI cuts each into one part for a node.
_PIECE_BYTES = 2**22
_LEAST_PART_BYTES = 2**16
#: How many pieces may be on the network at a time.
_FLIGHTS = 2


def piece_bytes_for(nodes: int, most: int) -> int:
    """Return the size of a piece between so many nodes, where one MPI call may carry `most` bytes."""
    return min(most, max(_PIECE_BYTES, nodes * _LEAST_PART_BYTES))


def large_broadcast(communicator: Any) -> LargeBroadcast | None:
    """Return what sends large arrays to all ranks of a communicator; the first call is collective.

    None where MPI's Bcast does it: where no ranks share memory, or where ranks outnumber the cores of their node, since
    those that wait would take the cores of those that copy.
    """

    def make() -> LargeBroadcast | None:
        if not communicator.shares_memory:
            return None
        if "crowded" in communicator.allgather_text("crowded" if communicator.is_crowded else ""):
            return None
        memory = communicator._shared_if_there_is_room(node_broadcast.segment_bytes(communicator.local_size))
        if memory is None:
            return None
        return LargeBroadcast(communicator, NodeBroadcast(memory, communicator.waiting()))

    made: LargeBroadcast | None = communicator.once(LargeBroadcast, make)
    return made


class LargeBroadcast:
    """See above.  Collective.

    Args:
        communicator: the ranks.
        node: the slots of this node.
    """

    def __init__(self, communicator: Any, node: NodeBroadcast) -> None:
        self._node = node
        self._me: int = communicator.rank
        self._local_rank: int = communicator.local_rank
        self._leaders: Any = communicator.node().leaders if communicator.nodes > 1 else None
        self._node_of = np.array(communicator.node_of)
        self._own_node: int = communicator.node_of[communicator.rank]
        self._piece_bytes = piece_bytes_for(communicator.nodes, communicator.max_count)
        self._root, self._writer = -1, 0

    def run(self, data: Array, root: int) -> None:
        """Replace `data`, bytes, on every rank by those of `root`."""
        if root != self._root:
            own = self._node_of[root] == self._own_node
            self._root = root
            self._writer = int((self._node_of[:root] == self._own_node).sum()) if own else 0
        if self._leaders is None:
            self._within(data)
        elif self._own_node == self._node_of[root]:
            self._outwards(data)
        else:
            self._inwards(data)

    def _within(self, data: Array) -> None:
        """Send or receive within the node; in the leader's pieces, which are cut into those for the slots."""
        for piece in buffers.pieces(data, self._piece_bytes):
            if self._local_rank == self._writer:
                self._node.send(piece)
            else:
                self._node.receive(piece, self._writer)

    def _outwards(self, data: Array) -> None:
        """Send from this node to the others, as its leader."""
        flights: deque[Any] = deque()
        for piece in buffers.pieces(data, self._piece_bytes):
            if self._me == self._root:
                flights.append(self._begin(piece))
                self._node.send(piece, flights[-1].Test)
            else:
                self._node.receive(piece, self._writer)
                flights.append(self._begin(piece))
            if len(flights) > _FLIGHTS:
                flights.popleft().Wait()
        for flight in flights:
            flight.Wait()

    def _inwards(self, data: Array) -> None:
        """Show this node what its leader receives."""
        pieces = list(buffers.pieces(data, self._piece_bytes))
        flights = deque(self._begin(piece) for piece in pieces[:_FLIGHTS])
        for number, piece in enumerate(pieces, _FLIGHTS):
            flights.popleft().Wait()
            if number < len(pieces):
                flights.append(self._begin(pieces[number]))
            self._node.send(piece, flights[0].Test if flights else lambda: None)

    def _begin(self, piece: Array) -> Any:
        return self._leaders._comm.Ibcast(piece, int(self._node_of[self._root]))
