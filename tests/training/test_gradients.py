"""Gradients before an optimizer sees them: accumulation that sends nothing, and limits on the global norm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import shared_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import RANK, RANKS, SIZE, new_variable, part_of, same_everywhere

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.gradients import GradientAccumulator, clip_by_global_norm, global_norm

pytestmark = pytest.mark.mpi


# ---------------------------------------------------------------------------------------------- accumulation


def test_accumulation_sends_nothing(strategy: ms.Strategy) -> None:
    """Every rank may add another number of times between two reductions, which would not fit together."""
    accumulator = GradientAccumulator(steps=RANK + 1)

    def step() -> Any:
        for number in range(RANK + 1):
            sums = accumulator.add([np.full(3, number + 1.0), np.float32(2)])
            assert (sums is None) == (number < RANK)
        return ms.get_replica_context().all_reduce("SUM", sums, name="sums")

    found = strategy.run(step)
    np.testing.assert_array_equal(found[0], np.full(3, sum((r + 1) * (r + 2) / 2 for r in RANKS)))
    assert float(found[1]) == sum(2 * (r + 1) for r in RANKS)


def test_it_starts_again_and_keeps_its_hands_off_what_it_was_given() -> None:
    accumulator = GradientAccumulator(2)
    given_first, given_then = np.ones(2), np.full(2, 2.0)
    assert accumulator.add([given_first]) is None
    first: Any = accumulator.add([given_then])
    np.testing.assert_array_equal(first[0], [3.0, 3.0])
    accumulator.add([given_then])
    second: Any = accumulator.add([given_then])
    np.testing.assert_array_equal(first[0], [3.0, 3.0])
    np.testing.assert_array_equal(second[0], [4.0, 4.0])
    np.testing.assert_array_equal([given_first, given_then], [[1, 1], [2, 2]])
    alone: Any = GradientAccumulator(1).add([given_first])
    assert not np.shares_memory(alone[0], given_first)
    mixed = GradientAccumulator(2)
    mixed.add([np.float64(1.5)])
    assert mixed.add([np.int64(2)]) == [3.5], "of the wider dtype"


def test_a_step_that_does_not_fit_adds_nothing() -> None:
    accumulator = GradientAccumulator(2)
    accumulator.add([np.ones(2), np.ones(3)])
    wrong: list[tuple[Any, type[Exception]]] = [
        ([np.ones(2)], errors.ShapeError),
        ([np.ones(2), np.ones(2)], errors.ShapeError),
        ([np.ones(2), "text"], errors.DTypeError),
        ([ms.IndexedSlices(np.ones(2), [0, 1], (3,)), np.ones(3)], errors.ShapeError),
        ([ms.IndexedSlices(np.ones(2), [0, 2], (2,)), np.ones(3)], errors.ShapeError),
        ([np.ones(2), ms.IndexedSlices(np.ones(1), [0])], errors.ShapeError),
    ]
    for bad, kind in wrong:
        with pytest.raises(kind):
            accumulator.add(bad)
    sums: Any = accumulator.add([np.ones(2), np.ones(3)])
    np.testing.assert_array_equal(np.concatenate(sums), np.full(5, 2.0))


def test_none_and_sparse_gradients_are_added_and_clipped(strategy: ms.Strategy, tmp_path: Path) -> None:
    """As an optimizer takes them: None where a variable takes no part in a step, rows of an embedding."""

    def slices(*rows: int) -> ms.IndexedSlices:
        return ms.IndexedSlices(np.full((len(rows), 2), 3.0, np.float16), np.array(rows), (4, 2))

    dense = np.zeros((4, 2), np.float16)
    accumulator = GradientAccumulator(3)
    accumulator.add([None, np.ones(2), slices(1, 1), dense, None])
    accumulator.add([None, None, None, slices(2), slices(3)])
    sums: Any = accumulator.add([None, np.ones(2), slices(0), None, dense])
    nothing, some, rows, both, turned = sums
    assert nothing is None
    np.testing.assert_array_equal(some, [2.0, 2.0])
    assert isinstance(rows, ms.IndexedSlices)
    assert rows.values.dtype == both.dtype == np.float16
    np.testing.assert_array_equal(rows.to_dense()[:, 0], [3, 6, 0, 0])
    np.testing.assert_array_equal(both[:, 0], [0, 0, 3, 0])
    np.testing.assert_array_equal(turned[:, 0], [0, 0, 0, 3])

    clipped, norm = clip_by_global_norm([None, slices(1, 1), np.float64(5.0)], 1.0)
    assert norm == pytest.approx(np.sqrt(2 * 6**2 + 5**2)) == pytest.approx(global_norm([slices(1, 1), 5.0, None]))
    assert clipped[0] is None
    np.testing.assert_allclose(clipped[1].to_dense()[1], 6 / norm, rtol=1e-3)

    v = new_variable(strategy, np.zeros((4, 2), np.float16))
    saved, loaded = GradientAccumulator(2), GradientAccumulator(2)
    saved.add([None, slices(1)])
    with strategy.scope():
        ms.Checkpoint(sums=saved).save(shared_folder(tmp_path) / "sums")
        ms.Checkpoint(sums=loaded).restore(shared_folder(tmp_path) / "sums")
    found: Any = loaded.add([None, slices(2)])
    strategy.run(lambda: ms.optimizers.SGD(1.0).apply_gradients([(found[1], v)]))
    np.testing.assert_array_equal(v.numpy()[:, 0], [0, -3 * SIZE, -3 * SIZE, 0])


# ---------------------------------------------------------------------------------------------- clipping

arrays = st.lists(
    st.lists(st.floats(-1e6, 1e6, width=32), max_size=5).map(lambda values: np.array(values)), min_size=1, max_size=4
)


@settings(max_examples=part_of(50))
@given(gradients=arrays, limit=st.floats(1e-3, 1e3))
def test_the_norm_afterwards_is_at_most_the_limit(gradients: list[Any], limit: float) -> None:
    before = [array.copy() for array in gradients]
    clipped, norm = clip_by_global_norm(gradients, limit)
    assert norm == pytest.approx(np.linalg.norm(np.concatenate(gradients)), rel=1e-12)
    assert global_norm(clipped) <= limit * (1 + 1e-12)
    scale = min(1.0, limit / norm) if norm else 1.0
    for mine, old, was in zip(clipped, gradients, before, strict=True):
        np.testing.assert_allclose(mine, old * scale, rtol=1e-12)
        np.testing.assert_array_equal(old, was)


def test_dtypes_are_kept_and_the_norm_is_exact() -> None:
    gradients: list[Any] = [np.full(4, 6e4, np.float16), np.full(2, 3 + 4j, np.complex64), np.zeros(0, np.float32)]
    clipped, norm = clip_by_global_norm(gradients, 0.01)
    assert norm == pytest.approx(np.sqrt(4 * 6e4**2 + 2 * 25))  # neither this nor the factor fits into float16
    assert [array.dtype for array in clipped] == [array.dtype for array in gradients]
    assert global_norm(clipped) == pytest.approx(0.01, rel=1e-3)
    assert clip_by_global_norm([], 1.0) == ([], 0.0)
    [same], norm = clip_by_global_norm([np.array([3.0, 4.0])], np.inf)  # no limit
    assert (same.tolist(), norm) == ([3.0, 4.0], 5.0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_norm_that_is_no_number_leaves_none(bad: float) -> None:
    clipped, norm = clip_by_global_norm([np.ones(2), np.array([bad])], 1.0)
    assert not np.isfinite(norm)
    assert all(np.isnan(array).all() for array in clipped)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (0, errors.OptionError),
        (-1, errors.OptionError),
        (np.nan, errors.MpiStrategyError),
        ("2", errors.OptionTypeError),
    ],
)
def test_impossible_steps_and_limits(number: Any, kind: type[Exception]) -> None:
    for make in (GradientAccumulator, lambda limit: clip_by_global_norm([np.ones(2)], limit)):
        with pytest.raises(kind):
            make(number)
    with pytest.raises(errors.OptionTypeError):
        GradientAccumulator(1.5)  # type: ignore[arg-type]


def test_what_has_no_norm_is_refused() -> None:
    for bad in (object(), "text", ms.IndexedSlices(np.ones(1), [0.5], (2,)), np.arange(3)):
        with pytest.raises((errors.LeafError, errors.DTypeError)):  # of integers, the scaled ones would be cut off
            clip_by_global_norm([np.ones(2), bad], 1.0)


def test_global_clipnorm_clips_the_mean_of_the_whole_batch(strategy: ms.Strategy) -> None:
    """Not each replica's: the norm of a sum is not the sum of the norms."""
    everyone = [[np.random.default_rng([1, r, i]).integers(-9, 9, i + 2) / 4 for i in range(2)] for r in RANKS]
    whole = [np.sum([mine[i] for mine in everyone], axis=0) / SIZE for i in range(2)]
    right, _ = clip_by_global_norm(whole, 0.5)
    variables = [new_variable(strategy, np.zeros(i + 2)) for i in range(2)]
    optimizer = ms.optimizers.SGD(1.0, aggregation="MEAN", global_clipnorm=0.5)
    strategy.run(lambda: optimizer.apply_gradients(zip(everyone[RANK], variables, strict=True)))
    for variable, gradient in zip(variables, right, strict=True):
        np.testing.assert_allclose(variable, -gradient, rtol=1e-14)
        assert same_everywhere(variable.local_copy())
