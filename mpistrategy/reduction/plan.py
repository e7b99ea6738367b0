"""Plans: made once for a call site, an operation, options and a kind of value, and run many times.

A plan does the whole call: it packs the values, which is all that can fail on one rank; the ranks agree on the call;
the packs are summed, and the results unpacked.  `Reducer` finds the plan of a call, or makes it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from mpistrategy.arrays.dtypes import Array, host_wire_dtype, mean_dtype, sum_dtype_of_mean
from mpistrategy.arrays.gpu import is_cupy
from mpistrategy.arrays.nest import Leaves
from mpistrategy.arrays.values import Mirrored, is_arena
from mpistrategy.mpi.contract import timeouts
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import Signature, digest_of
from mpistrategy.mpi.interface.ranks import Ranks
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.inputs import NUMBERS, arrays_of, as_leaf, direct, in_kind, writable
from mpistrategy.reduction.layout.destinations import Destination
from mpistrategy.reduction.layout.finish import finish, rounded
from mpistrategy.reduction.layout.packing import Layout, host_packs
from mpistrategy.reduction.routes.base import Description, Targets, Transfer
from mpistrategy.reduction.routes.communicator import CommunicatorRoute
from mpistrategy.reduction.routes.gpu import move
from mpistrategy.reduction.routes.with_the_check import FirstMessageRoute, MailboxRoute, fits_mailbox, fits_message

_ndarray, _ARRAYS, _NUMBERS = np.ndarray, {np.ndarray}, NUMBERS.keys()
_dtype_of, _shape_of = attrgetter("dtype"), attrgetter("shape")
#: From so many bytes on the results of one node are written where the arrays are.  Below, its ranks add up in memory
#: that they share, and copy (2 ranks, 1 MiB: 0.43 ms, in place 0.61; 8 MiB: 3.3 and 3.2; 25 MiB: 10.3 and 8.5).
_LEAST_IN_PLACE = 8 * 2**20


# ------------------------------------------------------------------------------------------------- lists of arrays


class Plan(Transfer):
    """The reduction of arrays of certain layouts on the host, by one route.

    Args:
        ranks: the ranks that take part.
        layouts: dtype and shape of each array.
        op: how they are combined.
        route: how they travel.

    Attributes:
        route: the argument.
    """

    def __init__(self, ranks: Ranks, layouts: tuple[Layout, ...], op: ReduceOp, route: Transfer) -> None:
        self.route: Transfer = route
        self.layouts = layouts
        self._op, self._size = op, ranks.size
        # Between nodes other memory only costs time.
        self.least_in_place: int = _LEAST_IN_PLACE if ranks.nodes == 1 else 0
        self.results: list[np.dtype[Any]] = [
            mean_dtype(dtype) if op is ReduceOp.MEAN else dtype for dtype, _ in layouts
        ]
        self.writes_targets: bool = route.writes_targets
        #: For each array whether the route's array is the result: of the right dtype, and no integers are divided.
        self._are_exact = [
            host_wire_dtype(dtype) == dtype == result for (dtype, _), result in zip(layouts, self.results, strict=True)
        ]
        self._is_exact = all(self._are_exact)

    def bring(self, arrays: Sequence[Array], targets: Targets = None) -> Any:
        """Take memory for the results, and prepare the route before the ranks agree on the call."""
        if self._is_exact:
            return self.route.bring(arrays, targets)
        places = targets if targets is not None else [None] * len(self.layouts)
        rows = zip(places, self.layouts, self.results, self._are_exact, strict=True)
        rooms = [None if exact else _room(target, result, shape) for target, (_, shape), result, exact in rows]
        return rooms, self.route.bring(arrays, targets)

    def run(self, arrays: Sequence[Array], memory: Any) -> list[Array]:
        """Return the combinations of all ranks' arrays."""
        if self._is_exact:
            return self.route.run(arrays, memory)
        rows = zip(memory[0], self.route.run(arrays, memory[1]), self.layouts, strict=True)
        return [total if room is None else self._result(total, dtype, room) for room, total, (dtype, _) in rows]

    def _result(self, total: Array, dtype: np.dtype[Any], room: Array) -> Array:
        if dtype.kind in "iu":  # floats have been divided
            return finish(total, dtype, self._op, self._size, room)
        return rounded(total, dtype, room)

    def describe(self, arrays: Sequence[Array]) -> list[Description]:
        """Return the route's descriptions of these arrays."""
        return self.route.describe(arrays)


def _room(target: Array | None, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Return the target of a result, or new memory."""
    return target if target is not None and target.dtype == dtype else np.empty(shape, dtype)


def summed(layouts: tuple[Layout, ...], op: ReduceOp) -> tuple[Layout, ...]:
    """Return the layouts in which arrays are summed: integers of a MEAN have 64 bits."""
    return tuple((sum_dtype_of_mean(dtype), shape) for dtype, shape in layouts) if op is ReduceOp.MEAN else layouts


def usual_plan(ranks: Ranks, layouts: tuple[Layout, ...], op: ReduceOp) -> Plan:
    """Return the plan of arrays of these layouts, by the fastest route to every rank."""
    return Plan(ranks, layouts, op, usual_route(ranks, summed(layouts, op), op, 0, None))


def run_plan(
    plan: Transfer, arrays: Sequence[Array], agree: Callable[[], object], *, in_place: bool = True
) -> list[Array]:
    """Return the combinations of arrays, which are written into the arrays with `in_place`.  Collective.

    Args:
        plan: the plan of the arrays.
        arrays: this rank's arrays.
        agree: compares the call between the ranks.
        in_place: whether the results are written over them.
    """
    is_large = in_place and sum([array.nbytes for array in arrays]) >= plan.least_in_place
    into = [array if array.flags.c_contiguous else None for array in arrays] if is_large else None
    totals = plan.carried_out(arrays, agree, into)
    for array, total in zip(arrays, totals, strict=True) if in_place else ():
        array[...] = total  # nothing to do where it is the array
    return totals


def usual_route(
    ranks: Ranks, layouts: tuple[Layout, ...], op: ReduceOp, bytes_per_pack: float, wire: str | None
) -> Transfer:
    """Return the fastest route to every rank."""
    if ranks.mailboxes is not None and fits_mailbox(ranks.mailboxes, layouts):
        return MailboxRoute(ranks.mailboxes, layouts, op)
    message = ranks.first_message
    if message is not None and wire is None and fits_message(ranks, layouts, op):
        return FirstMessageRoute(ranks, message, layouts, op)
    return CommunicatorRoute(ranks, host_packs(layouts, ranks.thresholds.pack_bytes, bytes_per_pack), op, wire=wire)


class NumbersOfRanks:
    """So many numbers of each rank, as float64.

    Args:
        ranks: the ranks that take part.
        count: how many numbers each rank has.
    """

    def __init__(self, ranks: Ranks, count: int) -> None:
        self._rank, layouts = ranks.rank, ((np.dtype(np.float64), (ranks.size, count)),)
        self._plan = usual_plan(ranks, layouts, ReduceOp.SUM)
        self._numbers: Array = np.zeros(layouts[0][1])

    def bring(self, numbers: Any) -> Any:
        """Give this rank's numbers, before the ranks agree on the call; return memory for the numbers of all ranks."""
        self._numbers[self._rank] = numbers
        return self._plan.bring((self._numbers,))

    def numbers_of_ranks(self, memory: Any) -> Array:
        """Return the numbers of all ranks, a row for each rank, after the agreement."""
        return self._plan.run((self._numbers,), memory)[0]


# ------------------------------------------------------------------------------------------------- calls


class CallPlan(ABC):
    """How one kind of value is reduced at one call site."""

    @abstractmethod
    def run(self, call: Call, value: Any, out: Any, weight: Any) -> Any:
        """Return the reduction of a value; inside `call`.

        Args:
            call: the public call, entered by the caller.
            value: of the kind that the plan was made for.
            out: where the result goes, or the destinations; None for new memory on every rank.
            weight: of this rank's values, for plans of weighted means.
        """


class Compared:
    """What the ranks compare before the data of a call move.

    Args:
        signature: of the call.
        timeout_seconds: how long the call may wait for the other ranks; None: the strategy's timeout.

    Attributes:
        sparingly: see `Call.agree`.
    """

    sparingly: bool = True

    def __init__(self, signature: Signature, timeout_seconds: float | None) -> None:
        self._signature, self._digest = signature, digest_of(signature)
        self._timeout = None if timeout_seconds is None else timeouts.limit(timeout_seconds)

    def agree(self, call: Call) -> bool:
        """Compare the call with the calls of the other ranks; see `Call.agree`."""
        call.structure = self._signature.structure
        if self._timeout is not None:
            call.timeout = self._timeout
        return call.agree_on(self._signature, self._digest, sparingly=self.sparingly)


class ArraysPlan(Compared):
    """The plan of arrays whose calls are compared by words that change: a variable's name, the number of a step.

    Args:
        plan: the plan of the arrays.
        signature: the compared fields, without the words of a call.
        timeout_seconds: see `Compared`.

    Attributes:
        plan: the argument.
    """

    def __init__(self, plan: Transfer, signature: Signature, timeout_seconds: float | None) -> None:
        super().__init__(signature, timeout_seconds)
        self.plan: Transfer = plan
        self.sparingly: bool = plan.sparingly
        #: The words of the latest call, which `_signature` has.
        self._words: tuple[Any, ...] = ()

    def run(self, call: Call, arrays: Sequence[Array]) -> list[Array]:
        """Return the results on every rank; inside `call`."""
        return self.plan.carried_out(arrays, partial(self.agree, call))

    def agree(self, call: Call) -> bool:
        """Compare the call with the calls of the other ranks; see `Call.agree`."""
        words = call.name, call.where, call.place, call.step, call.structure
        if words != self._words:
            name, where, place, step, structure = words
            self._signature = self._signature._replace(
                name=name, call=where, place=place, step=step, structure=structure
            )
            self._words, self._digest = words, digest_of(self._signature)  # not before: a signal's handler may raise
        return super().agree(call)


class NestPlan(Compared, CallPlan):
    """The plan of arrays and numbers on the host, alone or in plain nests; `out` is of the kind of the first call.

    Args:
        otherwise: makes the other calls, such as calls with an `out` of another kind.
        leaves: how to reach the arrays.
        transfer: the transfer of the arrays.
        signature, timeout_seconds: see `Compared`.
        kinds: the types of the leaves.
    """

    def __init__(
        self,
        otherwise: CallPlan,
        leaves: Leaves,
        transfer: Transfer,
        signature: Signature,
        timeout_seconds: float | None,
        kinds: set[type],
    ) -> None:
        super().__init__(signature, timeout_seconds)
        self.sparingly: bool = transfer.sparingly
        self.otherwise: CallPlan = otherwise
        self.leaves: Leaves = leaves
        self._transfer = transfer
        self._only_arrays = kinds == _ARRAYS
        #: Whether results need not be made arrays of another library.
        self._only_own = kinds <= _ARRAYS | _NUMBERS

    def _arrays_of(self, leaves: Sequence[Any]) -> Sequence[Any] | None:
        """Return leaves as arrays of the plan's layouts; None for leaves that `otherwise` must reduce."""
        if self._only_arrays:
            return leaves
        return arrays_of(leaves, None if self._only_own else self._transfer.layouts)

    def run(self, call: Call, value: Any, out: Any, weight: Any) -> Any:
        """Return the reduction; see `CallPlan.run`."""
        leaves = self.leaves.take(value)
        arrays = self._arrays_of(leaves)
        if arrays is None:
            return self.otherwise.run(call, value, out, weight)
        if out is None:
            results = self._results(call, arrays, None, weight)
            return self.leaves.structure.pack(results if self._only_arrays else map(as_leaf, results, leaves))
        targets = self.leaves.take(out)
        if not writable(targets):
            return self.otherwise.run(call, value, out, weight)
        direct_targets = direct(targets, arrays) if self._transfer.writes_targets else None
        results = self._results(call, arrays, direct_targets, weight)
        for target, result in zip(targets, results, strict=True):
            if result is not target:
                target[...] = result
        return out

    def _results(self, call: Call, arrays: Sequence[Array], targets: Targets, weight: Any = None) -> list[Array]:
        memory = self._transfer.bring(arrays, targets)
        self.agree(call)
        return self._transfer.run(arrays, memory)


class DevicePlan(NestPlan):
    """The plan of nests of CuPy arrays; its transfer is a `GpuRoute`."""

    def run(self, call: Call, value: Any, out: Any, weight: Any) -> Any:
        """Return the reduction; see `CallPlan.run`."""
        arrays: Any = self.leaves.take(value)
        route: Any = self._transfer
        if out is not None and (out is not value or len({*map(id, arrays)}) < len(arrays)):
            return self.otherwise.run(call, value, out, weight)
        results = self._results(call, arrays, None if out is None else route.own_results(arrays, arrays))
        if out is None:
            return self.leaves.structure.pack(results)
        with arrays[0].device:
            move(results, arrays)
        return out


class PlacedPlan(NestPlan):
    """The plan of values whose results are `Mirrored`, on some ranks; the `out` of its calls are the destinations."""

    #: Where the results live.
    destination: Destination
    is_here: bool

    def run(self, call: Call, value: Any, out: Any, weight: Any) -> Any:
        """Return a `Mirrored`, or a nest of them; see `CallPlan.run`."""
        leaves, text = self.leaves.take(value), self.destination.text
        arrays = self._arrays_of(leaves)
        if arrays is None:
            return self.otherwise.run(call, value, out, weight)
        results = self._results(call, arrays, None)
        if not self.is_here:
            return self.leaves.structure.pack([Mirrored((), text) for _ in leaves])
        if not self._only_own:
            results = [*map(in_kind, results, leaves)]
        return self.leaves.structure.pack([Mirrored((result,), text) for result in results])


def kind_of(value: Any) -> Any:
    """Return a key that tells kinds of values with plans apart: structure, types, dtypes and shapes.

    Raises:
        Exception: of many types, for values without a plan, such as a list that holds itself.
    """
    kind = type(value)
    if kind is _ndarray:
        return value.dtype, value.shape
    if kind in _NUMBERS:
        return kind
    if kind is dict:
        return kind, tuple(value), _kinds_of(value.values())
    if kind is list or kind is tuple:
        return kind, _kinds_of(value)
    if is_arena(value):
        return kind, value._number
    shape = getattr(value, "shape", None)
    if not isinstance(shape, tuple):  # a record may have a field of that name, and a key keeps no values
        return kind
    return kind, getattr(value, "dtype", None), shape


def _kinds_of(values: Any) -> tuple[Any, ...]:
    kinds = {*map(type, values)}
    if kinds == _ARRAYS:
        return (*map(_dtype_of, values), *map(_shape_of, values))
    if kinds <= _NUMBERS:
        return (*map(type, values),)
    if len(kinds) == 1 and all(is_cupy(value) for value in [*values][:1]):
        return (*kinds, *map(_dtype_of, values), *map(_shape_of, values))
    return (*map(kind_of, values),)
