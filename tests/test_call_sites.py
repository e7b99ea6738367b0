"""Calls that look alike but stand at different places are different calls: swapped ones are found before data moves."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from replicas import RANK, SIZE, OnNodes, context, still_works

import mpistrategy as ms
from mpistrategy.errors import CollectiveMismatchError
from mpistrategy.mpi import call_sites
from mpistrategy.mpi.call_sites import call_site

pytestmark = pytest.mark.mpi
several = pytest.mark.mpi(min_size=2)

VALUES: dict[str, Any] = {
    "one number": 1.0,
    "an array in a cell": np.ones(3),
    "an array in the window": np.ones(30_000),
    "several numbers": {"a": 1.0, "b": 2.0},
    "a list": [np.ones(5000), np.ones(7)],
    "an int": np.int32(3),
}


def line_of(text: str) -> int:
    """Return the line of this file that ends in a comment with `text`."""
    with open(__file__, encoding="utf-8") as lines:
        return next(at for at, line in enumerate(lines, 1) if line.rstrip().endswith(f"# {text}"))


@several
@pytest.mark.parametrize("what", VALUES)
@pytest.mark.parametrize("warm", [False, True])
def test_swapped_calls_are_found_on_every_rank(strategy: ms.Strategy, what: str, warm: bool) -> None:
    value = VALUES[what]

    def first() -> Any:
        return context().all_reduce("SUM", value)  # the first

    def second() -> Any:
        return context().all_reduce("SUM", value)  # the second

    if warm:  # both are known
        for step in (first, second, first, second):
            strategy.run(step)
    with pytest.raises(CollectiveMismatchError, match="differ in: place") as caught:
        strategy.run(first if RANK else second)
    report = str(caught.value)
    for rank in range(SIZE):
        line = line_of("the first" if rank else "the second")
        assert re.search(rf"rank {rank}: .* at {re.escape(__file__)}:{line}\n", report), report
    assert "swapped" in report
    assert "name=" in report
    assert still_works(strategy)


@several
def test_a_name_stands_for_the_place(strategy: ms.Strategy) -> None:
    if RANK:
        total = strategy.run(lambda: context().all_reduce("SUM", 1.0, name="loss"))
    else:
        total = strategy.run(lambda: context().all_reduce("SUM", 1.0, name="loss"))
    assert total == SIZE
    with pytest.raises(CollectiveMismatchError, match="differ in: name"):
        strategy.run(lambda: context().all_reduce("SUM", 1.0, name=f"rank {RANK}"))


@several
def test_on_one_line_the_columns_tell(strategy: ms.Strategy) -> None:
    def step() -> Any:
        one, other = (lambda: context().all_reduce("SUM", 1.0)), (lambda: context().all_reduce("SUM", 1.0))
        return (one if RANK else other)()

    with pytest.raises(CollectiveMismatchError, match="differ in: place"):
        strategy.run(step)


def swap(one: Callable[[], object], other: Callable[[], object]) -> None:
    """Do two things in another order on rank 0."""
    for step in (other, one) if RANK == 0 else (one, other):
        step()


@several
def test_through_optimizers_variables_and_other_strategies_calls(strategy: ms.Strategy) -> None:
    with strategy.scope():
        variable = ms.Variable(np.zeros(3), aggregation="SUM")
        optimizer = ms.optimizers.SGD(0.1)
        mean = ms.metrics.Mean()
    gradient = [(np.ones(3), variable)]

    def assign() -> None:
        strategy.run(lambda: variable.assign(np.ones(3)))  # assign

    def assign_again() -> None:
        strategy.run(lambda: variable.assign(np.ones(3)))  # assign again

    def apply() -> None:
        strategy.run(lambda: optimizer.apply_gradients(gradient))  # apply

    def apply_again() -> None:
        strategy.run(lambda: optimizer.apply_gradients(gradient))  # apply again

    def reduce() -> None:
        strategy.reduce("SUM", 1.0)  # reduce

    def reduce_again() -> None:
        strategy.reduce("SUM", 1.0)  # reduce again

    def read() -> None:
        mean.result()  # read

    def read_again() -> None:
        mean.result()  # read again

    pairs = {
        "assign": (assign, assign_again),
        "apply": (apply, apply_again),
        "reduce": (reduce, reduce_again),
        "read": (read, read_again),
    }
    for name, (one, other) in pairs.items():
        one()
        other()
        with pytest.raises(CollectiveMismatchError, match="place") as caught:
            swap(one, other)
        assert f"test_call_sites.py:{line_of(name)}" in str(caught.value)
        assert f"test_call_sites.py:{line_of(name + ' again')}" in str(caught.value)
    assert still_works(strategy)


@several
def test_between_nodes() -> None:
    with OnNodes(list(range(SIZE)), ms.MpiAllReduce()) as apart:
        steps = (lambda: context().all_reduce("SUM", 1.0)), (lambda: context().all_reduce("SUM", 1.0))
        with pytest.raises(CollectiveMismatchError, match="differ in: place"):
            apart.run(steps[RANK != 0])
        assert still_works(apart)


@several
def test_ranks_may_close_at_different_places() -> None:
    strategy = ms.MirroredStrategy()
    arena = strategy.arena([np.zeros(3)])
    if RANK:
        arena.close()
        strategy.close()
    else:
        arena.close()
        strategy.close()


def test_the_place_is_the_users() -> None:
    site = call_site()  # here
    assert site.text == f"{__file__}:{line_of('here')}"
    assert re.fullmatch(rf"test_call_sites.py:{line_of('here')}:\d+", site.place)
    places = {call_site() for _ in range(3)}
    assert len(places) == 1
    code = compile("found = call_site()", "/somewhere/else/program.py", "exec")
    space: dict[str, Any] = {"call_site": call_site}
    exec(code, space)
    assert space["found"] == ("/somewhere/else/program.py:1", "program.py:1:8")


def test_code_that_comes_and_goes_is_not_mistaken() -> None:
    """The identity of a code object may be another's later."""
    for number in range(5000):
        space: dict[str, Any] = {"call_site": call_site}
        exec("\n" * (number % 1000) + "found = call_site()", space)
        assert space["found"].text == f"<string>:{number % 1000 + 1}"
    assert len(call_sites._known) <= 4096


def test_without_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -X no_debug_ranges` knows lines only."""
    frame: Any = sys._getframe()
    code = frame.f_code

    class Lines:
        co_filename = code.co_filename

        @staticmethod
        def co_positions() -> Any:
            return iter([(7, None, None, None)] * 1000)

    class Frame:
        f_code, f_lasti, f_lineno, f_back = Lines(), 20, 9, None

    made_up: Any = Frame()
    assert call_sites.site_of(made_up).place == "test_call_sites.py:7"
    assert call_sites.site_of(None) == ("?", "?")
