"""The route of values that a function of the program's puts together: all ranks' copies of one meet on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array, divide_by, dtype_name
from mpistrategy.errors import DTypeError, ShapeError
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.layout.destinations import Destination
from mpistrategy.reduction.layout.packing import Pack
from mpistrategy.reduction.routes.base import Description, Targets, copies_of
from mpistrategy.reduction.routes.communicator import described


class AccumulationRoute:
    """See `mpistrategy.reduction.routes.base.Route`.

    Args:
        communicator: the ranks.
        packs: the buffers, of one value each.
        op: MEAN divides what the function returned.
        function: gets all ranks' arrays in rank order, and returns one.
        root: the rank that calls it.
        destination: where the results are wanted.
    """

    def __init__(
        self,
        communicator: Communicator,
        packs: tuple[Pack, ...],
        op: ReduceOp,
        function: Callable[[list[Array]], object],
        root: int,
        destination: Destination,
    ) -> None:
        self.packs = packs
        self._communicator, self._op, self._function = communicator, op, function
        self._root, self._is_sent = root, destination.only_rank != root

    def bring(self, arrays: Sequence[Array], targets: Targets = None) -> list[Array]:
        """Return copies of this rank's arrays, in whose place the results come."""
        return [pack.fill(arrays) for pack in self.packs]

    def _room(self, mine: Array) -> Array | None:
        """Return new memory, which the function may keep, for all copies of a value on the rank where they meet."""
        ranks = self._communicator
        return np.empty((ranks.size, mine.size), mine.dtype) if ranks.rank == self._root else None

    def run(self, arrays: Sequence[Array], memory: list[Array]) -> list[Array]:
        """Return what the function has made of all ranks' arrays."""
        ranks, results = self._communicator, list(arrays)
        for pack, buffer in zip(self.packs, memory, strict=True):
            member = pack.members[0]
            results[member.index] = result = buffer.reshape(member.shape)
            together = ranks.guard.on_all(partial(self._room, buffer))
            ranks.gatherv(buffer, [buffer.size] * ranks.size, together, self._root)
            dtype = pack.dtype if pack.dtype.kind in "iu" else arrays[member.index].dtype
            # The function is the user's: if it raises on the summing rank, the others must not wait for its result.
            ranks.guard.on_all(partial(self._accumulate, together, dtype, result))
            together = None  # before there is memory for the next value
            if self._is_sent:
                ranks.bcast(buffer, self._root)
            with np.errstate(all="ignore"):
                divide_by(self._op._divisor(buffer.dtype, ranks.size), buffer)
        return results

    def describe(self, ranks: Communicator, arrays: Sequence[Array]) -> list[Description]:
        return [described(ranks, "root", pack, copies_of(pack, arrays)) for pack in self.packs if pack.size]

    def _accumulate(self, together: Array | None, dtype: np.dtype[Any], target: Array) -> None:
        """Write what the function makes of all ranks' copies, which it gets in `dtype`, into `target`."""
        if together is None:
            return
        copies, where = [copy.reshape(target.shape) for copy in together], "ReductionToOneDevice"
        result = np.asarray(self._function([copy.astype(dtype, copy=False) for copy in copies]))
        if result.shape != target.shape:
            raise ShapeError.at(
                where,
                found=f"shape {result.shape} returned by accumulation_fn",
                expected=f"the shape {target.shape} of each value",
            )
        if not np.can_cast(result.dtype, target.dtype, "same_kind"):
            raise DTypeError.at(
                where,
                found=f"dtype {dtype_name(result.dtype)} returned by accumulation_fn",
                expected=f"the dtype of each value, {dtype_name(dtype)}",
            )
        target[...] = result
