"""The CrossDeviceOps classes used directly: what the recorded programs mean."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

import mpistrategy as ms

from .destinations import make_destination, make_pairs, make_value
from .environment import Env, constant, variable
from .names import type_name
from .programs_reduce import one_to_n
from .registry import program
from .values import Json, decode

Inputs = dict[str, Any]
ACCUMULATION_FNS: dict[str, Any] = {
    "maximum": lambda values: np.max(np.stack(values), axis=0),
    "python_sum": sum,
    "first": lambda values: values[0],
    "first_minus_last": lambda values: values[0] - values[-1],
}
AFTERWARDS = "destination variable afterwards"


def make_cross_device_ops(p: Inputs) -> Any:
    """The object that the inputs describe."""
    options: dict[str, Any] = {name: p[name] for name in ("reduce_to_device", "num_packs") if name in p}
    if "accumulation_fn" in p:
        options["accumulation_fn"] = ACCUMULATION_FNS[p["accumulation_fn"]]
    return getattr(ms, p.get("cdo", "ReductionToOneDevice"))(**options)


@program("cdo_reduce")
def cdo_reduce(env: Env, p: Inputs) -> Any:
    ops = make_cross_device_ops(p)
    options = {"options": ms.CommunicationOptions(**p["options"])} if "options" in p else {}

    def go() -> Any:
        value = make_value(env, p["value"])
        destination = make_destination(env, p["destinations"], value)
        return env.attempt(lambda: ops.reduce(decode(p["reduce_op"]), value, destination, **options))

    if p.get("no_scope"):
        return {"result": go()}
    with env.strategy.scope():
        return {"result": go()}


def _raw_pairs(env: Env, name: str) -> Any:
    x = one_to_n(env)
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


@program("cdo_batch_reduce")
def cdo_batch_reduce(env: Env, p: Inputs) -> Any:
    ops = make_cross_device_ops(p)
    with env.strategy.scope():
        pairs = _raw_pairs(env, p["raw_pairs"]) if "raw_pairs" in p else make_pairs(env, p["pairs"])
        return {"result": env.attempt(lambda: ops.batch_reduce(decode(p["reduce_op"]), pairs))}


@program("cdo_broadcast", copies=(AFTERWARDS,))
def cdo_broadcast(env: Env, p: Inputs) -> Any:
    ops = make_cross_device_ops(p)
    with env.strategy.scope():
        value = make_value(env, p["value"])
        destination = make_destination(env, p["destinations"], value)
        observed = {"result": env.attempt(lambda: ops.broadcast(value, destination))}
        if p["destinations"] == "variable":
            observed[AFTERWARDS] = env.copies(destination)
        return observed


# ---------------------------------------------------------------------------------------- constructors

#: The fields that say something to a user; the others are TensorFlow's insides.
FIELDS = {
    "CommunicationOptions": ("bytes_per_pack", "timeout_seconds", "implementation"),
    "CollectiveHints": ("bytes_per_pack", "timeout_seconds", "implementation"),
    "NcclAllReduce": ("num_packs",),
    "HierarchicalCopyAllReduce": ("num_packs",),
    "ReductionToOneDevice": ("reduce_to_device", "accumulation_fn"),
    "CrossDeviceOps": (),
}


def _public_fields(observed: Json, rank: int, case: Json) -> Json:
    """Only the fields that say something to a user, by their public names."""
    if "fields" not in observed:
        return observed
    wanted = FIELDS[case["inputs"]["class"]]
    fields = {name.lstrip("_"): value for name, value in observed["fields"]["dict"].items()}
    return {**observed, "fields": {"dict": {name: fields[name] for name in sorted(wanted)}}}


def _field(made: Any, name: str) -> Any:
    value = getattr(made, name, None)
    if name == "accumulation_fn":
        return "function"  # TensorFlow puts its own function where None, the sum, was given
    if isinstance(value, (int, float, str, type(None))):
        return value
    return str(value) if hasattr(value, "name") else type(value).__name__


@program("constructor", view=_public_fields)
def constructor(env: Env, p: Inputs) -> Any:
    def go() -> Any:
        args = [decode(v) for v in p.get("args", [])]
        return getattr(ms, p["class"])(*args, **{key: decode(v) for key, v in p["kwargs"].items()})

    made = env.attempt(go)
    if env.failed(made):
        return {"result": made}
    return {
        "type": type_name(made),
        "fields": {name: _field(made, name) for name in sorted(FIELDS[p["class"]])},
    }


@program("options_merge", ignored=("str",))  # the text of an object is ours
def options_merge(env: Env, p: Inputs) -> Any:
    def make(*args: Any, **kwargs: Any) -> Any:
        return ms.CommunicationOptions(*args, **kwargs)

    def fields(options: Any) -> list[Any]:
        return [options.bytes_per_pack, options.timeout_seconds, options.implementation.name]

    a = make(bytes_per_pack=5, timeout_seconds=2.0, implementation="NCCL")
    b = make(bytes_per_pack=7, timeout_seconds=3.0, implementation="RING")
    return {
        "a.merge(None)": fields(a.merge(None)),
        "a.merge(default)": fields(a.merge(make())),
        "default.merge(a)": fields(make().merge(a)),
        "a.merge(b)": fields(a.merge(b)),
        "a.merge(bytes 0, timeout 0, AUTO)": fields(a.merge(make(bytes_per_pack=0, timeout_seconds=0.0))),
        "a unchanged": fields(a),
        "str": str(a),
    }


def _signature(function: Any) -> str:
    """A signature without annotations, which TensorFlow's have not."""
    if function is object.__init__:
        return "(self)"
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


METHODS = ("reduce", "batch_reduce", "broadcast")
HOOKS = ("reduce_implementation", "batch_reduce_implementation", "broadcast_implementation")


def _public_bases(observed: Json, rank: int, case: Json) -> Json:
    """Of the base classes, the public ones."""
    bases = {name for name in observed if name.endswith(" bases")}
    return {n: [b for b in v if b != "AllReduceCrossDeviceOps"] if n in bases else v for n, v in observed.items()}


@program("signatures", view=_public_bases)
def signatures(env: Env, p: Inputs) -> Any:
    observed: dict[str, Any] = {}
    for name in ("CrossDeviceOps", "ReductionToOneDevice", "NcclAllReduce", "HierarchicalCopyAllReduce"):
        cls = getattr(ms, name, None)
        if cls is None:
            continue
        observed[name] = _signature(cls.__init__)
        observed.update({f"{name}.{method}": _signature(getattr(cls, method)) for method in METHODS + HOOKS})
        observed[f"{name} bases"] = [base.__name__ for base in cls.__mro__[1:-1] if hasattr(ms, base.__name__)]
    observed["CommunicationOptions"] = _signature(ms.CommunicationOptions.__init__)
    observed["ReduceOp values"] = [op.value for op in ms.ReduceOp]
    enums = ("CommunicationImplementation", "ReduceOp", "VariableSynchronization", "VariableAggregation")
    for name in (*enums, "InputReplicationMode"):
        if hasattr(ms, name):
            observed[name] = [member.name for member in getattr(ms, name)]
    if hasattr(ms, "InputOptions"):
        observed["InputOptions fields"] = list(inspect.signature(ms.InputOptions).parameters)
    return observed


# ---------------------------------------------------------------------------------------- base class, hooks


@program("abstract_base")
def abstract_base(env: Env, p: Inputs) -> Any:
    ops = ms.CrossDeviceOps()
    value = env.per_replica([constant(1.0), constant(4.0)])
    with env.strategy.scope():
        return {
            "reduce": env.attempt(lambda: ops.reduce(ms.ReduceOp.SUM, value, value)),
            "batch_reduce": env.attempt(lambda: ops.batch_reduce(ms.ReduceOp.SUM, [(value, value)])),
            "broadcast": env.attempt(lambda: ops.broadcast(constant(2.0), value)),
        }


@program("subclass")
def subclass(env: Env, p: Inputs) -> Any:
    log: list[Any] = []

    class Mine(ms.CrossDeviceOps):  # type: ignore[misc]
        def reduce_implementation(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
            log.append(["reduce", reduce_op.name, type_name(value), type_name(destinations), type_name(options)])
            return ms.ReductionToOneDevice().reduce(reduce_op, value, destinations)

        def batch_reduce_implementation(self, reduce_op: Any, pairs: Any, options: Any) -> Any:
            log.append(["batch_reduce", reduce_op.name, len(pairs), type_name(options)])
            return [self.reduce_implementation(reduce_op, value, target, options) for value, target in pairs]

        def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
            log.append(["broadcast", type_name(tensor)])
            return super().broadcast_implementation(tensor, destinations)

    strategy = ms.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=Mine())
    values = [constant(1.0), constant(2.0)]
    reduced = strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", values))
    ones = strategy.experimental_distribute_values_from_function(lambda context: constant(1.0))
    total = strategy.reduce("SUM", ones, axis=None)
    with strategy.scope():
        strategy.extended.broadcast_to(constant(1.0), "CPU:0")
    return {"all_reduce": reduced, "strategy.reduce": total, "log": log}


@program("duplicate_devices")
def duplicate_devices(env: Env, p: Inputs) -> Any:
    def unknown() -> Any:
        return ms.MirroredStrategy(["GPU:0", "GPU:1"]).run(lambda: 1)

    return {
        "result": env.attempt(lambda: ms.MirroredStrategy(["CPU:0", "CPU:0"]) and None),
        "empty list": env.attempt(lambda: ms.MirroredStrategy([]).num_replicas_in_sync),
        "unknown device": env.attempt(unknown),
    }


@program("accumulation_fn_not_callable")
def accumulation_fn_not_callable(env: Env, p: Inputs) -> Any:
    ops = env.attempt(lambda: ms.ReductionToOneDevice(accumulation_fn=3))
    if env.failed(ops):
        return {"result": ops}
    value = one_to_n(env)
    with env.strategy.scope():
        result = env.attempt(lambda: ops.reduce(ms.ReduceOp.SUM, value, value))
        return {"constructed": True, "result": result}


def _homes_on_rank(observed: Json, rank: int, case: Json) -> Json:
    """Of the devices where a value lives, those of this rank."""
    return {name: [d for d in devices if d == f"device:CPU:{rank}"] for name, devices in observed.items()}


@program("result_devices", view=_homes_on_rank)
def result_devices(env: Env, p: Inputs) -> Any:
    ops = ms.ReductionToOneDevice(reduce_to_device="CPU:1")
    value = one_to_n(env)

    def homes(result: Any) -> list[str]:
        lives_here = not isinstance(result, ms.DistributedValues) or bool(result.values)
        return [device.split("/")[-1] for device in env.strategy.extended.worker_devices] if lives_here else []

    with env.strategy.scope():
        v = variable(0.0)
        return {
            "reduce to value": homes(ops.reduce(ms.ReduceOp.SUM, value, value)),
            "reduce to variable": homes(ops.reduce(ms.ReduceOp.SUM, value, v)),
            "reduce to device string CPU:0": homes(ops.reduce(ms.ReduceOp.SUM, value, "CPU:0")),
            "broadcast to variable": homes(ops.broadcast(constant(1.0), v)),
            "broadcast to CPU:1": homes(ops.broadcast(constant(1.0), "CPU:1")),
        }
