"""What all optimizers share: slots beside each variable, gradients combined over the replicas, updates in place.

A step takes one of two paths, with the same results.  *Plain*: the gradients are reduced to every rank, and each rank
updates its copies.  *Sliced*: where variables, slots and gradients are in memory that the ranks of the node share, each
rank reduces and updates its share of every copy (`training.sliced.update`).  Both update in place, in pieces
(`training.kernels`).  A subclass that overrides `change` or `update` takes the plain path, and its method is called.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from operator import is_
from typing import Any, ClassVar, Self

import numpy as np

from mpistrategy.arrays.convert import any_array, host_array, placed_as
from mpistrategy.arrays.dtypes import Array
from mpistrategy.arrays.values import IndexedSlices, local_component
from mpistrategy.context import Mode, cross_replica, current_frame, warn_if_alone
from mpistrategy.errors import ContextError, UnsupportedError
from mpistrategy.gradients import as_dense
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.public_calls import collective
from mpistrategy.objects.copies import NotPickled
from mpistrategy.objects.kept import Kept, Leaf, ObjectAt, PathOf, is_stateful
from mpistrategy.objects.nearest import NamesOurs
from mpistrategy.objects.settings import Settable, Setting, checked_count, checked_number, or_none, positive
from mpistrategy.options import NonFinite, ReduceOp, SumOrMean, VariableAggregation
from mpistrategy.schedules import Schedule
from mpistrategy.strategy.current import get_strategy
from mpistrategy.strategy.extended import StrategyExtended
from mpistrategy.strategy.strategy import Strategy, is_mirrored
from mpistrategy.training import hyperparameters as setting
from mpistrategy.training.checks import check_variable, required_context
from mpistrategy.training.gpu.updates import room_for
from mpistrategy.training.gradient_buckets import GradientArenas, GradientBuckets
from mpistrategy.training.kernels import STEP_METHODS, Kernel, has_current_kernel, has_kernel
from mpistrategy.training.nonfinite import warn_of
from mpistrategy.training.plans import Slots, StepPlan, StepPlans
from mpistrategy.training.screening import Screened, screened
from mpistrategy.training.sliced.step import SlicedStep
from mpistrategy.variables.variable import Variable

Arrays = Sequence[Array] | None

_OUTSIDE_STEPS = "Make variables inside strategy.scope(), and call it in the function given to strategy.run."


class Optimizer(Kept, NamesOurs, GradientArenas, NotPickled, Settable):
    """Base of optimizers: reduces gradients over the replicas and applies them.

    A subclass says in `slot_values` which slots each variable has, and returns from `change` what a step subtracts.

    Args:
        learning_rate: the step size; a positive number, or a function that returns it for the number of steps made so
            far (`mpistrategy.schedules`).  The attribute is then the number of the latest step.
        aggregation: "SUM" or "MEAN": how the replicas' gradients are combined.
        global_clipnorm: limits the norm of all reduced gradients together; None does not.
        mirrored_check_steps: every so many calls of `apply_gradients`, make sure that this optimizer's variables, slots
            and steps are equal on all ranks, as `Strategy.assert_mirrored` does; 0 never does.
        nonfinite: what to do when a reduced gradient has NaN or infinities in it: "raise" NonFiniteError, "skip" the
            step, or "warn" once a step on replica 0 and go on.  All ranks do the same.  Checking turns off the sliced
            path (slower on one node).  None: no check.

    Attributes:
        iterations: the number of steps made, a variable; None before the first.  May be set before that, to another
            variable that counts.
        schedule: the function that was given as `learning_rate`; None for a number.
        skipped_steps: how many steps changed nothing because gradients were not finite.
        slot_values: of a class: the slots of each variable, and the number that each is filled with at first.
        only_named_rows: of a class: whether a sparse gradient changes only the rows that it names, also of slots.

    All settings may be changed between steps, on all ranks alike; they are checked then as in the constructor.  The
    ranks compare them in every step, and the numbers that a subclass declares (``decay: float`` in its body), too.
    Other attributes belong to the program.

    Raises:
        OptionError: for a learning rate or a limit that is not positive, a negative mirrored_check_steps, and an
            unknown aggregation or nonfinite.
        OptionTypeError: for values that are no numbers.
    """

    _kept_as = "optimizer"
    _words_of = "Optimizer"
    _instead_of_pickling = "Save it with a Checkpoint, and make one with the same arguments there."
    slot_values: Mapping[str, float] = {}
    only_named_rows: ClassVar[bool] = False

    learning_rate: Setting[float] = setting.LearningRate()
    aggregation: Setting[ReduceOp] = setting.sum_or_mean()
    global_clipnorm: Setting[float | None] = or_none(
        lambda where, name, value: checked_number(where, name, value, "a positive number or None", positive)
    )
    mirrored_check_steps: Setting[int] = Setting(lambda where, name, value: checked_count(where, name, value, least=0))
    nonfinite: Setting[NonFinite | None] = setting.policy()
    iterations: Setting[Variable | None] = setting.counter()
    skipped_steps: int
    schedule: Schedule | None
    lr: setting.Misnamed = setting.Misnamed("learning_rate")
    clipnorm: setting.Misnamed = setting.Misnamed("global_clipnorm")

    @setting.refuses_others
    def __init__(
        self,
        learning_rate: float | Schedule,
        *,
        aggregation: SumOrMean = "SUM",
        global_clipnorm: float | None = None,
        mirrored_check_steps: int = 0,
        nonfinite: NonFinite | None = None,
    ) -> None:
        where = type(self).__name__
        self.learning_rate = learning_rate
        self.aggregation = aggregation
        self.global_clipnorm = global_clipnorm
        self.mirrored_check_steps = mirrored_check_steps
        self.nonfinite = nonfinite
        self.iterations, self.skipped_steps = None, 0
        self._slots = Slots(where)
        self._plans = StepPlans(self._slots)
        #: The settings that ranks compare, in order; other attributes are the program's own.
        self._declared: tuple[str, ...] = tuple(sorted(setting.declared(type(self))))
        #: What `_settings` has put into words, and the words.
        self._told: tuple[tuple[Any, ...], str] = ((), "")
        #: The step counter that has been checked, its strategy, and its value.
        self._counted: tuple[Any, Any, Array] = (None, None, np.zeros((), np.int64))

    def build(self, variables: Iterable[Variable], *, name: str | None = None) -> None:
        """Create the step counter and the slots of `variables`.  Collective; inside scope().

        Args:
            variables: variables of the strategy.
            name: is compared between the ranks instead of the call site.

        Raises:
            ContextError: outside the scope of the variables' strategy.
            OptionError: for an element that is not a variable.
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
        with Call(strategy.extended.communicator.guard, where, called=name):
            self._step_counter()
            self._slots.make(listed, self.slot_values)

    def slots_of(self, var: Variable) -> dict[str, Variable]:
        """Return the slot variables of `var` by name; empty before its first step, or `build`."""
        return self._slots.of(var)

    @property
    def latest_path(self) -> str:
        """How the latest step was made: "sliced", "plain", "buckets" or "skipped"; "" before the first."""
        return self._plans.latest_path

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The optimizer's own variables: the step counter, once there is one, and all slots."""
        slots = [slot for _, slots in self._slots.by_id.values() for slot in slots.values()]
        return (*([] if self.iterations is None else [self.iterations]), *slots)

    def change(self, gradient: Array, slots: Mapping[str, Variable]) -> Array:
        """Override: update the slots and return what to subtract from the variable; in update context.

        Args:
            gradient: the reduced gradient, of the variable's shape and dtype.
            slots: the variable's slots by name.
        """
        raise UnsupportedError.at(type(self).__name__, found="no change()", expected="one in your subclass")

    @collective("update")
    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Variable]] | GradientBuckets, *, name: str | None = None
    ) -> None:
        """Combine the replicas' gradients and update the variables.  Collective; called in a step function.

        Errors are raised on every rank, and all but ReplicasDivergedError before anything has changed.

        Args:
            grads_and_vars: pairs of this replica's gradient (an array or IndexedSlices of the variable's shape, or
                None to leave the variable as it is) and the variable; or GradientBuckets.
            name: is compared between the ranks instead of the call site.

        Raises:
            ContextError: in cross-replica context.
            EmptyBatchError: when there are no gradients.
            OptionError, OptionTypeError, ShapeError, DTypeError: for gradients and variables that do not fit.
            CollectiveMismatchError: when the ranks' gradients differ in number, dtype or shape.
            NonFiniteError: when nonfinite is "raise", and a reduced gradient is not finite.
            ReplicasDivergedError: when a check after the step finds copies that differ.
        """
        where = f"{type(self).__name__}.apply_gradients"
        frame = current_frame()
        in_step = frame is not None and frame.mode is Mode.REPLICA
        strategy: Any = frame.strategy if frame is not None and in_step else required_context(where).strategy
        if strategy._is_default:
            warn_if_alone(strategy, where, "was called outside every step", _OUTSIDE_STEPS)
        extended = strategy.extended
        with Call(extended.communicator.guard, where, name) as call:
            gradients, plan, ordinary = self._plans.find(grads_and_vars, strategy, where)
            call.step = self._steps_made(strategy, where)
            call.structure = plan.in_words(self._settings())
            buckets = grads_and_vars if isinstance(grads_and_vars, GradientBuckets) else None
            totals = None if buckets is None else buckets._reduced_early(self.aggregation, call)
            if ordinary and totals is None and plan.prepared is not None and self._is_current(plan, extended):
                trouble = self._make(plan, gradients, self._kernel(), call)
            else:
                arrays = gradients if ordinary else plan.ordinary(gradients, where)
                with cross_replica(strategy):
                    trouble = self._prepare_and_make(strategy, gradients, arrays, plan, totals, call)
            if trouble and self.nonfinite == "skip":
                self._plans.latest_path = "skipped"
                self.skipped_steps += 1
            self._plans.calls += 1
            if self.mirrored_check_steps and self._plans.calls % self.mirrored_check_steps == 0:
                self._check_mirrored(strategy)
            number = self.next_step() - 1 if trouble else 0
        if trouble and self.nonfinite == "warn":  # after the call, since the program may make it an error
            warn_of(trouble, where, number, strategy.replica_id_in_sync_group)

    def _steps_made(self, strategy: Strategy, where: str) -> int:
        """Return the number of steps made, which a schedule follows."""
        steps, counter = 0, self.iterations
        if counter is not None:
            if self._counted[0] is not counter or self._counted[1] is not strategy:
                check_variable(counter, strategy, where)
                self._counted = (counter, strategy, counter.local_view)
            steps = int(self._counted[2])
        if self.schedule is not None:
            setting.follow(self, self.schedule, steps)
        return steps

    def _settings(self) -> str:
        """Return all numbers that a step depends on, in words.  If ranks differed in one, their copies would, too."""
        found = (*map(vars(self).get, self._declared), self.nonfinite, self.aggregation)
        told, words = self._told
        if not (told and all(map(is_, told, found))):
            both = zip(self._declared, found, strict=False)
            numbers = {name: number for name, number in both if isinstance(number, (int, float))}
            self._told = found, (words := f"{numbers}, nonfinite={self.nonfinite}, {self.aggregation.name}")
        return words

    def _is_current(self, plan: StepPlan, extended: StrategyExtended) -> bool:
        """Return whether the prepared step of a plan still does what this optimizer and its strategy say."""
        return plan.counter is self.iterations and plan.key == self._key(extended)

    def _key(self, extended: StrategyExtended) -> tuple[Any, ...]:
        """Return what a prepared step depends on, besides its variables and the step counter."""
        mine, theirs = type(self), type(extended)
        return (
            *(mine._kernel, mine.change, mine.update, vars(self).keys().isdisjoint(STEP_METHODS)),
            *(theirs.batch_reduce_to, theirs.update, extended._reducer.changes, extended.communicator.guard.level),
            *(self.aggregation, self.global_clipnorm, self.nonfinite, self._plans.sliced.arenas_made),
        )

    def _make(self, plan: StepPlan, gradients: Sequence[Array], kernel: Kernel | None, call: Call) -> str:
        """Make the prepared step of a plan; return what of the reduced gradients is not finite."""
        step, trouble = plan.prepared, ""
        assert kernel is not None
        assert step is not None
        if isinstance(step, SlicedStep):
            step.run(gradients, kernel, self.aggregation, call)
            self._plans.latest_path = "sliced"
        else:
            totals, _, trouble = self._screened(step.totals(gradients, call), plan, gradients, call)
            if trouble and self.nonfinite == "skip":
                return trouble
            step.update(totals, kernel)
            self._plans.latest_path = "plain"
        np.add(plan.count, 1, out=plan.count)
        return trouble

    def _prepare_and_make(
        self, strategy: Strategy, gradients: Sequence[Any], arrays: Arrays, plan: StepPlan, totals: Arrays, call: Call
    ) -> str:
        """Make a step of any gradients; return what of them is not finite."""
        extended = strategy.extended
        self._step_counter()
        if not plan.has_slots:
            self._slots.make(plan.variables, self.slot_values)
            plan.has_slots = True
        call.expect_more()
        kernel = self._kernel() if has_current_kernel(self, Optimizer) else None
        room = room_for(kernel, plan.variables) if extended._drives_gpu else []
        if totals is None and arrays is not None:
            if not self._is_current(plan, extended):
                screens = self.global_clipnorm is not None or self.nonfinite is not None
                self._plans.prepare(plan, kernel, self._step_counter(), self.aggregation, screens, call)
                plan.key = self._key(extended)
            if plan.prepared is not None:
                return self._make(plan, arrays, kernel, call)
        if totals is None:
            pairs = list(zip(gradients, plan.variables, strict=True))
            results = extended.batch_reduce_to(self.aggregation, pairs)
        else:
            results = list(totals)
            if extended._drives_gpu:
                call.agree("update", options="with memory for it")
        room.clear()  # the updates use this memory now
        trouble = self._update_all(results, plan, gradients if totals is None else None, call)
        self._plans.latest_path = "plain" if totals is None else "buckets"
        return trouble

    def _screened(
        self, reduced: Sequence[Array], plan: StepPlan, brought: Sequence[Any] | None, call: Call, scales: bool = True
    ) -> Screened:
        if self.global_clipnorm is None and self.nonfinite is None:
            return reduced, None, ""
        return screened(reduced, plan, brought, call, clip=self.global_clipnorm, policy=self.nonfinite, scales=scales)

    def _update_all(self, results: Sequence[Any], plan: StepPlan, brought: Sequence[Any] | None, call: Call) -> str:
        """Update all of this rank's copies with what has been reduced; return what of it is not finite."""
        extended, variables = plan.strategy.extended, plan.variables
        totals = [local_component(result) for result in results]
        dense = [as_dense(total, var) for total, var in zip(totals, variables, strict=True)]
        names_rows = self.only_named_rows
        rows = [total.indices if names_rows and isinstance(total, IndexedSlices) else None for total in totals]
        in_place = has_current_kernel(self, Optimizer)
        by_kernels = in_place and not any(rows_of is not None for rows_of in rows) and plan.has_kernels
        reduced, scale, trouble = self._screened(dense, plan, brought, call, not by_kernels)
        if trouble and self.nonfinite == "skip":
            return trouble
        if in_place:  # one update for all
            extended.update(variables[0], lambda _: self._update_in_place(reduced, variables, rows, scale))
        else:
            for gradient, var, named in zip(reduced, variables, rows, strict=True):
                extended.update(var, self.update, args=(gradient, self.slots_of(var), named))
        extended.update(self._step_counter(), lambda steps: steps.assign_add(1))
        return trouble

    def _check_mirrored(self, strategy: Strategy) -> None:
        slotted = [var for var, _ in self._slots.by_id.values()]
        mirrored = [var for var in (*slotted, *self.variables) if is_mirrored(var)]
        if mirrored:
            strategy.assert_mirrored(mirrored)

    def _update_in_place(
        self, gradients: Sequence[Array], variables: Sequence[Variable], rows: Sequence[Array | None], scale: Any
    ) -> None:
        kernel = self._kernel()
        assert kernel is not None
        chosen: list[tuple[Array, Variable]] = []
        for gradient, var, named in zip(gradients, variables, rows, strict=True):
            if named is not None or not has_kernel(var.dtype):
                self.update(var, gradient, self.slots_of(var), named)
            else:
                chosen.append((gradient, var))
        self._plans.update(kernel, [gradient for gradient, _ in chosen], [var for _, var in chosen], scale)

    def _kernel(self) -> Kernel | None:
        """Return the next step as a kernel that does what `change` and `update` do; None where there is none.

        Where a class overrides `change` or `update` but not this method, those are called.
        """
        return None

    def next_step(self) -> int:
        """Return the number of the current step, from 1 on."""
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

    def _state(self, path_of: PathOf) -> dict[Any, Any]:
        slots = {
            path_of(var) or number: {name: Leaf(slot, first=self.slot_values[name]) for name, slot in slots.items()}
            for number, (var, slots) in enumerate(self._slots.by_id.values())
        }
        state: dict[Any, Any] = {} if self.iterations is None else {"iterations": Leaf(self.iterations, first=0.0)}
        state |= {"class": type(self).__name__, "names": list(self.slot_values), "slots": slots}
        state |= {"learning_rate": float(self.learning_rate), "skipped_steps": int(self.skipped_steps)}
        if is_stateful(self.schedule):
            state["schedule"] = self.schedule
        return state

    def _check(self, saved: Mapping[Any, Any], at: ObjectAt) -> str:
        here, names = type(self).__name__, sorted(self.slot_values)
        if (saved["class"], sorted(saved["names"])) != (here, names):
            return f"{saved['class']} with slots {sorted(saved['names'])} in the checkpoint, {here} {names} here"
        rate, skipped = saved["learning_rate"], saved["skipped_steps"]
        least = 0 if self.schedule is None else -1  # a schedule may end at 0
        if not (type(rate) is float and least < rate < float("inf") and type(skipped) is int):
            return f"{rate!r:.40} and {skipped!r:.40} in the checkpoint"
        for path, slots in saved["slots"].items():
            var = self._slotted(path, at)
            if var is None:
                return (
                    f"slots of variable {path!r:.100}, which is not in the checkpoint; put it there, or "
                    "build(variables) before restoring"
                )
            if sorted(slots) != names or any(_layout(slot) != _layout(var) for slot in slots.values()):
                return f"other slots in the checkpoint than {var.name!r} needs"
        steps = saved.get("iterations")
        is_new = steps is not None and self.iterations is None
        return "no number of steps in the checkpoint" if is_new and _layout(steps) != (np.int64, ()) else ""

    def _slotted(self, path: str | int, at: ObjectAt) -> Variable | None:
        """Return the variable that has the slots at a path of a checkpoint; by its number if it has no path."""
        slotted = [var for var, _ in self._slots.by_id.values()]
        if isinstance(path, int):
            return slotted[path] if 0 <= path < len(slotted) else None
        found = at(path)
        return found if isinstance(found, Variable) else None

    def _prepare(self, saved: Mapping[Any, Any], at: ObjectAt, strategy: Any) -> None:
        variables = [self._slotted(path, at) for path in saved["slots"]]
        missing = [var for var in variables if var is not None and id(var) not in self._slots.by_id]
        if missing or (self.iterations is None and "iterations" in saved):
            with (missing[0].strategy if missing else strategy).scope():
                self.build(missing)

    def _load(self, saved: Mapping[Any, Any]) -> None:
        self.skipped_steps = saved["skipped_steps"]
        if self.schedule is None:
            self.learning_rate = saved["learning_rate"]

    def __copy__(self) -> Self:
        """Return `copy.deepcopy(self)`: two optimizers share no slots."""
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return another optimizer with the same settings.

        Raises:
            CopyError: after the first step, or `build`: variables are created by all ranks together.
        """
        result = super().__copy__()
        memo[id(self)] = result
        result.__dict__.update((name, copy.deepcopy(value, memo)) for name, value in vars(self).items())
        return result

    def _step_counter(self) -> Variable:
        if self.iterations is None:
            self.iterations = Variable(
                np.zeros((), np.int64),
                trainable=False,
                name=f"{type(self).__name__}/iterations",
                aggregation=VariableAggregation.ONLY_FIRST_REPLICA,
            )
        return self.iterations


def _layout(array: Any) -> tuple[Any, Any]:
    return array.dtype, array.shape
