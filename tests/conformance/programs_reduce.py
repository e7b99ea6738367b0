"""Strategy.reduce and Strategy.gather: what the recorded programs mean."""

from __future__ import annotations

from typing import Any

import numpy as np

import mpistrategy as ms

from . import on_device
from .environment import Env, constant, variable
from .registry import program
from .values import Json, decode

Inputs = dict[str, Any]


def input_value(env: Env, node: Json) -> Any:
    """The value of a program: a PerReplica, or the same plain object on every replica."""
    if "per_replica" in node:
        return env.per_replica([decode(x) for x in node["per_replica"]])
    return decode(node["plain"])


def one_to_n(env: Env) -> Any:
    """A PerReplica of 1.0, 2.0, .. as float32."""
    return env.per_replica([constant(float(i + 1)) for i in range(env.n)])


@program("reduce")
def reduce(env: Env, p: Inputs) -> Any:
    value = input_value(env, p["value"])
    axis = tuple(p["axis"]) if isinstance(p["axis"], list) else p["axis"]

    def go() -> Any:
        return env.strategy.reduce(decode(p["reduce_op"]), value, axis=axis)

    if p.get("in_scope"):
        with env.strategy.scope():
            return {"result": env.attempt(go)}
    return {"result": env.attempt(go)}


@program("reduce_run_result")
def reduce_run_result(env: Env, p: Inputs) -> Any:
    values = [decode(v) for v in p["per_replica"]]
    returned = env.run(lambda: env.pick(values))
    result = env.attempt(lambda: env.strategy.reduce(decode(p["reduce_op"]), returned, axis=p["axis"]))
    return {"run returned": returned, "result": result}


@program("reduce_axis_missing")
def reduce_axis_missing(env: Env, p: Inputs) -> Any:
    return {"result": env.attempt(lambda: env.strategy.reduce("SUM", constant(1.0)))}


@program("reduce_in_replica_context")
def reduce_in_replica_context(env: Env, p: Inputs) -> Any:
    return {"result": env.attempt(env.run, lambda: env.strategy.reduce("SUM", constant(1.0), axis=None))}


@program("reduce_in_other_scope")
def reduce_in_other_scope(env: Env, p: Inputs) -> Any:
    other = env.new_strategy()
    value = env.per_replica([constant(float(i + 1)) for i in range(env.n)])

    def go() -> Any:
        with other.scope():
            return env.strategy.reduce("SUM", value, axis=None)

    return {"result": env.attempt(go)}


@program("reduce_mirrored_value")
def reduce_mirrored_value(env: Env, p: Inputs) -> Any:
    value = one_to_n(env)
    with env.strategy.scope():
        mirrored = env.strategy.extended.reduce_to("SUM", value, value)
        return {
            "mirrored": mirrored,
            "sum": env.attempt(lambda: env.strategy.reduce("SUM", mirrored, axis=None)),
            "mean": env.attempt(lambda: env.strategy.reduce("MEAN", mirrored, axis=None)),
        }


@program("reduce_on_read_variable")
def reduce_on_read_variable(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        v = variable(0.0, synchronization=ms.VariableSynchronization.ON_READ, aggregation=ms.VariableAggregation.MEAN)
    env.run(lambda: v.assign(env.rid() + 1.0))
    with env.strategy.scope():
        return {
            "sum": env.attempt(lambda: env.strategy.reduce("SUM", v, axis=None)),
            "mean": env.attempt(lambda: env.strategy.reduce("MEAN", v, axis=None)),
        }


@program("reduce_result_type")
def reduce_result_type(env: Env, p: Inputs) -> Any:
    result = env.strategy.reduce("SUM", one_to_n(env), axis=None)
    return {
        "result": result,
        "is a tensor": isinstance(on_device.host(result), np.ndarray),
        "is a DistributedValues": isinstance(result, ms.DistributedValues),
    }


@program("gather")
def gather(env: Env, p: Inputs) -> Any:
    value = input_value(env, p["value"])
    return {"result": env.attempt(lambda: env.strategy.gather(value, axis=p["axis"]))}


@program("gather_in_replica_context")
def gather_in_replica_context(env: Env, p: Inputs) -> Any:
    return {"result": env.attempt(env.run, lambda: env.strategy.gather(constant([1.0]), axis=0))}


@program("gather_in_scope")
def gather_in_scope(env: Env, p: Inputs) -> Any:
    value = env.per_replica([constant([float(i + 1)] * (i + 1)) for i in range(env.n)])
    with env.strategy.scope():
        return {"result": env.attempt(lambda: env.strategy.gather(value, axis=0))}


@program("local_results", copies=("result",))
def local_results(env: Env, p: Inputs) -> Any:
    value = input_value(env, p["value"])
    return {"result": env.attempt(lambda: env.strategy.experimental_local_results(value))}


@program("distribute_values", copies=("local results", "notes.value context"))
def distribute_values(env: Env, p: Inputs) -> Any:
    values = [decode(v) for v in p["per_replica"]]

    def value_fn(context: Any) -> Any:
        described = [type(context).__name__, context.replica_id_in_sync_group, context.num_replicas_in_sync]
        env.lnote("value context", described)
        return values[context.replica_id_in_sync_group]

    result = env.attempt(env.strategy.experimental_distribute_values_from_function, value_fn)
    if env.failed(result):
        return {"result": result}
    local = env.attempt(env.strategy.experimental_local_results, result)
    return {"result": result, "local results": local}
