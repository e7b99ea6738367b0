"""Datasets, input contexts, iterators: what the recorded programs mean.

The recorded `tf.data.Dataset.range(n).batch(b)` is `Dataset.from_arrays(np.arange(n), b)`: global batches of the rows
of an array.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

import mpistrategy as ms

from .environment import Env, constant, kind_of
from .programs_context import _id_tensor as id_tensor
from .registry import UnsupportedProgramError, program
from .values import Json, Raw, nested

Inputs = dict[str, Any]
POLICIES = ("AUTO", "FILE", "DATA", "OFF", "HINT")


def batches(elements: int, size: int, **options: Any) -> ms.Dataset:
    """The numbers below `elements`, in batches."""
    return ms.Dataset.from_arrays(np.arange(elements), size, **options)


def compact(env: Env, elements: Iterable[Any], limit: int = 20) -> Raw:
    """Elements as plain nested lists, one a local replica."""
    taken = itertools.islice(iter(elements), limit)
    return Raw([[nested(part) for part in env.strategy.experimental_local_results(element)] for element in taken])


def own_parts(observed: Json, rank: int, case: Json) -> Json:
    """Of each recorded element, which has a part a local replica, the rank's own."""
    if kind_of(case) != "mirrored" or "result" not in observed:
        return observed
    return {**observed, "result": [[parts[rank]] for parts in observed["result"]]}


# ------------------------------------------------------------------------------------------ global batches


@program("distribute_dataset", view=own_parts)
def distribute_dataset(env: Env, p: Inputs) -> Any:
    if p.get("policy") not in (None, *POLICIES):
        raise UnsupportedProgramError(f"no sharding policy {p['policy']!r} is known")

    def go() -> Any:
        if p.get("global_batch"):
            remainder = {"drop_remainder": p.get("drop_remainder", False)}
            return env.strategy.experimental_distribute_dataset(batches(p["elements"], p["global_batch"], **remainder))
        return env.strategy.experimental_distribute_dataset(list(np.arange(p["elements"])))

    return {"result": env.attempt(lambda: compact(env, go()))}


@program("not_batched")
def not_batched(env: Env, p: Inputs) -> Any:
    def go() -> Any:
        return compact(env, env.strategy.experimental_distribute_dataset(iter(np.arange(4))))

    return {"result": env.attempt(go)}


@program("not_a_dataset")
def not_a_dataset(env: Env, p: Inputs) -> Any:
    return {"result": env.attempt(lambda: env.strategy.experimental_distribute_dataset([1, 2]))}


@program("nested_elements")
def nested_elements(env: Env, p: Inputs) -> Any:
    arrays = {"x": constant([1.0, 2.0, 3.0, 4.0]), "y": constant([[1], [2], [3], [4]])}
    data = ms.Dataset.from_arrays(arrays, 4)
    return {"result": env.attempt(lambda: list(env.strategy.experimental_distribute_dataset(data)))}


@program("infinite_dataset_cardinality", view=own_parts)
def infinite_dataset_cardinality(env: Env, p: Inputs) -> Any:
    def endless() -> Iterator[Any]:
        numbers = itertools.cycle(range(3))
        while True:
            yield np.array(list(itertools.islice(numbers, 4)))

    return {"result": compact(env, env.strategy.experimental_distribute_dataset(endless()), limit=3)}


@program("shuffle_seeded", view=own_parts)
def shuffle_seeded(env: Env, p: Inputs) -> Any:
    shuffled = batches(8, 4, shuffle_seed=7)
    return {"result": compact(env, env.strategy.experimental_distribute_dataset(shuffled))}


@program("element_spec")
def element_spec(env: Env, p: Inputs) -> Any:
    return {"result": str(env.strategy.experimental_distribute_dataset(batches(4, 2)))}


@program("train_over_partial_batch")
def train_over_partial_batch(env: Env, p: Inputs) -> Any:
    results = []
    for x in env.strategy.experimental_distribute_dataset(ms.Dataset.from_arrays(np.arange(1, 8), 4)):
        sums = env.run(lambda y: np.sum(y), (x,))

        def mean_of_elements(x: Any = x) -> Any:
            return env.strategy.reduce("MEAN", env.run(lambda y: y.astype(np.float32), (x,)), axis=0)

        results.append(
            {
                "per replica": sums,
                "reduce SUM axis=None": env.strategy.reduce("SUM", sums, axis=None),
                "reduce MEAN axis=0 of the elements": env.attempt(mean_of_elements),
            }
        )
    return {"result": results}


@program("iterator_protocol")
def iterator_protocol(env: Env, p: Inputs) -> Any:
    distributed = env.strategy.experimental_distribute_dataset(batches(4, 2))
    iterator = iter(distributed)
    observed = {"first": next(iterator), "second": iterator.get_next()}
    observed["end"] = env.attempt(next, iterator)
    observed["after the end"] = env.attempt(next, iterator)
    observed["get_next at the end"] = env.attempt(iterator.get_next)
    observed["a new iterator starts again"] = next(iter(distributed))
    again = iter(distributed)
    optional = again.get_next_as_optional()
    observed["optional has_value"] = constant(optional.has_value())
    observed["optional value"] = optional.get_value()
    again.get_next()
    observed["optional at the end has_value"] = constant(again.get_next_as_optional().has_value())
    observed["type"] = type(distributed).__name__
    observed["iterator type"] = type(iterator).__name__
    return observed


@program("input_default_strategy")
def input_default_strategy(env: Env, p: Inputs) -> Any:
    data, log = batches(5, 2), []

    def dataset_fn(context: ms.InputContext) -> Any:
        log.append([context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync])
        return data

    strategy = env.strategy
    values = strategy.experimental_distribute_values_from_function(
        lambda context: [context.replica_id_in_sync_group, context.num_replicas_in_sync]
    )
    return {
        "distribute_dataset returns it unchanged": strategy.experimental_distribute_dataset(data) is data,
        "from_function returns what the function gave": strategy.distribute_datasets_from_function(dataset_fn) is data,
        "input context": log,
        "values": values,
    }


# ------------------------------------------------------------------------------------------ functions


def note_context(env: Env, context: ms.InputContext) -> None:
    """Record what a function that makes input was told."""
    names = ("num_input_pipelines", "input_pipeline_id", "num_replicas_in_sync")
    env.lnote("input context", {name: getattr(context, name) for name in names})


@program("distribute_dataset_from_function", view=own_parts)
def distribute_dataset_from_function(env: Env, p: Inputs) -> Any:
    def dataset_fn(context: ms.InputContext) -> Any:
        note_context(env, context)
        size = context.get_per_replica_batch_size(p["global_batch"])
        numbers = np.arange(p["elements"])
        if p.get("shard"):
            numbers = numbers[context.input_pipeline_id :: context.num_input_pipelines]
        return ms.Dataset.from_arrays(numbers, size)

    return {"result": env.attempt(lambda: compact(env, env.strategy.distribute_datasets_from_function(dataset_fn)))}


@program("from_function_old_name", view=own_parts)
def from_function_old_name(env: Env, p: Inputs) -> Any:
    old_name = env.strategy.experimental_distribute_datasets_from_function
    return {"result": env.attempt(lambda: compact(env, old_name(lambda context: batches(4, 1))))}


@program("from_function_per_replica_mode", copies=("notes.input context",), view=own_parts)
def from_function_per_replica_mode(env: Env, p: Inputs) -> Any:
    options = ms.InputOptions(
        experimental_fetch_to_device=False,
        experimental_replication_mode=ms.InputReplicationMode.PER_REPLICA,
        experimental_place_dataset_on_device=False,
    )

    def dataset_fn(context: ms.InputContext) -> Any:
        env.lnote(
            "input context", [context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync]
        )
        return ms.Dataset.from_arrays(np.arange(6)[context.input_pipeline_id :: context.num_input_pipelines], 2)

    def go() -> Any:
        return compact(env, env.strategy.distribute_datasets_from_function(dataset_fn, options))

    return {"result": env.attempt(go)}


# ------------------------------------------------------------------------------------------ TensorFlow 1


@program("v1_iterator")
def v1_iterator(env: Env, p: Inputs) -> Any:
    strategy = env.strategy

    def input_fn(context: ms.InputContext) -> Any:
        note_context(env, context)
        divide = p.get("divide", True)
        size = context.get_per_replica_batch_size(p["global_batch"]) if divide else p["global_batch"]
        return batches(p["elements"], size)

    def make_iterator() -> Any:
        if p["method"] == "make_dataset_iterator":
            return strategy.make_dataset_iterator(batches(p["elements"], p["global_batch"]))
        return strategy.make_input_fn_iterator(input_fn)

    def go() -> Any:
        with strategy.scope():
            iterator = make_iterator()
            iterator.initialize()
            return [
                env.attempt(lambda: strategy.experimental_run(lambda x: x * 10, iterator)) for _ in range(p["steps"])
            ]

    return {"result": env.attempt(go)}


@program("v1_numpy_dataset")
def v1_numpy_dataset(env: Env, p: Inputs) -> Any:
    # The rows of an array one by one, each on every replica.
    rows = np.arange(6.0).reshape(3, 2)
    return {"result": env.attempt(lambda: list(env.strategy.distribute_datasets_from_function(lambda context: rows)))}


@program("v1_bad_replication_mode")
def v1_bad_replication_mode(env: Env, p: Inputs) -> Any:
    def go() -> Any:
        return env.strategy.make_input_fn_iterator(lambda context: batches(2, 1), replication_mode=3)

    return {"result": env.attempt(go)}


@program("v1_experimental_run_without_iterator")
def v1_experimental_run_without_iterator(env: Env, p: Inputs) -> Any:
    def sum_of_threes() -> Any:
        return env.strategy.reduce("SUM", env.strategy.experimental_run(lambda: constant(2.0) + constant(1.0)))

    return {
        "result": env.attempt(lambda: env.strategy.experimental_run(id_tensor)),
        "reduce without axis": env.attempt(sum_of_threes),
    }
