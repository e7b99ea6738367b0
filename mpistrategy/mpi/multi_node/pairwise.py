"""The all-reduce of one piece between counterpart ranks on several nodes, as steps that the caller makes progress with.

Every counterpart owns one block of the piece.  It receives the others' contributions to its block, adds them up in rank
order, and sends everybody the sum.  Nobody sends or receives more bytes than an all-reduce must.  One rank computes
each element, so the bits are equal everywhere; NumPy does the arithmetic, so NaN wins and any dtype will do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from mpistrategy.arrays.dtypes import COMBINE, Array, Combine
from mpistrategy.mpi.shared_memory.node_sum import share
from mpistrategy.mpi.shared_memory.segments import aligned


class Request(Protocol):
    """A message under way."""

    def Test(self) -> bool:  # noqa: N802
        """Return whether it has arrived, and move all messages on."""


Steps = Iterator[list[Request]]
#: The dtype that travels; None is that of the arrays.
Wire = np.dtype[Any] | None


class Link(Protocol):
    """The counterparts: one rank of each node."""

    rank: int
    size: int

    def isend(self, block: Array, rank: int, tag: int) -> list[Request]:
        """Begin to send `block`, which must stay as it is until the requests are done."""

    def irecv(self, block: Array, rank: int, tag: int) -> list[Request]:
        """Begin to receive into `block`."""

    def free(self) -> None:
        """Give back what these ranks communicate with, where all of them are known to do so."""


class Space:
    """So many bytes for received blocks, used again and again: fresh memory costs more than the sums."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = np.empty(nbytes, np.uint8)
        self._taken = 0

    def clear(self) -> None:
        """Forget what was taken."""
        self._taken = 0

    def take(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Return so many elements of it, or of fresh memory when it is too small."""
        nbytes = count * dtype.itemsize
        start = aligned(self._taken)
        if start + nbytes > self._bytes.size:
            return np.empty(count, dtype)
        self._taken = start + nbytes
        return self._bytes[start : self._taken].view(dtype)


def reduce_pairwise(
    link: Link, source: Array, target: Array, op: str, tag: int, space: Space, wire: Wire = None
) -> Steps:
    """Write the combination of all counterparts' `source` into `target`; yields messages that must be done next.

    Args:
        link: the counterparts; all have sources of equal size and dtype.
        source: flat and contiguous.
        target: may be the same memory.
        op: "SUM", "MIN", "MAX" or "PROD".
        tag: this number and the next are not in use between these ranks.
        space: for received blocks, until the last step is done.
        wire: the dtype that travels, where it is another one; for sums, which are added up in the dtype of `source`.
    """
    me = link.rank
    # Each rank begins with its successor: not all send to the same one at once.
    others = [(me + step) % link.size for step in range(1, link.size)]
    sent = source
    if wire is not None:
        sent = space.take(source.size, wire)
        sent[...] = source
    blocks = blocks_of(sent, link.size)
    results = blocks_of(target, link.size) if wire is None else blocks
    own = blocks[me]
    parts = [own if rank == me else space.take(own.size, own.dtype) for rank in range(link.size)]
    yield [
        message
        for rank in others
        for message in link.irecv(parts[rank], rank, tag) + link.isend(blocks[rank], rank, tag)
    ]
    if own.size and wire is None:
        combined(COMBINE[op], parts, results[me], parts[0] if me > 1 else results[me])
    elif own.size:
        total, part = space.take(own.size, source.dtype), space.take(own.size, source.dtype)
        total[...] = parts[0]
        for one in parts[1:]:
            part[...] = one
            total += part
        own[...] = total
    yield [
        message
        for rank in others
        for message in link.irecv(results[rank], rank, tag + 1) + link.isend(results[me], rank, tag + 1)
    ]
    if wire is not None:
        target[...] = sent


def blocks_of(piece: Array, parts: int) -> list[Array]:
    """Return `piece` in so many blocks; their borders are on cache lines."""
    return [piece[slice(*share(piece.size, part, parts, piece.itemsize))] for part in range(parts)]


def combined(combine: Combine, parts: Sequence[Array], out: Array, partial: Array) -> None:
    """Write the combination of two or more `parts`, in their order, into `out`.

    Args:
        combine: a ufunc.
        parts: of one size.
        out: may be the memory of one of them.
        partial: for partial results: `out`, or the first part, which is lost, where `out` is a later part than the
            second.
    """
    total, *others, last = parts
    for other in others:
        combine(total, other, out=partial)
        total = partial
    combine(total, last, out=out)


class Flight:
    """An exchange under way; without steps it is over at once."""

    def __init__(self, steps: Steps | None) -> None:
        self._steps = steps
        self._messages: list[Request] = []
        self.is_over: bool = steps is None

    def nudge(self) -> None:
        """Let MPI move messages on."""
        if self._messages:
            self._messages[-1].Test()

    def advance(self) -> bool:
        """Go on as far as messages have arrived; return whether anything happened.  Never waits."""
        moved = False
        while not self.is_over:
            messages = self._messages
            while messages:
                if not messages[-1].Test():
                    return moved
                messages.pop()
                moved = True
            assert self._steps is not None
            following = next(self._steps, None)
            self.is_over = following is None
            self._messages = following or []
            moved = True
        return moved
