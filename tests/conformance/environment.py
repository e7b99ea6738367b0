"""What a program may use on one rank: the strategy of the case's environment, its inputs, its notes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import mpistrategy as ms
from mpistrategy.arrays.convert import host_array, is_on_device

from . import on_device
from .values import Caught, Json, Raw, decode, encode, encode_error, nested

Inputs = dict[str, Any]
Program = Callable[["Env", Inputs], Any]
PROGRAMS: dict[str, Program] = {}
KINDS = {
    "MirroredStrategy": "mirrored",
    "MultiWorkerMirroredStrategy": "multi_worker",
    "OneDeviceStrategy": "one_device",
}
DEFAULTS = {np.dtype(np.float64): np.float32, np.dtype(np.int64): np.int32}


def program(function: Program) -> Program:
    """Register a function as the meaning of the recorded program with its name."""
    PROGRAMS[function.__name__] = function
    return function


def kind_of(case: Json) -> str:
    """Return where a case was recorded: "mirrored", "multi_worker", "one_device" or "default"."""
    return KINDS.get(case.get("strategy", ""), "default")


class Env:
    """The environment of one case on one rank.

    Args:
        case: the recorded case.
        rank: this rank's number.
        strategies: what the cases before this one have made; a new strategy is added.

    Attributes:
        kind: "mirrored" (recorded in one process), "multi_worker", "one_device" or "default".
        n: the number of replicas.
        notes: observations made inside step and merge functions, in the recordings' spelling.
    """

    def __init__(self, case: Json, rank: int, strategies: dict[Any, Any]) -> None:
        self.kind = kind_of(case)
        self.n: int = case["num_replicas"]
        self.rank = rank
        self.notes: dict[str, Any] = {}
        self._strategies = strategies
        self._cross_device_ops: str = case.get("cross_device_ops") or "" if self.kind == "mirrored" else ""

    @property
    def strategy(self) -> Any:
        """The strategy of this environment; cases of the same environment share it."""
        key = (self.kind, self.n, self._cross_device_ops)
        if key not in self._strategies:
            self._strategies[key] = self.new_strategy()
        return self._strategies[key]

    def new_strategy(self) -> Any:
        """Another strategy of the same kind, as a program that needs two makes it."""
        if self.kind == "mirrored":
            make = getattr(ms, self._cross_device_ops, None)
            devices = on_device.devices([f"CPU:{i}" for i in range(self.n)])
            return ms.MirroredStrategy(devices, cross_device_ops=make and make())
        if self.kind == "multi_worker":
            return ms.MirroredStrategy(on_device.devices(None))
        if self.kind == "one_device":
            return ms.OneDeviceStrategy(on_device.devices("CPU:0", "GPU:0"))
        return ms.get_strategy()

    # -------------------------------------------------------------------------------------------- inputs

    def rid(self) -> int:
        """The replica id as a Python int, inside a step function."""
        return int(ms.get_replica_context().replica_id_in_sync_group)

    def pick(self, values: Sequence[Any]) -> Any:
        """This replica's entry of a list with one entry a replica, inside a step function."""
        return values[self.rid()]

    def per_replica(self, values: Sequence[Any]) -> Any:
        """A PerReplica with ``values[i]`` on replica i."""
        return self.strategy.experimental_distribute_values_from_function(
            lambda context: values[context.replica_id_in_sync_group]
        )

    def given(self, node: Json) -> Any:
        """An input that may be a PerReplica, a Mirrored made by a sum, a plain value, or a nest of these."""
        match node:
            case {"per_replica": nodes} | {"per_replica_argument": nodes}:
                return self.per_replica([decode(child) for child in nodes[: self.n]])
            case {"mirrored_from_sum_of": nodes}:
                value = self.given({"per_replica": nodes})
                return self.strategy.extended.reduce_to(ms.ReduceOp.SUM, value, value)
            case {"plain": child}:
                return decode(child)
            case {"list_of": nodes}:
                return [self.given(child) for child in nodes]
            case {"dict_of": nodes}:
                return {key: self.given(child) for key, child in nodes.items()}
        return decode(node)

    # -------------------------------------------------------------------------------------------- observation

    def note(self, name: str, value: Any) -> None:
        """Record an observation made inside a step function."""
        self.notes.setdefault(name, {})[f"replica {self.rid()}"] = encode(value)

    def lnote(self, name: str, value: Any) -> None:
        """Append an observation made anywhere to a list."""
        self.notes.setdefault(name, []).append(encode(value))

    def run(self, function: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
        """strategy.run."""
        return self.strategy.run(function, args=args, kwargs=kwargs)

    def attempt(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what `function` returns, or the exception that it raised as an observation."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            return Caught(error)

    def attempt_in_scope(self, function: Callable[..., Any], *args: Any) -> Any:
        """The same in the scope of the strategy."""
        with self.strategy.scope():
            return self.attempt(function, *args)

    def comps(self, variable: Any) -> Raw:
        """The numbers in the copies of a variable that live on this rank: one.  Never communicates."""
        return Raw([nested(variable.local_copy())])


def constant(value: Any, dtype: Any = None) -> np.ndarray[Any, Any]:
    """tf.constant: an array; Python floats become float32, Python ints int32, as TensorFlow chooses."""
    given = is_on_device(value) or isinstance(value, (np.ndarray, np.generic))
    array = np.asarray(host_array(value), dtype=dtype)
    return on_device.place(array if given or dtype else array.astype(DEFAULTS.get(array.dtype, array.dtype)))


def variable(value: Any, dtype: Any = None, **options: Any) -> Any:
    """tf.Variable: the initial value converted as tf.constant does."""
    return ms.Variable(constant(value, dtype), **options)


def run_program(env: Env, function: Program, inputs: Inputs) -> Json:
    """Run one program and return its outcome in the recordings' spelling."""
    returned = env.attempt(function, env, inputs)
    observed = returned if isinstance(returned, dict) else {"result": returned}
    failure = observed.get("result")
    if isinstance(failure, Caught):
        observed = {name: value for name, value in observed.items() if name != "result"}
    outcome: Json = {"status": "ok", "observed": {name: encode(value) for name, value in observed.items()}}
    if env.notes:
        outcome["observed"]["notes"] = env.notes
    return {**outcome, "status": "error", **encode_error(failure.error)} if isinstance(failure, Caught) else outcome
