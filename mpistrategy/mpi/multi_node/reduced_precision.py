"""Communication between nodes in less than full precision: `CommunicationOptions.wire`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array, divide_by
from mpistrategy.mpi.multi_node.bfloat16 import bfloat16, travels
from mpistrategy.mpi.multi_node.two_level import allreduce_across
from mpistrategy.mpi.tuning.thresholds import RouteName


def check(wire: str | None) -> None:
    """Raise OptionError when this rank cannot send `wire`; call it before the ranks agree on a call."""
    if wire is not None:
        bfloat16()


def on(communicator: Any, wire: str | None) -> Any:
    """Return `communicator`, or a view of it whose all-reduces send `wire` between the nodes: None, or "bfloat16"."""
    if wire is None or max(communicator.node_of) == 0:
        return communicator
    return communicator.once((_Rounding, wire), lambda: _Rounding(communicator))


class _Rounding:
    """A view of a communicator whose float32 sums are rounded between the nodes."""

    #: What `allreduce_across` asks for.
    rounds = True

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communicator, name)

    def route(self, nbytes: int, dtype: np.dtype[Any], op: str) -> RouteName:
        """Return the route that `allreduce` takes; only one of them rounds."""
        route: RouteName = "across" if travels(dtype, op) else self._communicator.route(nbytes, dtype, op)
        return route

    def allreduce(self, buffer: Array, op: str = "SUM", source: Array | None = None) -> None:
        """Replace `buffer` on every rank by the combination over the ranks."""
        if not travels(buffer.dtype, op):
            self._communicator.allreduce(buffer, op, source)
            return
        allreduce_across(self, buffer, op, source=source)

    def allreduce_many(
        self, pairs: Sequence[tuple[Array, Array]], op: str = "SUM", divisor: int = 1, nbytes: int = 0
    ) -> None:
        """Do ``allreduce(target, op, source)`` for pairs of (source, target), and divide the results."""
        for source, target in pairs:
            self.allreduce(target, op, source)
            divide_by(divisor, target)
