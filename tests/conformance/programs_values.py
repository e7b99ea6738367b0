"""experimental_distribute_values_from_function: what the recorded programs mean."""

from __future__ import annotations

from typing import Any

import numpy as np

from .environment import Env, constant
from .registry import program

Inputs = dict[str, Any]


def distribute(env: Env, value_fn: Any) -> Any:
    """A PerReplica of what the function returns for each replica."""
    return env.strategy.experimental_distribute_values_from_function(value_fn)


@program("value_fn_returns_nest", copies=("local results",))
def value_fn_returns_nest(env: Env, p: Inputs) -> Any:
    def value_fn(context: Any) -> Any:
        replica = context.replica_id_in_sync_group
        return {"a": replica, "b": [constant(1.0) + np.float32(replica)], "c": (None, "s")}

    result = distribute(env, value_fn)
    return {"result": result, "local results": env.attempt(env.strategy.experimental_local_results, result)}


@program("value_fn_raises")
def value_fn_raises(env: Env, p: Inputs) -> Any:
    def value_fn(context: Any) -> Any:
        raise ValueError(f"no value for {context.replica_id_in_sync_group}")

    return {"result": env.attempt(distribute, env, value_fn)}


@program("number_of_calls", copies=("calls",))
def number_of_calls(env: Env, p: Inputs) -> Any:
    log: list[int] = []
    result = distribute(env, lambda context: log.append(context.replica_id_in_sync_group))
    return {"calls": log, "result": result}


@program("same_object_is_wrapped")
def same_object_is_wrapped(env: Env, p: Inputs) -> Any:
    value = constant(3.0)
    return {"result": distribute(env, lambda context: value)}


@program("values_in_run")
def values_in_run(env: Env, p: Inputs) -> Any:
    return {"result": env.attempt(env.run, lambda: distribute(env, lambda context: 1))}
