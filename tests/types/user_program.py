"""A program of a user, as two type checkers see it: `assert_type` says what each call returns, and nothing is Any.

`tests/types/test_types.py` gives it to the checkers; it also runs, on any number of ranks.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import mpistrategy as ms

Floats = NDArray[np.float64]
Batch = tuple[Floats, Floats]


@dataclass
class Losses:
    """What a step returns."""

    mean: float
    rows: int


def reductions(strategy: ms.Strategy, wide: Floats, narrow: NDArray[np.float32]) -> None:
    """Values keep their types."""
    assert_type(strategy.reduce("SUM", wide), NDArray[np.float64])
    assert_type(strategy.reduce(ms.ReduceOp.MAX, narrow), NDArray[np.float32])
    assert_type(strategy.reduce("SUM", 1.0), float)
    assert_type(strategy.reduce("SUM", 1), int)
    assert_type(strategy.reduce("MEAN", wide, axis=0), NDArray[np.float64])
    assert_type(strategy.reduce("mean", wide, weight=3.0, name="by rows"), NDArray[np.float64])
    assert_type(strategy.gather(narrow, 0), NDArray[np.float32])
    assert_type(strategy.broadcast(narrow), NDArray[np.float32])
    assert_type(strategy.broadcast(3, root=0), int)
    pair: list[NDArray[np.float64]] = [wide, wide]
    hints = ms.CommunicationOptions(bytes_per_pack=1024, implementation="RING", timeout_seconds=60)
    assert_type(strategy.explain(pair, "MEAN", hints), str)
    assert_type(strategy.broadcast(pair), list[NDArray[np.float64]])
    strategy.barrier("reductions")


def step(x: Floats, y: Floats, scale: float = 1.0) -> Losses:
    """Use the context of a step."""
    replica = ms.get_replica_context()
    assert_type(replica, ms.ReplicaContext)
    total = replica.all_reduce("SUM", x - y)
    assert_type(total, NDArray[np.float64])
    nest = replica.all_reduce("SUM", {"x": x, "y": y})
    assert_type(nest, dict[str, NDArray[np.float64]])
    rows = replica.all_reduce("SUM", len(x))
    assert_type(rows, int)
    handle = replica.all_reduce_async("SUM", y)
    assert_type(handle, ms.AllReduceHandle[NDArray[np.float64]])
    assert_type(handle.wait(), NDArray[np.float64])
    parts = replica.all_gather(x, 0)
    assert_type(parts, NDArray[np.float64])
    assert_type(replica.reduce_scatter("SUM", x), NDArray[np.float64])
    mean = replica.all_reduce("MEAN", float(total.sum()) * scale)
    assert_type(mean, float)
    return Losses(mean, rows)


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


def variables(strategy: ms.Strategy) -> None:
    """Variables act as arrays, and writing returns them."""
    with strategy.scope():
        weights = ms.Variable(np.zeros(3), name="weights", aggregation="SUM")
    assert_type(weights.assign(np.ones(3)), ms.Variable)
    assert_type(weights.assign_add(np.ones(3)), ms.Variable)
    assert_type(weights + 1, Any)
    assert_type(weights[0], NDArray[Any])
    assert_type(weights.numpy(), NDArray[Any])
    assert_type(weights.T, NDArray[Any])
    assert_type(ms.Mirrored((np.ones(3),)).reshape(3, 1), NDArray[Any])
    assert_type(strategy.extended.read_var(weights), NDArray[Any])
    assert_type(strategy.reduce("MEAN", weights), NDArray[Any])


@dataclass
class Progress:
    """An object of the user's that checkpoints save: `ms.Stateful`."""

    epoch: int = 0

    def state_dict(self) -> dict[str, int]:
        """Return the state."""
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take over a state."""
        self.epoch = state["epoch"]


def arenas(strategy: ms.Strategy, weights: list[ms.Variable]) -> None:
    """An arena has the type of what it was made like."""
    like: dict[str, Floats] = {"w": np.ones((2, 2)), "b": np.ones(2)}
    arena = strategy.arena(like)
    assert_type(arena, ms.Arena[dict[str, Floats]])
    assert_type(arena.values, dict[str, Floats])
    assert_type(strategy.reduce("SUM", arena), dict[str, Floats])
    assert_type(strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", arena)), dict[str, Floats])
    handle = strategy.run(lambda: ms.get_replica_context().all_reduce_async("SUM", arena))
    assert_type(handle, ms.AllReduceHandle[dict[str, Floats]])
    assert_type(handle.wait()["w"], Floats)
    gradients = strategy.arena(weights)
    assert_type(gradients.values[0], NDArray[Any])
    np.multiply(gradients.values[0], 2, out=gradients.values[0])
    for each in (arena, gradients):
        each.close()


def training(strategy: ms.Strategy) -> None:
    """Optimizers, metrics, gradients."""
    with strategy.scope():
        weights = [ms.Variable(np.zeros(3), name="w"), ms.Variable(np.zeros(()), name="b")]
        adam = ms.optimizers.Adam(1e-3, aggregation="MEAN", nonfinite="skip", mirrored_check_steps=10)
        mean = ms.metrics.Mean()
        buckets = adam.gradient_buckets(weights)
        memory = adam.gradient_arena(weights)
    assert_type(memory, ms.Arena[list[NDArray[Any]]])
    assert_type(buckets, ms.GradientBuckets)
    assert_type(buckets.values[0], NDArray[Any])
    assert_type(adam.learning_rate, float)
    adam.learning_rate = 2e-3

    def one_step(x: Floats) -> float:
        for values, var in buckets:
            assert_type(var, ms.Variable)
            values[...] = x.sum()
            buckets.ready(var)
        adam.apply_gradients(buckets)
        mean.update_state(x.mean())
        return ms.get_replica_context().all_reduce("MEAN", float(x.sum()))

    assert_type(strategy.run(one_step, args=(np.ones(4),)), float)
    assert_type(mean.result(), float)
    assert_type(adam.slots_of(weights[0]), dict[str, ms.Variable])
    assert_type(adam.iterations, ms.Variable | None)
    clipped, norm = ms.gradients.clip_by_global_norm([np.ones(3)], 1.0)
    assert_type(clipped, list[Any])
    assert_type(norm, float)
    assert_type(ms.gradients.GradientAccumulator(4).add([np.ones(3)]), list[Any] | None)
    strategy.assert_mirrored(weights)


def checkpoints(strategy: ms.Strategy, folder: str) -> None:
    """Checkpoints and what they return."""
    progress = Progress(epoch=3)
    state: ms.Stateful = progress
    with strategy.scope():
        checkpoint = ms.Checkpoint(progress=state, streams=strategy.rng(7))
    saving = checkpoint.save(f"{folder}/one", wait=False)
    assert_type(saving, ms.Saving)
    assert_type(saving.wait(), str)
    restored = checkpoint.restore(saving.path)
    assert_type(restored, ms.Restored)
    manager = ms.CheckpointManager(checkpoint, f"{folder}/many", keep=2)
    assert_type(manager.save(1), ms.Saving)
    assert_type(manager.restore(), int | None)
    assert_type(ms.Checkpoint.arrays(saving.path), dict[str, NDArray[Any]])


def errors(strategy: ms.Strategy) -> None:
    """What errors carry."""
    try:
        strategy.run(lambda: ms.get_replica_context().all_reduce("MIN", np.ones(2) * 1j))
    except ms.errors.MpiStrategyError as error:
        if isinstance(error, ms.errors.CollectiveMismatchError):
            assert_type(error.calls, Mapping[int, ms.errors.RankCall])
            assert_type(error.differ, tuple[str, ...])
    streams = strategy.rng(7)
    assert_type(streams, ms.Streams)
    assert_type(streams.at(1, 2).random(), float)
    with ms.telemetry.span("all of it"), strategy.expect_long(60):
        for number in ms.telemetry.progress(range(3), title="steps", every_seconds=60):
            assert_type(number, int)


def main() -> None:
    """Run everything."""
    with ms.MirroredStrategy("cpu", check="always", on_error="abort") as strategy:
        assert_type(strategy, ms.MirroredStrategy)
        reductions(strategy, np.ones(3), np.ones((2, 2), np.float32))
        rows = 2 * strategy.size
        steps(strategy, [(np.ones((rows, 3)), np.zeros((rows, 3)))])
        variables(strategy)
        with strategy.scope():
            weights = [ms.Variable(np.zeros(3), name="weights")]
        arenas(strategy, weights)
        training(strategy)
        folder = Path(tempfile.gettempdir(), f"user_program_{strategy.broadcast(os.getpid())}")
        checkpoints(strategy, str(folder))
        strategy.barrier("the folder is read no more")
        if strategy.rank == 0:
            shutil.rmtree(folder)
        errors(strategy)
        print(f"rank {strategy.rank} of {strategy.size}: all types hold")


if __name__ == "__main__":
    main()
