"""accumulation_fn: all copies of a value meet on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from replicas import RANK, RANKS, SIZE, OnNodes, value_of

import mpistrategy as ms

pytestmark = pytest.mark.mpi(min_size=2)
ROOT = SIZE - 1


@pytest.fixture(params=["one node", "each its node"])
def keeping(request: pytest.FixtureRequest) -> Iterator[ms.Strategy]:
    ops = ms.ReductionToOneDevice(f"task:{ROOT}", accumulation_fn=lambda values: np.maximum.reduce(values))
    makers = {
        "one node": lambda: ms.MirroredStrategy(cross_device_ops=ops),
        "each its node": lambda: OnNodes(RANKS, ops),
    }
    with makers[request.param]() as made:
        yield made


def test_values_of_many_dtypes_keep_their_places(keeping: ms.Strategy) -> None:
    values = [value_of(RANK, dtype, (3, 5), seed) for seed, dtype in enumerate(("f4", "f8", "f2", "i4", "f4", "f8"))]
    found = keeping.reduce("SUM", values)
    for seed, (result, mine) in enumerate(zip(found, values, strict=True)):
        right = np.max([value_of(rank, mine.dtype, (3, 5), seed) for rank in RANKS], axis=0)
        np.testing.assert_array_equal(result, right)
        assert result.dtype == mine.dtype
    found = keeping.reduce("SUM", [np.zeros(0, np.int8), np.array([RANK], np.int8), np.zeros((0, 3))])
    assert [result.shape for result in found] == [(0,), (1,), (0, 3)]
    assert found[1] == ROOT
    assert keeping.reduce("MEAN", float(RANK)) == ROOT / SIZE  # it divides whatever the function did


def test_the_function_gets_all_values_once_in_rank_order_and_may_keep_them() -> None:
    kept: list[Any] = []

    def keep(values: list[Any]) -> Any:
        kept.append(values)
        return values[0]

    with ms.MirroredStrategy(cross_device_ops=ms.ReductionToOneDevice(accumulation_fn=keep)) as strategy:
        strategy.reduce("SUM", [np.full(5, 10 * RANK + number) for number in range(3)])
    assert len(kept) == 3 * (RANK == 0)
    for number, values in enumerate(kept):
        assert [value.tolist() for value in values] == [[10 * rank + number] * 5 for rank in RANKS]
