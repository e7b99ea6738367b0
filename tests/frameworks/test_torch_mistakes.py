"""Mistakes of one rank under DDP over MPI: each ends the job with an error that names it, and none hangs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import launching
import pytest
from mpi4py import MPI

import mpistrategy as ms

torch: Any = pytest.importorskip("torch")
dist: Any = pytest.importorskip("torch.distributed")
mst: Any = pytest.importorskip("mpistrategy.torch")
pytestmark = pytest.mark.each_mpi

PROGRAM = """
import os, signal, sys, torch, torch.distributed as dist
from datetime import timedelta
import mpistrategy as ms, mpistrategy.torch as mst

{start}
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))

def backward():
    model(torch.ones(2, 3)).sum().backward()

backward(); backward()  # the first pass finds the order of the buckets
if rank == 1:
    {mistake}
backward()  # of the last batch
dist.barrier()
"""
START = "mst.init_process_group()"
AFTER_A_STRATEGY = "mst.init_process_group(ms.MirroredStrategy())"
CONTAINED = "mst.init_process_group(ms.MirroredStrategy(on_error='raise'))"
#: A batch whose data have moved when the memory ends; the program skips it.
NO_MEMORY = """
    def no_memory(*_): return [0] * 2**62
    sys.modules["mpistrategy.torch.tensors"].write = no_memory
    try: backward()
    except MemoryError: print("skipped", flush=True)
"""
BARE = 'dist.init_process_group("mpistrategy")'
#: What rank 1 does, how the group is made, and what the job says.
MISTAKES = {
    "an early exit": ("sys.exit()", START, ["RankLeftError", "rank 1", "left"]),
    "no memory after the data": (NO_MEMORY, AFTER_A_STRATEGY, ["[rank 1/2]", "in no_memory", "MemoryError"]),
    "no memory after the data, contained": (
        NO_MEMORY,
        CONTAINED,
        ["RemoteError: rank 1 failed in torch.distributed.all_reduce: MemoryError"],
    ),
    "no init_method": ("pass", BARE, ["RANK expected", 'For the backend "mpistrategy" write', "init_method="]),
    # long enough for a busy machine's own delays
    "a stopped rank": (
        "os.kill(os.getpid(), signal.SIGSTOP)",
        "mst.init_process_group(timeout=8)",
        ["roll call", "rank 1", "stopped", "timeout_seconds=8"],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_it_ends_the_job_and_is_named(launch: Callable[..., launching.Finished], name: str) -> None:
    mistake, start, said = MISTAKES[name]
    job = launch(2, PROGRAM.format(start=start, mistake=mistake), timeout=60)
    assert job.returncode, job
    for words in said:
        assert words in job.stderr, job


def in_a_call() -> None:
    mst.init_process_group(timeout=0.3)


def by_address() -> None:
    dist.init_process_group("mpistrategy", init_method="mpistrategy://", timeout=timedelta(milliseconds=300))


def by_a_store(ranks: int = MPI.COMM_WORLD.size) -> None:
    """As with RANK and others in the environment, where torch makes the store."""
    options = {"store": dist.HashStore(), "rank": MPI.COMM_WORLD.rank, "world_size": ranks}
    dist.init_process_group("mpistrategy", timeout=timedelta(milliseconds=300), **options)


def of_a_new_group() -> Any:
    mst.init_process_group()
    return dist.new_group(timeout=timedelta(milliseconds=300))


def set_later() -> Any:
    mst.init_process_group()
    group = dist.new_group()
    group.set_timeout(timedelta(milliseconds=300))
    return group


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("make", [in_a_call, by_address, by_a_store, of_a_new_group, set_later])
def test_each_way_to_say_how_long_calls_wait(make: Callable[[], Any]) -> None:
    """One after the other: the default group is made and destroyed again and again."""
    group, rank, ranks = make(), dist.get_rank(), dist.get_world_size()
    before = (rank - 1) % ranks
    with pytest.raises(ms.errors.CollectiveTimeoutError, match=rf"no message .* rank {before} for 0.3 s"):
        dist.recv(torch.empty(2), before, group)
    MPI.COMM_WORLD.Barrier()
    dist.send(torch.empty(2), (rank + 1) % ranks, group)  # MPI still has a receive for it
    MPI.COMM_WORLD.Barrier()
    dist.destroy_process_group()


def test_ranks_of_another_launcher_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ms.errors.LaunchError, match=r"WORLD_SIZE.*init_method="):
        by_a_store(MPI.COMM_WORLD.size + 1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # as torchrun does
    assert dist.is_torchelastic_launched()
    for make in (in_a_call, by_address, by_a_store):
        with pytest.raises(ms.errors.LaunchError, match=r"mpiexec -n 4 python program\.py"):
            make()
