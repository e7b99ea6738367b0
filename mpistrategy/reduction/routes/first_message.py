"""The route of a few sums between nodes: in the first message of the call, which compares the calls.

Each number travels as float64 and is added up by MPI; a complex one as two.  An integer travels as two halves of 32
bits, so that sums are exact, and wrap around as NumPy's do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array, division, host_wire_dtype, quietly
from mpistrategy.mpi.contract.channel import ControlChannel
from mpistrategy.mpi.contract.check_level import ALWAYS
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.layout import packing
from mpistrategy.reduction.layout.packing import Layout, Pack
from mpistrategy.reduction.routes.base import Description, Targets

_LOW, _HALF = 0xFFFFFFFF, 32


#: How many float64 carry one element exactly, by the kind of its dtype; and the most bytes of such an element.
_NUMBERS = {"f": (1, 8), "c": (2, 16), "i": (2, 8), "u": (2, 8)}


def _numbers_of(dtype: np.dtype[Any]) -> float:
    """Return how many float64 carry one element exactly; more than there are for dtypes that do not travel so."""
    count, most_bytes = _NUMBERS.get(dtype.kind, (1, 0))
    return count if dtype.itemsize <= most_bytes else math.inf


def fits(communicator: Ranks, layouts: tuple[Layout, ...], op: ReduceOp) -> bool:
    """Return whether the sums of these arrays travel in the first message."""
    message = communicator.first_message
    if message is None or op._on_the_wire != "SUM" or communicator.guard.level != ALWAYS:
        return False
    counts = [_numbers_of(dtype) * prod(shape) for dtype, shape in layouts]
    return sum(counts) <= len(message.values)


class FirstMessageRoute:
    """See `mpistrategy.reduction.routes.base.Route`.

    Args:
        communicator: the ranks.
        message: their first message.
        layouts: of arrays that fit.
        op: SUM or MEAN.
    """

    def __init__(self, communicator: Ranks, message: ControlChannel, layouts: tuple[Layout, ...], op: ReduceOp) -> None:
        self.packs: tuple[Pack, ...] = packing.plan(layouts, wire=host_wire_dtype)
        #: For each array its numbers in the message, their sums, its dtype on the wire, and how MEAN divides.
        self._rows: list[tuple[Array, Array, np.dtype[Any], tuple[Any, Any] | None]] = []
        start = 0
        for dtype, shape in layouts:
            stop = start + int(_numbers_of(dtype)) * prod(shape)
            kind: Any = np.complex128 if dtype.kind == "c" else np.float64
            full = (2, *shape) if dtype.kind in "iu" else shape
            mine, sums = (each[start:stop].view(kind).reshape(full) for each in (message.values, message.sums))
            wire, start = host_wire_dtype(dtype), stop
            divisor = op._divisor(wire, communicator.size)
            self._rows.append((mine, sums, wire, None if divisor == 1 else division(divisor, sums.dtype)))

    def bring(self, arrays: Sequence[Any], targets: Targets = None) -> None:
        """Write this rank's numbers into the message."""
        for (mine, _, dtype, _), array in zip(self._rows, arrays, strict=True):
            if dtype.kind in "iu":
                number = np.asarray(array).astype(np.uint64)
                mine[0], mine[1] = number & np.uint64(_LOW), number >> np.uint64(_HALF)
            else:
                mine[...] = array

    @quietly
    def run(self, arrays: Sequence[Any], memory: None) -> list[Array]:
        """Return the sums, each rounded once to its dtype, in new memory."""
        return [_read(sums, dtype, quotient) for _, sums, dtype, quotient in self._rows]

    def describe(self, ranks: Ranks, arrays: Sequence[Array]) -> list[Description]:
        way = "in the first message of the call, with its check"
        return [Description(pack, way, ()) for pack in self.packs if pack.size]


def _read(sums: Array, dtype: np.dtype[Any], quotient: tuple[Any, Any] | None) -> Array:
    if dtype.kind in "iu":
        low, high = sums.astype(np.uint64)
        return np.asarray(low + (high << np.uint64(_HALF))).astype(dtype)
    if quotient is not None:
        divide, operand = quotient
        sums = np.asarray(divide(sums, operand))
    return sums.astype(dtype)
