"""Helpers of the tests of checkpoints: a folder that all ranks share, and a program with one of everything."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from replicas import gather_texts, in_scope

import mpistrategy as ms
from mpistrategy.checkpoint import files, saving


def shared_folder(tmp_path: Path) -> Path:
    """Return one folder for all ranks: rank 0's."""
    return Path(gather_texts(str(tmp_path))[0])


def checkpoint_of(strategy: ms.Strategy, **objects: Any) -> ms.Checkpoint:
    """Make a checkpoint of a strategy."""
    return in_scope(strategy, lambda: ms.Checkpoint(**objects))


@contextmanager
def watched(watcher: Callable[[str, str], None]) -> Iterator[None]:
    """Call `watcher` before every change to the file system."""
    files.watcher = watcher
    try:
        yield
    finally:
        files.watcher = files.nobody


@contextmanager
def in_threads(change: str, do: Callable[[], object]) -> Iterator[None]:
    """Call `do` in threads that write, before each change to the file system of a kind: "create", "fsync", "rename"."""

    def watcher(what: str, name: str) -> None:
        if what == change and threading.current_thread() is not threading.main_thread():
            do()

    with watched(watcher):
        yield


@contextmanager
def held(change: str = "fsync", is_held: threading.Event | None = None) -> Iterator[threading.Event]:
    """Stop the first thread that writes before a change of a kind, until the event is set or the block is left.

    Args:
        change: the kind.
        is_held: is set when that thread has come.
    """
    go, threads = threading.Event(), []

    def hold() -> None:
        threads.append(threading.current_thread())
        if threads[0] is threading.current_thread():
            if is_held is not None:
                is_held.set()
            go.wait(60)

    with in_threads(change, hold):
        try:
            yield go
        finally:
            go.set()


@contextmanager
def many_writers(many: object = True) -> Iterator[None]:
    """Have each rank write a shard, whatever there is to write; if it is wanted."""
    before = saving.BYTES_A_WRITER
    saving.BYTES_A_WRITER = 1 if many else before
    try:
        yield
    finally:
        saving.BYTES_A_WRITER = before


class Counting:
    """Does something at the change to the file system of a number, from 1 on; counts them."""

    def __init__(self, number: int, do: Callable[[], None]) -> None:
        self.number, self.do, self.count = number, do, 0
        self.seen: list[str] = []

    def __call__(self, what: str, name: str) -> None:
        self.count += 1
        self.seen.append(what)
        if self.count == self.number:
            self.do()


class Training:
    """A small program with one of everything that a checkpoint can keep."""

    def __init__(self, strategy: ms.Strategy, seed: int = 1) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.weights = ms.Variable(np.linspace(-1, 1, 6).reshape(2, 3), name="weights")
            self.bias = ms.Variable(np.zeros(3, np.float32), name="bias")
            self.rows = ms.Variable(np.int64(0), synchronization="ON_READ", aggregation="SUM")
            self.average = ms.Variable(np.zeros(2), synchronization="ON_READ", aggregation="MEAN")
            self.scales = ms.Variable(np.ones(2), name="scales")
            self.adam, self.sgd = ms.optimizers.Adam(0.05), ms.optimizers.SGD(0.1, momentum=0.9)
            self.seldom = ms.optimizers.SGD(0.01)
            self.loss = ms.metrics.Mean()
        self.accumulator = ms.gradients.GradientAccumulator(steps=3)
        self.streams = strategy.rng(seed)
        self.shuffle = np.random.default_rng(seed)
        rows = np.arange(64.0).reshape(32, 2)
        data = ms.Dataset.from_arrays(rows, global_batch_size=8, shuffle_seed=seed, epochs=None)
        self.batches = iter(strategy.experimental_distribute_dataset(data))
        self.progress: dict[str, Any] = {"step": 0, "losses": [], "best": float("inf"), "kept": np.zeros(2)}
        self.checkpoint = ms.Checkpoint(
            weights=self.weights, bias=self.bias, counts=[self.rows, self.average], optimizers=(self.adam, self.sgd),
            scales=self.scales, seldom=self.seldom, accumulator=self.accumulator, loss=self.loss, streams=self.streams,
            shuffle=self.shuffle, batches=self.batches, progress=self.progress,
        )  # fmt: skip

    def step(self) -> None:
        """Make one step, which draws, reads and changes everything."""
        batch = next(self.batches)

        def step() -> None:
            noise = self.streams.replica.standard_normal((2, 3)) * 0.01
            error = batch @ (self.weights + noise) / 64
            self.rows.assign_add(len(batch))
            self.average.assign(0.9 * self.average + 0.1 * batch.sum(axis=0))
            self.loss.update_state(error)
            self.adam.apply_gradients([(batch.T @ error / 64, self.weights)])
            self.sgd.apply_gradients([(error.sum(axis=0).astype(np.float32), self.bias)])
            sums = self.accumulator.add([batch.sum(axis=0) * self.scales / 1000])
            if sums is not None:
                self.seldom.apply_gradients([(sums[0], self.scales)])

        self.strategy.run(step)
        self.progress["step"] += 1
        self.progress["losses"].append(self.loss.result())
        self.progress["best"] = min(self.progress["best"], self.loss.result())
        self.progress["kept"] += self.shuffle.random(2)
        self.adam.learning_rate *= 0.99

    def everything(self) -> list[Any]:
        """Return all there is, on this rank, as lists."""
        slots = [*self.adam.variables, *self.sgd.variables]
        copies = [self.weights, self.bias, self.scales, self.rows, self.average, *self.loss.variables, *slots]
        return [
            [copy.local_copy().tolist() for copy in copies],
            [total.tolist() for total in self.accumulator._sums if self.accumulator._count],
            [self.adam.learning_rate, repr(self.progress)],
            [self.streams.shared.random(), self.streams.replica.random(), self.shuffle.random()],
            next(self.batches).tolist(),
        ]

    def shared(self) -> list[Any]:
        """Return what must be the same on any number of ranks, up to the order of sums."""
        totals = [int(self.rows), np.asarray(self.average).tolist(), self.loss.result()]
        mirrored = [self.weights, self.bias, self.scales, *self.adam.variables, *self.sgd.variables]
        return [
            [var.local_copy().tolist() for var in mirrored],
            totals,
            repr(self.progress),
            [self.streams.shared.random(), self.shuffle.random()],
            self.strategy.gather(next(self.batches), 0).tolist(),
        ]
