"""Trainings in jobs of a Slurm that are interrupted, and the bits that they end with."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from slurm_user import ROOT, User

STEPS, SAVE_EVERY = 40, 5
#: Settings of slurm.conf that job scripts meet on clusters.
REQUEUED = {
    "SlurmdTimeout": 300,  # Slurm's default: MPI and srun give up long before
    "PreemptType": "preempt/partition_prio",
    "PreemptMode": "REQUEUE",
    "JobRequeue": 1,
}


def training() -> list[str]:
    """Return the arguments of preempted.py."""
    return f". --pause 0.05 --steps {STEPS} --save-every {SAVE_EVERY}".split()


def trains(user: User, file: str = "requeue.sbatch", *options: str) -> None:
    """Let a script run a training that writes down what it does."""
    shutil.copy(ROOT / "tests" / "jobs" / "preempted.py", user.folder)
    user.environment["PYTHONPATH"] += os.pathsep + str(ROOT / "tests" / "jobs")
    user.edit(file, "preempted.py", *training(), *options)


def ends_of(folder: Path) -> dict[str, bytes]:
    """Return what each rank has written at the end: every number of its state, to the last bit."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("end-*.txt"))}


def uninterrupted(user: User) -> dict[str, bytes]:
    """Return the ends of a training that nothing interrupts, on the same nodes."""
    trains(user)
    path = user.folder / "requeue.sbatch"
    path.write_text(path.read_text().replace("max_restarts=10 ", "max_restarts=0 "))
    done = user.run("requeue.sbatch")
    assert (done.state, done.status) == ("COMPLETED", 0), done.output
    ends = ends_of(user.folder)
    assert len(ends) == 4
    return ends
