"""The route of a small pack between nodes: its sum travels beside the first message of the call, or is that message.

It is started before the ranks have agreed on the call, in memory of its own (`mpistrategy.mpi.contract.sums_by_mpi`).
The first call of a size makes that memory, after the agreement.  Where all ranks expect the call, its sum carries the
comparison, too, and nothing else is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array, division, quiet_runner
from mpistrategy.mpi.contract.check_level import ALWAYS
from mpistrategy.mpi.contract.sums_by_mpi import LARGEST_BYTES, Companion, Companions, Memory
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.layout.packing import FEW_ELEMENTS, Pack
from mpistrategy.reduction.routes.base import Description, Repeated, Route, Run, Targets


def fits(communicator: Communicator, packs: Sequence[Pack], op: ReduceOp, names: Sequence[str]) -> bool:
    """Return whether these are one small pack that MPI adds up."""
    message = communicator.first_message
    if message is None or message.companions is None or communicator.guard.level != ALWAYS:
        return False
    if op._on_the_wire != "SUM" or [*names] != ["mpi"] or not 0 < packs[0].nbytes <= LARGEST_BYTES:
        return False
    dtype = packs[0].dtype
    return dtype.kind in "fc" or dtype.itemsize >= 4  # Open MPI may saturate shorter integers


class BesideRoute:
    """See `mpistrategy.reduction.routes.base.Route`.

    Args:
        communicator: the ranks.
        companions: of their first message.
        pack: what travels.
        op: SUM or MEAN.
        otherwise: the route where there is no room for another size.
    """

    def __init__(
        self, communicator: Communicator, companions: Companions, pack: Pack, op: ReduceOp, otherwise: Route
    ) -> None:
        self.packs: tuple[Pack, ...] = (pack,)
        self._companions, self._pack, self._otherwise = companions, pack, otherwise
        self._is_one = len(pack.members) == 1
        divisor = op._divisor(pack.dtype, communicator.size)
        self._division = None if divisor == 1 else division(divisor, pack.dtype)
        self._quiet = quiet_runner()
        self._started: Companion | None = None
        self._memory: Any = None
        self._new: Memory | None = None

    def _find(self) -> Companion | None:
        return self._companions.find(self._pack.dtype, self._pack.size)

    def bring(self, arrays: Sequence[Array], targets: Targets = None) -> None:
        """Take memory for the results, and begin to add up."""
        self._memory, self._new, self._started = None, None, self._find()
        if self._started is None and self._companions.is_full:
            self._otherwise.bring(arrays, targets)
            return
        self._memory = self._taken(targets)
        if self._started is not None:
            self._begin(self._started, arrays)
        else:
            self._new = self._companions.memory(self._pack.dtype, self._pack.size)

    def _taken(self, targets: Targets) -> Array:
        pack, first = self._pack, self._pack.members[0]
        if not self._is_one:
            return np.empty(pack.size, pack.dtype)
        given = None if targets is None else targets[first.index]
        return given if given is not None and given.dtype == pack.dtype else np.empty(first.shape, pack.dtype)

    def _begin(self, companion: Companion, arrays: Sequence[Array]) -> None:
        self._pack.fill(arrays, companion.values)
        self._companions.begin(companion)

    def run(self, arrays: Sequence[Array], targets: Targets = None) -> list[Array]:
        """Return the sums, in the memory that was taken."""
        companion, self._started = self._started, None
        memory, new, self._memory, self._new = self._memory, self._new, None, None
        if memory is None:
            return self._otherwise.run(arrays, targets)
        if companion is None:
            companion = self._find() or (None if new is None else self._companions.make(new))
            if companion is None:
                self._otherwise.bring(arrays, targets)
                return self._otherwise.run(arrays, targets)
            self._begin(companion, arrays)
        self._companions.finish()
        return self._results(companion, memory, len(arrays))

    def _results(self, companion: Companion, memory: Array, count: int) -> list[Array]:
        memory[...] = companion.sums.reshape(memory.shape)
        if self._division is not None:
            divide, operand = self._division
            self._quiet(divide, memory, operand, memory)
        if self._is_one:
            return [memory]
        results: list[Array] = [memory] * count
        for index, view in self._pack.views(memory):
            # A view of one number would keep all of a larger pack.
            results[index] = view.copy() if view.size == 1 and self._pack.size > FEW_ELEMENTS else view
        return results

    def repeated(self, repeated: Repeated) -> Run:
        """Return the all-reduce of one array in the fewest steps."""
        compare, otherwise = repeated
        companions, quiet, empty = self._companions, self._quiet, np.empty
        dtype, shape = self._pack.dtype, self._pack.members[0].shape
        divides = self._division is not None
        divide, operand = self._division or (None, None)
        companion: Companion | None = None
        values = sums = empty(0, dtype)

        def run(value: Any, out: Any) -> Any:
            nonlocal companion, values, sums
            if out is not None:
                return otherwise(value, out)
            if companion is None:
                found = self._find()
                if found is None:
                    return otherwise(value, out)
                values, sums = found.values.reshape(shape), found.sums.reshape(shape)
                companion = found  # last: an error may come at any moment
            result = empty(shape, dtype)
            values[...] = value
            companions.begin(companion)
            compare()
            companions.finish()
            result[...] = sums
            if divides:
                quiet(divide, result, operand, result)
            return result

        return run

    def describe(self, ranks: Communicator, arrays: Sequence[Array]) -> list[Description]:
        found = self._otherwise.describe(ranks, arrays)
        if self._find() is None and self._companions.is_full:
            return found
        way = "by MPI's Allreduce, beside the first message of the call; where the call is repeated, in its place"
        copies = (1, "all into memory of the message"), (1, "the sums out of it")
        return [replace(each, way=way, copies=copies) for each in found]
