"""Training loops, the weights after every step.

The styles with hand-written updates use the strategy alone; "compat_v1_optimizer" and "keras_optimizer" are our
optimizers, with the hyper-parameters that TensorFlow keeps in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

import mpistrategy as ms
from conformance import on_device
from conformance.environment import Env, Inputs, program
from conformance.values import Json, Raw, UnsupportedProgramError, nested
from mpistrategy.arrays.convert import any_array
from mpistrategy.optimizers import SGD, Adam, Optimizer

Array = np.ndarray[Any, Any]
Variables = dict[str, ms.Variable]
LOSS = "sum of the replicas' losses before the step"


def read(value: ms.Variable) -> Json:
    """The numbers of this rank's copy."""
    return nested(value.local_copy())


# ---------------------------------------------------------------------------------------- TensorFlow's optimizers


class Momentum(Optimizer):
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
    """compat.v1's Adam: the betas' powers are products in float32, in which 1 - 0.999^t has few digits left."""

    def power(self, beta: Any, t: int) -> Any:
        return np.float64(np.multiply.reduce(np.full(t, beta)))

    def step_size(self, t: int) -> float:
        b1, b2 = (self.power(np.float32(beta), t) for beta in (self.beta_1, self.beta_2))
        return float(self.learning_rate * np.sqrt(1 - b2) / (1 - b1))


class AdamKeras(AdamV1):
    """Keras's Adam: powers of betas that float32 has rounded."""

    def power(self, beta: Any, t: int) -> Any:
        return np.power(np.float64(beta), t)


def optimizer_of(p: Inputs, *, keras: bool) -> Optimizer:
    """The optimizer that the inputs name: Keras's learning rate is as exact as the variables, and so are the betas of
    its Adam but for their powers; compat.v1 keeps all in float32 but the accumulator."""
    h = {name: float(np.float32(value)) for name, value in p.items() if type(value) is float}
    rate = p["learning_rate"] if keras else h["learning_rate"]
    name, nesterov = p["optimizer"], p["optimizer"] == "nesterov"
    if name == "sgd":
        return SGD(rate)
    if name in ("momentum", "nesterov"):
        momentum = h["momentum"]
        return SGD(rate, momentum, nesterov=nesterov) if keras else Momentum(rate, momentum, nesterov=nesterov)
    if name == "adam":
        betas = p if keras else h
        return (AdamKeras if keras else AdamV1)(rate, betas["beta1"], betas["beta2"], betas["epsilon"])
    if name == "rmsprop" and not keras:
        return RMSprop(rate, h["decay"], h["momentum"], h["epsilon"])
    if name == "adagrad" and not keras:
        return Adagrad(rate, p["initial_accumulator_value"])
    raise UnsupportedProgramError(f"no optimizer {name!r}")


# ---------------------------------------------------------------------------------------- styles


class ByOptimizer:
    """apply_gradients of an optimizer; the recordings do not look at the slots of Keras's."""

    def __init__(self, optimizer: Optimizer, variables: Variables, *, shown: bool = True) -> None:
        self.optimizer, self.variables, self.shown = optimizer, variables, shown
        optimizer.build(variables.values())

    def apply(self, gradients: Sequence[Array]) -> None:
        self.optimizer.apply_gradients(zip(gradients, self.variables.values(), strict=True))

    def state(self) -> dict[str, Any]:
        slots = {key: self.optimizer.slots_of(v) for key, v in self.variables.items() if self.shown}
        return {key: {name: read(slot) for name, slot in beside.items()} for key, beside in slots.items() if beside}


class FourSteps:
    """The four steps of the StrategyExtended document, written out."""

    def __init__(self, env: Env, p: Inputs, variables: Variables) -> None:
        self.names, self.rule = RULES[p["optimizer"]]
        self.p, self.variables = p, variables
        self.slots = {key: [self._beside(env, v) for _ in self.names] for key, v in variables.items()}
        betas = (p["beta1"], p["beta2"]) if p["optimizer"] == "adam" else ()
        self.powers = [ms.Variable(np.float64(beta), trainable=False) for beta in betas]

    def _beside(self, env: Env, v: ms.Variable) -> ms.Variable:
        with nullcontext() if env.kind == "default" else env.strategy.extended.colocate_vars_with(v):
            return ms.Variable(np.zeros_like(v.read_value()), trainable=False)

    def apply(self, gradients: Sequence[Array]) -> None:
        ms.get_replica_context().merge_call(self._merge, args=(list(gradients), self.variables))

    def _merge(self, strategy: Any, gradients: list[Array], variables: Variables) -> None:
        extended, op = strategy.extended, self.p.get("aggregate") or "SUM"
        reduced = extended.batch_reduce_to(op, list(zip(gradients, variables.values(), strict=True)))
        for (key, v), gradient in zip(variables.items(), reduced, strict=True):
            powers = [power.read_value() for power in self.powers]
            extended.update(v, self.rule, args=(self.p, gradient, *self.slots[key], *powers))
        if self.powers:
            extended.update_non_slot(extended.non_slot_devices(list(variables.values())), self._finish)

    def _finish(self) -> None:
        for power, beta in zip(self.powers, (self.p["beta1"], self.p["beta2"]), strict=True):
            power.assign(power * beta)

    def state(self) -> dict[str, Any]:
        slots = {key: dict(zip(self.names, map(read, beside), strict=True)) for key, beside in self.slots.items()}
        found: dict[str, Any] = {key: beside for key, beside in slots.items() if beside}
        return {**found, "beta powers": [read(power) for power in self.powers]} if self.powers else found


def sgd(var: ms.Variable, p: Inputs, g: Array) -> None:
    var.assign_sub(p["learning_rate"] * g)


def momentum(var: ms.Variable, p: Inputs, g: Array, m: ms.Variable) -> None:
    m.assign(p["momentum"] * m + g)
    var.assign_sub(p["learning_rate"] * (m if p["optimizer"] == "momentum" else g + p["momentum"] * m))


def adam(var: ms.Variable, p: Inputs, g: Array, m: ms.Variable, v: ms.Variable, p1: Array, p2: Array) -> None:
    b1, b2 = p["beta1"], p["beta2"]
    m.assign(b1 * m + (1 - b1) * g)
    v.assign(b2 * v + (1 - b2) * g * g)
    size = p["learning_rate"] * np.sqrt(1 - p2) / (1 - p1)
    var.assign_sub(size * m / (np.sqrt(v) + p["epsilon"]))


RULES: dict[str, tuple[tuple[str, ...], Callable[..., None]]] = {
    "sgd": ((), sgd),
    "momentum": (("momentum",), momentum),
    "nesterov": (("momentum",), momentum),
    "adam": (("m", "v"), adam),
}


class InTheStep:
    """assign_sub in the step, where the variable's own aggregation does the rest; or all_reduce, then an update."""

    def __init__(self, p: Inputs, variables: Variables) -> None:
        self.p, self.variables = p, variables

    def apply(self, gradients: Sequence[Array]) -> None:
        rate, variables = self.p["learning_rate"], self.variables.values()
        if self.p["style"] == "variable_aggregation":
            for gradient, v in zip(gradients, variables, strict=True):
                v.assign_sub(rate * gradient)
            return
        context = ms.get_replica_context()
        reduced = context.all_reduce(self.p.get("aggregate", "SUM"), list(gradients))
        for gradient, v in zip(reduced, variables, strict=True):
            context.strategy.extended.update(v, sgd, args=(self.p, gradient))

    def state(self) -> dict[str, Any]:
        return {}


Style = ByOptimizer | FourSteps | InTheStep


def style_of(env: Env, p: Inputs, variables: Variables) -> Style:
    """How the case turns gradients into updates."""
    match p["style"]:
        case "four_steps" if p["optimizer"] in RULES:
            return FourSteps(env, p, variables)
        case "variable_aggregation" | "all_reduce_then_update":
            return InTheStep(p, variables)
        case "compat_v1_optimizer":
            return ByOptimizer(optimizer_of(p, keras=False), variables)
        case "keras_optimizer":
            return ByOptimizer(optimizer_of(p, keras=True), variables, shown=False)
    raise UnsupportedProgramError(f"no style {p['style']!r} of {p['optimizer']!r}")


# ---------------------------------------------------------------------------------------- the programs


def contiguous(rows: int, parts: int) -> list[int]:
    """The sizes of the contiguous parts of a global batch: ceil(rows / parts) each until nothing is left."""
    each = -(-rows // parts)
    return [max(0, min(each, rows - i * each)) for i in range(parts)]


def loss_and_gradients(x: Array, y: Array, w: Array, b: Array, denominator: float) -> tuple[Array, list[Array]]:
    """sum((x w + b - y)^2) / denominator and its gradients by w and b; a part without rows has gradient 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        error = x @ w + b - y
        upstream = 2 * error / np.float64(denominator)
        loss = np.sum(error * error) / np.float64(denominator)
    return any_array(loss), [x.T @ upstream, any_array(np.sum(upstream))]


def copies_agree(env: Env, v: ms.Variable) -> bool:
    """Whether all replicas store the same bits; collective."""
    rows = env.strategy.gather(v.local_copy()[np.newaxis], 0)
    return all(np.array_equal(rows[0], row, equal_nan=True) for row in rows)


@program
def train(env: Env, p: Inputs) -> Any:
    """The trajectory of a linear regression."""
    x, y = (on_device.place(np.array(p[name], np.float64)) for name in "xy")
    aggregation = ms.VariableAggregation[p.get("variable_aggregation", "NONE")]
    with env.strategy.scope():
        start = {name: np.array(p[f"{name}0"], np.float64) for name in ("w", "b")}
        variables = {name: ms.Variable(value, aggregation=aggregation) for name, value in start.items()}
        style = style_of(env, p, variables)

    def step(own_x: Array, own_y: Array, size: int) -> Array:
        denominator = len(own_x) if p.get("loss") == "local_mean" else size
        w, b = (v.read_value() for v in variables.values())
        loss, gradients = loss_and_gradients(own_x, own_y, w, b, denominator)
        style.apply(gradients)
        return loss

    rows, position = [], 0
    for number in range(p["steps"]):
        batch = slice(position, position + p["global_batch"])
        position = batch.stop if batch.stop < len(x) else 0
        size = len(x[batch])
        parts = p.get("parts") or contiguous(size, env.n)
        parts = parts if sum(parts) == size else contiguous(size, env.n)
        cut = np.cumsum([0, *parts])
        mine = [env.per_replica([a[batch][cut[i] : cut[i + 1]] for i in range(env.n)]) for a in (x, y)]
        loss = env.strategy.reduce("SUM", env.run(step, args=(*mine, size)), axis=None)
        weights = {name: read(v) for name, v in variables.items()}
        row = {"step": number + 1, "parts": parts, LOSS: nested(loss), **weights}
        state = style.state()
        rows.append({**row, "state": state} if state else row)
    same = [copies_agree(env, v) for v in variables.values()]
    return {"trajectory": Raw(rows), "copies are equal at the end": all(same)}


@program
def train_embedding(env: Env, p: Inputs) -> Any:
    defaults = {"momentum": 0.9, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
    with env.strategy.scope():
        table = ms.Variable(np.array(p["table"], np.float64))
        optimizer = optimizer_of({**defaults, **p}, keras=False)

    def step(ids: list[list[int]]) -> None:
        count = float(sum(len(own) for own in ids[: env.n]))
        own = on_device.place(np.array(env.pick(ids), np.int64))
        slices = ms.IndexedSlices(2 * table[own] / count, own, table.shape)
        optimizer.apply_gradients([(slices, table)])

    rows = []
    for number in range(p["steps"]):
        env.run(step, args=(p["ids"][number % len(p["ids"])],))
        rows.append(read(table))
    return {"table after each step": Raw(rows)}
