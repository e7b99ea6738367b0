"""Communication between nodes in less than full precision: `CommunicationOptions.wire`.

With "bfloat16", each node's float32 contribution is rounded once, the contributions are added up in float32, and the
sum is rounded once; all ranks get the same result.  With u = 2^-8, s_n the sum over the ranks of node n and S the sum
of the s_n, the result differs from S by no more than

    (2 u + u^2) (|s_1| + |s_2| + ...)

plus float32's own rounding of the additions.  For values below 2^-126 each rounding errs by up to 2^-134 instead.
A magnitude of about 3.39e38 or more, of a node's contribution or of the sum, becomes infinite.

NCCL gets the wire's dtype, "float16" or "bfloat16", and rounds each of its sums to it, in an order of its own: see
`mpistrategy.mpi.gpu.transports.rounded`.  Nothing else sends "float16".
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array, divide_by
from mpistrategy.errors import OptionError
from mpistrategy.mpi.multi_node.two_level import allreduce_across
from mpistrategy.mpi.tuning.thresholds import RouteName


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


def on(communicator: Any, wire: str | None) -> Any:
    """Return `communicator`, or a view of it whose all-reduces send `wire` between the nodes, where there are several.

    Args:
        communicator: the ranks.
        wire: None, "bfloat16" or "float16".
    """
    if wire is None or communicator.nodes == 1:
        return communicator
    view = _Rounding if wire == "bfloat16" else _HalfByNccl
    return communicator.once((_Rounding, wire), lambda: view(communicator))


class _HalfByNccl:
    """A view of a communicator whose float32 sums travel as float16 by NCCL, and as they are otherwise."""

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communicator, name)

    def wire_by_nccl(self, dtype: np.dtype[Any], op: str) -> np.dtype[Any] | None:
        """Return the dtype in which NCCL gets a buffer of `dtype`; None for its own."""
        return np.dtype(np.float16) if travels(dtype, op) else None


class _Rounding:
    """A view of a communicator whose float32 sums are rounded between the nodes."""

    rounds = True
    first_message = None

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communicator, name)

    def wire_between_nodes(self, dtype: np.dtype[Any], op: str) -> np.dtype[Any] | None:
        """See `mpistrategy.mpi.multi_node.two_level.wire_between_nodes`."""
        return bfloat16() if travels(dtype, op) else None

    #: See `_HalfByNccl`.
    wire_by_nccl = wire_between_nodes

    def route(self, nbytes: int, dtype: np.dtype[Any], op: str) -> RouteName:
        """Return the route that `allreduce` takes; only one of them rounds."""
        route: RouteName = "across" if travels(dtype, op) else self._communicator.route(nbytes, dtype, op)
        return route

    def tried_route(self, nbytes: int, dtype: np.dtype[Any], op: str) -> RouteName:
        """Do `route`; see `Collectives.tried_route`."""
        route: RouteName = "across" if travels(dtype, op) else self._communicator.tried_route(nbytes, dtype, op)
        return route

    def allreduce(self, buffer: Array, op: str = "SUM", source: Array | None = None) -> None:
        """Replace `buffer` on every rank by the combination over the ranks."""
        if travels(buffer.dtype, op):
            allreduce_across(self, buffer, op, source=source)
        else:
            self._communicator.allreduce(buffer, op, source)

    def allreduce_many(
        self, pairs: Sequence[tuple[Array, Array]], op: str = "SUM", divisor: int = 1, nbytes: int = 0
    ) -> None:
        """Do ``allreduce(target, op, source)`` for pairs of (source, target), and divide the results."""
        for source, target in pairs:
            self.allreduce(target, op, source)
            divide_by(divisor, target)
