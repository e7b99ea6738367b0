"""Copies, devices, old names of strategies: what the recorded programs mean."""

from __future__ import annotations

import copy
import types
from typing import Any

import numpy as np

import mpistrategy as ms

from .environment import Env, constant, variable
from .names import strategy_name
from .programs_context import _id_tensor as id_tensor
from .registry import program

Inputs = dict[str, Any]


@program("deepcopy")
def deepcopy(env: Env, p: Inputs) -> Any:
    original = env.strategy
    copied = env.attempt(copy.deepcopy, original)
    if env.failed(copied):
        return {"result": copied}
    observed = {
        "type": "CollectiveAllReduceStrategy" if env.kind == "multi_worker" else strategy_name(copied),
        "is a new object": copied is not original,
        "extended is new": copied.extended is not original.extended,
        "extended knows the copy": copied.extended._container_strategy is copied,
        "num_replicas_in_sync": copied.num_replicas_in_sync,
        "worker_devices equal": copied.extended.worker_devices == original.extended.worker_devices,
        "run on the copy": env.attempt(lambda: copied.run(id_tensor)),
    }
    with original.scope():
        v = variable(1.0)
    return {**observed, "variable of the original belongs to the copy": copied.extended.variable_created_in_scope(v)}


@program("deepcopy_default")
def deepcopy_default(env: Env, p: Inputs) -> Any:
    return {"result": env.attempt(copy.deepcopy, env.strategy)}


@program("shallow_copy")
def shallow_copy(env: Env, p: Inputs) -> Any:
    return {"result": env.attempt(copy.copy, env.strategy)}


@program("devices")
def devices(env: Env, p: Inputs) -> Any:
    extended = env.strategy.extended
    with env.strategy.scope():
        second, first = variable(1.0, name="b_var"), variable(1.0, name="a_var")
    found = env.attempt(extended.non_slot_devices, [second, first])
    names = (
        "worker_devices", "parameter_devices", "experimental_require_static_shapes", "experimental_between_graph",
        "experimental_should_init", "should_checkpoint", "should_save_summary",
    )  # fmt: skip
    observed = {name: env.attempt(getattr, extended, name) for name in names}
    return {**observed, "non_slot_devices": "the variable whose name sorts first" if found is first else found}


@program("update_config_proto")
def update_config_proto(env: Env, p: Inputs) -> Any:
    # What a session's configuration is to us: an object with attributes.
    given = types.SimpleNamespace(
        intra_op_parallelism_threads=3,
        isolate_session_state=False,
        device_filters=[],
        collective_group_leader="",
        enable_op=[],
    )
    updated = env.attempt(env.strategy.update_config_proto, given)
    if env.failed(updated):
        return {"result": updated}
    return {
        "is a new object": updated is not given,
        "original isolate_session_state": given.isolate_session_state,
        "isolate_session_state": updated.isolate_session_state,
        "intra_op_parallelism_threads kept": updated.intra_op_parallelism_threads,
        "equal to the original": updated == given,
        "device_filters": updated.device_filters,
        "collective_group_leader": updated.collective_group_leader,
        "scoped_allocator enable_op": updated.enable_op,
    }


NAMES = (
    "experimental_initialize", "experimental_finalize", "experimental_run", "experimental_run_v2", "run",
    "make_dataset_iterator", "make_input_fn_iterator", "experimental_make_numpy_dataset", "unwrap", "group",
    "update_config_proto", "configure", "colocate_vars_with", "experimental_local_results",
    "experimental_distribute_dataset", "experimental_distribute_datasets_from_function",
    "distribute_datasets_from_function", "gather", "cluster_resolver", "broadcast", "initialize", "finalize",
    "call_for_each_replica", "read_var", "batch_reduce", "value_container", "non_slot_devices", "worker_devices",
)  # fmt: skip


@program("no_longer_there")
def no_longer_there(env: Env, p: Inputs) -> Any:
    strategy, data = env.strategy, ms.Dataset.from_arrays(np.arange(4), 2)
    return {
        **{name: hasattr(strategy, name) for name in NAMES},
        "make_dataset_iterator(dataset)": env.attempt(lambda: strategy.make_dataset_iterator(data)),
        "make_input_fn_iterator(fn)": env.attempt(lambda: strategy.make_input_fn_iterator(lambda context: data)),
        "experimental_run(fn)": env.attempt(lambda: strategy.experimental_run(lambda: constant(1.0))),
    }
