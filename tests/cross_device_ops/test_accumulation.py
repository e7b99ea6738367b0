"""accumulation_fn: all copies of a value meet on one rank, which is asked first whether it has room for them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from counting import counted_calls
from replicas import RANK, RANKS, SIZE, OnNodes, outcomes, value_of

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.cross_device_ops import accumulation
from mpistrategy.mpi.shared_memory import memory_limits
from mpistrategy.mpi.shared_memory.memory_limits import Room

pytestmark = pytest.mark.mpi(min_size=2)
ROOT = SIZE - 1
LARGE = 2**21 * 8 // 4  # float32: all copies take 32 MiB and more


@pytest.fixture(params=["one node", "each its node"])
def strategy(request: pytest.FixtureRequest) -> Iterator[ms.Strategy]:
    ops = ms.ReductionToOneDevice(f"task:{ROOT}", accumulation_fn=lambda values: np.maximum.reduce(values))
    makers = {
        "one node": lambda: ms.MirroredStrategy(cross_device_ops=ops),
        "each its node": lambda: OnNodes(RANKS, ops),
    }
    with makers[request.param]() as made:
        yield made


def with_free(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Let the summing rank have so much memory; the others have none, which is nobody's concern."""
    monkeypatch.setattr(memory_limits, "memory", lambda: Room(nbytes if RANK == ROOT else 0, 2**40, "this test"))


def test_copies_that_do_not_fit_are_refused_everywhere_before_data_move(
    strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks: Any = strategy.extended.communicator
    mine = np.full(LARGE, RANK, np.float32)
    with_free(monkeypatch, SIZE * mine.nbytes - 1)
    with counted_calls(ranks) as calls:
        for outcome in outcomes(lambda: strategy.reduce("SUM", mine)):
            assert outcome.error is errors.UnsupportedError
            for words in (f"all {SIZE} ranks' copies", f"rank {ROOT}", "16 MiB", "this test", "a list of parts"):
                assert words in outcome.text
    assert not calls
    assert float(strategy.reduce("SUM", float(RANK))) == ROOT


def test_the_cure_of_the_refusal_works(strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = np.full(LARGE, RANK, np.float32)
    with_free(monkeypatch, SIZE * mine.nbytes // 4)
    monkeypatch.setattr(accumulation, "_TOGETHER_BYTES", SIZE * mine.nbytes // 8)
    parts = strategy.reduce("SUM", np.split(mine, 8))
    assert all((part == ROOT).all() for part in parts)


def test_a_limit_of_the_process_is_heeded(strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = np.empty

    def limited(shape: Any, *others: Any) -> Any:
        if RANK == ROOT and np.prod(shape) > 2**24:
            raise MemoryError
        return empty(shape, *others)

    mine = np.full(LARGE, RANK, np.float32)
    monkeypatch.setattr(np, "empty", limited)
    found = outcomes(lambda: strategy.reduce("SUM", mine))
    monkeypatch.undo()
    for outcome in found:
        assert outcome.error is errors.UnsupportedError
        assert "the system gives no more" in outcome.text
    assert float(strategy.reduce("SUM", float(RANK))) == ROOT


def test_more_than_half_of_the_memory_warns_once_a_place(
    strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = np.full(LARGE, RANK, np.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for free in (2 * SIZE * mine.nbytes, 2 * SIZE * mine.nbytes - 1, 2 * SIZE * mine.nbytes - 2**20):
            with_free(monkeypatch, free)
            assert (strategy.reduce("SUM", mine) == ROOT).all()
        told = [str(each.message) for each in caught if each.category is errors.OptionWarning]
        assert len(told) == (RANK == ROOT)
        assert all(f"{SIZE * 16} MiB on rank {ROOT}" in text for text in told)
        strategy.reduce("SUM", mine)  # another place
        assert sum(each.category is errors.OptionWarning for each in caught) == 2 * (RANK == ROOT)


def test_values_are_gathered_in_bounded_groups(strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value comes to the function by itself, so that few of them need to be there at a time."""
    ranks: Any = strategy.extended.communicator
    values = [value_of(RANK, "f4", (1000,), seed) for seed in range(20)]
    wanted = [np.max([value_of(rank, "f4", (1000,), seed) for rank in RANKS], axis=0) for seed in range(20)]
    for together, gathers in ((2**28, 1), (SIZE * 8000, 10), (1, 20)):
        monkeypatch.setattr(accumulation, "_TOGETHER_BYTES", together)
        with counted_calls(ranks) as calls:
            found = strategy.reduce("SUM", values)
        assert calls["Gather"] + calls["Gatherv"] == gathers
        for result, right in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(result, right)


def test_what_the_function_keeps_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []

    def keep(values: list[Any]) -> Any:
        kept.append(values)
        return values[0]

    monkeypatch.setattr(accumulation, "_TOGETHER_BYTES", 1)
    with ms.MirroredStrategy(cross_device_ops=ms.ReductionToOneDevice(accumulation_fn=keep)) as strategy:
        strategy.reduce("SUM", [np.full(5, 10 * RANK + number) for number in range(3)])
    assert len(kept) == 3 * (RANK == 0)
    for number, values in enumerate(kept):
        assert [int(value[0]) for value in values] == [10 * rank + number for rank in RANKS]
        assert all((value == value[0]).all() for value in values)


def test_many_ranks_hold_bounded_memory() -> None:
    """By the formula: 100 MB in arrays of 1 MB, whose copies on 1,024 ranks are 102 GB together."""
    layouts = tuple((np.dtype("f4"), (250_000,)) for _ in range(100))
    hints, ops = ms.CommunicationOptions(), ms.ReductionToOneDevice(accumulation_fn=sum)

    class Ranks:
        rank, devices, node_of = 0, (), (0,)

        def __init__(self, size: int) -> None:
            self.size = size

    for size, most in ((4, 2**28), (64, 2**28), (1024, 1_024_000_000), (10_000, 10_000_000_000)):
        ranks: Any = Ranks(size)
        route: Any = ops._plan(ranks, layouts, ms.ReduceOp.SUM, hints, accumulation.Destination()).route
        assert route._nbytes <= most
