"""The life of contexts: nesting, the replica context as a context manager, the default strategy, set_strategy."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from replicas import RANK, SIZE, context

import mpistrategy as ms
from mpistrategy import errors

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def other() -> Iterator[ms.MirroredStrategy]:
    made = ms.MirroredStrategy()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def nothing_is_left_entered() -> Iterator[None]:
    yield
    assert not ms.has_strategy()
    assert not ms.in_cross_replica_context()
    assert ms.get_replica_context() is not None


# ------------------------------------------------------------------------------------------------- nesting


def test_a_scope_may_be_nested_in_itself_and_entered_again(strategy: ms.Strategy, other: ms.Strategy) -> None:
    scope = strategy.scope()
    with scope as entered, strategy.scope(), scope:
        assert entered is strategy
        assert ms.get_strategy() is strategy
        with pytest.raises(errors.ContextError, match="another strategy"), other.scope():
            pass
        assert ms.get_strategy() is strategy
    with scope:
        assert ms.in_cross_replica_context()


def test_a_merge_fn_may_run_steps_and_enter_the_scope(strategy: ms.Strategy) -> None:
    def merge_fn(given: ms.Strategy) -> Any:
        with given.scope():
            return given.run(lambda: context().all_reduce("SUM", 1.0))

    assert strategy.run(lambda: context().merge_call(merge_fn)) == SIZE


def test_merge_call_unpacks_what_merge_fn_returns(strategy: ms.Strategy) -> None:
    def merge_fn(given: ms.Strategy, mine: Any) -> Any:
        to = given.extended
        total = to.reduce_to("SUM", mine, mine)
        return {
            "nest": [total, (ms.PerReplica((mine,)), "text")],
            "batch": to.batch_reduce_to("SUM", [(mine, mine)]),
            "elsewhere": to.reduce_to("SUM", mine, f"task:{SIZE - 1}"),
            "plain": mine,
        }

    def step() -> Any:
        got = context().merge_call(merge_fn, args=(np.full(2, RANK + 1.0),))
        total, (own, text) = got["nest"]
        assert type(total) is type(own) is type(got["batch"][0]) is np.ndarray
        assert text == "text"
        total *= 0.5  # as any array of the program's own
        assert (context().all_reduce("MEAN", total) == SIZE * (SIZE + 1) / 4).all()
        if RANK == SIZE - 1:
            assert (got["elsewhere"] == got["batch"][0]).all()
        else:
            with pytest.raises(errors.PlacementError, match=f"rank {SIZE - 1}"):
                _ = got["elsewhere"] + 1
        return own

    assert (strategy.run(step) == RANK + 1).all()
    with strategy.scope():
        v = ms.Variable(np.zeros(2), aggregation="SUM")
    added = strategy.run(lambda: strategy.extended.update(v, lambda v: v.assign_add(np.ones(2)).numpy()))
    assert type(added) is np.ndarray


def test_merge_call_hands_on_arguments_and_result(strategy: ms.Strategy) -> None:
    def merge_fn(given: ms.Strategy, x: int, *, y: int) -> tuple[bool, int, int]:
        return given is strategy, x, y

    assert strategy.run(lambda: context().merge_call(merge_fn, args=[RANK], kwargs={"y": 2})) == (True, RANK, 2)


def test_a_replica_context_is_a_context_manager(strategy: ms.Strategy) -> None:
    with ms.ReplicaContext(strategy, RANK) as ctx:
        assert ms.get_replica_context() is ctx
        assert not ms.in_cross_replica_context()
        assert ctx.all_reduce("SUM", 1.0) == SIZE
        with ctx:  # nested in itself
            assert ctx.all_reduce("SUM", 1.0) == SIZE
        assert ms.get_replica_context() is ctx
    with strategy.scope(), ms.ReplicaContext(strategy, RANK) as ctx:
        assert ms.get_replica_context() is ctx


def test_a_replica_context_of_another_strategy_is_refused(strategy: ms.Strategy, other: ms.Strategy) -> None:
    with strategy.scope(), pytest.raises(errors.ContextError, match="another strategy"), ms.ReplicaContext(other, RANK):
        pass


def test_what_a_replica_context_knows(strategy: ms.Strategy) -> None:
    ctx = strategy.run(context)
    assert ctx.strategy is strategy
    assert (ctx.replica_id_in_sync_group, ctx.num_replicas_in_sync) == (RANK, SIZE)
    assert ctx.devices == strategy.extended.worker_devices == (f"/job:worker/replica:0/task:{RANK}/device:CPU:0",)
    with pytest.raises(ValueError, match="replica_id_in_sync_group"):
        ms.ReplicaContext(strategy, "0")  # type: ignore[arg-type]
    with pytest.raises(errors.MpiStrategyError, match="no id"):
        ms.ReplicaContext(strategy, None).replica_id_in_sync_group  # noqa: B018


@pytest.mark.filterwarnings("ignore::mpistrategy.errors.OutsideStepWarning")
def test_the_default_strategy_is_one_replica(strategy: ms.Strategy) -> None:
    default = ms.get_strategy()
    assert default is ms.get_strategy()
    assert context().all_reduce("SUM", 3.0) == 3
    assert context().merge_call(lambda given: given is default and not ms.has_strategy())
    with default.scope():
        assert not ms.has_strategy()
        assert default.run(lambda: context().num_replicas_in_sync) == 1
    with strategy.scope(), pytest.raises(errors.ContextError, match="another strategy"), default.scope():
        pass


# ------------------------------------------------------------------------------------------------- set_strategy


def test_experimental_set_strategy(strategy: ms.Strategy, other: ms.Strategy) -> None:
    ms.experimental_set_strategy(strategy)
    try:
        assert ms.get_strategy() is strategy
        assert ms.in_cross_replica_context()
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(ms.has_strategy).result() is False
        with strategy.scope(), pytest.raises(errors.ContextError, match="outside every scope"):
            ms.experimental_set_strategy(None)
        with pytest.raises(errors.ContextError):
            strategy.run(lambda: ms.experimental_set_strategy(other))
        ms.experimental_set_strategy(other)
        assert ms.get_strategy() is other
    finally:
        ms.experimental_set_strategy(None)
    assert not ms.has_strategy()
    ms.experimental_set_strategy(None)  # again is no mistake


@pytest.mark.parametrize("nonsense", ["strategy", 3, ms.MirroredStrategy, object()])
def test_experimental_set_strategy_refuses_what_is_none(nonsense: Any) -> None:
    before = ms.get_strategy()
    with pytest.raises(errors.OptionTypeError, match="Strategy"):
        ms.experimental_set_strategy(nonsense)
    assert ms.get_strategy() is before
