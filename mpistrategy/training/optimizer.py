"""What all optimizers share: slots beside each variable, gradients combined over the replicas, updates in place.

A step takes one of two paths, with the same results.  *Plain*: the gradients are reduced to every rank, and each rank
updates its copies.  *Sliced*: where variables, slots and gradients are in memory that the ranks of the node share, each
rank reduces and updates its share of every copy (`training.sliced`).  Both update in place, in pieces
(`training.kernels`).  A subclass that overrides `change` or `update` takes the plain path, and its method is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from operator import is_
from typing import Any, ClassVar, cast

import numpy as np

from mpistrategy.arrays.convert import array_where_it_is, host_array, placed_as
from mpistrategy.arrays.dtypes import Array
from mpistrategy.arrays.values import IndexedSlices, local_component
from mpistrategy.context import cross_replica
from mpistrategy.errors import NonFiniteWarning, UnsupportedError
from mpistrategy.gradients import as_dense
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import warn
from mpistrategy.mpi.contract.public_calls import collective
from mpistrategy.objects.kept import Kept, Leaf, ObjectAt, PathOf, is_stateful
from mpistrategy.objects.other_names import OF_OPTIMIZERS, NamesOurs, refuses
from mpistrategy.objects.settings import (
    NotPickled,
    Settable,
    Setting,
    checked_count,
    checked_number,
    one_of,
    or_none,
    positive,
)
from mpistrategy.options import NonFinite, ReduceOp, SumOrMean, VariableAggregation
from mpistrategy.reduction.arena import Arena
from mpistrategy.schedules import Schedule
from mpistrategy.strategy.strategy import get_strategy, is_mirrored
from mpistrategy.training import hyperparameters as setting
from mpistrategy.training.checks import check_variable, required_context
from mpistrategy.training.formulas import Kernel
from mpistrategy.training.gradient_buckets import DEFAULT_BYTES_PER_BUCKET, GradientBuckets
from mpistrategy.training.kernels import Scratch
from mpistrategy.training.plans import StepPlan, find_plan
from mpistrategy.training.screening import screened
from mpistrategy.training.sliced import GradientArena, SlicedStep, arena_for_step, arena_of, can_be_sliced
from mpistrategy.variables.variable import Variable

Arrays = Sequence[Array] | None


class Optimizer(Kept, NamesOurs, NotPickled, Settable):
    """Base of optimizers: reduces gradients over the replicas and applies them.

    A subclass says in `slot_values` which slots each variable has.  Its `change` returns the array that a step
    subtracts.

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
        latest_path: how the latest step was made: "sliced", "plain", "buckets" or "skipped"; "" before the first.
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
    _instead_of_pickling = "Save it with a Checkpoint, and make one with the same arguments there."
    slot_values: Mapping[str, float] = {}
    only_named_rows: ClassVar[bool] = False

    learning_rate: Setting[float] = setting.LearningRate(
        lambda where, name, value: checked_number(where, name, value, "a positive number, or a schedule", positive)
    )
    aggregation: Setting[ReduceOp] = Setting(setting.sum_or_mean)
    global_clipnorm: Setting[float | None] = or_none(
        lambda where, name, value: checked_number(where, name, value, "a positive number or None", positive)
    )
    mirrored_check_steps: Setting[int] = Setting(lambda where, name, value: checked_count(where, name, value, least=0))
    nonfinite: Setting[NonFinite | None] = or_none(
        lambda where, name, value: cast("NonFinite", one_of(where, name, value, ("raise", "skip", "warn")))
    )
    iterations: Setting[Variable | None] = or_none(setting.checked_counter)
    skipped_steps: int
    latest_path: str
    schedule: Schedule | None

    @refuses(**OF_OPTIMIZERS)
    def __init__(
        self,
        learning_rate: float | Schedule,
        *,
        aggregation: SumOrMean = "SUM",
        global_clipnorm: float | None = None,
        mirrored_check_steps: int = 0,
        nonfinite: NonFinite | None = None,
    ) -> None:
        self.learning_rate = learning_rate
        self.aggregation = aggregation
        self.global_clipnorm = global_clipnorm
        self.mirrored_check_steps = mirrored_check_steps
        self.nonfinite = nonfinite
        self.iterations, self.skipped_steps = None, 0
        #: The variables that slots were made for, each with its slots by name, also where it has none; by id.
        #: With the variables themselves, so that no other object gets their ids.
        self._slots: dict[int, tuple[Variable, dict[str, Variable]]] = {}
        self._scratch: Scratch = {}
        self._plans: dict[tuple[int, ...], StepPlan] = {}
        self._arenas: dict[tuple[int, ...], GradientArena] = {}
        self._calls, self.latest_path = 0, ""
        annotated = {name for base in type(self).__mro__ for name in getattr(base, "__annotations__", ())}
        #: The settings that ranks compare, in order; others are the program's own, and properties made of them.
        self._declared: tuple[str, ...] = tuple(
            name
            for name in sorted(annotated)
            if not (name.startswith("_") or type(getattr(type(self), name, None)) is property)
        )
        #: The latest settings that `_settings` has put into words, and the words.
        self._latest_words: tuple[tuple[Any, ...], str] = ((), "")

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("lr", "clipnorm"):
            getattr(self, name)  # raises AttributeError, which says what to write
        super().__setattr__(name, value)

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
        with Call(strategy.extended.communicator.guard, where, called=name):
            for var in listed:
                check_variable(var, strategy, where)
            self._step_counter()
            self._make_slots(listed)

    def _make_slots(self, variables: Sequence[Variable]) -> None:
        """Make the missing slots.  Collective; in the strategy's scope or a step."""
        for var in variables:
            self._slots.setdefault(id(var), (var, {}))
        # Slot by slot: the slots of one name then follow one another in memory, as their variables do.
        for name, value in self.slot_values.items():
            for var in variables:
                slots = self._slots[id(var)][1]
                if name not in slots:
                    filled, title = np.asarray(value, var.dtype), f"{var.name}/{type(self).__name__}/{name}"
                    slots[name] = Variable(np.broadcast_to(filled, var.shape), trainable=False, name=title)

    def slots_of(self, var: Variable) -> dict[str, Variable]:
        """Return the slot variables of `var` by name; empty before its first step, or `build`."""
        return dict(self._slots[id(var)][1]) if id(var) in self._slots else {}

    def _wanted_slots(self, plan: StepPlan) -> list[dict[str, Variable]]:
        """Return the slots that a step uses, in one order; a variable may have others, of earlier steps."""
        return [{name: self._slots[id(var)][1][name] for name in self.slot_values} for var in plan.variables]

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The optimizer's own variables: the step counter, once there is one, and all slots."""
        slots = [slot for _, slots in self._slots.values() for slot in slots.values()]
        return (*([] if self.iterations is None else [self.iterations]), *slots)

    def gradient_arena(self, variables: Iterable[Variable], *, name: str | None = None) -> Arena[list[Array]]:
        """Return an arena for the gradients of `variables`: a step does not copy gradients in it.  Collective.

        Write them in place (``np.matmul(x.T, d, out=arena.values[0])``) and give `apply_gradients` pairs of
        ``arena.values[i]`` and the i-th variable.  A step does not change them.  A step with other gradients of these
        variables may write those there.

        Args:
            variables: variables of one strategy.  The same variables in the same order always have the same arena.
            name: is compared between the ranks instead of the call site.

        Returns:
            An Arena whose `values` are a list like the variables.

        Raises:
            EmptyBatchError: without variables.
            OptionError: for elements that are no variables, and for variables of several strategies.
        """
        return self._gradients_of(variables, "gradient_arena", name).arena

    def gradient_buckets(
        self,
        variables: Iterable[Variable],
        bytes_per_bucket: int = DEFAULT_BYTES_PER_BUCKET,
        *,
        name: str | None = None,
    ) -> GradientBuckets:
        """Return the gradient arena of `variables` in buckets, whose reduction overlaps with computation.  Collective.

        Args:
            variables: as in `gradient_arena`; in the order of the model's layers.
            bytes_per_bucket: a bucket is complete when it has so many bytes of gradients.
            name: is compared between the ranks instead of the call site.

        Returns:
            GradientBuckets, for `apply_gradients` instead of pairs.

        Raises:
            OptionError, OptionTypeError: for a number of bytes that is not a positive int; else as `gradient_arena`.
        """
        gradients = self._gradients_of(variables, "gradient_buckets", name, bytes_per_bucket)
        return GradientBuckets(gradients, self.aggregation, bytes_per_bucket)

    def _gradients_of(
        self, variables: Iterable[Variable], method: str, name: str | None, bytes_per_bucket: int = 1
    ) -> GradientArena:
        where = f"{type(self).__name__}.{method}"
        listed: tuple[Any, ...] = tuple(variables)
        strategy = next((var.strategy for var in listed if isinstance(var, Variable)), None) or get_strategy()
        with Call(strategy.extended.communicator.guard, where, called=name) as call:
            checked_count(where, "bytes_per_bucket", bytes_per_bucket)
            for var in listed:
                check_variable(var, strategy, where)
            call.structure = ", ".join(var._key for var in listed)
            call.agree("place gradients", op=self.aggregation.value, options=f"{bytes_per_bucket=}")
            return arena_of(self._arenas, strategy, listed)

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
        strategy: Any = required_context(where).strategy
        with Call(strategy.extended.communicator.guard, where, name) as call:
            try:
                buckets = grads_and_vars if isinstance(grads_and_vars, GradientBuckets) else None
                pairs = grads_and_vars if buckets is None else zip(buckets.values, buckets.variables, strict=True)
                gradients, plan = find_plan(self._plans, pairs, strategy, where)
                arrays = plan.ordinary(gradients, where)
                call.step = 0 if self.iterations is None else int(self.iterations._storage)
                if self.schedule is not None:
                    setting.follow(self, self.schedule, call.step)
                call.structure = f"{self._settings()} for {plan.text}"
                totals = None if buckets is None else buckets._reduced_early(self.aggregation, call)
                trouble = self._step(plan, gradients, arrays, totals, call)
                self._calls += 1
                if self.mirrored_check_steps and self._calls % self.mirrored_check_steps == 0:
                    slotted = [var for var, _ in self._slots.values()]
                    if mirrored := [var for var in (*slotted, *self.variables) if is_mirrored(var)]:
                        strategy.assert_mirrored(mirrored)
                number = self.next_step() - 1 if trouble else 0
            except BaseException:
                self._plans.clear()  # some ranks may have prepared their next step, and others not
                raise
        # After the call, since the program may make the warning an error; on replica 0.
        if trouble and self.nonfinite == "warn" and strategy.replica_id_in_sync_group == 0:
            warn(f"{where}: {trouble}; the step was made, as nonfinite='warn' says (step {number})", NonFiniteWarning)

    def _settings(self) -> str:
        """Return all numbers that a step depends on, in words.  If ranks differed in one, their copies would, too."""
        declared = map(getattr, repeat(self), self._declared, repeat(None))
        settings = (*declared, self.nonfinite, self.aggregation)
        old_settings, words = self._latest_words
        if not (old_settings and all(map(is_, old_settings, settings))):
            numbers = {
                name: value
                for name, value in zip(self._declared, settings, strict=False)
                if isinstance(value, (int, float, np.number))
            }
            self._latest_words = settings, (words := f"{numbers}, nonfinite={self.nonfinite}, {self.aggregation.name}")
        return words

    def _step(self, plan: StepPlan, gradients: Sequence[Any], arrays: Arrays, totals: Arrays, call: Call) -> str:
        """Make a step; return which reduced gradient is not finite, in words.

        Args:
            plan: the plan.
            gradients: this rank's, of any kind.
            arrays: the same gradients as ordinary arrays; None if some gradients are not ordinary.
            totals: the reduced gradients, where buckets have reduced them; else None.
            call: the call that all ranks make.
        """
        # A setting may want slots that earlier steps did not want: a momentum that was 0.
        if self.iterations is None or plan.slot_names is None or self.slot_values.keys() != plan.slot_names:
            with cross_replica(plan.strategy):
                self._step_counter()
                self._make_slots(plan.variables)
            plan.use(self._wanted_slots(plan), self._scratch)
            plan.key = None
            call.expect_more()
        kernel = self._formula() if plan.is_usual else None
        if totals is None and arrays is not None and plan.is_usual:
            self._make_ready(plan, kernel, call)
        if totals is None and arrays is not None and kernel is not None and plan.sliced is not None:
            plan.sliced.run(arrays, kernel, self.aggregation, call)
            self.latest_path, trouble = "sliced", ""
        else:
            rows: dict[int, Array] = {}
            self.latest_path = "plain" if totals is None else "buckets"
            dense, originals = totals, None if totals is not None else gradients  # buckets have been overwritten
            if dense is None:
                dense, rows = self._reduced(plan, gradients, arrays, call)
            reduced, trouble = screened(dense, plan, originals, call, clip=self.global_clipnorm, policy=self.nonfinite)
            if trouble and self.nonfinite == "skip":
                self.latest_path = "skipped"
                self.skipped_steps += 1
                return trouble
            self._update_all(plan, kernel, reduced, rows)
        counter = self._step_counter()
        np.add(counter._storage, 1, out=counter._storage)
        return trouble

    def _make_ready(self, plan: StepPlan, kernel: Kernel | None, call: Call) -> None:
        """Prepare the reduction of ordinary gradients, unless it is prepared already; collective then."""
        extended, reducer = plan.strategy.extended, plan.strategy.extended._reducer
        screens = self.global_clipnorm is not None or self.nonfinite is not None
        key = (kernel is None, screens, self.aggregation, reducer.algorithm, reducer.options)
        if (*key, len(self._arenas)) == plan.key:
            return
        plan.sliced, slots = None, self._wanted_slots(plan)
        size, works_in_place = extended.communicator.size, reducer.algorithm._works_in_place
        is_usual = kernel is not None and not screens and works_in_place
        if is_usual and can_be_sliced(plan.strategy, plan.variables, slots):
            call.agree("prepare an update")
            with cross_replica(plan.strategy):
                gradients = arena_for_step(self._arenas, plan.strategy, plan.variables)
            if gradients is not None and gradients.arena.is_shared:
                plan.sliced = SlicedStep(plan.strategy, gradients, plan.variables, slots, self._scratch)
            call.expect_more()
        plan.reduces_nothing = plan.is_on_host and size == 1 and works_in_place and kernel is not None
        needs_reduction = plan.sliced is None and not plan.reduces_nothing
        plan.reduction = (
            reducer.plan_of_arrays(self.aggregation, plan.layouts, on_gpu=plan.is_on_gpu) if needs_reduction else None
        )
        plan.key = (*key, len(self._arenas))

    def _reduced(
        self, plan: StepPlan, gradients: Sequence[Any], arrays: Arrays, call: Call
    ) -> tuple[Sequence[Array], dict[int, Array]]:
        """Return this rank's reduced gradients as arrays that no update changes, and the rows of sparse gradients."""
        if arrays is not None and plan.reduction is not None:
            return plan.reduction.run(call, arrays), {}
        if arrays is not None and plan.reduces_nothing:
            return plan.changed.apart(arrays), {}
        with cross_replica(plan.strategy):
            pairs = list(zip(gradients, plan.variables, strict=True))
            results = [*map(local_component, plan.strategy.extended.batch_reduce_to(self.aggregation, pairs))]
        rows = {number: result.indices for number, result in enumerate(results) if isinstance(result, IndexedSlices)}
        dense = [as_dense(total, var) for total, var in zip(results, plan.variables, strict=True)]
        return plan.changed.apart(dense), rows if self.only_named_rows else {}

    def _update_all(
        self, plan: StepPlan, kernel: Kernel | None, totals: Sequence[Array], rows: dict[int, Array]
    ) -> None:
        """Update all of this rank's copies; of some variables only these rows."""
        if plan.sparse != rows.keys():
            plan.use(self._wanted_slots(plan), self._scratch, rows.keys())
        if kernel is not None:
            for number, update in plan.updates:
                update.run(kernel, totals[number])
            for numbers, fused in plan.fused:
                fused.run(kernel, [totals[number] for number in numbers])
        for number in range(len(totals)) if kernel is None else plan.singles:
            with cross_replica(plan.strategy):
                var = plan.variables[number]
                arguments = totals[number], self.slots_of(var), rows.get(number)
                plan.strategy.extended.update(var, self.update, args=arguments)

    def _formula(self) -> Kernel | None:
        """Return the next step as a kernel; None where `change` or `update` is overridden, and is called instead."""
        methods = {"_kernel", "change", "update"}
        owners = map(vars, (self, *type(self).__mro__))
        nearest = next(names for names in owners if not names.keys().isdisjoint(methods))
        return self._kernel() if "_kernel" in nearest else None

    def _kernel(self) -> Kernel | None:
        """Return the next step as a kernel that does what `change` and `update` do; None where there is none.

        Where a class overrides `change` or `update` but not this method, its `change` and `update` are called.
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
        change = array_where_it_is(
            self.change(gradient, slots), f"{type(self).__name__}.change", name="what it returned"
        ).astype(var.dtype, copy=False)
        if rows is not None:
            is_named = np.zeros(len(change), bool)
            is_named[host_array(rows)] = True
            unnamed = placed_as(~is_named, change).reshape(-1, *[1] * (change.ndim - 1))
            # CuPy's where() knows no bfloat16, and returns float32.
            change = np.where(unnamed, change.dtype.type(0), change).astype(change.dtype, copy=False)
            for name, slot in slots.items():
                slot.assign(np.where(unnamed, before[name], slot.local_copy()).astype(slot.dtype, copy=False))
        var.assign_sub(change)

    def _state(self, path_of: PathOf) -> dict[Any, Any]:
        values = self.slot_values  # there may be slots that no step uses any more, as of a momentum that is now 0
        slots = {
            path_of(var) or number: {
                name: Leaf(slot, first=values[name]) for name, slot in slots.items() if name in values
            }
            for number, (var, slots) in enumerate(self._slots.values())
        }
        state: dict[Any, Any] = {} if self.iterations is None else {"iterations": Leaf(self.iterations, first=0.0)}
        state |= {"class": type(self).__name__, "names": list(values), "slots": slots}
        state |= {"learning_rate": float(self.learning_rate), "skipped_steps": int(self.skipped_steps)}
        if is_stateful(self.schedule):
            state["schedule"] = self.schedule
        return state

    def _check(self, saved: Mapping[Any, Any], at: ObjectAt) -> str:
        own_class, names = type(self).__name__, sorted(self.slot_values)
        if (saved["class"], sorted(saved["names"])) != (own_class, names):
            return f"{saved['class']} with slots {sorted(saved['names'])} in the checkpoint, {own_class} {names} here"
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
        slotted = [var for var, _ in self._slots.values()]
        if isinstance(path, int):
            return slotted[path] if 0 <= path < len(slotted) else None
        var = at(path)
        return var if isinstance(var, Variable) else None

    def _prepare(self, saved: Mapping[Any, Any], at: ObjectAt, strategy: Any) -> None:
        variables = [self._slotted(path, at) for path in saved["slots"]]
        missing = [var for var in variables if var is not None and id(var) not in self._slots]
        if missing or (self.iterations is None and "iterations" in saved):
            with (missing[0].strategy if missing else strategy).scope():
                self.build(missing)

    def _load(self, saved: Mapping[Any, Any]) -> None:
        self.skipped_steps = saved["skipped_steps"]
        self.__dict__["learning_rate"] = saved["learning_rate"]  # of the latest step, where there is a schedule

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
