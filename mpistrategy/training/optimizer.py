"""What all optimizers share: slots beside each variable, gradients combined over the replicas, updates in place.

A step takes one of two paths, with the same results.  *Plain*: the gradients are reduced to every rank, and each rank
updates all of its copies.  *Sliced*: where variables, slots and gradients live in memory that the ranks of the node
share, each rank reduces and updates its share, in every copy (`training.sliced_update`).  In both they update in
place, in pieces (`optimizer_kernels`); a subclass that overrides `change` or `update` is asked, on the plain path.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from mpistrategy.arrays.convert import any_array, host_array, placed_as
from mpistrategy.arrays.dtypes import Array
from mpistrategy.arrays.values import IndexedSlices, local_component
from mpistrategy.errors import ContextError, NonFiniteError, OptionError, UnsupportedError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.public_calls import collective
from mpistrategy.options import ReduceOp, VariableAggregation
from mpistrategy.process_objects import Created, NotPickled
from mpistrategy.strategy.current import get_strategy
from mpistrategy.strategy.outside_steps import warn_if_alone
from mpistrategy.strategy.strategy import Strategy
from mpistrategy.training.checks import (
    Target,
    Targets,
    apart_from,
    check_variable,
    checked_count,
    checked_number,
    positive,
    required_context,
)
from mpistrategy.training.gradient_buckets import GradientBuckets
from mpistrategy.training.gradient_memory import GradientPlaces
from mpistrategy.training.gradients import as_dense, clip_by_global_norm
from mpistrategy.training.kernels import (
    FlatUpdate,
    Kernel,
    Scratch,
    flat_update,
    has_current_kernel,
    has_kernel,
    make_room,
)
from mpistrategy.training.nonfinite import checked_policy, screen, warn_of
from mpistrategy.training.sliced_step import SlicedSteps, adds_in_rank_order, dense_gradients
from mpistrategy.training.slots import Slots
from mpistrategy.variables.mirrored_check import is_mirrored
from mpistrategy.variables.variable import Variable

Arrays = Sequence[Array] | None


_OUTSIDE_STEPS = "Make variables inside strategy.scope(), and call it in the function given to strategy.run."


def _first_storage(given: Mapping[str, Any]) -> Array:
    """Return what this rank stores of the first variable that a step has written to, to be changed in place."""
    variables = [var for _, var in given["grads_and_vars"]]
    storage: list[Array] = []
    variables[0].strategy.extended.update(variables[0], lambda var: storage.append(var.updatable_storage()))
    return storage[0]


class Optimizer(Created, GradientPlaces, NotPickled):
    """Base: keeps slot variables beside each variable, and applies reduced gradients.

    A subclass says in `slot_values` which slots it keeps for each variable, and in `change` what a step subtracts.

    Args:
        learning_rate: the step size; a positive number.
        aggregation: "SUM" or "MEAN": how the replicas' gradients are combined.
        global_clipnorm: limits the norm of all reduced gradients together; None does not.
        check_every: every so many calls of `apply_gradients`, make sure that this optimizer's variables, slots and
            steps are equal on all ranks, as `Strategy.assert_mirrored` does; 0 never does.
        nonfinite: what to do when a reduced gradient has NaN or infinities in it: "raise" NonFiniteError, "skip" the
            step, "warn" once a step on replica 0 and go on, or None: do not look.  All ranks do the same.  To look
            before anything changes, a step takes the plain path.

    Attributes:
        iterations: the number of steps made, a variable; None before the first.  May be set before that, to count
            in a variable of one's own.
        latest_path: how the latest step was made, "sliced", "plain", "buckets" or "skipped"; "" before the first.
        skipped_steps: how many steps were skipped, and changed nothing, since gradients were not finite.

    Raises:
        OptionError: for a learning rate or a limit that is not positive, for another aggregation, a negative
            check_every and another way with what is not finite.
        OptionTypeError: for what is no number.
    """

    instead_of_pickling = "Save it with a Checkpoint, and make one with the same arguments there."
    #: The slots of each variable, and the number that each is filled with at first.
    slot_values: Mapping[str, float] = {}
    #: Whether a sparse gradient changes only the rows that it names, in the variable and in its slots.
    only_named_rows: ClassVar[bool] = False

    def __init__(
        self,
        learning_rate: float,
        aggregation: ReduceOp | str = "SUM",
        global_clipnorm: float | None = None,
        check_every: int = 0,
        nonfinite: str | None = None,
    ) -> None:
        where = type(self).__name__
        self.learning_rate = learning_rate
        self.aggregation = ReduceOp.parse(aggregation, where)
        if self.aggregation not in (ReduceOp.SUM, ReduceOp.MEAN):
            raise OptionError.at(where, found=f"aggregation={aggregation!r}", expected="SUM or MEAN")
        if global_clipnorm is not None:
            global_clipnorm = checked_number(
                where, "global_clipnorm", global_clipnorm, "a positive number or None", positive
            )
        self.global_clipnorm = global_clipnorm
        self.check_every = checked_count(where, "check_every", check_every, least=0)
        self.nonfinite = checked_policy(where, nonfinite)
        self.skipped_steps = 0
        self._calls = 0
        self.iterations: Variable | None = None
        self.latest_path = ""
        self._slots = Slots(where)
        self._targets = Targets()
        self._flat: dict[int, FlatUpdate] = {}
        self._scratch = Scratch()
        self._sliced = SlicedSteps(self._scratch)

    @property
    def learning_rate(self) -> float:
        """The step size; may be changed between steps, on all ranks alike."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        where = type(self).__name__
        self._learning_rate = checked_number(where, "learning_rate", value, "a positive number", positive)

    def build(self, variables: Iterable[Variable]) -> None:
        """Create the step counter and the slots of `variables`, beside them.  Collective; inside scope().

        Raises:
            ContextError: outside the scope of the variables' strategy.
            OptionError: for what is no variable.
        """
        where, strategy, listed = f"{type(self).__name__}.build", get_strategy(), list(variables)
        for var in listed:
            if getattr(var, "strategy", strategy) is not strategy:
                raise ContextError.at(
                    where,
                    found=f"a call outside the scope of the strategy of {var.name!r}",
                    expected="a call inside `with strategy.scope():`",
                )
            check_variable(var, strategy, where)
        self._step_counter()
        self._slots.make(listed, self.slot_values)

    def slots_of(self, var: Variable) -> dict[str, Variable]:
        """Return the slot variables of `var` by name; empty before its first step, or `build`."""
        return self._slots.of(var)

    def slotted(self) -> list[Variable]:
        """Return the variables that have been given slots (those of an optimizer without any, too), in that order."""
        return self._slots.everything()[0]

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The optimizer's own: the step counter, once there is one, and all slots."""
        return (*([] if self.iterations is None else [self.iterations]), *self._slots.everything()[1])

    def change(self, gradient: Array, slots: Mapping[str, Variable]) -> Array:
        """Override: update the slots and return what to subtract from the variable; in update context.

        Args:
            gradient: the reduced gradient, of the variable's shape and dtype.
            slots: the variable's slots by name.
        """
        raise UnsupportedError.at(type(self).__name__, found="no change()", expected="one in your subclass")

    @collective("update", memory=_first_storage)
    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Variable]] | GradientBuckets) -> None:
        """Combine the replicas' gradients and update the variables.  Collective; called in a step function.

        Args:
            grads_and_vars: pairs of this replica's gradient (an array or IndexedSlices of the variable's shape, or
                None for a variable that this step leaves alone) and the variable; or GradientBuckets.

        Raises:
            ContextError: in cross-replica context.
            EmptyBatchError: when there are no gradients.
            OptionError, OptionTypeError, ShapeError, DTypeError: for gradients and variables that do not fit.
            CollectiveMismatchError: when the ranks' gradients differ in number, dtype or shape.
            NonFiniteError: when nonfinite is "raise", and a reduced gradient is not finite.
            All on every rank, and before anything has changed.
            ReplicasDivergedError: on every rank, when a check after the step finds copies that differ.
        """
        where = f"{type(self).__name__}.apply_gradients"
        context = required_context(where)
        if context.strategy.is_default:
            warn_if_alone(context.strategy, where, "was called outside every step", _OUTSIDE_STEPS)
        with Call(context.strategy.extended.communicator.guard, where) as call:
            gradients, target, ordinary = self._targets.checked(grads_and_vars, context.strategy, where)
            if self.iterations is not None:
                check_variable(self.iterations, context.strategy, where)
            call.structure = f"{self._settings()} for {target.text}"
            arrays = gradients if ordinary else dense_gradients(gradients, target, where)
            totals = self._reduced(grads_and_vars, call) if isinstance(grads_and_vars, GradientBuckets) else None
            context.merge_call(self._merge, args=(gradients, arrays, target, totals, call))

    def _reduced(self, buckets: GradientBuckets, call: Call) -> Arrays:
        """Return the sums or means of buckets that start early; None for others, whose gradients are as any."""
        if not buckets.starts_early:
            buckets.reset()
            return None
        if buckets.op is not self.aggregation:
            raise OptionError.at(
                call.where,
                found=f"gradient buckets that make the {buckets.op.name}",
                expected=f"the optimizer's aggregation, {self.aggregation.name}",
                fix="Make the buckets with this optimizer's gradient_buckets().",
            )
        call.agree("reduce gradient buckets", op=buckets.op.value)
        totals = buckets.reduced()
        call.expect_more()
        return totals

    def _settings(self) -> str:
        """Return all numbers that a step depends on: ranks that differ in one would drift apart."""
        numbers = {name: value for name, value in sorted(vars(self).items()) if isinstance(value, (int, float))}
        steps = 0 if self.iterations is None else self.iterations.local_copy().tolist()
        others = f"global_clipnorm={self.global_clipnorm}, nonfinite={self.nonfinite}, {self.aggregation.name}"
        return f"{numbers}, {others}, step {steps}"

    def _merge(
        self, strategy: Strategy, gradients: Sequence[Any], arrays: Arrays, target: Target, totals: Arrays, call: Call
    ) -> None:
        self._step_counter()
        if not target.has_slots:
            self._slots.make(target.variables, self.slot_values)
            target.has_slots = True
        call.expect_more()
        room = make_room([var.local_view for var in target.variables]) if strategy.extended.drives_gpu else []
        trouble = ""
        if totals is None and arrays is not None and self._update_shares(strategy, arrays, target, call):
            self.latest_path = "sliced"
        else:
            path, brought = ("plain", gradients) if totals is None else ("buckets", None)
            combined = self._totals(strategy, gradients, arrays, target) if totals is None else totals
            if totals is not None and strategy.extended.drives_gpu:
                call.agree("update", options="with memory for it")
            room.clear()  # the updates take it now
            trouble = self._update_all(strategy, combined, target, brought, call)
            self.latest_path = "skipped" if trouble and self.nonfinite == "skip" else path
        self._calls += 1
        if self.check_every and self._calls % self.check_every == 0:
            self._check_mirrored(strategy)
        if trouble and self.nonfinite == "warn":
            warn_of(trouble, call.where, self.next_step() - 1, strategy.replica_id_in_sync_group)

    def _totals(self, strategy: Strategy, gradients: Sequence[Any], arrays: Arrays, target: Target) -> Sequence[Any]:
        alone = strategy.num_replicas_in_sync == 1 and adds_in_rank_order(strategy.extended)
        if alone and arrays is not None and has_current_kernel(self, Optimizer):
            # Kernels only read them; a `change` of the user's is given arrays of its own.
            slots = [slot for var in target.variables for slot in self.slots_of(var).values()]
            return apart_from([var.local_view for var in (*target.variables, *slots)], arrays)
        pairs = list(zip(gradients, target.variables, strict=True))
        return strategy.extended.batch_reduce_to(self.aggregation, pairs)

    def _update_shares(self, strategy: Strategy, gradients: Sequence[Array], target: Target, call: Call) -> bool:
        """Take the sliced path; return False where there is none, which all ranks find alike."""
        if strategy.num_replicas_in_sync == 1 or self.global_clipnorm is not None or self.nonfinite is not None:
            return False
        if not adds_in_rank_order(strategy.extended):  # which may be set to something else between steps
            return False
        kernel = self.kernel() if has_current_kernel(self, Optimizer) else None
        step = self._sliced.step(strategy, target, self.slots_of, kernel, call) if kernel is not None else None
        if kernel is None or step is None:
            return False
        elsewhere = step.collect(gradients)
        # The gradients have their variables' shapes and dtypes, and which variables they are is in call.structure.
        call.agree("update", op=self.aggregation.value, options="each rank its share")

        def update(steps: Variable) -> None:
            step.update.run(kernel, self.aggregation, elsewhere)
            steps.assign_add(1)

        strategy.extended.update(self._step_counter(), update)
        return True

    def _update_all(
        self, strategy: Strategy, results: Sequence[Any], target: Target, brought: Sequence[Any] | None, call: Call
    ) -> str:
        """Update all of this rank's copies with what has been reduced; return what of it is not finite."""
        extended, variables = strategy.extended, target.variables
        totals = [local_component(result) for result in results]
        reduced = [as_dense(total, var) for total, var in zip(totals, variables, strict=True)]
        given, norm, trouble = reduced, 0.0, ""
        if self.global_clipnorm is not None:
            reduced, norm = clip_by_global_norm(given, self.global_clipnorm)
        if self.nonfinite is not None:
            trouble = screen(extended.communicator, call, given, norm, variables, brought, self.nonfinite)
        if trouble and self.nonfinite == "raise":
            raise NonFiniteError.at(call.where, found=trouble, expected="finite numbers", fix="Nothing has changed.")
        if trouble and self.nonfinite == "skip":
            self.skipped_steps += 1
            return trouble
        names_rows = self.only_named_rows
        rows = [total.indices if names_rows and isinstance(total, IndexedSlices) else None for total in totals]
        if has_current_kernel(self, Optimizer):
            extended.update(variables[0], lambda _: self._update_in_place(reduced, variables, rows))  # one for all
        else:
            for gradient, var, named in zip(reduced, variables, rows, strict=True):
                extended.update(var, self.update, args=(gradient, self.slots_of(var), named))
        extended.update(self._step_counter(), lambda steps: steps.assign_add(1))
        return trouble

    def _check_mirrored(self, strategy: Strategy) -> None:
        mirrored = [var for var in (*self._slots.everything()[0], *self.variables) if is_mirrored(var)]
        if mirrored:
            strategy.assert_mirrored(mirrored)

    def _update_in_place(
        self, gradients: Sequence[Array], variables: Sequence[Variable], rows: Sequence[Array | None]
    ) -> None:
        kernel = self.kernel()
        assert kernel is not None
        for gradient, var, named in zip(gradients, variables, rows, strict=True):
            if named is not None or not has_kernel(var.dtype):
                self.update(var, gradient, self.slots_of(var), named)
                continue
            if id(var) not in self._flat:
                slots = {name: slot.updatable_storage() for name, slot in self.slots_of(var).items()}
                self._flat[id(var)] = flat_update(var.updatable_storage(), slots, self._scratch)
            self._flat[id(var)].run(kernel, gradient)

    def kernel(self) -> Kernel | None:
        """Return the next step as a kernel, which does what `change` and `update` do; None for an optimizer without.

        A class that overrides `change` or `update` but not this is taken at their word.
        """
        return None

    def next_step(self) -> int:
        """Return the number of the step that is being made, from 1 on."""
        return int(self._step_counter().local_view) + 1

    def update(self, var: Variable, gradient: Array, slots: dict[str, Variable], rows: Array | None) -> None:
        """Change one variable; in update context.  Override `change` instead, unless that is not enough.

        Args:
            var: the variable.
            gradient: its reduced gradient, dense, of its shape and dtype.
            slots: its slots by name.
            rows: the only rows to change; None for all.
        """
        before = {name: slot.local_copy() for name, slot in slots.items()} if rows is not None else {}
        change = any_array(self.change(gradient, slots)).astype(var.dtype, copy=False)
        if rows is not None:
            named = np.zeros(len(change), bool)
            named[host_array(rows)] = True
            others = placed_as(~named, change).reshape(-1, *[1] * (change.ndim - 1))
            # CuPy's where() knows no bfloat16, and returns float32.
            change = np.where(others, change.dtype.type(0), change).astype(change.dtype, copy=False)
            for name, slot in slots.items():
                slot.assign(np.where(others, before[name], slot.local_copy()).astype(slot.dtype, copy=False))
        var.assign_sub(change)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return an optimizer of its own with the same settings.

        Raises:
            CopyError: after the first step, or `build`: its variables are made by all ranks together.
        """
        result = copy.copy(self)
        memo[id(self)] = result
        result.__dict__.update((name, copy.deepcopy(value, memo)) for name, value in self.__getstate__().items())
        return result

    def _step_counter(self) -> Variable:
        if self.iterations is None:
            self.iterations = Variable(
                np.int64(0),
                trainable=False,
                name=f"{type(self).__name__}/iterations",
                aggregation=VariableAggregation.ONLY_FIRST_REPLICA,
            )
        return self.iterations
