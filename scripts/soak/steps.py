"""Makes many steps of mixed collectives, and strategies, and shows that nothing grows: memory, mappings, files.

An MPI request that is never freed takes some hundred bytes: a leak of one a step shows in the memory.  There are more
strategies than an MPI has communicators.
"""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path

import numpy as np

import mpistrategy as ms

MOST = np.array([8, 1, 16])


def measures() -> np.ndarray:
    """Return what must not grow: MiB of resident memory, open files, and pieces of memory that are mapped."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    mappings = Path("/proc/self/maps").read_text().count("\n")
    return np.array([pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir("/proc/self/fd")), mappings])


def make_steps(strategy: ms.Strategy, steps: int) -> None:
    """Reduce, gather, update and read, `steps` times; every result is checked."""
    ranks = strategy.size
    with strategy.scope():
        layers = [ms.Variable(np.zeros(size), aggregation="MEAN") for size in (300, 9000, 40)]
        loss, adam = ms.metrics.Mean(), ms.optimizers.Adam(0.001)
    arena = strategy.arena({"a": np.zeros(5000), "b": [np.zeros(3, np.float32), np.zeros((20, 30))]})
    place = [np.empty(50), np.empty(20_000)]

    def step(number: int) -> None:
        context = ms.get_replica_context()
        total = context.all_reduce("SUM", {"a": np.full(number % 97, 1.0), "b": [np.int32(2), np.float16(0.5)]})
        assert np.all(total["a"] == ranks)
        assert total["b"] == [2 * ranks, 0.5 * ranks]
        assert context.all_gather(np.zeros(number % 3), 0).size == ranks * (number % 3)
        for array in place:
            array[...] = number
        assert context.all_reduce("SUM", place, out=place) is place
        assert all(np.all(array == ranks * number) for array in place)
        arena.values["a"][...] = number
        assert np.all(context.all_reduce("SUM", arena)["a"] == ranks * number)
        handles = [context.all_reduce_async("SUM", np.full(10 + number % 100, k)) for k in range(2)]
        assert all(np.all(handle.wait() == ranks * k) for k, handle in enumerate(handles))
        adam.apply_gradients([(np.ones(layer.shape), layer) for layer in layers])
        loss.update_state(number)

    for number in range(steps):
        strategy.run(step, (number,))
        if number % 100 == 0:
            loss.result()
    arena.close()


def soak(options: argparse.Namespace) -> bool:
    """Make the steps and the strategies; return whether something grew."""
    strategy = ms.MirroredStrategy()
    make_steps(strategy, max(100, options.count // 10))  # caches fill up
    for _ in range(20):
        ms.MirroredStrategy().close()
    before = measures()
    make_steps(strategy, options.count)
    between = measures()
    for _ in range(options.count // 8):
        ms.MirroredStrategy().close()
    grown = strategy.gather(np.array([[between - before, measures() - before]]), axis=0).max(axis=0)
    if strategy.rank == 0:
        steps, all_growth = (f"{mib:.1f} MiB, {files:.0f} files, {maps:.0f} mappings" for mib, files, maps in grown)
        print(f"{options.count} steps grew by {steps}; with {options.count // 8} strategies, too, by {all_growth}")
    return bool(np.any(grown >= MOST))
