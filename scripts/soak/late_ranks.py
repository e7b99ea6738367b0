"""Makes collectives for a long time, some ranks late by less than the timeout, and shows that no alarm is raised.

    scripts/mpirun -n 3 scripts/soak late_ranks [--seconds 600] [--timeout 5]

An alarm ends the job with status 124. Work that takes longer than the timeout is done inside `expect_long`, in
initial values and in input pipelines, all of which are no reason for an alarm.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Iterator

import numpy as np

import mpistrategy as ms


def busy(seconds: float) -> None:
    """Work for a time: half of it in Python, half of it waiting for something else than the other ranks."""
    end = time.monotonic() + seconds / 2
    while time.monotonic() < end:
        pass
    time.sleep(seconds / 2)


def main() -> int:
    """Run the soak; return 0 when the time is over and every sum was right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="how long; default: %(default)s")
    parser.add_argument("--timeout", type=float, default=5, help="seconds until an alarm; default: %(default)s")
    options = parser.parse_args()
    seconds, timeout = options.seconds, options.timeout
    os.environ["MPISTRATEGY_TIMEOUT_SECONDS"] = str(timeout)

    strategy = ms.MirroredStrategy()
    ranks, rank = strategy.num_replicas_in_sync, strategy.extended.communicator.rank
    arena = strategy.arena([np.zeros(3000), np.zeros((40, 50), np.float32)])
    rounds = random.Random(7)  # the same on all ranks
    longest, calls, began = 0.0, 0, time.monotonic()

    def reduced(value: object) -> object:
        nonlocal longest, calls
        start = time.monotonic()
        result = ms.get_replica_context().all_reduce("SUM", value)
        longest, calls = max(longest, time.monotonic() - start), calls + 1
        return result

    def rows(context: ms.InputContext) -> Iterator[np.ndarray]:
        busy(1.2 * timeout)
        yield np.ones(context.num_input_pipelines)

    while strategy.run(lambda: reduced(float(time.monotonic() - began > seconds))) == 0:
        kind, late, extra = rounds.randrange(100), rounds.randrange(ranks), rounds.random()
        if kind == 0 and rank == late:
            busy(0.8 * timeout * extra)
        elif kind == 1 and rank == late:
            with strategy.expect_long(3 * timeout):
                busy(timeout * (1 + extra))
        elif kind == 2 and extra < 0.3:
            with strategy.scope():
                ms.Variable(lambda: (busy(1.2 * timeout), np.zeros(2))[1])
            assert len(list(strategy.distribute_datasets_from_function(rows))) == 1
        elif kind == 3:
            with ms.MirroredStrategy() as other:
                assert other.reduce("SUM", 1.0) == ranks
        for _ in range(200):
            size = rounds.choice([1, 7, 1000, 20_000, 300_000])
            assert np.all(strategy.run(reduced, (np.ones(size),)) == ranks)
        for value in arena.values:
            value[...] = 1
        assert all(np.all(value == ranks) for value in strategy.run(reduced, (arena,)))
    if rank == 0:
        print(
            f"no alarm in {time.monotonic() - began:.0f} s with a timeout of {timeout:g} s: {calls} all-reduces on "
            f"{ranks} ranks, the longest waited {longest:.1f} s"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
