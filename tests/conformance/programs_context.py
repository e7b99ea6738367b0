"""Replica contexts, scope() and the context functions: what the recorded programs mean."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

import mpistrategy as ms

from .environment import Env, variable
from .names import context_name, context_state, variable_name
from .registry import program

Inputs = dict[str, Any]
ON_READ = {"synchronization": ms.VariableSynchronization.ON_READ, "aggregation": ms.VariableAggregation.SUM}


def _id_tensor() -> np.ndarray[Any, Any]:
    """The replica id as TensorFlow has it, an int32 tensor; ours is a Python int."""
    replica_id = ms.get_replica_context().replica_id_in_sync_group
    if type(replica_id) is not int:
        raise TypeError(f"replica_id_in_sync_group is {replica_id!r}, not a Python int")
    return np.array(replica_id, np.int32)


# ---------------------------------------------------------------------------------------- replica contexts


@program("attributes")
def attributes(env: Env, p: Inputs) -> Any:
    def step() -> Any:
        context = ms.get_replica_context()
        env.note("type", context_name(context))
        env.note("num_replicas_in_sync", context.num_replicas_in_sync)
        env.note("replica_id_in_sync_group", _id_tensor())
        env.note("strategy is the strategy", context.strategy is env.strategy)
        env.note("in_cross_replica_context", ms.in_cross_replica_context())
        env.note("has_strategy", ms.has_strategy())
        env.note("get_strategy is the strategy", ms.get_strategy() is env.strategy)
        env.note("same object on a second call", ms.get_replica_context() is context)
        return _id_tensor()

    return env.run(step)


@program("devices_attribute")
def devices_attribute(env: Env, p: Inputs) -> Any:
    def step() -> None:
        devices = ms.get_replica_context().devices
        env.note("type", type(devices).__name__)
        env.note("devices", devices)

    return env.run(step)


def _kept_context(env: Env) -> Any:
    kept: list[Any] = []
    env.run(lambda: kept.append(ms.get_replica_context()))
    return kept[0]


@program("stale_context_all_reduce")
def stale_context_all_reduce(env: Env, p: Inputs) -> Any:
    context = _kept_context(env)
    readable = context.num_replicas_in_sync
    result = env.attempt(lambda: context.all_reduce("SUM", np.float32(1.0)))
    return {"num_replicas_in_sync still readable": readable, "result": result}


@program("stale_context_merge_call")
def stale_context_merge_call(env: Env, p: Inputs) -> Any:
    context = _kept_context(env)
    return {"result": env.attempt(lambda: context.merge_call(lambda strategy: 1))}


@program("other_replicas_context", partial=True)
def other_replicas_context(env: Env, p: Inputs) -> Any:
    def step() -> None:
        # The other replica's context lives in another process; one made for its id is the nearest thing.
        of_first = ms.ReplicaContext(env.strategy, 0)
        if env.rid() == 1:
            of_first.merge_call(lambda strategy: 1)

    return {"result": env.attempt(env.run, step)}


@program("bad_replica_id")
def bad_replica_id(env: Env, p: Inputs) -> Any:
    return {"result": env.attempt(lambda: ms.ReplicaContext(env.strategy, "a"))}


@program("replica_id_none")
def replica_id_none(env: Env, p: Inputs) -> Any:
    context = env.attempt(lambda: ms.ReplicaContext(env.strategy, None))
    return {"result": context, "id": env.attempt(lambda: context.replica_id_in_sync_group)}


# ---------------------------------------------------------------------------------------- scope


@program("states")
def states(env: Env, p: Inputs) -> Any:
    observed: dict[str, Any] = {"before": context_state(env)}
    with env.strategy.scope() as yielded:
        observed["scope yields the strategy"] = yielded is env.strategy
        observed["inside scope"] = context_state(env)
    observed["after"] = context_state(env)
    env.run(lambda: env.note("inside run", context_state(env)))
    observed["after run"] = context_state(env)
    return observed


@program("nested_same")
def nested_same(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        with env.strategy.scope():
            inner = context_state(env)
        between = context_state(env)
    return {"inner": inner, "after the inner one": between, "after": context_state(env)}


@program("same_scope_object_twice")
def same_scope_object_twice(env: Env, p: Inputs) -> Any:
    scope = env.strategy.scope()
    with scope:
        with scope:
            nested = context_state(env)
        after_nested = context_state(env)
    outside = context_state(env)

    def again() -> Any:
        with scope:
            return context_state(env)

    return {"nested": nested, "after nested": after_nested, "outside": outside, "result": env.attempt(again)}


def _nested_scopes(outer: Any, inner: Any) -> int:
    with outer.scope(), inner.scope():
        return 1


@program("nested_other_strategy")
def nested_other_strategy(env: Env, p: Inputs) -> Any:
    other = env.new_strategy()
    return {"result": env.attempt(_nested_scopes, env.strategy, other), "after": context_state(env)}


@program("default_in_mirrored")
def default_in_mirrored(env: Env, p: Inputs) -> Any:
    return {"result": env.attempt(_nested_scopes, env.strategy, ms.get_strategy())}


@program("default_strategy_scope")
def default_strategy_scope(env: Env, p: Inputs) -> Any:
    with env.strategy.scope() as yielded:
        inside = context_state(env)
        with env.strategy.scope():
            twice = context_state(env)
    return {"inside": inside, "inside twice": twice, "yields the strategy": yielded is env.strategy}


@program("other_scope_inside_run")
def other_scope_inside_run(env: Env, p: Inputs) -> Any:
    other = env.new_strategy()

    def step() -> int:
        with other.scope():
            return 1

    return {"result": env.attempt(env.run, step)}


@program("exception_restores")
def exception_restores(env: Env, p: Inputs) -> Any:
    try:
        with env.strategy.scope():
            raise KeyError("x")
    except KeyError:
        pass
    return {"after": context_state(env)}


@program("experimental_set_strategy")
def experimental_set_strategy(env: Env, p: Inputs) -> Any:
    ms.experimental_set_strategy(env.strategy)
    try:
        observed = {"set": context_state(env), "variable": variable_name(variable(1.0), env)}
    finally:
        ms.experimental_set_strategy(None)
    return {**observed, "unset": context_state(env)}


@program("set_strategy_in_scope")
def set_strategy_in_scope(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        return {"result": env.attempt(ms.experimental_set_strategy, env.strategy)}


@program("variable_kinds")
def variable_kinds(env: Env, p: Inputs) -> Any:
    outside = variable_name(variable(1.0), env)
    if env.kind == "default":
        return {"outside": outside}
    with env.strategy.scope():
        plain, on_read = variable(1.0), variable(1.0, **ON_READ)
    kinds = {"in scope": variable_name(plain, env), "in scope, ON_READ": variable_name(on_read, env)}
    return {"outside": outside, **kinds}


@program("variable_created_in_run", copies=("components",))
def variable_created_in_run(env: Env, p: Inputs) -> Any:
    def step() -> Any:
        v = variable(float(env.rid() + 1))
        env.note("kind", variable_name(v, env))
        return v

    result = env.attempt(env.run, step)
    components = None if env.failed(result) else env.copies(result)
    return {"result": result, "kind": variable_name(result, env), "components": components}


@program("variable_created_in_merge_call")
def variable_created_in_merge_call(env: Env, p: Inputs) -> Any:
    kept: list[Any] = []

    def step() -> None:
        ms.get_replica_context().merge_call(lambda strategy: kept.append(variable(3.0)))

    env.run(step)
    return {"kind": variable_name(kept[0], env), "created": len(kept)}


@program("thread_does_not_inherit")
def thread_does_not_inherit(env: Env, p: Inputs) -> Any:
    observed: dict[str, Any] = {}
    with env.strategy.scope():
        thread = threading.Thread(target=lambda: observed.update(other=context_state(env)))
        thread.start()
        thread.join()
    return observed
