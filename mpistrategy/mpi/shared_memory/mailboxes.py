"""Mailboxes: small values of the ranks of one node, in memory that all of them see.

A mailbox holds a sequence number, the digest of the call that its rank is about to make, and a few bytes of data.  The
number is written last, so a rank that sees it sees the rest: one look at a peer's mailbox checks the call and reads the
data.

Each mailbox has two slots, used in turn.  A rank writes a slot again only after it has seen every peer's next number,
and a peer writes that number only after it has read this slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.shared_memory.segments import SharedMemory, aligned
from mpistrategy.mpi.shared_memory.spin_wait import Waiting

_NUMBERS = 16  # bytes of the sequence number and the digest, before the payload


def segment_bytes(payload_bytes: int) -> int:
    """Return how much memory each rank's mailbox takes."""
    return 2 * aligned(_NUMBERS + payload_bytes)


class MailboxSlot(NamedTuple):
    """One of the two slots of all mailboxes.

    Attributes:
        mine: this rank's sequence number and digest.
        peers: those of the other ranks.
        payloads: the data of every rank, by local rank, as uint8.
    """

    mine: memoryview
    peers: tuple[memoryview, ...]
    payloads: tuple[Array, ...]


class Mailboxes:
    """The mailboxes of all ranks of one node; with `allgather_text` set, the channel of the guard.

    Args:
        memory: `segment_bytes(payload_bytes)` for each rank, zeroed.
        payload_bytes: how much data a mailbox can hold.
        waiting: how to wait for a peer.

    Attributes:
        sequence: the number of exchanges so far; the same on every rank whenever none is under way.
        slots: an exchange uses the slot of its sequence number modulo 2.
        allgather_text: returns every rank's text; for the guard's reports.
    """

    allgather_text: Callable[[str], list[str]]

    def __init__(self, memory: SharedMemory, payload_bytes: int, waiting: Waiting) -> None:
        self.payload_bytes = payload_bytes
        self.sequence = 0
        self.fence = memory.fence
        self.waiting = waiting
        self.local_rank = memory.local_rank
        self.size = len(memory.segments)
        self.slots = tuple(self._slot(memory, index * aligned(_NUMBERS + payload_bytes)) for index in (0, 1))
        self._digest = 0

    def _slot(self, memory: SharedMemory, start: int) -> MailboxSlot:
        numbers = [segment[start : start + _NUMBERS].data.cast("B").cast("q") for segment in memory.segments]
        payloads = tuple(segment[start + _NUMBERS :][: self.payload_bytes] for segment in memory.segments)
        return MailboxSlot(numbers.pop(self.local_rank), tuple(numbers), payloads)

    def exchange(self, sequence: int, mine: memoryview, peers: Sequence[memoryview], digest: int) -> bool:
        """Show the peers what this rank has written, wait for them, and return whether all digests are equal.

        Args:
            sequence: one more than that of the exchange before.
            mine, peers: those of the slot with that number.
            digest: of this rank's call.
        """
        self.sequence = sequence
        mine[1] = digest
        fence = self.fence
        if fence is not None:
            fence()
        mine[0] = sequence
        equal = True
        for peer in peers:
            if peer[0] != sequence:
                self.waiting.until(peer, sequence)
            if fence is not None:
                fence()
            if peer[1] != digest:
                equal = False
        return equal

    def all_equal(self, digest: int) -> bool:
        """Wait for every rank; return whether all digests are equal."""
        sequence = self.sequence + 1
        slot = self.slots[sequence & 1]
        return self.exchange(sequence, slot.mine, slot.peers, digest)

    def start(self, digest: int) -> None:
        """Show the peers this rank's digest, and do not wait for theirs."""
        self.sequence += 1
        self._digest = digest
        self.exchange(self.sequence, self.slots[self.sequence & 1].mine, (), digest)

    def finished(self) -> bool | None:
        """Return whether all digests are equal after `start`, or None while ranks are missing."""
        peers = self.slots[self.sequence & 1].peers
        if any(peer[0] != self.sequence for peer in peers):
            return None
        if self.fence is not None:
            self.fence()
        return all(peer[1] == self._digest for peer in peers)

    def shown(self) -> list[int]:
        """Return the number of each rank's last exchange, by local rank; for the watchdog."""
        first, second = (slot.peers for slot in self.slots)
        numbers = [max(int(one[0]), int(other[0])) for one, other in zip(first, second, strict=True)]
        numbers.insert(self.local_rank, self.sequence)
        return numbers
