"""Patterns and oddities of variables: metrics, averages, mistakes; what the recorded programs mean."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import mpistrategy as ms

from .environment import Env, constant, variable
from .registry import program
from .values import Json

Inputs = dict[str, Any]
ON_READ = {"synchronization": ms.VariableSynchronization.ON_READ}
SUM, MEAN = ms.VariableAggregation.SUM, ms.VariableAggregation.MEAN


def own_copies_of_steps(observed: Json, rank: int, case: Json) -> Json:
    """Of every list of copies among the steps' observations, this rank's own."""

    def own(name: str, value: Json) -> Json:
        return [value[rank]] if name.endswith("copies") else value

    steps = [{"dict": {name: own(name, v) for name, v in step["dict"].items()}} for step in observed["steps"]]
    return {**observed, "steps": steps}


@program("metric_pattern", view=own_copies_of_steps)
def metric_pattern(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        total = variable(0.0, **ON_READ, aggregation=SUM, trainable=False)
        count = ms.Variable(np.int64(0), **ON_READ, aggregation=SUM, trainable=False)
    steps: list[Any] = []
    for number in range(3):

        def step(number: int = number) -> None:
            n = env.rid() + 1 + number
            total.assign_add(np.sum(constant([float(env.rid() * 10 + k) for k in range(n)])))
            count.assign_add(n)

        env.run(step)
        with env.strategy.scope():
            copies = {"total copies": env.copies(total), "count copies": env.copies(count)}
            values = {"total": total.read_value(), "count": count.read_value()}
            mean = values["total"] / values["count"].astype(np.float32)
            steps.append({**copies, **values, "mean": mean})
    with env.strategy.scope():
        total.assign(0.0)
        count.assign(0)
    steps.append({"after reset, total copies": env.copies(total), "count copies": env.copies(count)})
    return {"steps": steps}


@program("moving_average_in_replica", copies=("copies",))
def moving_average_in_replica(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        v = ms.Variable(np.float64(1), **ON_READ, aggregation=MEAN)
    for k in range(3):
        env.run(lambda k=k: v.assign(0.9 * v + 0.1 * np.float64(10 * (env.rid() + 1) + k)))
    with env.strategy.scope():
        return {"copies": env.copies(v), "cross-replica read": v.read_value()}


@program("mirrored_diverges_with_none", copies=("copies", "copies after cross-replica assign_add(1.)"))
def mirrored_diverges_with_none(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        v = variable(100.0)
    assigned = env.attempt(env.run, lambda: v.assign(float(env.rid())) and None)
    observed = {"assign": assigned, "copies": env.copies(v)}
    with env.strategy.scope():
        observed |= {"cross-replica read": v.read_value(), "numpy": v.numpy().copy()}
    observed["read in step"] = env.run(v.read_value)
    with env.strategy.scope():
        v.assign_add(1.0)
    observed["copies after cross-replica assign_add(1.)"] = env.copies(v)
    return observed


@program("several_assigns", copies=("copies",))
def several_assigns(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        v = variable(0.0, aggregation=SUM)

    def step() -> None:
        for k in (1.0, 10.0, 100.0):
            v.assign_add(constant(k) * np.float32(env.rid() + 1))
            env.note(f"after adding {k:g}*(i+1)", v.read_value())

    env.run(step)
    return {"copies": env.copies(v)}


# ------------------------------------------------------------------------------------------------ reading


@program("gradient_of_mirrored")
def gradient_of_mirrored(env: Env, p: Inputs) -> Any:
    """There is no tape: the gradient of v * v * (i + 1) is written out."""
    with env.strategy.scope():
        v = variable(3.0)
    return {"gradient": env.run(lambda: np.float32(2) * v * np.float32(env.rid() + 1))}


@program("read_in_function")
def read_in_function(env: Env, p: Inputs) -> Any:
    """There are no graphs: a function is a function."""
    with env.strategy.scope():
        s = variable(0.0, **ON_READ, aggregation=SUM)
        v = variable(5.0)
    env.run(lambda: s.assign(env.rid() + 1.0))
    one = constant(1.0)
    step = env.run(lambda: (s.read_value(), v.read_value(), s + one, v + one))
    with env.strategy.scope():
        return {"step": step, "cross-replica": env.attempt(lambda: (s.read_value(), v.read_value()))}


@program("handle_contexts")
def handle_contexts(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        v: Any = variable(1.0)
        observed = {"scope": env.attempt(lambda: v.handle and "available")}
        same = env.attempt(lambda: env.strategy.extended.update(v, lambda c: v.handle is c.handle, group=False))
    outside = env.attempt(lambda: v.handle and "available")
    return {**observed, "update": same, "outside": outside, "step": env.attempt(env.run, lambda: v.handle is not None)}


# ------------------------------------------------------------------------------------------------ writing


@program("cross_replica_write_returns")
def cross_replica_write_returns(env: Env, p: Inputs) -> Any:
    def described(result: Any, v: ms.Variable) -> str:
        if result is v:  # reading it gives what TensorFlow's ON_READ variables have read already
            return f"Tensor {v.read_value()[()]!r}" if v.synchronization.name == "ON_READ" else "the variable"
        return type(result).__name__

    with env.strategy.scope():
        v = variable(1.0)
        s = variable(1.0, **ON_READ, aggregation=SUM)
        return {
            "ON_WRITE": described(v.assign(2.0), v),
            "ON_WRITE read_value=False": described(v.assign(3.0, read_value=False), v),
            "ON_READ": described(s.assign(2.0), s),
            "ON_READ read_value=False": described(s.assign(3.0, read_value=False), s),
        }


@program("cross_replica_assign_differs_by_rank", copies=("copies",))
def cross_replica_assign_differs_by_rank(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        v = variable(1.0)
        result = env.attempt(lambda: v.assign(10.0 + env.rank) and None)
        return {"result": result, "copies": env.copies(v), "read": v.read_value()}


@program("cross_replica_assign_on_one_rank", copies=("copies",))
def cross_replica_assign_on_one_rank(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        v = variable(1.0)
        if env.rank == 0:
            v.assign(10.0)
        return {"copies": env.copies(v), "read": v.read_value()}


@program("set_attribute")
def set_attribute(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        v = variable(1.0)
    return {
        "aggregation": env.attempt(setattr, v, "aggregation", SUM),
        "synchronization": env.attempt(setattr, v, "synchronization", ON_READ["synchronization"]),
    }


@program("assign_shape_mismatch", copies=("copies",))
def assign_shape_mismatch(env: Env, p: Inputs) -> Any:
    three = constant([1.0, 2.0, 3.0])
    with env.strategy.scope():
        v = variable([1.0, 2.0], aggregation=SUM)
        observed = {"cross-replica": env.attempt(lambda: v.assign([1.0, 2.0, 3.0]))}
    step = env.attempt(env.run, lambda: v.assign(three * np.float32(env.rid() + 1)))
    return {**observed, "step": step, "copies": env.copies(v)}


@program("assign_dtype_mismatch", copies=("copies",))
def assign_dtype_mismatch(env: Env, p: Inputs) -> Any:
    values = {
        "float64 tensor": constant(2.0, np.float64),
        "int32 tensor": constant(3),
        "python int": 4,
        "numpy float64": np.float64(5.5),
        "numpy int64": np.int64(6),
        "string": "7",
    }
    with env.strategy.scope():
        v = variable(1.0)
        observed = {name: env.attempt(lambda x=x: v.assign(x).numpy().copy()) for name, x in values.items()}
        return {**observed, "copies": env.copies(v)}


@program("shape_none", copies=("copies",))
def shape_none(env: Env, p: Inputs) -> Any:
    """A variable whose shape may change: here the shape is that of the initial value."""
    with env.strategy.scope():
        v = variable([1.0, 2.0])
        v.assign([1.0, 2.0, 3.0])
    return {"copies": env.copies(v), "shape": str(v.shape)}


# ------------------------------------------------------------------------------------------------ saving


def save_and_load(v: ms.Variable) -> Any:
    """Write what a checkpoint holds of a variable, its cross-replica value, and return what is in the file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.npy"
        np.save(path, v.read_value())
        return np.load(path)


@program("checkpoint_chief_only")
def checkpoint_chief_only(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        v = variable(0.0, **ON_READ, aggregation=SUM)
    env.run(lambda: v.assign(env.rid() + 1.0))
    if env.rank != 0:
        return {"did nothing": True}
    with env.strategy.scope():
        return {"value in the file": save_and_load(v)}


@program("checkpoint_chief_only_mirrored")
def checkpoint_chief_only_mirrored(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        v = variable(3.0)
        if env.rank != 0:
            return {"did nothing": True}
        return {"value in the file": save_and_load(v)}
