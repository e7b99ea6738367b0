"""Strategies that users write: `Strategy(extended)`, a subclass of `StrategyExtended(container_strategy)`, and
`ReplicaContext(strategy, replica_id_in_sync_group)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from replicas import RANK, RANKS, SIZE, all_reduce

import mpistrategy as ms

pytestmark = pytest.mark.mpi


class Alone(ms.Strategy):
    """The smallest strategy: one replica, and everything as it comes."""

    def __init__(self) -> None:
        super().__init__(ms.StrategyExtended(self))


class WatchedExtended(ms.StrategyExtended):
    """Counts steps, and makes no updates while it is frozen."""

    def __init__(self, container_strategy: ms.Strategy, ranks: Any) -> None:
        super().__init__(container_strategy, ranks)
        self.steps = 0
        self.frozen = False

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.steps += 1
        return super().call_for_each_replica(fn, args, kwargs)

    def update(
        self,
        var: ms.Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        return None if self.frozen else super().update(var, fn, args, kwargs, group)


class Watched(ms.Strategy):
    """All ranks, on the communicator of another strategy."""

    extended: WatchedExtended

    def __init__(self, other: ms.Strategy) -> None:
        super().__init__(WatchedExtended(self, other.extended.communicator))


def train(strategy: ms.Strategy, steps: int) -> np.ndarray[Any, Any]:
    """Fit a line by gradient descent with the four steps of an update, written out."""
    with strategy.scope():
        weight = ms.Variable(np.zeros(2))

    def apply(strategy: ms.Strategy, gradient: Any) -> None:
        total = strategy.extended.reduce_to("SUM", gradient, weight)
        strategy.extended.update(weight, lambda w, g: w.assign_sub(0.01 * g), args=(total,))

    def step(x: Any, y: Any) -> None:
        gradient = x.T @ (x @ np.asarray(weight) - y)
        context = ms.get_replica_context()
        assert context is not None
        context.merge_call(apply, args=(gradient,))

    x = np.stack([np.ones(12), np.linspace(-1, 1, 12)], axis=1)
    data = ms.Dataset.from_arrays((x, x @ [2.0, -3.0]), global_batch_size=12, epochs=steps)
    for batch in strategy.experimental_distribute_dataset(data):
        strategy.run(step, args=batch)
    return weight.read_value()


def test_it_trains_like_one_device() -> None:
    assert np.array_equal(train(Alone(), 3), train(ms.OneDeviceStrategy("CPU:0"), 3))


def test_it_trains_like_the_strategy_whose_ranks_it_uses(strategy: ms.Strategy) -> None:
    watched = Watched(strategy)
    assert watched.num_replicas_in_sync == SIZE
    assert np.array_equal(train(watched, 4), train(strategy, 4))
    assert np.allclose(train(watched, 4), train(Alone(), 4), rtol=1e-12)
    assert watched.extended.steps == 8


def test_what_it_overrides_is_used(strategy: ms.Strategy) -> None:
    watched = Watched(strategy)
    watched.extended.frozen = True
    assert train(watched, 2).tolist() == [0, 0]


def test_a_strategy_can_run_its_steps_in_contexts_of_its_own(strategy: ms.Strategy) -> None:
    class Numbered(ms.ReplicaContext):
        """A context that tells the step which step it is."""

        step = 0

    class NumberedExtended(ms.StrategyExtended):
        steps = 0

        def call_for_each_replica(self, fn: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.steps += 1
            with Numbered(self._container_strategy, RANK) as context:
                context.step = self.steps
                return fn(*args, **(kwargs or {}))

    class NumberedStrategy(ms.Strategy):
        def __init__(self) -> None:
            super().__init__(NumberedExtended(self, strategy.extended.communicator))

    numbered = NumberedStrategy()

    def step(x: int) -> Any:
        context = ms.get_replica_context()
        assert isinstance(context, Numbered)
        return context.step, context.all_reduce("SUM", x)

    assert [numbered.run(step, args=(2,)) for _ in range(2)] == [(1, 2 * SIZE), (2, 2 * SIZE)]


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


def test_what_an_algorithm_overrides_is_what_the_librarys_own_calls_use() -> None:
    """Also in aggregated writes of variables."""
    algorithm = Batches()
    with ms.MirroredStrategy(cross_device_ops=algorithm) as strategy:
        assert all_reduce(strategy, "SUM", np.ones(3)).tolist() == [SIZE] * 3
        assert algorithm.calls == 1
        strategy.extended.cross_device_ops = Singles()
        total = ms.Variable(np.zeros(2), aggregation="SUM")
        strategy.run(lambda: total.assign_add(np.ones(2)))
        assert total.numpy().tolist() == [SIZE] * 2


class Doubling(ms.MpiAllReduce):
    """Changes results where one value is reduced."""

    def reduce_implementation(self, *given: Any) -> Any:
        return ms.Mirrored((2 * np.asarray(super().reduce_implementation(*given)),))


class DoublingBatches(ms.MpiAllReduce):
    """Changes results wherever something is reduced: one value is a batch of one."""

    def batch_reduce_implementation(self, *given: Any) -> Any:
        return [ms.Mirrored((2 * np.asarray(each),)) for each in super().batch_reduce_implementation(*given)]


def test_an_algorithm_derived_from_a_built_in_one_does_the_work() -> None:
    """In the first call and in those like it, at one line of the program that the built-in one has served, too."""
    with ms.MirroredStrategy() as strategy:
        extended = strategy.extended

        def each_way() -> list[float]:
            x = np.ones(2)
            inside = strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", x))
            outside = [strategy.reduce("SUM", x), extended.reduce_to("SUM", x, x)]
            batch = [strategy.reduce("SUM", [x, x])[1], extended.batch_reduce_to("SUM", [(x, x)])[0]]
            return [float(np.asarray(each)[0]) for each in (inside, *outside, *batch)]

        for _ in range(3):
            extended.cross_device_ops = ms.MpiAllReduce()
            assert each_way() == each_way() == [SIZE] * 5
            extended.cross_device_ops = Doubling()
            assert each_way() == each_way() == [SIZE, 2 * SIZE, 2 * SIZE, SIZE, SIZE]
            extended.cross_device_ops = DoublingBatches()
            assert each_way() == each_way() == [2 * SIZE] * 5
        found = strategy.reduce("MEAN", float(RANK), weight=RANK + 1)  # whose products it reduces, too
        assert found == pytest.approx(2 * np.average(RANKS, weights=np.add(RANKS, 1)), rel=1e-14)
