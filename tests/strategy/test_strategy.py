"""Strategies: which ranks take part, which devices they drive, and what a communicator of one's own changes."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import mpistrategy as ms
from mpistrategy import errors

pytestmark = pytest.mark.mpi

WORLD = MPI.COMM_WORLD


def sum_of_ranks(strategy: ms.Strategy) -> float:
    """Sum the ranks of COMM_WORLD over the strategy's replicas."""
    context_sum = strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", float(WORLD.rank)))
    return float(context_sum)


class TestWorld:
    def test_every_rank_is_one_replica(self, strategy: ms.MirroredStrategy) -> None:
        assert strategy.num_replicas_in_sync == WORLD.size
        ids = strategy.run(lambda: ms.get_replica_context().replica_id_in_sync_group)
        assert ids == WORLD.rank
        assert sum_of_ranks(strategy) == sum(range(WORLD.size))

    def test_the_users_own_traffic_never_meets_ours(self, strategy: ms.MirroredStrategy) -> None:
        mine, total = np.array([1.0]), np.zeros(1)
        request = WORLD.Iallreduce(mine, total, MPI.SUM)
        assert sum_of_ranks(strategy) == sum(range(WORLD.size))
        request.Wait()
        assert total[0] == WORLD.size

    def test_freeing_the_users_communicator_leaves_the_strategy_alone(self) -> None:
        comm = WORLD.Dup()
        strategy = ms.MirroredStrategy(communicator=comm)
        comm.Free()
        assert sum_of_ranks(strategy) == sum(range(WORLD.size))
        strategy.close()

    def test_closing_twice_is_harmless(self) -> None:
        strategy = ms.MirroredStrategy()
        strategy.close()
        strategy.close()

    def test_one_of_several_strategies_can_go_first(self, strategy: ms.MirroredStrategy) -> None:
        other = ms.MirroredStrategy()
        other.close()
        assert sum_of_ranks(strategy) == sum(range(WORLD.size))


class TestSubCommunicators:
    def test_they_are_independent_sync_groups(self) -> None:
        color = WORLD.rank % 2
        comm = WORLD.Split(color, WORLD.rank)
        strategy = ms.MirroredStrategy(communicator=comm)
        members = [rank for rank in range(WORLD.size) if rank % 2 == color]
        assert strategy.num_replicas_in_sync == len(members)
        # The groups make different numbers of calls, of different shapes.
        for _ in range(color + 1):
            total = strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", np.full(color + 1, WORLD.rank)))
        assert np.array_equal(total, np.full(color + 1, sum(members)))
        with strategy.scope():
            variable = ms.Variable(float(WORLD.rank))
        assert float(variable) == members[0]
        strategy.close()
        comm.Free()

    def test_replica_ids_follow_the_communicator_not_the_world(self) -> None:
        comm = WORLD.Split(0, -WORLD.rank)
        strategy = ms.MirroredStrategy(communicator=comm)
        replica = strategy.run(lambda: ms.get_replica_context().replica_id_in_sync_group)
        assert replica == WORLD.size - 1 - WORLD.rank
        strategy.close()
        comm.Free()

    @pytest.mark.parametrize("communicator", [3, "world", MPI.COMM_NULL])
    def test_what_is_no_communicator_is_refused(self, communicator: object) -> None:
        with pytest.raises(errors.OptionTypeError, match="intracommunicator"):
            ms.MirroredStrategy(communicator=communicator)

    def test_a_rank_outside_the_sub_communicator_is_told_so(self) -> None:
        outside = WORLD.rank == WORLD.size - 1
        part = WORLD.Split(MPI.UNDEFINED if outside else 0, WORLD.rank)
        if outside:
            for null in (part, MPI.COMM_NULL):
                with pytest.raises(errors.OptionTypeError, match=r"communicator=MPI\.COMM_NULL;.*must not make"):
                    ms.MirroredStrategy(communicator=null)
            return
        with ms.MirroredStrategy(communicator=part) as strategy:
            assert strategy.reduce("SUM", 1) == WORLD.size - 1
        part.Free()


class TestDevices:
    def test_automatic(self, strategy: ms.MirroredStrategy) -> None:
        assert strategy.extended.worker_devices == (f"/job:worker/replica:0/task:{WORLD.rank}/device:CPU:0",)
        assert strategy.extended.parameter_devices == strategy.extended.worker_devices
        assert strategy.devices_by_rank[WORLD.rank] == strategy.extended.worker_devices[0]
        assert len(strategy.devices_by_rank) == WORLD.size
        assert strategy.run(lambda: ms.get_replica_context().devices) == strategy.extended.worker_devices

    def test_a_rank_takes_the_entry_at_its_index_on_the_node(self) -> None:
        strategy = ms.MirroredStrategy([f"CPU:{index}" for index in range(WORLD.size)])
        assert strategy.extended.worker_devices[0].endswith(f"/task:{WORLD.rank}/device:CPU:{strategy.local_rank}")
        strategy.close()

    def test_an_empty_list_means_automatic(self) -> None:
        strategy = ms.MirroredStrategy([])
        assert strategy.extended.worker_devices[0].endswith("device:CPU:0")
        strategy.close()

    @pytest.mark.parametrize(
        ("devices", "kind"),
        [
            (["CPU:9999"] * 1, errors.DeviceError),
            (["GPU:77"], errors.DeviceError),
            (["TPU:0"], errors.DeviceError),
            (["not a device"], errors.DeviceError),
            (["CPU:0", "CPU:0"], errors.DeviceError),
            ("CPU:0", errors.OptionTypeError),
            (3, errors.OptionTypeError),
            ([3], errors.OptionTypeError),
        ],
    )
    def test_impossible_devices_are_refused_on_every_rank(
        self, strategy: ms.MirroredStrategy, devices: object, kind: type[Exception]
    ) -> None:
        with pytest.raises(kind):
            ms.MirroredStrategy(devices)  # type: ignore[arg-type]
        assert sum_of_ranks(strategy) == sum(range(WORLD.size))

    @pytest.mark.mpi(min_size=2)
    def test_a_list_shorter_than_the_ranks_on_the_node_is_refused(self) -> None:
        with pytest.raises(errors.DeviceError, match="1 devices for"):
            ms.MirroredStrategy(["CPU:0"])

    @pytest.mark.mpi(min_size=2)
    def test_what_one_rank_refuses_is_refused_everywhere(self) -> None:
        devices = ["TPU:0"] if WORLD.rank == 1 else None
        with pytest.raises(errors.DeviceError, match="TPU:0"):
            ms.MirroredStrategy(devices)

    def test_bad_algorithms_and_options_are_refused(self) -> None:
        with pytest.raises(errors.OptionTypeError, match="CrossDeviceOps"):
            ms.MirroredStrategy(cross_device_ops="ring")  # type: ignore[arg-type]
        with pytest.raises(errors.OptionTypeError, match="CommunicationOptions"):
            ms.MirroredStrategy(communication_options={"bytes_per_pack": 1})  # type: ignore[arg-type]


class TestOneReplica:
    """`OneDeviceStrategy` and the default strategy are the specification of every other one."""

    @pytest.mark.parametrize("make", [lambda: ms.OneDeviceStrategy("CPU:0"), ms.get_strategy])
    @pytest.mark.filterwarnings("ignore::mpistrategy.errors.OutsideStepWarning")
    def test_everything_works_alone(self, make: object) -> None:
        strategy = make()  # type: ignore[operator]
        assert strategy.num_replicas_in_sync == 1
        value = {"a": np.arange(3), "b": 2.5}
        reduced = strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", value))
        assert np.array_equal(reduced["a"], value["a"])
        assert reduced["b"] == 2.5
        assert strategy.reduce("MEAN", np.arange(4.0), axis=0) == 1.5
        assert np.array_equal(strategy.gather(np.arange(3), axis=0), np.arange(3))
        assert strategy.experimental_local_results(7) == (7,)

    def test_a_device_must_exist(self) -> None:
        with pytest.raises(errors.DeviceError):
            ms.OneDeviceStrategy("CPU:9999")
        with pytest.raises(errors.OptionTypeError):
            ms.OneDeviceStrategy(0)  # type: ignore[arg-type]


class TestCustomCrossDeviceOps:
    def test_hooks_are_called_and_what_they_return_is_used(self) -> None:
        log: list[str] = []

        class Doubling(ms.CrossDeviceOps):
            """Twice the sum, through a built-in algorithm."""

            def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):  # type: ignore[no-untyped-def]
                log.append("reduce")
                total = ms.ReductionToOneDevice().reduce(reduce_op, per_replica_value, destinations)
                return ms.Mirrored((2 * np.asarray(total),))

            def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):  # type: ignore[no-untyped-def]
                log.append(f"batch_reduce {len(value_destination_pairs)}")
                return [self.reduce_implementation(reduce_op, v, d, options) for v, d in value_destination_pairs]

        strategy = ms.MirroredStrategy(cross_device_ops=Doubling())
        result = strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", [1.0, np.ones(2)]))
        assert result[0] == 2 * WORLD.size
        assert np.array_equal(result[1], [2 * WORLD.size] * 2)
        assert strategy.reduce("SUM", 1.0) == 2 * WORLD.size
        assert log == ["batch_reduce 2", "reduce", "reduce", "reduce"]
        strategy.close()

    def test_a_hook_that_loses_a_result_is_a_typed_error(self) -> None:
        class Losing(ms.CrossDeviceOps):
            def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):  # type: ignore[no-untyped-def]
                return [ms.Mirrored((0.0,))]

        strategy = ms.MirroredStrategy(cross_device_ops=Losing())
        with pytest.raises(errors.StructureError, match="one result for each value"):
            strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", [1.0, 2.0]))
        strategy.close()

    def test_a_missing_hook_is_a_typed_error(self) -> None:
        strategy = ms.MirroredStrategy(cross_device_ops=ms.CrossDeviceOps())
        with pytest.raises(NotImplementedError, match="batch_reduce_implementation"):
            strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", 1.0))
        with strategy.scope():
            sent = strategy.extended.broadcast_to(np.float64(WORLD.rank), 1.0 * np.ones(1))
        assert float(sent) == 0.0
        strategy.close()
