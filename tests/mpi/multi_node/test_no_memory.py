"""A rank that gets no memory for a result, between nodes: every rank raises, nobody waits, and the job goes on."""

from __future__ import annotations

import mmap
import time
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from replicas import RANK, SIZE, OnNodes, context, outcomes, still_works

import mpistrategy as ms
from mpistrategy.cross_device_ops import built_in, ordered
from mpistrategy.errors import ContextError, RemoteError
from mpistrategy.mpi.multi_node import two_level
from mpistrategy.reduction import collectives, plan
from mpistrategy.reduction.routes import host
from mpistrategy.variables import policies, storage

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
def on_two_nodes() -> Iterator[ms.Strategy]:
    made = OnNodes([2 * rank // SIZE for rank in range(SIZE)], ms.MpiAllReduce())
    yield made
    made.close()


@pytest.fixture
def contained() -> Iterator[ms.Strategy]:
    """Each rank on a node of its own; an error after the agreement does not end the job."""
    made = OnNodes(range(SIZE), ms.MpiAllReduce(), contains_errors=True)
    yield made
    made.close()


def summed(count: int, op: Any = "SUM", dtype: Any = np.float32, **options: Any) -> Any:
    mine = np.full(count, RANK + 1, dtype)
    return context().all_reduce(op, mine, ms.CommunicationOptions(**options) if options else None)


def without_memory(memory: Memory, call: Callable[[], Any], told: str) -> None:
    """Call while the last rank has no memory: it raises on every rank, soon, and the others say what became of it."""
    memory.is_out, began = True, time.monotonic()
    ends = outcomes(call)
    memory.is_out = False
    assert time.monotonic() - began < SECONDS
    assert [end.error for end in ends] == [RemoteError] * LAST + [Exception]
    for end in ends[:-1]:
        assert f"rank {LAST} {told}" in end.text
        assert "MemoryError: there is none" in end.text


def check_all_raise(strategy: ms.Strategy, memory: Memory, count: int, **options: Any) -> None:
    """Run out of memory in the third call: it raises on every rank, and the strategy goes on."""
    memory.limit(np, "empty", lambda shape, *_: shape in (count, (count,), 4 * count))
    memory.limit(mmap, "mmap", lambda file, nbytes: nbytes > 4 * count)  # of huge pages
    kept = [strategy.run(summed, args=(count,), kwargs=options) for _ in range(2)]
    assert all((each == SIZE * (SIZE + 1) / 2).all() for each in kept)
    without_memory(memory, lambda: strategy.run(summed, args=(count,), kwargs=options), "could not make this call")
    assert still_works(strategy)
    assert (strategy.run(summed, args=(count,), kwargs=options) == SIZE * (SIZE + 1) / 2).all()


@pytest.mark.parametrize("count", [1000, 30_000, 300_000], ids=["small", "pooled", "large"])
def test_before_the_agreement(apart: ms.Strategy, memory: Memory, count: int) -> None:
    check_all_raise(apart, memory, count)


@pytest.mark.mpi(min_size=4)
def test_before_lanes(on_two_nodes: ms.Strategy, memory: Memory) -> None:
    ranks = on_two_nodes.extended.communicator
    assert ranks.route(2**21, np.dtype(np.float32), "SUM") == "lanes"
    check_all_raise(on_two_nodes, memory, 2**19)


def test_before_a_rounded_exchange(apart: ms.Strategy, memory: Memory) -> None:
    pytest.importorskip("ml_dtypes")
    check_all_raise(apart, memory, 300_000, wire="bfloat16")


def check_the_others_hear(strategy: ms.Strategy, memory: Memory, call: Callable[[], Any]) -> None:
    """Run out of memory after all messages of the third call: the others have the sum, and hear of it in the next."""
    right = strategy.run(call)
    assert np.array_equal(strategy.run(call), right)

    def calls() -> Any:
        assert np.array_equal(strategy.run(call), right)
        return strategy.run(call)

    without_memory(memory, calls, "failed in ")
    after = outcomes(lambda: strategy.run(call))
    assert {end.error for end in after} == {ContextError}


def test_after_the_first_message(contained: ms.Strategy, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.limit(host, "_read")
    check_the_others_hear(contained, memory, lambda: summed(2))


@pytest.mark.parametrize("count", [1000, 300_000])
def test_after_the_sum(contained: ms.Strategy, memory: Memory, count: int) -> None:
    memory.limit(plan, "finish")
    check_the_others_hear(contained, memory, lambda: summed(count, "MEAN", np.int64))


def check_first_call(strategy: ms.Strategy, memory: Memory, call: Callable[[], Any], right: Any) -> None:
    """Run out of memory in the first call, after the agreement: all raise, and the next call is right."""
    without_memory(memory, call, "could not make this call")
    for _ in range(2):
        assert np.array_equal(call(), right)
    assert still_works(strategy)


def test_what_the_first_rounded_exchange_makes(on_two_nodes: ms.Strategy, memory: Memory) -> None:
    pytest.importorskip("ml_dtypes")
    memory.limit(two_level, "Rounded")
    call = partial(on_two_nodes.run, summed, args=(300_000,), kwargs={"wire": "bfloat16"})
    check_first_call(on_two_nodes, memory, call, np.full(300_000, SIZE * (SIZE + 1) / 2, np.float32))


def limit_new(memory: Memory, module: Any, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let NumPy's functions that take memory fail in one module."""
    limited = types.SimpleNamespace(**{name: getattr(np, name) for name in dir(np) if not name.startswith("__")})
    monkeypatch.setattr(module, "np", limited)
    for name in names:
        memory.limit(limited, name)


def test_gather_and_slices(apart: ms.Strategy, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory depends on what the ranks bring, which they learn after the agreement."""
    limit_new(memory, collectives, monkeypatch, "empty")
    mine = np.full((RANK + 1, 2), float(RANK))
    every = np.concatenate([np.full((rank + 1, 2), float(rank)) for rank in range(SIZE)])
    check_first_call(apart, memory, lambda: apart.run(lambda: context().all_gather(mine, 0)), every)
    rows = ms.IndexedSlices(mine, np.arange(RANK + 1), (SIZE, 2))
    check_first_call(apart, memory, lambda: apart.run(lambda: context().all_reduce("SUM", rows)).values, every)


def test_a_variable_with_the_value_of_replica_0(
    apart: ms.Strategy, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with apart.scope():
        variable = ms.Variable(np.zeros((3, 2)), aggregation="ONLY_FIRST_REPLICA")
    limit_new(memory, policies, monkeypatch, "array")
    limit_new(memory, collectives, monkeypatch, "array")
    value = np.full((3, 2), RANK + 1.0)
    check_first_call(apart, memory, lambda: apart.run(lambda: variable.assign(value).numpy()), np.ones((3, 2)))
    rows = ms.IndexedSlices(value[:2] * 2, np.arange(2))
    right = np.array([[2.0, 2.0], [2.0, 2.0], [1.0, 1.0]])
    check_first_call(apart, memory, lambda: apart.run(lambda: variable.scatter_update(rows).numpy()), right)


def test_an_arena_of_16_bit_floats(apart: ms.Strategy, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = apart.arena([np.zeros(1000, np.float16)])
    limit_new(memory, host, monkeypatch, "empty")

    def call() -> Any:
        arena.values[0][...] = RANK + 1
        return apart.run(lambda: context().all_reduce("SUM", arena))[0]

    check_first_call(apart, memory, call, np.full(1000, SIZE * (SIZE + 1) / 2, np.float16))


@pytest.mark.parametrize("count", [1000, 1001], ids=["in equal shares", "in unequal shares"])
def test_sums_in_order(memory: Memory, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    with OnNodes(range(SIZE), ms.OrderedAllReduce()) as made:
        memory.limit(ordered, "room_for_shares")
        right = np.full(count, SIZE * (SIZE + 1) / 2, np.float32)
        check_first_call(made, memory, lambda: made.run(summed, args=(count,)), right)


def test_an_accumulation(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank puts the values together; it takes memory for each pack before the copies travel."""
    how = ms.ReductionToOneDevice(f"task:{LAST}", lambda values: np.sum(values, axis=0))
    with OnNodes(range(SIZE), how) as made:
        limit_new(memory, built_in, monkeypatch, "empty")
        right = np.full(1000, SIZE * (SIZE + 1) / 2, np.float32)
        check_first_call(made, memory, lambda: made.run(summed, args=(1000,)), right)


def test_the_products_of_a_weighted_mean(apart: ms.Strategy, memory: Memory) -> None:
    memory.limit(plan.WeightedMeans, "_products_and_memory")
    right = sum((rank + 1.0) ** 2 for rank in range(SIZE)) / sum(rank + 1.0 for rank in range(SIZE))
    mine = np.full(1000, RANK + 1.0)
    check_first_call(
        apart,
        memory,
        lambda: apart.run(lambda: context().all_reduce("MEAN", mine, weight=RANK + 1.0)),
        np.full(1000, right),
    )


def test_the_memory_of_a_variable(apart: ms.Strategy, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_new(memory, storage, monkeypatch, "empty")

    def call() -> Any:
        with apart.scope():
            return ms.Variable(np.full(3, RANK + 1.0)).numpy()

    check_first_call(apart, memory, call, np.ones(3))
