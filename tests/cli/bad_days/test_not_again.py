"""What a job does on a bad day: its program fails, memory is short, a node goes, a more urgent job comes.

On a real Slurm with the settings of real clusters: a node that is gone is missed after minutes, memory is bounded by
cgroups, an urgent job takes the nodes of another.  After each restart the values have the same bits as without one.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from preempted import runs_in
from slurm_bed import SlurmBed
from slurm_user import NEEDS_SLURM, ROOT, User, needs_srun, started, twice

pytestmark = [*NEEDS_SLURM, pytest.mark.one_rank, needs_srun]

needs_cgroups = pytest.mark.skipif(
    not os.access("/sys/fs/cgroup/memory", os.W_OK), reason="not run: no cgroups of version 1 on this machine"
)
REQUEUED = {
    "SlurmdTimeout": 300,  # Slurm's default: MPI and srun give up long before
    "PreemptType": "preempt/partition_prio",
    "PreemptMode": "REQUEUE",
    "JobRequeue": 1,
}


@pytest.fixture(scope="module")
def bed() -> Iterator[SlurmBed]:
    yield from started(nodes=2, cpus=4, gpus=0, changed=REQUEUED, grace=4)


@pytest.fixture
def user(bed: SlurmBed, tmp_path: Path) -> User:
    return User(bed, tmp_path)


def trains(user: User, file: str = "requeue.sbatch", steps: int = 40) -> None:
    """Let a script run a training that writes down what it does."""
    shutil.copy(ROOT / "tests" / "jobs" / "preempted.py", user.folder)
    user.environment["PYTHONPATH"] += os.pathsep + str(ROOT / "tests" / "jobs")
    user.edit(file, *f"preempted.py . --pause 0.05 --steps {steps} --save-every 5".split())


def has(user: User, job: str, key: str, value: str, seconds: float = 60) -> None:
    user.bed.until(lambda: user.bed.show(job).get(key) == value, seconds, f"{key}={value}", user.output(job))


FAILS = {
    "an exception of one rank": ("raise ValueError('of this rank')", "failed with ValueError on rank 1: of this rank"),
    "a status": ("sys.exit(3)", "failed with status 3 on rank 1"),
    "a signal of its own fault": ("os.kill(os.getpid(), signal.SIGSEGV)", "Segmentation fault"),
}


@twice
def test_a_program_that_fails_is_not_tried_again(user: User) -> None:
    for text, why in FAILS.values():
        (user.folder / "fails.py").write_text(
            "import os, signal, sys\nimport mpistrategy as ms\n"
            "strategy = ms.MirroredStrategy()\nstrategy.barrier('a')\n"
            f"if strategy.replica_id_in_sync_group == 1:\n    {text}\nstrategy.barrier('b')\n"
        )
        user.edit("requeue.sbatch", "fails.py")
        done = user.run("requeue.sbatch")
        assert done.state == "FAILED", done.output
        assert re.search(f"the program (was ended: .*)?{why}; not requeued", done.output), done.output


@twice
def test_a_node_is_gone_for_a_while_before_slurm_misses_it(user: User) -> None:
    """The ranks that are left wait for those of the node, in vain, until MPI or the library ends them."""
    user.environment["MPISTRATEGY_TIMEOUT_SECONDS"] = "5"
    trains(user)
    job = user.submit("requeue.sbatch")
    user.made(7)
    user.bed.cut("node2")
    try:
        user.says(job, "Terminating StepId")
    finally:
        user.bed.run("scontrol", "update", "nodename=node2", "state=down", "reason=crashed")
        user.bed.revive("node2")
    done = user.bed.wait(job, user.output(job))
    assert (done.state, done.status) == ("COMPLETED", 0), done.output
    assert re.search("restart [12] of 10", done.output), done.output  # MPICH and Slurm may misunderstand each other
    runs = runs_in(user.folder)
    assert (runs[-1].begun in (runs[0].saved, runs[0].made // 5 * 5), runs[-1].made) == (True, 40)


def test_a_more_urgent_job_takes_the_nodes_of_a_program_that_saves(user: User) -> None:
    _gives_way(user, handles=True)


def test_a_more_urgent_job_takes_the_nodes_of_a_program_that_knows_no_signals(user: User) -> None:
    _gives_way(user, handles=False)


def _gives_way(user: User, handles: bool) -> None:
    """With a grace time the ranks are sent SIGTERM first; a program that knows nothing of it is ended by it."""
    if handles:
        trains(user)
    else:
        (user.folder / "deaf.py").write_text(
            "import time, mpistrategy as ms\ns = ms.MirroredStrategy()\nprint('works', flush=True)\n"
            "time.sleep(3 if __import__('os').environ.get('SLURM_RESTART_COUNT') else 60)\n"
        )
        user.edit("requeue.sbatch", "deaf.py")
    job = user.submit("requeue.sbatch")
    user.made(7) if handles else user.says(job, "works")
    urgent = user.bed.run(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--wrap", "true", cwd=user.folder,
        env=user.environment,
    )  # fmt: skip
    has(user, urgent.stdout.strip(), "JobState", "COMPLETED")
    done = user.bed.wait(job, user.output(job), 120)
    assert (done.state, done.status) == ("COMPLETED", 0), done.output
    assert re.search("restart [12] of 10", done.output)
    if handles:
        assert len(runs_in(user.folder)) >= 2
        assert runs_in(user.folder)[-1].made == 40


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


@twice
def test_a_chain_has_one_successor_after_the_loss_of_a_node(user: User) -> None:
    trains(user, "chain.sbatch")
    first = user.submit("chain.sbatch")
    user.made(7)
    user.bed.crash("node2")
    try:
        has(user, first, "JobState", "NODE_FAIL")
    finally:
        user.bed.revive("node2")
    job, links = first, []
    while not links or links[-1].state == "FAILED":  # a node that has just come back may not start a step at first
        found = re.findall(r"job (\d+) goes on after it", user.output(job).read_text())
        assert len(found) == 1
        job = found[0]
        links.append(user.bed.wait(job, user.output(job), 120))
    assert (links[-1].state, links[-1].status) == ("COMPLETED", 0), links
    assert runs_in(user.folder)[-1].made == 40
    names = user.bed.run("squeue", "--noheader", "--states=PENDING,RUNNING", "--format=%i").stdout.split()
    assert names == [], names
