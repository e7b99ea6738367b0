"""Reducer: what strategies, variables, arenas and optimizers reduce with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, reduce
from typing import Any

import numpy as np

from mpistrategy.arrays import nest
from mpistrategy.arrays.convert import ON_A_GPU, as_target, hand_back, is_cupy, is_on_device, layout_of
from mpistrategy.arrays.dtypes import Array, dtype_name, quietly
from mpistrategy.arrays.values import IndexedSlices, Mirrored, event_of_reads, is_arena
from mpistrategy.errors import EmptyBatchError, MpiStrategyError, StructureError, UnsupportedError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import Signature
from mpistrategy.mpi.contract.guard import time_limit
from mpistrategy.mpi.interface.ranks import Alone, Ranks
from mpistrategy.objects.shown import size_in_words
from mpistrategy.options import CommunicationOptions, Op, ReduceOp
from mpistrategy.reduction.inputs import (
    EVERY_RANK,
    Destination,
    arrays_of,
    checked_leaves,
    checked_target,
    in_kind,
    leaves_like,
    own_component,
    own_part,
    takes,
    write,
)
from mpistrategy.reduction.plan import (
    WEIGHTED,
    ArraysPlan,
    CallPlan,
    NestPlan,
    NumbersOfRanks,
    carry_out,
    checked_weight,
    kind_of,
    normalized,
    product,
)
from mpistrategy.reduction.transfer import (
    Layout,
    Targets,
    Transfer,
    counted,
    divide,
    dtypes_of_results,
    in_mailboxes,
    is_simple,
    layouts_of,
    rounded,
)


class Algorithm(ABC):
    """A `CrossDeviceOps`, as this folder uses it; the defaults are for an algorithm of the program.

    Attributes:
        _in_rank_order: whether it returns the bits of a sum in rank order.
        _device_path: the path of arrays in GPU memory; "" leaves it to the options.
    """

    _in_rank_order: bool = False
    _device_path: str = ""

    def explain_implementation(self, reduce_op: ReduceOp, count: int) -> str:
        """Return the line of `Strategy.explain` for so many arrays and this operation; to be overridden.

        Args:
            reduce_op: how they are combined.
            count: how many there are.
        """
        return f"{type(self).__name__} reduces them: its routes are not known"

    def _lines(self, ranks: Ranks, op: ReduceOp, values: Sequence[Any], options: CommunicationOptions) -> list[str]:
        """Return the lines of `Strategy.explain` for these values."""
        return [self.explain_implementation(op, len(values))]

    @property
    def _configuration(self) -> str:
        """The settings that must be equal on all ranks for their messages to fit together."""
        return type(self).__name__

    def _settings(self, options: CommunicationOptions) -> str:
        """Return the configuration and the options of one call, as far as they shape the messages."""
        implementation: Any = options.implementation
        words = f"bytes_per_pack={options.bytes_per_pack}, wire={options.wire}, implementation={implementation.name}"
        return f"{self._configuration}, {words}"

    @property
    def _has_plans(self) -> bool:
        """Whether arrays are reduced by its `_transfer`; else each call must be examined."""
        return False

    @property
    def _works_in_place(self) -> bool:
        """Whether arenas are reduced where they are, in rank order: no subclass reduces in another way."""
        return self._in_rank_order and self._has_plans

    def _transfer(
        self,
        ranks: Ranks,
        layouts: tuple[Layout, ...],
        op: ReduceOp,
        options: CommunicationOptions,
        destination: Destination,
        *,
        on_gpu: bool,
    ) -> Transfer | None:
        """Return how arrays are reduced, on the host or in GPU memory; the results count on the destination's ranks.

        None where arrays in GPU memory are reduced on the host.

        Raises:
            MpiStrategyError: for arrays that it cannot reduce.
        """
        raise NotImplementedError(type(self).__name__)

    @abstractmethod
    def _all_reduce_values(
        self,
        call: Call,
        communicator: Ranks,
        op: ReduceOp,
        components: Sequence[Any],
        values: Sequence[Any],
        options: CommunicationOptions,
        outs: Sequence[Any] | None = None,
        *,
        is_batch: bool = True,
    ) -> list[Any]:
        """Return the reductions of `components` on every rank: this rank's, or Mirrored; inside `call`.

        The `values` are their arrays and IndexedSlices, which have been checked, and Mirrored.

        The results may be written to `outs`, which are arrays of their dtypes and shapes.  Without `is_batch` one value
        is reduced by `reduce`.
        """


#: So many plans are kept.
MOST_PLANS = 1024


class General(CallPlan):
    """The general way of one kind of call: it examines the values each time, and raises the errors.

    Args:
        reducer: reduces or sends the values.
        argument: the program's argument: an operation, an axis or a root.
        options: of the program.
    """

    def __init__(self, reducer: Reducer, argument: Any, options: Any) -> None:
        self.reducer: Reducer = reducer
        self.argument: Any = argument
        self.options: Any = options

    @property
    def merged_options(self) -> CommunicationOptions:
        """The options of the strategy and of the program."""
        return self.reducer.options.merge(self.options)

    @staticmethod
    def kind_of_out(value: Any, out: Any) -> Any:
        """Return a key that tells the `out` of calls with plans apart; see `kind_of`."""
        return kind_of(out)

    def plan(self, call: Call, value: Any, out: Any, weight: Any) -> CallPlan | None:
        """Return the plan of calls like this call; None for calls that are examined each time.

        Raises:
            MpiStrategyError: for bad input.
        """
        return None


class AllReduce(General):
    """`all_reduce` of any values; the argument is the operation."""

    #: Whether an algorithm of the program's own gets one value as a batch of one.
    is_batch: bool = True

    def leaves_of(self, value: Any, out: Any) -> nest.Structure | None:
        """Return how to reach the arrays of a value; None for a value without a plan."""
        return nest.leaves_of(value)

    def destination(self, value: Any, out: Any, where: str) -> Destination | None:
        """Return which ranks get a `Mirrored` result; None where all ranks get plain results."""
        return None

    def run(self, call: Call, value: Any, out: Any, weight: Any) -> Any:
        """Return the reduction; see `CallPlan.run`."""
        reducer = self.reducer
        if is_arena(value):
            return value._all_reduce(self, call, weight=weight, out=out)
        leaves, structure = nest.flatten_without_none(value)
        call.structure = structure.text
        targets = leaves_like(out, structure, call.where)
        op, paths = ReduceOp._parse(self.argument, call.where), partial(nest.leaf_paths, value)
        return structure.pack(
            reducer.all_reduce_leaves(
                call,
                op,
                leaves,
                paths,
                options=self.options,
                weight=weight,
                targets=targets,
                is_batch=self.is_batch,
                num_none=structure.num_none,
            )
        )

    def plan(self, call: Call, value: Any, out: Any, weight: Any) -> CallPlan | None:
        """Return the plan of nests of arrays and numbers; see `General.plan`."""
        reducer, options, is_weighted = self.reducer, self.merged_options, weight is not None
        op, where = ReduceOp._parse(self.argument, call.where), None if is_arena(value) else self.leaves_of(value, out)
        if where is None or (is_weighted and op is not ReduceOp.MEAN):
            return None
        leaves, destination = where.take(value), self.destination(value, out, call.where)
        is_on_gpu = not is_weighted and all(map(is_cupy, leaves))
        arrays: Any = leaves if is_on_gpu else arrays_of(leaves)
        if arrays is None or not all(is_simple(array.dtype, op) for array in arrays):
            return None
        layouts = layouts_of(arrays)
        transfer = reducer.plan_for(layouts, op, options, destination or EVERY_RANK, on_gpu=is_on_gpu)
        if transfer is not None and is_weighted:
            transfer = WeightedMeans(reducer, layouts, options)
        is_elsewhere = out is not None and destination is None
        if transfer is None or (is_elsewhere and not takes(out, where, arrays, dtypes_of_results(layouts, op))):
            return None
        words = WEIGHTED if is_weighted else op.value, where.text, tuple(map(layout_of, arrays))
        whither, settings = (destination or EVERY_RANK).text, reducer.algorithm._settings(options)
        signature = Signature("reduce", *words, whither, settings, call.name, call.where, call.place)
        kinds, limit = {*map(type, leaves)}, options.timeout_seconds
        return NestPlan(self, where, transfer, signature, limit, kinds, layouts, destination)


class Reduce(AllReduce):
    """`Strategy.reduce`."""

    is_batch = False


class Reducer:
    """Reduces with one algorithm and one set of options over the ranks of one communicator.

    Args:
        communicator: the ranks.
        algorithm: how values are combined.
        options: the default options of calls.

    Attributes:
        algorithm, options: the arguments, or what `use` has set.
        is_alone: whether there is one replica only, without MPI.
    """

    def __init__(self, communicator: Ranks, algorithm: Algorithm, options: CommunicationOptions) -> None:
        self.communicator = communicator
        self.is_alone: bool = isinstance(communicator, Alone)
        self.algorithm: Algorithm = algorithm
        self.options: CommunicationOptions = options
        #: By call site, operation, options and kind of value.
        self._plans: dict[Any, Any] = {}
        #: Enters the strategy's cross-replica context: an algorithm of the program's own may ask for it.
        self.entered: Callable[[], AbstractContextManager[Any]] = nullcontext

    def use(self, algorithm: Algorithm, options: CommunicationOptions) -> None:
        """Reduce with another algorithm and other options from now on; on all ranks alike."""
        self.algorithm, self.options = algorithm, options
        if options.timeout_seconds is not None:
            self.communicator.guard.timeout = time_limit(options.timeout_seconds)
        self._plans.clear()

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
        """Make the public call `where`, of the kind `general`; the other arguments are the program's.

        `general` makes the calls that have no other plan, and defines `argument`, `value` and `out`.
        """
        with Call(self.communicator.guard, where, name, own_frames=3) as call:  # the public method, too
            key: Any = None
            plan: CallPlan | None = None
            if not call.structure:  # of a call around this one: other compared fields may change from call to call
                try:
                    kinds = kind_of(value), None if out is None else general.kind_of_out(value, out), weight is None
                    key = general, call.where, call.place, call.name, type(argument), argument, options, *kinds
                    plan = self._plans.get(key)
                except (TypeError, ValueError, AttributeError, RecursionError, MpiStrategyError):
                    # Such as of a list that holds itself.  A handler's exception is another one, mostly, and must pass.
                    key = None
            if plan is None:  # out here, so that an error of the general way has no context
                plan = general(self, argument, options)
                if key is not None:
                    plan = self.cached(key, partial(_plan_or_general, call, plan, value, out, weight))
            return plan.run(call, value, out, weight)

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the result of `make` for `key`: plans, by call site, operation, options and kind of value."""
        item = self._plans.get(key)
        if item is None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            item = self._plans[key] = make()
        return item

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
        num_none: int = 0,
    ) -> list[Any]:
        """Reduce the leaves of a structure to every rank, as one batch.

        Args:
            call: the public call, entered by the caller.
            op: the operation.
            leaves: this rank's leaves.
            paths: returns how each leaf is reached; called for errors only.
            options: hints; None for the reducer's own.
            weight: for MEAN, the weight of this rank's values.
            targets: an array for each result, or None.
            is_batch: whether an algorithm of the program's own gets one value as a batch of one.
            num_none: how many further leaves are None; where all are, the ranks only compare the call.

        Raises:
            EmptyBatchError: when there are no leaves, not even None, on several ranks.
            LeafError, DTypeError, ShapeError, StructureError, UnsupportedError: for bad values or targets.
        """
        settings, ranks = self.options.merge(options), self.communicator
        call.wait_as(settings.timeout_seconds)
        if not leaves and (num_none or self.is_alone):  # alone, a structure without leaves is its own reduction
            call.agree("reduce", op=op.value)
            return []
        dense = None if weight is None and targets is None else UnsupportedError
        components, arrays, memory = checked_inputs(op, leaves, paths, call.where, dense, targets)
        if weight is not None:
            own_weight, layouts = checked_weight(weight, op, call.where), layouts_of(arrays)
            on_gpu = any(map(is_on_device, arrays))
            means = self.cached(
                (WeightedMeans, layouts, settings, on_gpu),
                partial(WeightedMeans, self, layouts, settings, on_gpu=on_gpu),
            )
            means.weight = own_weight
            words = "reduce", WEIGHTED, call.structure, tuple(map(layout_of, arrays)), EVERY_RANK.text
            signature = Signature(*words, self.algorithm._settings(settings), call.name, call.where, call.place)
            results = carry_out(call, means, arrays, signature)
            ranks.guard.wait_for_gpu(event_of_reads(components))
        else:
            values = [*map(_own_value, components, arrays)]
            with self.entered():
                results = self.algorithm._all_reduce_values(
                    call, ranks, op, components, values, settings, memory, is_batch=is_batch
                )
        return outputs_for(results, components, targets, memory)

    def plan_for(
        self,
        layouts: tuple[Layout, ...],
        op: ReduceOp,
        options: CommunicationOptions,
        destination: Destination = EVERY_RANK,
        *,
        on_gpu: bool = False,
    ) -> Transfer | None:
        """Return how arrays are reduced, all on the host or all in GPU memory; None where each call must be examined.

        Raises:
            MpiStrategyError: for arrays that the algorithm cannot reduce.
        """
        if not self.algorithm._has_plans:
            return None
        return self.algorithm._transfer(self.communicator, layouts, op, options, destination, on_gpu=on_gpu)

    def all_reduce_arrays(
        self,
        call: Call,
        op: ReduceOp,
        arrays: list[Array],
        options: CommunicationOptions | None = None,
        *,
        in_place: bool = False,
    ) -> list[Array]:
        """Return the reductions of arrays on every rank, with `in_place` in their own memory; inside `call`."""
        if options is None and {*map(type, arrays)} == {np.ndarray}:
            plan = self.plan_of_arrays(op, layouts_of(arrays))
            if plan is not None:
                results = plan.run(call, arrays, plan.plan.direct(arrays, arrays) if in_place else None)
                if in_place:
                    write(results, arrays)
                return arrays if in_place else results
        results = self.all_reduce_leaves(
            call,
            op,
            arrays,
            lambda: [""] * len(arrays),
            options=options,
            targets=arrays if in_place else None,
            is_batch=False,
        )
        return [result if is_on_device(result) else np.asarray(result) for result in results]

    def plan_of_arrays(self, op: ReduceOp, layouts: tuple[Layout, ...], *, on_gpu: bool = False) -> ArraysPlan | None:
        """Return the plan of ordinary arrays with the algorithm and the options in force; None without a plan.

        It makes the messages of a `batch_reduce` of the same arrays to every rank.  It holds until others are set.

        Args:
            op: how they are combined.
            layouts: dtype and shape of each array.
            on_gpu: whether they are CuPy arrays; floats then.
        """
        plan: ArraysPlan | None = self.cached(
            (ArraysPlan, op, layouts, on_gpu), partial(self._new_plan_of_arrays, op, layouts, on_gpu)
        )
        return plan

    def _new_plan_of_arrays(self, op: ReduceOp, layouts: tuple[Layout, ...], on_gpu: bool) -> ArraysPlan | None:
        options, are_simple = self.options, all(is_simple(dtype, op) for dtype, _ in layouts)
        plan = self.plan_for(layouts, op, options, on_gpu=on_gpu) if are_simple else None
        if plan is None:
            return None
        where = ON_A_GPU if on_gpu else ""
        values = tuple((f"{dtype_name(dtype)}{where}", shape) for dtype, shape in layouts)
        signature = Signature("reduce", op.value, "", values, EVERY_RANK.text, self.algorithm._settings(options))
        return ArraysPlan(plan, signature, options.timeout_seconds)

    def explain(self, value: Any, reduce_op: Op, options: CommunicationOptions | None) -> str:
        """Return the text of `Strategy.explain`; nothing is sent, nothing is written.

        The ways come from the transfers that do the work.
        """
        where, ranks, algorithm = "Strategy.explain", self.communicator, self.algorithm
        op, settings = ReduceOp._parse(reduce_op, where), self.options.merge(options)
        arena = value if is_arena(value) else None
        lines: list[str] = []
        if arena is not None:
            arena._check(self, where)
            value = arena.values
        leaves, structure = nest.flatten_without_none(value)
        arrays: list[Any] = leaves
        if arena is not None and algorithm._works_in_place:
            lines = arena._lines(self, op, settings, where)
        elif leaves or not (structure.num_none or self.is_alone):
            components, arrays, _ = checked_inputs(op, leaves, lambda: nest.leaf_paths(value), where, None, None)
            lines = algorithm._lines(ranks, op, [*map(_own_value, components, arrays)], settings)
        if structure.num_none:
            lines.append(f"{structure.num_none} None: left as None, nothing is sent")
        nbytes = sum((array.values if isinstance(array, IndexedSlices) else array).nbytes for array in arrays)
        subject = f"{op.value} of {counted(len(leaves), 'array')}, {size_in_words(nbytes)}"
        place = f"{counted(ranks.size, 'rank')} of {counted(ranks.nodes, 'node')}"
        head = f"all_reduce {subject}, on {place} by {type(algorithm).__name__}"
        return "\n  ".join([head, *lines, f"thresholds: {ranks.thresholds.source}"])


class WeightedMeans(Transfer):
    """The weighted means of arrays.

    Small arrays lie in the mailboxes, and the weights beside them, if the algorithm adds in rank order.  Else the ranks
    learn the weights with the check of the call, and then add up the products.

    Args:
        reducer: adds them up.
        layouts: dtype and shape of each array.
        options: of the call.
        on_gpu: whether some arrays are in GPU memory.
    """

    def __init__(
        self,
        reducer: Reducer,
        layouts: tuple[Layout, ...],
        options: CommunicationOptions,
        *,
        on_gpu: bool = False,
    ) -> None:
        self._reducer, self._options = reducer, None if options == reducer.options else options
        ranks = reducer.communicator
        self._results = dtypes_of_results(layouts, ReduceOp.MEAN)
        rows = zip(self._results, layouts, strict=True)
        # The weight, and the arrays in the dtypes of their products with it.
        with_weight = (
            (np.dtype(np.float64), ()),
            *((np.result_type(dtype, np.float64), shape) for dtype, (_, shape) in rows),
        )
        # Four times: every rank makes all products.
        may_be_small = reducer.algorithm._works_in_place and not on_gpu
        self._in_mailboxes = in_mailboxes(ranks, with_weight, 4 * ranks.size) if may_be_small else None
        if self._in_mailboxes is None:
            self._weights = ranks.once(NumbersOfRanks, partial(NumbersOfRanks, ranks, 1))

    def bring(self, arrays: Sequence[Array], targets: Targets = None) -> Any:
        """Give this rank's weight, and small arrays, before the ranks agree on the call."""
        if self._in_mailboxes is None:
            return self._weights.bring(self.weight)
        self._in_mailboxes.put([self.weight, *arrays])
        return None

    def run(self, arrays: Sequence[Array], memory: Any) -> list[Array]:
        """Return the means, of large arrays after one more agreement; NaN where all weights are 0."""
        if self._in_mailboxes is not None:
            return self._of_small(*zip(*self._in_mailboxes.arrays_of_ranks(), strict=True))
        ranks = self._reducer.communicator
        call: Any = ranks.guard.current
        factors, total = normalized(tuple(self._weights.numbers_of_ranks(memory).ravel().tolist()))
        ranks.guard.agreed = False  # there is one more agreement
        products = [product(array, self.weight, factors[ranks.rank]) for array in arrays]
        rooms = [
            None if array.dtype == dtype or is_on_device(array) else np.empty(array.shape, dtype)
            for array, dtype in zip(products, self._results, strict=True)
        ]
        sums = self._reducer.all_reduce_arrays(call, ReduceOp.SUM, products, self._options)
        return [*map(rounded, [divide(array, total) for array in sums], self._results, rooms)]

    @quietly
    def _of_small(self, weights: Sequence[Array], *arrays_of_ranks: Sequence[Array]) -> list[Array]:
        """Return the means of arrays; each argument has a value of each rank."""
        factors, total = normalized(tuple(map(float, weights)))
        means: list[Array] = []
        for of_ranks, dtype in zip(arrays_of_ranks, self._results, strict=True):
            products = [a * factor for a, factor in zip(of_ranks, factors, strict=True) if factor or total == 0]
            means.append(np.asarray(reduce(np.add, products) / total, dtype))
        return means


def _plan_or_general(call: Call, general: General, value: Any, out: Any, weight: Any) -> CallPlan:
    """Return the plan of a value."""
    try:
        return general.plan(call, value, out, weight) or general
    except MpiStrategyError:
        return general  # it raises the error


def checked_inputs(
    op: ReduceOp,
    leaves: list[Any],
    paths: Callable[[], list[str]],
    where: str,
    dense: type[MpiStrategyError] | None,
    targets: list[Any] | None,
) -> tuple[list[Any], list[Any], list[Any] | None]:
    """Return the leaves as algorithms get them, their arrays, and the arrays for the results."""
    if not leaves:
        raise EmptyBatchError.at(where, found="an empty structure", expected="at least one array to reduce")
    components = [own_component(leaf, op, where) for leaf in leaves]
    arrays = checked_leaves(components, paths, where, dense, op)
    if targets is None:
        return components, arrays, None
    if len({id(target) for target in targets}) < len(targets):
        raise StructureError.at(f"{where}: out", found="one array twice", expected="one for each leaf")
    memory = [
        checked_target(as_target(target, where, f"out{path}"), array, op, f"{where}: out{path}")
        for target, array, path in zip(targets, arrays, paths(), strict=True)
    ]
    return components, arrays, memory


def _own_value(component: Any, array: Any) -> Any:
    """Return a component as `Algorithm` gets its value."""
    return component if isinstance(component, Mirrored) else array


def outputs_for(
    results: Sequence[Any], components: Sequence[Any], targets: Sequence[Any] | None, memory: Sequence[Any] | None
) -> list[Any]:
    """Return the caller's results: in the kinds of the components, or written into the targets."""
    if targets is None or memory is None:
        return [*map(in_kind, results, map(own_part, components))]
    write(results, memory)
    for array, target in zip(memory, targets, strict=True):
        hand_back(array, target)
    return list(targets)
