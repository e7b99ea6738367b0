"""ReplicaContext.merge_call: what the recorded programs mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import mpistrategy as ms
from mpistrategy.arrays import nest

from .environment import Env, constant, variable
from .registry import program
from .values import Json, decode, own_copy

Inputs = dict[str, Any]


def merge_call(function: Any, *args: Any, **options: Any) -> Any:
    """merge_call of the current replica context, whose result has no containers in it: the encoding hides them."""
    returned = ms.get_replica_context().merge_call(function, *args, **options)
    packed = [leaf for leaf in nest.flatten(returned)[0] if isinstance(leaf, ms.DistributedValues)]
    if packed:
        raise AssertionError(f"merge_call did not unpack {packed}")
    return returned


MERGE_RESULTS: dict[str, Callable[[Any, Any], Any]] = {
    "argument": lambda strategy, x: x,
    "sum": lambda strategy, x: strategy.reduce("SUM", x, axis=None),
    "reduce_to": lambda strategy, x: strategy.extended.reduce_to(ms.ReduceOp.SUM, x, x),
    "list_of_local_results": lambda strategy, x: strategy.experimental_local_results(x),
    "nested": lambda strategy, x: {"a": x, "b": [1, (x, None)]},
    "constant": lambda strategy, x: 7,
    "none": lambda strategy, x: None,
    "new_per_replica": lambda strategy, x: strategy.experimental_distribute_values_from_function(
        lambda context: context.replica_id_in_sync_group * 10
    ),
}


def _own_local_results(observed: Json, rank: int, case: Json) -> Json:
    """experimental_local_results is a tuple of one on a rank, of n in a process with n replicas."""
    if case["inputs"]["merge_fn_returns"] != "list_of_local_results" or "result" not in observed:
        return observed
    n = case["num_replicas"]
    notes = dict(observed["notes"])
    returned = notes["merge_call returned"]
    notes["merge_call returned"] = {key: own_copy(value, rank, n) for key, value in returned.items()}
    return {**observed, "notes": notes, "result": own_copy(observed["result"], rank, n)}


@program("merge_call_echo", view=_own_local_results)
def merge_call_echo(env: Env, p: Inputs) -> Any:
    values = [decode(v) for v in p["per_replica"]]

    def merge_fn(strategy: Any, x: Any) -> Any:
        env.lnote("merge_fn received", x)
        return MERGE_RESULTS[p["merge_fn_returns"]](strategy, x)

    def step() -> Any:
        returned = merge_call(merge_fn, args=(env.pick(values),))
        env.note("merge_call returned", returned)
        return returned

    return {"result": env.attempt(env.run, step)}


@program("args_and_kwargs")
def args_and_kwargs(env: Env, p: Inputs) -> Any:
    def merge_fn(strategy: Any, a: Any, b: Any, c: Any = None, d: Any = None) -> None:
        for name, value in (("a", a), ("b", b), ("c", c), ("d", d)):
            env.lnote(f"merge_fn {name}", value)

    def step() -> Any:
        i = env.rid()
        positional = (constant(1.0 + i), {"k": [i + 10, "s"]})
        return merge_call(merge_fn, args=positional, kwargs={"c": float(i) + 0.5, "d": (None, 300 + i)})

    return {"result": env.attempt(env.run, step)}


@program("args_is_list")
def args_is_list(env: Env, p: Inputs) -> Any:
    def merge_fn(strategy: Any, a: Any, b: Any) -> None:
        env.lnote("a", a)
        env.lnote("b", b)

    def step() -> None:
        merge_call(merge_fn, args=[env.rid() + 0.5, 2])

    return {"result": env.attempt(env.run, step)}


@program("args_not_sequence")
def args_not_sequence(env: Env, p: Inputs) -> Any:
    return {"result": env.attempt(env.run, lambda: merge_call(lambda strategy, a: 1, args=constant(3.0)))}


@program("context_inside_merge_fn")
def context_inside_merge_fn(env: Env, p: Inputs) -> Any:
    def merge_fn(strategy: Any) -> None:
        env.lnote("strategy argument is the strategy", strategy is env.strategy)
        env.lnote("get_replica_context", ms.get_replica_context())
        env.lnote("in_cross_replica_context", ms.in_cross_replica_context())
        env.lnote("has_strategy", ms.has_strategy())
        env.lnote("get_strategy is the strategy", ms.get_strategy() is env.strategy)

    def step() -> None:
        env.note("before: in_cross_replica_context", ms.in_cross_replica_context())
        merge_call(merge_fn)
        env.note("after: in_cross_replica_context", ms.in_cross_replica_context())
        env.note("after: context is restored", ms.get_replica_context() is not None)

    return env.run(step)


@program("called_once")
def called_once(env: Env, p: Inputs) -> Any:
    calls: list[int] = []

    def step() -> None:
        merge_call(lambda strategy: calls.append(1))

    env.run(step)
    return {"calls in this process": len(calls)}


@program("merge_fn_of_first_replica_wins")
def merge_fn_of_first_replica_wins(env: Env, p: Inputs) -> Any:
    def step() -> Any:
        i = env.rid()
        return merge_call(lambda strategy: f"merge_fn of replica {i}")

    return {"result": env.attempt(env.run, step)}


@program("nested_merge_call")
def nested_merge_call(env: Env, p: Inputs) -> Any:
    def merge_fn(strategy: Any) -> Any:
        return merge_call(lambda inner: 1)

    return {"result": env.attempt(env.run, lambda: merge_call(merge_fn))}


@program("run_inside_merge_fn")
def run_inside_merge_fn(env: Env, p: Inputs) -> Any:
    def merge_fn(strategy: Any, x: Any) -> Any:
        return strategy.run(lambda y: y * 2, args=(x,))

    return {"result": env.attempt(env.run, lambda: merge_call(merge_fn, args=(constant(1.0 + env.rid()),)))}


@program("exception_in_merge_fn")
def exception_in_merge_fn(env: Env, p: Inputs) -> Any:
    def merge_fn(strategy: Any) -> Any:
        raise ValueError("boom")

    result = env.attempt(env.run, lambda: merge_call(merge_fn))
    return {
        "result": result,
        "after: in_cross_replica_context": ms.in_cross_replica_context(),
        "after: has_strategy": ms.has_strategy(),
    }


@program("different_number_of_calls", partial=True)
def different_number_of_calls(env: Env, p: Inputs) -> Any:
    def step() -> None:
        merge_call(lambda strategy: None)
        if env.rid() == 0:
            merge_call(lambda strategy: None)

    return {"result": env.attempt(env.run, step)}


def _passes(of_first: Any, of_others: Any) -> Callable[[Env], Any]:
    """A program whose replica 0 passes one argument to merge_call and the other replicas another."""

    def run(env: Env) -> Any:
        def step() -> Any:
            return merge_call(lambda strategy, v: None, args=(of_first if env.rid() == 0 else of_others,))

        return {"result": env.attempt(env.run, step)}

    return run


@program("argument_structures_differ")
def argument_structures_differ(env: Env, p: Inputs) -> Any:
    return _passes([1.0, 2.0], [1.0, 2.0, 3.0])(env)


@program("argument_types_differ")
def argument_types_differ(env: Env, p: Inputs) -> Any:
    return _passes([1.0, 2.0], {"a": 1.0})(env)


@program("argument_dict_keys_differ")
def argument_dict_keys_differ(env: Env, p: Inputs) -> Any:
    return _passes({"a": 1.0}, {"b": 1.0})(env)


@program("argument_kinds_differ")
def argument_kinds_differ(env: Env, p: Inputs) -> Any:
    def merge_fn(strategy: Any, v: Any) -> None:
        env.lnote("received", v)

    return {
        "result": env.attempt(env.run, lambda: merge_call(merge_fn, args=(constant(1.0) if env.rid() == 0 else None,)))
    }


@program("variable_argument")
def variable_argument(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        v = variable(2.0)

    def merge_fn(strategy: Any, x: Any, y: Any) -> None:
        env.lnote("container passed: same object", x is v)
        env.lnote("component passed: gives container", y is v)

    def step() -> None:
        # On a rank the container and its one component are the same object.
        merge_call(merge_fn, args=(v, v))

    return {"result": env.attempt(env.run, step)}


@program("returns_mirrored_variable")
def returns_mirrored_variable(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        v = variable(2.0)

    def step() -> Any:
        returned = merge_call(lambda strategy: v)
        env.note("is the container", returned is v)
        return returned

    result = env.run(step)
    return {"result": result, "run returned the container": result is v}


@program("merge_call_default_nested")
def merge_call_default_nested(env: Env, p: Inputs) -> Any:
    result = env.attempt(lambda: merge_call(lambda strategy: merge_call(lambda inner: 1)))
    return {"result": result, "after: in_cross_replica_context": ms.in_cross_replica_context()}


@program("merge_fn_takes_no_strategy")
def merge_fn_takes_no_strategy(env: Env, p: Inputs) -> Any:
    return {"result": env.attempt(env.run, lambda: merge_call(lambda: 1))}


@program("merge_fn_none")
def merge_fn_none(env: Env, p: Inputs) -> Any:
    return {"result": env.attempt(env.run, lambda: merge_call(None))}


@program("merge_call_in_cross_replica")
def merge_call_in_cross_replica(env: Env, p: Inputs) -> Any:
    context = ms.get_replica_context()
    with env.strategy.scope():
        return {"result": env.attempt(lambda: context.merge_call(lambda strategy: 1))}


@program("merge_call_in_function")
def merge_call_in_function(env: Env, p: Inputs) -> Any:
    def merge_fn(strategy: Any, x: Any) -> Any:
        return strategy.extended.reduce_to(ms.ReduceOp.SUM, x, x)

    def step() -> Any:
        return merge_call(merge_fn, args=(constant([1.0, 2.0]) * np.float32(env.rid() + 1),))

    return {"result": env.attempt(env.run, step)}


def _own_events(observed: Json, rank: int, case: Json) -> Json:
    """The events of one rank: those of the other replicas happen elsewhere."""
    mine = [e for e in observed["events"] if e == "merge_fn" or e.startswith(f"replica {rank} ")]
    return {**observed, "events": mine}


@program("several_in_a_row", view=_own_events)
def several_in_a_row(env: Env, p: Inputs) -> Any:
    log: list[str] = []

    def step() -> None:
        for k in range(3):
            log.append(f"replica {env.rid()} before {k}")
            merge_call(lambda strategy: log.append("merge_fn"))
        log.append(f"replica {env.rid()} end")

    env.run(step)
    return {"events": log}
