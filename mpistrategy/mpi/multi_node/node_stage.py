"""What the ranks of one node do of an all-reduce over several nodes: bring arrays, add them up, hand out the result.

A piece is brought by all ranks of the node; the first few of them, the lanes, own a slice each, add it up, and after it
has been exchanged with the other nodes show the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.multi_node.pairwise import blocks_of, combined
from mpistrategy.mpi.shared_memory.bounce_buffers import share
from mpistrategy.mpi.shared_memory.segments import SharedMemory
from mpistrategy.mpi.shared_memory.spin_wait import Counter, counter_bytes

# Besides the pieces on the network, the node works on one before and one after.
_MORE_SLOTS = 2
_COUNTERS = 3


class WithinNode(Protocol):
    """How the ranks of a node reach each other's arrays; pieces have numbers, which grow by one."""

    def bring(self, number: int, source: Array, target: Array) -> None:
        """Show the node this rank's piece."""

    def add_up(self, number: int, target: Array, op: str) -> tuple[Array, Array]:
        """Return the sum over the node of this rank's slice of a piece, and where its result belongs."""

    def hand_out(self, number: int, target: Array) -> None:
        """Show the node the result of this rank's slice, and bring those of the others into `target`."""


class Alone:
    """The only rank of its node."""

    def bring(self, number: int, source: Array, target: Array) -> None:
        self._source = source

    def add_up(self, number: int, target: Array, op: str) -> tuple[Array, Array]:
        return self._source, target

    def hand_out(self, number: int, target: Array) -> None:
        pass


class Messages:
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


class Window:
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
        start = counter_bytes(_COUNTERS)
        self._slots = [
            [segment[start + slot * piece_bytes :][:piece_bytes] for segment in memory.segments]
            for slot in range(flights + _MORE_SLOTS)
        ]

    @staticmethod
    def bytes_of(piece_bytes: int, flights: int) -> int:
        return counter_bytes(_COUNTERS) + (flights + _MORE_SLOTS) * piece_bytes

    def bring(self, number: int, source: Array, target: Array) -> None:
        self._wait_for(self._done, number - len(self._slots), self._ranks)
        self._slot(number, source)[self._me][...] = source
        self.has_brought(number)

    def add_up(self, number: int, target: Array, op: str) -> tuple[Array, Array]:
        begin, end = self.slice_of(target)
        mine = target[begin:end]
        if mine.size:
            self.wait_for_all(number)
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

    def slice_of(self, target: Array) -> tuple[int, int]:
        """Return where the slice of a piece begins and ends that this rank owns."""
        return self._borders(target)[self._me] if self._me < self._lanes else (0, 0)

    def has_brought(self, number: int) -> None:
        """Tell the node that this rank's piece can be read."""
        self._brought.tell(number)

    def wait_for_all(self, number: int) -> None:
        """Wait until the whole node has brought a piece."""
        self._wait_for(self._brought, number, self._ranks)

    def has_done(self, number: int) -> None:
        """Tell the node that this rank has nothing more to do with a piece."""
        if self._me < self._lanes:
            self._shown.tell(number)
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


class Visible:
    """The node's ranks through their own arrays, which all of them see: nothing is copied.

    The owner of a slice adds it up where it is and writes its result to all.  Nobody may read the results, or write
    the arrays again, before the ranks of the node have met once more.

    Args:
        window: that of the same ranks, for its counters.
        arrays: of all ranks of the node, flat.
        targets: where the result goes: the arrays themselves, or others that all ranks of the node see.
        finish: what is done to a slice of the result before it is written.
    """

    def __init__(
        self, window: Window, arrays: Sequence[Array], targets: Sequence[Array], finish: Callable[[Array], object]
    ) -> None:
        self._window = window
        self._arrays, self._targets, self._finish = arrays, targets, finish
        self._begun = 0
        #: Where the pieces under way have this rank's slice, by number.
        self._slices: dict[int, slice] = {}

    def bring(self, number: int, source: Array, target: Array) -> None:
        begin, end = self._window.slice_of(target)
        self._slices[number] = slice(self._begun + begin, self._begun + end)
        self._begun += target.size
        self._window.has_brought(number)

    def add_up(self, number: int, target: Array, op: str) -> tuple[Array, Array]:
        part = self._slices[number]
        mine = self._targets[0][part]
        if mine.size:
            self._window.wait_for_all(number)
            combined([array[part] for array in self._arrays], op, out=mine)
        return mine, mine

    def hand_out(self, number: int, target: Array) -> None:
        part = self._slices.pop(number)
        mine = self._targets[0][part]
        if mine.size:
            self._finish(mine)
        for other in self._targets[1:]:
            other[part] = mine
        self._window.has_done(number)
