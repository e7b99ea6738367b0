"""An error at any moment of a sum between nodes: the rank goes on like the others, or takes no more calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import pytest
from replicas import RANK, SIZE, OnNodes, context, outcomes

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.mpi.contract import failures

several = pytest.mark.mpi(min_size=2)
LAST = SIZE - 1
#: The sums of few numbers travel with the comparison, others after it.
FEW, COUNT = 2, 1000
#: So many calls come before: a repeated call goes another way than the first one.
KNOWN = 2


@pytest.fixture
def strategy() -> Iterator[ms.Strategy]:
    with OnNodes(range(SIZE), ms.MpiAllReduce()) as made:
        yield made


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


@contextmanager
def raised(error: BaseException, event: str, name: str, after: str = "") -> Iterator[None]:
    """Raise once on the last rank, where the function of this name is entered, or comes to a line after another one.

    As the handler of a signal may.
    """
    before, is_due = sys.gettrace(), not after

    def trace(frame: FrameType, what: str, _: object) -> Any:
        nonlocal is_due
        code = frame.f_code
        if code.co_name == after and what == "return":
            is_due = True
        if is_due and (what, code.co_name) == (event, name) and "/mpistrategy/" in code.co_filename:
            sys.settrace(before)
            raise error
        return trace

    if RANK != LAST:
        yield
        return
    sys.settrace(trace)
    try:
        with pytest.raises(type(error)):
            yield
        assert sys.gettrace() is before
    finally:
        sys.settrace(before)


def leave(strategy: ms.Strategy) -> None:
    """Let the last rank, which takes no more calls, tell the other ones, as at the end of its program."""
    guard: Any = strategy.extended.communicator.guard
    assert guard.closed
    with pytest.raises(errors.ContextError, match="Ctrl-C"):
        strategy.run(summed)
    guard.start_leaving()
    while (answer := guard.peers_have_left()) is None:
        pass
    assert answer is False
    guard.tell_peers()
    assert not guard.is_untold


def check_the_others_hear(strategy: ms.Strategy, step: Callable[[], object] = summed) -> None:
    """Look at how the ranks go on: the last one takes no more calls, and the others raise RemoteError."""
    if RANK == LAST:
        leave(strategy)
    else:
        with pytest.raises(errors.RemoteError, match="Ctrl-C"):
            strategy.run(step)


STEPS = [summed, summed_with_the_comparison, summed_in_a_nest]


@several
@pytest.mark.parametrize("step", STEPS)
def test_before_the_comparison(strategy: ms.Strategy, step: Callable[[], None]) -> None:
    """The call counts as not begun, and no other call takes its numbers for its own."""
    repeated(strategy, KNOWN, step)
    if RANK == LAST:
        with raised(KeyboardInterrupt("Ctrl-C"), "call", "_agrees"):
            strategy.run(step)
    for _ in range(KNOWN):
        repeated(strategy, 1, step)  # on the last rank, the first of them once more
        strategy.barrier()


@several
@pytest.mark.parametrize("step", STEPS)
def test_before_this_rank_has_sent_its_digest(strategy: ms.Strategy, step: Callable[[], None]) -> None:
    repeated(strategy, KNOWN, step)
    with raised(KeyboardInterrupt("Ctrl-C"), "call", "_start"):
        if RANK == LAST:
            strategy.run(step)
    check_the_others_hear(strategy, step)


@several
@pytest.mark.parametrize("where", ["_start", "all_equal", "_agrees", "compare"])
def test_in_the_comparison(strategy: ms.Strategy, where: str) -> None:
    """The other ranks have agreed with this one, and have their sums."""
    repeated(strategy, KNOWN, summed_with_the_comparison)
    with raised(KeyboardInterrupt("Ctrl-C"), "return", where):
        strategy.run(summed_with_the_comparison)
    check_the_others_hear(strategy, summed_with_the_comparison)


@several
def test_among_the_data(strategy: ms.Strategy) -> None:
    """What this rank has sent of them is not known: another call could be added to what is under way."""

    def step() -> None:
        context().all_reduce("SUM", [np.ones(300_000)])

    repeated(strategy, KNOWN, step)
    with raised(KeyboardInterrupt("Ctrl-C"), "return", "allreduce"):
        strategy.run(step)
    check_the_others_hear(strategy, step)


@several
def test_an_error_of_this_library_on_one_rank(strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a handler that makes a call of the strategy gets it: no other rank raises it."""
    guard: Any = strategy.extended.communicator.guard
    repeated(strategy, KNOWN)
    ended: list[BaseException] = []
    monkeypatch.setattr(guard, "give_up", ended.append)  # it would end the job
    error = errors.ContextError("Ctrl-C")
    with raised(error, "call", "_start"):
        if RANK == LAST:
            strategy.run(summed)
    assert ended == ([error] if RANK == LAST else [])
    check_the_others_hear(strategy)


@several
def test_while_a_rank_waits_to_tell_its_error(strategy: ms.Strategy) -> None:
    repeated(strategy, KNOWN)
    with raised(KeyboardInterrupt("Ctrl-C"), "call", "growing_pauses"):
        if RANK == LAST:
            strategy.run(lambda: context().all_reduce("SUM", np.array(["a"])))
    check_the_others_hear(strategy)


@several
def test_where_a_call_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows whether it was done: the rank takes no more calls, and its next one is no part of that."""
    monkeypatch.setattr(failures, "PATIENCE_SECONDS", 0.1)
    with ms.MirroredStrategy(on_error="raise") as strategy:
        repeated(strategy, KNOWN)
        with raised(KeyboardInterrupt("Ctrl-C"), "call", "__exit__"):
            strategy.run(summed)
        ends = outcomes(lambda: strategy.run(summed))
        assert [end.error for end in ends] == [errors.RemoteError] * LAST + [errors.ContextError]
        assert all("KeyboardInterrupt: as the call was left" in end.text for end in ends)
