"""Memory for results that the ranks of a node see: arrays are reduced where they were brought, and the result stays.

Every rank has buffers of each size that is asked for, and brings its arrays into one that none of its earlier results
lives in.  It tells the peers which, in its mailbox, with the check of the call.  Results are views of the rank's own
buffer, which is used again once nobody holds a view of it.

Buffers are made when a size is asked for the second time, and more of them when a rank holds results in all of its own.
Whatever changes here changes inside an agreed call and for agreed reasons: it is the same on all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.shared_memory.mailboxes import Mailboxes
from mpistrategy.mpi.shared_memory.segments import SharedMemory

#: What each rank's buffers may take together.
_MOST_BYTES = 2**30
_LEAST_BLOCK_BYTES = 256 * 2**10
_MOST_BLOCKS = 16
#: How many buffers a call may take.
MOST_SIZES = 2
#: Buffers of a size that has not been asked for in so many calls make room for others.
_KEPT_FOR = 256

# What a rank says instead of the number of a buffer: all its buffers are in use; it needs none.
_NONE_FREE = -1
_DECLINED = -2


@dataclass
class _Size:
    """The buffers of one size.

    Attributes:
        mine: this rank's.
        everybodys: those of all ranks, by local rank, for each buffer.
        may_grow: whether there may be more of them.
        last_call: when they were asked for last.
    """

    mine: list[Array] = field(default_factory=list)
    everybodys: list[tuple[Array, ...]] = field(default_factory=list)
    may_grow: bool = True
    last_call: int = 0


class ResultBuffers:
    """The buffers of all ranks of one node.

    Args:
        mailboxes: where the ranks tell each other which buffer they took.
        share: returns so many bytes for each rank, None where they cannot be shared; collective.
    """

    def __init__(self, mailboxes: Mailboxes, share: Callable[[int], SharedMemory | None]) -> None:
        self._mailboxes = mailboxes
        self._share = share
        self._left = _MOST_BYTES
        self._sizes: dict[int, _Size] = {}
        self._calls = 0
        self._chosen: list[list[memoryview]] = [
            [payload[: 8 * MOST_SIZES].data.cast("B").cast("q") for payload in slot.payloads]
            for slot in mailboxes.slots
        ]

    def may_have(self, sizes: Sequence[int]) -> bool:
        """Return whether there are buffers for so many bytes each, or will be when they are asked for again."""
        lengths = {block_bytes_for(nbytes) for nbytes in sizes}
        missing = {length: size for length in lengths if not (size := self._sizes.get(length, _Size())).mine}
        return all(size.may_grow for size in missing.values()) and sum(missing) <= self._left

    def take(self, sizes: Sequence[int]) -> list[Array] | None:
        """Return free buffers of at least so many bytes, as uint8, and tell the peers in this rank's mailbox.

        None means that one is missing; nothing is taken then.
        """
        chosen = self._chosen[(self._mailboxes.sequence + 1) & 1][self._mailboxes.local_rank]
        found = []
        for at, nbytes in enumerate(sizes):
            size = self._sizes.get(block_bytes_for(nbytes))
            mine = [] if size is None else size.mine
            number = next((n for n in range(len(mine)) if sys.getrefcount(mine[n]) == _FREE), _NONE_FREE)
            chosen[at] = number
            if number != _NONE_FREE:
                found.append(mine[number])
        return found if len(found) == len(sizes) else None

    def decline(self) -> None:
        """Tell the peers that this rank takes no buffer in the next call: nobody will."""
        self._chosen[(self._mailboxes.sequence + 1) & 1][self._mailboxes.local_rank][0] = _DECLINED

    def taken(self, sizes: Sequence[int]) -> list[tuple[Array, ...]] | None:
        """Return for each size the buffers that the ranks took, after the agreement; None when one rank took none.

        It is None on all ranks then, and buffers are made for later calls.
        """
        self._calls += 1
        everybodys = self._chosen[self._mailboxes.sequence & 1]
        if any(chosen[0] == _DECLINED for chosen in everybodys):
            return None
        found = []
        for at, nbytes in enumerate(sizes):
            length = block_bytes_for(nbytes)
            size = self._sizes.get(length)
            if size is None:
                self._sizes[length] = _Size(last_call=self._calls)
                continue
            size.last_call = self._calls
            numbers = [chosen[at] for chosen in everybodys]
            if _NONE_FREE not in numbers:
                found.append(tuple(size.everybodys[number][rank] for rank, number in enumerate(numbers)))
            elif size.may_grow:
                self._grow(size, length)
        return found if len(found) == len(sizes) else None

    def _grow(self, size: _Size, length: int) -> None:
        while length > self._left and self._forget_one():
            pass
        if length > self._left:
            return
        memory = self._share(length)
        if memory is None:
            size.may_grow = False
            return
        self._left -= length
        # An array over a memoryview is what all views of it refer to; of an array over an array it would be the latter.
        size.mine.append(np.frombuffer(memory.mine.data, np.uint8))
        size.everybodys.append(memory.segments)
        size.may_grow = len(size.mine) < _MOST_BLOCKS

    def _forget_one(self) -> bool:
        """Forget the size that was not asked for in the longest time; its buffers live on with their views."""
        length, size = min(self._sizes.items(), key=lambda item: item[1].last_call)
        if self._calls - size.last_call < _KEPT_FOR:
            return False
        del self._sizes[length]
        self._left += length * len(size.mine)
        return True


def block_bytes_for(nbytes: int) -> int:
    """Return the size of the buffer for so many bytes: there are eight sizes to each power of two."""
    if nbytes <= _LEAST_BLOCK_BYTES:
        return _LEAST_BLOCK_BYTES
    step = 1 << ((nbytes - 1).bit_length() - 4)
    return -(-nbytes // step) * step


def _count_of_free_block() -> int:
    buffers = [np.frombuffer(bytearray(1), np.uint8)]
    return next(sys.getrefcount(buffers[n]) for n in range(1))


_FREE = _count_of_free_block()
