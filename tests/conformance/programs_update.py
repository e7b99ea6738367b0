"""StrategyExtended.update and update_non_slot: what the recorded programs mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import mpistrategy as ms
from mpistrategy.arrays.convert import any_array

from .destinations import make_value
from .environment import Env, constant, variable
from .names import context_name, type_name
from .registry import program
from .values import Json, decode, encode, is_array, own_copy

Inputs = dict[str, Any]
CAPTURED = "components after v.assign_add(10.) on the captured container in fn"


def like(value: Any, var: Any) -> np.ndarray[Any, Any]:
    """tf.cast(value, var.dtype)."""
    return any_array(value).astype(var.dtype)


def raise_key_error(var: Any, calls: int, args: Any, kwargs: Any) -> Any:
    raise KeyError("in update")


def add_one_return_none(var: Any, calls: int, args: Any, kwargs: Any) -> None:
    var.assign_add(np.ones(var.shape, var.dtype))


#: The functions that update calls, by name: (variable, number of this call, args, kwargs).
FUNCTIONS: dict[str, Callable[[Any, int, Any, Any], Any]] = {
    "assign_add": lambda var, calls, args, kwargs: var.assign_add(like(args[0], var)),
    "assign": lambda var, calls, args, kwargs: var.assign(like(args[0], var)),
    "return_args": lambda var, calls, args, kwargs: args,
    "return_none": add_one_return_none,
    "return_constant": lambda var, calls, args, kwargs: 5,
    "return_dict": lambda var, calls, args, kwargs: {
        "new": var.assign_add(np.ones(var.shape, var.dtype)),
        "other": [constant(1.0) * np.float32(calls)],
    },
    "return_var": lambda var, calls, args, kwargs: var,
    "return_call_number": lambda var, calls, args, kwargs: constant(float(calls)),
    "raise": raise_key_error,
    "kwargs_add": lambda var, calls, args, kwargs: var.assign_add(kwargs["x"]),
}


def _argument(env: Env, node: Json, var: Any) -> Any:
    if node == "another mirrored variable":
        return variable(7.0)
    if node == "the variable itself":
        return var
    made = isinstance(node, dict) and {"per_replica", "mirrored_from_sum_of", "plain"} & set(node)
    return make_value(env, node) if made else decode(node)


def own_leaves(node: Json, rank: int, n: int) -> Json:
    """With group=False each leaf is a tuple of what the n local replicas returned: this rank has its own."""
    if isinstance(node, dict) and "tuple" in node and all(is_array(x) or _is_plain(x) for x in node["tuple"]):
        return own_copy(node, rank, n)
    if isinstance(node, list):
        return [own_leaves(child, rank, n) for child in node]
    if isinstance(node, dict) and not is_array(node):
        return {key: own_leaves(child, rank, n) for key, child in node.items()}
    return node


def _is_plain(node: Json) -> bool:
    return not isinstance(node, (dict, list))


def _own_result(observed: Json, rank: int, case: Json) -> Json:
    if "result" not in observed or case["inputs"].get("group") is not False:
        return observed
    return {**observed, "result": own_leaves(observed["result"], rank, case["num_replicas"])}


@program(
    "update",
    copies=("components", "notes.calls of fn"),
    ignored=("result type",),  # TensorFlow's class of a pending assignment; the result itself is compared
    view=_own_result,
)
def update(env: Env, p: Inputs) -> Any:
    on_read = {"synchronization": ms.VariableSynchronization.ON_READ, "aggregation": ms.VariableAggregation.SUM}
    with env.strategy.scope():
        v = variable(decode(p["initial"]), **(on_read if p.get("on_read") else {}))
        args = tuple(_argument(env, node, v) for node in p["args"])
        kwargs = {key: decode(node) for key, node in p.get("kwargs", {}).items()} or None
        env.notes["calls of fn"] = calls = []

        def function(var: Any, *a: Any, **k: Any) -> Any:
            component = not hasattr(var, "values")
            calls.append({"var is a component": component, "args": encode(list(a)), "kwargs": encode(k)["dict"]})
            return FUNCTIONS[p["fn"]](var, len(calls), a, k)

        group = {"group": p["group"]} if "group" in p else {}
        result = env.attempt(lambda: env.strategy.extended.update(v, function, args=args, kwargs=kwargs, **group))
        kind = None if env.failed(result) else type_name(result)
        return {"result": result, "result type": kind, "components": env.copies(v)}


@program("update_non_slot", copies=("components of w", "notes.calls of fn"), view=_own_result)
def update_non_slot(env: Env, p: Inputs) -> Any:
    extended = env.strategy.extended
    with env.strategy.scope():
        v = variable(1.0)
        devices = extended.non_slot_devices([v])
        with extended.colocate_vars_with(v):
            w = variable(10.0)
        args = tuple(make_value(env, node) for node in p["args"])
        env.notes["calls of fn"] = calls = []

        def function(*a: Any) -> Any:
            calls.append(encode(list(a)))
            results: dict[str, Callable[[], Any]] = {
                "assign_add_w": lambda: w.assign_add(a[0]),
                "return_args": lambda: a,
                "return_number": lambda: constant(float(len(calls))),
            }
            return results[p["fn"]]()

        is_tuple = isinstance(devices, tuple)
        places: dict[str, Any] = {
            "devices": devices,
            "first": devices[:1] if is_tuple else devices,
            "list": list(devices) if is_tuple else devices,
            "string": "CPU:0",
        }
        where = places[p.get("where", "devices")]
        group = {"group": p["group"]} if "group" in p else {}
        result = env.attempt(lambda: extended.update_non_slot(where, function, args=args, **group))
        return {"result": result, "components of w": env.copies(w)}


@program("context_inside_update_fn", copies=("log", CAPTURED))
def context_inside_update_fn(env: Env, p: Inputs) -> Any:
    log: list[Any] = []
    with env.strategy.scope():
        v = variable(1.0)

        def function(var: Any) -> None:
            log.append(
                {
                    "get_replica_context": context_name(ms.get_replica_context()),
                    "in_cross_replica_context": ms.in_cross_replica_context(),
                    "has_strategy": ms.has_strategy(),
                }
            )
            v.assign_add(10.0)

        env.strategy.extended.update(v, function)
    return {"log": log, CAPTURED: env.copies(v)}


@program("update_plain_variable")
def update_plain_variable(env: Env, p: Inputs) -> Any:
    v = variable(1.0)
    with env.strategy.scope():
        result = env.attempt(lambda: env.strategy.extended.update(v, lambda var: var.assign_add(1.0)))
        return {"result": result, "v": v}


@program("update_not_a_variable")
def update_not_a_variable(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        return {"result": env.attempt(lambda: env.strategy.extended.update(constant(1.0), lambda var: var + 1.0))}


@program("update_in_step_per_replica_args", copies=("components",))
def update_in_step_per_replica_args(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        v = variable(1.0)

    def step() -> None:
        increment = constant(1.0) * np.float32(env.rid() + 1)
        env.strategy.extended.update(v, lambda var, x: var.assign_add(x), args=(increment,))

    return {"result": env.attempt(env.run, step), "components": env.copies(v)}
