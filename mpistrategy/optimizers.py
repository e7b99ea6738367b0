"""Optimizers that use the public API only: reduce the gradients, then update each variable where it lives.

They do steps 2 to 4 of the update pattern: gradients of all replicas are summed (`batch_reduce_to`), and
`StrategyExtended.update` applies the sum to every copy.  Since gradients are summed, divide the loss by the global
batch size, or pass ``aggregation="MEAN"``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from mpistrategy.arrays import Array
from mpistrategy.context import get_replica_context, get_strategy
from mpistrategy.errors import ContextError, EmptyBatchError, OptionError, UnsupportedError
from mpistrategy.gradients import clip_by_global_norm
from mpistrategy.optimizer_checks import check_variable, checked_number, checked_pairs, not_negative, positive
from mpistrategy.options import ReduceOp, VariableAggregation
from mpistrategy.strategy import Strategy
from mpistrategy.values import IndexedSlices, local_component
from mpistrategy.variables import Variable


class Optimizer:
    """Base: keeps slot variables beside each variable, and applies reduced gradients.

    A subclass says in `slot_values` which slots it keeps for each variable, and in `change` what a step subtracts.

    Args:
        learning_rate: the step size; a positive number.
        aggregation: "SUM" or "MEAN": how the replicas' gradients are combined.
        global_clipnorm: limits the norm of all reduced gradients together; None does not.

    Attributes:
        iterations: the number of steps made, a variable; None before the first.  May be set before that, to count
            in a variable of one's own.

    Raises:
        OptionError: for a learning rate or a limit that is not positive, and for another aggregation.
        OptionTypeError: for what is no number.
    """

    #: The slots of each variable, and the number that each is filled with at first.
    slot_values: Mapping[str, float] = {}
    #: Whether a sparse gradient changes only the rows that it names, in the variable and in its slots.
    only_named_rows: ClassVar[bool] = False

    def __init__(
        self, learning_rate: float, aggregation: ReduceOp | str = "SUM", global_clipnorm: float | None = None
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
        self.iterations: Variable | None = None
        self._slots: dict[int, tuple[Variable, dict[str, Variable]]] = {}

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
        for var in listed:
            self._slots_of(var)

    def slots_of(self, var: Variable) -> dict[str, Variable]:
        """Return the slot variables of `var` by name; empty before its first step, or `build`."""
        return dict(self._slots.get(id(var), (var, {}))[1])

    def change(self, gradient: Array, slots: Mapping[str, Variable]) -> Array:
        """Override: update the slots and return what to subtract from the variable; in update context.

        Args:
            gradient: the reduced gradient, of the variable's shape and dtype.
            slots: the variable's slots by name.
        """
        raise UnsupportedError.at(type(self).__name__, found="no change()", expected="one in your subclass")

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Variable]]) -> None:
        """Combine the replicas' gradients and update the variables.  Collective; called in a step function.

        Args:
            grads_and_vars: pairs of this replica's gradient (an array or IndexedSlices of the variable's shape, or
                None for a variable that this step leaves alone) and the variable.

        Raises:
            ContextError: in cross-replica context.
            EmptyBatchError: when there are no gradients.
            OptionError, OptionTypeError, ShapeError, DTypeError: for gradients and variables that do not fit.
            CollectiveMismatchError: when the ranks' gradients differ in number, dtype or shape.
            All on every rank, and before anything has changed.
        """
        where = f"{type(self).__name__}.apply_gradients"
        context = get_replica_context()
        if context is None:
            raise ContextError.at(
                where,
                found="a call in cross-replica context",
                expected="a call in a step function",
                fix="Use strategy.run.",
            )
        with context.strategy.extended.communicator.guard.call(where) as call:
            listed = checked_pairs(grads_and_vars, context.strategy, where)
            pairs = [(gradient, var) for gradient, var in listed if gradient is not None]
            if not pairs:
                raise EmptyBatchError.at(where, found="no gradients", expected="at least one (gradient, variable) pair")
            if self.iterations is not None:
                check_variable(self.iterations, context.strategy, where)
            # Gradients of one shape for two variables must not meet each other.
            variables = ", ".join(f"{i}: {var.key}" for i, (g, var) in enumerate(listed) if g is not None)
            call.structure = f"{self._settings()} for {variables}"
            context.merge_call(self._merge, args=(pairs,))

    def _settings(self) -> str:
        """Return all numbers that a step depends on: ranks that differ in one would drift apart."""
        numbers = {name: value for name, value in sorted(vars(self).items()) if isinstance(value, (int, float))}
        steps = 0 if self.iterations is None else self.iterations.local_copy().tolist()
        return f"{numbers}, global_clipnorm={self.global_clipnorm}, {self.aggregation.name}, step {steps}"

    def _merge(self, strategy: Strategy, pairs: Sequence[tuple[Any, Variable]]) -> None:
        extended = strategy.extended
        counter = self._step_counter()
        slots = [self._slots_of(var) for _, var in pairs]
        reduced = [local_component(total) for total in extended.batch_reduce_to(self.aggregation, pairs)]
        gradients = [_dense(total, var) for total, (_, var) in zip(reduced, pairs, strict=True)]
        if self.global_clipnorm is not None:
            gradients, _ = clip_by_global_norm(gradients, self.global_clipnorm)
        for gradient, total, beside, (_, var) in zip(gradients, reduced, slots, pairs, strict=True):
            rows = total.indices if self.only_named_rows and isinstance(total, IndexedSlices) else None
            extended.update(var, self.update, args=(gradient, beside, rows))
        extended.update(counter, lambda steps: steps.assign_add(1))

    def update(self, var: Variable, gradient: Array, slots: dict[str, Variable], rows: Array | None) -> None:
        """Change one variable; in update context.  Override `change` instead, unless that is not enough.

        Args:
            var: the variable.
            gradient: its reduced gradient, dense, of its shape and dtype.
            slots: its slots by name.
            rows: the only rows to change; None for all.
        """
        before = {name: slot.local_copy() for name, slot in slots.items()} if rows is not None else {}
        change = np.asarray(self.change(gradient, slots)).astype(var.dtype, copy=False)
        if rows is not None:
            others = np.ones(len(change), bool)
            others[rows] = False
            change = np.where(others.reshape(-1, *[1] * (change.ndim - 1)), change.dtype.type(0), change)
            for name, slot in slots.items():
                kept = slot.local_copy()
                kept[others] = before[name][others]
                slot.assign(kept)
        var.assign_sub(change)

    def _step_counter(self) -> Variable:
        if self.iterations is None:
            self.iterations = Variable(
                np.int64(0),
                trainable=False,
                name=f"{type(self).__name__}/iterations",
                aggregation=VariableAggregation.ONLY_FIRST_REPLICA,
            )
        return self.iterations

    def _slots_of(self, var: Variable) -> dict[str, Variable]:
        known = self._slots.get(id(var))
        if known is None:
            known = self._slots[id(var)] = (var, {name: self._new_slot(name, var) for name in self.slot_values})
        return known[1]

    def _new_slot(self, name: str, var: Variable) -> Variable:
        def create() -> Variable:
            value = np.full(var.shape, self.slot_values[name], var.dtype)
            return Variable(value, trainable=False, name=f"{var.name}/{type(self).__name__}/{name}")

        strategy = get_strategy()
        if strategy.is_default:
            return create()
        with strategy.extended.colocate_vars_with(var):
            return create()


class SGD(Optimizer):
    """Gradient descent: ``v = momentum * v + g``; the variable loses ``learning_rate * v`` (with nesterov,
    ``learning_rate * (g + momentum * v)``).  A sparse gradient moves only the rows that it names, as in TensorFlow.

    Args:
        learning_rate: the step size.
        momentum: from 0 to 1; 0 keeps no slot.
        nesterov: look ahead by one momentum step.
        aggregation: "SUM" or "MEAN".
        global_clipnorm: limits the norm of all reduced gradients together; None does not.
    """

    only_named_rows = True

    def __init__(
        self,
        learning_rate: float = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        aggregation: ReduceOp | str = "SUM",
        global_clipnorm: float | None = None,
    ) -> None:
        super().__init__(learning_rate, aggregation, global_clipnorm)
        self.momentum = checked_number(
            type(self).__name__, "momentum", momentum, "a number from 0 to 1", lambda number: 0 <= number <= 1
        )
        self.nesterov = nesterov
        self.slot_values = {"momentum": 0.0} if momentum else {}

    def change(self, gradient: Array, slots: Mapping[str, Variable]) -> Array:
        """Update the momentum; return ``learning_rate`` times the step."""
        rate = float(self.learning_rate)
        if not self.momentum:
            return np.asarray(rate * gradient)
        velocity = slots["momentum"]
        _store(velocity, self.momentum * velocity + gradient)
        step = gradient + self.momentum * velocity if self.nesterov else velocity[...]
        return np.asarray(rate * step)


class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015, with the bias correction in the step size, as TensorFlow does it):
    ``m = b1 m + (1 - b1) g``, ``v = b2 v + (1 - b2) g^2``, and the variable loses
    ``learning_rate * sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + epsilon)``.

    Args:
        learning_rate: the step size.
        beta_1: the decay of m.
        beta_2: the decay of v.
        epsilon: keeps the quotient finite.
        aggregation: "SUM" or "MEAN".
        global_clipnorm: limits the norm of all reduced gradients together; None does not.
    """

    slot_values: Mapping[str, float] = {"m": 0.0, "v": 0.0}

    def __init__(
        self,
        learning_rate: float = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        aggregation: ReduceOp | str = "SUM",
        global_clipnorm: float | None = None,
    ) -> None:
        super().__init__(learning_rate, aggregation, global_clipnorm)
        where = type(self).__name__
        decays = [("beta_1", beta_1), ("beta_2", beta_2)]
        self.beta_1, self.beta_2 = (
            checked_number(where, name, beta, "a number from 0 to below 1", lambda number: 0 <= number < 1)
            for name, beta in decays
        )
        self.epsilon = checked_number(where, "epsilon", epsilon, "a number from 0 on", not_negative)

    def change(self, gradient: Array, slots: Mapping[str, Variable]) -> Array:
        """Update m and v; return the step."""
        m, v = slots["m"], slots["v"]
        _store(m, self.beta_1 * m + (1 - self.beta_1) * gradient)
        _store(v, self.beta_2 * v + (1 - self.beta_2) * gradient * np.conj(gradient))
        size = self.step_size(int(self._step_counter()) + 1)
        return np.asarray(size * m / (np.sqrt(v) + self.epsilon))

    def step_size(self, t: int) -> float:
        """Return the learning rate of step `t` (from 1 on), with the correction of the bias of m and v."""
        return float(self.learning_rate) * float(np.sqrt(1 - self.beta_2**t)) / (1 - self.beta_1**t)


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019): before Adam's step the variable loses
    ``learning_rate * weight_decay * variable``.

    Args:
        learning_rate: the step size.
        weight_decay: from 0 on.
        beta_1: the decay of m.
        beta_2: the decay of v.
        epsilon: keeps the quotient finite.
        aggregation: "SUM" or "MEAN".
        global_clipnorm: limits the norm of all reduced gradients together; None does not.
    """

    def __init__(
        self,
        learning_rate: float = 0.001,
        weight_decay: float = 0.004,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        aggregation: ReduceOp | str = "SUM",
        global_clipnorm: float | None = None,
    ) -> None:
        super().__init__(learning_rate, beta_1, beta_2, epsilon, aggregation, global_clipnorm)
        self.weight_decay = checked_number(
            type(self).__name__, "weight_decay", weight_decay, "a number from 0 on", not_negative
        )

    def update(self, var: Variable, gradient: Array, slots: dict[str, Variable], rows: Array | None) -> None:
        """Let the variable decay, all of it, before Adam's step."""
        decay = float(self.learning_rate) * self.weight_decay
        var.assign_sub(np.asarray(decay * var).astype(var.dtype, copy=False))
        super().update(var, gradient, slots, rows)


def _store(slot: Variable, value: Any) -> None:
    # bfloat16 times a Python number is float32.
    slot.assign(np.asarray(value).astype(slot.dtype, copy=False))


def _dense(gradient: Any, var: Variable) -> Array:
    if isinstance(gradient, IndexedSlices):
        dense = np.zeros(var.shape, var.dtype)
        np.add.at(dense, np.asarray(gradient.indices), np.asarray(gradient.values).astype(var.dtype, copy=False))
        return dense
    return np.asarray(gradient).astype(var.dtype, copy=False)
