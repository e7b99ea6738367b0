"""reduce_to, batch_reduce_to and broadcast_to of StrategyExtended, and the CrossDeviceOps used directly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import mpistrategy as ms
from conformance.environment import Env, Inputs, constant, program, variable
from conformance.tensorflow import role
from conformance.values import Json, decode

AFTERWARDS = "destination variable afterwards"
ON_READ_SUM = {"synchronization": ms.VariableSynchronization.ON_READ, "aggregation": ms.VariableAggregation.SUM}
ACCUMULATION_FNS: dict[str, Any] = {
    "maximum": lambda values: np.max(np.stack(values), axis=0),
    "python_sum": sum,
    "first": lambda values: values[0],
    "first_minus_last": lambda values: values[0] - values[-1],
}
#: The fields that say something to a user, by what a class's name ends with; TensorFlow's number of packs is hidden.
FIELDS = {
    "AllReduce": ("_num_packs",),
    "Options": ("bytes_per_pack", "timeout_seconds", "implementation"),
    "OneDevice": ("reduce_to_device", "accumulation_fn"),
}


# ------------------------------------------------------------------------------------------------ destinations


def device(env: Env, replica: int) -> Any:
    """The device of a replica.  Each worker names its own local device: together they name all of them."""
    if env.kind == "mirrored":
        return str(env.strategy.devices_by_rank[replica])
    return list(env.strategy.devices_by_rank) if env.kind == "multi_worker" else "/device:CPU:0"


DESTINATIONS: dict[str, Callable[[Env], Any]] = {
    "variable": lambda env: variable(0.0),
    "on_read_variable": lambda env: variable(0.0, **ON_READ_SUM),
    "device0": lambda env: device(env, 0),
    "last_device": lambda env: device(env, env.n - 1),
    "short_device": lambda env: "CPU:0",
    "other_device": lambda env: "CPU:3",
    "unknown_device": lambda env: "TPU:7",
    "nonsense": lambda env: "not a device",
    "per_replica": lambda env: env.per_replica([constant(0.0)] * env.n),
    "tensor": lambda env: constant(0.0),
    "none": lambda env: None,
    "empty_string": lambda env: "",
    "int": lambda env: 3,
    "list_of_devices": lambda env: [str(env.strategy.devices_by_rank[0])],
    "numpy": lambda env: np.zeros(2),
}


def pair(env: Env, node: Json, destination: str) -> tuple[Any, Any]:
    """A value and its destination; "value" is the value itself."""
    value = env.given(node)
    return value, value if destination == "value" else DESTINATIONS[destination](env)


def wrong_pairs(env: Env, name: str) -> Any:
    """What batch_reduce may be given by mistake."""
    x = env.per_replica([constant(float(i + 1)) for i in range(env.n)])
    shapes: dict[str, Any] = {
        "empty": [],
        "none": None,
        "int": 5,
        "not_pairs": [x],
        "triples": [(x, x, x)],
        "lists": [[x, x]],
        "string": "ab",
        "generator": ((x, x) for _ in range(2)),
        "bad_destination": [(x, 3)],
        "none_destination": [(x, None)],
    }
    return shapes[name]


def to_one(env: Env, p: Inputs, method: Callable[..., Any], *op: Any, scope: bool = True, **options: Any) -> Any:
    """A value reduced or broadcast to a destination, and the destination afterwards where it is a variable."""

    def go() -> Any:
        value, destination = pair(env, p["value"], p["destinations"])
        observed = {"result": env.attempt(method, *op, value, destination, **options)}
        is_variable = isinstance(destination, ms.Variable)
        return {**observed, AFTERWARDS: env.comps(destination)} if is_variable else observed

    if not scope:
        return go()
    with env.strategy.scope():
        return go()


# ------------------------------------------------------------------------------------------------ StrategyExtended


@program
def reduce_to(env: Env, p: Inputs) -> Any:
    return to_one(env, p, env.strategy.extended.reduce_to, decode(p["reduce_op"]))


@program
def broadcast_to(env: Env, p: Inputs) -> Any:
    return to_one(env, p, env.strategy.extended.broadcast_to)


@program
def batch_reduce_to(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        pairs: Any = [pair(env, *nodes) for nodes in p["pairs"]]
        sequences = {"list": pairs, "tuple": tuple(pairs), "zip": zip(*zip(*pairs, strict=True), strict=True)}
        given = sequences[p.get("sequence", "list")]
        return {"result": env.attempt(env.strategy.extended.batch_reduce_to, decode(p["reduce_op"]), given)}


# ------------------------------------------------------------------------------------------------ CrossDeviceOps


def cross_device_ops(p: Inputs) -> Any:
    """The object that the inputs describe."""
    options: dict[str, Any] = {name: p[name] for name in ("reduce_to_device", "num_packs") if name in p}
    if "accumulation_fn" in p:
        options["accumulation_fn"] = ACCUMULATION_FNS[p["accumulation_fn"]]
    return getattr(ms, p.get("cdo", "ReductionToOneDevice"))(**options)


@program
def cdo_reduce(env: Env, p: Inputs) -> Any:
    options = {"options": ms.CommunicationOptions(**p["options"])} if "options" in p else {}
    ops, op, scope = cross_device_ops(p), decode(p["reduce_op"]), not p.get("no_scope")
    return to_one(env, p, ops.reduce, op, scope=scope, **options)


@program
def cdo_broadcast(env: Env, p: Inputs) -> Any:
    return to_one(env, p, cross_device_ops(p).broadcast)


@program
def cdo_batch_reduce(env: Env, p: Inputs) -> Any:
    ops = cross_device_ops(p)
    with env.strategy.scope():
        pairs = wrong_pairs(env, p["raw_pairs"]) if "raw_pairs" in p else [pair(env, *nodes) for nodes in p["pairs"]]
        return {"result": env.attempt(ops.batch_reduce, decode(p["reduce_op"]), pairs)}


@program
def constructor(env: Env, p: Inputs) -> Any:
    def go() -> Any:
        args = [decode(v) for v in p.get("args", [])]
        return getattr(ms, p["class"])(*args, **{key: decode(v) for key, v in p["kwargs"].items()})

    made = env.attempt(go)
    names = [name for end, of_class in FIELDS.items() if p["class"].endswith(end) for name in of_class]
    fields = {name: field(getattr(made, name.strip("_"), None)) for name in names}
    if "accumulation_fn" in fields:  # TensorFlow puts its own function where None, the sum, was given
        fields["accumulation_fn"] = "function"
    return {"result": made, "type": role(env, made).__name__, "fields": fields}


def field(value: Any) -> Any:
    """A field as it was recorded."""
    return value if isinstance(value, (int, float, str, type(None))) and not hasattr(value, "name") else str(value)
