"""The all-reduce between counterparts of sums of float32 that travel in 16 bits; the bound of its error: see below.

With a wire of bfloat16 each node's contribution is rounded once, the contributions are added up in float32, and the sum
is rounded once.  `mpistrategy.mpi.multi_node.reduced_precision` has the bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.interface.buffers import as_bytes

#: The dtype that travels; None is that of the arrays.
Wire: TypeAlias = "np.dtype[Any] | None"


class Rounded:
    """The exchanges of one slice, of which one is under way at a time.

    Args:
        link: MPI's communicator of the counterparts, one rank of each node.  Nothing else sends messages by it.
        count: how many elements the slice has at most.
        wire: the dtype that travels.
    """

    def __init__(self, link: Any, count: int, wire: np.dtype[Any]) -> None:
        self.link: Any = link
        block = -(-count // link.size)
        self._sent, self._received = np.zeros(link.size * block, wire), np.zeros(link.size * block, wire)
        self._total, self._part = np.zeros(block, np.float32), np.zeros(block, np.float32)

    def exchange(self, values: Array) -> Iterator[Any]:
        """Replace `values` on each of the counterparts by their sum; yields requests that must be done next.

        Each rank sends every other one a block of what it has, adds up its own block in the order of the nodes, and
        sends all of them the sum.  One rank computes each element, so the bits are equal everywhere.
        """
        size = self.link.size
        block = -(-values.size // size)
        sent, received = self._sent[: size * block], self._received[: size * block]
        total, part = self._total[:block], self._part[:block]
        sent[: values.size], sent[values.size :] = values, 0
        yield self.link.Ialltoall(as_bytes(sent), as_bytes(received))
        blocks = received.reshape(size, block)
        total[...] = blocks[0]
        for theirs in blocks[1:]:
            part[...] = theirs
            total += part
        own = sent[:block]
        own[...] = total
        yield self.link.Iallgather(as_bytes(own), as_bytes(received))
        values[...] = received[: values.size]
