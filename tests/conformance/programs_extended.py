"""StrategyExtended: reduce_to, batch_reduce_to, broadcast_to and the contexts; what the recorded programs mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import mpistrategy as ms

from .destinations import make_destination, make_pairs, make_value
from .environment import Env, constant, variable
from .programs_reduce import one_to_n
from .registry import program
from .values import decode

Inputs = dict[str, Any]
AFTERWARDS = "destination variable afterwards"
ON_READ = {"synchronization": ms.VariableSynchronization.ON_READ}
SEQUENCES: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "tuple": tuple,
    "zip": lambda pairs: zip(*zip(*pairs, strict=True), strict=True),
}


@program("reduce_to", copies=(AFTERWARDS,))
def reduce_to(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        value = make_value(env, p["value"])
        destination = make_destination(env, p["destinations"], value)
        result = env.attempt(lambda: env.strategy.extended.reduce_to(decode(p["reduce_op"]), value, destination))
        observed = {"result": result}
        if p["destinations"] in ("variable", "on_read_variable"):
            observed[AFTERWARDS] = env.copies(destination)
        return observed


@program("batch_reduce_to")
def batch_reduce_to(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        pairs = SEQUENCES[p.get("sequence", "list")](make_pairs(env, p["pairs"]))
        return {"result": env.attempt(lambda: env.strategy.extended.batch_reduce_to(decode(p["reduce_op"]), pairs))}


@program("broadcast_to")
def broadcast_to(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        value = make_value(env, p["value"])
        destination = make_destination(env, p["destinations"], value)
        return {"result": env.attempt(lambda: env.strategy.extended.broadcast_to(value, destination))}


@program("reduce_to_variable_aggregation")
def reduce_to_variable_aggregation(env: Env, p: Inputs) -> Any:
    value = env.per_replica([constant(1.0), constant(4.0)])
    aggregation, extended = ms.VariableAggregation.SUM, env.strategy.extended
    with env.strategy.scope():
        v = variable(0.0)
        return {
            "result": env.attempt(lambda: extended.reduce_to(aggregation, value, v)),
            "batch_reduce_to": env.attempt(lambda: extended.batch_reduce_to(aggregation, [(value, v)])),
        }


@program("reduce_to_inside_update_fn")
def reduce_to_inside_update_fn(env: Env, p: Inputs) -> Any:
    value, extended = env.per_replica([constant(1.0), constant(4.0)]), env.strategy.extended
    with env.strategy.scope():
        v = variable(1.0)
        result = env.attempt(lambda: extended.update(v, lambda var: extended.reduce_to(ms.ReduceOp.SUM, value, value)))
        return {"result": result}


# ------------------------------------------------------------------------------------------ contexts


def in_each_context(env: Env, call: Callable[[], Any]) -> dict[str, Any]:
    """One call where no scope is entered, in scope, in a step function, in another strategy's scope."""
    observed = {"no scope": env.attempt(call)}
    with env.strategy.scope():
        observed["scope"] = env.attempt(call)
    observed["step function"] = env.attempt(env.run, call)
    if env.kind == "mirrored":
        with env.new_strategy().scope():
            observed["another strategy's scope"] = env.attempt(call)
    return observed


@program("context_reduce_to")
def context_reduce_to(env: Env, p: Inputs) -> Any:
    value = env.per_replica([constant(1.0), constant(4.0)])
    return in_each_context(env, lambda: env.strategy.extended.reduce_to(ms.ReduceOp.SUM, value, "CPU:0"))


@program("context_batch_reduce_to")
def context_batch_reduce_to(env: Env, p: Inputs) -> Any:
    value = env.per_replica([constant(1.0), constant(4.0)])
    pairs = [(value, "CPU:0")]
    return in_each_context(env, lambda: env.strategy.extended.batch_reduce_to(ms.ReduceOp.SUM, pairs))


@program("context_update", copies=("components",))
def context_update(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        v = variable(1.0)

    def call() -> None:
        env.strategy.extended.update(v, lambda var: var.assign_add(1.0))

    observed = in_each_context(env, call)
    return {**observed, "components": env.copies(v)}


@program("cfer_doc_example")
def cfer_doc_example(env: Env, p: Inputs) -> Any:
    def merge_fn(strategy: Any, three_plus_replica_id: Any) -> Any:
        return sum(env.strategy.experimental_local_results(three_plus_replica_id))

    def step(three: int) -> Any:
        context = ms.get_replica_context()
        return context.merge_call(merge_fn, args=(np.int32(three + context.replica_id_in_sync_group),))

    return {"result": env.strategy.extended.call_for_each_replica(step, args=[3])}


# ------------------------------------------------------------------------------------------ containers


@program("value_container", copies=("each component gives v", "component of ON_READ gives its container"))
def value_container(env: Env, p: Inputs) -> Any:
    container_of, local_results = (
        env.strategy.extended.value_container,
        env.strategy.experimental_local_results,
    )
    with env.strategy.scope():
        v = variable(1.0)
        on_read = variable(1.0, **ON_READ, aggregation=ms.VariableAggregation.SUM)
    components = local_results(v)
    value = one_to_n(env)
    member = local_results(value)[0]
    plain = variable(1.0)
    siblings = local_results(container_of(components[0]))
    return {
        "each component gives v": [container_of(c) is v for c in components],
        "v gives v": container_of(v) is v,
        "component of ON_READ gives its container": [container_of(c) is on_read for c in local_results(on_read)],
        "tensor of a PerReplica gives itself": container_of(member) is member,
        "PerReplica gives itself": container_of(value) is value,
        "plain variable gives itself": container_of(plain) is plain,
        "int gives itself": container_of(3),
        "component is in local results of its container": any(c is components[0] for c in siblings),
    }


@program("value_container_of_run_result")
def value_container_of_run_result(env: Env, p: Inputs) -> Any:
    result = env.run(lambda: constant(1.0) + np.float32(env.rid()))
    member = env.strategy.experimental_local_results(result)[0]
    container_of = env.strategy.extended.value_container
    return {
        "gives the member itself": container_of(member) is member,
        "the run result gives itself": container_of(result) is result,
    }
