"""Makes many steps of mixed collectives and shows that nothing grows: memory, mappings, files, communicators.

An MPI request that is never freed takes some hundred bytes: a leak of one a step shows in the memory.

    scripts/mpirun -n 2 scripts/soak steps [--steps 20000] [--strategies 3000]
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from pathlib import Path

import numpy as np

import mpistrategy as ms


def resident_mib() -> float:
    """Return this process's resident memory in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def open_files() -> int:
    """Return how many file descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    """Return how many pieces of memory this process has mapped."""
    return Path("/proc/self/maps").read_text().count("\n")


def measures() -> np.ndarray:
    """Return what must not grow: MiB, files, and mappings."""
    return np.array([resident_mib(), open_files(), mappings()])


def make_steps(strategy: ms.Strategy, steps: int) -> None:
    """Reduce, gather, update and read, `steps` times; every result is checked."""
    ranks = strategy.num_replicas_in_sync
    with strategy.scope():
        weights = ms.Variable(np.zeros(1000), aggregation="MEAN")
        layers = [ms.Variable(np.zeros(size), aggregation="MEAN") for size in (300, 9000, 40)]
        loss = ms.metrics.Mean()
        optimizer = ms.optimizers.SGD(0.1, momentum=0.5)
        adam = ms.optimizers.Adam(0.001)
    arena = strategy.arena({"a": np.zeros(5000), "b": [np.zeros(3, np.float32), np.zeros((20, 30))]})
    gradients = strategy.arena([layer.numpy() for layer in layers])
    place = [np.empty(50), np.empty(20_000)]

    def small(context: ms.ReplicaContext, number: int) -> None:
        assert context.all_reduce("SUM", float(number)) == ranks * number
        assert context.all_reduce("MEAN", {"x": number, "y": 2 * number})["y"] == 2 * number
        array = np.full(number % 97, 1.0)
        assert np.all(context.all_reduce("SUM", array) == ranks)
        assert context.all_reduce("SUM", array, out=array) is array

    def mixed(context: ms.ReplicaContext, number: int) -> None:
        total = context.all_reduce("SUM", {"a": np.full(number % 97, 1.0), "b": [np.int32(2), np.float16(0.5)]})
        assert np.all(total["a"] == ranks)
        assert total["b"] == [2 * ranks, 0.5 * ranks]
        assert context.all_gather(np.zeros(number % 3), 0).size == ranks * (number % 3)

    def lists(context: ms.ReplicaContext, number: int) -> None:
        value = [np.full(1 + number % 9000, 1.0), np.full(7, 1.0), np.full(10_000 + number % 5, 1.0, np.float32)]
        assert all(np.all(total == ranks) for total in context.all_reduce("SUM", value))
        for array in place:
            array[...] = number
        assert context.all_reduce("SUM", place, out=place) is place
        assert all(np.all(array == ranks * number) for array in place)

    def in_arena(context: ms.ReplicaContext, number: int) -> None:
        arena.values["a"][...] = number
        assert np.all(context.all_reduce("SUM", arena)["a"] == ranks * number)

    def in_background(context: ms.ReplicaContext, number: int) -> None:
        handles = [context.all_reduce_async("SUM", np.full(10 + number % 100, k)) for k in range(2)]
        assert all(np.all(handle.wait() == ranks * k) for k, handle in enumerate(handles))

    def plain_update(context: ms.ReplicaContext, number: int) -> None:
        optimizer.apply_gradients([(np.ones(1000), weights)])
        loss.update_state(number)

    def sliced_update(context: ms.ReplicaContext, number: int) -> None:
        for gradient in gradients.values:
            gradient[...] = 1
        adam.apply_gradients(list(zip(gradients.values, layers, strict=True)))

    parts = [small, mixed, small, lists, small, in_arena, small, in_background, plain_update, sliced_update]

    def step(number: int) -> None:
        context = ms.get_replica_context()
        assert context is not None
        parts[number % len(parts)](context, number)

    for number in range(steps):
        strategy.run(step, (number,))
        if number % 100 == 0:
            loss.result()
            loss.reset_state()
    arena.close()
    gradients.close()


def main() -> int:
    """Run the soak; return 0 when nothing grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000, help="steps of mixed collectives; default: %(default)s")
    parser.add_argument("--strategies", type=int, default=3000, help="strategies made and closed; default: %(default)s")
    arguments = parser.parse_args()

    strategy = ms.MirroredStrategy()
    make_steps(strategy, max(2000, arguments.steps // 10))  # caches fill up
    for _ in range(20):
        ms.MirroredStrategy().close()
    gc.collect()
    before = measures()
    started = time.perf_counter()
    make_steps(strategy, arguments.steps)
    per_step = (time.perf_counter() - started) / arguments.steps
    gc.collect()
    between = measures()
    # More than an MPI has communicators: a leak ends the job.
    for _ in range(arguments.strategies):
        ms.MirroredStrategy().close()
    gc.collect()
    after = measures()
    grown = strategy.gather(np.array([[between - before, after - before]]), axis=0).max(axis=0)
    fine = bool(np.all(grown < [8, 1, 16]))
    if strategy.replica_id_in_sync_group == 0:
        steps, both = (f"{mib:.1f} MiB, {files:.0f} files, {maps:.0f} mappings" for mib, files, maps in grown)
        print(
            f"soak: {arguments.steps} steps ({1e6 * per_step:.0f} us each) on {strategy.num_replicas_in_sync} ranks: "
            f"grew by {steps} from {before[0]:.0f} MiB, {before[1]:.0f} files, {before[2]:.0f} mappings; "
            f"with {arguments.strategies} strategies by {both}: {'fine' if fine else 'TOO MUCH'}"
        )
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
