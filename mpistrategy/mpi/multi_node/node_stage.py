"""The part of an all-reduce over several nodes within one node: contribute pieces, add them up, hand out the results.

All ranks of the node contribute to a piece.  The first few of them, the lanes, own a slice each: they add it up,
exchange it with the other nodes, and show the node the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpistrategy.arrays.dtypes import COMBINE, Array
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.multi_node.pairwise import blocks_of
from mpistrategy.mpi.shared_memory.bounce_buffers import combined, share
from mpistrategy.mpi.shared_memory.segments import SharedMemory
from mpistrategy.mpi.shared_memory.spin_wait import Counter, counter_bytes

# Besides the pieces on the network, the node works on one before and one after.
_MORE_BUFFERS = 2
_COUNTERS = 3


class NodeStage:
    """How the ranks of a node reach each other's pieces, which have growing numbers; here: a node of one rank."""

    def contribute(self, number: int, source: Array, target: Array) -> None:
        """Show the node this rank's piece."""
        self._source = source

    def add_up(self, number: int, target: Array, op: str) -> tuple[Array, Array]:
        """Return the sum over the node of this rank's slice of a piece, and where its result belongs."""
        return self._source, target

    def hand_out(self, number: int, target: Array) -> None:
        """Show the node the result of this rank's slice, and copy those of the others into `target`."""


class MessageStage(NodeStage):
    """By MPI's Reduce and Bcast, where the ranks share no memory."""

    def __init__(self, node: Communicator, lanes: int) -> None:
        self._node = node
        self._lanes = lanes

    def contribute(self, number: int, source: Array, target: Array) -> None:
        if source is not target:
            target[...] = source

    def add_up(self, number: int, target: Array, op: str) -> tuple[Array, Array]:
        slices = blocks_of(target, self._lanes)
        for lane, part in enumerate(slices):
            if part.size:
                self._node.reduce(part, lane, op)
        mine = slices[self._node.rank] if self._node.rank < self._lanes else target[:0]
        return mine, mine

    def hand_out(self, number: int, target: Array) -> None:
        for lane, part in enumerate(blocks_of(target, self._lanes)):
            if part.size:
                self._node.bcast(part, lane)


class BufferStage(NodeStage):
    """Through memory that all ranks of the node see.

    A buffer holds all ranks' contributions to one piece, and afterwards, in the owner's segment, each lane's result.
    Each rank counts the pieces that it has contributed to, those whose result it has shown, and those it is done with.
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
        self._sent, self._shown, self._done = (Counter(memory, line) for line in range(_COUNTERS))
        start = counter_bytes(_COUNTERS)
        self._buffers = [
            [segment[start + index * piece_bytes :][:piece_bytes] for segment in memory.segments]
            for index in range(flights + _MORE_BUFFERS)
        ]

    @staticmethod
    def bytes_of(piece_bytes: int, flights: int) -> int:
        return counter_bytes(_COUNTERS) + (flights + _MORE_BUFFERS) * piece_bytes

    def contribute(self, number: int, source: Array, target: Array) -> None:
        self._wait_for(self._done, number - len(self._buffers), self._ranks)
        self._buffer(number, source)[self._me][...] = source
        self.has_sent(number)

    def add_up(self, number: int, target: Array, op: str) -> tuple[Array, Array]:
        begin, end = self.slice_of(target)
        mine = target[begin:end]
        if mine.size:
            self.wait_for_all(number)
            combined(COMBINE[op], [theirs[begin:end] for theirs in self._buffer(number, target)], mine, mine)
        return mine, mine

    def hand_out(self, number: int, target: Array) -> None:
        buffer, borders = self._buffer(number, target), self._borders(target)
        if self._me < self._lanes:
            begin, end = borders[self._me]
            buffer[self._me][begin:end] = target[begin:end]
            self._shown.tell(number)
        self._wait_for(self._shown, number, self._lanes)
        for lane, (begin, end) in enumerate(borders):
            if lane != self._me:
                target[begin:end] = buffer[lane][begin:end]
        self._done.tell(number)

    def slice_of(self, target: Array) -> tuple[int, int]:
        """Return where the slice of a piece begins and ends that this rank owns."""
        return self._borders(target)[self._me] if self._me < self._lanes else (0, 0)

    def has_sent(self, number: int) -> None:
        """Tell the node that this rank's piece can be read."""
        self._sent.tell(number)

    def wait_for_all(self, number: int) -> None:
        """Wait until all ranks of the node have contributed to a piece."""
        self._wait_for(self._sent, number, self._ranks)

    def has_done(self, number: int) -> None:
        """Tell the node that this rank has nothing more to do with a piece."""
        if self._me < self._lanes:
            self._shown.tell(number)
        self._done.tell(number)

    def _borders(self, target: Array) -> list[tuple[int, int]]:
        return [share(target.size, lane, self._lanes, target.itemsize) for lane in range(self._lanes)]

    def _buffer(self, number: int, like: Array) -> list[Array]:
        return [part[: like.nbytes].view(like.dtype) for part in self._buffers[number % len(self._buffers)]]

    def _wait_for(self, counter: Counter, number: int, ranks: int) -> None:
        """Wait until the first `ranks` of the node have come to `number`."""
        self._until(lambda: all(theirs[0] >= number for theirs in counter.numbers[:ranks]))
        if counter.fence is not None:
            counter.fence()


class InPlaceStage(NodeStage):
    """In the ranks' own arrays, which the whole node sees: nothing is copied.

    The owner of a slice adds it up where it is and writes its result to all.  Nobody may read the results, or write
    the arrays again, before the next barrier of the node.

    Args:
        buffers: that of the same ranks, for its counters.
        arrays: of all ranks of the node, flat.
        targets: where the result goes: the arrays themselves, or others that all ranks of the node see.
        finish: what is done to a slice of the result before it is written.
    """

    def __init__(
        self, buffers: BufferStage, arrays: Sequence[Array], targets: Sequence[Array], finish: Callable[[Array], object]
    ) -> None:
        self._stage = buffers
        self._arrays, self._targets, self._finish = arrays, targets, finish
        self._begun = 0
        #: Where the pieces under way have this rank's slice, by number.
        self._slices: dict[int, slice] = {}

    def contribute(self, number: int, source: Array, target: Array) -> None:
        begin, end = self._stage.slice_of(target)
        self._slices[number] = slice(self._begun + begin, self._begun + end)
        self._begun += target.size
        self._stage.has_sent(number)

    def add_up(self, number: int, target: Array, op: str) -> tuple[Array, Array]:
        part = self._slices[number]
        mine = self._targets[0][part]
        if mine.size:
            self._stage.wait_for_all(number)
            combined(COMBINE[op], [array[part] for array in self._arrays], mine, mine)
        return mine, mine

    def hand_out(self, number: int, target: Array) -> None:
        part = self._slices.pop(number)
        mine = self._targets[0][part]
        if mine.size:
            self._finish(mine)
        for other in self._targets[1:]:
            other[part] = mine
        self._stage.has_done(number)
