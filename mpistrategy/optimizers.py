"""Optimizers that use the public API only: reduce the gradients, then update each variable where it lives.

They do steps 2 to 4 of the update pattern: gradients of all replicas are summed (`batch_reduce_to`), and
`StrategyExtended.update` applies the sum to every copy.  Since gradients are summed, divide the loss by the global
batch size, or pass ``aggregation="MEAN"``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mpistrategy.arrays import Array
from mpistrategy.context import get_replica_context
from mpistrategy.errors import ContextError, EmptyBatchError, OptionError, OptionTypeError, ShapeError, UnsupportedError
from mpistrategy.gradients import clip_by_global_norm
from mpistrategy.options import VariableAggregation
from mpistrategy.strategy import Strategy
from mpistrategy.values import IndexedSlices
from mpistrategy.variables import Variable


class Optimizer:
    """Base: keeps slot variables beside each variable, and applies reduced gradients.

    Args:
        learning_rate: the step size; a positive number.
        aggregation: "SUM" or "MEAN": how the replicas' gradients are combined.
        global_clipnorm: limits the norm of all reduced gradients together; None does not.

    Raises:
        OptionError: for a learning rate or a limit that is not positive.
    """

    slot_names: tuple[str, ...] = ()

    def __init__(self, learning_rate: float, aggregation: str = "SUM", global_clipnorm: float | None = None) -> None:
        if not isinstance(learning_rate, (int, float, np.number)):
            raise OptionTypeError.at(type(self).__name__, found=f"learning_rate={learning_rate!r}", expected="a number")
        if not learning_rate > 0:
            raise OptionError.at(
                type(self).__name__, found=f"learning_rate={learning_rate!r}", expected="a positive number"
            )
        self.learning_rate = learning_rate
        if global_clipnorm is not None and not global_clipnorm > 0:
            raise OptionError.at(
                type(self).__name__, found=f"global_clipnorm={global_clipnorm!r}", expected="a positive number or None"
            )
        self.aggregation = aggregation
        self.global_clipnorm = global_clipnorm
        self.iterations: Variable | None = None
        self._slots: dict[int, tuple[Variable, dict[str, Variable]]] = {}

    def build(self, variables: Iterable[Variable]) -> None:
        """Create the step counter and the slots of `variables`, beside them.  Collective; cross-replica context."""
        for var in variables:
            self._slots_of(var)

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Variable]]) -> None:
        """Combine the replicas' gradients and update the variables.  Collective; called in a step function.

        Args:
            grads_and_vars: pairs of this replica's gradient (an array or IndexedSlices of the variable's shape) and
                the variable.

        Raises:
            ContextError: in cross-replica context.
            EmptyBatchError: when there are no pairs.
            CollectiveMismatchError: when the ranks' gradients differ in number, dtype or shape.
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
        with context.strategy.extended.communicator.guard.call(where):
            pairs = list(grads_and_vars)
            if not pairs:
                raise EmptyBatchError.at(where, found="no gradients", expected="at least one (gradient, variable) pair")
            # All of them before the first update: a refused step must not leave half of the variables changed.
            for gradient, var in pairs:
                _check_gradient(gradient, var, where)
            context.merge_call(self._merge, args=(pairs,))

    def _merge(self, strategy: Strategy, pairs: Sequence[tuple[Any, Variable]]) -> None:
        extended = strategy.extended
        reduced = extended.batch_reduce_to(self.aggregation, pairs)
        gradients = [_dense(gradient[...], var) for gradient, (_, var) in zip(reduced, pairs, strict=True)]
        if self.global_clipnorm is not None:
            gradients, _ = clip_by_global_norm(gradients, self.global_clipnorm)
        for gradient, (_, var) in zip(gradients, pairs, strict=True):
            slots = self._slots_of(var)
            extended.update(var, self._update, args=(gradient,), kwargs={"slots": slots})
        step = self._step_counter()
        extended.update(step, lambda counter: counter.assign_add(1))

    def _update(self, var: Variable, gradient: Array, slots: dict[str, Variable]) -> None:
        change = self._change(gradient, slots)
        var.assign_sub(change.astype(var.dtype, copy=False))

    def _change(self, gradient: Array, slots: dict[str, Variable]) -> Array:
        """Return what to subtract from the variable, having updated the slots."""
        raise UnsupportedError.at(type(self).__name__, found="no _change", expected="one in your subclass")

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
        self._step_counter()
        known = self._slots.get(id(var))
        if known is None:
            slots = {}
            for name in self.slot_names:
                slots[name] = Variable(
                    np.zeros(var.shape, var.dtype),
                    trainable=False,
                    name=f"{var.name}/{type(self).__name__}/{name}",
                )
                slots[name].colocated_with = var
            known = self._slots[id(var)] = (var, slots)
        return known[1]


class SGD(Optimizer):
    """Gradient descent: ``v = momentum * v + g``; the variable loses ``learning_rate * v`` (with nesterov,
    ``learning_rate * (g + momentum * v)``).

    Args:
        learning_rate: the step size.
        momentum: from 0 to 1; 0 keeps no slot.
        nesterov: look ahead by one momentum step.
        aggregation: "SUM" or "MEAN".
        global_clipnorm: limits the norm of all reduced gradients together; None does not.
    """

    def __init__(
        self,
        learning_rate: float = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        aggregation: str = "SUM",
        global_clipnorm: float | None = None,
    ) -> None:
        super().__init__(learning_rate, aggregation, global_clipnorm)
        if not 0 <= momentum <= 1:
            raise OptionError.at("SGD", found=f"momentum={momentum!r}", expected="a number from 0 to 1")
        self.momentum = momentum
        self.nesterov = nesterov
        self.slot_names = ("momentum",) if momentum else ()

    def _change(self, gradient: Array, slots: dict[str, Variable]) -> Array:
        if not self.momentum:
            return np.asarray(self.learning_rate * gradient)
        velocity = slots["momentum"]
        velocity.assign(self.momentum * velocity + gradient)
        step = gradient + self.momentum * velocity if self.nesterov else velocity[...]
        return np.asarray(self.learning_rate * step)


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

    slot_names = ("m", "v")

    def __init__(
        self,
        learning_rate: float = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        aggregation: str = "SUM",
        global_clipnorm: float | None = None,
    ) -> None:
        super().__init__(learning_rate, aggregation, global_clipnorm)
        for name, beta in (("beta_1", beta_1), ("beta_2", beta_2)):
            if not 0 <= beta < 1:
                raise OptionError.at("Adam", found=f"{name}={beta!r}", expected="a number from 0 to below 1")
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon

    def _change(self, gradient: Array, slots: dict[str, Variable]) -> Array:
        m, v = slots["m"], slots["v"]
        m.assign(self.beta_1 * m + (1 - self.beta_1) * gradient)
        v.assign(self.beta_2 * v + (1 - self.beta_2) * gradient * gradient)
        t = int(self._step_counter()) + 1
        size = self.learning_rate * float(np.sqrt(1 - self.beta_2**t)) / (1 - self.beta_1**t)
        return np.asarray(size * m / (np.sqrt(v) + self.epsilon))


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
        aggregation: str = "SUM",
        global_clipnorm: float | None = None,
    ) -> None:
        super().__init__(learning_rate, beta_1, beta_2, epsilon, aggregation, global_clipnorm)
        if not weight_decay >= 0:
            raise OptionError.at("AdamW", found=f"weight_decay={weight_decay!r}", expected="a number from 0 on")
        self.weight_decay = weight_decay

    def _update(self, var: Variable, gradient: Array, slots: dict[str, Variable]) -> None:
        var.assign_sub((self.learning_rate * self.weight_decay * var).astype(var.dtype, copy=False))
        super()._update(var, gradient, slots)


def _dense(gradient: Any, var: Variable) -> Array:
    if isinstance(gradient, IndexedSlices):
        dense = np.zeros(var.shape, var.dtype)
        np.add.at(dense, np.asarray(gradient.indices), np.asarray(gradient.values))
        return dense
    return np.asarray(gradient).astype(var.dtype, copy=False)


def _check_gradient(gradient: Any, var: Any, where: str) -> None:
    if not isinstance(var, Variable) or var.dtype.kind in "biu":
        raise OptionError.at(
            where,
            found=repr(var),
            expected="a Variable of a floating or complex dtype",
            fix="Pass (gradient, variable) pairs, in this order.",
        )
    shape = None if isinstance(gradient, IndexedSlices) else np.shape(gradient)
    if shape is not None and shape != var.shape:
        raise ShapeError.at(
            where, found=f"a gradient of shape {shape} for {var.name!r}", expected=f"the variable's shape {var.shape}"
        )
