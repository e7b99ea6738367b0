"""What is assigned to `strategy.extended.cross_device_ops` and `.options` holds for every call that follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from replicas import RANK, RANKS, SIZE, OnNodes, in_step, new_variable, outcomes, several, still_works

import mpistrategy as ms
from mpistrategy.errors import CollectiveMismatchError

pytestmark = pytest.mark.mpi


class Counting(ms.ReductionToOneDevice):
    """Reduces as ReductionToOneDevice does, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def reduce_implementation(self, *args: Any) -> Any:
        self.calls += 1
        return super().reduce_implementation(*args)

    def batch_reduce_implementation(self, *args: Any) -> Any:
        self.calls += 1
        return super().batch_reduce_implementation(*args)


def ways_of(strategy: ms.Strategy) -> dict[str, Callable[[], Any]]:
    """Return the ways on which something is reduced, each by the same objects every time."""
    variable = new_variable(strategy, np.zeros(5), aggregation="SUM")
    counter = new_variable(strategy, np.zeros(()), synchronization="ON_READ", aggregation="SUM")
    optimizer, arena, ones = ms.optimizers.SGD(0.5), strategy.arena([np.zeros(3)]), np.ones(5)
    return {
        "a number": lambda: in_step(strategy, lambda ctx: ctx.all_reduce("SUM", 1.0)),
        "an array": lambda: in_step(strategy, lambda ctx: ctx.all_reduce("SUM", np.ones(3))),
        "a large array": lambda: in_step(strategy, lambda ctx: ctx.all_reduce("SUM", np.ones(300_000))),
        "a list": lambda: in_step(strategy, lambda ctx: ctx.all_reduce("SUM", [np.ones(3)] * 3)),
        "a dict of numbers": lambda: in_step(strategy, lambda ctx: ctx.all_reduce("SUM", {"a": 1.0, "b": 2.0})),
        "out": lambda: in_step(strategy, lambda ctx: ctx.all_reduce("SUM", ones, out=ones)),
        "weighted": lambda: in_step(strategy, lambda ctx: ctx.all_reduce("MEAN", np.ones(3), weight=2.0)),
        "async": lambda: in_step(strategy, lambda ctx: ctx.all_reduce_async("SUM", np.ones(3)).wait()),
        "async number": lambda: in_step(strategy, lambda ctx: ctx.all_reduce_async("SUM", 1.0).wait()),
        "an arena": lambda: in_step(strategy, lambda ctx: ctx.all_reduce("SUM", arena)),
        "Strategy.reduce": lambda: strategy.reduce("SUM", 1.0),
        "Strategy.reduce along an axis": lambda: strategy.reduce("SUM", np.ones(3), axis=0),
        "reduce_to": lambda: strategy.extended.reduce_to("SUM", ones, ones),
        "batch_reduce_to": lambda: strategy.extended.batch_reduce_to("SUM", [(ones, ones)]),
        "assign": lambda: in_step(strategy, lambda _: variable.assign(np.ones(5))),
        "reading": counter.read_value,
        "an optimizer": lambda: in_step(strategy, lambda _: optimizer.apply_gradients([(np.ones(5), variable)])),
    }


@pytest.fixture(scope="module", params=["one node", "nodes"])
def fresh(request: pytest.FixtureRequest) -> Iterator[ms.Strategy]:
    node_of = [2 * rank // SIZE for rank in RANKS]
    with closing(OnNodes(node_of, ms.MpiAllReduce()) if request.param == "nodes" else ms.MirroredStrategy()) as made:
        yield made


def test_an_algorithm_that_is_set_serves_every_way_from_then_on(fresh: ms.Strategy) -> None:
    ways = ways_of(fresh)
    for way in ways.values():
        way()
        way()
    counting, before = Counting(), fresh.extended.cross_device_ops
    fresh.extended.cross_device_ops = counting
    assert "Counting" in fresh.explain(np.ones(3))
    unchanged = []
    for name, way in ways.items():
        calls = counting.calls
        way()
        unchanged += [name] if counting.calls == calls else []
    assert unchanged == []

    fresh.extended.cross_device_ops = before
    calls = counting.calls
    for way in ways.values():
        way()
    assert counting.calls == calls
    assert still_works(fresh)


@several
def test_options_that_are_set_hold_for_every_way_from_then_on(fresh: ms.Strategy) -> None:
    """They are compared with those of the other ranks: where they differ, they were looked at."""
    ways, before = ways_of(fresh), fresh.extended.options
    for way in ways.values():
        way()
    ignored = []
    if max(fresh.extended.communicator.node_of) == 0:
        del ways["an optimizer"]  # each rank updates its share, which no option changes
    for name, way in ways.items():
        fresh.extended.options = ms.CommunicationOptions(wire="bfloat16") if RANK else before
        ignored += [name] if {each.error for each in outcomes(way)} != {CollectiveMismatchError} else []
        fresh.extended.options = before
        way()
    assert ignored == []
    assert still_works(fresh)


@several
def test_a_wire_that_is_set_rounds() -> None:
    value = np.full(100, 1 + 2.0**-12, np.float32)
    with OnNodes(list(RANKS), ms.MpiAllReduce()) as apart:
        for way in (
            lambda: in_step(apart, lambda ctx: ctx.all_reduce("SUM", value)),
            lambda: in_step(apart, lambda ctx: ctx.all_reduce_async("SUM", value).wait()),
        ):
            for wire, right in ((None, SIZE * value), ("bfloat16", SIZE), (None, SIZE * value)):
                apart.extended.options = ms.CommunicationOptions(wire=wire)
                assert (way() == right).all()
        for wire, right in ((None, SIZE * value), ("bfloat16", SIZE), (None, SIZE * value)):  # of one call site
            options = ms.CommunicationOptions(wire=wire)
            assert (in_step(apart, lambda ctx, o=options: ctx.all_reduce("SUM", value, o)) == right).all()


def test_a_timeout_that_is_set_holds(fresh: ms.Strategy) -> None:
    guard, before = fresh.extended.communicator.guard, fresh.extended.options
    limit = guard.timeout
    fresh.extended.options = ms.CommunicationOptions(timeout_seconds=77)
    assert guard.timeout == 77
    fresh.extended.options = ms.CommunicationOptions()
    assert guard.timeout == 77
    guard.timeout, fresh.extended.options = limit, before
