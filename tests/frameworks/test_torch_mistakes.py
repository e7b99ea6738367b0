"""Mistakes of one rank under DDP over MPI: each ends the job with an error that names it, and none hangs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import launching
import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.each_mpi

PROGRAM = """
import os, signal, sys, torch, torch.distributed as dist
from datetime import timedelta
import mpistrategy as ms, mpistrategy.torch as mst

group = None
{start}
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1), process_group=group)

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
STOPS = "os.kill(os.getpid(), signal.SIGSTOP)"
#: The ways to say how long calls wait; long enough for a busy machine's own delays.
TIMEOUTS = {
    "init": "mst.init_process_group(timeout=8)",
    "address": "dist.init_process_group('mpistrategy', init_method='mpistrategy://', timeout=timedelta(seconds=8))",
    "new_group": "mst.init_process_group(); group = dist.new_group(timeout=timedelta(seconds=8))",
    "set_timeout": "mst.init_process_group(); group = dist.new_group(); group.set_timeout(timedelta(seconds=8))",
}
#: What rank 1 does, how the group is made, and what the job says.
MISTAKES = {
    "a batch is skipped": (
        "dist.barrier(); sys.exit()",
        START,
        ["CollectiveMismatchError", "torch.distributed.barrier", ".py:12", ".py:16"],
    ),
    "another loss": (
        "dist.all_reduce(torch.ones(()))",
        START,
        ["CollectiveMismatchError", "values=float32[1]", ".py:12", ".py:16"],
    ),
    "an early exit": ("sys.exit()", START, ["RankLeftError", "rank 1", "left"]),
    "an exception": ("raise ValueError('my own')", START, ["[rank 1/3]", "in <module>", "ValueError: my own"]),
    "an exception, with a strategy": (
        "raise ValueError('my own')",
        AFTER_A_STRATEGY,
        ["[rank 1/3]", "in <module>", "ValueError: my own"],
    ),
    "no memory after the data": (NO_MEMORY, START, ["[rank 1/3]", "in no_memory", "MemoryError"]),
    "no memory after the data, contained": (
        NO_MEMORY,
        CONTAINED,
        ["RemoteError: rank 1 failed in torch.distributed.all_reduce: MemoryError"],
    ),
    **{f"a stopped rank, {way}": (STOPS, TIMEOUTS[way], ["roll call", "rank 1", "stopped"]) for way in TIMEOUTS},
}


@pytest.mark.parametrize("name", MISTAKES)
def test_it_ends_the_job_and_is_named(launch: Callable[..., launching.Finished], name: str) -> None:
    mistake, start, said = MISTAKES[name]
    job = launch(3, PROGRAM.format(start=start, mistake=mistake), timeout=60)
    assert job.returncode, job
    for words in said:
        assert words in job.stderr, job


STOPS_BEFORE_A_BARRIER = """
import os, signal
from datetime import timedelta
import torch.distributed as dist, mpistrategy.torch as mst

mst.init_process_group()
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
dist.monitored_barrier(timeout=timedelta(seconds=8))
"""


def test_a_monitored_barrier_names_who_is_late_after_its_own_timeout(
    launch: Callable[..., launching.Finished],
) -> None:
    torch = pytest.importorskip("torch")
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14):
        pytest.skip("this torch takes it for gloo alone")
    job = launch(3, STOPS_BEFORE_A_BARRIER, timeout=60)
    assert job.returncode, job
    for words in ("roll call", "rank 1", "stopped", "timeout_seconds=8"):
        assert words in job.stderr, job


BY_URL = """
import torch, torch.distributed as dist
import mpistrategy.torch as mst

for _ in range(2):
    dist.init_process_group("mpistrategy", init_method="mpistrategy://")
    mine = torch.ones(1)
    dist.all_reduce(mine)
    dist.destroy_process_group()
if mine.item() == 3:
    print("right", flush=True)
"""


def test_a_group_is_made_by_its_address_again_and_again(launch: Callable[..., launching.Finished]) -> None:
    assert launch(3, BY_URL, timeout=60).check().stdout.split() == ["right"] * 3


@pytest.mark.slow
@pytest.mark.one_rank
def test_torchrun_is_refused_in_words(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import mpistrategy.torch as mst\nmst.init_process_group()\n", encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(program)]
    env = launching.environment()  # without that of this session's own launcher
    job = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert job.returncode
    assert "LaunchError" in job.stderr
    assert "mpiexec -n 4 python program.py" in job.stderr
