"""Reducer: what strategies, variables, arenas and optimizers reduce with."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from mpistrategy.arrays import nest
from mpistrategy.arrays.convert import as_target, hand_back, is_on_device
from mpistrategy.arrays.dtypes import Array, dtype_name
from mpistrategy.arrays.gpu import ON_A_GPU, is_cupy, layout_of
from mpistrategy.arrays.values import Mirrored, contribution, event_of_reads, local_component
from mpistrategy.errors import EmptyBatchError, MpiStrategyError, StructureError, UnsupportedError
from mpistrategy.mpi.contract import timeouts
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import Signature
from mpistrategy.mpi.contract.public_calls import is_arena
from mpistrategy.mpi.interface.ranks import Alone, Ranks
from mpistrategy.options import CommunicationImplementation, CommunicationOptions, ReduceOp
from mpistrategy.reduction.inputs import (
    arrays_of,
    as_given,
    check_target,
    checked_leaves,
    in_kind,
    leaves_like,
    takes,
    write,
)
from mpistrategy.reduction.layout.destinations import EVERY_RANK, Destination
from mpistrategy.reduction.layout.packing import Layout, is_simple, layouts_of
from mpistrategy.reduction.plan import ArraysPlan, CallPlan, DevicePlan, NestPlan, PlacedPlan, Plan, kind_of
from mpistrategy.reduction.routes.base import Description, Targets, Transfer
from mpistrategy.reduction.routes.gpu import GpuRoute
from mpistrategy.reduction.weights import WEIGHTED, WeightedMeans, WeightedPlan, checked_weight, sums_of


class Algorithm(ABC):
    """A `CrossDeviceOps`, as this folder uses it; the defaults are those of a program's own, of which nothing is known.

    Attributes:
        _in_rank_order: whether a sum in rank order is what it would return: arenas may then be reduced in place.  A
            subclass says so itself, or it is not.
        _num_packs: see `mpistrategy.reduction.layout.packing.plan`.
        _device_path: the path of arrays in GPU memory; "" leaves it to the options.
    """

    _in_rank_order: bool = False
    _num_packs: float = 0
    _device_path: str = ""

    def __init_subclass__(cls, **others: Any) -> None:
        super().__init_subclass__(**others)
        cls._in_rank_order = bool(cls.__dict__.get("_in_rank_order"))

    def explain_implementation(self, reduce_op: ReduceOp, count: int) -> str:
        """Return what `Strategy.explain` says of so many arrays and this operation, in a line; to be overridden.

        Args:
            reduce_op: how they are combined.
            count: how many there are.
        """
        return f"{type(self).__name__} reduces them: its routes are not known"

    def _explained(
        self, ranks: Ranks, op: ReduceOp, given: Sequence[Any], options: CommunicationOptions
    ) -> tuple[list[Description], list[str]]:
        """Return what `Strategy.explain` says of buffers, and lines about what is in none."""
        return [], [self.explain_implementation(op, len(given))]

    @property
    def _configuration(self) -> str:
        """What must be equal on all ranks for their messages to fit together."""
        return type(self).__name__

    def _settings(self, options: CommunicationOptions) -> str:
        """Return the configuration and the options of one call, as far as they shape the messages."""
        shown = f"{self._configuration}, bytes_per_pack={options.bytes_per_pack}, wire={options.wire}"
        chosen: Any = options.implementation
        return shown if chosen is CommunicationImplementation.AUTO else f"{shown}, implementation={chosen.name}"

    @property
    def _has_plans(self) -> bool:
        """Whether arrays are reduced by its `_plan` and `_gpu_route`; else each call must be looked at."""
        return False

    def _plan(
        self,
        ranks: Ranks,
        layouts: tuple[Layout, ...],
        op: ReduceOp,
        options: CommunicationOptions,
        destination: Destination,
    ) -> Plan:
        """Return how arrays on the host are reduced; the results count on the destination's ranks.

        Raises:
            MpiStrategyError: for what it cannot reduce.
        """
        raise NotImplementedError(type(self).__name__)

    def _gpu_route(
        self,
        ranks: Ranks,
        layouts: tuple[Layout, ...],
        op: ReduceOp,
        options: CommunicationOptions,
        destination: Destination,
    ) -> GpuRoute | None:
        """Return how arrays in GPU memory are reduced there; None where the host does it."""
        return None

    @abstractmethod
    def _all_reduce_values(
        self,
        call: Call,
        communicator: Ranks,
        op: ReduceOp,
        values: Sequence[Any],
        options: CommunicationOptions,
        outs: Sequence[Any] | None = None,
        *,
        is_batch: bool = True,
    ) -> list[Any]:
        """Return the reductions of `values` on every rank: this rank's components, or Mirrored; inside `call`.

        The results may be written to `outs`, which are arrays of their dtypes and shapes.  Without `is_batch` one value
        is reduced by `reduce`.
        """


#: So many plans are kept.
_MOST_PLANS = 1024


class General(CallPlan):
    """The way of all values of one kind of call: they are looked at anew each time, which raises the errors.

    Args:
        reducer: what is reduced, or sent, with.
        argument: what the program asks for: an operation, an axis or a root.
        options: of the program.
    """

    def __init__(self, reducer: Reducer, argument: Any, options: Any) -> None:
        self.reducer: Reducer = reducer
        self.argument: Any = argument
        self.options: Any = options

    @property
    def chosen(self) -> CommunicationOptions:
        """The options of the strategy and of the program."""
        return self.reducer.options.merge(self.options)

    @staticmethod
    def kind(value: Any, out: Any) -> Any:
        """Return what tells the calls apart for which there are plans; see `kind_of`."""
        return kind_of(value), None if out is None else kind_of(out)

    def plan(self, call: Call, value: Any, out: Any, weight: Any) -> CallPlan | None:
        """Return the plan of calls like this one; None for those that are looked at each time.

        Raises:
            MpiStrategyError: for bad input.
        """
        return None


class AllReduce(General):
    """`all_reduce` of any values; the argument is the operation."""

    #: Whether an algorithm of the program's own gets one value as a batch of one.
    is_batch: bool = True

    def leaves_of(self, value: Any, out: Any) -> nest.Leaves | None:
        """Return how to reach the arrays of a value; None where it has no plan."""
        return nest.leaves_of(value)

    def destination(self, value: Any, out: Any, where: str) -> Destination | None:
        """Return which ranks get a `Mirrored` result; None where all get plain ones."""
        return None

    def run(self, call: Call, value: Any, out: Any, weight: Any) -> Any:
        """Return the reduction; see `CallPlan.run`."""
        reducer = self.reducer
        if is_arena(value):
            return value._all_reduce(reducer, self.argument, call, options=self.options, weight=weight, out=out)
        leaves, structure = nest.flatten_without_none(value)
        call.structure = structure.text
        targets = leaves_like(out, structure, call.where)
        op = ReduceOp._parse(self.argument, call.where)
        if reducer.agrees_on_none(call, op, structure):
            return structure.pack([])
        paths = partial(nest.paths_without_none, value)
        more = {"options": self.options, "weight": weight, "targets": targets, "is_batch": self.is_batch}
        return structure.pack(reducer.all_reduce_leaves(call, op, leaves, paths, **more))

    def plan(self, call: Call, value: Any, out: Any, weight: Any) -> CallPlan | None:
        """Return the plan of arenas, and of nests of arrays and numbers; see `General.plan`."""
        reducer, options, is_weighted = self.reducer, self.chosen, weight is not None
        op, destination = ReduceOp._parse(self.argument, call.where), self.destination(value, out, call.where)
        is_plain = destination is None and not is_weighted
        if is_arena(value):
            return value._plan(reducer, op, call, options, out) if is_plain else None
        where = self.leaves_of(value, out)
        if where is None or not nest.only_text_keys(value) or (is_weighted and op is not ReduceOp.MEAN):
            return None
        leaves = where.take(value)
        is_on_gpu = is_plain and all(map(is_cupy, leaves))
        arrays: Any = leaves if is_on_gpu else arrays_of(leaves)
        if arrays is None or not all(is_simple(array.dtype, op) for array in arrays):
            return None
        ranks, algorithm, layouts = reducer.communicator, reducer.algorithm, layouts_of(arrays)
        transfer: Transfer | None
        kind: type[NestPlan] = DevicePlan
        if is_on_gpu:
            if op is ReduceOp.MEAN and any(dtype.kind in "iu" for dtype, _ in layouts):
                return None  # which has another dtype than they
            transfer = algorithm._gpu_route(ranks, layouts, op, options, EVERY_RANK) if algorithm._has_plans else None
        elif is_weighted:
            transfer, kind = reducer.weighted_means(layouts, options), WeightedPlan
        else:
            transfer = reducer.plan_for(layouts, op, options, destination or EVERY_RANK)
            kind = NestPlan if destination is None else PlacedPlan
        is_elsewhere = out is not None and destination is None and not is_on_gpu
        if transfer is None or (is_elsewhere and not takes(out, value, where, arrays, transfer.results)):
            return None
        words = WEIGHTED if is_weighted else op.value, where.text, tuple(map(layout_of, arrays))
        whither, settings = (destination or EVERY_RANK).text, algorithm._settings(options)
        signature = Signature("reduce", *words, whither, settings, call.name, call.where, call.place)
        made = kind(self, where, transfer, signature, options.timeout_seconds, {*map(type, leaves)})
        if isinstance(made, PlacedPlan) and destination is not None:
            made.destination, made.is_here = destination, destination.includes(ranks.rank)
        return made


class Reduce(AllReduce):
    """`Strategy.reduce`."""

    is_batch = False


class Reducer:
    """Reduces with one algorithm and one set of options over the ranks of one communicator.

    Args:
        communicator: the ranks.
        algorithm: how values are combined.
        options: the options of calls that say nothing else.

    Attributes:
        is_alone: whether there is one replica only, without MPI.
        changes: how often the algorithm or the options have been set.
    """

    def __init__(self, communicator: Ranks, algorithm: Algorithm, options: CommunicationOptions) -> None:
        self.communicator = communicator
        self.is_alone: bool = isinstance(communicator, Alone)
        self._algorithm = algorithm
        self._options = options
        self.changes: int = 0
        #: By call site, operation, options and kind of value.
        self._plans: dict[Any, Any] = {}
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
        self._plans.clear()

    def copy(self) -> Reducer:
        """Return another one with the same ranks, algorithm and options, and no plans."""
        result = Reducer(self.communicator, self._algorithm, self._options)
        result.arena_numbers = self.arena_numbers
        return result

    def run(
        self,
        where: str,
        general: type[General],
        argument: Any,
        value: Any,
        options: CommunicationOptions | None = None,
        name: str | None = None,
        out: Any = None,
        weight: Any = None,
    ) -> Any:
        """Make the public call `where`, of the kind `general`, whose other arguments are those of the program.

        `general` does the calls that no other plan is for, and says what `argument`, `value` and `out` are.
        """
        guard = self.communicator.guard
        with Call(guard, where, name) as call:
            if call.structure:  # of the call around this one: what is compared besides may change from call to call
                return general(self, argument, options).run(call, value, out, weight)
            key: Any = None
            plan: CallPlan | None = None
            try:
                asked, is_weighted = (type(argument), argument), weight is not None
                kind = general.kind(value, out)
                key = general, guard.level, call.where, call.place, call.name, asked, options, is_weighted, kind
                plan = self._plans.get(key)
            except Exception:  # such as that of a list that holds itself
                key = None
            if key is None:  # out here, so that an error of the general way does not tell of the other
                return general(self, argument, options).run(call, value, out, weight)
            if plan is None:
                plan = self.kept(key, partial(_made, call, general(self, argument, options), value, out, weight))
            return plan.run(call, value, out, weight)

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what `make` has returned for `key`: plans, by call site, operation, options and kind of value."""
        found = self._plans.get(key)
        if found is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            found = self._plans[key] = make()
        return found

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
        is_batch: bool = True,
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
            is_batch: whether an algorithm of the program's own gets one value as a batch of one.

        Raises:
            EmptyBatchError: when there are no leaves, on several ranks.
            LeafError, DTypeError, ShapeError, StructureError, UnsupportedError: for what cannot be reduced or written.
        """
        if not leaves and self.is_alone:
            return []  # alone, a structure without leaves is its own reduction
        chosen, ranks = self._options.merge(options), self.communicator
        dense = None if weight is None and targets is None else UnsupportedError
        given, arrays, memory = looked_at(op, leaves, paths, call.where, dense, targets)
        call.wait_as(chosen.timeout_seconds)
        if weight is not None:
            results = self._weighted(call, op, given, arrays, weight, chosen)
        else:
            with self.entered():
                results = self._algorithm._all_reduce_values(call, ranks, op, given, chosen, memory, is_batch=is_batch)
        return handed_out(results, leaves, targets, memory)

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
        ranks, algorithm = self.communicator, self._algorithm
        together = [checked_weight(weight, op, call.where), *arrays]
        is_on_gpu, layouts = any(map(is_on_device, arrays)), layouts_of(arrays)
        means = None if is_on_gpu else self.weighted_means(layouts, options)
        sums = _ByAlgorithm(self, call, options, given)
        if means is None:
            means = WeightedMeans(ranks, layouts, sums)
        values, settings = tuple(map(layout_of, arrays)), algorithm._settings(options)
        agree = partial(call.agree, "reduce", op=WEIGHTED, values=values, destination=EVERY_RANK.text, options=settings)
        results = means.carried_out(together, partial(agree, sparingly=True))
        ranks.guard.wait_for_gpu(sums.read)
        return [in_kind(result, local_component(value)) for result, value in zip(results, given, strict=True)]

    def plan_for(
        self,
        layouts: tuple[Layout, ...],
        op: ReduceOp,
        options: CommunicationOptions,
        destination: Destination = EVERY_RANK,
    ) -> Plan | None:
        """Return how arrays on the host are reduced; None where each call must be looked at.

        Raises:
            MpiStrategyError: for what the algorithm cannot reduce.
        """
        algorithm = self._algorithm
        return algorithm._plan(self.communicator, layouts, op, options, destination) if algorithm._has_plans else None

    def weighted_means(self, layouts: tuple[Layout, ...], options: CommunicationOptions) -> WeightedMeans | None:
        """Return how weighted means of arrays on the host are taken; None where the algorithm is asked each time."""
        plan = self.plan_for(sums_of(layouts), ReduceOp.SUM, options)
        return None if plan is None else WeightedMeans(self.communicator, layouts, plan)

    def all_reduce_arrays(self, call: Call, op: ReduceOp, arrays: list[Array]) -> list[Array]:
        """Return the reductions of arrays on every rank; inside `call`, in any context."""
        if {*map(type, arrays)} == {np.ndarray}:
            plan = self.plan_of_arrays(op, layouts_of(arrays))
            if plan is not None:
                return plan.run(call, arrays)
        results = self.all_reduce_leaves(call, op, arrays, lambda: [""] * len(arrays), is_batch=False)
        return [result if is_on_device(result) else np.asarray(result) for result in results]

    def plan_of_arrays(self, op: ReduceOp, layouts: tuple[Layout, ...], *, on_gpu: bool = False) -> ArraysPlan | None:
        """Return the plan of ordinary arrays with the algorithm and the options in force; None where there is none.

        It makes the messages of a `batch_reduce` of the same arrays to every rank.  It holds until `changes` grows.

        Args:
            op: how they are combined.
            layouts: dtype and shape of each array.
            on_gpu: whether they are CuPy arrays; floats then.
        """
        found: ArraysPlan | None = self.kept(
            (ArraysPlan, op, layouts, on_gpu, self.communicator.guard.level),
            partial(self._made_for, op, layouts, on_gpu),
        )
        return found

    def _made_for(self, op: ReduceOp, layouts: tuple[Layout, ...], on_gpu: bool) -> ArraysPlan | None:
        ranks, algorithm, options = self.communicator, self._algorithm, self._options
        plan: Transfer | None = None
        if all(is_simple(dtype, op) for dtype, _ in layouts):
            if not on_gpu:
                plan = self.plan_for(layouts, op, options)
            elif algorithm._has_plans:
                plan = algorithm._gpu_route(ranks, layouts, op, options, EVERY_RANK)
        if plan is None:
            return None
        where = ON_A_GPU if on_gpu else ""
        values = tuple((f"{dtype_name(dtype)}{where}", shape) for dtype, shape in layouts)
        signature = Signature("reduce", op.value, "", values, EVERY_RANK.text, algorithm._settings(options))
        return ArraysPlan(plan, signature, options.timeout_seconds)


class _ByAlgorithm(Transfer):
    """The sums of an algorithm that has no plan for them; to be made in a call on which the ranks have agreed.

    Args:
        reducer: whose algorithm makes them.
        call: the public call.
        options: of the call.
        given: what the products are made of.

    Attributes:
        read: an event behind that, for arrays of other libraries in GPU memory.
    """

    def __init__(self, reducer: Reducer, call: Call, options: CommunicationOptions, given: Sequence[Any]) -> None:
        self._reducer, self._call, self._options, self._given = reducer, call, options, given
        self.read: Any = None

    def bring(self, arrays: Sequence[Any], targets: Targets = None) -> None:
        """Leave the products to `run`, which has an agreement of its own."""
        self.read = event_of_reads(self._given)

    def run(self, arrays: Sequence[Any], memory: None) -> list[Any]:
        """Return the sums."""
        self._call.expect_more()
        reducer, op = self._reducer, ReduceOp.SUM
        with reducer.entered():
            return reducer.algorithm._all_reduce_values(self._call, reducer.communicator, op, arrays, self._options)


def _made(call: Call, general: General, value: Any, out: Any, weight: Any) -> CallPlan:
    """Return the plan of a value."""
    try:
        return general.plan(call, value, out, weight) or general
    except MpiStrategyError:
        return general  # it raises the error


def looked_at(
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


def handed_out(
    results: Sequence[Any], leaves: Sequence[Any], targets: Sequence[Any] | None, memory: Sequence[Any] | None
) -> list[Any]:
    """Return what the caller gets: results as the kinds of the leaves, or the targets, into which they are written."""
    if targets is None or memory is None:
        return [as_given(result, leaf) for result, leaf in zip(results, leaves, strict=True)]
    write(results, memory)
    for written, target in zip(memory, targets, strict=True):
        hand_back(written, target)
    return list(targets)
