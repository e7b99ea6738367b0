"""A rank that fails in a call between nodes, where the others are, or have been: every rank raises, nobody waits."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from replicas import RANK, RANKS, SIZE, OnNodes, all_raise, context, new_variable, outcomes, still_works

import mpistrategy as ms
from mpistrategy.cross_device_ops import algorithms
from mpistrategy.errors import ContextError, RemoteError
from mpistrategy.mpi.multi_node import two_level
from mpistrategy.mpi.shared_memory.node_sum import NodeSum
from mpistrategy.reduction import collectives, plan, reducer, transfer
from mpistrategy.variables import variable

pytestmark = pytest.mark.mpi(min_size=2)
LAST = SIZE - 1
SECONDS = 5
APART, TWO_NODES, ONE_NODE = tuple(RANKS), tuple(2 * rank // SIZE for rank in RANKS), (0,) * SIZE


class Fault:
    """Makes functions fail on the last rank while it `is_on`."""

    is_on = False

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def put(self, owner: Any, name: str, fails: Callable[..., bool] = lambda *_: True) -> None:
        """Let a function fail where ``fails(*arguments)`` says so; one of NumPy's in one module only."""
        if name.startswith("np."):
            module, owner, name = owner, SimpleNamespace(**vars(np)), name.removeprefix("np.")
            self._monkeypatch.setattr(module, "np", owner)
        function = getattr(owner, name)

        def limited(*arguments: Any, **more: Any) -> Any:
            if self.is_on and fails(*arguments):
                raise MemoryError("there is none")
            return function(*arguments, **more)

        if RANK == LAST:
            self._monkeypatch.setattr(owner, name, limited)

    def check(self, call: Callable[[], Any], words: str) -> None:
        """Call while it is on: every rank raises, soon, and the others say what became of the last rank."""
        self.is_on, began = True, time.monotonic()
        ends = outcomes(call)
        self.is_on = False
        assert time.monotonic() - began < SECONDS
        assert [end.error for end in ends] == [RemoteError] * LAST + [Exception]
        for end in ends[:-1]:
            assert f"rank {LAST} {words}" in end.text
            assert "MemoryError: there is none" in end.text


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fault]:
    made = Fault(monkeypatch)
    yield made
    made.is_on = False


def summed(count: int, op: Any = "SUM", dtype: Any = np.float32, **options: Any) -> Any:
    mine = np.full(count, RANK + 1, dtype)
    return context().all_reduce(op, mine, ms.CommunicationOptions(**options) if options else None)


# ------------------------------------------------------------------------------------- before the data move


@pytest.mark.parametrize(
    ("node_of", "count", "wire"),
    [
        (APART, 1000, None),
        (APART, 30_000, None),
        (APART, 300_000, None),
        (APART, 300_000, "bfloat16"),
        (ONE_NODE, 50_000, None),
        (ONE_NODE, 700_000, None),
        pytest.param(TWO_NODES, 2**19, None, marks=pytest.mark.mpi(min_size=4), id="lanes"),
    ],
)
def test_before_the_agreement(fault: Fault, node_of: Sequence[int], count: int, wire: Any) -> None:
    """The last rank has no memory for a result: it raises on every rank, and the strategy goes on."""
    fault.put(np, "empty", lambda shape, *_: shape in (count, (count,), 4 * count))
    fault.put(NodeSum, "new")
    fault.put(mmap, "mmap", lambda file, nbytes: nbytes > 4 * count)  # of huge pages
    with OnNodes(node_of, ms.MpiAllReduce()) as strategy:

        def call() -> Any:
            return strategy.run(summed, args=(count,), kwargs={"wire": wire} if wire else {})

        right = SIZE * (SIZE + 1) / 2
        assert all((each == right).all() for each in [call(), call()])
        fault.check(call, "could not make this call")
        assert still_works(strategy)
        assert (call() == right).all()


ROWS = np.full((RANK + 1, 2), float(RANK))
ALL_ROWS = np.concatenate([np.full((rank + 1, 2), float(rank)) for rank in RANKS])


def values_of_slices(strategy: ms.Strategy) -> Callable[[], Any]:
    slices = ms.IndexedSlices(ROWS, np.arange(RANK + 1), (SIZE, 2))
    return lambda: strategy.run(lambda: context().all_reduce("SUM", slices)).values


def assigned(strategy: ms.Strategy) -> Callable[[], Any]:
    variable = new_variable(strategy, np.zeros((3, 2)), aggregation="ONLY_FIRST_REPLICA")
    return lambda: strategy.run(lambda: variable.assign(np.full((3, 2), RANK + 1.0)).numpy())


def scattered(strategy: ms.Strategy) -> Callable[[], Any]:
    variable = new_variable(strategy, np.ones((3, 2)), aggregation="ONLY_FIRST_REPLICA")
    rows = ms.IndexedSlices(np.full((2, 2), RANK + 1.0) * 2, np.arange(2))
    return lambda: strategy.run(lambda: variable.scatter_update(rows).numpy())


def in_halves(strategy: ms.Strategy) -> Callable[[], Any]:
    arena = strategy.arena([np.zeros(1000, np.float16)])

    def call() -> Any:
        arena.values[0][...] = RANK + 1
        return strategy.run(lambda: context().all_reduce("SUM", arena))[0]

    return call


def making_a_variable(strategy: ms.Strategy) -> Callable[[], Any]:
    def call() -> Any:
        return new_variable(strategy, np.full(3, RANK + 1.0)).numpy()

    return call


def run(count: int, **options: Any) -> Callable[[ms.Strategy], Callable[[], Any]]:
    return lambda strategy: lambda: strategy.run(summed, args=(count,), kwargs=options)


def put_together() -> ms.CrossDeviceOps:
    """On the last rank, which takes memory for each pack before the copies travel."""
    return ms.ReductionToOneDevice(f"task:{LAST}", lambda values: np.sum(values, axis=0))


def weighted(strategy: ms.Strategy) -> Callable[[], Any]:
    mine = np.full(1000, RANK + 1.0)
    return lambda: strategy.run(lambda: context().all_reduce("MEAN", mine, weight=RANK + 1.0))


SUM, SQUARES = SIZE * (SIZE + 1) / 2, sum((rank + 1.0) ** 2 for rank in RANKS)
#: The algorithm and the nodes, what fails in the first call after the agreement, the call, and what is right.
FIRST: dict[str, tuple[Callable[[], Any], Sequence[int], Any, str, Callable[[Any], Callable[[], Any]], Any]] = {
    "a rounded exchange": (ms.MpiAllReduce, TWO_NODES, two_level, "Rounded", run(300_000, wire="bfloat16"), SUM),
    "a gather": (
        *(ms.MpiAllReduce, APART, collectives, "np.empty"),
        *(lambda strategy: lambda: strategy.run(lambda: context().all_gather(ROWS, 0)), ALL_ROWS),
    ),
    "slices": (ms.MpiAllReduce, APART, collectives, "np.empty", values_of_slices, ALL_ROWS),
    "the value of replica 0": (ms.MpiAllReduce, APART, collectives, "np.array", assigned, 1.0),
    "rows of replica 0": (ms.MpiAllReduce, APART, collectives, "np.zeros", scattered, np.array([[2.0], [2.0], [1.0]])),
    "an arena of 16-bit floats": (ms.MpiAllReduce, APART, transfer, "np.empty", in_halves, SUM),
    "a weighted mean": (ms.MpiAllReduce, APART, reducer, "product", weighted, SQUARES / SUM),
    "sums in order, equal shares": (ms.OrderedAllReduce, APART, algorithms, "room_for_shares", run(1000), SUM),
    "sums in order, unequal shares": (ms.OrderedAllReduce, APART, algorithms, "room_for_shares", run(1001), SUM),
    "an accumulation": (put_together, APART, algorithms, "np.empty", run(1000), SUM),
    "a variable's memory": (ms.MpiAllReduce, APART, variable, "np.empty", making_a_variable, 1.0),
}


@pytest.mark.parametrize("what", FIRST)
def test_after_the_first_agreement(fault: Fault, what: str) -> None:
    """All raise, and the next call is right."""
    algorithm, node_of, owner, name, make, right = FIRST[what]
    with OnNodes(node_of, algorithm()) as strategy:
        call = make(strategy)
        fault.put(owner, name)
        fault.check(call, "could not make this call")
        for _ in range(2):
            assert (call() == right).all()
        assert still_works(strategy)


# ------------------------------------------------------------------------------------- after the data have moved


@dataclass
class Pair:
    first: Any
    second: Any

    def __post_init__(self) -> None:
        self.is_checked = True


PAIR = Pair(np.ones(3), np.ones(4))
SWAPPED = np.ones(3, ">f8")
#: What fails once the others have their results, and a call of a step.
AFTER: dict[str, tuple[Any, str, Callable[[], Any]]] = {
    "the kind of array that was given": (reducer, "in_kind", lambda: context().all_reduce("SUM", SWAPPED)),
    "numbers in a list": (plan, "in_kind", lambda: context().all_reduce("SUM", [1.0, 2.0])),
    "a nest of the program's": (Pair, "__post_init__", lambda: context().all_reduce("SUM", PAIR).second),
    "a gather": (collectives, "in_kind", lambda: context().all_gather(SWAPPED, 0)),
    "a broadcast": (
        *(collectives, "in_kind"),
        lambda: context().merge_call(lambda strategy: strategy.broadcast(SWAPPED)),
    ),
    "the first message": (transfer, "np.asarray", lambda: summed(2)),
    "a small sum": (plan, "finish", lambda: summed(1000, "MEAN", np.int64)),
    "a large sum": (plan, "finish", lambda: summed(300_000, "MEAN", np.int64)),
    "a weighted mean": (
        *(reducer, "rounded"),
        lambda: context().all_reduce("MEAN", np.ones(1000), weight=RANK + 1.0),
    ),
}


@pytest.mark.parametrize("what", AFTER)
def test_after_the_messages(fault: Fault, what: str) -> None:
    """The others have their results, hear of it in their next call, and take no more calls."""
    owner, name, call = AFTER[what]
    fault.put(owner, name)
    with OnNodes(APART, ms.MpiAllReduce(), contains_errors=True) as strategy:
        right = strategy.run(call)
        np.testing.assert_equal(strategy.run(call), right)

        def calls() -> Any:
            np.testing.assert_equal(strategy.run(call), right)
            return strategy.run(call)

        fault.check(calls, "failed in ")
        all_raise(ContextError, lambda: strategy.run(call))
