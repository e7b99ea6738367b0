"""Strategy.run: what the recorded programs mean."""

from __future__ import annotations

from typing import Any

import numpy as np

import mpistrategy as ms

from .environment import Env, constant, variable
from .names import context_state, type_name, variable_name
from .programs_reduce import one_to_n
from .registry import program
from .values import Json, decode

Inputs = dict[str, Any]


@program("run_returns", copies=("experimental_local_results",))
def run_returns(env: Env, p: Inputs) -> Any:
    values = [decode(v) for v in p["per_replica"]]
    result = env.attempt(env.run, lambda: env.pick(values))
    if env.failed(result):
        return {"result": result}
    local = env.attempt(env.strategy.experimental_local_results, result)
    return {"result": result, "experimental_local_results": local}


def _argument(env: Env, node: Json) -> Any:
    if isinstance(node, dict) and "per_replica_argument" in node:
        return env.per_replica([decode(v) for v in node["per_replica_argument"]])
    if isinstance(node, dict) and "list_of" in node:
        return [_argument(env, child) for child in node["list_of"]]
    if isinstance(node, dict) and "dict_of" in node:
        return {key: _argument(env, child) for key, child in node["dict_of"].items()}
    return decode(node)


@program("run_args")
def run_args(env: Env, p: Inputs) -> Any:
    args = tuple(_argument(env, node) for node in p["args"])
    kwargs = {key: _argument(env, node) for key, node in p.get("kwargs", {}).items()}

    def step(*a: Any, **k: Any) -> None:
        env.note("args", a)
        if k:
            env.note("kwargs", k)

    return {"result": env.attempt(env.run, step, args, kwargs)}


@program("run_wrong_arity")
def run_wrong_arity(env: Env, p: Inputs) -> Any:
    return {"result": env.attempt(lambda: env.strategy.run(lambda x: x))}


@program("run_exception")
def run_exception(env: Env, p: Inputs) -> Any:
    def step() -> None:
        raise KeyError(f"boom {env.rid()}")

    return {"result": env.attempt(env.run, step), "after": context_state(env)}


@program("run_exception_one")
def run_exception_one(env: Env, p: Inputs) -> Any:
    def step() -> int:
        if env.rid() == env.n - 1:
            raise KeyError(f"boom {env.rid()}")
        return 1

    return {"result": env.attempt(env.run, step), "after": context_state(env)}


@program("nested_run")
def nested_run(env: Env, p: Inputs) -> Any:
    return {"result": env.attempt(env.run, lambda: env.strategy.run(lambda: 1))}


@program("doc_triple")
def doc_triple(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        v = variable([1.0, 2.0])
    x = constant(9.0)
    # A rank's component of a variable is the variable.
    result = env.run(lambda: (x, constant(10.0) * np.float32(env.rid() + 1), v))
    return {"result": result, "first is x": result[0] is x, "third is the mirrored variable": result[2] is v}


@program("returns_container")
def returns_container(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        v = variable([1.0, 2.0])
    result = env.run(lambda: v)
    return {"result": result, "is v": result is v}


@program("returns_on_read_member")
def returns_on_read_member(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        v = variable(0.0, synchronization=ms.VariableSynchronization.ON_READ, aggregation=ms.VariableAggregation.SUM)
    env.run(lambda: v.assign(env.rid() + 1.0))
    result = env.run(lambda: v)
    return {"result": result, "is v": result is v}


@program("returns_assign_result", copies=("components",))
def returns_assign_result(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        v = variable(1.0, aggregation=ms.VariableAggregation.SUM)
    result = env.run(lambda: v.assign_add(constant(1.0) * np.float32(env.rid() + 1)))
    value = env.attempt(lambda: env.strategy.experimental_local_results(result)[0].numpy()[()])
    return {"kind": variable_name(result, env), "value": value, "components": env.copies(v)}


@program("members_of_two_variables")
def members_of_two_variables(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        v, w = variable(1.0), variable(2.0)
    return {"result": env.attempt(env.run, lambda: v if env.rid() == 0 else w)}


@program("return_lists_differ")
def return_lists_differ(env: Env, p: Inputs) -> Any:
    return {"result": env.attempt(env.run, lambda: [constant(1.0)] * (env.rid() + 1))}


@program("return_kinds_differ")
def return_kinds_differ(env: Env, p: Inputs) -> Any:
    return {"result": env.attempt(env.run, lambda: constant(1.0) if env.rid() == 0 else None)}


@program("return_list_against_tuple")
def return_list_against_tuple(env: Env, p: Inputs) -> Any:
    return {"result": env.attempt(env.run, lambda: [1.5] if env.rid() == 0 else (1.5,))}


@program("returns_set")
def returns_set(env: Env, p: Inputs) -> Any:
    return {"kind": type_name(env.attempt(env.run, lambda: {env.rid()}))}


@program("run_variable_argument")
def run_variable_argument(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        v = variable(2.0)

    def step(x: Any) -> Any:
        env.note("is the container", x is v)
        return x * np.float32(env.rid() + 1.0)

    return {"result": env.run(step, (v,))}


@program("mirrored_in_arithmetic")
def mirrored_in_arithmetic(env: Env, p: Inputs) -> Any:
    value, one, two = one_to_n(env), constant(1.0), constant(2.0)
    with env.strategy.scope():
        m = env.strategy.extended.reduce_to("SUM", value, value)
        observed = {
            "mirrored": m,
            "m + 1 in scope": env.attempt(lambda: m + one),
            "tf.add in scope": env.attempt(lambda: np.add(m, one)),
            "-m": env.attempt(lambda: -m),
            "2 ** m": env.attempt(lambda: two**m),
            "m.shape": env.attempt(lambda: list(m.shape)),
        }
    return {**observed, "m + 1 outside": env.attempt(lambda: m + one), "m[...]": env.attempt(lambda: m[...])}
