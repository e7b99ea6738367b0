"""What a program overrides of an algorithm is what the library's own calls use."""

from __future__ import annotations

from typing import Any

import numpy as np

import mpistrategy as ms


class Batches(ms.MpiAllReduce):
    """Overrides the public method."""

    calls = 0

    def batch_reduce(self, *args: Any, **kwargs: Any) -> list[Any]:
        self.calls += 1
        return super().batch_reduce(*args, **kwargs)


class Singles(ms.CrossDeviceOps):
    """Reduces single values only, and asks for its strategy."""

    def reduce_implementation(self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any) -> Any:
        assert ms.in_cross_replica_context()
        return ms.MpiAllReduce().reduce(reduce_op, per_replica_value, destinations, options)


def test_an_overridden_batch_reduce_is_called() -> None:
    algorithm = Batches()
    strategy = ms.MirroredStrategy(cross_device_ops=algorithm)
    got = strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", np.ones(3)))
    assert algorithm.calls == 1
    assert got.tolist() == [strategy.num_replicas_in_sync] * 3


def test_variables_use_reduce() -> None:
    strategy = ms.MirroredStrategy(cross_device_ops=Singles())
    with strategy.scope():
        total = ms.Variable(np.zeros(2), aggregation="SUM")
    strategy.run(lambda: total.assign_add(np.ones(2)))
    assert total.numpy().tolist() == [strategy.num_replicas_in_sync] * 2
