#!/usr/bin/env python3
"""Makes many steps of mixed collectives and shows that nothing grows: memory, file descriptors, communicators.

scripts/mpirun -n 2 scripts/soak_steps.py [--steps 20000] [--strategies 3000]
"""

from __future__ import annotations

import argparse
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


def make_steps(strategy: ms.Strategy, steps: int) -> None:
    """Reduce, gather, update and read, `steps` times; every result is checked."""
    ranks = strategy.num_replicas_in_sync
    with strategy.scope():
        weights = ms.Variable(np.zeros(1000), aggregation="MEAN")
        loss = ms.metrics.Mean()
        optimizer = ms.optimizers.SGD(0.1, momentum=0.5)

    def step(number: int) -> None:
        context = ms.get_replica_context()
        assert context is not None
        size = number % 97
        total = context.all_reduce("SUM", {"a": np.full(size, 1.0), "b": [np.int32(2), np.float16(0.5)]})
        assert np.all(total["a"] == ranks)
        assert total["b"] == [2 * ranks, 0.5 * ranks]
        assert context.all_gather(np.zeros(number % 3), 0).size == ranks * (number % 3)
        optimizer.apply_gradients([(np.ones(1000), weights)])
        loss.update_state(number)

    for number in range(steps):
        strategy.run(step, (number,))
        if number % 100 == 0:
            loss.result()
            loss.reset_state()


def main() -> int:
    """Run the soak; return 0 when nothing grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000, help="steps of mixed collectives; default: %(default)s")
    parser.add_argument("--strategies", type=int, default=3000, help="strategies made and closed; default: %(default)s")
    arguments = parser.parse_args()

    strategy = ms.MirroredStrategy()
    make_steps(strategy, max(200, arguments.steps // 10))  # caches fill up
    for _ in range(20):
        ms.MirroredStrategy().close()
    before = resident_mib(), open_files()
    started = time.perf_counter()
    make_steps(strategy, arguments.steps)
    per_step = (time.perf_counter() - started) / arguments.steps
    # More than an MPI has communicators: a leak ends the job.
    for _ in range(arguments.strategies):
        ms.MirroredStrategy().close()
    after = resident_mib(), open_files()
    grown = strategy.gather(np.array([[after[0] - before[0], after[1] - before[1]]]), axis=0).max(axis=0)
    fine = bool(grown[0] < 8 and grown[1] <= 0)
    if strategy.replica_id_in_sync_group == 0:
        print(
            f"soak: {arguments.steps} steps ({1e6 * per_step:.0f} us each) and {arguments.strategies} strategies on "
            f"{strategy.num_replicas_in_sync} ranks: memory grew by {grown[0]:.1f} MiB from {before[0]:.0f}, "
            f"files by {grown[1]:.0f}: {'fine' if fine else 'TOO MUCH'}"
        )
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
