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
if odd and "looks late" in what:
    from mpistrategy.mpi.watchdog import crossed_waits

    find, found = crossed_waits.find, []

    def find_late(*arguments):
        found.append(find(*arguments))
        return found[-1] if any(found[:-1]) else None  # what it finds first is not known to it yet

    crossed_waits.find = find_late


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
    elif "one too many" in what:
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
    if not error.rank and type(error) is ms.errors.CollectiveMismatchError:
        print(f"differ in {error.differ}: {error.calls[1].call} at {error.calls[1].site}", flush=True)
"""


@pytest.mark.parametrize(
    "what",
    [
        "another order",
        "another order of large arrays",
        "another order of pairs",
        "one too many",
        "one too many, rank 1 looks late",
        "closed first",
    ],
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
        r"differ in \('strategy',\): (Strategy|ReplicaContext|MirroredStrategy)\S* at .*:\d+", job.stdout
    ), job
    assert re.search(
        r"\n  rank 1: in #\d+ (Strategy|ReplicaContext|MirroredStrategy)\S* .*program_\w+\.py:\d+", job.stdout
    )


SLOW = """
import sys, time
import mpistrategy as ms

first, second = ms.MirroredStrategy(), ms.MirroredStrategy()
rank = first.replica_id_in_sync_group
for number in range(2):
    for strategy in (first, second):
        if rank == number and strategy is (first, second)[number % 2]:
            end = time.monotonic() + 2.5  # the others wait, all in one strategy
            while time.monotonic() < end:
                pass
        strategy.reduce("SUM", 1.0)
"""


THREADS = """
import threading, time
import numpy as np
import mpistrategy as ms

strategies = ms.MirroredStrategy(), ms.MirroredStrategy()
rank = strategies[0].replica_id_in_sync_group


def work(number):
    if number != rank:
        time.sleep(3.5)  # the other rank waits, in this strategy
    step = lambda: ms.get_replica_context().all_reduce("SUM", np.ones(4))
    print(strategies[number].run(step).tolist(), flush=True)


threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.slow
def test_threads_may_wait_in_any_order(launch: Launch, tmp_path: Path) -> None:
    job = launch(2, launching.program(THREADS, tmp_path), timeout=60).check()
    assert job.stdout.count("[2.0, 2.0, 2.0, 2.0]") == 4, job


BACKGROUND = """
import time
from mpi4py import MPI
import numpy as np
from mpistrategy.mpi.over_mpi import communicator

usual = communicator.MpiCommunicator.__init__
def on_nodes(self, comm=None, key=None, *arguments, **more):
    usual(self, comm, MPI.COMM_WORLD.rank // 2 if key is None else key, *arguments, **more)
communicator.MpiCommunicator.__init__ = on_nodes
import mpistrategy as ms

strategy = ms.MirroredStrategy()
rank = strategy.replica_id_in_sync_group


def step(is_slow):
    replica = ms.get_replica_context()
    if rank == 3 and is_slow:
        time.sleep(5)
    handle = replica.all_reduce_async("SUM", 1.0)
    if rank == 2 and is_slow:
        time.sleep(3)  # its background waits for rank 3; rank 0 waits for rank 2
    return replica.all_reduce("SUM", np.ones(4)).tolist(), float(handle.wait())


for is_slow in (True, False):
    print(strategy.run(step, args=(is_slow,)), flush=True)
"""


@pytest.mark.slow
@pytest.mark.each_mpi
def test_the_background_between_nodes_waits_beside_the_program(launch: Launch, tmp_path: Path) -> None:
    job = launch(4, launching.program(BACKGROUND, tmp_path), timeout=90).check()
    assert job.stdout.count("([4.0, 4.0, 4.0, 4.0], 4.0)") == 8, job


@pytest.mark.slow
def test_ranks_that_are_late_wait_for_nobody(launch: Launch, tmp_path: Path) -> None:
    launch(3, [launching.program(SLOW, tmp_path)], timeout=90).check()
