"""A sum that is repeated between nodes takes one message, with the check of its call; other calls come as they like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import RANK, SIZE, OnNodes, context, with_companions

import mpistrategy as ms
from mpistrategy import errors

several = pytest.mark.mpi(min_size=2)
LAST = SIZE - 1
SMALL, MEDIUM, LARGE = 2, 1000, 2**16
TOTAL = SIZE * (SIZE - 1) / 2


@pytest.fixture(params=["apart", *(["in pairs"] if SIZE > 2 else [])])
def strategy(request: pytest.FixtureRequest) -> Iterator[ms.Strategy]:
    nodes = range(SIZE) if request.param == "apart" else [rank // 2 for rank in range(SIZE)]
    with with_companions(nodes) as made:
        yield made


def summed(count: int, factor: float = 1) -> None:
    result = context().all_reduce("SUM", np.full(count, factor + RANK))
    assert np.array_equal(result, np.full(count, SIZE * factor + TOTAL))


def started(strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return how often this rank starts the first message, and sums of their own, from now on."""
    channel: Any = strategy.extended.communicator.first_message
    counts: Counter[str] = Counter()

    def counted(owner: Any, attribute: str, what: str) -> None:
        start = getattr(owner, attribute)

        def count_it() -> None:
            counts[what] += 1
            start()

        monkeypatch.setattr(owner, attribute, count_it)

    start_first = channel._start_first
    monkeypatch.setattr(channel, "_start_first", lambda digest: (counts.update(["first message"]), start_first(digest)))
    for companion in channel.companions.made.values():
        counted(companion, "start", "sum")
    return counts


def repeated(strategy: ms.Strategy, times: int, step: Callable[[], Any]) -> None:
    for _ in range(times):
        strategy.run(step)


@several
def test_a_repeated_sum_takes_one_message(strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    nest = {"a": np.ones(700), "b": [np.ones(300)]}  # in one pack; its comparison takes no short way

    def step() -> None:
        context().all_reduce("SUM", nest)

    repeated(strategy, 5, step)
    counts = started(strategy, monkeypatch)
    repeated(strategy, 4, step)
    assert counts == {"sum": 4}


@several
def test_an_expected_call_does_not_come(strategy: ms.Strategy) -> None:
    def loop() -> None:
        for number in range(40):
            summed(MEDIUM, number)
            if number % 7 == 6:
                summed(SMALL, number)
            if number % 9 == 8:
                summed(LARGE, number)
                assert context().all_gather(np.ones(3), axis=0).size == 3 * SIZE

    repeated(strategy, 2, loop)


@several
@pytest.mark.parametrize("which", range(SIZE))
def test_one_rank_makes_another_call(strategy: ms.Strategy, which: int) -> None:
    """Where all make the one that the others make, it is the expected one."""

    def step(count: int) -> Any:
        return context().all_reduce("SUM", np.ones(count))

    for other in (SMALL, MEDIUM + 1, LARGE):
        for _ in range(6):
            assert strategy.run(step, args=(MEDIUM,))[0] == SIZE
        with pytest.raises(errors.CollectiveMismatchError):
            strategy.run(step, args=(other if which == RANK else MEDIUM,))
        with pytest.raises(errors.CollectiveMismatchError):
            strategy.run(step, args=(MEDIUM if which == RANK else other,))


@several
def test_a_rank_at_another_line(strategy: ms.Strategy) -> None:
    """Its sum has the size of the expected one."""
    repeated(strategy, 6, lambda: summed(MEDIUM))
    with pytest.raises(errors.CollectiveMismatchError):
        strategy.run(
            (lambda: summed(MEDIUM)) if RANK == LAST else (lambda: context().all_reduce("SUM", np.ones(MEDIUM)))
        )
    repeated(strategy, 6, lambda: summed(MEDIUM))


@several
@pytest.mark.parametrize("which", range(SIZE))
def test_a_rank_fails_in_place_of_the_expected_call(strategy: ms.Strategy, which: int) -> None:
    def step(value: Any) -> Any:
        return context().all_reduce("SUM", value)

    for _ in range(3):
        for _ in range(6):
            assert strategy.run(step, args=(np.ones(MEDIUM),))[0] == SIZE
        with pytest.raises(errors.DTypeError):
            strategy.run(step, args=(np.array(["a"]) if which == RANK else np.ones(MEDIUM),))


@several
def test_a_flag_is_seen_in_an_expected_call(strategy: ms.Strategy) -> None:
    guard: Any = strategy.extended.communicator.guard

    def step() -> None:
        context().all_reduce("SUM", np.ones(MEDIUM))

    for _ in range(3):
        repeated(strategy, 6, step)
        if RANK == LAST:
            guard.raise_flag()
        repeated(strategy, 1, step)
        assert guard.flag_was_seen
        guard.lower_flags()


@several
@pytest.mark.parametrize("patient", [0, LAST])
def test_a_rank_that_waits_without_a_busy_core(strategy: ms.Strategy, patient: int) -> None:
    """It compares the expected call, or another one, in steps."""
    channel: Any = strategy.extended.communicator.first_message
    guard: Any = strategy.extended.communicator.guard
    guard._is_patient = patient == RANK  # before there are plans

    def step(count: int) -> Any:
        return context().all_reduce("SUM", np.ones(count))

    for times in (4, 8, 16):
        for _ in range(times):
            assert strategy.run(step, args=(MEDIUM,))[0] == SIZE
        assert channel.companions.calls.known is not None
        assert strategy.run(step, args=(SMALL,))[0] == SIZE


@several
def test_the_program_of_a_rank_ends_in_place_of_the_expected_call(
    strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard: Any = strategy.extended.communicator.guard

    def step() -> None:
        context().all_reduce("SUM", np.ones(MEDIUM))

    repeated(strategy, 6, step)
    if RANK == LAST:
        guard.start_leaving()
        while (left := guard.peers_have_left()) is None:
            pass
        assert left is False
        with monkeypatch.context() as patch:
            patch.setattr(guard, "start_leaving", lambda: None)  # it stays after all
            guard.tell_peers()
        guard.leaving = False
    else:
        with pytest.raises(errors.CollectiveMismatchError, match="has ended"):
            repeated(strategy, 1, step)
    repeated(strategy, 6, step)


@several
@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_any_order_of_calls_and_mistakes(data: st.DataObject) -> None:
    """Derandomized: all ranks draw the same."""
    pattern = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    calls = data.draw(st.lists(st.tuples(st.integers(1, 5), st.integers(-1, LAST)), min_size=2, max_size=6))
    strategy = OnNodes(range(SIZE), ms.MpiAllReduce())

    def step(which: int) -> None:
        match which:
            case 0:
                summed(MEDIUM)
            case 1:
                summed(SMALL)
            case 2:
                summed(LARGE)
            case _:
                assert context().all_reduce("MAX", RANK) == LAST

    try:
        for times, wrong in calls:
            for _ in range(times):
                for which in pattern:
                    strategy.run(step, args=(which,))
            if wrong >= 0:
                with pytest.raises(errors.CollectiveMismatchError):
                    strategy.run(step, args=((pattern[0] + (wrong == RANK)) % 4,))
    finally:
        strategy.close()
