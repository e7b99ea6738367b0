"""The plan of a list of arrays on the host: its route, and what is made of the sums; laid out once, run many times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrategy.arrays.dtypes import Array, host_wire_dtype, mean_dtype, sum_dtype_of_mean
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.objects.later import later
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.layout.finish import finish, rounded
from mpistrategy.reduction.layout.packing import Layout
from mpistrategy.reduction.routes import first_message
from mpistrategy.reduction.routes.base import Route, Targets
from mpistrategy.reduction.routes.mailboxes import MailboxRoute, fits

if TYPE_CHECKING:
    from mpistrategy.reduction.routes.communicator import CommunicatorRoute, hybrid, names_of
else:
    later(
        globals(),
        "mpistrategy.reduction.routes.communicator",
        "CommunicatorRoute",
        "hybrid",
        "names_of",
    )

#: Returns the route of arrays of certain layouts, with packs of at most so many bytes (0: the library's own limit), and
#: with what sums of float32 travel as between nodes.
ChooseRoute = Callable[[Communicator, tuple[Layout, ...], ReduceOp, float, "str | None"], Route]

#: From so many bytes on the results of one node are written where the arrays are.  Below, its ranks add up in memory
#: that they share, and copy (2 ranks, 1 MiB: 0.43 ms, in place 0.61; 8 MiB: 3.3 and 3.2; 25 MiB: 10.3 and 8.5).
_LEAST_IN_PLACE = 8 * 2**20
_REMEMBERED = 512
_KINDS = "fiuc"


class Plan:
    """The reduction of arrays of certain layouts by one route.

    Args:
        communicator: the ranks.
        layouts: dtype and shape of each array.
        op: how they are combined.
        route: how they travel.

    Attributes:
        route, op, layouts, dtypes: as given.
        bring: does what comes before the ranks agree on the call.
        run: returns the results after that; the arguments of both are those of `Route.run`.
    """

    def __init__(self, communicator: Communicator, layouts: tuple[Layout, ...], op: ReduceOp, route: Route) -> None:
        self.route: Route = route
        #: From how many bytes on results may be written over the arrays.  Between nodes other memory only costs time.
        self.least_in_place: int = _LEAST_IN_PLACE if communicator.nodes == 1 else 0
        self.bring: Callable[..., None] = route.bring
        self.run: Callable[..., list[Array]] = route.run
        self.op: ReduceOp = op
        self._size = communicator.size
        self.layouts: tuple[Layout, ...] = layouts
        self.dtypes: list[np.dtype[Any]] = [dtype for dtype, _ in layouts]
        self._results = [mean_dtype(dtype) if op is ReduceOp.MEAN else dtype for dtype in self.dtypes]
        # What the route returns is the result where it has its own dtype, and no integers are divided.
        is_exact = all(
            host_wire_dtype(dtype) == dtype == result for dtype, result in zip(self.dtypes, self._results, strict=True)
        )
        #: Memory for the results that the route does not return, between `bring` and `run`.
        self._memory: list[Array | None] = []
        if not is_exact:
            self.bring, self.run = self._bring_and_make_room, self._run_and_finish

    def _bring_and_make_room(self, arrays: Sequence[Array], targets: Targets = None) -> None:
        given = targets if targets is not None else [None] * len(self.dtypes)
        self._memory = [
            None if host_wire_dtype(dtype) == dtype == result else _room(target, result, shape)
            for target, (dtype, shape), result in zip(given, self.layouts, self._results, strict=True)
        ]
        self.route.bring(arrays, targets)

    def _run_and_finish(self, arrays: Sequence[Array], targets: Targets = None) -> list[Array]:
        results, memory, self._memory = self.route.run(arrays, targets), self._memory, []
        return [
            result
            if room is None
            else finish(result, dtype, self.op, self._size, room)
            if dtype.kind in "iu"
            else rounded(result, dtype, room)
            for result, dtype, room in zip(results, self.dtypes, memory, strict=True)
        ]


def _room(target: Array | None, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Return the target of a result, or new memory."""
    return target if target is not None and target.dtype == dtype else np.empty(shape, dtype)


def plan_of(
    communicator: Communicator,
    layouts: tuple[Layout, ...],
    op: ReduceOp,
    bytes_per_pack: float,
    choose: ChooseRoute,
    wire: str | None = None,
) -> Plan:
    """Return the plan of arrays of these layouts, with the route that `choose` returns; the same one the next time."""
    key = (layouts, op, bytes_per_pack, choose, wire, communicator.guard.level)
    made: dict[Any, Plan] = communicator.once.made.setdefault(Plan, {})
    known = made.get(key)
    if known is None:
        if len(made) >= _REMEMBERED:
            made.clear()
        route = choose(communicator, layouts, op, bytes_per_pack, wire)
        known = made[key] = Plan(communicator, layouts, op, route)
    return known


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
    plan.bring(arrays, into)
    agree()
    totals = plan.run(arrays, into)
    for array, total in zip(arrays, totals, strict=True) if in_place else ():
        array[...] = total  # nothing to do where it is the array
    return totals


def usual_route(
    communicator: Communicator, layouts: tuple[Layout, ...], op: ReduceOp, bytes_per_pack: float, wire: str | None
) -> Route:
    """Return the fastest route to every rank."""
    if communicator.mailboxes is not None and fits(communicator.mailboxes, layouts):
        return MailboxRoute(communicator.mailboxes, layouts, op)
    message = communicator.first_message
    if message is not None and wire is None and first_message.fits(communicator, layouts, op):
        return first_message.FirstMessageRoute(communicator, message, layouts, op)
    packs = hybrid(layouts, communicator.thresholds.pack_bytes, bytes_per_pack)
    return CommunicatorRoute(communicator, packs, op, names_of(communicator, packs, op, wire), wire=wire)


def is_simple(dtype: np.dtype[Any], op: ReduceOp) -> bool:
    """Return whether arrays of a dtype are reduced as they are.

    They are NumPy's own, native, ordered for MIN and MAX, and for MEAN no integers that are summed in more bits.
    """
    if op is ReduceOp.MEAN:
        fits = sum_dtype_of_mean(dtype).itemsize == dtype.itemsize
    else:
        fits = op not in (ReduceOp.MIN, ReduceOp.MAX) or dtype.kind != "c"
    return dtype.kind in _KINDS and dtype.isnative and dtype.type.__module__ == "numpy" and fits
