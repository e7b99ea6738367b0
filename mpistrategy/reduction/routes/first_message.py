"""The route of a few sums between nodes: in the first message of the call, which compares the calls.

Each number travels as float64 and is added up by MPI; a complex one as two.  Integers of 8 bytes travel as two halves
of 32 bits, so that their sums are exact, and wrap around as NumPy's do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array, division, host_wire_dtype
from mpistrategy.mpi.contract.channel import FirstMessage
from mpistrategy.mpi.contract.check_level import ALWAYS
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.objects.shown import size_in_words
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.layout import packing
from mpistrategy.reduction.layout.packing import Layout, Pack
from mpistrategy.reduction.routes.base import Description, Targets, grouped, nbytes_of

_LOW, _HALF = 0xFFFFFFFF, 32


def _numbers_of(dtype: np.dtype[Any]) -> int | None:
    """Return how many float64 carry one element exactly; None for dtypes that do not travel so."""
    if dtype.kind == "c":
        return 2 if dtype.itemsize <= 16 else None
    if dtype.kind == "f":
        return 1 if dtype.itemsize <= 8 else None
    return (2 if dtype.itemsize == 8 else 1) if dtype.kind in "iu" else None


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
                is_long = dtype.itemsize == 8
                self._writers.append(partial(_write_halves if is_long else _write, mine.reshape(1 + is_long, *shape)))
                self._readers.append(partial(_read_halves if is_long else _read_integers, sums, dtype, shape))
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

    @np.errstate(all="ignore")  # as in MPI: no warnings, which may be errors, on some ranks only
    def run(self, arrays: Sequence[Any], targets: Targets = None) -> list[Array]:
        """Return the sums, each rounded once to its dtype, in new memory."""
        return [read() for read in self._readers]

    def describe(self, ranks: Communicator, arrays: Sequence[Array]) -> list[Description]:
        way = "in the first message of the call, with its check"
        return [
            Description(
                alike,
                way,
                (),
                f"each rank sends {size_in_words(nbytes_of(alike))} in a message of {_size(ranks)}",
            )
            for _, alike, _ in grouped(self.packs, [way] * len(self.packs), arrays)
        ]


def _size(ranks: Communicator) -> str:
    assert ranks.first_message is not None
    return f"{len(ranks.first_message.values)} numbers beside the check"


def _write(place: Array, array: Any) -> None:
    place[...] = array


def _write_halves(place: Array, array: Any) -> None:
    flat = np.asarray(array).astype(np.uint64)
    place[: len(place) // 2] = flat & np.uint64(_LOW)
    place[len(place) // 2 :] = flat >> np.uint64(_HALF)


def _read(total: Array, dtype: np.dtype[Any], division: tuple[Any, Any] | None) -> Array:
    if division is not None:
        divide, operand = division
        total = np.asarray(divide(total, operand))
    return total.astype(dtype)


def _read_integers(sums: Array, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    return sums.astype(np.int64).astype(dtype).reshape(shape)


def _read_halves(sums: Array, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    low, high = sums.astype(np.uint64).reshape(2, -1)
    return (low + (high << np.uint64(_HALF))).astype(dtype).reshape(shape)
