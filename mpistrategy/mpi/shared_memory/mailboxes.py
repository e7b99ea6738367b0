"""Mailboxes: small values of the ranks of one node, in memory that all of them see.

A mailbox holds a sequence number, the digest of the call that its rank is about to make, and a few bytes of data.  The
number is written last, so a rank that sees it sees the rest: one look at a peer's mailbox checks the call and reads the
data.

Each mailbox has two slots, used in turn.  A rank writes a slot again only after it has seen every peer's next number,
and a peer writes that number only after it has read this slot.

On a node of many ranks a loop over the peers takes longer than the messages.  There the mailboxes, which lie at equal
distances, are also seen as the rows of one array: all sequence numbers are read in one step, then all digests, then
the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrategy.arrays.dtypes import Array, quiet_runner
from mpistrategy.mpi.contract.channel import all_equal_patiently
from mpistrategy.mpi.shared_memory.segments import SharedMemory, aligned
from mpistrategy.mpi.shared_memory.spin_wait import Waiting

_NUMBERS = 16  # bytes of the sequence number and the digest, before the payload
#: From so many ranks on a step for all of them takes less time than a loop: over arrays, and over single numbers.
MANY_RANKS, MANY_NUMBERS = 16, 24


def segment_bytes(payload_bytes: int) -> int:
    """Return how much memory each rank's mailbox takes."""
    return 2 * aligned(_NUMBERS + payload_bytes)


class MailboxSlot(NamedTuple):
    """One of the two slots of all mailboxes.

    Attributes:
        mine: this rank's sequence number and digest.
        peers: those of the other ranks.
        payloads: the data of every rank, by local rank, as uint8.
        exchange: ``exchange(sequence, digest)`` shows the peers what this rank has written, and waits for them; returns
            whether all digests are equal: if not, perhaps before all peers are there.  `sequence` is one more than that
            of the exchange before.
        rows: `payloads` as the rows of one array; None on a node of few ranks.
    """

    mine: memoryview
    peers: tuple[memoryview, ...]
    payloads: tuple[Array, ...]
    exchange: Callable[[int, int], bool]
    rows: Array | None


class Mailboxes:
    """The mailboxes of all ranks of one node; with `allgather_text` set, the channel of the guard.

    Args:
        memory: `segment_bytes(payload_bytes)` for each rank, zeroed.
        payload_bytes: how much data a mailbox can hold.
        waiting: how to wait for a peer.

    Attributes:
        fence: keeps reads and writes in order; None where the processor does that itself.
        sequence: the number of exchanges so far; the same on every rank whenever none is under way.
        slots: an exchange uses the slot of its sequence number modulo 2.
        allgather_text: see `mpistrategy.mpi.contract.channel.ControlChannel`.
    """

    allgather_text: Callable[..., list[str]]

    def __init__(self, memory: SharedMemory, payload_bytes: int, waiting: Waiting) -> None:
        self.payload_bytes = payload_bytes
        self.sequence: int = 0
        self.fence: Callable[[], object] | None = memory.fence
        self.waiting = waiting
        self.local_rank: int = memory.local_rank
        self.size: int = len(memory.segments)
        self.slots: tuple[MailboxSlot, ...] = tuple(
            self._slot(memory, index * aligned(_NUMBERS + payload_bytes)) for index in (0, 1)
        )
        self._digest = 0

    def _slot(self, memory: SharedMemory, start: int) -> MailboxSlot:
        numbers = [segment[start : start + _NUMBERS].data.cast("B").cast("q") for segment in memory.segments]
        payloads = tuple(segment[start + _NUMBERS :][: self.payload_bytes] for segment in memory.segments)
        ranks, mine = tuple(numbers), numbers.pop(self.local_rank)
        rows = _rows(memory.segments, start, _NUMBERS + self.payload_bytes)
        if rows is None or len(ranks) < MANY_NUMBERS:
            exchange = self._exchange_in(mine, numbers)
        else:
            exchange = self._exchange_of_many(mine, ranks, rows[:, :_NUMBERS].view(np.int64))
        return MailboxSlot(mine, tuple(numbers), payloads, exchange, None if rows is None else rows[:, _NUMBERS:])

    def _exchange_in(self, mine: memoryview, peers: Sequence[memoryview]) -> Callable[[int, int], bool]:
        """Return `MailboxSlot.exchange`, with all that it needs at hand: attributes take a tenth of a small sum."""
        fence, meet = self.fence, self.meet

        def exchange(sequence: int, digest: int) -> bool:
            self.sequence = sequence
            mine[1] = digest
            if fence is not None:
                fence()
            mine[0] = sequence
            for peer in peers:
                if peer[0] != sequence or peer[1] != digest or fence is not None:
                    return meet(peers, sequence, digest)
            return True

        return exchange

    def _exchange_of_many(
        self, mine: memoryview, ranks: Sequence[memoryview], numbers: Array
    ) -> Callable[[int, int], bool]:
        """Return `MailboxSlot.exchange` of many ranks.

        Args:
            mine: this rank's sequence number and digest.
            ranks: those of all ranks.
            numbers: the same as the rows of an array.
        """
        fence, until, size = self.fence, self.waiting.until, self.size
        sequences, digests = numbers[:, 0].tolist, numbers[:, 1].tolist

        def exchange(sequence: int, digest: int) -> bool:
            self.sequence = sequence
            mine[1] = digest
            if fence is not None:
                fence()
            mine[0] = sequence
            shown = sequences()
            if shown.count(sequence) != size:
                for rank, number in zip(ranks, shown, strict=True):
                    if number != sequence:
                        until(rank, sequence)
            if fence is not None:
                fence()
            return bool(digests().count(digest) == size)

        return exchange

    def meet(self, peers: Sequence[memoryview], sequence: int, digest: int) -> bool:
        """Wait for the peers after this rank has shown its own numbers; return `MailboxSlot.exchange`'s result."""
        for peer in peers:
            if peer[0] != sequence:
                self.waiting.until(peer, sequence)
            if self.fence is not None:
                self.fence()
            if peer[1] != digest:
                return False
        return True

    def all_equal(self, digest: int, look: Callable[[], object] | None = None) -> bool:
        """Return `MailboxSlot.exchange` of the next exchange; see `ControlChannel.all_equal`."""
        if look is not None:
            return all_equal_patiently(self, digest, look)
        sequence = self.sequence + 1
        return self.slots[sequence & 1].exchange(sequence, digest)

    def start(self, digest: int) -> None:
        """Show the peers this rank's digest, and do not wait for theirs."""
        self.sequence += 1
        self._digest = digest
        self._exchange_in(self.slots[self.sequence & 1].mine, ())(self.sequence, digest)

    def finished(self) -> bool | None:
        """Return whether all digests are equal after `start`, or None while ranks are missing."""
        peers = self.slots[self.sequence & 1].peers
        if any(peer[0] != self.sequence for peer in peers):
            return None
        if self.fence is not None:
            self.fence()
        return all(peer[1] == self._digest for peer in peers)

    def leave(self) -> None:
        """Do nothing: the other ranks of the node read in its memory that this rank takes no more calls."""

    def shown(self) -> list[int]:
        """Return the number of each rank's last exchange, by local rank; for the watchdog."""
        first, second = (slot.peers for slot in self.slots)
        numbers = [max(int(one[0]), int(other[0])) for one, other in zip(first, second, strict=True)]
        numbers.insert(self.local_rank, self.sequence)
        return numbers


# One float of each rank, such as a loss in every step: here the exchange is written out, without the fence that some
# processors need, since to call it would take a tenth of the time.  Both functions stand for ``run(value, out)`` of
# `mpistrategy.reduction.routes.mailboxes`.


def sum_of_numbers(
    mailboxes: Mailboxes, digest: int, differs: Callable[[], object], divisor: int, misfit: object
) -> Callable[[Any, Any], Any]:
    """Return the sum, divided, of one Python float of each rank; Python's own arithmetic gives the same bits.

    Args:
        mailboxes: of all ranks.
        digest: of the call.
        differs: is called when a digest differs.
        divisor: of the sum.
        misfit: is returned, and nothing is sent, where a result is to be written somewhere.
    """
    meet, result, add, quiet = mailboxes.meet, np.float64, np.add.accumulate, quiet_runner()
    slots = _slots_of_one(mailboxes, np.dtype(np.float64))

    def run(value: Any, out: Any) -> Any:
        if out is not None:
            return misfit
        sequence = mailboxes.sequence + 1
        mine, peers, place, first, second, others, many = slots[sequence & 1]
        place[0] = value
        if many is not None:
            exchange, column = many
            if not exchange(sequence, digest):
                differs()
            total = quiet(add, column)[-1].item()
            return result(total if divisor == 1 else total / divisor)
        mailboxes.sequence = sequence
        mine[1] = digest
        mine[0] = sequence
        for peer in peers:
            if peer[0] != sequence or peer[1] != digest:
                if not meet(peers, sequence, digest):
                    differs()
                break
        total = first[0] + second[0]
        for other in others:
            total += other[0]
        return result(total if divisor == 1 else total / divisor)

    return run


def sum_of_arrays_of_one(
    mailboxes: Mailboxes,
    digest: int,
    differs: Callable[[], object],
    divisor: int,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    misfit: object,
) -> Callable[[Any, Any], Any]:
    """Do what `sum_of_numbers` does for arrays of one float32 or float64, with results in `out` where it fits.

    Python adds float32 as float64, and what is rounded to float32 after each sum is what NumPy gives.
    """
    meet, slots, add, quiet = mailboxes.meet, _slots_of_one(mailboxes, dtype), np.add.accumulate, quiet_runner()
    empty, at = np.empty, (0,) * len(shape)
    rounded: Any = np.empty(1, dtype).data  # memory warns of no overflow

    def run(value: Array, out: Array | None) -> Any:
        if out is None:
            result = empty(shape, dtype)
        elif type(out) is np.ndarray and out.dtype == dtype and out.shape == shape and out.flags.writeable:
            result = out
        else:
            return misfit
        sequence = mailboxes.sequence + 1
        mine, peers, place, first, second, others, many = slots[sequence & 1]
        place[0] = value.item()
        if many is not None:
            exchange, column = many
            if not exchange(sequence, digest):
                differs()
            rounded[0] = quiet(add, column)[-1]
        else:
            mailboxes.sequence = sequence
            mine[1] = digest
            mine[0] = sequence
            for peer in peers:
                if peer[0] != sequence or peer[1] != digest:
                    if not meet(peers, sequence, digest):
                        differs()
                    break
            rounded[0] = first[0] + second[0]
            for other in others:
                rounded[0] += other[0]
        if divisor != 1:
            rounded[0] /= divisor
        result[at] = rounded[0]
        return result

    return run


def _slots_of_one(mailboxes: Mailboxes, dtype: np.dtype[Any]) -> list[tuple[Any, ...]]:
    """Return for each slot its numbers, and where one element of this rank, of ranks 0 and 1, and of the others is.

    On a node of many ranks also the exchange, and all elements as one array, which `accumulate` adds in rank order.
    """
    slots = []
    for slot in mailboxes.slots:
        elements = [payload[: dtype.itemsize].view(dtype).data for payload in slot.payloads]
        mine = elements[mailboxes.local_rank]
        many = None
        if slot.rows is not None and mailboxes.size >= MANY_NUMBERS:
            many = slot.exchange, slot.rows[:, : dtype.itemsize].view(dtype)[:, 0]
        slots.append((slot.mine, slot.peers, mine, elements[0], elements[1], elements[2:], many))
    return slots


def _rows(segments: Sequence[Array], start: int, nbytes: int) -> Array | None:
    """Return so many bytes of each rank's segment as the rows of one array; None for few ranks, or uneven distances."""
    if len(segments) < MANY_RANKS:
        return None
    places = [segment.ctypes.data for segment in segments]
    step = places[1] - places[0]
    if step <= 0 or places != [*range(places[0], places[0] + len(places) * step, step)]:
        return None
    first = segments[0][start : start + nbytes]
    return np.lib.stride_tricks.as_strided(first, (len(places), nbytes), (step, 1))
