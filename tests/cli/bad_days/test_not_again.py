"""What a program does itself ends a job for good: it is not tried again, and the job says why.

On a real Slurm with settings of real clusters.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from replicas import long_lane
from slurm_bed import SlurmBed
from slurm_scripts import script
from slurm_trainings import REQUEUED
from slurm_user import NEEDS_SLURM, ROOT, User, needs_srun, started, twice

pytestmark = [*NEEDS_SLURM, pytest.mark.one_rank, needs_srun]

needs_cgroups = pytest.mark.skipif(
    not os.access("/sys/fs/cgroup/memory", os.W_OK), reason="not run: no cgroups of version 1 on this machine"
)


@pytest.fixture(scope="module")
def bed() -> Iterator[SlurmBed]:
    yield from started(nodes=2, cpus=4, gpus=0, changed=REQUEUED, grace=4)


FAILS = {
    "an exception of one rank": ("raise ValueError('of this rank')", "failed with ValueError on rank 1: of this rank"),
    "a status": ("sys.exit(3)", "failed with status 3 on rank 1"),
    "a signal of its own fault": ("os.kill(os.getpid(), signal.SIGSEGV)", "Segmentation fault"),
}


@twice
def test_a_program_that_fails_is_not_tried_again(user: User) -> None:
    jobs = {}
    for number, (text, why) in enumerate(FAILS.values()):
        (user.folder / f"fails{number}.py").write_text(
            "import os, signal, sys\nimport mpistrategy as ms\n"
            "strategy = ms.MirroredStrategy()\nstrategy.barrier('a')\n"
            f"if strategy.replica_id_in_sync_group == 1:\n    {text}\nstrategy.barrier('b')\n"
        )
        user.edit("requeue.sbatch", f"fails{number}.py")
        jobs[user.submit("requeue.sbatch")] = why
    for job, why in jobs.items():
        done = user.bed.wait(job, user.output(job))
        assert done.state == "FAILED", done.output
        assert re.search(f"the program (was ended: .*)?{why}; not requeued", done.output), done.output


#: Saves once while there is room, and once more.
SAVES = """
import errno, os, sys
import numpy as np, mpistrategy as ms
from checkpoints import watched

def over_quota(what, name):
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

strategy = ms.MirroredStrategy()
with strategy.scope():
    x = ms.Variable(np.zeros(10**5))
manager = ms.CheckpointManager(ms.Checkpoint(x=x), sys.argv[1])
manager.save(1)
with watched(over_quota if sys.argv[2] == "quota" and strategy.rank == 0 else lambda what, name: None):
    manager.save(2)
"""


@pytest.mark.parametrize(
    ("what", "why"),
    [("space", "No space left on device"), pytest.param("quota", "Disk quota exceeded", marks=long_lane)],
)
@twice
def test_a_full_disk_is_not_tried_again(user: User, what: str, why: str) -> None:
    """A file system that is full; and, in the place of a quota, the error of one at the first change to the files."""
    folder = user.folder / "small"
    folder.mkdir()
    (user.folder / "saves.py").write_text(SAVES)
    user.environment["PYTHONPATH"] += os.pathsep + str(ROOT / "tests" / "jobs")
    keys = {"nodes": 1, "tasks_per_node": 2, "program": "saves.py", "arguments": [f"{folder}/run", what]}
    (user.folder / "full.sbatch").write_text(script("requeue", keys))
    if what == "space":
        for node in ("node1", "node2"):
            assert user.bed.on(node, "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)).returncode == 0
    done = user.run("full.sbatch")
    assert done.state == "FAILED", done.output
    told = rf"the program failed with CheckpointWriteError on rank [01]: .*{why}.*; not requeued"
    assert re.search(told, done.output), done.output


@needs_cgroups
def test_too_little_memory_is_not_tried_again(tmp_path: Path) -> None:
    bounds = {
        "ProctrackType": "proctrack/cgroup", "TaskPlugin": "task/cgroup", "SelectTypeParameters": "CR_Core_Memory",
        "DefMemPerCPU": 150,
    }  # fmt: skip
    for bed in started(nodes=2, cpus=4, gpus=0, changed=bounds, cgroups="ConstrainRAMSpace=yes"):
        user = User(bed, tmp_path)
        (tmp_path / "large.py").write_text(
            "import numpy as np, mpistrategy as ms\ns = ms.MirroredStrategy()\n"
            "x = np.ones(10**8 if s.replica_id_in_sync_group == 1 else 1)\ns.barrier('end')\n"
        )
        user.edit("requeue.sbatch", "large.py")
        done = user.run("requeue.sbatch")
        assert done.state in ("FAILED", "OUT_OF_MEMORY"), done.output
        assert re.search(
            r"the program was ended: srun: error: node1: tasks? \S+: Out Of Memory; not requeued", done.output
        ), done.output
