"""Lists of small arrays are reduced where they were packed, in memory that the ranks of a node share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from replicas import RANK, SIZE, context, expected, value_of

import mpistrategy as ms
from mpistrategy.arrays import Array

pytestmark = pytest.mark.skipif(SIZE == 1, reason="one rank shares with nobody")


def arrays_of(rank: int, round_: int, dtype: str = "float32") -> list[Array]:
    """Return a list that is too large for the cells and small enough for a block."""
    shapes: list[tuple[int, ...]] = [(length,) for length in range(1, 300)] + [(7, 9), (), (0,)]
    return [value_of(rank, dtype, shape, 1000 * round_ + at) for at, shape in enumerate(shapes)]


def reduced(strategy: ms.Strategy, value: Any, op: str = "SUM") -> Any:
    return strategy.run(lambda: context().all_reduce(op, value))


def check(found: list[Array], round_: int, op: str = "SUM", dtype: str = "float32") -> None:
    everybodys = [arrays_of(rank, round_, dtype) for rank in range(SIZE)]
    for at, array in enumerate(found):
        wanted = expected(op, [theirs[at] for theirs in everybodys])
        np.testing.assert_array_equal(array, wanted)
        assert array.dtype == wanted.dtype
        assert array.shape == wanted.shape


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int64", "complex64"])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_results_are_those_of_the_definition(strategy: ms.Strategy, op: str, dtype: str) -> None:
    for round_ in range(3):
        check(reduced(strategy, arrays_of(RANK, round_, dtype), op), round_, op, dtype)
    assert strategy.extended.communicator.pack_blocks is not None


def test_results_that_are_kept_stay(strategy: ms.Strategy) -> None:
    """More are kept than there are blocks, and of some only a part: another number on every rank."""
    kept = []
    for round_ in range(6):
        found = reduced(strategy, arrays_of(RANK, round_))
        kept.append(found if round_ % (RANK + 1) == 0 else [found[200][50:60]])
    for round_, found in enumerate(kept):
        if round_ % (RANK + 1) == 0:
            check(found, round_)
        else:
            everybodys = [arrays_of(rank, round_)[200] for rank in range(SIZE)]
            np.testing.assert_array_equal(found[0], expected("SUM", everybodys)[50:60])


def test_memory_is_used_again(strategy: ms.Strategy) -> None:
    for _ in range(2):
        reduced(strategy, arrays_of(RANK, 0))
    places = {reduced(strategy, arrays_of(RANK, round_))[100].ctypes.data for round_ in range(8)}
    assert len(places) == 1, "nobody holds a result"
    inside = strategy.extended.communicator.pack_blocks
    assert inside is not None


def test_ranks_that_differ_are_told_and_go_on(strategy: ms.Strategy) -> None:
    reduced(strategy, arrays_of(RANK, 0))
    value = arrays_of(RANK, 1)
    if RANK == SIZE - 1:
        value[3] = value[3].astype(np.float64)
    with pytest.raises(ms.errors.CollectiveMismatchError):
        reduced(strategy, value)
    check(reduced(strategy, arrays_of(RANK, 2)), 2)


def test_overflow_does_not_warn(strategy: ms.Strategy) -> None:
    value = [np.full(3000, 3e38, np.float32) for _ in range(20)]
    for _ in range(2):
        assert all(np.isinf(array).all() for array in reduced(strategy, value))
