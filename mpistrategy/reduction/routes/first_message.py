"""The route of a few sums between nodes: in the first message of the call, which compares the calls.

Each number travels as float64 and is added up by MPI; a complex one as two.  An integer travels as two halves of 32
bits, so that sums are exact, and wrap around as NumPy's do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array, division, host_wire_dtype, quietly
from mpistrategy.mpi.contract.channel import FirstMessage
from mpistrategy.mpi.contract.check_level import ALWAYS
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.layout import packing
from mpistrategy.reduction.layout.packing import Layout, Pack
from mpistrategy.reduction.routes.base import Description, Targets, grouped

_LOW, _HALF = 0xFFFFFFFF, 32


def _numbers_of(dtype: np.dtype[Any]) -> int | None:
    """Return how many float64 carry one element exactly; None for dtypes that do not travel so."""
    if dtype.kind == "c":
        return 2 if dtype.itemsize <= 16 else None
    if dtype.kind == "f":
        return 1 if dtype.itemsize <= 8 else None
    return 2 if dtype.kind in "iu" else None


def fits(communicator: Communicator, layouts: tuple[Layout, ...], op: ReduceOp) -> bool:
    """Return whether the sums of these arrays travel in the first message."""
    message = communicator.first_message
    if message is None or op._on_the_wire != "SUM" or communicator.guard.level != ALWAYS:
        return False
    room = len(message.values)
    for dtype, shape in layouts:
        each, count = _numbers_of(dtype), 1
        for length in shape:
            count *= length
        if each is None or (room := room - each * count) < 0:
            return False
    return True


class FirstMessageRoute:
    """See `mpistrategy.reduction.routes.base.Route`.

    Args:
        communicator: the ranks.
        message: their first message.
        layouts: of arrays that fit.
        op: SUM or MEAN.
    """

    def __init__(
        self, communicator: Communicator, message: FirstMessage, layouts: tuple[Layout, ...], op: ReduceOp
    ) -> None:
        self.packs: tuple[Pack, ...] = packing.plan(layouts, wire=host_wire_dtype)
        self._writers: list[Callable[[Array], None]] = []
        self._readers: list[Callable[[], Array]] = []
        start = 0
        for dtype, shape in layouts:
            stop = start + (_numbers_of(dtype) or 0) * int(np.prod(shape, dtype=np.int64))
            mine, sums = message.values[start:stop], message.sums[start:stop]
            start = stop
            wire = host_wire_dtype(dtype)
            if dtype.kind in "iu":
                self._writers.append(partial(_write_halves, mine.reshape(2, *shape)))
                self._readers.append(partial(_read_halves, sums.reshape(2, *shape), dtype))
            else:
                view: Any = mine.view(np.complex128) if dtype.kind == "c" else mine
                total: Any = sums.view(np.complex128) if dtype.kind == "c" else sums
                self._writers.append(partial(_write, view.reshape(shape)))
                divisor = op._divisor(wire, communicator.size)
                divide = None if divisor == 1 else division(divisor, total.dtype)
                self._readers.append(partial(_read, total.reshape(shape), wire, divide))

    def bring(self, arrays: Sequence[Any], targets: Targets = None) -> None:
        """Write this rank's numbers into the message."""
        for write, array in zip(self._writers, arrays, strict=True):
            write(array)

    @quietly
    def run(self, arrays: Sequence[Any], memory: None) -> list[Array]:
        """Return the sums, each rounded once to its dtype, in new memory."""
        return [read() for read in self._readers]

    def describe(self, ranks: Communicator, arrays: Sequence[Array]) -> list[Description]:
        way = "in the first message of the call, with its check"
        return [Description(alike, way, ()) for _, alike, _ in grouped(self.packs, [way] * len(self.packs), arrays)]


def _write(place: Array, array: Any) -> None:
    place[...] = array


def _write_halves(place: Array, array: Any) -> None:
    number = np.asarray(array).astype(np.uint64)
    place[0], place[1] = number & np.uint64(_LOW), number >> np.uint64(_HALF)


def _read(total: Array, dtype: np.dtype[Any], division: tuple[Any, Any] | None) -> Array:
    if division is not None:
        divide, operand = division
        total = np.asarray(divide(total, operand))
    return total.astype(dtype)


def _read_halves(sums: Array, dtype: np.dtype[Any]) -> Array:
    low, high = sums.astype(np.uint64)
    return np.asarray(low + (high << np.uint64(_HALF))).astype(dtype)
