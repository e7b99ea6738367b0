"""The all-reduce between counterparts of sums of float32 that travel in 16 bits; the bound of its error: see below.

With a wire of bfloat16 each node's contribution is rounded once, the contributions are added up in float32, and the sum
is rounded once.  `mpistrategy.mpi.multi_node.reduced_precision` has the bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.interface.buffers import as_bytes

#: The dtype that travels; None is that of the arrays.
Wire: TypeAlias = "np.dtype[Any] | None"


class Rounded:
    """The exchange of one slice at a time.

    Args:
        link: MPI's communicator of the counterparts, one rank of each node.
        count: how many elements the slice has at most.
        wire: the dtype that travels.
    """

    def __init__(self, link: Any, count: int, wire: np.dtype[Any]) -> None:
        self._link, block = link, -(-count // link.size)
        self._sent, self._received = np.zeros(link.size * block, wire), np.zeros(link.size * block, wire)
        self._total, self._part = np.zeros(block, np.float32), np.zeros(block, np.float32)

    def begin(self, values: Array) -> None:
        """Send every counterpart a block of what this rank has."""
        self._values, self._block = values, -(-values.size // self._link.size)
        size = self._link.size * self._block
        self._sent[: values.size], self._sent[values.size : size] = values, 0
        self._request = self._link.Ialltoall(as_bytes(self._sent[:size]), as_bytes(self._received[:size]))

    def end(self, wait: Callable[[Callable[[], bool]], None]) -> None:
        """Replace the values by their sum over the counterparts; `wait` is called until a message is there.

        This rank adds up its own block in the order of the nodes, and sends all of them the sum.  One rank computes
        each element, so the bits are equal everywhere.
        """
        wait(self._request.Test)
        received, own = self._received[: self._link.size * self._block], self._sent[: self._block]
        total, part = self._total[: self._block], self._part[: self._block]
        blocks = received.reshape(-1, self._block)
        total[...] = blocks[0]
        for theirs in blocks[1:]:
            part[...] = theirs
            total += part
        own[...] = total
        wait(self._link.Iallgather(as_bytes(own), as_bytes(received)).Test)
        self._values[...] = received[: self._values.size]
