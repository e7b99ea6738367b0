"""Reducer: what strategies, variables, arenas and optimizers reduce with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpistrategy.arrays import nest
from mpistrategy.arrays.convert import as_device_array, as_target, hand_back, host_array, is_on_device
from mpistrategy.arrays.devices import gpu_of
from mpistrategy.arrays.dtypes import Array, dtype_name
from mpistrategy.arrays.values import Mirrored, PerReplica, contribution, event_of_reads, local_component
from mpistrategy.errors import EmptyBatchError, MpiStrategyError, StructureError, UnsupportedError
from mpistrategy.mpi.contract import timeouts
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.communicator import Communicator, SingleCommunicator
from mpistrategy.objects.later import later
from mpistrategy.options import CommunicationOptions, ReduceOp
from mpistrategy.reduction.inputs import as_given, check_target, checked_leaves, in_kind
from mpistrategy.reduction.layout.destinations import EVERY_RANK_TEXT
from mpistrategy.reduction.layout.packing import Layout
from mpistrategy.reduction.plan import Plan, is_simple, plan_of, usual_route
from mpistrategy.reduction.plans import WHERE, Plans
from mpistrategy.reduction.weights import EXCHANGE, WeightedMean, exchange_of_weights

if TYPE_CHECKING:
    from mpistrategy.arrays.gpu import check_device, is_cupy
    from mpistrategy.reduction.algorithm import Algorithm, OnDevice
    from mpistrategy.reduction.gather import gather
else:
    later(globals(), "mpistrategy.arrays.gpu", "check_device", "is_cupy")
    later(globals(), "mpistrategy.reduction.gather", "gather")

#: So many different options keep plans.
_MOST_OPTIONS = 16
#: So many layouts of arrays keep plans.
_MOST_AGREED = 512


class AgreedPlan(NamedTuple):
    """A plan, and the words that the ranks compare before it runs.

    Attributes:
        plan: the plan.
        words: what `Call.agree` is given.
        timeout_seconds: how long a call may wait for the other ranks; None: as long as the strategy says.
    """

    plan: Plan
    words: dict[str, Any]
    timeout_seconds: float | None

    def run(self, call: Call, arrays: Sequence[Array]) -> list[Array]:
        """Return the results on every rank; inside `call`."""
        call.wait_as(self.timeout_seconds)
        self.plan.bring(arrays)
        call.agree("reduce", sparingly=True, **self.words)
        return self.plan.run(arrays)


class Reducer:
    """Reduces with one algorithm and one set of options over the ranks of one communicator.

    Args:
        communicator: the ranks.
        algorithm: how values are combined.
        options: the options of calls that say nothing else.

    Attributes:
        is_alone: whether there is one replica only, without MPI.
        plans: the repeated all-reduces.
        changes: how often the algorithm or the options have been set.
    """

    def __init__(self, communicator: Communicator, algorithm: Algorithm, options: CommunicationOptions) -> None:
        self.communicator = communicator
        self.is_alone: bool = isinstance(communicator, SingleCommunicator)
        self._algorithm = algorithm
        self._options = options
        #: What stands for all calls that have a plan; None where all calls are refused.
        self._planned = None if communicator.guard.closed else Call(communicator.guard, WHERE)
        if self._planned is not None:
            self._planned.is_leaf = True
        self.plans: Plans = Plans(communicator, algorithm, options, self._planned)
        self.changes: int = 0
        self._agreed: dict[Any, AgreedPlan | None] = {}
        #: The plans of calls with options of their own.
        self._others: dict[CommunicationOptions, Plans] = {}
        #: Enters the strategy's cross-replica context: an algorithm of the program's own may ask for it.
        self.entered: Callable[[], AbstractContextManager[Any]] = nullcontext
        #: The numbers of new arenas, the same on every rank.
        self.arena_numbers: Iterator[int] = itertools.count(1)

    @property
    def algorithm(self) -> Algorithm:
        """How values are combined; may be set, on all ranks alike."""
        return self._algorithm

    @algorithm.setter
    def algorithm(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        self._begin_anew()

    @property
    def options(self) -> CommunicationOptions:
        """The options of calls that say nothing else; may be set, on all ranks alike."""
        return self._options

    @options.setter
    def options(self, options: CommunicationOptions) -> None:
        self._options = options
        if options.timeout_seconds is not None:
            self.communicator.guard.timeout = timeouts.limit(options.timeout_seconds)
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Forget what was prepared for another algorithm or other options."""
        self.changes += 1
        self._others.clear()
        self._agreed.clear()
        self.plans.serve(self._algorithm, self._options)

    def plans_for(self, options: Any) -> Plans | None:
        """Return the plans of calls with these options; None where calls have none."""
        if type(options) is not CommunicationOptions or options.timeout_seconds is not None:
            return None
        plans = self._others.get(options)
        if plans is None:
            if len(self._others) >= _MOST_OPTIONS:
                self._others.clear()
            merged = self._options.merge(options)
            plans = self._others[options] = Plans(self.communicator, self._algorithm, merged, self._planned)
        return plans

    def copy(self) -> Reducer:
        """Return another one with the same ranks, algorithm and options, and no plans."""
        result = Reducer(self.communicator, self._algorithm, self._options)
        result.arena_numbers = self.arena_numbers
        return result

    def all_reduce_leaves(
        self,
        call: Call,
        op: ReduceOp,
        leaves: list[Any],
        paths: Callable[[], list[str]],
        *,
        options: CommunicationOptions | None = None,
        weight: Any = None,
        targets: list[Any] | None = None,
    ) -> list[Any]:
        """Reduce the leaves of a structure to every rank, as one batch.

        Args:
            call: the public call, entered by the caller.
            op: the operation.
            leaves: this rank's.
            paths: returns how each leaf is reached; called for errors only.
            options: hints; None for the reducer's own.
            weight: for MEAN, the weight of this rank's values.
            targets: an array for each result, or None.

        Raises:
            EmptyBatchError: when there are no leaves, on several ranks.
            LeafError, DTypeError, ShapeError, StructureError, UnsupportedError: for what cannot be reduced or written.
        """
        if not leaves and self.is_alone:
            return []  # alone, a structure without leaves is its own reduction
        chosen = self._options.merge(options)
        dense = None if weight is None and targets is None else UnsupportedError
        given, arrays, memory = _looked_at(op, leaves, paths, call.where, dense, targets)
        if weight is None:
            call.wait_as(chosen.timeout_seconds)
            results = self._algorithm._all_reduce_values(call, self.communicator, op, given, chosen, memory)
        else:
            results = self._weighted(call, op, given, arrays, weight, chosen)
        return _handed_out(results, leaves, targets, memory)

    def begin_on_device(
        self,
        op: ReduceOp,
        leaves: list[Any],
        paths: Callable[[], list[str]],
        where: str,
        *,
        options: CommunicationOptions | None = None,
        targets: list[Any] | None = None,
    ) -> tuple[OnDevice, Callable[[], list[Any]]] | None:
        """Begin to do `all_reduce_leaves` with arrays in GPU memory: pack them, on the current stream.

        Returns:
            What the ranks have yet to agree on and to combine, and what returns the results then, on the current
            stream; None where the leaves are not all in GPU memory, or are combined on the host.

        Raises:
            As `all_reduce_leaves`.
        """
        given, _, memory = _looked_at(op, leaves, paths, where, None, targets)
        chosen = self._options.merge(options)
        begun = self._algorithm._begin_on_device(self.communicator, op, given, chosen, memory, where)
        if begun is None:
            return None

        def results() -> list[Any]:
            found = begun.route.results(begun.arrays)
            kinds = [in_kind(result, like) for result, like in zip(found, given, strict=True)]
            return _handed_out(kinds, leaves, targets, memory)

        return begun, results

    def agrees_on_none(self, call: Call, op: ReduceOp, structure: nest.Structure) -> bool:
        """Return whether a structure has no leaves but None; if so, the ranks have compared the call."""
        if structure.num_leaves or not structure.num_none:
            return False
        if not self.is_alone:
            call.agree("reduce", op=op.value)
        return True

    def _weighted(
        self,
        call: Call,
        op: ReduceOp,
        given: list[Any],
        arrays: list[Any],
        weight: Any,
        options: CommunicationOptions,
    ) -> list[Any]:
        """Return the weighted means of dense arrays."""
        where = call.where
        mine = gpu_of(self.communicator.devices, self.communicator.rank)
        check_device([array for array in arrays if is_on_device(array)], mine, where)
        mean = WeightedMean(weight, op, where)
        exchange = exchange_of_weights(self.communicator)
        weights = exchange(mean.weight, lambda: call.agree(EXCHANGE, sparingly=True))
        call.expect_more()  # the values come next
        call.wait_as(options.timeout_seconds)
        parts = mean.contributions(arrays, weights)
        read = event_of_reads(given)
        totals = self._algorithm._all_reduce_values(call, self.communicator, ReduceOp.SUM, parts, options)
        means = mean.finish(totals, arrays)
        self.communicator.guard.wait_for_gpu(read)
        return [in_kind(result, local_component(value)) for result, value in zip(means, given, strict=True)]

    def all_reduce_array(self, call: Call, op: ReduceOp, array: Array) -> Array:
        """Return the reduction of one array on every rank; inside `call`, in any context."""
        if type(array) is np.ndarray:
            plan = self.agreed_plan(op, ((array.dtype, array.shape),))
            if plan is not None:
                return plan.run(call, (array,))[0]
        call.wait_as(self._options.timeout_seconds)
        value = PerReplica((array,))
        with self.entered():
            result = local_component(self._algorithm.reduce(op, value, value, self._options))
        return result if is_on_device(result) else np.asarray(result)

    def agreed_plan(self, op: ReduceOp, layouts: tuple[Layout, ...]) -> AgreedPlan | None:
        """Return the plan of ordinary arrays with the algorithm and the options in force; None where there is none.

        It makes the messages of a `batch_reduce` of the same arrays to every rank.  It holds until `changes` grows.
        """
        key = (op, layouts)
        try:
            return self._agreed[key]
        except KeyError:
            pass
        settings, made = self.plans.settings, None
        if settings is not None and all(is_simple(dtype, op) for dtype, _ in layouts):
            plan = plan_of(self.communicator, layouts, op, self._options.bytes_per_pack, usual_route)
            values = tuple((dtype_name(dtype), shape) for dtype, shape in layouts)
            words = {"op": op.value, "values": values, "destination": EVERY_RANK_TEXT, "options": settings}
            made = AgreedPlan(plan, words, self._options.timeout_seconds)
        if len(self._agreed) >= _MOST_AGREED:
            self._agreed.clear()
        self._agreed[key] = made
        return made

    def gather_nest(self, value: Any, axis: Any, call: Call) -> Any:
        """Return all ranks' arrays along `axis`, leaf by leaf; the caller has entered the guard's call."""
        leaves, structure = nest.flatten_without_none(value)
        call.structure = structure.text
        return structure.pack(gather(self.communicator, [contribution(leaf) for leaf in leaves], axis, call))


def _looked_at(
    op: ReduceOp,
    leaves: list[Any],
    paths: Callable[[], list[str]],
    where: str,
    dense: type[MpiStrategyError] | None,
    targets: list[Any] | None,
) -> tuple[list[Any], list[Any], list[Any] | None]:
    """Return the leaves as they are given to algorithms, their arrays, and the arrays for the results."""
    if not leaves:
        raise EmptyBatchError.at(where, found="an empty structure", expected="at least one array to reduce")
    given = [leaf if isinstance(leaf, Mirrored) else contribution(leaf) for leaf in leaves]
    arrays = checked_leaves(given, paths, where, dense)
    if targets is None:
        return given, arrays, None
    memory: list[Any] = []
    if len({id(target) for target in targets}) < len(targets):
        raise StructureError.at(f"{where}: out", found="one array twice", expected="one for each leaf")
    for target, array, path in zip(targets, arrays, paths(), strict=True):
        memory.append(as_target(target, where, f"out{path}"))
        check_target(memory[-1], array, op, f"{where}: out{path}")
    return given, arrays, memory


def _handed_out(
    results: Sequence[Any], leaves: Sequence[Any], targets: Sequence[Any] | None, memory: Sequence[Any] | None
) -> list[Any]:
    """Return what the caller gets: results as the kinds of the leaves, or the targets, into which they are written."""
    if targets is None or memory is None:
        return [as_given(result, leaf) for result, leaf in zip(results, leaves, strict=True)]
    _write(results, memory)
    for written, target in zip(memory, targets, strict=True):
        hand_back(written, target)
    return list(targets)


def _write(results: Sequence[Any], targets: Sequence[Any]) -> None:
    """Copy results into arrays of their dtypes and shapes: those in GPU memory all at once, on the current stream."""
    on_device: list[tuple[Any, Any]] = []
    for result, target in zip(results, targets, strict=True):
        if is_cupy(result) and is_cupy(target) and result.data.ptr == target.data.ptr:
            continue  # reduced where it is
        if is_on_device(target):
            on_device.append((as_device_array(result, "a result in GPU memory"), target))
        else:
            target[...] = host_array(result)
    if on_device:
        from mpistrategy.reduction.routes.gpu_copy import move  # here, for the quick import

        with on_device[0][0].device:
            move([result for result, _ in on_device], [target for _, target in on_device])
