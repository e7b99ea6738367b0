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

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from mpistrategy.arrays.dtypes import Array
from mpistrategy.errors import OptionError
from mpistrategy.mpi.interface.ranks import Ranks, as_bytes
from mpistrategy.mpi.shared_memory.node_sum import Halves

#: The dtype that travels; None is the arrays' own dtype.
Wire: TypeAlias = "np.dtype[Any] | None"
#: What NCCL can send.
BY_NCCL = ("bfloat16", "float16")


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


def check(wire: str | None) -> None:
    """Raise OptionError when this rank cannot send `wire`; call it before the ranks agree on a call."""
    if wire == "bfloat16":
        bfloat16()


def between_nodes(
    ranks: Ranks, wire: str | None, dtype: np.dtype[Any], op: str, sent: Sequence[str] = ("bfloat16",)
) -> Wire:
    """Return the dtype in which a buffer travels between the nodes; None for its own.

    Only sums of float32 are rounded, and nothing between simulated nodes, where nothing travels.

    Args:
        ranks: the ranks that take part.
        wire: what the options ask for.
        dtype, op: the buffer's dtype, and how it is combined.
        sent: what the path can send: `BY_NCCL`, or what the host can.
    """
    is_sum = dtype == np.float32 and op == "SUM"
    if wire not in sent or ranks.nodes == 1 or ranks.is_simulated or not is_sum:
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
        self._total = np.zeros(block, np.float32)

    def combine(self, values: Array, wait: Callable[[Callable[[], bool]], None]) -> Halves:
        """Replace the values by their sum over the counterparts; `wait` is called until a message is there.

        First this rank sends every counterpart a block of its values.  Then it adds up its own block in the order of
        the nodes, and sends all of them the sum.  One rank computes each element, so the bits are equal everywhere.
        """
        block = -(-values.size // self._link.size)
        size = self._link.size * block
        sent, received, total = self._send_buffer[:size], self._receive_buffer[:size], self._total[:block]
        sent[: values.size], sent[values.size :] = values, 0
        request = self._link.Ialltoall(as_bytes(sent), as_bytes(received))
        yield
        wait(request.Test)
        blocks = received.reshape(-1, block)
        total[...] = blocks[0]
        for part in blocks[1:]:
            total += part
        sent[:block] = total
        wait(self._link.Iallgather(as_bytes(sent[:block]), as_bytes(received)).Test)
        values[...] = received[: values.size]
