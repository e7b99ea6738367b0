"""The all-reduce of one piece between counterparts on several nodes, as steps that somebody else makes progress with.

Every counterpart owns one block of the piece.  It gets the others' contributions to its block, adds them up in rank
order, and sends everybody the sum: nobody sends or gets more bytes than an all-reduce must, one rank computes each
element, so that the bits are equal everywhere, and NumPy does the arithmetic, so that NaN wins and any dtype will do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from mpistrategy.arrays.dtypes import COMBINE, Array
from mpistrategy.mpi.shared_memory.bounce_buffers import share
from mpistrategy.mpi.shared_memory.segments import aligned


class Request(Protocol):
    """A message under way."""

    def Test(self) -> bool:  # noqa: N802
        """Return whether it has arrived, and move all messages on."""


Steps = Iterator[list[Request]]


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
    """Memory for what is on its way, used again and again: fresh memory costs more than the sums.

    Args:
        nbytes: how much of it.
    """

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


def exact(link: Link, source: Array, target: Array, op: str, tag: int, space: Space) -> Steps:
    """Write the combination of all counterparts' `source` (sum, MIN, MAX or PROD) into `target`, which may be the same.

    See `reduce_pairwise`.
    """
    results = blocks_of(target, link.size)
    return reduce_pairwise(
        link,
        blocks_of(source, link.size),
        results,
        lambda parts: combined(parts, op, out=results[link.rank]),
        tag,
        space,
    )


def reduce_pairwise(
    link: Link,
    blocks: list[Array],
    results: list[Array],
    add_up: Callable[[list[Array]], object],
    tag: int,
    space: Space,
) -> Steps:
    """Write the combination of all counterparts' `blocks` into `results`; yields messages that must be done next.

    Args:
        link: the counterparts; all bring blocks of equal sizes and dtype.
        blocks: one for each counterpart, in rank order; flat and contiguous.
        results: where the combinations go; may be the same memory as `blocks`.
        add_up: writes the combination of a list of blocks, in rank order, into this rank's own result.
        tag: this number and the next are not in use between these ranks.
        space: for the blocks of the others, until the last step is done.
    """
    me = link.rank
    # Each rank begins with its successor: not all send to the same one at once.
    others = [(me + step) % link.size for step in range(1, link.size)]
    size, dtype = blocks[me].size, blocks[me].dtype
    parts = [blocks[me] if rank == me else space.take(size, dtype) for rank in range(link.size)]
    yield [
        message
        for rank in others
        for message in link.irecv(parts[rank], rank, tag) + link.isend(blocks[rank], rank, tag)
    ]
    if size:
        add_up(parts)
    yield [
        message
        for rank in others
        for message in link.irecv(results[rank], rank, tag + 1) + link.isend(results[me], rank, tag + 1)
    ]


def blocks_of(piece: Array, parts: int) -> list[Array]:
    """Return `piece` in so many blocks; their borders are on cache lines."""
    borders = [share(piece.size, part, parts, piece.itemsize) for part in range(parts)]
    return [piece[begin:end] for begin, end in borders]


def combined(parts: list[Array], op: str, out: Array) -> None:
    """Write the combination of `parts`, in their order, into `out`, which may be the memory of one of them."""
    combine: Any = COMBINE[op]
    place = out.ctypes.data
    overlaps = any(part.ctypes.data == place for part in parts)
    spare = next(part for part in parts if part.ctypes.data != place) if overlaps else out
    total = parts[0]
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

    def nudge(self) -> None:
        """Let MPI move messages on."""
        if self._messages:
            self._messages[-1].Test()

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
