"""Result buffers: memory of all ranks of a node, in which arrays are reduced and the results stay.

Every rank has buffers of each size that is asked for.  It copies its arrays into a buffer that no earlier result lives
in, and tells the peers which one in its mailbox, with the check of the call.  Results are views of the rank's own
buffer, which is free again when nobody holds a view of it.

Buffers are made when a size is asked for the second time, and more of them when results fill all buffers of a rank.
All ranks change them alike: only inside an agreed call, and only for reasons that all of them know.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.shared_memory.mailboxes import Mailboxes
from mpistrategy.mpi.shared_memory.segments import SharedMemory

#: How large each rank's buffers may be together.
_MOST_BYTES = 2**30
_LEAST_BUFFER_BYTES = 256 * 2**10
_MOST_BUFFERS = 16
#: How many buffers a call may take.
MOST_SIZES = 2
#: Buffers of a size that so many calls have not asked for are given up when others need the room.
_KEPT_FOR = 256

# What a rank says in place of a buffer's number: all its buffers are in use; it takes none.
_NONE_FREE = -1
_DECLINED = -2


@dataclass
class _Size:
    """The buffers of one size: this rank's, and for each of them those of all ranks, by local rank."""

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
        lengths = {buffer_bytes_for(nbytes) for nbytes in sizes}
        missing = {length: size for length in lengths if not (size := self._sizes.get(length, _Size())).mine}
        return all(size.may_grow for size in missing.values()) and sum(missing) <= self._left

    def take(self, sizes: Sequence[int]) -> list[Array] | None:
        """Return free buffers of at least so many bytes, as uint8, and tell the peers in this rank's mailbox.

        None means that one is missing; nothing is taken then.
        """
        chosen = self._chosen[(self._mailboxes.sequence + 1) & 1][self._mailboxes.local_rank]
        found = []
        for at, nbytes in enumerate(sizes):
            size = self._sizes.get(buffer_bytes_for(nbytes))
            mine = [] if size is None else size.mine
            number = next((n for n in range(len(mine)) if sys.getrefcount(mine[n]) == _FREE), _NONE_FREE)
            chosen[at] = number
            if number != _NONE_FREE:
                found.append(mine[number])
        return found if len(found) == len(sizes) else None

    def decline(self) -> None:
        """Tell the peers that this rank takes no buffer in the next call; then none does."""
        self._chosen[(self._mailboxes.sequence + 1) & 1][self._mailboxes.local_rank][0] = _DECLINED

    def taken(self, sizes: Sequence[int]) -> list[tuple[Array, ...]] | None:
        """Return for each size the buffers that the ranks took, after the agreement.

        Where one rank took none, return None on all ranks, and make buffers for later calls.
        """
        self._calls += 1
        everybodys = self._chosen[self._mailboxes.sequence & 1]
        if _DECLINED in [chosen[0] for chosen in everybodys]:
            return None
        found = []
        for at, nbytes in enumerate(sizes):
            length = buffer_bytes_for(nbytes)
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
        while length > self._left:
            # The size that was not asked for in the longest time; its buffers live on with their views.
            oldest, old = min(self._sizes.items(), key=lambda item: item[1].last_call)
            if self._calls - old.last_call < _KEPT_FOR:
                return
            del self._sizes[oldest]
            self._left += oldest * len(old.mine)
        memory = self._share(length)
        if memory is None:
            size.may_grow = False
            return
        self._left -= length
        # An array over a memoryview, so that all views refer to it, not to the array below it.
        size.mine.append(np.frombuffer(memory.mine.data, np.uint8))
        size.everybodys.append(memory.segments)
        size.may_grow = len(size.mine) < _MOST_BUFFERS


def buffer_bytes_for(nbytes: int) -> int:
    """Return the size of the buffer for so many bytes: there are eight sizes to each power of two."""
    if nbytes <= _LEAST_BUFFER_BYTES:
        return _LEAST_BUFFER_BYTES
    step = 1 << ((nbytes - 1).bit_length() - 4)
    return -(-nbytes // step) * step


def _references_to_a_free_buffer() -> int:
    buffers = [np.frombuffer(bytearray(1), np.uint8)]
    return next(sys.getrefcount(buffers[n]) for n in range(1))


_FREE = _references_to_a_free_buffer()
