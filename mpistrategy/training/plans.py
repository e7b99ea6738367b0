"""What an optimizer keeps for its variables: their slots, and a plan for each list of variables of a step.

A plan is found by one look-up.  Its variables have been checked.  After the first step with ordinary gradients it also
holds the prepared step: how gradients are reduced, and how copies are updated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import is_on_device, reducible
from mpistrategy.arrays.dtypes import Array
from mpistrategy.arrays.values import IndexedSlices, Mirrored, contribution, local_component
from mpistrategy.errors import EmptyBatchError, OptionError, OptionTypeError
from mpistrategy.gradients import scaled_by
from mpistrategy.mpi.contract.call import Call
from mpistrategy.objects.text import encoded
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.plan import ArraysPlan
from mpistrategy.strategy.current import get_strategy
from mpistrategy.strategy.extended import StrategyExtended as _Extended
from mpistrategy.strategy.strategy import Strategy
from mpistrategy.training.checks import apart_from, check_gradient, check_variable
from mpistrategy.training.gpu.updates import FusedUpdate, can_be_fused
from mpistrategy.training.kernels import FlatUpdate, Kernel, Scratch, flat_update, has_kernel
from mpistrategy.training.sliced.step import SlicedStep, SlicedSteps
from mpistrategy.variables.variable import Variable

#: How many variables of a step are named when ranks compare their calls.
_MOST_NAMED = 12
_PAIRS = "an iterable of (gradient, variable) pairs"
_dtype_of, _shape_of = attrgetter("dtype"), attrgetter("shape")
_NONE, _ARRAYS = type(None), {np.ndarray}


class Slots:
    """The slots of one optimizer: further variables for each of its variables, such as the momentum.

    Args:
        owner: the name of the optimizer's class, for the slots' names.

    Attributes:
        by_id: the variables that slots were made for, in order, each with its slots by name; by the variable's id.
            Also those of an optimizer that keeps no slots.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        # With the variables themselves, so that no other object gets their ids.
        self.by_id: dict[int, tuple[Variable, dict[str, Variable]]] = {}

    def of(self, var: Variable) -> dict[str, Variable]:
        """Return the slots of `var` by name; empty before they are made."""
        known = self.by_id.get(id(var))
        return dict(known[1]) if known is not None else {}

    def make(self, variables: Sequence[Variable], values: Mapping[str, float]) -> None:
        """Make the slots that are missing, filled with `values`.  Collective; in the strategy's scope or a step."""
        missing = {id(var): var for var in variables if id(var) not in self.by_id}
        made: dict[int, dict[str, Variable]] = {number: {} for number in missing}
        # Slot by slot: the slots of one name then follow one another in memory, as their variables do.
        for name, value in values.items():
            for number, var in missing.items():
                made[number][name] = self._new(name, value, var)
        self.by_id.update({number: (var, made[number]) for number, var in missing.items()})

    def _new(self, name: str, value: float, var: Variable) -> Variable:
        def create() -> Variable:
            filled = np.broadcast_to(np.asarray(value, var.dtype), var.shape)
            return Variable(filled, trainable=False, name=f"{var.name}/{self._owner}/{name}")

        strategy = get_strategy()
        if strategy._is_default:
            return create()
        with strategy.extended.colocate_vars_with(var):
            return create()


@dataclass(frozen=True)
class PlainStep:
    """A prepared step in which each rank updates its own copies with a kernel.

    Attributes:
        reduction: of the gradients; None for one replica.
        updates: one for each variable.
        changed: the memory of the variables and of their slots.
    """

    reduction: ArraysPlan | None
    updates: Sequence[FlatUpdate]
    changed: Sequence[Array]

    def totals(self, gradients: Sequence[Array], call: Call) -> list[Array]:
        """Return the reduced gradients.  None of them shares memory with what the step changes."""
        return apart_from(self.changed, gradients) if self.reduction is None else self.reduction.run(call, gradients)

    def update(self, totals: Sequence[Array], kernel: Kernel) -> None:
        """Update this rank's copies."""
        for update, total in zip(self.updates, totals, strict=True):
            update.run(kernel, total)


@dataclass(eq=False)
class StepPlan:
    """The plan of a step: its variables that have gradients, which have been checked.

    Attributes:
        variables: the variables, in the order of the pairs.
        strategy: the strategy that keeps them.
        text: names them when ranks compare their calls.
        said: the settings of the latest step, and these with `text`: what ranks compare.
        layouts: their dtypes and shapes.
        named: these, and the variables without gradients.
        has_slots: whether their slots have been made.
        prepared: the step of ordinary gradients; None where there is none.
        counter: the step counter that `prepared` increments.
        count: its memory.
        key: what `prepared` depends on besides the variables: `Optimizer` compares it at each step.
    """

    variables: tuple[Variable, ...]
    strategy: Strategy
    text: str
    said: tuple[str, str] = ("", "")
    layouts: tuple[tuple[np.dtype[Any], tuple[int, ...]], ...] = field(init=False)
    named: tuple[Variable, ...] = ()
    has_slots: bool = False
    prepared: SlicedStep | PlainStep | None = None
    counter: Variable | None = None
    count: Array = field(init=False)
    key: Any = None

    def __post_init__(self) -> None:
        self.layouts = tuple((var.dtype, var.shape) for var in self.variables)

    @property
    def has_kernels(self) -> bool:
        """Whether kernels take all the variables' dtypes."""
        return all(has_kernel(dtype) for dtype, _ in self.layouts)

    def in_words(self, settings: str) -> str:
        """Return the settings of a step and the variables, as ranks compare them."""
        if self.said[0] is not settings:
            self.said = settings, f"{settings} for {self.text}"
        return self.said[1]

    def ordinary(self, gradients: Sequence[Any], where: str) -> list[Array] | None:
        """Return gradients as arrays of their variables' dtypes; None where they need another reduction."""
        arrays = []
        for gradient, (dtype, _) in zip(gradients, self.layouts, strict=True):
            array = gradient
            if type(gradient) is not np.ndarray or gradient.dtype is not dtype:
                component = contribution(gradient)
                if isinstance(gradient, Mirrored) or isinstance(component, IndexedSlices) or is_on_device(component):
                    return None
                array = reducible(component, where)
                if array.dtype != dtype:
                    return None
            arrays.append(array)
        return arrays


class StepPlans:
    """The plans of one optimizer's latest steps.

    Args:
        slots: the optimizer's.

    Attributes:
        sliced: its sliced steps and gradient arenas.
        calls: how many steps it was asked for.
        latest_path: see `Optimizer.latest_path`.
    """

    _MOST = 32

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._scratch = Scratch()
        self.sliced: SlicedSteps = SlicedSteps(self._scratch)
        self.calls: int = 0
        self.latest_path: str = ""
        self._updates: dict[int, FlatUpdate] = {}
        self._fused: dict[tuple[int, ...], FusedUpdate] = {}
        self._known: dict[tuple[int, ...], StepPlan] = {}

    def find(self, grads_and_vars: Any, strategy: Strategy, where: str) -> tuple[Sequence[Any], StepPlan, bool]:
        """Return the gradients that are not None, and the plan of their variables.  Raise unless they fit.

        The last result says whether all gradients are ordinary arrays of their variables' dtypes.
        """
        pairs = _listed(grads_and_vars, where)
        gradients: Sequence[Any] = ()
        try:
            gradients, variables = zip(*pairs, strict=True)
            kinds, key = {*map(type, gradients)}, tuple(map(id, variables))  # the plan keeps all of them alive
            if _NONE in kinds:
                key = tuple([id(var) if gradient is not None else -id(var) for gradient, var in pairs])
        except (TypeError, ValueError):
            kinds, key = set(), ()  # what are no pairs has no plan
        plan = self._known.get(key)
        if plan is None or plan.strategy is not strategy:
            plan = _new_plan(pairs, strategy, where)
            plan.named = tuple(var for _, var in pairs)
            while len(self._known) >= self._MOST:
                del self._known[next(iter(self._known))]
            self._known[key] = plan
        if kinds == _ARRAYS:
            layouts = zip(map(_dtype_of, gradients), map(_shape_of, gradients), strict=True)
            if plan.layouts == tuple(layouts):
                return gradients, plan, True
        gradients = [gradient for gradient in gradients if gradient is not None]
        for gradient, var in zip(gradients, plan.variables, strict=True):
            check_gradient(local_component(gradient), var, where)
        return gradients, plan, False

    def prepare(
        self, plan: StepPlan, kernel: Kernel | None, counter: Variable, op: ReduceOp, screens: bool, call: Call
    ) -> None:
        """Prepare the step of a plan for ordinary gradients, where there can be one.  Collective; all ranks alike.

        Args:
            plan: the plan.
            kernel: the step; None for an optimizer whose `change` or `update` is called.
            counter: the step counter.
            op: SUM or MEAN.
            screens: whether reduced gradients are clipped or checked before anything changes.
            call: the call that all ranks make.
        """
        plan.prepared, plan.counter, plan.key = None, counter, None
        extended, variables = plan.strategy.extended, plan.variables
        changed = [v.local_view for var in variables for v in (var, *self._slots.of(var).values())]
        on_host = all(type(array) is np.ndarray for array in (*changed, counter.local_view))
        counts = counter.dtype.kind in "iuf" and counter.shape == ()
        if kernel is None or not (on_host and counts and all(has_kernel(var.dtype) for var in variables)):
            return
        if (type(extended).batch_reduce_to, type(extended).update) != (_Extended.batch_reduce_to, _Extended.update):
            return
        alone, in_rank_order = extended.communicator.size == 1, extended._reducer.algorithm._in_rank_order
        if in_rank_order and not alone and not screens:
            plan.prepared = self.sliced.step(plan, variables, self._slots.of, kernel, plan.strategy, call)
        if plan.prepared is None:
            needs_none = alone and in_rank_order
            reduction = None if needs_none else extended._reducer.plan_of_arrays(op, plan.layouts)
            if reduction is None and not needs_none:
                return
            plan.prepared = PlainStep(reduction, [*map(self.flat_update, variables)], changed)
        plan.count = counter._storage

    def update(
        self, kernel: Kernel, gradients: Sequence[Array], variables: Sequence[Variable], scale: Any = None
    ) -> None:
        """Make a step of variables in update context; those in GPU memory together.

        Args:
            kernel: the step.
            gradients: of the variables' shapes and dtypes.
            variables: of dtypes that have kernels.
            scale: see `FusedUpdate.run`.
        """
        together: dict[Any, list[int]] = {}
        for number, var in enumerate(variables):
            if can_be_fused(var.local_view):
                together.setdefault(var.dtype, []).append(number)
        left = set(range(len(variables)))
        for numbers in together.values():
            chosen = [variables[number] for number in numbers]
            if self._fused_update(chosen).run(kernel, [gradients[number] for number in numbers], scale):
                left.difference_update(numbers)
        others = [gradients[number] for number in sorted(left)]
        if scale is not None and others:
            others = scaled_by(others, float(scale.get()[0]))
        for number, gradient in zip(sorted(left), others, strict=True):
            self.flat_update(variables[number]).run(kernel, gradient)

    def _fused_update(self, variables: Sequence[Variable]) -> FusedUpdate:
        key = tuple(map(id, variables))  # plans and slots keep them alive
        found = self._fused.get(key)
        if found is None:
            slots = [{name: s._storage for name, s in self._slots.of(var).items()} for var in variables]
            while len(self._fused) >= self._MOST:
                del self._fused[next(iter(self._fused))]
            found = self._fused[key] = FusedUpdate([var._storage for var in variables], slots)
        return found

    def flat_update(self, var: Variable) -> FlatUpdate:
        """Return the update of one variable by kernels."""
        found = self._updates.get(id(var))
        if found is None:
            slots = {name: slot._storage for name, slot in self._slots.of(var).items()}
            found = self._updates[id(var)] = flat_update(var._storage, slots, self._scratch)
        return found


def _listed(grads_and_vars: Any, where: str) -> list[Any]:
    try:
        return list(grads_and_vars)
    except TypeError as error:
        raise OptionTypeError.at(where, found=f"{grads_and_vars!r}", expected=_PAIRS) from error


def _new_plan(pairs: list[Any], strategy: Strategy, where: str) -> StepPlan:
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise OptionTypeError.at(where, found=f"the element {pair!r}", expected=_PAIRS)
        gradient, var = pair
        check_variable(var, strategy, where)
        if var.dtype.kind in "biu":
            raise OptionError.at(where, found=repr(var), expected="a Variable of a floating or complex dtype")
        if gradient is not None:
            check_gradient(local_component(gradient), var, where)
    # Numbered: two variables may have one shape, and their gradients must not be added to each other.
    numbered = [(number, var) for number, (gradient, var) in enumerate(pairs) if gradient is not None]
    if not numbered:
        raise EmptyBatchError.at(where, found="no gradients", expected="at least one (gradient, variable) pair")
    text = _shortened([f"{number}: {var._key}" for number, var in numbered])
    return StepPlan(tuple(var for _, var in numbered), strategy, text)


def _shortened(names: list[str]) -> str:
    """Return a text for these names alone.  It is compared at every step, so of many names it has only some."""
    if len(names) <= _MOST_NAMED:
        return ", ".join(names)
    import hashlib  # here, since it loads OpenSSL: `import mpistrategy` stays quick

    digest = hashlib.blake2b(encoded("\n".join(names)), digest_size=8).hexdigest()
    half = _MOST_NAMED // 2
    return f"{', '.join(names[:half])}, ..., {', '.join(names[-half:])} ({len(names)} variables, {digest})"
