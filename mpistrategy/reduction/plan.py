"""The plan of a list of arrays on the host: its route, and what is made of the sums; laid out once, run many times."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array, host_wire_dtype, mean_dtype, sum_dtype_of_mean
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.layout.finish import finish, rounded
from mpistrategy.reduction.layout.packing import Layout, host_packs
from mpistrategy.reduction.routes import first_message
from mpistrategy.reduction.routes.base import Description, Route, Targets
from mpistrategy.reduction.routes.communicator import CommunicatorRoute
from mpistrategy.reduction.routes.mailboxes import MailboxRoute, fits

#: From so many bytes on the results of one node are written where the arrays are.  Below, its ranks add up in memory
#: that they share, and copy (2 ranks, 1 MiB: 0.43 ms, in place 0.61; 8 MiB: 3.3 and 3.2; 25 MiB: 10.3 and 8.5).
_LEAST_IN_PLACE = 8 * 2**20


class Transfer(ABC):
    """What becomes of arrays of certain layouts: what is done with them before the ranks agree on a call, and after it.

    Attributes:
        layouts: dtype and shape of each array.
        results: the dtype of each result.
        writes_targets: whether results may be written to their targets at once.
    """

    layouts: tuple[Layout, ...]
    results: Sequence[np.dtype[Any]] = ()
    writes_targets: bool = False

    @abstractmethod
    def bring(self, arrays: Sequence[Array], targets: Targets = None) -> Any:
        """Do all that can fail, before the ranks agree on the call: copy, and take memory for the results.

        Returns:
            The memory, for `run`; `targets` are those of `Route.bring`.
        """

    @abstractmethod
    def run(self, arrays: Sequence[Array], memory: Any) -> list[Array]:
        """Return the results, after that."""

    def carried_out(self, arrays: Sequence[Array], agree: Callable[[], object], targets: Targets = None) -> list[Array]:
        """Take memory, let the ranks agree on the call, and return the results."""
        memory = self.bring(arrays, targets)
        agree()
        return self.run(arrays, memory)


class Plan(Transfer):
    """The reduction of arrays of certain layouts by one route.

    Args:
        communicator: the ranks.
        layouts: dtype and shape of each array.
        op: how they are combined.
        route: how they travel.

    Attributes:
        route: as given.
    """

    def __init__(self, communicator: Ranks, layouts: tuple[Layout, ...], op: ReduceOp, route: Route) -> None:
        self.route: Route = route
        self.layouts: tuple[Layout, ...] = layouts
        self._op, self._size = op, communicator.size
        #: From how many bytes on results may be written over the arrays.  Between nodes other memory only costs time.
        self.least_in_place: int = _LEAST_IN_PLACE if communicator.nodes == 1 else 0
        self.results: list[np.dtype[Any]] = [
            mean_dtype(dtype) if op is ReduceOp.MEAN else dtype for dtype, _ in layouts
        ]
        is_beside = isinstance(route, (MailboxRoute, first_message.FirstMessageRoute))
        self.writes_targets: bool = not is_beside and any(len(pack.members) == 1 for pack in route.packs)
        #: For each array whether what the route returns is the result: it has its dtype, and no integers are divided.
        self._are_exact = [
            host_wire_dtype(dtype) == dtype == result for (dtype, _), result in zip(layouts, self.results, strict=True)
        ]
        self._is_exact = all(self._are_exact)

    def bring(self, arrays: Sequence[Array], targets: Targets = None) -> Any:
        """Take memory for the results, and do what the route needs before the ranks agree on the call."""
        if self._is_exact:
            return self.route.bring(arrays, targets)
        given = targets if targets is not None else [None] * len(self.layouts)
        rows = zip(given, self.layouts, self.results, self._are_exact, strict=True)
        rooms = [None if exact else _room(target, result, shape) for target, (_, shape), result, exact in rows]
        return rooms, self.route.bring(arrays, targets)

    def run(self, arrays: Sequence[Array], memory: Any) -> list[Array]:
        """Return the combinations of all ranks' arrays."""
        if self._is_exact:
            return self.route.run(arrays, memory)
        rooms, totals = memory[0], self.route.run(arrays, memory[1])
        return [
            total
            if room is None
            else finish(total, dtype, self._op, self._size, room)
            if dtype.kind in "iu"
            else rounded(total, dtype, room)
            for total, (dtype, _), room in zip(totals, self.layouts, rooms, strict=True)
        ]

    def describe(self, ranks: Ranks, arrays: Sequence[Array]) -> list[Description]:
        """Return what `run` would do, for `Strategy.explain`."""
        return self.route.describe(ranks, arrays)


def _room(target: Array | None, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Return the target of a result, or new memory."""
    return target if target is not None and target.dtype == dtype else np.empty(shape, dtype)


def summed(layouts: tuple[Layout, ...], op: ReduceOp) -> tuple[Layout, ...]:
    """Return the layouts in which arrays are summed: integers of a MEAN have 64 bits."""
    return tuple((sum_dtype_of_mean(dtype), shape) for dtype, shape in layouts) if op is ReduceOp.MEAN else layouts


def usual_plan(communicator: Ranks, layouts: tuple[Layout, ...], op: ReduceOp) -> Plan:
    """Return the plan of arrays of these layouts, by the fastest route to every rank."""
    return Plan(communicator, layouts, op, usual_route(communicator, summed(layouts, op), op, 0, None))


def run_plan(plan: Plan, arrays: Sequence[Array], agree: Callable[[], object], *, in_place: bool = True) -> list[Array]:
    """Return the combinations of arrays, which are written into the arrays with `in_place`.  Collective.

    Args:
        plan: of the arrays.
        arrays: this rank's.
        agree: compares the call between the ranks.
        in_place: whether the results are written over them.
    """
    is_large = in_place and sum([each.nbytes for each in arrays]) >= plan.least_in_place
    into = [each if each.flags.c_contiguous else None for each in arrays] if is_large else None
    totals = plan.carried_out(arrays, agree, into)
    for array, total in zip(arrays, totals, strict=True) if in_place else ():
        array[...] = total  # nothing to do where it is the array
    return totals


def usual_route(
    communicator: Ranks, layouts: tuple[Layout, ...], op: ReduceOp, bytes_per_pack: float, wire: str | None
) -> Route:
    """Return the fastest route to every rank."""
    if communicator.mailboxes is not None and fits(communicator.mailboxes, layouts):
        return MailboxRoute(communicator.mailboxes, layouts, op)
    message = communicator.first_message
    if message is not None and wire is None and first_message.fits(communicator, layouts, op):
        return first_message.FirstMessageRoute(communicator, message, layouts, op)
    packs = host_packs(layouts, communicator.thresholds.pack_bytes, bytes_per_pack)
    return CommunicatorRoute(communicator, packs, op, wire=wire)


class NumbersOfRanks:
    """So many numbers of each rank, as float64.

    Args:
        communicator: the ranks.
        count: how many of each rank.
    """

    def __init__(self, communicator: Ranks, count: int) -> None:
        self._rank, layouts = communicator.rank, ((np.dtype(np.float64), (communicator.size, count)),)
        self._plan = usual_plan(communicator, layouts, ReduceOp.SUM)
        self._numbers: Array = np.zeros(layouts[0][1])

    def bring(self, mine: Any) -> Any:
        """Give this rank's numbers, before the ranks agree on the call; return memory for all of them."""
        self._numbers[self._rank] = mine
        return self._plan.bring((self._numbers,))

    def found(self, memory: Any) -> Array:
        """Return the numbers of all ranks, a row for each, after that."""
        return self._plan.run((self._numbers,), memory)[0]
