"""The matrix of variables: creation, reads, writes and scatter updates in every context; what the programs mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import mpistrategy as ms

from .environment import Env
from .names import variable_name
from .registry import program
from .values import CONTAINER_KEYS, Json, Raw, UnsupportedProgramError, decode, dtype_of, is_array

Inputs = dict[str, Any]
COPIES = ("copies", "copies before", "copies after")
VALUE = "value of the result"
#: What one process notes of a write's result is its value, what a worker notes is its class: _UnreadVariable, a pending
#: assignment of the graph.  Ours notes both.  The class is TensorFlow's own affair; that it is a variable is compared.
RETURNED = ("result[kind]", "result[same object as the variable]")
PENDING = {"kind": "_UnreadVariable", "same object as the variable": False}
#: Contexts in which an ON_READ variable is more than this replica's copy.
CROSS_REPLICA = ("cross_replica", "merge_call", "outside")


def make_variable(p: Inputs) -> ms.Variable:
    """The variable that a case is about."""
    trainable = {"trainable": p["trainable"]} if "trainable" in p else {}
    return ms.Variable(
        decode(p["initial"]), synchronization=p["synchronization"], aggregation=p["aggregation"], **trainable
    )


def preset(env: Env, v: ms.Variable, p: Inputs) -> None:
    """Give the copies of an ON_READ variable different values, by an assign in a step function."""
    if p.get("preset"):
        values = [decode(node) for node in p["preset"]]
        env.run(lambda: v.assign(env.pick(values)))


def in_context(env: Env, where: str, v: ms.Variable, function: Callable[[Any], Any]) -> Any:
    """Call ``function(target)`` in a context; the target is what code there would hold."""
    strategy = env.strategy
    if where == "replica":
        return env.attempt(env.run, lambda: function(v))
    if where == "cross_replica":
        with strategy.scope():
            return env.attempt(function, v)
    if where == "merge_call":
        return env.attempt(env.run, lambda: ms.get_replica_context().merge_call(lambda _: function(v)))
    if where in ("update_component", "update_container"):
        given = where == "update_component"
        with strategy.scope():
            return env.attempt(lambda: strategy.extended.update(v, lambda c: function(c if given else v)))
    if where == "outside":
        return env.attempt(function, v)
    if where in ("other_scope", "other_run"):
        return in_another_strategy(env, where, lambda: function(v))
    raise UnsupportedProgramError(f"no context is known that is called {where!r}")


def in_another_strategy(env: Env, where: str, call: Callable[[], Any]) -> Any:
    """Call in the scope or in a step function of another strategy."""
    other = env.new_strategy()
    try:
        if where == "other_run":
            return env.attempt(other.run, call)
        with other.scope():
            return env.attempt(call)
    finally:
        other.close()


def is_shared(env: Env, v: ms.Variable) -> bool:
    """Whether TensorFlow has a distributed variable here, and not a plain one."""
    return variable_name(v, env) != "ResourceVariable"


def reads_back(p: Inputs) -> bool:
    """Whether TensorFlow's write returns the aggregate, read back at once."""
    return p["synchronization"] == "ON_READ" and p["where"] in CROSS_REPLICA


def returned(env: Env, p: Inputs, v: ms.Variable, result: Any) -> dict[str, Any]:
    """What a write returned.

    Where TensorFlow reads the aggregate back at once, ours returns the variable, whose reading does the same and is
    refused for the same reason.
    """
    if not isinstance(result, ms.Variable):
        return {"result": result}
    if reads_back(p) and is_shared(env, v):
        with env.strategy.scope():
            return {"result": env.attempt(result.read_value)}
    noted = {"kind": variable_name(result, env), "same object as the variable": result is v}
    return {"result": Raw(noted), VALUE: result.local_copy()}


def returned_by_one_process(observed: Json, rank: int, case: Json) -> Json:
    """Take the value that one process noted of a write's result for the value of a variable."""
    result = observed.get("result")
    if reads_back(case["inputs"]) or not (is_array(result) or set(result or ()) & set(CONTAINER_KEYS)):
        return observed
    return {**observed, "result": PENDING, VALUE: result}


# ------------------------------------------------------------------------------------------------ reads

WAYS_TO_READ: dict[str, Callable[[Any], Any]] = {
    "read_value": lambda t: t.read_value(),
    "value": lambda t: t.value(),
    "convert": np.array,
    "numpy": lambda t: t.numpy(),
    "add": lambda t: t + np.ones(t.shape, t.dtype),
    "radd": lambda t: np.asarray(2, t.dtype) * t,
    "float": float,
    "compare": lambda t: t > 2,
    "getitem": lambda t: t[...],
}


@program("variable_read", copies=COPIES)
def variable_read(env: Env, p: Inputs) -> Any:
    way = WAYS_TO_READ.get(p["how"])
    if way is None:
        raise UnsupportedProgramError(f"no way to read a variable is known that is called {p['how']!r}")
    with env.strategy.scope():
        v = make_variable(p)
    preset(env, v, p)
    copies = env.copies(v)
    return {"copies": copies, "result": in_context(env, p["where"], v, way)}


# ------------------------------------------------------------------------------------------------ writes


def value_maker(env: Env, p: Inputs) -> Callable[[], Any]:
    """The function that gives the value to write, called where it is written."""
    kind, values = p["value_kind"], [decode(node) for node in p["values"]]
    if kind in ("same_tensor_object", "python_number"):
        return lambda: values[0]
    if kind == "equal_tensors":
        return lambda: values[0].copy()
    if kind == "own_of_each_replica":
        in_a_step = env.kind != "default"
        return lambda: env.pick(values) if in_a_step and ms.get_replica_context() is not None else values[0]
    if kind == "per_replica_object":
        with env.strategy.scope():
            per_replica = env.per_replica(values)
        return lambda: per_replica
    if kind == "mirrored_object":
        with env.strategy.scope():
            parts = env.per_replica(values)
            mirrored = env.strategy.extended.reduce_to("SUM", parts, parts)
        return lambda: mirrored
    raise UnsupportedProgramError(f"no kind of value is known that is called {kind!r}")


@program("variable_write", copies=COPIES, ignored=RETURNED, view=returned_by_one_process)
def variable_write(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        v = make_variable(p)
    preset(env, v, p)
    value = value_maker(env, p)
    named = {"read_value": False} if p.get("read_value") is False else {}
    before = env.copies(v)
    written = in_context(env, p["where"], v, lambda t: getattr(t, p["op"])(value(), **named))
    observed = {"copies before": before, "copies after": env.copies(v), **returned(env, p, v, written)}
    with env.strategy.scope():
        return {**observed, "cross-replica read after": env.attempt(v.read_value)}


@program("scatter", copies=COPIES, ignored=RETURNED, view=returned_by_one_process)
def scatter(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        v = make_variable(p)

    def call(target: Any) -> Any:
        rows = np.float32(env.rid() + 1 if p["where"] == "replica" and p.get("own_values") else 1)
        values = np.array([[10.0], [20.0]], np.float32) * rows
        return getattr(target, p["op"])(ms.IndexedSlices(values, np.array([0, 2], np.int32)))

    before = env.copies(v)
    written = in_context(env, p["where"], v, call)
    return {"copies before": before, "copies after": env.copies(v), **returned(env, p, v, written)}


# ------------------------------------------------------------------------------------------------ creation


def initial_value(env: Env, p: Inputs, calls: list[int]) -> Any:
    """The initial value, or the initializer function, which counts its calls."""
    node = p["initial"]
    if isinstance(node, dict) and "by_rank" in node:
        return decode(node["by_rank"][env.rank])
    if not (isinstance(node, dict) and "callable" in node):
        return decode(node)
    values = [decode(child) for child in node["callable"]]

    def initializer() -> Any:
        calls.append(1)
        return values[(len(calls) - 1 + (env.rank if p.get("by_rank") else 0)) % len(values)]

    return initializer


@program("variable_create", copies=COPIES)
def variable_create(env: Env, p: Inputs) -> Any:
    if "shape" in p:
        raise UnsupportedProgramError("variables have the shape of their initial value")
    calls: list[int] = []
    options = {key: p[key] for key in ("trainable", "name") if key in p}
    options |= {key: p[key] for key in ("synchronization", "aggregation") if p[key] is not None}
    if p.get("dtype"):
        options["dtype"] = dtype_of(p["dtype"])

    def make() -> ms.Variable:
        return ms.Variable(initial_value(env, p, calls), **options)

    if p.get("where") == "replica":
        v = env.attempt(env.run, make)
    elif p.get("where") == "outside":
        v = env.attempt(make)
    else:
        with env.strategy.scope():
            v = env.attempt(make)
    if env.failed(v):
        return {"result": v}
    observed: dict[str, Json] = {
        "kind": variable_name(v, env),
        "synchronization": v.synchronization.name,
        "aggregation": v.aggregation.name,
        "trainable": v.trainable,
        "dtype": v.dtype.name,
        "shape": list(v.shape),
        "copies": env.copies(v),
    }
    if calls:
        observed["initializer calls in this process"] = len(calls)
    if "name" in p:
        observed |= {"name": v.name, "names of the copies": [v.name]}
    return observed
