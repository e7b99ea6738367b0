"""Kills jobs at random moments, whole or one rank of them, while they make arenas, sum and save checkpoints.

Nothing of theirs stays in /dev/shm, and the newest checkpoint that they had saved, or a newer one, is restored whole:
the next job goes on from there.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import launching
import numpy as np

import mpistrategy as ms

PROGRAM = """
import sys
import numpy as np
import mpistrategy as ms
from mpistrategy.checkpoint import saving

saving.BYTES_A_WRITER = 1  # each rank writes a part
strategy = ms.MirroredStrategy()
with strategy.scope():
    x = ms.Variable(np.zeros(2000))
    manager = ms.CheckpointManager(ms.Checkpoint(x=x), sys.argv[1])
step = manager.restore() or 0
print("begun", flush=True)
while True:
    step += 1
    x.assign(np.full(2000, float(step)))
    saving = manager.save(step, wait=False)
    arena = strategy.arena([np.zeros(2**18 * (1 + step % 16))])
    for _ in range(10):
        strategy.reduce("SUM", arena)
    arena.close()
    saving.wait()
    print("saved", step, flush=True)
"""


def killed(number: int, folder: Path, dice: random.Random) -> int:
    """Start a job, kill it at a random moment; return the last step that it had saved, or 0."""
    mark, printed = f"kills-{os.getpid()}-{number}", folder / f"printed-{number}"
    with (
        tempfile.TemporaryDirectory(prefix="mpiexec-", ignore_cleanup_errors=True) as mpiexec,
        printed.open("w") as out,
    ):
        job = subprocess.Popen(
            [*launching._mpiexec(), "-n", "2", sys.executable, str(folder / "program.py"), str(folder / "saved")],
            env={**launching.environment(), **launching.files_in(mpiexec), launching.JOB_MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        while "begun" not in printed.read_text() and job.poll() is None and dice.random() < 0.998:  # or before
            time.sleep(0.01)
        time.sleep(dice.random() * 1.5)
        victims = launching._marked(mark)
        if dice.random() < 0.5 and victims:
            victims = [dice.choice(victims)]  # the launcher ends the others
        for victim in victims:
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            job.wait(5)
        launching._kill(job, mark)
        job.wait()
    return max(map(int, re.findall(r"^saved (\d+)$", printed.read_text(), re.MULTILINE)), default=0)


def restored(folder: Path) -> int:
    """Return the step that is restored here, or 0."""
    with ms.OneDeviceStrategy("CPU:0").scope():
        x = ms.Variable(np.zeros(2000))
        step = ms.CheckpointManager(ms.Checkpoint(x=x), folder).restore() or 0
    assert {*x.numpy()} == {float(step)}, "torn"
    return step


def soak(options: argparse.Namespace) -> bool:
    """Kill jobs; return whether something is wrong."""
    dice, bad, step = random.Random(options.seed), list[str](), 0
    before = {*Path("/dev/shm").glob("mpistrategy*")}
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        (folder / "program.py").write_text(PROGRAM)
        for number in range(options.count):
            saved = max(step, killed(number, folder, dice))
            step = restored(folder / "saved")
            if step < saved:
                bad.append(f"job {number}: step {step} was restored, and {saved} had been saved")
            leftovers = {*Path("/dev/shm").glob("mpistrategy*")} - before
            bad += [f"job {number}: {path} is left" for path in leftovers]
            before |= leftovers
    bad += ["no job has saved anything: none has run"] * (options.count >= 20 and not step)
    print(f"{options.count} kills of jobs: the last one had come to step {step}; wrong: {len(bad)}", *bad, sep="\n")
    return bool(bad)
