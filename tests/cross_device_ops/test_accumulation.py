"""accumulation_fn: all copies of a value meet on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from replicas import RANK, RANKS, SIZE, OnNodes, outcomes, value_of

import mpistrategy as ms

pytestmark = pytest.mark.mpi(min_size=2)
ROOT = SIZE - 1
LARGE = 2**16


@pytest.fixture(params=["one node", "each its node"])
def strategy(request: pytest.FixtureRequest) -> Iterator[ms.Strategy]:
    ops = ms.ReductionToOneDevice(f"task:{ROOT}", accumulation_fn=lambda values: np.maximum.reduce(values))
    makers = {
        "one node": lambda: ms.MirroredStrategy(cross_device_ops=ops),
        "each its node": lambda: OnNodes(RANKS, ops),
    }
    with makers[request.param]() as made:
        yield made


def test_no_room_for_all_copies_raises_everywhere_before_data_move(
    strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks: Any = strategy.extended.communicator
    mine, empty = np.full(LARGE, RANK, np.float32), np.empty

    def limited(shape: Any, *others: Any) -> Any:
        if RANK == ROOT and np.prod(shape) == SIZE * LARGE:
            raise MemoryError
        return empty(shape, *others)

    monkeypatch.setattr(np, "empty", limited)
    monkeypatch.setattr(ranks, "_comm", None)  # by which no data may travel
    found = outcomes(lambda: strategy.reduce("SUM", mine))
    monkeypatch.undo()
    for outcome in found:
        assert "MemoryError" in outcome.text
    parts = strategy.reduce("SUM", np.split(mine, 8))
    assert all((part == ROOT).all() for part in parts)


def test_values_of_many_dtypes_keep_their_places(strategy: ms.Strategy) -> None:
    values = [value_of(RANK, dtype, (3, 5), seed) for seed, dtype in enumerate(("f4", "f8", "f2", "i4", "f4", "f8"))]
    found = strategy.reduce("SUM", values)
    for seed, (result, mine) in enumerate(zip(found, values, strict=True)):
        right = np.max([value_of(rank, mine.dtype, (3, 5), seed) for rank in RANKS], axis=0)
        np.testing.assert_array_equal(result, right)
        assert result.dtype == mine.dtype


def test_small_and_empty_values_come_one_by_one(strategy: ms.Strategy) -> None:
    values = [np.zeros(0, np.int8), np.array([RANK], np.int8), np.zeros((0, 3)), np.zeros((0, 5))]
    found = strategy.reduce("SUM", values)
    assert [result.shape for result in found] == [(0,), (1,), (0, 3), (0, 5)]
    assert found[1] == ROOT
    assert not any(result is mine for result in found for mine in values)
    assert strategy.reduce("MEAN", float(RANK)) == ROOT / SIZE  # it divides whatever the function did


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
