"""Lanes: a rank shows its node what it brings only when all ranks have agreed on the call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from replicas import RANK, SIZE, OnNodes, context

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.mpi.multi_node.two_level import AcrossNodes

pytestmark = pytest.mark.mpi(min_size=4)
LAST = SIZE - 1
COUNT = 2**18


@pytest.fixture
def strategy() -> Iterator[ms.Strategy]:
    """Two nodes."""
    made = OnNodes([2 * rank // SIZE for rank in range(SIZE)], ms.MpiAllReduce())
    assert made.extended.communicator.route(4 * COUNT, np.dtype(np.float32), "SUM") == "lanes"
    yield made
    made.close()


def summed(mine: Any) -> Any:
    return context().all_reduce("SUM", mine)


def brought(factor: float, count: int = COUNT) -> Any:
    return (factor * np.arange(count) + RANK).astype(np.float32)


def is_right(result: Any, factor: float) -> bool:
    return np.allclose(result, SIZE * factor * np.arange(COUNT) + SIZE * (SIZE - 1) / 2)


def test_it_is_written_before_the_agreement(strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    sources: list[Any] = []
    write = AcrossNodes.write

    def written(self: AcrossNodes, source: Any) -> None:
        sources.append(source)
        write(self, source)

    monkeypatch.setattr(AcrossNodes, "write", written)
    mine = brought(1)
    for _ in range(3):
        assert is_right(strategy.run(summed, args=(mine,)), 1)
    assert [source is mine for source in sources] == [True, True]  # the first call finds out that lanes are the way


def test_after_a_mistake_it_is_written_again(strategy: ms.Strategy) -> None:
    mine = brought(1)
    for factor in (1, 2, 3):
        for _ in range(2):
            assert is_right(strategy.run(summed, args=(mine,)), factor)
        with pytest.raises(errors.CollectiveMismatchError):
            strategy.run(summed, args=(brought(7, COUNT + 1) if RANK == LAST else mine,))
        mine[...] = brought(factor + 1)
        if factor == 3:  # a line that has not been seen yet writes nothing early
            assert is_right(strategy.run(lambda: context().all_reduce("SUM", mine)), factor + 1)
    assert is_right(strategy.run(summed, args=(mine,)), 4)
    out = np.empty_like(mine)
    strategy.run(lambda: context().all_reduce("SUM", mine, out=out))
    assert is_right(out, 4)


def test_columns_of_an_array(strategy: ms.Strategy) -> None:
    mine = np.stack([brought(1), brought(2)], axis=1)
    for _ in range(3):
        assert is_right(strategy.run(summed, args=(mine[:, 1],)), 2)
