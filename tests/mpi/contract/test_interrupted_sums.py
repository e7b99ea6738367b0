"""An error at any moment of a sum between nodes: the rank goes on like the others, or takes no more calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import pytest
from replicas import RANK, SIZE, context, with_companions

import mpistrategy as ms
from mpistrategy import errors

several = pytest.mark.mpi(min_size=2)
LAST = SIZE - 1
COUNT = 1000
#: So many calls come before one that all ranks expect; and before one that has a companion only.
EXPECTED, KNOWN = 6, 1


@pytest.fixture
def strategy() -> Iterator[ms.Strategy]:
    with with_companions() as made:
        yield made


def summed() -> None:
    assert np.array_equal(context().all_reduce("SUM", np.full(COUNT, RANK)), np.full(COUNT, SIZE * (SIZE - 1) / 2))


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


@several
@pytest.mark.parametrize("step", [summed, summed_in_a_nest])
def test_before_anything_is_sent(strategy: ms.Strategy, step: Callable[[], None]) -> None:
    """The sum waits for the comparison of the call that is expected; no other call takes it for its own."""
    companions: Any = strategy.extended.communicator.first_message.companions  # type: ignore[union-attr]
    repeated(strategy, EXPECTED, step)
    if RANK == LAST:
        with raised(KeyboardInterrupt("Ctrl-C"), "call", "compare"):
            strategy.run(step)
        assert companions.started is None
        assert not companions.is_held
    repeated(strategy, EXPECTED, step)  # on the last rank, the first of them once more
    for _ in range(EXPECTED):
        strategy.barrier()
        repeated(strategy, 1, step)


@several
@pytest.mark.parametrize("step", [summed, summed_in_a_nest])
@pytest.mark.parametrize("where", ["compare", "finish"])
def test_while_a_sum_is_under_way(strategy: ms.Strategy, step: Callable[[], None], where: str) -> None:
    repeated(strategy, KNOWN + (step is summed), step)
    with raised(KeyboardInterrupt("Ctrl-C"), "call", where):
        if RANK == LAST or where == "finish":
            strategy.run(step)
    check_the_others_hear(strategy, step)


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
def test_before_an_agreement_is_noted(strategy: ms.Strategy) -> None:
    """Without the note this rank would expect other calls than the others do."""
    repeated(strategy, KNOWN)
    with raised(KeyboardInterrupt("Ctrl-C"), "call", "note"):
        strategy.run(summed)
    check_the_others_hear(strategy)


@several
def test_an_error_of_this_library_on_one_rank(strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a handler that makes a call of the strategy gets it: no other rank raises it."""
    guard: Any = strategy.extended.communicator.guard
    repeated(strategy, EXPECTED)
    ended: list[BaseException] = []
    monkeypatch.setattr(guard, "give_up", ended.append)  # it would end the job
    error = errors.ContextError("Ctrl-C")
    with raised(error, "call", "carries"):
        if RANK == LAST:
            strategy.run(summed)
    assert ended == ([error] if RANK == LAST else [])
    check_the_others_hear(strategy)


@several
@pytest.mark.parametrize("times", [KNOWN, EXPECTED])
def test_while_a_rank_waits_to_tell_its_error(strategy: ms.Strategy, times: int) -> None:
    repeated(strategy, times)
    with raised(KeyboardInterrupt("Ctrl-C"), "call", "growing_pauses"):
        if RANK == LAST:
            strategy.run(lambda: context().all_reduce("SUM", np.array(["a"])))
    check_the_others_hear(strategy)


@several
def test_while_the_shortest_way_is_prepared(strategy: ms.Strategy) -> None:
    repeated(strategy, KNOWN)
    if RANK == LAST:
        with raised(KeyboardInterrupt("Ctrl-C"), "line", "run", after="_find"):
            strategy.run(summed)
    repeated(strategy, EXPECTED)
