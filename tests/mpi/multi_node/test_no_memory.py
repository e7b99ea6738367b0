"""A rank that gets no memory for a result, between nodes: every rank raises, nobody waits, and the job goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from replicas import RANK, SIZE, OnNodes, context, outcomes, still_works

import mpistrategy as ms
from mpistrategy.arrays.dtypes import quiet_runner
from mpistrategy.errors import ContextError, RemoteError
from mpistrategy.reduction import plan
from mpistrategy.reduction.routes import first_message

pytestmark = pytest.mark.mpi(min_size=2)
LAST = SIZE - 1
SECONDS = 5


class Memory:
    """Makes functions fail on the last rank once it `is_out`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.is_out = False

    def limit(self, owner: Any, name: str, fails: Callable[..., bool] = lambda *_: True) -> None:
        """Let a function fail where ``fails(*arguments)`` says so."""
        function = getattr(owner, name)

        def limited(*arguments: Any, **more: Any) -> Any:
            if self.is_out and fails(*arguments):
                raise MemoryError("there is none")
            return function(*arguments, **more)

        if RANK == LAST:
            self._monkeypatch.setattr(owner, name, limited)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    made = Memory(monkeypatch)
    yield made
    made.is_out = False


@pytest.fixture
def apart() -> Iterator[ms.Strategy]:
    """Each rank on a node of its own."""
    made = OnNodes(range(SIZE), ms.MpiAllReduce())
    yield made
    made.close()


@pytest.fixture
def on_two_nodes() -> Iterator[ms.Strategy]:
    made = OnNodes([2 * rank // SIZE for rank in range(SIZE)], ms.MpiAllReduce())
    yield made
    made.close()


def summed(count: int, op: Any = "SUM", dtype: Any = np.float32, **options: Any) -> Any:
    mine = np.full(count, RANK + 1, dtype)
    return context().all_reduce(op, mine, ms.CommunicationOptions(**options) if options else None)


def check_all_raise(strategy: ms.Strategy, memory: Memory, count: int, **options: Any) -> None:
    """Run out of memory in the third call: it raises on every rank, and the strategy goes on."""
    memory.limit(np, "empty", lambda shape, *_: shape in (count, (count,), 4 * count))
    kept = [strategy.run(summed, args=(count,), kwargs=options) for _ in range(2)]
    assert all((each == SIZE * (SIZE + 1) / 2).all() for each in kept)
    memory.is_out, began = True, time.monotonic()
    ends = outcomes(lambda: strategy.run(summed, args=(count,), kwargs=options))
    memory.is_out = False
    assert time.monotonic() - began < SECONDS
    assert [end.error for end in ends] == [RemoteError] * LAST + [Exception]
    for end in ends[:-1]:
        assert f"rank {LAST} could not make this call" in end.text
        assert "MemoryError: there is none" in end.text
    assert still_works(strategy)
    assert (strategy.run(summed, args=(count,), kwargs=options) == SIZE * (SIZE + 1) / 2).all()


@pytest.mark.parametrize("count", [1000, 30_000, 300_000], ids=["beside", "flat", "large"])
def test_before_the_agreement(apart: ms.Strategy, memory: Memory, count: int) -> None:
    check_all_raise(apart, memory, count)


@pytest.mark.mpi(min_size=4)
def test_before_lanes(on_two_nodes: ms.Strategy, memory: Memory) -> None:
    ranks = on_two_nodes.extended.communicator
    assert ranks.route(2**21, np.dtype(np.float32), "SUM") == "lanes"
    check_all_raise(on_two_nodes, memory, 2**19)


def test_before_the_pairwise_exchange(apart: ms.Strategy, memory: Memory) -> None:
    pytest.importorskip("ml_dtypes")
    check_all_raise(apart, memory, 300_000, wire="bfloat16")


def check_the_others_hear(strategy: ms.Strategy, memory: Memory, call: Callable[[], Any]) -> None:
    """Run out of memory after all messages of the third call: the others have the sum, and hear of it in the next."""
    right = strategy.run(call)
    assert np.array_equal(strategy.run(call), right)
    memory.is_out, began = True, time.monotonic()

    def calls() -> Any:
        assert np.array_equal(strategy.run(call), right)
        return strategy.run(call)

    ends = outcomes(calls)
    memory.is_out = False
    assert time.monotonic() - began < SECONDS
    assert [end.error for end in ends] == [RemoteError] * LAST + [Exception]
    for end in ends[:-1]:
        assert f"rank {LAST} failed in " in end.text
        assert "MemoryError: there is none" in end.text
    after = outcomes(lambda: strategy.run(call))
    assert {end.error for end in after} == {ContextError}


def test_after_the_first_message(apart: ms.Strategy, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = quiet_runner

    class Limited:
        def __init__(self) -> None:
            self.run = usual()

        def __call__(self, *arguments: Any) -> Any:
            return self.run(*arguments)

    runner = Limited()
    memory.limit(runner, "run")
    monkeypatch.setattr(first_message, "quiet_runner", lambda: runner)
    check_the_others_hear(apart, memory, lambda: summed(2))


@pytest.mark.parametrize("count", [1000, 300_000])
def test_after_the_sum(apart: ms.Strategy, memory: Memory, count: int) -> None:
    memory.limit(plan, "finish")
    check_the_others_hear(apart, memory, lambda: summed(count, "MEAN", np.int64))
