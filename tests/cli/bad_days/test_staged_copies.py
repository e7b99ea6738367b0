"""What staged_env.sbatch leaves on the nodes' disks: nothing, unless Slurm kills it; and that, the next job removes.

On a real Slurm.  The environment is a stand-in: a python3 that starts the tests' own Python.
"""

from __future__ import annotations

import datetime
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from replicas import long_lane
from slurm_bed import SlurmBed
from slurm_scripts import script
from slurm_user import NEEDS_SLURM, User, started

pytestmark = [*NEEDS_SLURM, pytest.mark.one_rank]

NODES = ("node1", "node2")
#: Needs the copy to the end: it imports a module while it ends.
ENDS_BY_SIGTERM = """
import signal, sys, time

def save(number, frame):
    time.sleep(1)
    import copied
    print("saved", copied.__file__, flush=True)
    sys.exit(75)

signal.signal(signal.SIGTERM, save)
print("works", flush=True)
time.sleep(120)
"""
IGNORES_SIGTERM = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("works", flush=True)
time.sleep(float(os.environ.get("WORK", "120")))
"""


@pytest.fixture(scope="module")
def bed() -> Iterator[SlurmBed]:
    yield from started(nodes=2, cpus=4, gpus=0, changed={"KillWait": 4})


@pytest.fixture
def user(bed: SlurmBed, tmp_path: Path) -> User:
    user = User(bed, tmp_path)
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/bash\nPYTHONPATH=${{0%/bin/*}}:$PYTHONPATH exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "copied.py").touch()
    with tarfile.open(tmp_path / "environment.tar.gz", "w:gz") as archive:
        archive.add(python, "bin/python3")
        archive.add(tmp_path / "copied.py", "copied.py")
    (tmp_path / "copied.py").unlink()
    return user


def starts(user: User, program: str, nodes: int = 2, works: bool = True) -> str:
    """Submit a program; return its job, once all of its ranks work."""
    (user.folder / "program.py").write_text(program)
    statement = {"local": str(user.bed.local), "program": "program.py", "nodes": nodes, "mpi": "none"}
    statement |= {"tasks_per_node": 1}
    # Without MPI, each rank takes itself for the only one.
    text = script("staged_env", statement).replace(" -m mpistrategy run ", " ")
    (user.folder / "staged.sbatch").write_text(text)
    job = user.submit("staged.sbatch")
    output = user.output(job)
    if works:
        user.bed.until(lambda: output.exists() and output.read_text().count("works") == nodes, 60, "ranks", output)
        assert [len(left(user.bed, name)) for name in NODES[:nodes]] == [1] * nodes
    return job


def left(bed: SlurmBed, node: str) -> list[str]:
    """Return the copies that are on a node's disk."""
    done = bed.on(node, "ls", str(bed.local))
    assert done.returncode == 0, done
    return done.stdout.split()


def gone(user: User, job: str, *nodes: str, seconds: float = 30) -> None:
    user.bed.until(lambda: not any(left(user.bed, node) for node in nodes), seconds, "clean disk", user.output(job))


def ended(user: User, job: str, state: str) -> None:
    user.bed.until(lambda: user.bed.show(job)["JobState"] == state, 60, state, user.output(job))


def test_after_scancel_the_copy_stays_until_the_ranks_have_ended_and_is_removed(user: User) -> None:
    job = starts(user, ENDS_BY_SIGTERM)
    assert user.bed.run("scancel", job).returncode == 0
    gone(user, job, *NODES)
    ended(user, job, "CANCELLED")
    assert user.output(job).read_text().count(f"saved {user.bed.local}/mpistrategy-stage-{job}-") == 2


@long_lane
def test_at_the_time_limit_it_is_removed(user: User) -> None:
    job = starts(user, ENDS_BY_SIGTERM)
    soon = datetime.datetime.now() + datetime.timedelta(seconds=2)
    done = user.bed.run("scontrol", "update", f"jobid={job}", f"endtime={soon:%Y-%m-%dT%H:%M:%S}")
    assert done.returncode == 0, done
    gone(user, job, *NODES, seconds=90)
    ended(user, job, "TIMEOUT")


def test_what_a_killed_job_leaves_the_next_job_removes_and_no_copy_in_use(user: User) -> None:
    job = starts(user, IGNORES_SIGTERM, nodes=1)
    assert user.bed.run("scancel", job).returncode == 0
    ended(user, job, "CANCELLED")
    user.bed.until(lambda: not user.bed.run("squeue", "--noheader", "--states=all-active").stdout, 30, "end")
    [old] = left(user.bed, "node1")  # it was killed after KillWait
    user.environment["WORK"] = "3"
    (user.folder / "other").mkdir()
    other = starts(user, IGNORES_SIGTERM, nodes=1, works=False)
    user.says(other, "works")
    assert f"node1: removed {user.bed.local}/{old} of a killed job" in user.output(other).read_text()
    third = starts(user, "print('works', flush=True)", nodes=1, works=False)
    for each in (third, other):
        done = user.bed.wait(each, user.output(each))
        assert (done.state, "works" in done.output) == ("COMPLETED", True), done.output
    assert "removed" not in user.output(third).read_text()
    assert left(user.bed, "node1") == []


def test_a_lost_node_is_cleaned_by_the_next_job_once_it_is_back_and_the_others_at_once(user: User) -> None:
    user.environment["SBATCH_NO_REQUEUE"] = "1"
    job = starts(user, ENDS_BY_SIGTERM)
    user.bed.crash("node2")
    try:
        gone(user, job, "node1")
        ended(user, job, "NODE_FAIL")
    finally:
        user.bed.revive("node2")
    user.bed.until(user.bed.all_idle, 30, "node2")
    user.bed.until(user.bed.all_answer, 60, "a step on all nodes")
    [old] = left(user.bed, "node2")
    again = starts(user, "print('works', flush=True)", works=False)
    done = user.bed.wait(again, user.output(again))
    assert done.state == "COMPLETED", done.output
    assert f"node2: removed {user.bed.local}/{old} of a killed job" in done.output, done.output
    assert [left(user.bed, node) for node in NODES] == [[], []]
