"""TensorFlow's optimizers, made of ours: the same rules, with the hyper-parameters that TensorFlow keeps in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import mpistrategy as ms
from mpistrategy.arrays.convert import any_array
from mpistrategy.optimizers import SGD, Adam, Optimizer

from .registry import UnsupportedProgramError

Inputs = dict[str, Any]
Array = np.ndarray[Any, Any]


class MomentumV1(Optimizer):
    """compat.v1's momentum, whose slot does not have the learning rate in it."""

    slot_values: Mapping[str, float] = {"momentum": 0.0}
    only_named_rows = True

    def __init__(self, learning_rate: float, momentum: float, *, nesterov: bool = False) -> None:
        super().__init__(learning_rate)
        self.momentum, self.nesterov = momentum, nesterov

    def change(self, gradient: Array, slots: Mapping[str, ms.Variable]) -> Array:
        velocity = slots["momentum"]
        velocity.assign(self.momentum * velocity + gradient)
        step = gradient + self.momentum * velocity if self.nesterov else velocity.read_value()
        return any_array(self.learning_rate * step)


class RMSprop(Optimizer):
    """compat.v1's RMSProp, as a user of ours would write it."""

    slot_values: Mapping[str, float] = {"rms": 1.0, "momentum": 0.0}
    only_named_rows = True

    def __init__(self, learning_rate: float, decay: float, momentum: float, epsilon: float) -> None:
        super().__init__(learning_rate)
        self.decay, self.momentum, self.epsilon = decay, momentum, epsilon

    def change(self, gradient: Array, slots: Mapping[str, ms.Variable]) -> Array:
        rms, momentum = slots["rms"], slots["momentum"]
        rms.assign(self.decay * rms + (1 - self.decay) * gradient * gradient)
        momentum.assign(self.momentum * momentum + self.learning_rate * gradient / np.sqrt(rms + self.epsilon))
        return momentum.read_value()


class Adagrad(Optimizer):
    """compat.v1's Adagrad, as a user of ours would write it."""

    def __init__(self, learning_rate: float, initial_accumulator_value: float) -> None:
        super().__init__(learning_rate)
        self.slot_values = {"accumulator": initial_accumulator_value}

    def change(self, gradient: Array, slots: Mapping[str, ms.Variable]) -> Array:
        accumulator = slots["accumulator"]
        accumulator.assign_add(gradient * gradient)
        return any_array(self.learning_rate * gradient / np.sqrt(accumulator))


class AdamV1(Adam):
    """compat.v1's Adam has the powers of the betas in float32 variables, where 1 - 0.999^t has few digits left."""

    def step_size(self, t: int) -> float:
        b1, b2 = (np.multiply.reduce(np.full(t, beta, np.float32)) for beta in (self.beta_1, self.beta_2))
        return float(self.learning_rate * np.sqrt(1 - np.float64(b2)) / (1 - np.float64(b1)))


class AdamKeras(Adam):
    """Keras's Adam has float32 betas where it takes their powers, and there only."""

    def step_size(self, t: int) -> float:
        b1, b2 = (np.power(np.float64(in_float32(beta)), t) for beta in (self.beta_1, self.beta_2))
        return float(self.learning_rate * np.sqrt(1 - b2) / (1 - b1))


def in_float32(number: float) -> float:
    """A hyper-parameter that TensorFlow keeps in float32 (README of the recordings, item 39)."""
    return float(np.float32(number))


def v1_optimizer(p: Inputs) -> Optimizer:
    """The compat.v1 optimizer that the inputs name: its hyper-parameters are in float32, the accumulator is not."""
    h = {name: in_float32(value) for name, value in p.items() if type(value) is float}
    makers: dict[str, Callable[[], Optimizer]] = {
        "sgd": lambda: SGD(h["learning_rate"]),
        "momentum": lambda: MomentumV1(h["learning_rate"], h["momentum"]),
        "nesterov": lambda: MomentumV1(h["learning_rate"], h["momentum"], nesterov=True),
        "adam": lambda: AdamV1(h["learning_rate"], h["beta1"], h["beta2"], h["epsilon"]),
        "rmsprop": lambda: RMSprop(h["learning_rate"], h["decay"], h["momentum"], h["epsilon"]),
        "adagrad": lambda: Adagrad(h["learning_rate"], p["initial_accumulator_value"]),
    }
    return _made(makers, p)


def keras_optimizer(p: Inputs) -> Optimizer:
    """The Keras optimizer that the inputs name: its learning rate is as exact as the variables."""
    makers: dict[str, Callable[[], Optimizer]] = {
        "sgd": lambda: SGD(p["learning_rate"]),
        "momentum": lambda: SGD(p["learning_rate"], momentum=in_float32(p["momentum"])),
        "nesterov": lambda: SGD(p["learning_rate"], momentum=in_float32(p["momentum"]), nesterov=True),
        "adam": lambda: AdamKeras(p["learning_rate"], p["beta1"], p["beta2"], p["epsilon"]),
    }
    return _made(makers, p)


def _made(makers: dict[str, Callable[[], Optimizer]], p: Inputs) -> Optimizer:
    if p["optimizer"] not in makers:
        raise UnsupportedProgramError(f"no optimizer {p['optimizer']!r}")
    return makers[p["optimizer"]]()
