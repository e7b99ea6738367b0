"""The all-reduce of one piece between counterparts on several nodes, as steps that somebody else makes progress with.

Every counterpart owns one block of the piece.  It gets the others' contributions to its block, adds them up in rank
order, and sends everybody the sum: nobody sends or gets more bytes than an all-reduce must, one rank computes each
element, so that the bits are equal everywhere, and NumPy does the arithmetic, so that NaN wins and any dtype will do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from mpistrategy.arrays import COMBINE, Array
from mpistrategy.mpi.window import share


class Request(Protocol):
    """A message under way."""

    def Test(self) -> bool:  # noqa: N802: MPI's name
        """Return whether it has arrived, and move all messages on."""


Steps = Iterator[list[Request]]


class Link(Protocol):
    """The counterparts: one rank of each node."""

    rank: int
    size: int

    def isend(self, block: Array, rank: int, tag: int) -> Request:
        """Begin to send `block`, which must stay as it is until the request has been tested."""

    def irecv(self, block: Array, rank: int, tag: int) -> Request:
        """Begin to receive into `block`."""


def borders_of(count: int, parts: int, itemsize: int) -> list[tuple[int, int]]:
    """Return where each part's block of `count` elements begins and ends."""
    return [share(count, part, parts, itemsize) for part in range(parts)]


def everyone_else(link: Link) -> list[int]:
    """Return the other counterparts, each rank beginning with its successor: not all write to the same one at once."""
    return [(link.rank + step) % link.size for step in range(1, link.size)]


def exact(link: Link, piece: Array, op: str, tag: int) -> Steps:
    """Replace `piece` by its combination over the counterparts; yields the messages to wait for before going on.

    Args:
        link: the counterparts; all call this with pieces of equal size and dtype.
        piece: flat and contiguous.
        op: "SUM", "MIN", "MAX" or "PROD".
        tag: this number and the next are not in use between these ranks.
    """
    me = link.rank
    borders = borders_of(piece.size, link.size, piece.itemsize)
    blocks = [piece[begin:end] for begin, end in borders]
    others = [rank for rank in everyone_else(link) if blocks[rank].size]
    own = blocks[me]
    parts: list[Array] = [own] * link.size
    messages: list[Request] = []
    if own.size:
        for rank in everyone_else(link):
            parts[rank] = np.empty_like(own)
            messages.append(link.irecv(parts[rank], rank, tag))
    messages += [link.isend(blocks[rank], rank, tag) for rank in others]
    yield messages
    combined(parts, op, out=own)
    messages = [link.irecv(blocks[rank], rank, tag + 1) for rank in others]
    if own.size:
        messages += [link.isend(own, rank, tag + 1) for rank in everyone_else(link)]
    yield messages


def combined(parts: list[Array], op: str, out: Array) -> None:
    """Write the combination of `parts`, in their order, into `out`, which may be one of them."""
    combine: Any = COMBINE[op]
    if not out.size:
        return
    total = parts[0]
    overlaps = any(part is out for part in parts)
    spare = next(part for part in parts if part is not out) if overlaps else out
    for part in parts[1:-1]:
        combine(total, part, out=spare)
        total = spare
    combine(total, parts[-1], out=out)


class Flight:
    """An exchange under way.

    Args:
        steps: what it consists of; None is over at once.
    """

    def __init__(self, steps: Steps | None) -> None:
        self._steps = steps
        self._messages: list[Request] = []
        self.is_over = steps is None

    def advance(self) -> bool:
        """Go on as far as messages have arrived; return whether anything has happened.  Never waits."""
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
            if following is None:
                self.is_over = True
            else:
                self._messages = following
            moved = True
        return moved
