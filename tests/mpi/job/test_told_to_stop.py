"""A rank that the handler of a signal interrupts in a call: no rank waits for it."""

from __future__ import annotations

import re
from pathlib import Path

import launching
import pytest

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
strategy = ms.MirroredStrategy(on_error="raise" if "raise" in how else "abort")
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
    print(f"rank {rank} goes on", flush=True)
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
except ms.errors.RemoteError as error:
    print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
"""


@pytest.mark.parametrize(
    ("how", "status"), [("all_reduce exit nodes", 1), ("gather caught nodes", 130), ("caught", 130)]
)
def test_a_job_ends_though_the_program_catches_it(
    launch: launching.Launch, tmp_path: Path, how: str, status: int
) -> None:
    """The others would wait for it, or compute on for a call that never comes to its end."""
    job = launch(2, [launching.program(PROGRAM + ALL, tmp_path), how], timeout=60)
    assert job.returncode == status, job
    assert re.search(r"\[rank 0/2\] (SystemExit|KeyboardInterrupt)", job.stderr), job
    assert "the whole job ends here" in job.stderr, job
    assert "rank 0 goes on" not in job.stdout, job
    assert not list(tmp_path.glob("mpistrategy-run-*")), job


@pytest.mark.parametrize("how", ["all_reduce raise nodes", "all_reduce raise"])
def test_where_errors_are_contained_the_others_raise(launch: launching.Launch, tmp_path: Path, how: str) -> None:
    job = launch(3, [launching.program(PROGRAM + ONE, tmp_path), how], timeout=60).check()
    heard = re.findall(r"rank (\d): RemoteError: rank 0 failed in .*all_reduce: KeyboardInterrupt", job.stdout)
    assert sorted(heard) == ["1", "2"], job
    assert "rank 0 was interrupted" in job.stdout, job


ENDS = """
import signal, sys
from mpi4py import MPI
import mpistrategy as ms

def told(*_):
    sys.exit(3)

if MPI.COMM_WORLD.rank == 0:
    signal.signal(signal.SIGALRM, told)
if sys.argv[1] == "at the end":
    strategy = ms.MirroredStrategy()
    if MPI.COMM_WORLD.rank == 0:
        signal.alarm(1)
        sys.exit()
elif MPI.COMM_WORLD.rank == 0:
    signal.alarm(1)
    ms.MirroredStrategy()
signal.pause()  # the others never make it, or never end
"""


@pytest.mark.parametrize("when", ["while a strategy is made", "at the end"])
def test_a_rank_ends_where_it_waits_for_the_others(launch: launching.Launch, tmp_path: Path, when: str) -> None:
    """No other rank can hear of it: the job ends."""
    job = launch(2, [launching.program(ENDS, tmp_path), when], timeout=30)
    assert job.returncode == 3, job
    assert ("stopped while it waited" if when == "at the end" else "the whole job ends here") in job.stderr, job
