"""Mailboxes: small values of the ranks of one node, in memory that all these ranks see.

A mailbox holds a sequence number, the digest of the call that its rank is about to make, and a few bytes of data.  The
number is written last, so a rank that sees it sees the rest: one look at a peer's mailbox checks the call and reads the
data.

Each mailbox has two slots, used in turn.  A rank writes a slot again only after it has seen every peer's next number,
and a peer writes that number only after it has read this slot.

On a node of many ranks a loop over all data takes longer than the messages.  There the mailboxes, which lie at equal
distances, are also seen as the rows of one array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.contract.channel import ControlChannel
from mpistrategy.mpi.shared_memory.segments import Fence, SharedMemory, aligned
from mpistrategy.mpi.shared_memory.spin_wait import WaitUntil

_NUMBERS = 16  # bytes of the sequence number and the digest, before the payload
#: From so many ranks on a step for the arrays of all of them takes less time than a loop.
MANY_RANKS = 16


def segment_bytes(payload_bytes: int) -> int:
    """Return how much memory each rank's mailbox takes."""
    return 2 * aligned(_NUMBERS + payload_bytes)


class MailboxSlot(NamedTuple):
    """One of the two slots of all mailboxes.

    Attributes:
        own_numbers: this rank's sequence number and digest.
        peers: the numbers of the other ranks.
        payloads: the data of every rank, by local rank, as uint8.
        rows: `payloads` as the rows of one array; None on a node of few ranks.
    """

    own_numbers: memoryview
    peers: tuple[memoryview, ...]
    payloads: tuple[Array, ...]
    rows: Array | None


class Mailboxes(ControlChannel):
    """The mailboxes of all ranks of one node: the channel of the guard.

    Args:
        memory: `segment_bytes(payload_bytes)` for each rank, zeroed.
        payload_bytes: how much data a mailbox can hold.
        wait_until: how to wait for a peer.
        control: carries texts.

    Attributes:
        fence: keeps reads and writes in order.
        sequence: the number of exchanges so far; the same on every rank whenever none is under way.
        slots: an exchange uses the slot of its sequence number modulo 2.
    """

    def __init__(
        self, memory: SharedMemory, payload_bytes: int, wait_until: WaitUntil, control: ControlChannel | None = None
    ) -> None:
        self.payload_bytes = payload_bytes
        self.sequence: int = 0
        self.fence: Fence = memory.fence
        self.wait_until = wait_until
        self.local_rank: int = memory.local_rank
        self.size: int = len(memory.segments)
        self.slots: tuple[MailboxSlot, ...] = tuple(
            self._slot(memory, index * aligned(_NUMBERS + payload_bytes)) for index in (0, 1)
        )
        self._control = control

    def _slot(self, memory: SharedMemory, start: int) -> MailboxSlot:
        numbers = [segment[start : start + _NUMBERS].data.cast("B").cast("q") for segment in memory.segments]
        payloads = tuple(segment[start + _NUMBERS :][: self.payload_bytes] for segment in memory.segments)
        own_numbers = numbers.pop(self.local_rank)
        rows = _rows(memory.segments, start + _NUMBERS, self.payload_bytes)
        return MailboxSlot(own_numbers, tuple(numbers), payloads, rows)

    def all_equal(self, digest: int, look: Callable[[], object] | None = None) -> bool:
        """Show the peers this rank's mailbox, and wait for theirs; see `ControlChannel.all_equal`.

        Where it returns False, perhaps not all peers are there.
        """
        if look is not None:
            return super().all_equal(digest, look)
        self.start(digest)
        sequence, fence = self.sequence, self.fence
        for peer in self.slots[sequence & 1].peers:
            if peer[0] != sequence:
                self.wait_until(peer, sequence)
            fence()
            if peer[1] != digest:
                return False
        return True

    def start(self, digest: int) -> None:
        """Show the peers this rank's digest and its mailbox, and do not wait for theirs."""
        self.sequence += 1
        own_numbers = self.slots[self.sequence & 1].own_numbers
        own_numbers[1] = digest
        self.fence()
        own_numbers[0] = self.sequence

    def finished(self) -> bool | None:
        """Return whether all digests are equal after `start`, or None while ranks are missing."""
        slot = self.slots[self.sequence & 1]
        if any(peer[0] != self.sequence for peer in slot.peers):
            return None
        self.fence()
        return all(peer[1] == slot.own_numbers[1] for peer in slot.peers)

    def allgather_text(self, text: str, look: Callable[[], object] | None = None) -> list[str]:
        assert self._control is not None
        return self._control.allgather_text(text, look)


def _rows(segments: Sequence[Array], start: int, nbytes: int) -> Array | None:
    """Return so many bytes of each rank's segment as the rows of one array; None for few ranks."""
    if len(segments) < MANY_RANKS:
        return None
    step = segments[1].ctypes.data - segments[0].ctypes.data  # all segments lie at equal distances
    return np.lib.stride_tricks.as_strided(segments[0][start : start + nbytes], (len(segments), nbytes), (step, 1))
