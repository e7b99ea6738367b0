"""The part of an all-reduce over several nodes within one node: contribute pieces, add them up, hand out the results.

All ranks of the node contribute to a piece.  The lanes own a part of it each: they add it up, exchange it with the
other nodes, and show the node the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.multi_node.lanes import Lanes
from mpistrategy.mpi.shared_memory.node_sum import in_rank_order
from mpistrategy.mpi.shared_memory.segments import SharedMemory
from mpistrategy.mpi.shared_memory.spin_wait import Counter, counter_bytes

_COUNTERS = 3
_REMEMBERED = 128


class Piece(NamedTuple):
    """A part of this rank's arrays: its number, which grows by one, where it begins, and what of them is in it."""

    number: int
    start: int
    source: Array
    target: Array


class _Views(NamedTuple):
    """Where pieces of one size and dtype lie in a buffer.

    Attributes:
        mine: all of this rank's.
        own: the part that this rank owns.
        parts: what all ranks of the node have of it.
        result: where this rank shows its result.
        others: the parts of the other owners, and where they show their results.
    """

    mine: Array
    own: slice
    parts: list[Array]
    result: Array
    others: list[tuple[slice, Array]]


class NodeStage:
    """How the ranks of a node reach each other's pieces; here: a node of one rank."""

    def contribute(self, piece: Piece) -> None:
        """Show the node this rank's source."""

    def add_up(self, piece: Piece, op: str) -> tuple[Array, Array]:
        """Return the sum over the node of this rank's part, and where its result belongs."""
        return piece.source, piece.target

    def hand_out(self, piece: Piece) -> None:
        """Show the node the result of this rank's part, and copy those of the others into the target."""


class BufferStage(NodeStage):
    """Through memory that all ranks of the node see.

    A buffer holds all ranks' contributions to one piece, and afterwards, in the owner's segment, each lane's result.
    Each rank counts the pieces that it has sent, those whose result it has shown, and those it is done with; it sends a
    piece when all ranks are done with the one that was in its buffer before.
    """

    def __init__(
        self,
        memory: SharedMemory,
        piece_bytes: int,
        buffers: int,
        lanes: Lanes,
        until: Callable[[Callable[[], bool]], None],
    ) -> None:
        self._me, self._lanes, self._owners = memory.local_rank, lanes, lanes.owners
        self._ranks = range(len(memory.segments))
        self._until = until
        sent, self._shown, self._done = (Counter(memory, line) for line in range(_COUNTERS))
        self.sent: Counter = sent
        self._known: dict[tuple[int, Any, int], _Views] = {}
        start = counter_bytes(_COUNTERS)
        self._buffers = [
            [segment[start + index * piece_bytes :][:piece_bytes] for segment in memory.segments]
            for index in range(buffers)
        ]

    @staticmethod
    def bytes_of(piece_bytes: int, buffers: int) -> int:
        """Return how much memory of each rank it takes."""
        return counter_bytes(_COUNTERS) + buffers * piece_bytes

    def contribute(self, piece: Piece) -> None:
        self._wait_for(self._done, piece.number - len(self._buffers), self._ranks)
        self._views(piece).mine[...] = piece.source
        self.sent.tell(piece.number)

    def add_up(self, piece: Piece, op: str) -> tuple[Array, Array]:
        views = self._views(piece)
        mine = piece.target[views.own]
        self.combine(piece, views.parts, mine, op)
        return mine, mine

    def hand_out(self, piece: Piece) -> None:
        views, target = self._views(piece), piece.target
        views.result[...] = target[views.own]
        self.has_shown(piece)
        self._wait_for(self._shown, piece.number, self._owners)
        for theirs, result in views.others:
            target[theirs] = result
        self._done.tell(piece.number)

    def own_part(self, piece: Piece) -> slice:
        """Return the part of a piece that this rank owns."""
        return self._lanes.part_of(self._me, piece.target.size, piece.target.itemsize)

    def combine(self, piece: Piece, parts: Sequence[Array], out: Array, op: str) -> None:
        """Combine what the ranks have of this rank's part when all have sent the piece."""
        if out.size:
            self._wait_for(self.sent, piece.number, self._ranks)
            in_rank_order(parts, (out,), op, 1)

    def has_shown(self, piece: Piece) -> None:
        """Tell the node that the result of this rank's part can be read, if it owns one."""
        if self._me in self._owners:
            self._shown.tell(piece.number)

    def is_done(self, piece: Piece) -> None:
        """Tell the node that this rank has nothing more to do with a piece."""
        self._done.tell(piece.number)

    def _views(self, piece: Piece) -> _Views:
        target, index = piece.target, piece.number % len(self._buffers)
        key = (target.size, target.dtype, index)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            all_ranks = [part[: target.nbytes].view(target.dtype) for part in self._buffers[index]]
            own = self.own_part(piece)
            others = []
            for owner in self._owners:
                if owner != self._me:
                    theirs = self._lanes.part_of(owner, target.size, target.itemsize)
                    others.append((theirs, all_ranks[owner][theirs]))
            mine = all_ranks[self._me]
            found = self._known[key] = _Views(mine, own, [part[own] for part in all_ranks], mine[own], others)
        return found

    def _wait_for(self, counter: Counter, number: int, ranks: Sequence[int]) -> None:
        """Wait until these ranks of the node have come to `number`."""
        numbers = counter.numbers
        for rank in ranks:
            if numbers[rank][0] < number:
                self._until(partial(_has_come, numbers[rank], number))
        if counter.fence is not None:
            counter.fence()


def _has_come(counted: memoryview, number: int) -> bool:
    return bool(counted[0] >= number)


class InPlaceStage(NodeStage):
    """In the ranks' own arrays, which the whole node sees: nothing is copied.

    The owner of a part adds it up where it is and writes its result to all.  Nobody may read the results, or write
    the arrays again, before the next barrier of the node.

    Args:
        stage: that of the same ranks, for its counters.
        arrays: of all ranks of the node, flat.
        targets: where the result goes: the arrays themselves, or others that all ranks of the node see.
        finish: what is done to a part of the result before it is written.
    """

    def __init__(
        self, stage: BufferStage, arrays: Sequence[Array], targets: Sequence[Array], finish: Callable[[Array], object]
    ) -> None:
        self._stage = stage
        self._arrays, self._targets, self._finish = arrays, targets, finish

    def contribute(self, piece: Piece) -> None:
        self._stage.sent.tell(piece.number)

    def add_up(self, piece: Piece, op: str) -> tuple[Array, Array]:
        own = self._own_part(piece)
        mine = self._targets[0][own]
        self._stage.combine(piece, [array[own] for array in self._arrays], mine, op)
        return mine, mine

    def hand_out(self, piece: Piece) -> None:
        own = self._own_part(piece)
        mine = self._targets[0][own]
        if mine.size:
            self._finish(mine)
        for other in self._targets[1:]:
            other[own] = mine
        self._stage.has_shown(piece)
        self._stage.is_done(piece)

    def _own_part(self, piece: Piece) -> slice:
        own = self._stage.own_part(piece)
        return slice(piece.start + own.start, piece.start + own.stop)
