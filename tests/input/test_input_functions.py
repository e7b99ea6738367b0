"""Input that each rank makes for itself, iterators, and what functions that make input are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replicas import RANK, SIZE, all_raise, outcomes

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.testing import run_replicas

pytestmark = pytest.mark.mpi

LAST = SIZE - 1


# ------------------------------------------------------------------------------------------- InputContext


def test_each_rank_is_a_pipeline(strategy: ms.MirroredStrategy) -> None:
    told: list[ms.InputContext] = []

    def dataset_fn(context: ms.InputContext) -> Any:
        told.append(context)
        return []

    strategy.distribute_datasets_from_function(dataset_fn)
    assert told == [ms.InputContext(num_input_pipelines=SIZE, input_pipeline_id=RANK, num_replicas_in_sync=SIZE)]
    with pytest.raises(AttributeError):
        told[0].input_pipeline_id = 0  # type: ignore[misc]


@given(st.integers(1, 8), st.integers(1, 64))
def test_the_batch_of_one_replica(replicas: int, size: int) -> None:
    context = ms.InputContext(num_replicas_in_sync=replicas)
    assert context.get_per_replica_batch_size(replicas * size) == size
    for wrong in (0, -replicas, "4", *([size] if size % replicas else [])):
        with pytest.raises(errors.MpiStrategyError, match="global_batch_size"):
            context.get_per_replica_batch_size(wrong)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------- in step


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.booleans())
def test_all_ranks_make_as_many_steps(counts: list[int], drop: bool) -> None:
    """Ranks whose data end earlier take part with empty batches; or all end with the first."""

    def program() -> list[int]:
        dataset = ms.MirroredStrategy().distribute_datasets_from_function(
            lambda context: ms.Dataset({"n": np.arange(counts[context.input_pipeline_id])}, 1), drop_remainder=drop
        )
        steps = [part["n"].tolist() for part in dataset]
        assert [part["n"].tolist() for part in dataset] == steps
        return steps

    expected = min(counts) if drop else max(counts)
    for count, steps in zip(counts, run_replicas(program, len(counts)), strict=True):
        assert steps == [[number] if number < count else [] for number in range(expected)]


def test_a_rank_goes_on_with_batches_like_its_last_one(strategy: ms.MirroredStrategy) -> None:
    def dataset_fn(context: ms.InputContext) -> Any:
        shape = (2, 3)
        return ({"x": np.full(shape, n, np.float16), "y": [np.arange(2)]} for n in range(1 + context.input_pipeline_id))

    parts = list(strategy.distribute_datasets_from_function(dataset_fn))
    assert len(parts) == SIZE
    for number, part in enumerate(parts):
        rows = 2 if number <= RANK else 0
        assert part["x"].shape == (rows, 3)
        assert part["x"].dtype == np.float16
        assert part["y"][0].shape == (rows,)
    totals = [strategy.reduce("MEAN", part["x"].astype(float), axis=0) for part in parts]
    assert [total.tolist() for total in totals] == [[float(number)] * 3 for number in range(SIZE)]


def test_batches_are_used_as_they_are(strategy: ms.MirroredStrategy) -> None:
    dataset = strategy.distribute_datasets_from_function(lambda context: [RANK, "text", None])
    assert list(dataset) == [RANK, "text", None]


# ------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("given_", [lambda context: None, lambda context: {"x": np.zeros(2)}, None, [np.zeros(2)]])
def test_what_makes_no_dataset(strategy: ms.MirroredStrategy, given_: Any) -> None:
    for make in (strategy.distribute_datasets_from_function, strategy.make_input_fn_iterator):
        all_raise(errors.OptionTypeError, make, given_)
    all_raise(errors.OptionTypeError, strategy.distribute_datasets_from_function, lambda context: [], 3)


def broken(good: int) -> Iterator[Any]:
    """Yield some batches; then the last rank's file is gone."""
    yield from [np.arange(2)] * good
    if RANK == LAST:
        raise OSError("the file is gone")
    yield np.arange(2)


class Broken:
    """Fails when it is iterated."""

    def __iter__(self) -> Iterator[Any]:
        return iter([*broken(0)])


@pytest.mark.parametrize("function", [lambda _: [*broken(0)], lambda _: Broken(), lambda _: broken(1)])
def test_what_raises_on_one_rank_raises_everywhere(strategy: ms.MirroredStrategy, function: Any) -> None:
    told = outcomes(lambda: list(strategy.distribute_datasets_from_function(function)))
    assert [outcome.text.partition(":")[0] for outcome in told] == ["RemoteError"] * LAST + ["OSError"]
    assert all("the file is gone" in outcome.text for outcome in told)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("batches", "told"), [([np.arange(2)] * (RANK > 0), "no element on this rank"), (range(1 + RANK), "")]
)
def test_a_rank_that_cannot_go_on_without_rows_is_an_error_everywhere(
    strategy: ms.MirroredStrategy, batches: Any, told: str
) -> None:
    """One ends before its beginning, or has scalars."""
    dataset = strategy.distribute_datasets_from_function(lambda context: iter(batches))
    all_raise(errors.BatchError, lambda: list(dataset), words=[told])


# ------------------------------------------------------------------------------------------- iterators


MAKERS: list[Callable[[Any], Any]] = [
    lambda strategy: strategy.make_dataset_iterator([np.arange(SIZE), np.arange(SIZE, 2 * SIZE)]),
    lambda strategy: strategy.make_input_fn_iterator(lambda context: [np.array([RANK]), np.array([SIZE + RANK])]),
]


@pytest.mark.parametrize("make", MAKERS, ids=["make_dataset_iterator", "make_input_fn_iterator"])
def test_iterators_that_start_again(strategy: ms.MirroredStrategy, make: Callable[[Any], Any]) -> None:
    iterator = make(strategy)
    assert iterator.initialize() == []
    assert iterator.get_next().tolist() == [RANK]
    assert iterator.initialize() == []
    assert [part.tolist() for part in iterator] == [[RANK], [SIZE + RANK]]
    with pytest.raises(errors.OutOfRangeError):
        iterator.get_next()
    missing = iterator.get_next_as_optional()
    assert not missing.has_value()
    with pytest.raises(errors.OutOfRangeError):
        missing.get_value()
    iterator.initialize()
    assert iterator.get_next_as_optional().get_value().tolist() == [RANK]


def test_replication_modes(strategy: ms.MirroredStrategy) -> None:
    strategy.make_input_fn_iterator(lambda context: [], "PER_WORKER")
    for mode in (3, None, "per worker", ms.InputReplicationMode.PER_REPLICA):
        all_raise(errors.OptionError, strategy.make_input_fn_iterator, lambda context: [], mode)


@pytest.mark.filterwarnings("ignore::mpistrategy.errors.OutsideStepWarning")
@pytest.mark.parametrize("make", [ms.get_strategy, lambda: ms.OneDeviceStrategy("CPU:0")])
def test_one_device(make: Callable[[], ms.Strategy]) -> None:
    alone = make()
    batches = [np.arange(3)]
    told: list[ms.InputContext] = []

    def dataset_fn(context: ms.InputContext) -> Any:
        told.append(context)
        return batches

    for distribute in (alone.distribute_datasets_from_function, alone.experimental_distribute_datasets_from_function):
        assert [part.tolist() for part in distribute(dataset_fn)] == [[0, 1, 2]]
    assert told == [ms.InputContext()] * 2
    assert (alone.distribute_datasets_from_function(dataset_fn) is batches) is alone._is_default
    assert alone.make_dataset_iterator(batches).get_next().tolist() == [0, 1, 2]
    assert alone.make_input_fn_iterator(dataset_fn).get_next().tolist() == [0, 1, 2]
