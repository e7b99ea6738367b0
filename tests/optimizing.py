"""What tests of optimizers share: each optimizer with its formula, models of odd shapes, and a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from replicas import RANK, bits

import mpistrategy as ms
from mpistrategy.arrays.dtypes import Array
from mpistrategy.optimizers import SGD, Adam, AdamW, Optimizer

Shapes = Sequence[tuple[tuple[int, ...], str]]
SHAPES: Shapes = [
    ((3, 5), "float32"),
    ((1,), "float32"),
    ((), "float32"),
    ((70, 31), "float32"),
    ((7,), "float64"),
    ((0, 4), "float32"),
    ((2, 2, 2), "float64"),
    ((16,), "float32"),
]

# ------------------------------------------------------------------------------------------------- the formulas
# Those of keras.optimizers, in the variable's dtype, operation by operation: what the kernels must give to the bit.
# Each takes the variable, the gradients of all steps and their learning rates, and yields the variable and its slots.

Formula = Callable[[Array, Sequence[Array], Sequence[float]], Iterator[tuple[Array, dict[str, Array]]]]


def stored(value: Any, dtype: Any) -> Array:
    return np.asarray(value).astype(dtype)


def sgd(
    p: Array, gradients: Sequence[Array], rates: Sequence[float], momentum: float = 0.0, nesterov: bool = False
) -> Iterator[Any]:
    v = np.zeros_like(p)
    for g, rate in zip(gradients, rates, strict=True):
        if not momentum:
            p = p - stored(rate * g, p.dtype)
            yield p, {}
            continue
        v = stored(momentum * v - rate * g, p.dtype)
        p = p - stored(rate * g - momentum * v if nesterov else -v, p.dtype)
        yield p, {"momentum": v}


def adam(
    p: Array, gradients: Sequence[Array], rates: Sequence[float], b1: float, b2: float, eps: float, decay: float = 0.0
) -> Iterator[Any]:
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        if decay:
            p = p - stored(rate * decay * p, p.dtype)
        m = stored(b1 * m + (1 - b1) * g, p.dtype)
        v = stored(b2 * v + (1 - b2) * g * g, p.dtype)
        size = rate * float(np.sqrt(1 - b2**t)) / (1 - b1**t)
        p = p - stored(size * m / (np.sqrt(v) + eps), p.dtype)
        yield p, {"m": m, "v": v}


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": SGD,
    "momentum": partial(SGD, momentum=0.9),
    "nesterov": partial(SGD, momentum=0.9, nesterov=True),
    "Adam": partial(Adam, beta_1=0.8, beta_2=0.99, epsilon=1e-5),
    "AdamW": partial(AdamW, weight_decay=0.05, beta_1=0.8, beta_2=0.99, epsilon=1e-5),
}
FORMULAS: dict[str, Formula] = {
    "SGD": sgd,
    "momentum": partial(sgd, momentum=0.9),
    "nesterov": partial(sgd, momentum=0.9, nesterov=True),
    "Adam": partial(adam, b1=0.8, b2=0.99, eps=1e-5),
    "AdamW": partial(adam, b1=0.8, b2=0.99, eps=1e-5, decay=0.05),
}

# ------------------------------------------------------------------------------------------------- steps


def asked(optimizer: Optimizer, what: str = "change") -> Optimizer:
    """Return the optimizer as one of a class that overrides `change` or `update` to do the same: it takes the plain
    path, and no step of it is prepared."""
    kind: Any = type(optimizer)
    own = {
        "change": lambda self, gradient, slots: kind.change(self, gradient, slots),
        "update": lambda self, *given: kind.update(self, *given),
    }
    optimizer.__class__ = type(kind.__name__, (kind,), {what: own[what]})
    return optimizer


def model(strategy: ms.Strategy, shapes: Shapes = SHAPES) -> list[ms.Variable]:
    with strategy.scope():
        return [ms.Variable(np.linspace(-1, 1, int(np.prod(s)), dtype=d).reshape(s)) for s, d in shapes]


def gradients_for(variables: Sequence[ms.Variable], step: int) -> list[Array]:
    """This rank's gradients: eighths, whose sums are exact in any order."""
    random = np.random.default_rng([step, RANK])
    return [np.asarray(random.integers(-50, 50, v.shape) / 8).astype(v.dtype) for v in variables]


def apply(strategy: ms.Strategy, optimizer: Optimizer, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    strategy.run(lambda: optimizer.apply_gradients(zip(gradients, variables, strict=True)))


def state(optimizer: Optimizer, variables: Sequence[ms.Variable]) -> list[bytes]:
    """The bits of variables and slots."""
    slots = [slot for v in variables for slot in optimizer.slots_of(v).values()]
    return [bits(v.local_copy()) for v in (*variables, *slots)]
