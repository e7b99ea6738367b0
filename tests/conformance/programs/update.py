"""StrategyExtended.update and update_non_slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from conformance.environment import Env, Inputs, constant, program, variable
from conformance.tensorflow import role
from conformance.values import Json, decode, encode
from mpistrategy.arrays.convert import any_array

from .placement import ON_READ_SUM


def like(value: Any, var: Any) -> np.ndarray[Any, Any]:
    """tf.cast(value, var.dtype)."""
    return any_array(value).astype(var.dtype)


def updated(name: str, var: Any, call: int, args: Any, kwargs: Any) -> Any:
    """What the function that update calls does and returns, by its recorded name."""
    ones = np.ones(var.shape, var.dtype)
    match name:
        case "assign" | "assign_add":
            return getattr(var, name)(like(args[0], var))
        case "kwargs_add":
            return var.assign_add(kwargs["x"])
        case "return_dict":
            return {"new": var.assign_add(ones), "other": [constant(float(call))]}
        case "return_none":
            var.assign_add(ones)
            return None
        case "raise":
            raise KeyError("in update")
    others = {"return_args": args, "return_constant": 5, "return_var": var, "return_call_number": constant(float(call))}
    return others[name]


def argument(env: Env, node: Json, var: Any) -> Any:
    """An argument of update."""
    if node == "another mirrored variable":
        return variable(7.0)
    return var if node == "the variable itself" else env.given(node)


@program
def update(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        v = variable(decode(p["initial"]), **(ON_READ_SUM if p.get("on_read") else {}))
        args = tuple(argument(env, node, v) for node in p["args"])
        kwargs = {key: decode(node) for key, node in p.get("kwargs", {}).items()} or None
        env.notes["calls of fn"] = calls = []

        def function(var: Any, *a: Any, **k: Any) -> Any:
            component = not hasattr(var, "values")
            calls.append({"var is a component": component, "args": encode(list(a)), "kwargs": encode(k)["dict"]})
            return updated(p["fn"], var, len(calls), a, k)

        result = env.attempt(env.strategy.extended.update, v, function, args=args, kwargs=kwargs, **group(p))
        return {"result": result, "result type": role(env, result).__name__, "components": env.comps(v)}


def group(p: Inputs) -> dict[str, Any]:
    """The argument `group`, where the case gives it."""
    return {"group": p["group"]} if "group" in p else {}


@program
def update_non_slot(env: Env, p: Inputs) -> Any:
    extended = env.strategy.extended
    with env.strategy.scope():
        v = variable(1.0)
        devices = extended.non_slot_devices([v])
        with extended.colocate_vars_with(v):
            w = variable(10.0)
        args = tuple(env.given(node) for node in p["args"])
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
        result = env.attempt(extended.update_non_slot, where, function, args=args, **group(p))
        return {"result": result, "components of w": env.comps(w)}


@program
def value_container_destroyed(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        component = env.strategy.experimental_local_results(variable(1.0))[0]
    return {"gives the component itself": env.strategy.extended.value_container(component) is component}
