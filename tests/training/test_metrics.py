"""Metrics: what all replicas saw, whatever part of it each of them saw."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import RANK, RANKS, SIZE, part_of, same_everywhere

import mpistrategy as ms
from mpistrategy import errors, metrics

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def mean(strategy: ms.Strategy) -> metrics.Mean:
    with strategy.scope():
        return metrics.Mean("loss")


lengths = st.lists(st.integers(0, 5), min_size=4, max_size=4)


@settings(max_examples=part_of(40))
@given(batches=st.lists(lengths, min_size=1, max_size=3), weighted=st.booleans())
def test_a_mean_over_uneven_parts_counts_every_element_once(
    strategy: ms.Strategy, mean: metrics.Mean, batches: list[list[int]], weighted: bool
) -> None:
    def values(step: int, rank: int) -> tuple[Any, Any]:
        random = np.random.default_rng([step, rank])
        count = batches[step][rank]
        return random.integers(-50, 50, count) / 4, random.integers(0, 3, count) if weighted else np.ones(count)

    mean.reset_state()
    for step in range(len(batches)):
        strategy.run(mean.update_state, args=values(step, RANK))
    found = mean.result()

    everything = [values(step, rank) for step in range(len(batches)) for rank in RANKS]
    numbers, weights = (np.concatenate(parts) for parts in zip(*everything, strict=True))
    right = np.average(numbers, weights=weights) if weights.sum() else np.nan
    np.testing.assert_allclose(found, right, rtol=1e-12, atol=1e-12)
    assert type(found) is float
    assert same_everywhere(np.float64(found))


def test_a_sum(strategy: ms.Strategy) -> None:
    with strategy.scope():
        rows = metrics.Sum("rows")
    assert rows.result() == 0
    strategy.run(rows.update_state, args=(np.ones(RANK),))
    strategy.run(rows.update_state, args=(2,))
    assert rows.result() == sum(RANKS) + 2 * SIZE
    rows.reset_state()
    assert rows.result() == 0


@pytest.mark.parametrize("scores", [False, True])
def test_accuracy_over_uneven_parts(strategy: ms.Strategy, scores: bool) -> None:
    with strategy.scope():
        accuracy, weighted = metrics.Accuracy(), metrics.Accuracy()
    labels = np.arange(RANK) % 3  # rank r has r rows, of which the first is wrong
    predictions = labels.copy()
    predictions[:1] += 1
    strategy.run(accuracy.update_state, args=(labels, np.eye(4)[predictions] if scores else predictions))
    rows, wrong = sum(RANKS), SIZE - 1
    np.testing.assert_allclose(accuracy.result(), (rows - wrong) / rows if rows else np.nan)
    three = (np.array([1, 2, 0], np.uint8), np.array([1, 0, 0]))
    strategy.run(weighted.update_state, args=three, kwargs={"weight": [0.2, 0.5, 0.1]})
    assert weighted.result() == pytest.approx(3 / 8)
    with pytest.raises(errors.ShapeError, match="predictions"):
        strategy.run(accuracy.update_state, args=(np.ones(3), np.ones(2)))


def test_in_a_step_a_replica_sees_its_own_part_only(strategy: ms.Strategy, mean: metrics.Mean) -> None:
    mean.reset_state()

    def step() -> float:
        mean.update_state(float(RANK))
        return mean.result()

    assert strategy.run(step) == RANK
    assert mean.result() == (SIZE - 1) / 2


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_a_weight_belongs_to_a_row(strategy: ms.Strategy, mean: metrics.Mean, columns: int) -> None:
    values, weights = np.arange(2.0 * columns).reshape(2, columns), np.array([3.0, 1.0])
    right = np.average(values.mean(axis=1), weights=weights)
    average = ms.losses.compute_average_loss
    for weight in (weights, np.repeat(weights[:, None], columns, axis=1)):
        mean.reset_state()
        strategy.run(mean.update_state, args=(values, weight))
        np.testing.assert_allclose(mean.result(), right, rtol=1e-15)
        loss = strategy.run(average, args=(values, weight), kwargs={"global_batch_size": 4})
        np.testing.assert_allclose(loss, right * columns, rtol=1e-15)
    refused = [np.ones((1, columns)), np.ones(3), np.ones((2, columns, 1)), np.ones(1), np.ones((columns, 2))[:, :0]]
    refused += [np.ones((2, 1)), np.ones(columns)] if columns == 3 else []
    for weight in refused:
        for call in (mean.update_state, average):
            with pytest.raises(errors.ShapeError, match=r"one weight for each row \(shape \(2,\)\)"):
                strategy.run(call, args=(values, weight))
    np.testing.assert_allclose(mean.result(), right, rtol=1e-15)


def test_a_loop_without_steps_adds_what_each_rank_has(strategy: ms.Strategy, mean: metrics.Mean) -> None:
    mean.reset_state()
    for _ in range(RANK + 1):
        mean.update_state(float(RANK))
    with strategy.scope():
        mean.update_state(9.0, weight=2.0)
    everything = [9.0] * 2 * SIZE + [float(rank) for rank in RANKS for _ in range(rank + 1)]
    assert mean.result() == pytest.approx(np.mean(everything))


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (("text",), errors.LeafError),
        ((None,), errors.LeafError),
        ((1j,), errors.LeafError),
        (([[1], [1, 2]],), errors.LeafError),
        ((np.ma.masked_equal([1.0, 2.0], 2),), errors.LeafError),
        ((np.datetime64("2026-01-01"),), errors.LeafError),
        ((np.ones(3), "heavy"), errors.LeafError),
        ((np.ones(3), np.ones(2)), errors.ShapeError),
    ],
)
def test_what_is_no_number_adds_nothing(
    strategy: ms.Strategy, mean: metrics.Mean, arguments: Any, kind: type[Exception]
) -> None:
    mean.reset_state()
    with pytest.raises(kind, match="update_state"):
        strategy.run(lambda: mean.update_state(*arguments))
    strategy.run(lambda: mean.update_state(2.0))
    assert mean.result() == 2
