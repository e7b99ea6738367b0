"""Values and destinations of reduce_to, broadcast_to and the CrossDeviceOps, as the recorded programs name
them."""

from __future__ import annotations

from typing import Any

import numpy as np

import mpistrategy as ms

from .environment import Env, constant, variable
from .values import Json, decode


def make_value(env: Env, node: Json) -> Any:
    """A PerReplica, a Mirrored made by a sum, or a plain value."""
    if "per_replica" in node:
        return env.per_replica([decode(x) for x in node["per_replica"][: env.n]])
    if "mirrored_from_sum_of" in node:
        value = env.per_replica([decode(x) for x in node["mirrored_from_sum_of"][: env.n]])
        return env.strategy.extended.reduce_to(ms.ReduceOp.SUM, value, value)
    return decode(node["plain"])


def device(env: Env, replica: int) -> Any:
    """The device of a replica.  Each worker names its own local device: together they name all of them."""
    if env.kind == "mirrored":
        return str(env.strategy.devices_by_rank[replica])
    if env.kind == "multi_worker":
        return list(env.strategy.devices_by_rank)
    return "/device:CPU:0"


_DESTINATIONS: dict[str, Any] = {
    "variable": lambda env: variable(0.0),
    "on_read_variable": lambda env: variable(
        0.0, synchronization=ms.VariableSynchronization.ON_READ, aggregation=ms.VariableAggregation.SUM
    ),
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


def make_destination(env: Env, name: str, value: Any) -> Any:
    """The destination that the recording names; "value" is the reduced value itself."""
    return value if name == "value" else _DESTINATIONS[name](env)


def make_pairs(env: Env, nodes: Json) -> list[tuple[Any, Any]]:
    """The (value, destination) pairs of a batch."""
    pairs = []
    for node, destination in nodes:
        value = make_value(env, node)
        pairs.append((value, make_destination(env, destination, value)))
    return pairs
