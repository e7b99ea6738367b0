"""One public method called with the decoded arguments of the case, in the context that its name says."""

from __future__ import annotations

from typing import Any

import numpy as np

import mpistrategy as ms
from conformance.environment import Env, Inputs, constant, program, variable
from conformance.values import decode
from mpistrategy.arrays import nest

# ------------------------------------------------------------------------------------------------ in a step


def in_step(env: Env, method: str, op: Any, p: Inputs, **options: Any) -> Any:
    """A collective of the replica context with this replica's value."""
    values = [decode(v) for v in p["per_replica"]]

    def step() -> Any:
        return getattr(ms.get_replica_context(), method)(*op, env.pick(values), **options)

    return {"result": env.attempt(env.run, step)}


@program
def all_reduce(env: Env, p: Inputs) -> Any:
    options = {"options": ms.CommunicationOptions(**p["options"])} if p.get("options") else {}
    return in_step(env, "all_reduce", [decode(p["reduce_op"])], p, **options)


@program
def all_gather(env: Env, p: Inputs) -> Any:
    return in_step(env, "all_gather", [], p, axis=p["axis"])


@program
def default_all_reduce(env: Env, p: Inputs) -> Any:
    return {"result": env.attempt(ms.get_replica_context().all_reduce, decode(p["reduce_op"]), decode(p["value"]))}


@program
def gradient_sum(env: Env, p: Inputs) -> Any:
    """The gradient of all_reduce(SUM) is all_reduce(SUM) of the upstream gradients; there is no tape."""

    def step() -> Any:
        all_reduce, scale = ms.get_replica_context().all_reduce, np.float32(env.rid() + 1)
        x = constant([1.0, 2.0]) * scale
        return {"y": all_reduce("SUM", x * x), "dx": all_reduce("SUM", constant([1.0, 1.0]) * scale) * 2 * x}

    return {"result": env.attempt(env.run, step)}


@program
def indexed_slices_from_gradient(env: Env, p: Inputs) -> Any:
    """The gradient of reduce_sum(gather(v, indices) * c) with respect to v has c in every row of indices."""

    def step() -> Any:
        rows = np.full((2, 2), env.rid() + 1, np.float32)
        gradient = ms.IndexedSlices(rows, constant([0, 1] if env.rid() == 0 else [1, 2]), constant([3, 2]))
        result = ms.get_replica_context().all_reduce("SUM", gradient)
        env.note("as dense", result.to_dense())
        return result

    return {"result": env.attempt(env.run, step)}


@program
def gradient_of_mirrored(env: Env, p: Inputs) -> Any:
    """The gradient of v * v * (i + 1), written out."""
    with env.strategy.scope():
        v = variable(3.0)
    return {"gradient": env.run(lambda: np.float32(2) * v * np.float32(env.rid() + 1))}


def returned_in_merge(returns: str, strategy: Any, x: Any) -> Any:
    """What the merge_fn of a case does with its argument."""
    match returns:
        case "argument":
            return x
        case "sum":
            return strategy.reduce("SUM", x, axis=None)
        case "reduce_to":
            return strategy.extended.reduce_to(ms.ReduceOp.SUM, x, x)
        case "list_of_local_results":
            return strategy.experimental_local_results(x)
        case "nested":
            return {"a": x, "b": [1, (x, None)]}
        case "new_per_replica":
            ids = strategy.experimental_distribute_values_from_function
            return ids(lambda context: context.replica_id_in_sync_group * 10)
    return {"constant": 7, "none": None}[returns]


@program
def merge_call_echo(env: Env, p: Inputs) -> Any:
    values = [decode(v) for v in p["per_replica"]]

    def merge_fn(strategy: Any, x: Any) -> Any:
        env.lnote("merge_fn received", x)
        return returned_in_merge(p["merge_fn_returns"], strategy, x)

    def step() -> Any:
        returned = ms.get_replica_context().merge_call(merge_fn, args=(env.pick(values),))
        packed = [leaf for leaf in nest.flatten(returned)[0] if isinstance(leaf, ms.DistributedValues)]
        assert not packed, f"merge_call did not unpack {packed}"  # their encoding would hide it
        env.note("merge_call returned", returned)
        return returned

    return {"result": env.attempt(env.run, step)}


@program
def run_args(env: Env, p: Inputs) -> Any:
    def step(*args: Any, **kwargs: Any) -> None:
        env.note("args", args)
        if kwargs:
            env.note("kwargs", kwargs)

    args = tuple(env.given(node) for node in p["args"])
    return {"result": env.attempt(env.run, step, args, {k: env.given(node) for k, node in p.get("kwargs", {}).items()})}


@program
def run_returns(env: Env, p: Inputs) -> Any:
    values = [decode(v) for v in p["per_replica"]]
    result = env.attempt(env.run, lambda: env.pick(values))
    return {
        "result": result,
        "experimental_local_results": env.attempt(env.strategy.experimental_local_results, result),
    }


# ------------------------------------------------------------------------------------------------ of the strategy


@program
def local_results(env: Env, p: Inputs) -> Any:
    return {"result": env.attempt(env.strategy.experimental_local_results, env.given(p["value"]))}


@program
def distribute_values(env: Env, p: Inputs) -> Any:
    values = [decode(v) for v in p["per_replica"]]

    def value_fn(context: Any) -> Any:
        described = [type(context).__name__, context.replica_id_in_sync_group, context.num_replicas_in_sync]
        env.lnote("value context", described)
        return values[context.replica_id_in_sync_group]

    result = env.attempt(env.strategy.experimental_distribute_values_from_function, value_fn)
    return {"result": result, "local results": env.attempt(env.strategy.experimental_local_results, result)}


@program
def reduce(env: Env, p: Inputs) -> Any:
    value = env.given(p["value"])
    axis = tuple(p["axis"]) if isinstance(p["axis"], list) else p["axis"]

    def go() -> Any:
        return env.strategy.reduce(decode(p["reduce_op"]), value, axis=axis)

    return {"result": env.attempt_in_scope(go) if p.get("in_scope") else env.attempt(go)}


@program
def reduce_run_result(env: Env, p: Inputs) -> Any:
    values = [decode(v) for v in p["per_replica"]]
    returned = env.run(lambda: env.pick(values))
    result = env.attempt(lambda: env.strategy.reduce(decode(p["reduce_op"]), returned, axis=p["axis"]))
    return {"run returned": returned, "result": result}


@program
def gather(env: Env, p: Inputs) -> Any:
    value = env.given(p["value"])
    return {"result": env.attempt(lambda: env.strategy.gather(value, axis=p["axis"]))}
