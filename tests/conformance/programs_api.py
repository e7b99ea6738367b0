"""What exists, with which signature: what the recorded programs mean.

tests/whole/test_api_surface.py compares the recorded members with ours one by one.
"""

from __future__ import annotations

import inspect
from typing import Any

import mpistrategy as ms

from .environment import Env
from .registry import program
from .values import Json, Raw

Inputs = dict[str, Any]

#: The recorded classes, and what they are called here.
CLASSES = {
    "tf.distribute.Strategy": ms.Strategy,
    "tf.compat.v1.distribute.Strategy": ms.Strategy,
    "tf.distribute.StrategyExtended": ms.StrategyExtended,
    "tf.compat.v1.distribute.StrategyExtended": ms.StrategyExtended,
    "tf.distribute.ReplicaContext": ms.ReplicaContext,
    "tf.compat.v1.distribute.ReplicaContext": ms.ReplicaContext,
    "tf.distribute.MirroredStrategy": ms.MirroredStrategy,
    "tf.distribute.MultiWorkerMirroredStrategy": ms.MirroredStrategy,
    "tf.distribute.OneDeviceStrategy": ms.OneDeviceStrategy,
    "tf.distribute.CrossDeviceOps": ms.CrossDeviceOps,
    "tf.distribute.ReductionToOneDevice": ms.ReductionToOneDevice,
    "tf.distribute.InputContext": ms.InputContext,
    "tf.distribute.experimental.ValueContext": ms.ValueContext,
    "tf.distribute.DistributedValues": ms.DistributedValues,
    "tf.distribute.experimental.CommunicationOptions": ms.CommunicationOptions,
}
SPECIAL = ("__init__", "__deepcopy__", "__copy__", "__enter__", "__exit__")

#: The names of the TensorFlow 1 documents.
OLD_NAMES = {
    "Strategy": (
        "__init__", "extended", "num_replicas_in_sync", "__deepcopy__", "experimental_finalize",
        "experimental_initialize", "experimental_run", "experimental_run_v2", "run", "make_dataset_iterator",
        "make_input_fn_iterator", "reduce", "scope", "update_config_proto", "experimental_local_results",
        "experimental_distribute_dataset", "experimental_distribute_datasets_from_function",
    ),
    "StrategyExtended": (
        "experimental_require_static_shapes", "parameter_devices", "worker_devices", "batch_reduce_to",
        "colocate_vars_with", "non_slot_devices", "reduce_to", "update", "update_non_slot", "value_container",
        "variable_created_in_scope", "broadcast_to", "call_for_each_replica", "read_var", "experimental_between_graph",
        "experimental_should_init", "should_checkpoint", "should_save_summary",
    ),
    "ReplicaContext": (
        "devices", "num_replicas_in_sync", "replica_id_in_sync_group", "strategy", "all_reduce", "merge_call",
        "all_gather", "__enter__", "__exit__",
    ),
}  # fmt: skip


def surface(cls: type) -> Json:
    """The public members of a class with their signatures, without annotations."""
    members = {}
    for name in sorted(dir(cls)):
        if name.startswith("_") and name not in SPECIAL:
            continue
        member = getattr(cls, name)
        if isinstance(inspect.getattr_static(cls, name), property):
            members[name] = "property"
        elif callable(member):
            members[name] = signature(member)
        else:
            members[name] = type(member).__name__
    return members


def signature(function: Any) -> str:
    """A signature as TensorFlow's are recorded: parameters and defaults."""
    plain = inspect.signature(function)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in plain.parameters.values()]
    return str(plain.replace(parameters=bare, return_annotation=inspect.Signature.empty))


@program("classes")
def classes(env: Env, p: Inputs) -> Any:
    return {"members": Raw({name: surface(cls) for name, cls in CLASSES.items()})}


@program("modules")
def modules(env: Env, p: Inputs) -> Any:
    # One module has the names of all three.
    names = [name for name in dir(ms) if not name.startswith("_")]
    return {"tf.distribute": names, "tf.distribute.experimental": names, "tf.compat.v1.distribute": names}


@program("seed_names")
def seed_names(env: Env, p: Inputs) -> Any:
    strategy = ms.OneDeviceStrategy("CPU:0")
    objects = {
        "Strategy": strategy,
        "StrategyExtended": strategy.extended,
        "ReplicaContext": ms.get_replica_context(),
    }

    def where(kind: str, name: str) -> Json:
        there = hasattr(getattr(ms, kind), name)
        on_object = name in dir(objects[kind])
        return {"tf.distribute class": there, "compat.v1 class": there, "on a MirroredStrategy object": on_object}

    return {"names": Raw({kind: {name: where(kind, name) for name in names} for kind, names in OLD_NAMES.items()})}
