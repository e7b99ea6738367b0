"""Calls that look alike but stand at different places are different calls: swapped ones are found before data moves."""

# ruff: noqa: RUF034  (equal branches stand at different columns, which is what is tested)

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import launching
import numpy as np
import pytest
from replicas import RANK, SIZE, context, several

import mpistrategy as ms
from mpistrategy.arrays import nest
from mpistrategy.errors import CollectiveMismatchError
from mpistrategy.mpi.contract import call_sites
from mpistrategy.mpi.contract.call_sites import call_site

pytestmark = pytest.mark.mpi

VALUES: dict[str, Any] = {
    "one number": 1.0,
    "an array in a mailbox": np.ones(3),
    "an array in the window": np.ones(50_000),
    "several numbers": {"a": 1.0, "b": 2.0},
    "a list": [np.ones(5000), np.ones(7)],
    "an int": np.int32(3),
}


def line_of(text: str) -> int:
    """Return the line of this file that ends in a comment with `text`."""
    with open(__file__, encoding="utf-8") as lines:
        return next(at for at, line in enumerate(lines, 1) if line.rstrip().endswith(f"# {text}"))


def allsum(value: Any, name: str | None = None) -> Any:
    """Reduce as a program's own function does: all its calls are made on one line."""
    return context().all_reduce("SUM", value, name=name)  # allsum


@several
@pytest.mark.parametrize("what", VALUES)
@pytest.mark.parametrize("warm", [False, True])
def test_calls_of_a_helper_in_another_order_are_found(strategy: ms.Strategy, what: str, warm: bool) -> None:
    """What the helper is called for tells its calls apart, not its only line."""
    value = VALUES[what]

    def loss() -> Any:
        return allsum(value)  # the loss

    def count() -> Any:
        return allsum(value)  # the count

    def step(swapped: bool) -> None:
        for one in (count, loss) if swapped else (loss, count):
            one()

    for _ in range(3 if warm else 0):
        strategy.run(step, args=(False,))
    with pytest.raises(CollectiveMismatchError, match="differ in: place") as caught:
        strategy.run(step, args=(RANK == 0,))
    report = launching.a_row_a_rank(str(caught.value))
    for rank in range(SIZE):
        caller = line_of("the loss" if rank else "the count")
        place = rf"place=test_call_sites.py:{line_of('allsum')}:\d+ from test_call_sites.py:{caller}:\d+ from "
        assert re.search(rf"rank {rank}: .*{place}.* at {re.escape(__file__)}:{line_of('allsum')}\n", report), report
    assert "pass the same name= in" in report


@several
@pytest.mark.parametrize("where", ["step", "context", "outside"])
def test_two_callers_count(strategy: ms.Strategy, where: str) -> None:
    """In a step, in a context that was entered by hand, and outside both."""

    def one(value: Any) -> Any:
        return strategy.reduce("SUM", value) if where == "outside" else context().all_reduce("SUM", value)

    def middle(value: Any) -> Any:
        return one(value)

    def outer(value: Any) -> Any:
        return middle(value)  # the third caller is not looked at

    def by_middle() -> Any:
        return middle(1.0) if RANK else middle(1.0)

    def by_outer() -> Any:
        return outer(1.0) if RANK else outer(1.0)

    def call(function: Callable[[], Any]) -> Any:
        if where == "step":
            return strategy.run(function)
        if where == "outside":
            return function()
        with ms.ReplicaContext(strategy, RANK):
            return function()

    for _ in range(3):
        assert call(by_outer) == SIZE
    for _ in range(3):
        with pytest.raises(CollectiveMismatchError, match="differ in: place"):
            call(by_middle)


class Called:
    """A step that is no function."""

    def __call__(self) -> Any:
        return allsum(1.0)

    def method(self) -> Any:
        return allsum(1.0)


@several
@pytest.mark.parametrize("warm", [False, True])
def test_a_place_ends_at_the_step_function(strategy: ms.Strategy, warm: bool) -> None:
    """Who calls `run`, and where, is not compared."""

    def step() -> Any:
        return allsum(1.0)

    def wrapped(*args: Any) -> Any:
        return step()

    called = Called()
    steps = [
        step,
        wrapped,
        partial(wrapped, 1),
        partial(partial(wrapped, 1), 2),
        called,
        called.method,
        lru_cache(step),
    ]
    for one in steps * (3 if warm else 1):
        assert (strategy.run(one) if RANK else strategy.run(one)) == SIZE


@several
def test_frames_of_the_library_are_no_callers(strategy: ms.Strategy) -> None:
    def step(values: Any) -> Any:
        return nest.map_structure(allsum, values) if RANK else nest.map_structure(allsum, values)

    with pytest.raises(CollectiveMismatchError, match="differ in: place"):
        strategy.run(step, args=([1.0],))

    def merged() -> Any:
        def reduce(replicas: ms.Strategy) -> Any:
            return replicas.reduce("SUM", 1.0)

        return context().merge_call(reduce) if RANK else context().merge_call(reduce)

    with pytest.raises(CollectiveMismatchError, match="differ in: place"):
        strategy.run(merged)


def test_what_calls_a_module_does_not_count(tmp_path: Path, launch: launching.Launch) -> None:
    """Ranks may be started differently: a debugger or a profiler on one of them, and Python may know no columns."""
    program = launching.program(
        """
        import mpistrategy as ms
        strategy = ms.MirroredStrategy()
        assert strategy.reduce("SUM", 1.0) == 2
        """,
        tmp_path,
    )
    starter = f"""
        import runpy
        from mpi4py import MPI
        if MPI.COMM_WORLD.rank:
            runpy.run_path({str(program)!r}, run_name="__main__")
        else:
            exec(compile(open({str(program)!r}).read(), {str(program)!r}, "exec"))
        """
    launch(2, starter).check()
    launch(2, starter, env={"PYTHONNODEBUGRANGES": "1"}).check()


def test_code_that_comes_and_goes_is_not_mistaken() -> None:
    """The identity of a code object may be another's later."""
    for number in range(5000):
        space: dict[str, Any] = {"call_site": call_site}
        exec("\n" * (number % 1000) + "found = call_site()", space)
        assert space["found"].text == f"<string>:{number % 1000 + 1}"
    assert len(call_sites._sites) <= 4096
