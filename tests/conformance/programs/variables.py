"""The matrix of variables: creation, reads, writes, scatter updates and checkpoints, in every context."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

import mpistrategy as ms
from conformance.environment import Env, Inputs, program
from conformance.tensorflow import is_distributed, role
from conformance.values import Caught, Json, Raw, UnsupportedProgramError, decode, dtype_of, nested
from mpistrategy.testing import run_replicas

#: Contexts in which an ON_READ variable is more than this replica's copy.
CROSS_REPLICA = ("cross_replica", "merge_call", "outside")
#: What the copies were given where there were more replicas than the recorded inputs speak of.
MORE_VALUES = (6.0, 15.0)


def make_variable(p: Inputs) -> ms.Variable:
    """The variable that a case is about."""
    options = {name: p[name] for name in ("synchronization", "aggregation", "trainable") if name in p}
    return ms.Variable(decode(p["initial"]), **options)


def preset_variable(env: Env, p: Inputs) -> ms.Variable:
    """The same; the copies of an ON_READ variable get different values, by an assign in a step function."""
    with env.strategy.scope():
        v = make_variable(p)
    if p.get("preset"):
        values = [decode(node) for node in p["preset"]]
        env.run(lambda: v.assign(env.pick(values)))
    return v


def in_context(env: Env, where: str, v: ms.Variable, function: Callable[[Any], Any]) -> Any:
    """Call ``function(target)`` in a context; the target is what code there would hold."""
    strategy = env.strategy
    match where:
        case "replica":
            return env.attempt(env.run, lambda: function(v))
        case "cross_replica":
            return env.attempt_in_scope(function, v)
        case "merge_call":
            return env.attempt(env.run, lambda: ms.get_replica_context().merge_call(lambda _: function(v)))
        case "update_component":
            return env.attempt_in_scope(strategy.extended.update, v, function)
        case "update_container":
            return env.attempt_in_scope(strategy.extended.update, v, lambda component: function(v))
        case "outside":
            return env.attempt(function, v)
        case "other_scope" | "other_run":
            return in_another_strategy(env, where, lambda: function(v))
    raise UnsupportedProgramError(f"no context is known that is called {where!r}")


def in_another_strategy(env: Env, where: str, call: Callable[[], Any]) -> Any:
    """Call in the scope or in a step function of another strategy."""
    with closing(env.new_strategy()) as other:
        if where == "other_run":
            return env.attempt(other.run, call)
        with other.scope():
            return env.attempt(call)


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


@program
def variable_read(env: Env, p: Inputs) -> Any:
    if p["how"] not in WAYS_TO_READ:
        raise UnsupportedProgramError(f"no way to read a variable is known that is called {p['how']!r}")
    v = preset_variable(env, p)
    copies = env.comps(v)
    return {"copies": copies, "result": in_context(env, p["where"], v, WAYS_TO_READ[p["how"]])}


# ------------------------------------------------------------------------------------------------ writes


def value_maker(env: Env, p: Inputs) -> Callable[[], Any]:
    """The function that gives the value to write, called where it is written."""
    values = [decode(node) for node in p["values"]]
    match p["value_kind"]:
        case "same_tensor_object" | "python_number":
            return lambda: values[0]
        case "equal_tensors":
            return lambda: values[0].copy()
        case "own_of_each_replica":
            in_a_step = env.kind != "default"
            return lambda: env.pick(values) if in_a_step and ms.get_replica_context() is not None else values[0]
        case "per_replica_object" | "mirrored_object" as kind:
            key = "per_replica" if kind == "per_replica_object" else "mirrored_from_sum_of"
            with env.strategy.scope():
                container = env.given({key: p["values"]})
            return lambda: container
    raise UnsupportedProgramError(f"no kind of value is known that is called {p['value_kind']!r}")


def changed(env: Env, p: Inputs, v: ms.Variable, change: Callable[[Any], Any]) -> dict[str, Any]:
    """Change a variable in the context of the case.

    Where TensorFlow's write returns the aggregate, read back at once, ours returns the variable, whose reading does
    the same and is refused for the same reason.
    """
    before = env.comps(v)
    result = in_context(env, p["where"], v, change)
    observed = {"copies before": before, "copies after": env.comps(v)}
    reads_back = p["synchronization"] == "ON_READ" and p["where"] in CROSS_REPLICA and is_distributed(env, v)
    if reads_back and isinstance(result, ms.Variable):
        result = env.attempt_in_scope(result.read_value)
    return {**observed, "result": result}


@program
def variable_write(env: Env, p: Inputs) -> Any:
    v = preset_variable(env, p)
    value, options = value_maker(env, p), {"read_value": False} if p.get("read_value") is False else {}
    observed = changed(env, p, v, lambda target: getattr(target, p["op"])(value(), **options))
    return {**observed, "cross-replica read after": env.attempt_in_scope(v.read_value)}


@program
def scatter(env: Env, p: Inputs) -> Any:
    def change(target: Any) -> Any:
        rows = np.float32(env.rid() + 1 if p["where"] == "replica" and p.get("own_values") else 1)
        values = np.array([[10.0], [20.0]], np.float32) * rows
        return getattr(target, p["op"])(ms.IndexedSlices(values, np.array([0, 2], np.int32)))

    return changed(env, p, preset_variable(env, p), change)


# ------------------------------------------------------------------------------------------------ creation


def initial_value(env: Env, p: Inputs, calls: list[int]) -> Any:
    """The initial value, or the initializer function, which counts its calls."""
    match p["initial"]:
        case {"by_rank": nodes}:
            return decode(nodes[env.rank])
        case {"callable": nodes}:
            first = env.rank if p.get("by_rank") else 0

            def initializer() -> Any:
                calls.append(1)
                return decode(nodes[(len(calls) - 1 + first) % len(nodes)])

            return initializer
    return decode(p["initial"])


@program
def variable_create(env: Env, p: Inputs) -> Any:
    if "shape" in p:
        raise UnsupportedProgramError("variables have the shape of their initial value")
    calls: list[int] = []
    options = {key: p[key] for key in ("trainable", "name", "synchronization", "aggregation") if p.get(key) is not None}
    if p.get("dtype"):
        options["dtype"] = dtype_of(p["dtype"])

    def make() -> ms.Variable:
        return ms.Variable(initial_value(env, p, calls), **options)

    ways = {"replica": lambda: env.attempt(env.run, make), "outside": lambda: env.attempt(make)}
    v = ways.get(p.get("where", ""), lambda: env.attempt_in_scope(make))()
    if not isinstance(v, ms.Variable):
        return {"result": v}
    observed: dict[str, Json] = {
        "kind": role(env, v).__name__,
        "synchronization": v.synchronization.name,
        "aggregation": v.aggregation.name,
        "trainable": v.trainable,
        "dtype": v.dtype.name,
        "shape": list(v.shape),
        "copies": env.comps(v),
        "name": v.name,
        "names of the copies": [v.name],
    }
    return {**observed, "initializer calls in this process": len(calls)} if calls else observed


# ------------------------------------------------------------------------------------------------ checkpoints


def value_in(path: Path) -> Any:
    """What is in the file: an array, or a number of NumPy's; of what each rank has for itself, rank 0's."""
    arrays = ms.Checkpoint.arrays(path)
    array = arrays.get("v", arrays.get("v@0"))
    return array if array.ndim else array[()]


@program
def checkpoint(env: Env, p: Inputs) -> Any:
    v = preset_variable(env, p)
    with tempfile.TemporaryDirectory() as own:
        folder = env.strategy.extended.communicator.allgather_text(own)[0]  # the ranks save together, in one place
        path = Path(folder) / "ckpt"
        observed: dict[str, Any] = {"copies before saving": env.comps(v)}
        saved = env.attempt(ms.Checkpoint(v=v).save, path)
        if isinstance(saved, Caught):
            return {"result": saved}
        observed["value in the file"] = value_in(path)
        env.attempt_in_scope(v.assign, np.zeros(v.shape, v.dtype))
        observed["copies before restoring"] = env.comps(v)
        restored = env.attempt(ms.Checkpoint(v=v).restore, path)
        if isinstance(restored, Caught):
            return {**observed, "result": restored}
        observed["copies after restoring"] = env.comps(v)
        observed["cross-replica read after restoring"] = env.attempt_in_scope(v.read_value)
        if p.get("restore_outside"):
            with ms.OneDeviceStrategy().scope():  # outside every scope the Checkpoint would belong to all ranks
                w = ms.Variable(decode(p["initial"]))
            outside = env.attempt(ms.Checkpoint(v=w).restore, path)
            observed["a plain variable outside every strategy after restoring"] = (
                outside if isinstance(outside, Caught) else w
            )
        env.strategy.barrier("all have read")
        return observed


@program
def checkpoint_other_count(env: Env, p: Inputs) -> Any:
    """Saved on some replicas, restored on others: simulated ones, whatever number of ranks this runs on."""
    values = [*(decode(node) for node in p["preset"]), *MORE_VALUES]

    def save() -> Any:
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            v = make_variable(p)
        if p["synchronization"] == "ON_READ":
            strategy.run(lambda: v.assign(values[strategy.replica_id_in_sync_group]))
        ms.Checkpoint(v=v).save(path)
        return nested(v.local_copy())

    def restore() -> Any:
        with ms.MirroredStrategy().scope():
            w = make_variable(p)
            ms.Checkpoint(v=w).restore(path)
            return nested(w.local_copy()), w.read_value()

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c"
        saved = run_replicas(save, p["save_replicas"])
        restored = run_replicas(restore, p["restore_replicas"])
        return {
            "saved copies": Raw(saved),
            "value in the file": value_in(path),
            "restored copies": Raw([copy for copy, _ in restored]),
            "cross-replica read": restored[0][1],
        }
