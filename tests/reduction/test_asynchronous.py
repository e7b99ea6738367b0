"""All-reduces under way while the step computes: results, order, mistakes on some ranks, and every kind of end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import launching
import numpy as np
import pytest
from mpi4py import MPI
from replicas import RANK, RANKS, SIZE, OnNodes, all_raise, all_refuse, context, new_variable, several

import mpistrategy as ms
from mpistrategy.errors import (
    CollectiveMismatchError,
    DTypeError,
    OptionTypeError,
    UnsupportedError,
)
from mpistrategy.mpi.over_mpi.background import Background
from mpistrategy.reduction.asynchronous import AllReduceHandle

pytestmark = pytest.mark.mpi

ODD = RANK % 2
STRATEGIES: dict[str, Callable[[], ms.Strategy]] = {
    "one node": ms.MirroredStrategy,
    "every rank a node": lambda: OnNodes(list(RANKS), ms.MpiAllReduce()),
    "odd and even": lambda: OnNodes([r % 2 for r in RANKS], ms.MpiAllReduce()),
    "one alone, hierarchical": lambda: OnNodes([min(r, 1) for r in RANKS], ms.HierarchicalCopyAllReduce()),
}


@pytest.fixture(scope="module", params=STRATEGIES)
def placed(request: pytest.FixtureRequest) -> Iterator[ms.Strategy]:
    with closing(STRATEGIES[request.param]()) as made:
        yield made


@pytest.fixture
def apart() -> Iterator[ms.Strategy]:
    """Ranks on nodes of their own: with a background, from 2 ranks on."""
    with closing(OnNodes(list(RANKS), ms.MpiAllReduce())) as made:
        yield made


def started(strategy: ms.Strategy, op: Any, value: Any, **options: Any) -> AllReduceHandle:
    return strategy.run(lambda: context().all_reduce_async(op, value, **options))


def still_works(strategy: ms.Strategy) -> bool:
    handles = [started(strategy, "SUM", float(factor)) for factor in (1, 2)]
    return [handle.wait() for handle in handles] == [SIZE, 2 * SIZE] and strategy.reduce("SUM", 1.0) == SIZE


TOTAL = SIZE * (SIZE + 1) / 2


def test_several_under_way_with_work_between(placed: ms.Strategy) -> None:
    """In place, into other memory and with a name, too."""
    values = [np.full(size, RANK + 1.0) for size in (400_000, 3, 70_000)]
    other, nest = np.zeros(3), {"a": values[2]}
    handles = [
        started(placed, "MEAN", values[0].astype(np.float32)),
        started(placed, "SUM", [values[1]], out=[other], name="here"),
        started(placed, "SUM", nest),
        started(placed, "SUM", values[0], out=values[0]),
    ]
    nest["a"] = np.zeros(2)  # it may be filled anew meanwhile
    assert placed.reduce("SUM", 1.0) == SIZE  # a collective of the other channel, between start and wait
    assert (handles[0].wait() == np.float32((SIZE + 1) / 2)).all()
    assert handles[1].wait()[0] is other
    assert handles[3].wait() is values[0]
    for found in (other, handles[2].wait()["a"], values[0]):
        assert (found == TOTAL).all()
    assert (values[1] == RANK + 1.0).all()
    for handle in handles:
        assert handle.done()
        assert "over" in repr(handle)
        assert handle.wait() is handle.wait()


def test_variables_slices_numbers_and_options(placed: ms.Strategy) -> None:
    variable = new_variable(placed, np.arange(3.0))
    slices = ms.IndexedSlices(np.ones((1, 2)), np.array([RANK]))
    nest = {"v": variable, "s": slices, "n": 2, "f": 0.5}
    result = started(placed, "SUM", nest, options=ms.CommunicationOptions(bytes_per_pack=64)).wait()
    np.testing.assert_array_equal(result["v"], SIZE * np.arange(3.0))
    np.testing.assert_array_equal(result["s"].indices, np.arange(SIZE))
    assert (result["n"], result["f"]) == (2 * SIZE, 0.5 * SIZE)


@pytest.mark.parametrize("how", ["the arena", "its values", "out=arena"])
def test_an_arena_in_place(placed: ms.Strategy, how: str) -> None:
    like = {"w": np.zeros((300, 500)), "b": np.zeros(7, np.float32), "n": np.zeros(3, np.int64)}
    arena = placed.arena(like, shared_result=how == "out=arena")
    for value in arena.values.values():
        value[...] = RANK + 1
    if how == "out=arena":
        with pytest.raises(UnsupportedError, match="out=arena"):
            started(placed, "SUM", arena).wait()
    given: dict[str, Any] = {
        "the arena": {"value": arena},
        "its values": {"value": arena.values, "out": arena.values},
        "out=arena": {"value": arena, "out": arena},
    }[how]
    assert started(placed, "SUM", **given).wait() is arena.values
    assert all((value == TOTAL).all() for value in arena.values.values())
    with pytest.raises(DTypeError, match="in an arena"):
        started(placed, "MEAN", arena, out=arena).wait()
    arena.close()


# ------------------------------------------------------------------------------------------------- bad input


def ends_of(strategy: ms.Strategy, calls: Sequence[dict[str, Any]]) -> list[Callable[[], Any]]:
    """Return for each call what raises its error: in the background `wait`, else the call itself."""
    if type(strategy.extended.communicator.made.get(Background)) is Background:  # type: ignore[attr-defined]
        return [handle.wait for handle in [started(strategy, **call) for call in calls]]
    return [partial(started, strategy, **call) for call in calls]


MISTAKES: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception]]] = {
    "text among the values": (lambda: {"op": "SUM", "value": "text"}, DTypeError),
    "a name that is none": (lambda: {"op": "SUM", "value": 1.0, "name": 3}, OptionTypeError),
    "out of another shape": (lambda: {"op": "SUM", "value": np.ones(2), "out": np.ones(3)}, ValueError),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("whose", ["everybody's", "the last rank's"])
def test_a_mistake_is_raised_on_every_rank(placed: ms.Strategy, mistake: str, whose: str) -> None:
    if whose != "everybody's" and SIZE == 1:
        pytest.skip("one rank is everybody")
    make, error = MISTAKES[mistake]
    wrong = whose == "everybody's" or RANK == SIZE - 1
    arguments = make() if wrong else {"op": "SUM", "value": 1.0}
    before = started(placed, "SUM", np.ones(3))
    end = ends_of(placed, [arguments])[0]
    after = started(placed, "SUM", np.ones(3))
    assert (before.wait() == SIZE).all()
    all_refuse(error, end)
    assert (after.wait() == SIZE).all()
    assert still_works(placed)


THREE = np.ones(3)
#: Calls of even and of odd ranks.
DIFFERENT: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "shape": ([{"value": THREE}], [{"value": np.ones(4)}]),
    "op": ([{"value": THREE}], [{"value": THREE, "op": "MEAN"}]),
    "name": ([{"value": THREE, "name": "a"}], [{"value": THREE, "name": "b"}]),
    "order": ([{"value": THREE}, {"value": np.ones(4)}], [{"value": np.ones(4)}, {"value": THREE}]),
}


@several
@pytest.mark.parametrize("what", DIFFERENT)
def test_different_calls_are_refused_on_every_rank(placed: ms.Strategy, what: str) -> None:
    for end in ends_of(placed, [{"op": "SUM", **call} for call in DIFFERENT[what][ODD]]):
        all_raise(CollectiveMismatchError, end, words=["test_asynchronous.py"])
    assert still_works(placed)


@several
@pytest.mark.parametrize("before", [False, True])
def test_one_rank_that_has_started_nothing_does_not_leave_the_others_waiting(apart: ms.Strategy, before: bool) -> None:
    """Whether the ranks have started another one before or not."""
    if before:
        started(apart, "SUM", 1.0).wait()

    def step() -> Any:
        return started(apart, "SUM", np.ones(3)).wait() if RANK == 0 else apart.reduce("SUM", np.ones(3))

    all_raise(CollectiveMismatchError, step)
    # Rank 0's is still under way, and meets the next one of the others, which is its equal.
    if before and RANK != 0:
        started(apart, "SUM", np.ones(3))
    assert still_works(apart)


@several
def test_it_is_not_done_before_all_ranks_have_started_it(apart: ms.Strategy) -> None:
    started(apart, "SUM", 1.0).wait()
    if RANK != 0:
        MPI.COMM_WORLD.Barrier()
    handle = started(apart, "SUM", np.ones(5))
    if RANK == 0:
        assert not handle.done()
        MPI.COMM_WORLD.Barrier()
    assert (handle.wait() == SIZE).all()
    assert handle.done()


@several
def test_ranks_may_wait_in_any_order_once_all_have_started_all(apart: ms.Strategy) -> None:
    handles = [started(apart, "SUM", float(factor)) for factor in (1, 2, 3)]
    order = [1, 2, 0] if ODD else [0, 1, 2]
    results = {index: handles[index].wait() for index in order}
    assert [results[index] for index in range(3)] == [SIZE, 2 * SIZE, 3 * SIZE]
    assert still_works(apart)


@several
def test_ranks_that_wait_having_started_unequally_many_are_told(apart: ms.Strategy) -> None:
    handle = started(apart, "SUM", 1.0)
    more = [started(apart, "SUM", 2.0)] if ODD else []
    all_raise(CollectiveMismatchError, handle.wait, words=["1 all_reduce_async started", "2 all_reduce_async started"])
    more = more or [started(apart, "SUM", 2.0)]
    assert [handle.wait(), more[0].wait()] == [SIZE, 2 * SIZE]
    assert still_works(apart)


# ------------------------------------------------------------------------------------------------- ends


def test_one_nobody_waited_for_does_not_hold_up_the_close(apart: ms.Strategy) -> None:
    handle = started(apart, "SUM", np.ones(500_000))
    apart.close()
    assert handle.done()
    assert (handle.wait() == SIZE).all()


@several
def test_one_that_only_some_ranks_started_ends_with_the_close(apart: ms.Strategy) -> None:
    started(apart, "SUM", 1.0).wait()
    if RANK == 0:
        lonely = started(apart, "SUM", np.ones(5))
        with pytest.warns(RuntimeWarning, match="nobody waited"):
            apart.close()
        with pytest.raises(CollectiveMismatchError):
            lonely.wait()
    else:
        apart.close()


def test_without_threads_in_the_mpi_it_is_done_at_once(apart: ms.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    if RANK == SIZE - 1:  # one rank is enough
        monkeypatch.setattr(apart.extended.communicator, "may_use_threads", False)
    handle = started(apart, "SUM", np.ones(3))
    assert handle.done()
    assert (handle.wait() == SIZE).all()


PROGRAM = """
import os, sys, time
sys.path[:0] = {tests!r}
import numpy as np
import mpistrategy as ms
from replicas import RANK, RANKS, OnNodes, context

strategy = OnNodes(list(RANKS), ms.MpiAllReduce())


def start(value=None):
    value = np.ones(300_000) if value is None else value
    return strategy.run(lambda: context().all_reduce_async("SUM", value))


start().wait()
{body}
os.write(1, b"end of %d\\n" % RANK)  # in one piece: print() writes several
"""

ENDS = {
    "nobody waits": ("handle = start()", 0, "end of 1"),
    "one rank waits": (
        "handle = start()\nif RANK == 0: handle.wait()",
        1,
        "RankLeftError",
    ),
    "one rank starts and leaves": ("handle = start() if RANK == 0 else None", 0, "end of 1"),
    "one rank starts, the other calls": (
        "handle = start() if RANK == 0 else strategy.reduce('SUM', 1.0)",
        1,
        "RankLeftError",
    ),
    "an exception on one rank": (
        "handle = start()\nif RANK == 1: raise KeyError('mine')\nhandle.wait()\ntime.sleep(60)",
        1,
        "KeyError",
    ),
    "an exception before its start": (
        "if RANK == 1: raise KeyError('mine')\nstart().wait()\ntime.sleep(60)",
        1,
        "KeyError",
    ),
    "a status on one rank": ("handle = start()\nif RANK == 1: sys.exit(5)\nhandle.wait()", 5, "status 5"),
}


@pytest.mark.parametrize("end", [pytest.param(end, marks=[pytest.mark.each_mpi] * (ENDS[end][1] == 0)) for end in ENDS])
def test_programs_end(launch: Callable[..., launching.Finished], end: str) -> None:
    body, status, words = ENDS[end]
    finished = launch(2, PROGRAM.format(tests=launching.HELPERS, body=body), timeout=60)
    assert (finished.returncode == 0) == (status == 0), finished
    assert words in finished.stdout + finished.stderr, finished
