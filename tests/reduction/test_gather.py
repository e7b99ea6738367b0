"""Gather, all_gather and broadcast_to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import (
    DTYPES,
    RANK,
    RANKS,
    SIZE,
    bits,
    context,
    laid_out,
    new_variable,
    part_of,
    pieces_of,
    same_everywhere,
    value_of,
)

import mpistrategy as ms
from mpistrategy.arrays.dtypes import Array

pytestmark = pytest.mark.mpi
OTHERS = [np.dtype(bool), np.dtype("U3"), np.dtype("S3"), np.dtype("M8[s]"), np.dtype([("rank", "i4"), ("x", "f8")])]


def all_gather(strategy: ms.Strategy, value: Any, axis: Any) -> Any:
    return strategy.run(lambda: context().all_gather(value, axis))


def array_of(rank: int, dtype: Any, shape: Any) -> Array:
    return value_of(rank, dtype, shape) if dtype in DTYPES else value_of(rank, "int8", shape).astype(dtype)


@settings(max_examples=part_of(90))
@given(
    dtype=st.sampled_from([*DTYPES, *OTHERS]),
    shape=st.sampled_from([(3,), (0,), (2, 5), (2, 0, 4), (1, 2, 3, 2)]),
    axis=st.integers(-4, 3),
    lengths=st.lists(st.integers(0, 5), min_size=4, max_size=4),
    layout=st.integers(0, 6),
    max_count=st.sampled_from([2**30, 16, 40]),
)
def test_gather_is_concatenation_in_rank_order(
    strategy: ms.Strategy,
    dtype: Any,
    shape: tuple[int, ...],
    axis: int,
    lengths: list[int],
    layout: int,
    max_count: int,
) -> None:
    axis = axis % len(shape) - len(shape) * (axis < 0)

    def of(rank: int) -> Array:
        own = list(shape)
        own[axis] = lengths[rank]
        return array_of(rank, dtype, own)

    mine = laid_out(of(RANK), layout + RANK) if dtype in DTYPES else of(RANK)
    before = mine.copy()
    right = np.concatenate([of(rank) for rank in RANKS], axis=axis)
    with pieces_of(strategy, max_count):
        for result in (strategy.gather(mine, axis), all_gather(strategy, mine, axis)):
            assert (result.dtype, result.shape) == (right.dtype, right.shape)
            assert result.flags.c_contiguous
            assert bits(result) == bits(right)
            assert same_everywhere(result)
            assert not np.shares_memory(result, mine)
    assert bits(mine) == bits(before)


def test_gather_of_a_nest_with_variables_keeps_its_structure(strategy: ms.Strategy) -> None:
    variable = new_variable(strategy, np.arange(2.0))
    mine = {"b": (np.full((RANK, 2), RANK), variable), "a": [ms.PerReplica((np.array([RANK]),))]}
    result = strategy.gather(mine if RANK % 2 else dict(reversed(mine.items())), axis=0)
    np.testing.assert_array_equal(result["a"][0], list(RANKS))
    np.testing.assert_array_equal(result["b"][0][:, 1], np.repeat(list(RANKS), list(RANKS)))
    np.testing.assert_array_equal(result["b"][1], [0, 1] * SIZE)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("few", [0, 100, 10_000])
@pytest.mark.parametrize("first", [0, 1])
def test_parts_that_fit_a_mailbox_and_parts_that_do_not(strategy: ms.Strategy, few: int, first: int) -> None:
    lengths = [(few, 40_000)[(rank + first) % 2] for rank in RANKS]
    mine = np.full((lengths[RANK], 1), float(RANK))
    right = np.repeat(np.arange(float(SIZE)), lengths)
    np.testing.assert_array_equal(all_gather(strategy, mine, 0)[:, 0], right)
    slices = ms.IndexedSlices(mine, np.arange(lengths[RANK]), (40_000, 1))
    np.testing.assert_array_equal(strategy.reduce("SUM", slices).values[:, 0], right)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("size", [1, 100_000])
def test_ranks_with_a_plan_meet_those_without(strategy: ms.Strategy, size: int) -> None:
    mine = np.full(size * SIZE, RANK + 1.0)
    given = ms.PerReplica((mine,)) if RANK == 0 else mine  # is looked at in each call
    for _ in range(2):
        gathered = all_gather(strategy, given, 0)
        np.testing.assert_array_equal(gathered, np.repeat(np.arange(1.0, SIZE + 1), size * SIZE))
        np.testing.assert_array_equal(strategy.broadcast(given, SIZE - 1), np.full(size * SIZE, float(SIZE)))
        part = strategy.run(lambda: context().reduce_scatter("SUM", given))
        np.testing.assert_array_equal(part, np.full(size, SIZE * (SIZE + 1) / 2))


@pytest.mark.parametrize("dtype", [*DTYPES, *OTHERS], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5)], ids=str)
def test_broadcast_to_sends_the_value_of_rank_0(strategy: ms.Strategy, dtype: Any, shape: tuple[int, ...]) -> None:
    of_first, mine = array_of(0, dtype, shape), array_of(RANK, dtype, shape)
    before = mine.copy()
    for max_count, targets in ((2**30, RANKS), (7, RANKS), (2**30, [SIZE - 1])):
        with pieces_of(strategy, max_count):
            given = np.asfortranarray(mine).reshape(shape)
            result = strategy.extended.broadcast_to(given, [f"task:{rank}" for rank in targets])
        assert isinstance(result, ms.Mirrored)
        assert len(result.values) == (RANK in targets)
        for found in result.values:
            assert (found.dtype, found.shape, bits(found)) == (mine.dtype, shape, bits(of_first))
            assert not np.shares_memory(found, mine)
    assert bits(mine) == bits(before)
