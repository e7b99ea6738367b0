"""Small packs travel beside the first message of their call: started before the ranks have agreed on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from replicas import RANK, SIZE, context, with_companions

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.mpi.contract.sums_by_mpi import LARGEST_BYTES, MOST, Companions

several = pytest.mark.mpi(min_size=2)
LAST = SIZE - 1
#: More than travels in the first message.
COUNT = 1000


@pytest.fixture
def apart() -> Iterator[ms.Strategy]:
    """Each rank on a node of its own."""
    with with_companions() as strategy:
        yield strategy


def companions_of(strategy: ms.Strategy) -> Companions | None:
    message = strategy.extended.communicator.first_message
    return None if message is None else message.companions


def made(strategy: ms.Strategy) -> list[tuple[str, int]]:
    companions: Any = companions_of(strategy)
    return [(dtype.name, count) for dtype, count in companions.made]


def summed(count: int = COUNT, factor: float = 1, dtype: Any = np.float32) -> Any:
    return context().all_reduce("SUM", (factor * np.arange(count) + RANK).astype(dtype))


def want(count: int = COUNT, factor: float = 1) -> Any:
    return SIZE * factor * np.arange(count) + SIZE * (SIZE - 1) / 2


@several
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64, np.complex64, np.float16])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_values(apart: ms.Strategy, dtype: Any, op: Any) -> None:
    mine, out = (np.arange(COUNT) % 9 + RANK).astype(dtype), None
    expected = (SIZE * (np.arange(COUNT) % 9) + SIZE * (SIZE - 1) / 2) / (SIZE if op == "MEAN" else 1)
    before = mine.copy()

    def step() -> Any:
        return context().all_reduce(op, mine, out=out)

    results = [apart.run(step) for _ in range(3)]
    out = np.empty_like(results[0])
    assert apart.run(step) is out
    for result in [*results, out]:
        np.testing.assert_allclose(result, expected, rtol=1e-3)
        assert np.array_equal(result, results[0])
    assert np.array_equal(mine, before)
    assert len(made(apart)) == 1


@several
def test_an_array_of_the_program_now_and_then(apart: ms.Strategy) -> None:
    """At each place in the order, as soon as the call is known."""
    mine, out = np.arange(COUNT, dtype=np.float32), np.empty(COUNT, np.float32)
    for given in (None, out, None, out, out, None, None):
        result = apart.run(lambda given=given: context().all_reduce("SUM", mine, out=given))
        assert (result is out) == (given is not None)
        assert np.array_equal(result, SIZE * mine)
        out[:] = -1


@several
def test_arrays_in_one_pack(apart: ms.Strategy) -> None:
    nest = {"a": np.full(300, RANK, np.float32), "b": [np.ones((3, 4), np.float32), np.float32(2)]}

    def step() -> Any:
        return context().all_reduce("SUM", nest)

    results = [apart.run(step) for _ in range(3)]
    for result in results:
        assert np.array_equal(result["a"], np.full(300, SIZE * (SIZE - 1) / 2))
        assert np.array_equal(result["b"][0], np.full((3, 4), SIZE))
        assert result["b"][1] == 2 * SIZE
    assert results[0]["a"].base is not results[1]["a"].base
    assert made(apart) == [("float32", 313)]


@several
def test_results_are_not_its_memory(apart: ms.Strategy) -> None:
    results = [apart.run(summed, args=(COUNT, factor)) for factor in (1, 1, 2, 3)]
    for result, factor in zip(results, (1, 1, 2, 3), strict=True):
        assert np.array_equal(result, want(COUNT, factor))


@several
def test_only_small_sums(apart: ms.Strategy) -> None:
    def step() -> None:
        context().all_reduce("MAX", np.ones(COUNT))
        context().all_reduce("SUM", np.ones(COUNT, np.int8))
        context().all_reduce("SUM", np.ones(LARGEST_BYTES // 8 + 1))

    apart.run(step)
    assert made(apart) == []


@several
def test_other_sizes_when_there_is_no_more_room(apart: ms.Strategy) -> None:
    counts = range(COUNT, COUNT + MOST + 3)
    for _ in range(2):
        for count in counts:
            assert np.array_equal(apart.run(summed, args=(count,)), want(count))
    assert made(apart) == [("float32", count) for count in counts[:MOST]]
    beside = ["in its place" in str(apart.explain(np.ones(count, np.float32), "SUM")) for count in counts]
    assert beside == [True] * MOST + [False] * 3


def another_size(strategy: ms.Strategy) -> Any:
    return strategy.run(summed, args=(COUNT + 1 if RANK == LAST else COUNT,))


def another_dtype(strategy: ms.Strategy) -> Any:
    return strategy.run(summed, args=(COUNT, 1, np.float64 if RANK == LAST else np.float32))


def another_call(strategy: ms.Strategy) -> Any:
    return strategy.barrier() if RANK == LAST else strategy.run(summed)


def another_line(strategy: ms.Strategy) -> Any:
    return strategy.run(lambda: summed()) if RANK == LAST else strategy.run(summed)


@several
@pytest.mark.parametrize("mistake", [another_size, another_dtype, another_call, another_line])
@pytest.mark.parametrize("known", [True, False])
def test_a_mistake_of_one_rank(apart: ms.Strategy, mistake: Callable[[ms.Strategy], Any], *, known: bool) -> None:
    def right() -> None:
        for count, dtype in ((COUNT, np.float32), (COUNT + 1, np.float32), (COUNT, np.float64)):
            assert np.array_equal(apart.run(summed, args=(count, 1, dtype)), want(count))

    if known:
        right()
        right()
    for _ in range(3):
        with pytest.raises(errors.CollectiveMismatchError):
            mistake(apart)
        right()


@several
def test_a_rank_that_cannot_make_the_call(apart: ms.Strategy) -> None:
    for _ in range(2):
        apart.run(summed)
    with pytest.raises(errors.DTypeError):
        apart.run(lambda: context().all_reduce("SUM", np.array(["a"])) if RANK == LAST else summed())
    assert np.array_equal(apart.run(summed), want())


@several
def test_a_raised_flag(apart: ms.Strategy) -> None:
    guard: Any = apart.extended.communicator.guard
    for _ in range(3):
        apart.run(summed)
    for _ in range(2):
        if RANK == LAST:
            guard.raise_flag()
        assert np.array_equal(apart.run(summed), want())
        assert guard.flag_was_seen
        guard.lower_flags()


@several
def test_ranks_with_other_bits(apart: ms.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Companions, "_has_equal_bits", lambda self, memory: self._all_equal(RANK))
    for _ in range(3):
        assert np.array_equal(apart.run(summed), want())
    assert made(apart) == []
