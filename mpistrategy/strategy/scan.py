"""Scan: each rank gets the combination of the values of the ranks before it, and of its own, in rank order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import host_array, like_given, reducible
from mpistrategy.arrays.dtypes import COMBINE, Array, dtype_name, host_wire_dtype, quietly
from mpistrategy.arrays.values import IndexedSlices
from mpistrategy.errors import OptionTypeError, ReduceOpError, UnsupportedError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.public_calls import may_skip_check
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.inputs import check_order
from mpistrategy.reduction.layout.finish import rounded
from mpistrategy.reduction.layout.packing import layouts_of
from mpistrategy.reduction.plan import Transfer
from mpistrategy.reduction.reducer import EachArray
from mpistrategy.reduction.routes.base import Targets
from mpistrategy.strategy.along_axis import identity

#: So much of an array is scanned at a time; the ranks need twice as much memory besides.
_PIECE_BYTES = 8 * 2**20


class Scan(EachArray):
    """`ReplicaContext.scan`; the argument is the operation, whether it is exclusive, and the type of that."""

    needs_arrays = True

    def made(self, call: Call, mine: Sequence[Any]) -> list[Any]:
        """Return the scan of each array; see `EachArray.made`."""
        asked, is_exclusive, _ = self.argument
        op, where = ReduceOp._parse(asked, call.where), call.where
        if op is ReduceOp.MEAN:
            raise ReduceOpError.at(
                where,
                found="MEAN",
                expected="SUM, MIN, MAX or PROD",
                fix="A mean of the first ranks has another divisor on each rank: divide a SUM by rank + 1.",
            )
        if not isinstance(is_exclusive, (bool, np.bool_)):
            raise OptionTypeError.at(where, found=f"exclusive={is_exclusive!r}", expected="True or False")
        arrays = [_checked(value, op, where) for value in mine]
        scanning = _Scanning(self.reducer.communicator, arrays, op, exclusive=bool(is_exclusive))
        words = f"{op.value}, exclusive" if is_exclusive else op.value
        values = tuple((dtype_name(array.dtype), array.shape) for array in arrays)
        agree = partial(call.agree, "scan", op=words, values=values, sparingly=may_skip_check(where))
        return [*map(like_given, scanning.carried_out(arrays, agree), mine)]


class _Scanning(Transfer):
    """The scan of arrays on the host.

    Of each piece of an array every rank gets a part of all ranks' values, combines these in rank order, and sends each
    rank its combination: each number travels twice, however many ranks there are.

    Args:
        communicator: the ranks.
        arrays: this rank's.
        op: how they are combined.
        exclusive: whether a rank's own value is left out.
    """

    def __init__(self, communicator: Ranks, arrays: Sequence[Array], op: ReduceOp, *, exclusive: bool) -> None:
        self._communicator, self._op, self._is_exclusive = communicator, op, exclusive
        self.layouts, self.results = layouts_of(arrays), [array.dtype for array in arrays]

    def bring(self, arrays: Sequence[Array], targets: Targets = None) -> Any:
        """Copy the arrays as they are combined; take memory for what travels, and for the results."""
        totals = [np.array(array, host_wire_dtype(array.dtype), order="C") for array in arrays]
        results = [
            total if total.dtype == array.dtype else np.empty(array.shape, array.dtype)
            for total, array in zip(totals, arrays, strict=True)
        ]
        return totals, results, [(self._room(total), self._room(total)) for total in totals]

    def _room(self, total: Array) -> Array:
        """Return memory for a piece of an array: a row for each rank."""
        length, ranks = min(total.size, max(1, _PIECE_BYTES // total.itemsize)), self._communicator.size
        return np.zeros((ranks, -(-length // ranks)), total.dtype)

    @quietly
    def run(self, arrays: Sequence[Array], memory: Any) -> list[Array]:
        """Return the scans."""
        totals, results, rooms = memory
        for total, (sent, received) in zip(totals, rooms, strict=True):
            flat, step = total.reshape(-1), max(1, sent.size)
            for start in range(0, flat.size, step):
                self._scan(flat[start : start + step], sent, received)
        return [rounded(total, result.dtype, result) for total, result in zip(totals, results, strict=True)]

    def _scan(self, piece: Array, sent: Array, received: Array) -> None:
        """Replace a piece by its scan."""
        communicator, combine = self._communicator, COMBINE[self._op.value]
        sent.reshape(-1)[: piece.size] = piece
        communicator.alltoall(sent, received)  # a row of each rank: all the values of some elements
        for rank in range(1, communicator.size):
            combine(received[rank - 1], received[rank], out=received[rank])
        if self._is_exclusive:
            for rank in reversed(range(1, communicator.size)):
                received[rank] = received[rank - 1]
            received[0] = identity(piece.dtype, self._op)
        communicator.alltoall(received, sent)
        piece[...] = sent.reshape(-1)[: piece.size]


def _checked(value: Any, op: ReduceOp, where: str) -> Array:
    """Return an array on the host that can be scanned."""
    if isinstance(value, IndexedSlices):
        raise UnsupportedError.at(where, found="IndexedSlices", expected="an array", fix="Use to_dense().")
    array = reducible(value, where)
    check_order(array.dtype, op, where)
    return host_array(array, where)
