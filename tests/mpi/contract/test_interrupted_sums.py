"""An interruption at any moment of a sum between nodes, where errors are contained: the others raise RemoteError."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from replicas import RANK, SIZE, OnNodes, context, outcomes, raising, several

import mpistrategy as ms
from mpistrategy import errors

LAST = SIZE - 1
#: The sums of few numbers travel with the comparison, others after it.
FEW, COUNT = 2, 1000
#: So many calls come before: a repeated call goes another way than the first one.
KNOWN = 2


@pytest.fixture
def contained() -> Iterator[ms.Strategy]:
    made = OnNodes(range(SIZE), ms.MpiAllReduce(), contains_errors=True)
    yield made
    made.close()


def summed(count: int = COUNT) -> None:
    assert np.array_equal(
        context().all_reduce("SUM", np.full(count, float(RANK))), np.full(count, SIZE * (SIZE - 1) / 2)
    )


def summed_with_the_comparison() -> None:
    summed(FEW)


def summed_in_a_nest() -> None:
    result = context().all_reduce("SUM", {"a": np.full(COUNT, RANK)})
    assert np.array_equal(result["a"], np.full(COUNT, SIZE * (SIZE - 1) / 2))


def repeated(strategy: ms.Strategy, times: int, step: Callable[[], object] = summed) -> None:
    for _ in range(times):
        strategy.run(step)


def check_all_hear(strategy: ms.Strategy, step: Callable[[], object], event: str, name: str) -> None:
    """Interrupt a step on the last rank: that takes no more calls, and the others raise, in that call or the next."""
    if RANK == LAST:
        with raising(KeyboardInterrupt("Ctrl-C"), event, name):
            strategy.run(step)
            pytest.fail("not interrupted")
        with pytest.raises(errors.ContextError, match="Ctrl-C"):
            strategy.run(step)
    else:
        with pytest.raises(errors.RemoteError, match=rf"rank {LAST} failed in .*KeyboardInterrupt: Ctrl-C"):
            repeated(strategy, 2, step)


@several
@pytest.mark.parametrize("name", ["_agrees", "_start"])
@pytest.mark.parametrize("step", [summed, summed_with_the_comparison, summed_in_a_nest])
def test_before_this_rank_has_sent_its_digest(contained: ms.Strategy, step: Callable[[], None], name: str) -> None:
    """No other call takes its numbers for its own."""
    repeated(contained, KNOWN, step)
    check_all_hear(contained, step, "call", name)


@several
@pytest.mark.parametrize("where", ["_start", "all_equal", "_agrees", "compare"])
def test_in_the_comparison(contained: ms.Strategy, where: str) -> None:
    """The other ranks have agreed with this one, and have their sums."""
    repeated(contained, KNOWN, summed_with_the_comparison)
    check_all_hear(contained, summed_with_the_comparison, "return", where)


@several
def test_among_the_data(contained: ms.Strategy) -> None:
    """What this rank has sent of them is not known: another call could be added to what is under way."""

    def step() -> None:
        context().all_reduce("SUM", [np.ones(300_000)])

    repeated(contained, KNOWN, step)
    check_all_hear(contained, step, "return", "allreduce")


def test_in_the_search_for_a_plan() -> None:
    """The exception of a handler is none of a value without a plan."""
    with raising(TimeoutError("the alarm"), "call", "kind_of"):
        pytest.fail(f"lost: {ms.OneDeviceStrategy('CPU:0').reduce('SUM', 1.0)}")


@several
def test_while_a_rank_waits_to_tell_its_error(contained: ms.Strategy) -> None:
    repeated(contained, KNOWN)

    def step() -> None:
        context().all_reduce("SUM", np.array(["a"]) if RANK == LAST else np.ones(COUNT))

    check_all_hear(contained, step, "call", "wait_patiently")


@several
def test_where_a_call_is_left() -> None:
    """Nobody knows whether it was done: the rank takes no more calls, and its next one is no part of that."""
    with ms.MirroredStrategy(on_error="raise") as strategy:
        repeated(strategy, KNOWN)
        if RANK == LAST:
            with raising(KeyboardInterrupt("Ctrl-C"), "call", "__exit__"):
                strategy.run(summed)
        else:
            strategy.run(summed)
        ends = outcomes(lambda: strategy.run(summed))
        assert [end.error for end in ends] == [errors.RemoteError] * LAST + [errors.ContextError]
        assert all("KeyboardInterrupt: as the call was left" in end.text for end in ends)
