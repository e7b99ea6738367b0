"""reduce_scatter: each rank's part of an all_reduce, bit for bit; and None among the leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import DTYPES, RANK, SIZE, bits, context, part_of, pieces_of, value_of

import mpistrategy as ms
from mpistrategy import errors

pytestmark = pytest.mark.mpi

NUMBERS = [dtype for dtype in DTYPES if dtype.kind in "iuf"]


def reduce_scatter(strategy: ms.Strategy, *arguments: Any, **named: Any) -> Any:
    return strategy.run(lambda: context().reduce_scatter(*arguments, **named))


@settings(max_examples=part_of(60))
@given(
    dtype=st.sampled_from(NUMBERS),
    shape=st.sampled_from([(0,), (1,), (5,), (7, 3), (2, 0, 4), (3, 4, 5), (40_001,)]),
    axis=st.integers(-3, 2),
    op=st.sampled_from(["SUM", "MEAN", "MIN", "MAX", "PROD"]),
    max_count=st.sampled_from([2**30, 16]),
)
def test_parts_are_those_of_an_all_reduce_in_rank_order(
    strategy: ms.Strategy, dtype: Any, shape: tuple[int, ...], axis: int, op: Any, max_count: int
) -> None:
    axis = axis % len(shape) - len(shape) * (axis < 0)
    mine = value_of(RANK, dtype, shape)
    before = mine.copy()
    whole = strategy.run(lambda: context().all_reduce(op, mine))
    with pieces_of(strategy, max_count):
        part = reduce_scatter(strategy, op, mine, axis)
    length = shape[axis]
    rows = -(-length // SIZE)
    first = min(RANK * rows, length)
    expected = np.take(whole, range(first, min(first + rows, length)), axis=axis)
    assert (part.dtype, part.shape) == (expected.dtype, expected.shape)
    assert bits(part) == bits(expected)
    assert bits(mine) == bits(before)
    assert part.flags.owndata
    together = strategy.run(lambda: context().all_gather(part, axis))
    assert bits(together) == bits(np.ascontiguousarray(whole))


@pytest.mark.parametrize(
    "algorithm", [ms.HierarchicalCopyAllReduce(), ms.OrderedAllReduce(), ms.ReductionToOneDevice()], ids=repr
)
def test_every_algorithm_reduces_and_scatters(algorithm: ms.CrossDeviceOps) -> None:
    with ms.MirroredStrategy(cross_device_ops=algorithm) as strategy:
        part = reduce_scatter(strategy, "SUM", np.full(2 * SIZE, RANK + 1.0))
        np.testing.assert_array_equal(part, np.full(2, SIZE * (SIZE + 1) / 2))


def test_a_nest_a_variable_and_numbers_of_rows_that_differ_by_leaf(strategy: ms.Strategy) -> None:
    with strategy.scope():
        weights = ms.Variable(np.arange(2.0 * SIZE))
    found = reduce_scatter(strategy, "MEAN", {"v": weights, "none": None, "a": [np.ones((SIZE, 2)), np.ones((1, 3))]})
    assert found["none"] is None
    np.testing.assert_array_equal(found["v"], np.arange(2.0 * SIZE)[2 * RANK : 2 * RANK + 2])
    assert found["a"][0].shape == (1, 2)
    assert found["a"][1].shape == (1 if RANK == 0 else 0, 3)


# ---------------------------------------------------------------------------------------------- None among leaves


@pytest.mark.parametrize("lone", [False, True])
def test_none_stays_none(strategy: ms.Strategy, lone: bool) -> None:
    one, total = np.float64(RANK + 1), SIZE * (SIZE + 1) / 2
    value: Any = [None] if lone else {"a": None, "b": [one, None]}
    right: Any = [None] if lone else {"a": None, "b": [total, None]}
    for _ in range(2):
        for found in (
            strategy.run(lambda: context().all_reduce("SUM", value)),
            strategy.run(lambda: context().all_reduce_async("SUM", value).wait()),
            strategy.reduce("SUM", value),
        ):
            assert found == right
    out: Any = {"a": None, "b": [np.zeros(()), None]}
    if not lone:
        assert strategy.run(lambda: context().all_reduce("SUM", value, out=out)) == out == right
        assert strategy.run(lambda: context().all_reduce("MEAN", value, weight=2.0))["b"][0] == total / SIZE
    gathered = strategy.gather((None, np.ones(1)), 0)
    assert (gathered[0], gathered[1].shape) == (None, (SIZE,))
    assert strategy.reduce("MEAN", None, axis=0) is strategy.gather(None, 0) is None


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("other", [None, [1.0, None], [None, 1.0, 2.0], []], ids=repr)
def test_none_on_some_ranks_only_is_a_mismatch(strategy: ms.Strategy, other: Any) -> None:
    mine = [None, 1.0] if RANK else other
    with pytest.raises((errors.CollectiveMismatchError, errors.EmptyBatchError)):
        strategy.reduce("SUM", mine)
    with pytest.raises((errors.CollectiveMismatchError, errors.EmptyBatchError)):
        strategy.run(lambda: context().all_reduce("SUM", mine))


def test_an_error_names_the_leaf_beside_none(strategy: ms.Strategy) -> None:
    with pytest.raises(errors.DTypeError, match=r"\['b'\]"):
        strategy.run(lambda: context().all_reduce("SUM", {"a": None, "b": True}))
