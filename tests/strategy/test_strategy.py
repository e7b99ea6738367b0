"""Strategies: which ranks take part, which devices they drive, barriers, `with`, close, and hooks of algorithms."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from replicas import RANK, RANKS, SIZE, OnNodes, context, in_step, new_variable, one_node, same_everywhere, still_works

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.mpi.contract.guard import Failure

pytestmark = pytest.mark.mpi
WORLD = MPI.COMM_WORLD


# ------------------------------------------------------------------------------------------------- ranks


def test_the_users_own_traffic_never_meets_ours() -> None:
    comm, mine, total = WORLD.Dup(), np.array([1.0]), np.zeros(1)
    strategy, other = ms.MirroredStrategy(communicator=comm), ms.MirroredStrategy()
    comm.Free()
    other.close()  # one of several can go first
    request = WORLD.Iallreduce(mine, total, MPI.SUM)
    assert still_works(strategy)
    request.Wait()
    assert total[0] == SIZE
    strategy.close()
    strategy.close()


@pytest.mark.parametrize("split", ["groups", "turned", "part"])
def test_sub_communicators_are_sync_groups_of_their_own(split: str) -> None:
    color, key = {"groups": (RANK % 2, RANK), "turned": (0, -RANK), "part": (int(RANK == SIZE - 1), RANK)}[split]
    comm = WORLD.Split(color, key)
    members = {"groups": [*RANKS[RANK % 2 :: 2]], "turned": [*reversed(RANKS)]}.get(
        split, [*RANKS[:-1]] if color == 0 else [SIZE - 1]
    )
    with ms.MirroredStrategy(communicator=comm) as strategy:
        assert (strategy.num_replicas_in_sync, strategy.rank) == (len(members), members.index(RANK))
        for _ in range(color + 1):  # the groups make different numbers of calls, of different shapes
            total = in_step(strategy, lambda ctx: ctx.all_reduce("SUM", np.full(color + 1, RANK)))
        assert total.tolist() == [sum(members)] * (color + 1)
        assert float(ms.Variable(float(RANK))) == members[0]
        strategy.barrier(f"of group {color}")
        assert [device.split("/")[3] for device in strategy.devices_by_rank] == [f"task:{r}" for r in range(comm.size)]
    comm.Free()


def test_the_names_a_strategy_has_for_its_ranks(strategy: ms.MirroredStrategy) -> None:
    assert (strategy.rank, strategy.size, strategy.num_replicas_in_sync) == (RANK, SIZE, SIZE)
    node_of = strategy.extended.communicator.node_of
    assert strategy.local_rank == node_of[:RANK].count(node_of[RANK])
    with OnNodes([rank % 2 for rank in RANKS], ms.MpiAllReduce()) as nodes:
        assert nodes.local_rank == RANK // 2
    alone = ms.OneDeviceStrategy()
    assert (alone.rank, alone.size, alone.local_rank) == (0, 1, 0)


# ------------------------------------------------------------------------------------------------- devices


@one_node
def test_a_rank_takes_the_entry_at_its_index_on_the_node(strategy: ms.MirroredStrategy) -> None:
    for devices, numbers in (
        (None, [0] * SIZE),
        ([], [0] * SIZE),
        ([f"CPU:{i}" for i in reversed(RANKS)], RANKS[::-1]),
    ):
        with ms.MirroredStrategy(devices) as made:
            named = tuple(f"/job:worker/replica:0/task:{r}/device:CPU:{number}" for r, number in enumerate(numbers))
            assert made.devices_by_rank == named
            assert same_everywhere(np.array(named).view(np.uint32))
            mine = (named[RANK],)
            assert made.extended.worker_devices == made.extended.parameter_devices == mine
            assert in_step(made, lambda ctx: ctx.devices) == mine


@pytest.mark.parametrize("make", [lambda: ms.OneDeviceStrategy("CPU:0"), ms.get_strategy])
@pytest.mark.filterwarnings("ignore::mpistrategy.errors.OutsideStepWarning")
def test_one_replica_works_alone(make: Callable[[], ms.Strategy]) -> None:
    """`OneDeviceStrategy` and the default strategy are the specification of every other one."""
    strategy = make()
    assert strategy.num_replicas_in_sync == 1
    assert strategy.devices_by_rank == ("/job:worker/replica:0/task:0/device:CPU:0",)
    reduced = in_step(strategy, lambda ctx: ctx.all_reduce("SUM", {"a": np.arange(3), "b": 2.5}))
    assert (reduced["a"].tolist(), reduced["b"]) == ([0, 1, 2], 2.5)
    assert strategy.reduce("MEAN", np.arange(4.0), axis=0) == 1.5
    assert strategy.gather(np.arange(3), axis=0).tolist() == [0, 1, 2]
    assert strategy.experimental_local_results(7) == (7,)
    for device, kind in (("CPU:9999", errors.DeviceError), (0, errors.OptionTypeError)):
        with pytest.raises(kind):
            ms.OneDeviceStrategy(device)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- barriers, life


def test_a_barrier_lets_nobody_through_before_all_have_come(strategy: ms.MirroredStrategy) -> None:
    for late in RANKS:
        if late == RANK:
            time.sleep(0.05)
        came = time.monotonic()
        strategy.barrier()
        left = time.monotonic()
        assert left >= max(strategy.gather(np.array([came]), 0))  # the ranks of one machine share this clock


def test_with_enters_the_scope_and_closes_at_the_end() -> None:
    with ms.MirroredStrategy() as strategy:
        assert ms.get_strategy() is strategy
        assert ms.in_cross_replica_context()
        assert strategy.extended.variable_created_in_scope(ms.Variable(float(RANK)))
        with strategy:  # closes nothing: the outer block still needs it
            pass
        assert still_works(strategy)
    assert not ms.has_strategy()
    # A rank that is late hears of the others' failure while it still makes the strategy.
    with pytest.raises((KeyError, errors.RemoteError)), ms.MirroredStrategy() as strategy:
        raise KeyError("of the program")
    assert not ms.has_strategy()
    with pytest.raises(errors.ContextError, match=r"after its close|failed in its with block: KeyError"):
        strategy.reduce("SUM", 1.0)


AFTER: dict[str, Callable[[ms.Strategy, ms.Variable], Any]] = {
    "reduce": lambda s, v: s.reduce("SUM", 1.0),
    "gather": lambda s, v: s.gather(np.ones(1), 0),
    "barrier": lambda s, v: s.barrier(),
    "all_reduce": lambda s, v: s.run(lambda: context().all_reduce("SUM", 1.0)),
    "reduce_to": lambda s, v: s.extended.reduce_to("SUM", 1.0, "task:0"),
    "broadcast_to": lambda s, v: s.extended.broadcast_to(1.0, "task:0"),
    "assign in a step": lambda s, v: s.run(lambda: v.assign(1.0)),
    "apply_gradients": lambda s, v: s.run(lambda: ms.optimizers.SGD().apply_gradients([(1.0, v)])),
}


def test_after_close_every_collective_says_so() -> None:
    strategy = ms.MirroredStrategy()
    variable = new_variable(strategy, 2.0, aggregation="SUM")
    strategy.close()
    for call in AFTER.values():
        with pytest.raises(errors.ContextError, match=r"close\(\)"):
            call(strategy, variable)
    assert float(variable) == 2.0  # what is here stays
    assert strategy.num_replicas_in_sync == SIZE


def test_close_raises_the_error_of_another_rank_although_a_failure_is_known_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strategy = ms.MirroredStrategy()
    guard, error = strategy.extended.communicator.guard, errors.RemoteError("rank 1 could not make this call")

    def compare(*_: Any, **__: Any) -> None:
        monkeypatch.setattr(guard, "due", (Failure("KeyError", 1), error, time.monotonic()))  # as the watchdog does
        guard.reported = error
        raise error

    monkeypatch.setattr(guard, "compare", compare)
    with pytest.raises(errors.RemoteError, match="could not make this call"):
        strategy.close()
    monkeypatch.undo()
    assert still_works(strategy)  # nothing of it has been freed
    strategy.close()


# ------------------------------------------------------------------------------------------------- hooks


class Doubling(ms.CrossDeviceOps):
    """Twice the sum, through a built-in algorithm."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def reduce_implementation(self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any) -> Any:
        self.log.append("reduce")
        total = ms.ReductionToOneDevice().reduce(reduce_op, per_replica_value, destinations)
        return ms.Mirrored((2 * np.asarray(total),))

    def batch_reduce_implementation(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> Any:
        assert isinstance(reduce_op, ms.ReduceOp)
        assert isinstance(options, ms.CommunicationOptions)
        self.log.append(f"batch_reduce {len(value_destination_pairs)}")
        return [self.reduce_implementation(reduce_op, v, d, options) for v, d in value_destination_pairs]


class Losing(ms.CrossDeviceOps):
    """Loses a result."""

    def batch_reduce_implementation(self, *given: Any) -> Any:
        return [ms.Mirrored((0.0,))]


def test_hooks_are_called_and_what_they_return_is_used() -> None:
    doubling = Doubling()
    with ms.MirroredStrategy(cross_device_ops=doubling) as strategy:
        result = in_step(strategy, lambda ctx: ctx.all_reduce("SUM", [1.0, np.ones(2)]))
        assert (result[0], result[1].tolist()) == (2 * SIZE, [2 * SIZE] * 2)
        assert strategy.reduce("SUM", 1.0) == 2 * SIZE
        assert doubling.log == ["batch_reduce 2", "reduce", "reduce", "reduce"]
        strategy.extended.cross_device_ops = Losing()
        with pytest.raises(errors.StructureError, match="one result for each value"):
            in_step(strategy, lambda ctx: ctx.all_reduce("SUM", [1.0, 2.0]))
        strategy.extended.cross_device_ops = ms.CrossDeviceOps()
        for call in (
            lambda: in_step(strategy, lambda ctx: ctx.all_reduce("SUM", 1.0)),
            lambda: ms.CrossDeviceOps().reduce("SUM", 1.0, "CPU:0"),
        ):
            with pytest.raises(NotImplementedError, match="reduce_implementation"):
                call()
        assert float(strategy.extended.broadcast_to(np.float64(RANK), np.ones(1))) == 0.0
