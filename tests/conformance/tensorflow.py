"""Runs the source of a recorded program, the very text that TensorFlow ran, with a stand-in for the module `tf`.

Only sources of our own recordings are run: a case from elsewhere names a program, and the source is the one kept here.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

import mpistrategy as ms
from mpistrategy.arrays.convert import is_on_device
from mpistrategy.optimizers import SGD

from .cases import load_cases
from .environment import PROGRAMS, Env, Inputs, constant, variable
from .values import Caught, Json, Raw, UnsupportedProgramError, nested

#: What a source has to say otherwise here: an expression and what takes its place, in one program or in all ("").
AMENDMENTS = [
    # A rank has one component of a variable, and that is the variable; an array stands for one by itself.
    ("", r"\._get\(\)", ""),
    ("", r"\.values\[0\]", ".numpy()"),
    ("", r"\.numpy\(\)", ".numpy().copy()"),
    ("value_container", r"\[tf.identity\(1.\), tf.identity\(4.\)\]", "[tf.identity(1.)] * env.n"),
    ("colocate_vars_with", r"dev\(v\) == dev\(w\)", "w.strategy is v.strategy"),
    ("result_devices", r"v\.device", "env.strategy.extended.worker_devices[0]"),
    # Replica ids and answers of iterators are Python's here, and tensors there.
    ("", r"(\bctx|tf\.distribute\.get_replica_context\(\))\.replica_id_in_sync_group", "id_tensor()"),
    ("", r"(\w+(?:\.get_next_as_optional\(\))?\.has_value\(\))", r"tf.constant(\1)"),
    # The context of another replica lives in another process; one made for its id is the nearest thing.
    ("other_replicas_context", r"kept\[0\]", "tf.distribute.ReplicaContext(env.strategy, 0)"),
    ("", r'(\bd|tf\.compat\.v1\.distribute)\.MirroredStrategy\(\["CPU:0", "CPU:1"\]\)', "env.strategy"),
    ("v1_numpy_dataset", r"x\.numpy\(\)\.copy\(\)", "x"),
    ("v1_numpy_dataset", r"s\.experimental_make_numpy_dataset\(", "s.distribute_datasets_from_function(lambda _: "),
    ("element_spec", r"\.element_spec", ""),
    ("signatures", r"D\.InputOptions\._fields", "inspect.signature(D.InputOptions).parameters"),
    ("signatures", r"c\.__mro__\[1:-1\]", "c.__mro__[1:-1] if hasattr(D, b.__name__)"),
    ("cross_replica_write_returns", r'"the v', '"Tensor %r" % v.read_value()[()] if r is v is s else "the v'),
    ("deepcopy", r"_container_strategy\(\)", "_container_strategy"),
    ("handle_contexts", r"env\.run\(", "env.attempt(env.run, "),
    ("keras_apply_gradients_cross_replica", r"v\.value\b", "v"),
    ("v1_global_step", r"gs = ", "gs = o.iterations = "),
    ("v1_global_step", r", global_step=gs", ""),
]  # fmt: skip


class _IsTensor(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, (np.ndarray, np.generic)) or is_on_device(value)


class Tensor(metaclass=_IsTensor):
    """tf.Tensor: arrays and NumPy's numbers, also in GPU memory."""


@functools.cache
def sources() -> dict[str, str]:
    """Return the sources of the recorded programs, by name."""
    return {case["program"]: "\n".join(case["code"]) for case in load_cases() if "code" in case}


def program_named(name: str) -> Callable[[Env, Inputs], Any]:
    """Return what a recorded program means: a function of ours, or its own source."""
    if name in PROGRAMS:
        return PROGRAMS[name]
    if name not in sources():
        raise UnsupportedProgramError(f"no function and no source for program {name!r}")
    return functools.partial(run_source, name)


def run_source(name: str, env: Env, inputs: Inputs) -> Any:
    """Run the source of a program."""
    text = sources()[name]
    for where, pattern, replacement in AMENDMENTS:
        if where in ("", name):
            text = re.sub(pattern, replacement, text)
    here = {**NAMES, "type": functools.partial(role, env)}
    exec(compile(text, f"<{name}>", "exec"), here)
    return here[name](env)


# ------------------------------------------------------------------------------------------------ roles of objects


def role(env: Env, value: Any) -> SimpleNamespace:
    """Return what stands for `type(value)`: TensorFlow's name of the class that plays this part."""
    name = type(value).__name__
    match value:
        case ms.Strategy():
            name = "CollectiveAllReduceStrategy" if env.kind == "multi_worker" else name
            name = "_DefaultDistributionStrategy" if value._is_default else name
        case ms.ReplicaContext():
            kinds = {"one_device": "_OneDeviceReplicaContext", "default": "_DefaultReplicaContext"}
            name = kinds["default"] if value.strategy._is_default else kinds.get(env.kind, "_MirroredReplicaContext")
        case ms.Variable():
            on_read = value.synchronization is ms.VariableSynchronization.ON_READ
            name = "SyncOnReadVariable" if on_read else "MirroredVariable"
            name = name if is_distributed(env, value) else "ResourceVariable"
        case ms.CommunicationOptions():
            name = "Options"
        case np.ndarray() | np.generic():
            name = "EagerTensor"
    return SimpleNamespace(__name__="EagerTensor" if is_on_device(value) else name)


def is_distributed(env: Env, v: ms.Variable) -> bool:
    """Return whether TensorFlow has a distributed variable here, and not a plain one."""
    return env.kind in ("mirrored", "multi_worker") and env.strategy.extended.variable_created_in_scope(v)


def id_tensor() -> np.ndarray[Any, Any]:
    """The replica id as TensorFlow has it, an int32 tensor; ours is a Python int."""
    replica_id = ms.get_replica_context().replica_id_in_sync_group
    if type(replica_id) is not int:
        raise TypeError(f"replica_id_in_sync_group is {replica_id!r}, not a Python int")
    return np.array(replica_id, np.int32)


# ------------------------------------------------------------------------------------------------ helpers of programs


def context_state(env: Env) -> Json:
    """What the context functions say here and now."""
    context, strategy = ms.get_replica_context(), ms.get_strategy()
    return {
        "get_replica_context": None if context is None else role(env, context).__name__,
        "in_cross_replica_context": ms.in_cross_replica_context(),
        "has_strategy": ms.has_strategy(),
        "get_strategy": "the strategy" if strategy is env.strategy else role(env, strategy).__name__,
        "get_strategy().num_replicas_in_sync": strategy.num_replicas_in_sync,
    }


def in_each_context(env: Env, call: Callable[[], Any]) -> dict[str, Any]:
    """One call where no scope is entered, in scope, in a step function, in another strategy's scope."""
    observed = {"no scope": env.attempt(call), "scope": env.attempt_in_scope(call)}
    observed["step function"] = env.attempt(env.run, call)
    if env.kind == "mirrored":
        with env.new_strategy().scope():
            observed["another strategy's scope"] = env.attempt(call)
    return observed


def compact(env: Env, elements: Iterable[Any], limit: int = 20) -> Raw:
    """Elements as plain nested lists, one a local replica."""
    taken = itertools.islice(iter(elements), limit)
    return Raw([[nested(part) for part in env.strategy.experimental_local_results(element)] for element in taken])


def bare_signature(function: Any) -> Any:
    """The signature of a function without annotations, which TensorFlow's have not."""
    plain = inspect.signature(function)
    if function is object.__init__:
        return "(self)"
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in plain.parameters.values()]
    return plain.replace(parameters=bare, return_annotation=inspect.Signature.empty)


# ------------------------------------------------------------------------------------------------ the module tf


class Distribute:
    """tf.distribute, its experimental module and that of TensorFlow 1: here they are one."""

    experimental = ms
    MultiWorkerMirroredStrategy = ms.MirroredStrategy

    def __getattr__(self, name: str) -> Any:
        return getattr(ms, name)


class Rows:
    """tf.data.Dataset: the rows of an array, which may begin again without end."""

    def __init__(self, array: Any, *, endless: bool = False) -> None:
        self.array, self.endless = array, endless

    def __iter__(self) -> Iterator[Any]:
        return iter(itertools.cycle(self.array) if self.endless else self.array)

    def repeat(self) -> Rows:
        return Rows(self.array, endless=True)

    def shard(self, count: int, index: int) -> Rows:
        return Rows(self.array[index::count])

    def shuffle(self, size: int, seed: int, reshuffle_each_iteration: bool) -> Rows:
        return Rows(np.random.default_rng(seed).permutation(self.array))

    def batch(self, size: int) -> Any:
        rows = iter(self)
        endless = (np.array(list(itertools.islice(rows, size))) for _ in itertools.count())
        return endless if self.endless else ms.Dataset.from_arrays(self.array, size)


class InMemory:
    """tf.train.Checkpoint: what one process alone would find in a file, the cross-replica value."""

    files: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, v: ms.Variable) -> None:
        self.variable = v

    def write(self, path: str) -> None:
        self.files[path] = self.variable.read_value()


def session_options(intra_op_parallelism_threads: int) -> Any:
    """What a session's configuration is to us: an object with attributes."""
    rewriting = SimpleNamespace(scoped_allocator_opts=SimpleNamespace(enable_op=[]))
    return SimpleNamespace(
        intra_op_parallelism_threads=intra_op_parallelism_threads,
        isolate_session_state=False,
        device_filters=[],
        experimental=SimpleNamespace(collective_group_leader=""),
        graph_options=SimpleNamespace(rewrite_options=rewriting),
    )


distribute = Distribute()
tf = SimpleNamespace(
    Tensor=Tensor,
    TensorShape=tuple,
    Variable=lambda value, shape=None, **options: variable(value, **options),
    VariableAggregation=ms.VariableAggregation,
    VariableSynchronization=ms.VariableSynchronization,
    add=np.add,
    cast=lambda value, dtype: value.astype(dtype),
    compat=SimpleNamespace(
        v1=SimpleNamespace(
            ConfigProto=session_options,
            distribute=distribute,
            train=SimpleNamespace(GradientDescentOptimizer=SGD),
        )
    ),
    constant=constant,
    data=SimpleNamespace(
        Dataset=SimpleNamespace(
            from_tensor_slices=lambda arrays: Rows({name: constant(rows) for name, rows in arrays.items()}),
            range=lambda *bounds: Rows(np.arange(*bounds)),
        )
    ),
    distribute=distribute,
    float32=np.float32,
    float64=np.float64,
    function=lambda function: function,
    identity=constant,
    int64=np.int64,
    keras=SimpleNamespace(Variable=variable, optimizers=SimpleNamespace(SGD=SGD)),
    name_scope=contextlib.nullcontext,
    nest=SimpleNamespace(map_structure=lambda function, value: function(value)),
    reduce_sum=np.sum,
    train=SimpleNamespace(Checkpoint=InMemory, load_variable=lambda path, name: InMemory.files[path]),
)
NAMES = {
    "Caught": Caught,
    "D": distribute,
    "RO": ms.ReduceOp,
    "Raw": Raw,
    "VA": ms.VariableAggregation,
    "VS": ms.VariableSynchronization,
    "_wrong": in_each_context,
    "compact": compact,
    "copy": copy,
    "ctx_state": context_state,
    "id_tensor": id_tensor,
    "inspect": SimpleNamespace(signature=bare_signature),
    "os": os,
    "place": lambda env, value, replica: value,
    "surface": dir,
    "tempfile": SimpleNamespace(mkdtemp=lambda: "folder"),
    "tf": tf,
}
