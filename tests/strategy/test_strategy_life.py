"""barrier, close, `with` and the list of all devices."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from replicas import RANK, RANKS, SIZE, one_node, outcomes, same_everywhere, still_works

import mpistrategy as ms
from mpistrategy import errors

pytestmark = pytest.mark.mpi


def test_a_barrier_lets_nobody_through_before_all_have_come() -> None:
    with ms.MirroredStrategy() as strategy:
        for late in RANKS:
            if late == RANK:
                time.sleep(0.05)
            came = time.monotonic()
            strategy.barrier()
            left = time.monotonic()
            last_to_come = max(strategy.gather(np.array([came]), 0))
            assert left >= last_to_come  # the ranks of one machine share this clock


def test_a_barrier_anywhere() -> None:
    with ms.MirroredStrategy() as strategy:
        strategy.run(strategy.barrier)
        with strategy.scope():
            strategy.barrier("in the scope")
        strategy.run(lambda: ms.get_replica_context().merge_call(lambda s: s.barrier("in merge_fn")))
        assert still_works(strategy)


def test_barriers_of_different_names_do_not_meet() -> None:
    if SIZE == 1:
        pytest.skip("needs two ranks")
    with ms.MirroredStrategy() as strategy:
        ended = outcomes(strategy.barrier, "end of epoch" if RANK else "start")
        assert {one.error for one in ended} == {errors.CollectiveMismatchError}
        assert all("end of epoch" in one.text and "start" in one.text for one in ended)
        ended = outcomes(strategy.barrier) if RANK else outcomes(strategy.reduce, "SUM", 1.0)
        assert {one.error for one in ended} == {errors.CollectiveMismatchError}
        assert still_works(strategy)


def test_with_enters_the_scope_and_closes_at_the_end() -> None:
    with ms.MirroredStrategy() as strategy:
        assert ms.get_strategy() is strategy
        assert ms.in_cross_replica_context()
        variable = ms.Variable(float(RANK), aggregation="SUM")
        assert strategy.extended.variable_created_in_scope(variable)
        assert strategy.run(lambda: ms.get_replica_context().strategy) is strategy
        with strategy.scope():
            assert ms.get_strategy() is strategy
        with strategy:  # closes nothing: the outer block still needs it
            pass
        assert ms.get_strategy() is strategy
        assert still_works(strategy)
    assert not ms.has_strategy()
    with pytest.raises(errors.ContextError, match="close"):
        strategy.barrier()


def test_two_strategies_are_not_nested() -> None:
    with ms.MirroredStrategy() as strategy:
        other = ms.MirroredStrategy()
        ended = outcomes(other.__enter__)
        assert {one.error for one in ended} == {errors.ContextError}
        assert ms.get_strategy() is strategy
        other.close()
        assert still_works(strategy)


def test_an_error_that_leaves_the_block_ends_the_strategy() -> None:
    strategy = ms.MirroredStrategy()
    with pytest.raises(KeyError), strategy:
        raise KeyError("of the program")
    assert not ms.has_strategy()
    with pytest.raises(errors.ContextError, match=r"after its close|failed in its with block: KeyError"):
        strategy.reduce("SUM", 1.0)
    strategy.close()


AFTER: dict[str, Callable[[ms.Strategy, ms.Variable], Any]] = {
    "reduce": lambda s, v: s.reduce("SUM", 1.0),
    "gather": lambda s, v: s.gather(np.ones(1), 0),
    "barrier": lambda s, v: s.barrier(),
    "all_reduce": lambda s, v: s.run(lambda: ms.get_replica_context().all_reduce("SUM", 1.0)),
    "reduce_to": lambda s, v: s.extended.reduce_to("SUM", 1.0, "task:0"),
    "broadcast_to": lambda s, v: s.extended.broadcast_to(1.0, "task:0"),
    "assign in a step": lambda s, v: s.run(lambda: v.assign(1.0)),
    "apply_gradients": lambda s, v: s.run(lambda: ms.optimizers.SGD().apply_gradients([(1.0, v)])),
}


@pytest.mark.parametrize("what", AFTER)
def test_after_close_every_collective_says_so(what: str) -> None:
    strategy = ms.MirroredStrategy()
    with strategy.scope():
        variable = ms.Variable(2.0, aggregation="SUM")
    strategy.close()
    with pytest.raises(errors.ContextError, match=r"close\(\)"):
        AFTER[what](strategy, variable)
    strategy.close()  # again is no mistake
    assert float(variable) == 2.0  # what is here stays
    assert strategy.num_replicas_in_sync == SIZE


def test_one_replica_can_be_closed_too() -> None:
    with ms.OneDeviceStrategy() as strategy:
        strategy.barrier("alone")
        assert strategy.devices_by_rank == ("/job:worker/replica:0/task:0/device:CPU:0",)
    assert ms.get_strategy().devices_by_rank == strategy.devices_by_rank


@one_node
def test_devices_by_rank_names_every_replicas_device_on_every_rank() -> None:
    with ms.MirroredStrategy([f"CPU:{i}" for i in reversed(RANKS)]) as strategy:
        devices = strategy.devices_by_rank
        assert devices == tuple(f"/job:worker/replica:0/task:{r}/device:CPU:{SIZE - 1 - r}" for r in RANKS)
        assert devices[RANK] == strategy.extended.worker_devices[0]
        assert same_everywhere(np.array(devices).view(np.uint32))


def test_devices_by_rank_of_a_group() -> None:
    half = MPI.COMM_WORLD.Split(RANK % 2)
    with ms.MirroredStrategy(communicator=half) as strategy:
        assert len(strategy.devices_by_rank) == half.size
        assert [device.split("/")[3] for device in strategy.devices_by_rank] == [f"task:{r}" for r in range(half.size)]
        strategy.barrier(f"of group {RANK % 2}")
    half.Free()
