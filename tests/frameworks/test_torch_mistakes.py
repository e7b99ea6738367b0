"""Mistakes of one rank under DDP over MPI: each ends the job with an error that names it, and none hangs."""

from __future__ import annotations

from collections.abc import Callable

import launching
import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.each_mpi

PROGRAM = """
import os, signal, sys, torch, torch.distributed as dist
import mpistrategy.torch as mst

{start}
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))

def backward():
    model(torch.ones(2, 3)).sum().backward()

backward()
if rank == 1:
    {mistake}
backward()  # of the third batch
dist.barrier()
"""
START = "mst.init_process_group()"
AFTER_A_STRATEGY = "import mpistrategy as ms; mst.init_process_group(ms.MirroredStrategy())"
LATE = {"MPISTRATEGY_TIMEOUT_SECONDS": "2"}
#: What rank 1 does, how the group is made, and what the job says.
MISTAKES = {
    "a batch is skipped": (
        "dist.barrier(); sys.exit()",
        START,
        ["CollectiveMismatchError", "torch.distributed.barrier", ".py:10", ".py:14"],
    ),
    "another loss": (
        "dist.all_reduce(torch.ones(()))",
        START,
        ["CollectiveMismatchError", "values=float32[1]", ".py:10", ".py:14"],
    ),
    "an early exit": ("sys.exit()", START, ["RankLeftError", "rank 1", "left"]),
    "an exception": ("raise ValueError('my own')", START, ["[rank 1/3]", "in <module>", "ValueError: my own"]),
    "an exception, with a strategy": (
        "raise ValueError('my own')",
        AFTER_A_STRATEGY,
        ["[rank 1/3]", "in <module>", "ValueError: my own"],
    ),
    "a stopped rank": ("os.kill(os.getpid(), signal.SIGSTOP)", START, ["roll call", "rank 1", "stopped"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_it_ends_the_job_and_is_named(launch: Callable[..., launching.Finished], name: str) -> None:
    mistake, start, said = MISTAKES[name]
    job = launch(3, PROGRAM.format(start=start, mistake=mistake), timeout=40, env=LATE)
    assert job.returncode, job
    for words in said:
        assert words in job.stderr, job
