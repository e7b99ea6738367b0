"""Ranks that are told to stop and end with status 0: no rank waits for one that was interrupted in a call."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import launching
import pytest

Launch = Callable[..., launching.Finished]
pytestmark = [pytest.mark.each_mpi, pytest.mark.one_rank]

#: `told` is called in a thread of rank 0 once that is in a call, in which it waits for the others.
PROGRAM = """
import os, signal, sys, threading, time
import numpy as np
from mpi4py import MPI
import mpistrategy as ms

world, how = MPI.COMM_WORLD, sys.argv[1]
if "nodes" in how:  # each rank on a node of its own
    from mpistrategy.mpi.over_mpi import ranks as communicator
    usual = communicator.MpiRanks.__init__
    def on_nodes(self, comm=None, key=None, *arguments, **more):
        usual(self, comm, world.rank if key is None else key, *arguments, **more)
    communicator.MpiRanks.__init__ = on_nodes
told_to_go, tell_to_go = os.pipe()  # an Event would stop for good where its lock is held when the signal comes
signal.signal(signal.SIGUSR1, lambda *_: os.write(tell_to_go, b"."))
strategy = ms.MirroredStrategy()
rank, pids, guard = world.rank, world.allgather(os.getpid()), strategy.extended.communicator.guard


def step():  # two numbers travel with the check; ranks that wait in MPI for more cannot leave, and end the job
    ctx = ms.get_replica_context()
    return ctx.all_gather(np.ones(2), 0) if "gather" in how else ctx.all_reduce("SUM", np.ones(2))


def stop(*_):
    if "exit" in how:
        sys.exit(0)
    raise KeyboardInterrupt


def watch_rank_0():
    while not (guard.current and (guard.agreed or "nodes" not in how)):
        pass
    signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
    told()


signal.signal(signal.SIGTERM, stop)
for _ in range(10):
    strategy.run(step)
"""

ALL = """
def told():
    for pid in pids[1:]:
        os.kill(pid, signal.SIGTERM)


try:
    world.Barrier()
    if rank == 0:
        threading.Thread(target=watch_rank_0, daemon=True).start()
        strategy.run(step)
    while True:
        time.sleep(60)  # computes; the others never come to that call
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""

ONE = """
def told():
    for pid in pids[1:]:
        os.kill(pid, signal.SIGUSR1)


try:
    world.Barrier()
    if rank == 0:
        threading.Thread(target=watch_rank_0, daemon=True).start()
    else:
        os.read(told_to_go, 1)
    while True:
        strategy.run(step)
except KeyboardInterrupt:
    print("rank 0 was interrupted", flush=True)
    while "goes on" in how:
        time.sleep(60)
except ms.errors.RemoteError as error:
    print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
"""


@pytest.mark.parametrize("how", ["all_reduce exit nodes", "gather caught nodes", "all_reduce caught"])
def test_all_ranks_are_told_while_one_is_in_a_call(launch: Launch, tmp_path: Path, how: str) -> None:
    path = launching.program(PROGRAM + ALL, tmp_path)
    job = launch(2, [path, how], timeout=60).check()
    assert job.stdout.count("interrupted") == (2 if "caught" in how else 0), job
    assert not list(tmp_path.glob("mpistrategy-run-*")), job


@pytest.mark.parametrize("how", ["all_reduce exit nodes", "all_reduce caught"])
def test_one_rank_is_told_and_the_others_raise(launch: Launch, tmp_path: Path, how: str) -> None:
    path = launching.program(PROGRAM + ONE, tmp_path)
    job = launch(3, [path, how], timeout=60).check()
    heard = re.findall(
        r"rank (\d): (?:RemoteError: rank 0 failed in .*all_reduce: |RankLeftError: .*rank 0 left)", job.stdout
    )
    assert sorted(heard) == ["1", "2"], job


def test_one_rank_is_told_and_goes_on_with_its_program(launch: Launch, tmp_path: Path) -> None:
    """Nobody waits for the timeout of ten minutes: the others, on other nodes, end the job."""
    path = launching.program(PROGRAM + ONE, tmp_path)
    job = launch(3, [path, "all_reduce caught goes on nodes"], timeout=60)
    assert job.returncode == 1, job
    assert re.search(
        r"\[rank [12]/3\] in #\d+ ReplicaContext.all_reduce .*\n"
        r"\[rank [12]/3\] waits in vain: rank 0 failed in ReplicaContext.all_reduce: KeyboardInterrupt",
        job.stderr,
    ), job


ENDS = """
import signal, sys
from mpi4py import MPI
import mpistrategy as ms

def told(*_):
    sys.exit(3)

if MPI.COMM_WORLD.rank == 0:
    signal.signal(signal.SIGALRM, told)
    signal.alarm(1)
    ms.MirroredStrategy()
signal.pause()  # the others never make it
"""


def test_a_rank_ends_while_a_strategy_is_made(launch: Launch, tmp_path: Path) -> None:
    """No other rank can hear of it: the job ends."""
    job = launch(2, [launching.program(ENDS, tmp_path)], timeout=30)
    assert job.returncode == 3, job
    assert "the whole job ends here" in job.stderr, job
