"""The optimizers: SGD, Adam and AdamW; `mpistrategy.training.optimizer` describes a step.

Gradients are summed over the replicas, so divide the loss by the global batch size, or pass ``aggregation="MEAN"``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from mpistrategy.arrays.convert import any_array
from mpistrategy.arrays.dtypes import Array
from mpistrategy.objects.other_names import OF_OPTIMIZERS, refuses
from mpistrategy.objects.settings import Setting, checked_switch, number
from mpistrategy.options import NonFinite, SumOrMean
from mpistrategy.schedules import Schedule
from mpistrategy.training import formulas
from mpistrategy.training.optimizer import Optimizer
from mpistrategy.variables.variable import Variable

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Optimizer",
]


def __dir__() -> list[str]:
    return list(__all__)


#: What the decay of a mean must be.
_DECAY = "a number from 0 to below 1", lambda value: 0 <= value < 1


class SGD(Optimizer):
    """Gradient descent, as `keras.optimizers.SGD` (keras.io/api/optimizers/sgd) does it: with momentum,
    ``v = momentum * v - learning_rate * g``, and v is added to the variable (with nesterov,
    ``momentum * v - learning_rate * g``, with the new v).  So v keeps the learning rates of the steps before, where
    torch's SGD multiplies all of v by the present one.  A sparse gradient changes only the rows that it names, as in
    TensorFlow.

    Args:
        learning_rate: the step size, or a schedule of it.
        momentum: from 0 to 1; with 0 there is no slot.
        nesterov: whether to use Nesterov momentum.
        aggregation: "SUM" or "MEAN".
        global_clipnorm: limits the norm of all reduced gradients together; None does not.
        mirrored_check_steps: every so many steps, make sure that all ranks' copies are equal; 0 never does.
        nonfinite: what to do if reduced gradients are not finite: "raise", "skip" the step, "warn", or None.
    """

    only_named_rows = True
    momentum: Setting[float] = number("a number from 0 to 1", lambda value: 0 <= value <= 1)
    nesterov: Setting[bool] = Setting(checked_switch)

    @refuses(**OF_OPTIMIZERS)
    def __init__(
        self,
        learning_rate: float | Schedule = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        *,
        aggregation: SumOrMean = "SUM",
        global_clipnorm: float | None = None,
        mirrored_check_steps: int = 0,
        nonfinite: NonFinite | None = None,
    ) -> None:
        super().__init__(
            learning_rate,
            aggregation=aggregation,
            global_clipnorm=global_clipnorm,
            mirrored_check_steps=mirrored_check_steps,
            nonfinite=nonfinite,
        )
        self.momentum = momentum
        self.nesterov = nesterov

    @property
    def slot_values(self) -> Mapping[str, float]:  # type: ignore[override]
        """The momentum, which begins at 0; none where it has no use."""
        return {"momentum": 0.0} if self.momentum else {}

    def change(self, gradient: Array, slots: Mapping[str, Variable]) -> Array:
        """Update the momentum; return the change to subtract."""
        return formulas.change_of(SGD._kernel(self), gradient, slots)

    def _kernel(self) -> formulas.Kernel:
        rate, decay = float(self.learning_rate), float(self.momentum)
        if not decay:
            return partial(formulas.sgd, rate=rate)
        return partial(formulas.momentum, rate=rate, decay=decay, nesterov=bool(self.nesterov))


class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015, with the bias correction in the step size, as `keras.optimizers.Adam` does it, where
    epsilon is the "epsilon hat" of the paper's section 2):
    ``m = b1 m + (1 - b1) g``, ``v = b2 v + (1 - b2) g^2``, and the variable loses
    ``learning_rate * sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + epsilon)``.

    Args:
        learning_rate: the step size, or a schedule of it.
        beta_1: the decay of m.
        beta_2: the decay of v.
        epsilon: added to the divisor.
        aggregation: "SUM" or "MEAN".
        global_clipnorm: limits the norm of all reduced gradients together; None does not.
        mirrored_check_steps: every so many steps, make sure that all ranks' copies are equal; 0 never does.
        nonfinite: what to do if reduced gradients are not finite: "raise", "skip" the step, "warn", or None.
    """

    slot_values: Mapping[str, float] = {"m": 0.0, "v": 0.0}
    beta_1: Setting[float] = number(*_DECAY)
    beta_2: Setting[float] = number(*_DECAY)
    epsilon: Setting[float] = number()

    @refuses(**OF_OPTIMIZERS)
    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        *,
        aggregation: SumOrMean = "SUM",
        global_clipnorm: float | None = None,
        mirrored_check_steps: int = 0,
        nonfinite: NonFinite | None = None,
    ) -> None:
        super().__init__(
            learning_rate,
            aggregation=aggregation,
            global_clipnorm=global_clipnorm,
            mirrored_check_steps=mirrored_check_steps,
            nonfinite=nonfinite,
        )
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon

    def change(self, gradient: Array, slots: Mapping[str, Variable]) -> Array:
        """Update m and v; return the step."""
        return formulas.change_of(Adam._kernel(self), gradient, slots)

    def _kernel(self) -> formulas.Kernel:
        size = self.step_size(self.next_step())
        return partial(formulas.adam, size=size, beta_1=self.beta_1, beta_2=self.beta_2, epsilon=self.epsilon)

    def step_size(self, t: int) -> float:
        """Override: return the learning rate of step `t` (from 1 on), with the correction of the bias of m and v."""
        return float(self.learning_rate) * float(np.sqrt(1 - self.beta_2**t)) / (1 - self.beta_1**t)


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), as `keras.optimizers.AdamW` does it: before
    Adam's step the variable loses ``learning_rate * weight_decay * variable``.

    Args:
        learning_rate: the step size, or a schedule of it.
        weight_decay: from 0 on.
        beta_1: the decay of m.
        beta_2: the decay of v.
        epsilon: added to the divisor.
        aggregation: "SUM" or "MEAN".
        global_clipnorm: limits the norm of all reduced gradients together; None does not.
        mirrored_check_steps: every so many steps, make sure that all ranks' copies are equal; 0 never does.
        nonfinite: what to do if reduced gradients are not finite: "raise", "skip" the step, "warn", or None.
    """

    weight_decay: Setting[float] = number()

    @refuses(**OF_OPTIMIZERS)
    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        weight_decay: float = 0.004,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        *,
        aggregation: SumOrMean = "SUM",
        global_clipnorm: float | None = None,
        mirrored_check_steps: int = 0,
        nonfinite: NonFinite | None = None,
    ) -> None:
        super().__init__(
            learning_rate,
            beta_1,
            beta_2,
            epsilon,
            aggregation=aggregation,
            global_clipnorm=global_clipnorm,
            mirrored_check_steps=mirrored_check_steps,
            nonfinite=nonfinite,
        )
        self.weight_decay = weight_decay

    def update(self, var: Variable, gradient: Array, slots: dict[str, Variable], rows: Array | None) -> None:
        """Let the variable decay, all of it, before Adam's step."""
        decay = float(self.learning_rate) * self.weight_decay
        var.assign_sub(any_array(decay * var).astype(var.dtype, copy=False))
        super().update(var, gradient, slots, rows)

    def _kernel(self) -> formulas.Kernel:
        decay = float(self.learning_rate) * float(self.weight_decay)
        return partial(formulas.decayed, decay=decay, then=super()._kernel())
