"""Datasets whose batches every replica gets.

The recorded `tf.data.Dataset.range(n).batch(b)` is `Dataset.from_arrays(np.arange(n), b)`: global batches of the rows
of an array.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import mpistrategy as ms
from conformance.environment import Env, Inputs, program
from conformance.tensorflow import compact
from conformance.values import UnsupportedProgramError

POLICIES = (None, "AUTO", "FILE", "DATA", "OFF", "HINT")


@program
def distribute_dataset(env: Env, p: Inputs) -> Any:
    if p.get("policy") not in POLICIES:
        raise UnsupportedProgramError(f"no sharding policy {p['policy']!r} is known")
    data: Any = list(np.arange(p["elements"]))

    def go() -> Any:
        remainder = p.get("drop_remainder", False)
        size = p.get("global_batch")
        batches = ms.Dataset.from_arrays(np.arange(p["elements"]), size, drop_remainder=remainder) if size else data
        return compact(env, env.strategy.experimental_distribute_dataset(batches))

    return {"result": env.attempt(go)}


def note_context(env: Env, context: ms.InputContext) -> None:
    """Record what a function that makes input was told."""
    names = ("num_input_pipelines", "input_pipeline_id", "num_replicas_in_sync")
    env.lnote("input context", {name: getattr(context, name) for name in names})


@program
def distribute_dataset_from_function(env: Env, p: Inputs) -> Any:
    def dataset_fn(context: ms.InputContext) -> Any:
        note_context(env, context)
        size = context.get_per_replica_batch_size(p["global_batch"])
        step = slice(context.input_pipeline_id, None, context.num_input_pipelines) if p.get("shard") else slice(None)
        return ms.Dataset.from_arrays(np.arange(p["elements"])[step], size)

    return {"result": env.attempt(lambda: compact(env, env.strategy.distribute_datasets_from_function(dataset_fn)))}


@program
def v1_iterator(env: Env, p: Inputs) -> Any:
    strategy, numbers = env.strategy, np.arange(p["elements"])

    def input_fn(context: ms.InputContext) -> Any:
        note_context(env, context)
        size = p["global_batch"]
        own_size = context.get_per_replica_batch_size(size) if p.get("divide", True) else size
        return ms.Dataset.from_arrays(numbers, own_size)

    def go() -> Any:
        with strategy.scope():
            if p["method"] == "make_dataset_iterator":
                iterator = strategy.make_dataset_iterator(ms.Dataset.from_arrays(numbers, p["global_batch"]))
            else:
                iterator = strategy.make_input_fn_iterator(input_fn)
            iterator.initialize()
            return [env.attempt(strategy.experimental_run, lambda x: x * 10, iterator) for _ in range(p["steps"])]

    return {"result": env.attempt(go)}
