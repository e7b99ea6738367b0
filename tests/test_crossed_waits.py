"""Ranks that use their strategies in another order wait for each other: found long before the timeout, and raised."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import launching
import pytest

pytestmark = pytest.mark.one_rank
Launch = Callable[..., launching.Finished]

PROGRAM = """
import sys, time
import numpy as np
from mpi4py import MPI
import mpistrategy as ms

what, rank = sys.argv[1], MPI.COMM_WORLD.rank
first = ms.MirroredStrategy()
pair = MPI.COMM_WORLD.Split(rank // 2)
second = ms.MirroredStrategy(communicator=pair if "pairs" in what else None)
odd = rank == 1
for strategy in (first, second):
    strategy.reduce("SUM", 1.0)


def small(strategy):
    return strategy.reduce("SUM", 1.0)


def large(strategy):
    return strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", np.ones(300_000)))


def test():
    if what == "another order":
        for strategy in (second, first) if odd else (first, second):
            small(strategy)
    elif what == "another order of large arrays":
        for strategy in (second, first) if odd else (first, second):
            large(strategy)
    elif what == "another order of pairs":
        for strategy in (second, first) if odd else (first, second):
            small(strategy)
    elif what == "one too many":
        if odd:
            ms.MirroredStrategy()
        small(first)
    elif what == "closed first":
        if odd:
            second.close()
        small(first)
        if not odd:
            second.close()


began = time.monotonic()
try:
    test()
    print(f"rank {rank} has heard nothing", flush=True)
except (ms.errors.CollectiveMismatchError, ms.errors.RemoteError) as error:
    print(f"rank {rank} after {time.monotonic() - began:.1f} s: {type(error).__name__}: {error}", flush=True)
"""


@pytest.mark.parametrize(
    "what",
    ["another order", "another order of large arrays", "another order of pairs", "one too many", "closed first"],
)
def test_ranks_that_wait_for_each_other_raise(launch: Launch, tmp_path: Path, what: str) -> None:
    path = launching.program(PROGRAM, tmp_path)
    job = launch(4 if "pairs" in what else 3, [path, what], timeout=60, cwd=tmp_path).check()
    assert "roll call" not in job.stderr, job
    # Of two pairs that use both strategies, the second has nothing to do with the mistake, but for the first strategy.
    told = dict(re.findall(r"rank (\d) after [\d.]+ s: (\w+)", job.stdout))
    assert set(told) >= {"0", "1", "2"}, job
    assert "CollectiveMismatchError" in told.values(), job
    assert "ranks wait for each other in different strategies, or in the making of one\n  rank 0: in #" in job.stdout
    assert re.search(
        r"\n  rank 1: in #\d+ (Strategy|ReplicaContext|MirroredStrategy)\S* .*program_\w+\.py:\d+", job.stdout
    )


SLOW = """
import sys, time
import mpistrategy as ms

first, second = ms.MirroredStrategy(), ms.MirroredStrategy()
rank = first.replica_id_in_sync_group
for number in range(3):
    for strategy in (first, second):
        if rank == number:
            end = time.monotonic() + 2.5  # the others wait, all in one strategy
            while time.monotonic() < end:
                pass
        strategy.reduce("SUM", 1.0)
"""


def test_ranks_that_are_late_wait_for_nobody(launch: Launch, tmp_path: Path) -> None:
    launch(3, [launching.program(SLOW, tmp_path)], timeout=90).check()
