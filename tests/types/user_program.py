"""A program of a user, as two type checkers see it: `assert_type` says what each call returns, and nothing is Any.

`tests/types/test_types.py` gives it to the checkers; it also runs, on any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import mpistrategy as ms

Floats = NDArray[np.float64]
Batch = tuple[Floats, Floats]


@dataclass
class Losses:
    """What a step returns."""

    mean: np.float64
    rows: int


def reductions(strategy: ms.Strategy) -> None:
    """Values keep their types."""
    wide, narrow, counts = np.ones(3), np.ones((2, 2), np.float32), np.arange(3)
    assert_type(strategy.reduce("SUM", wide), NDArray[np.float64])
    assert_type(strategy.reduce(ms.ReduceOp.MAX, narrow), NDArray[np.float32])
    assert_type(strategy.reduce("SUM", 1.0), np.float64)
    assert_type(strategy.reduce("SUM", 1), np.int64)
    assert_type(strategy.reduce("MEAN", 1), np.float64)
    assert_type(strategy.reduce("MEAN", counts), NDArray[np.floating[Any]])
    assert_type(strategy.reduce("MEAN", wide, axis=0), NDArray[np.float64])
    assert_type(strategy.reduce("mean", wide, weight=3.0, name="by rows"), NDArray[np.float64])
    assert_type(strategy.gather(narrow, 0), NDArray[np.float32])
    assert_type(strategy.broadcast(narrow), NDArray[np.float32])
    assert_type(strategy.broadcast(3, root=0), np.int64)
    pair: list[NDArray[np.float64]] = [wide, wide]
    assert_type(strategy.broadcast(pair), list[NDArray[np.float64]])
    strategy.barrier("reductions")
    assert_type(strategy.rank + strategy.size + strategy.local_rank, int)
    assert_type(strategy.devices_by_rank, tuple[str, ...])


def step(x: Floats, y: Floats, scale: float = 1.0) -> Losses:
    """Use the context of a step."""
    replica = ms.get_replica_context()
    assert_type(replica, ms.ReplicaContext)
    total = replica.all_reduce("SUM", x - y)
    assert_type(total, NDArray[np.float64])
    nest = replica.all_reduce("SUM", {"x": x, "y": y})
    assert_type(nest, dict[str, NDArray[np.float64]])
    rows = replica.all_reduce("SUM", len(x))
    assert_type(rows, np.int64)
    handle = replica.all_reduce_async("SUM", y)
    assert_type(handle, ms.AllReduceHandle[NDArray[np.float64]])
    assert_type(handle.wait(), NDArray[np.float64])
    assert_type(handle.done(), bool)
    parts = replica.all_gather(x, 0)
    assert_type(parts, NDArray[np.float64])
    mean = replica.all_reduce("MEAN", float(total.sum()) * scale)
    assert_type(mean, np.float64)
    assert_type(replica.replica_id_in_sync_group, int)
    return Losses(mean, int(rows))


def size_of(*, of: int) -> str:
    """Return a text."""
    return str(of)


def steps(strategy: ms.Strategy, batches: list[Batch]) -> None:
    """`run` returns what the step function does; datasets yield what they were given."""
    for x, y in strategy.distribute_dataset(batches):
        assert_type(x, NDArray[np.float64])
        assert_type(strategy.run(step, args=(x, y, 2.0)), Losses)
        assert_type(strategy.run(step, args=(x, y), kwargs={"scale": 2.0}), Losses)
    assert_type(strategy.run(size_of, kwargs={"of": 3}), str)
    assert_type(strategy.run(lambda: 3), int)
    rows: Batch = (np.ones((8, 2)), np.ones(8))
    iterator = iter(strategy.experimental_distribute_dataset(ms.Dataset.from_arrays(rows, 4, shuffle_seed=1)))
    assert_type(iterator, ms.DistributedIterator[Batch])
    assert_type(iterator.get_next()[0], NDArray[np.float64])
    assert_type(iterator.get_next_as_optional().has_value(), bool)


def variables(strategy: ms.Strategy) -> None:
    """Variables act as arrays, and writing returns them."""
    with strategy.scope():
        weights = ms.Variable(np.zeros(3), name="weights", aggregation="SUM")
    assert_type(weights.assign(np.ones(3)), ms.Variable)
    assert_type(weights.assign_add(np.ones(3)), ms.Variable)
    assert_type(weights + 1, NDArray[Any])
    assert_type(2 * weights, NDArray[Any])
    assert_type(weights @ weights, NDArray[Any])
    assert_type(-weights, NDArray[Any])
    assert_type(weights > 0, NDArray[Any])
    assert_type(weights[0], NDArray[Any])
    assert_type(weights.numpy(), NDArray[Any])
    assert_type(weights.read_value(), NDArray[Any])
    assert_type(weights.shape, tuple[int, ...])
    assert_type(strategy.reduce("MEAN", weights), NDArray[Any])


def main() -> None:
    """Run everything."""
    with ms.MirroredStrategy() as strategy:
        assert_type(strategy, ms.MirroredStrategy)
        reductions(strategy)
        rows = 2 * strategy.size
        steps(strategy, [(np.ones((rows, 3)), np.zeros((rows, 3)))])
        variables(strategy)
        print(f"rank {strategy.rank} of {strategy.size}: all types hold")


if __name__ == "__main__":
    main()
