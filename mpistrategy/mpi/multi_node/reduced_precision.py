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

from functools import cache
from typing import Any

import numpy as np

from mpistrategy.errors import OptionError
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.mpi.multi_node.rounded_exchange import Wire


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
    """Return the dtype in which a buffer travels between the nodes where the host sends it; None for its own."""
    return bfloat16() if wire == "bfloat16" and ranks.nodes > 1 and travels(dtype, op) else None


def by_nccl(ranks: Ranks, wire: str | None, dtype: np.dtype[Any], op: str) -> Wire:
    """Return the dtype in which NCCL gets a buffer; None for its own."""
    if wire is None or ranks.nodes == 1 or not travels(dtype, op):
        return None
    return bfloat16() if wire == "bfloat16" else np.dtype(np.float16)
