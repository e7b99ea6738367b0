"""ReplicaContext.all_reduce and all_gather: what the recorded programs mean."""

from __future__ import annotations

from typing import Any

import numpy as np

import mpistrategy as ms

from . import on_device
from .environment import Env, constant, variable
from .registry import program
from .values import decode

Inputs = dict[str, Any]


def all_reduce_in_step(op: Any, value: Any, **options: Any) -> Any:
    """all_reduce of the current replica context."""
    return ms.get_replica_context().all_reduce(op, value, **options)


@program("all_reduce")
def all_reduce(env: Env, p: Inputs) -> Any:
    values = [decode(v) for v in p["per_replica"]]
    options = {"options": ms.CommunicationOptions(**p["options"])} if p.get("options") else {}
    return {
        "result": env.attempt(env.run, lambda: all_reduce_in_step(decode(p["reduce_op"]), env.pick(values), **options))
    }


@program("all_gather")
def all_gather(env: Env, p: Inputs) -> Any:
    values = [decode(v) for v in p["per_replica"]]
    return {
        "result": env.attempt(env.run, lambda: ms.get_replica_context().all_gather(env.pick(values), axis=p["axis"]))
    }


@program("default_all_reduce")
def default_all_reduce(env: Env, p: Inputs) -> Any:
    context = ms.get_replica_context()
    return {"result": env.attempt(lambda: context.all_reduce(decode(p["reduce_op"]), decode(p["value"])))}


@program("gradient_sum")
def gradient_sum(env: Env, p: Inputs) -> Any:
    def step() -> Any:
        scale = np.float32(env.rid() + 1)
        x = constant([1.0, 2.0]) * scale
        y = all_reduce_in_step("SUM", x * x)
        upstream = constant([1.0, 1.0]) * scale
        # The gradient of all_reduce(SUM) is all_reduce(SUM) of the upstream gradients.
        return {"y": y, "dx": all_reduce_in_step("SUM", upstream) * 2 * x}

    return {"result": env.attempt(env.run, step)}


@program("twice_in_sequence")
def twice_in_sequence(env: Env, p: Inputs) -> Any:
    def step() -> Any:
        a = all_reduce_in_step("SUM", constant(1.0) * np.float32(env.rid() + 1))
        return all_reduce_in_step("SUM", a + np.float32(env.rid()))

    return {"result": env.attempt(env.run, step)}


@program("loop_power_iteration")
def loop_power_iteration(env: Env, p: Inputs) -> Any:
    def step() -> Any:
        x = constant(1.0, np.float64)
        for _ in range(10):
            x = all_reduce_in_step("MEAN", x * (env.rid() + 1))
        return x

    return {"result": env.attempt(env.run, step)}


@program("only_on_one_replica", partial=True)
def only_on_one_replica(env: Env, p: Inputs) -> Any:
    def step() -> Any:
        return all_reduce_in_step("SUM", constant(1.0)) if env.rid() == 0 else constant(-1.0)

    return {"result": env.attempt(env.run, step)}


@program("extra_call_on_last_replica", partial=True)
def extra_call_on_last_replica(env: Env, p: Inputs) -> Any:
    def step() -> Any:
        x = all_reduce_in_step("SUM", constant(1.0))
        if env.rid() == ms.get_replica_context().num_replicas_in_sync - 1:
            x = all_reduce_in_step("SUM", x)
        return x

    return {"result": env.attempt(env.run, step)}


@program("different_ops_on_replicas")
def different_ops_on_replicas(env: Env, p: Inputs) -> Any:
    def step() -> Any:
        return all_reduce_in_step("SUM" if env.rid() == 0 else "MEAN", constant(3.0) * np.float32(env.rid() + 1))

    return {"result": env.attempt(env.run, step)}


@program("exception_on_one_replica")
def exception_on_one_replica(env: Env, p: Inputs) -> Any:
    def step() -> Any:
        if env.rid() == 1:
            raise KeyError("replica 1 failed")
        return all_reduce_in_step("SUM", constant(1.0))

    return {"result": env.attempt(env.run, step)}


@program("mirrored_variable_argument")
def mirrored_variable_argument(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        v = variable(3.0)
    return {"result": env.attempt(env.run, lambda: all_reduce_in_step("SUM", v))}


@program("mirrored_variable_read_value")
def mirrored_variable_read_value(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        v = variable(3.0)
    return {"result": env.attempt(env.run, lambda: all_reduce_in_step("SUM", v.read_value()))}


@program("on_read_variable_argument")
def on_read_variable_argument(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        v = variable(0.0, synchronization=ms.VariableSynchronization.ON_READ, aggregation=ms.VariableAggregation.SUM)
    env.run(lambda: v.assign(float(env.rid() + 1)))
    return {"result": env.attempt(env.run, lambda: all_reduce_in_step("SUM", v))}


@program("same_tensor_object_everywhere")
def same_tensor_object_everywhere(env: Env, p: Inputs) -> Any:
    value = constant(p["value"])
    return {"result": env.attempt(env.run, lambda: all_reduce_in_step("SUM", value))}


@program("same_tensor_object_mean")
def same_tensor_object_mean(env: Env, p: Inputs) -> Any:
    value = constant(p["value"])
    return {"result": env.attempt(env.run, lambda: all_reduce_in_step("MEAN", value))}


@program("python_float_literal")
def python_float_literal(env: Env, p: Inputs) -> Any:
    return {"result": env.attempt(env.run, lambda: all_reduce_in_step("SUM", 5.0))}


@program("in_cross_replica_context")
def in_cross_replica_context(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        return {
            "get_replica_context": ms.get_replica_context(),
            "result": env.attempt(lambda: all_reduce_in_step("SUM", 1.0)),
        }


@program("result_is_usable_in_step")
def result_is_usable_in_step(env: Env, p: Inputs) -> Any:
    def step() -> None:
        result = all_reduce_in_step("SUM", constant([1.0, 2.0]) * np.float32(env.rid() + 1))
        env.note("type", "Tensor" if isinstance(on_device.host(result), np.ndarray) else type(result).__name__)
        env.note("plus rid", result + np.float32(env.rid()))

    return {"result": env.attempt(env.run, step)}


@program("step_is_a_function")
def step_is_a_function(env: Env, p: Inputs) -> Any:
    return {"result": env.attempt(env.run, lambda: all_reduce_in_step("SUM", np.float32(env.rid()) + np.float32(1)))}


@program("indexed_slices_from_gradient")
def indexed_slices_from_gradient(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        v = variable([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])

    def step() -> Any:
        # The gradient of reduce_sum(gather(v, indices) * c) with respect to v has c in every row of indices.
        indices = constant([0, 1] if env.rid() == 0 else [1, 2])
        rows = np.full((2, 2), env.rid() + 1, np.float32)
        gradient = ms.IndexedSlices(rows, indices, constant(list(v.shape)))
        result = all_reduce_in_step("SUM", gradient)
        env.note("as dense", result.to_dense())
        return result

    return {"result": env.attempt(env.run, step)}
