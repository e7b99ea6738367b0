"""Communication between nodes in less than full precision: `CommunicationOptions.wire`.

With "bfloat16", each node's float32 contribution is rounded once, the contributions are added up in float32, and the
sum is rounded once; all ranks get the same result.  With u = 2^-8, s_n the sum over the ranks of node n (ranks that
share no memory count as nodes, and so do those of nodes with different numbers of ranks) and S the sum of the s_n, the
result differs from S by no more than

    (2 u + u^2) (|s_1| + |s_2| + ...)

plus float32's own rounding of the additions.  For values below 2^-126 each rounding errs by up to 2^-134 instead.
A magnitude of about 3.39e38 or more, of a node's contribution or of the sum, becomes infinite.

NCCL gets the wire's dtype, "float16" or "bfloat16", and rounds each of its sums to it, in an order of its own: see
`mpistrategy.mpi.gpu.transports.nccl`.  Nothing else sends "float16".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.errors import OptionError
from mpistrategy.mpi.interface.ranks import Ranks, as_bytes

#: The dtype that travels; None is the arrays' own dtype.
Wire: TypeAlias = "np.dtype[Any] | None"


@cache
def bfloat16() -> np.dtype[Any]:
    """Return the dtype of ml_dtypes.

    Raises:
        OptionError: where ml_dtypes is not installed.
    """
    try:
        import ml_dtypes  # an optional extra, and only this wire needs it
    except ImportError as error:
        raise OptionError.at(
            "CommunicationOptions",
            found='wire="bfloat16" without the package ml_dtypes',
            expected="ml_dtypes on every rank",
            fix="Install it: pip install ml_dtypes.",
        ) from error
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def travels(dtype: np.dtype[Any], op: str) -> bool:
    """Return whether a buffer of this dtype is rounded under this operation: float32 sums only."""
    return dtype == np.float32 and op == "SUM"


def check(wire: str | None) -> None:
    """Raise OptionError when this rank cannot send `wire`; call it before the ranks agree on a call."""
    if wire == "bfloat16":
        bfloat16()


def between_nodes(ranks: Ranks, wire: str | None, dtype: np.dtype[Any], op: str) -> Wire:
    """Return the dtype in which a buffer travels between the nodes where the host sends it; None for its own.

    Between simulated nodes nothing travels.
    """
    is_sent = wire == "bfloat16" and ranks.nodes > 1 and not ranks.is_simulated and travels(dtype, op)
    return bfloat16() if is_sent else None


def by_nccl(ranks: Ranks, wire: str | None, dtype: np.dtype[Any], op: str) -> Wire:
    """Return the dtype in which NCCL gets a buffer; None for its own."""
    if wire is None or ranks.nodes == 1 or not travels(dtype, op):
        return None
    return bfloat16() if wire == "bfloat16" else np.dtype(np.float16)


class Rounded:
    """The exchange of one slice at a time.

    Args:
        link: MPI's communicator of the counterparts, one rank of each node.
        count: how many elements the slice has at most.
        wire: the dtype that travels.
    """

    def __init__(self, link: Any, count: int, wire: np.dtype[Any]) -> None:
        self._link, block = link, -(-count // link.size)
        self._send_buffer, self._receive_buffer = np.zeros(link.size * block, wire), np.zeros(link.size * block, wire)
        self._total, self._part = np.zeros(block, np.float32), np.zeros(block, np.float32)

    def begin(self, values: Array) -> None:
        """Send every counterpart a block of this rank's values."""
        self._values, self._block = values, -(-values.size // self._link.size)
        size = self._link.size * self._block
        self._send_buffer[: values.size], self._send_buffer[values.size : size] = values, 0
        self._request = self._link.Ialltoall(as_bytes(self._send_buffer[:size]), as_bytes(self._receive_buffer[:size]))

    def end(self, wait: Callable[[Callable[[], bool]], None]) -> None:
        """Replace the values by their sum over the counterparts; `wait` is called until a message is there.

        This rank adds up its own block in the order of the nodes, and sends all of them the sum.  One rank computes
        each element, so the bits are equal everywhere.
        """
        wait(self._request.Test)
        received, own_block = self._receive_buffer[: self._link.size * self._block], self._send_buffer[: self._block]
        total, part = self._total[: self._block], self._part[: self._block]
        blocks = received.reshape(-1, self._block)
        total[...] = blocks[0]
        for block in blocks[1:]:
            part[...] = block
            total += part
        own_block[...] = total
        wait(self._link.Iallgather(as_bytes(own_block), as_bytes(received)).Test)
        self._values[...] = received[: self._values.size]
