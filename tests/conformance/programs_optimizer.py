"""Training loops, the weights after every step: what the recorded programs mean.

The styles with hand-written updates use the strategy alone; "compat_v1_optimizer" and "keras_optimizer" are our
optimizers (tensorflow_optimizers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

import mpistrategy as ms
from mpistrategy.arrays.convert import any_array
from mpistrategy.optimizers import SGD

from . import on_device
from .compare import STEPS
from .environment import Env, constant, variable
from .registry import UnsupportedProgramError, program
from .tensorflow_optimizers import keras_optimizer, v1_optimizer
from .values import Json, Raw, nested

Inputs = dict[str, Any]
Array = np.ndarray[Any, Any]
Variables = dict[str, ms.Variable]


class Style(Protocol):
    """How gradients become updates."""

    def apply(self, gradients: Sequence[Array]) -> None:
        """Update the variables; called in a step."""

    def state(self) -> dict[str, Any]:
        """Return the numbers in the slots."""


def read(value: ms.Variable) -> Json:
    return nested(value.local_copy())


class OptimizerV1:
    """apply_gradients of one of our optimizers, set up as compat.v1's."""

    make = staticmethod(v1_optimizer)

    def __init__(self, env: Env, p: Inputs, variables: Variables) -> None:
        self.variables = variables
        self.optimizer = self.make(p)
        self.optimizer.build(variables.values())

    def apply(self, gradients: Sequence[Array]) -> None:
        self.optimizer.apply_gradients(zip(gradients, self.variables.values(), strict=True))

    def state(self) -> dict[str, Any]:
        slots = {key: self.optimizer.slots_of(v) for key, v in self.variables.items()}
        assert all(slot._colocated_with is self.variables[key] or self.variables[key].strategy._is_default
                   for key, beside in slots.items() for slot in beside.values())  # fmt: skip
        return {key: {name: read(slot) for name, slot in beside.items()} for key, beside in slots.items() if beside}


class KerasOptimizer(OptimizerV1):
    """The same, set up as Keras's; the recordings do not look at the slots."""

    make = staticmethod(keras_optimizer)

    def state(self) -> dict[str, Any]:
        return {}


# ---------------------------------------------------------------------------------------- the same, by hand


class FourSteps:
    """The four steps of the StrategyExtended document, written out."""

    SLOTS: ClassVar[dict[str, tuple[str, ...]]] = {
        "sgd": (),
        "momentum": ("momentum",),
        "nesterov": ("momentum",),
        "adam": ("m", "v"),
    }

    def __init__(self, env: Env, p: Inputs, variables: Variables) -> None:
        if p["optimizer"] not in self.SLOTS:
            raise UnsupportedProgramError(f"no four steps for {p['optimizer']!r}")
        self.p, self.variables = p, variables
        self.slots = {key: self._slots_of(env, v) for key, v in variables.items()}
        betas = (p["beta1"], p["beta2"]) if p["optimizer"] == "adam" else ()
        self.powers = [ms.Variable(np.float64(beta), trainable=False) for beta in betas]

    def _slots_of(self, env: Env, v: ms.Variable) -> Variables:
        def zeros() -> Variables:
            names = self.SLOTS[self.p["optimizer"]]
            return {name: ms.Variable(np.zeros_like(v.read_value()), trainable=False) for name in names}

        if env.kind == "default":
            return zeros()
        with env.strategy.extended.colocate_vars_with(v):
            return zeros()

    def apply(self, gradients: Sequence[Array]) -> None:
        context = ms.get_replica_context()
        context.merge_call(self._merge, args=(list(gradients), self.variables))

    def _merge(self, strategy: Any, gradients: list[Array], variables: Variables) -> None:
        extended, p = strategy.extended, self.p
        op = "MEAN" if p.get("aggregate") == "MEAN" else "SUM"
        reduced = extended.batch_reduce_to(op, list(zip(gradients, variables.values(), strict=True)))
        for (key, v), gradient in zip(variables.items(), reduced, strict=True):
            powers = [power.read_value() for power in self.powers]
            slots = [self.slots[key][name] for name in self.SLOTS[p["optimizer"]]]
            extended.update(v, getattr(self, f"_{p['optimizer']}"), args=(gradient, *slots, *powers))
        if self.powers:
            extended.update_non_slot(extended.non_slot_devices(list(variables.values())), self._finish)

    def _sgd(self, var: ms.Variable, g: Array) -> None:
        var.assign_sub(self.p["learning_rate"] * g)

    def _momentum(self, var: ms.Variable, g: Array, m: ms.Variable) -> None:
        m.assign(self.p["momentum"] * m + g)
        var.assign_sub(self.p["learning_rate"] * m)

    def _nesterov(self, var: ms.Variable, g: Array, m: ms.Variable) -> None:
        m.assign(self.p["momentum"] * m + g)
        var.assign_sub(self.p["learning_rate"] * (g + self.p["momentum"] * m))

    def _adam(self, var: ms.Variable, g: Array, m: ms.Variable, v: ms.Variable, p1: Array, p2: Array) -> None:
        b1, b2 = self.p["beta1"], self.p["beta2"]
        m.assign(b1 * m + (1 - b1) * g)
        v.assign(b2 * v + (1 - b2) * g * g)
        size = self.p["learning_rate"] * np.sqrt(1 - p2) / (1 - p1)
        var.assign_sub(size * m / (np.sqrt(v) + self.p["epsilon"]))

    def _finish(self) -> None:
        for power, beta in zip(self.powers, (self.p["beta1"], self.p["beta2"]), strict=True):
            power.assign(power * beta)

    def state(self) -> dict[str, Any]:
        slots = {key: {name: read(slot) for name, slot in beside.items()} for key, beside in self.slots.items()}
        found: dict[str, Any] = {key: beside for key, beside in slots.items() if beside}
        return {**found, "beta powers": [read(power) for power in self.powers]} if self.powers else found


class ByAggregation:
    """assign_sub in the step; the variable's own aggregation does the rest."""

    def __init__(self, env: Env, p: Inputs, variables: Variables) -> None:
        self.rate, self.variables = p["learning_rate"], variables

    def apply(self, gradients: Sequence[Array]) -> None:
        for gradient, v in zip(gradients, self.variables.values(), strict=True):
            v.assign_sub(self.rate * gradient)

    def state(self) -> dict[str, Any]:
        return {}


class AllReduceThenUpdate:
    """all_reduce of the gradients in the step, then an update in the step."""

    def __init__(self, env: Env, p: Inputs, variables: Variables) -> None:
        self.rate, self.op, self.variables = p["learning_rate"], p.get("aggregate", "SUM"), variables

    def apply(self, gradients: Sequence[Array]) -> None:
        context = ms.get_replica_context()
        reduced = context.all_reduce(self.op, list(gradients))
        for gradient, v in zip(reduced, self.variables.values(), strict=True):
            context.strategy.extended.update(v, lambda var, g: var.assign_sub(self.rate * g), args=(gradient,))

    def state(self) -> dict[str, Any]:
        return {}


STYLES: dict[str, Callable[[Env, Inputs, Variables], Style]] = {
    "four_steps": FourSteps,
    "variable_aggregation": ByAggregation,
    "all_reduce_then_update": AllReduceThenUpdate,
    "compat_v1_optimizer": OptimizerV1,
    "keras_optimizer": KerasOptimizer,
}


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


@program("train", rounding=STEPS)
def train(env: Env, p: Inputs) -> Any:
    if p["style"] not in STYLES:
        raise UnsupportedProgramError(f"no style {p['style']!r}")
    x, y = (on_device.place(np.array(p[name], np.float64)) for name in "xy")
    aggregation = ms.VariableAggregation[p.get("variable_aggregation", "NONE")]
    with env.strategy.scope():
        variables = {
            name: ms.Variable(np.array(p[f"{name}0"], np.float64), aggregation=aggregation) for name in ("w", "b")
        }
        style = STYLES[p["style"]](env, p, variables)

    rows, position = [], 0
    for number in range(p["steps"]):
        position = 0 if position >= len(x) else position
        batch = slice(position, position + p["global_batch"])
        position += p["global_batch"]
        size = len(x[batch])
        parts = p.get("parts") or contiguous(size, env.n)
        parts = parts if sum(parts) == size else contiguous(size, env.n)
        cut = np.cumsum([0, *parts])
        mine = [env.per_replica([a[batch][cut[i] : cut[i + 1]] for i in range(env.n)]) for a in (x, y)]
        loss = env.strategy.reduce("SUM", env.run(_step, args=(p, size, variables, style, *mine)), axis=None)
        row = {
            "step": number + 1,
            "parts": parts,
            "sum of the replicas' losses before the step": nested(loss),
            **{name: read(v) for name, v in variables.items()},
        }
        state = style.state()
        rows.append({**row, "state": state} if state else row)
    same = [copies_agree(env, v) for v in variables.values()]
    return {"trajectory": Raw(rows), "copies are equal at the end": all(same)}


def _step(p: Inputs, size: int, variables: Variables, style: Style, x: Array, y: Array) -> Array:
    denominator = len(x) if p.get("loss") == "local_mean" else size
    w, b = (v.read_value() for v in variables.values())
    loss, gradients = loss_and_gradients(x, y, w, b, denominator)
    style.apply(gradients)
    return loss


@program("train_embedding", rounding=STEPS)
def train_embedding(env: Env, p: Inputs) -> Any:
    defaults = {"momentum": 0.9, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
    with env.strategy.scope():
        table = ms.Variable(np.array(p["table"], np.float64))
        optimizer = v1_optimizer({**defaults, **p})

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


@program("four_steps_one_variable", copies=("copies",), ignored=("notes.update gave",))  # TensorFlow's class names
def four_steps_one_variable(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        v = variable([10.0, 20.0])

    def merge_fn(strategy: Any, gradient: Array, var: ms.Variable) -> None:
        env.lnote("merge_fn: gradient", gradient)
        env.lnote("merge_fn: the variable is the container", var is v)
        total = strategy.extended.reduce_to("SUM", gradient, var)
        env.lnote("reduce_to gave", total)
        updated = strategy.extended.update(var, lambda x, t: x.assign_sub(np.float32(0.5) * t), args=(total,))
        env.lnote("update gave", type(updated).__name__)

    def step() -> Array:
        gradient = constant([1.0, 2.0]) * np.float32(env.rid() + 1)
        ms.get_replica_context().merge_call(merge_fn, args=(gradient, v))
        return any_array(v.read_value())

    return {"step returned": env.run(step), "copies": env.copies(v)}


def _own_copies(observed: Json, rank: int, case: Json) -> Json:
    of_rank = [[copies[rank]] if len(copies) > 1 else copies for copies in observed["copies"]]
    return {**observed, "copies": of_rank}


@program("four_steps_batch", view=_own_copies)
def four_steps_batch(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        variables = [variable([1.0, 2.0]), variable(3.0), variable([[4.0]])]

    def merge_fn(strategy: Any, gradients: list[Array]) -> None:
        reduced = strategy.extended.batch_reduce_to("MEAN", list(zip(gradients, variables, strict=True)))
        for gradient, v in zip(reduced, variables, strict=True):
            strategy.extended.update(v, lambda x, t: x.assign_sub(t), args=(gradient,))

    def step() -> None:
        k = np.float32(env.rid() + 1)
        gradients = [constant([1.0, 2.0]) * k, constant(3.0) * k, constant([[4.0]]) * k]
        ms.get_replica_context().merge_call(merge_fn, args=(gradients,))

    env.run(step)
    return {"copies": Raw([env.copies(v).value for v in variables])}


@program("v1_apply_gradients_cross_replica", copies=("copies",))
@program("keras_apply_gradients_cross_replica", copies=("copies",))
def apply_gradients_cross_replica(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        optimizer, v = SGD(0.1), variable(1.0)
        result = env.attempt(lambda: optimizer.apply_gradients([(constant(2.0), v)]))
        return {"result": result, "copies": env.copies(v)}


@program("none_gradient", copies=("v", "w"))
def none_gradient(env: Env, p: Inputs) -> Any:
    optimizer = SGD(0.1)
    with env.strategy.scope():
        v, w = variable(1.0), variable(1.0)
    result = env.attempt(env.run, lambda: optimizer.apply_gradients([(constant(2.0), v), (None, w)]))
    return {"result": result, "v": env.copies(v), "w": env.copies(w)}


@program("v1_global_step", copies=("global_step", "v"))
def v1_global_step(env: Env, p: Inputs) -> Any:
    optimizer = SGD(0.1)
    with env.strategy.scope():
        v = variable(1.0)
        optimizer.iterations = ms.Variable(np.int64(0), trainable=False, aggregation="ONLY_FIRST_REPLICA")
    result = env.attempt(env.run, lambda: optimizer.apply_gradients([(constant(2.0), v)]))
    return {"result": result, "global_step": env.copies(optimizer.iterations), "v": env.copies(v)}
