"""The route of values that a function of the program's puts together: all ranks' copies of one meet on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array, divide_by, dtype_name
from mpistrategy.errors import DTypeError, ShapeError
from mpistrategy.mpi.contract.call import Call
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

    def bring(self, arrays: Sequence[Array], targets: Targets = None) -> Any:
        """Return copies of this rank's arrays, in whose place the results come; and memory for all ranks' first."""
        buffers = [pack.fill(arrays) for pack in self.packs]
        return buffers, [self._room(*buffers[:1])]

    def _room(self, *values: Array) -> Array | None:
        """Return new memory, which the function may keep, for all copies of a value on the rank where they meet."""
        is_here = values and self._communicator.rank == self._root
        return np.empty((self._communicator.size, values[0].size), values[0].dtype) if is_here else None

    def run(self, arrays: Sequence[Array], memory: Any) -> list[Array]:
        """Return what the function has made of all ranks' arrays."""
        communicator, results = self._communicator, list(arrays)
        buffers, rooms = memory
        with Call(communicator.guard, "ReductionToOneDevice") as call:
            for number, (pack, buffer) in enumerate(zip(self.packs, buffers, strict=True), 1):
                together = rooms.pop()
                communicator.gatherv(buffer, [buffer.size] * communicator.size, together, self._root)
                # The function is the user's: if it raises on the summing rank, the others must not wait for its result.
                call.expect_more()
                member = pack.members[0]
                result = buffer.reshape(member.shape)
                if together is not None:
                    copies = [copy.reshape(member.shape) for copy in together]
                    dtype = pack.dtype if pack.dtype.kind in "iu" else arrays[member.index].dtype
                    self._accumulate(copies, dtype, result, call.where)
                    del together, copies  # before there is memory for the next value
                rooms.append(self._room(*buffers[number : number + 1]))
                call.agree("accumulated")
                if self._is_sent:
                    communicator.bcast(buffer, self._root)
                with np.errstate(all="ignore"):
                    divide_by(self._op._divisor(buffer.dtype, communicator.size), buffer)
                results[member.index] = result
        return results

    def describe(self, ranks: Communicator, arrays: Sequence[Array]) -> list[Description]:
        return [described(ranks, "root", pack, copies_of(pack, arrays)) for pack in self.packs if pack.size]

    def _accumulate(self, copies: Sequence[Array], dtype: np.dtype[Any], target: Array, where: str) -> None:
        """Write what the function makes of all ranks' copies, which it gets in `dtype`, into `target`."""
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
