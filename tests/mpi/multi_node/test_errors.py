"""An error on one rank after the ranks have agreed on a call, between nodes, with on_error="raise": nobody waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from replicas import RANK, SIZE, OnNodes, context, outcomes

import mpistrategy as ms
from mpistrategy.errors import ContextError, RemoteError
from mpistrategy.reduction import collectives, plan, reducer

pytestmark = pytest.mark.mpi(min_size=2)
LAST = SIZE - 1
SECONDS = 5


class Mistake:
    """Is made by chosen ranks while it `is_on`."""

    is_on = False
    ranks = (LAST,)

    def look(self) -> None:
        if self.is_on and RANK in self.ranks:
            raise ValueError("a mistake")

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def looking(*arguments: Any, **more: Any) -> Any:
            self.look()
            return function(*arguments, **more)

        return looking


@pytest.fixture
def mistake() -> Iterator[Mistake]:
    made = Mistake()
    yield made
    made.is_on = False


@pytest.fixture
def contained() -> Iterator[ms.Strategy]:
    """Ranks on nodes of their own, whose errors end their strategy and not the job."""
    made = OnNodes(range(SIZE), ms.MpiAllReduce(), contains_errors=True)
    yield made
    made.close()


def check_the_others_hear(mistake: Mistake, call: Callable[[], Any]) -> None:
    """Make the mistake in the third call: the other ranks have their results, and raise RemoteError in the next one."""
    right = call()
    np.testing.assert_equal(call(), right)
    mistake.is_on, began = True, time.monotonic()

    def calls() -> Any:
        np.testing.assert_equal(call(), right)
        return call()

    ends = outcomes(calls)
    assert time.monotonic() - began < SECONDS
    assert [end.error for end in ends] == [RemoteError] * LAST + [Exception]
    for end in ends[:-1]:
        assert f"rank {LAST} failed in " in end.text
        assert "ValueError: a mistake" in end.text
    mistake.is_on = False
    assert {end.error for end in outcomes(call)} == {ContextError}, "a rank is one call behind"
    with OnNodes(range(SIZE), ms.MpiAllReduce()) as another:
        assert another.reduce("SUM", 1) == SIZE


@dataclass
class Pair:
    first: Any
    second: Any

    def __post_init__(self) -> None:
        self.is_checked = True


PAIR = Pair(np.ones(3), np.ones(4))

CALLS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "the kind of array that was given": (reducer, "in_kind", lambda c: c.all_reduce("SUM", np.ones(3, ">f8"))),
    "numbers in a list": (plan, "in_kind", lambda c: c.all_reduce("SUM", [1.0, 2.0])),
    "a nest of the program's": (Pair, "__post_init__", lambda c: c.all_reduce("SUM", PAIR).second),
    "a gather": (collectives, "in_kind", lambda c: c.all_gather(np.ones(3, ">f8"), 0)),
    "a broadcast": (
        collectives,
        "in_kind",
        lambda c: c.merge_call(lambda strategy: strategy.broadcast(np.ones(3, ">f8"))),
    ),
}


@pytest.mark.parametrize("what", CALLS)
def test_results(contained: ms.Strategy, mistake: Mistake, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    owner, name, call = CALLS[what]
    monkeypatch.setattr(owner, name, mistake.before(getattr(owner, name)))
    check_the_others_hear(mistake, lambda: contained.run(lambda: call(context())))
