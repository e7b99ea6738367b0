"""Kills jobs at random moments, a quarter of them while segments are made, and looks for what they leave in /dev/shm.

    python scripts/soak kills [--kills N] [--seed N]

Prints how many jobs left what.  Exit status 1 if a file is left.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "jobs"))
import launching

FOLDER = Path("/dev/shm")
PROGRAM = """
import sys
import numpy as np
import mpistrategy as ms

with open(sys.argv[1], "w"):
    pass  # the imports are done
strategy = ms.MirroredStrategy()
with open(sys.argv[2], "w"):
    pass
for number in range(10**6):
    arena = strategy.arena([np.zeros(2**18 * (1 + number % 16))])
    if "making" not in sys.argv:
        arena.values[0][...] = 1
        for _ in range(20):
            strategy.reduce("SUM", arena)
            strategy.reduce("SUM", np.ones(2**17))
    arena.close()
"""


def left() -> dict[str, int]:
    """Return the names of ours in /dev/shm, with their sizes."""
    found = {}
    for path in FOLDER.glob("mpistrategy*"):
        with suppress(OSError):
            found[path.name] = path.stat().st_size
    return found


def main() -> int:
    """Start and kill."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chance, began = random.Random(options.seed), time.monotonic()
    counts: Counter[str] = Counter()
    before = left()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(PROGRAM)
        for number in range(options.kills):
            words = ["making"] if number % 4 == 0 else []
            counts[_kill_one(path, words, chance, Path(folder) / str(number))] += 1
            for name, size in left().items():
                if name not in before:
                    counts["files"] += 1
                    counts["bytes"] += size
                    before[name] = size  # counted once
    told = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    print(f"kills: {options.kills} jobs in {time.monotonic() - began:.0f} s: {told}")
    return 1 if counts["files"] else 0


def _kill_one(path: Path, words: list[str], chance: random.Random, marks: Path) -> str:
    """Start a job, kill it at a random moment; return when that was."""
    imported, made = marks.with_suffix(".imported"), marks.with_suffix(".made")
    mark = f"kills-{os.getpid()}-{marks.name}"
    with tempfile.TemporaryDirectory(prefix="mpiexec-", ignore_cleanup_errors=True) as mpiexec:
        job = subprocess.Popen(
            [*launching._mpiexec(), "-n", "2", sys.executable, str(path), str(imported), str(made), *words],
            env={**launching.environment(), launching.OPEN_MPI_FOLDER: mpiexec, launching.JOB_MARK: mark},
            cwd=path.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        end = time.monotonic() + 60
        wanted = imported if chance.random() < 0.5 else made
        while not wanted.exists() and job.poll() is None and time.monotonic() < end:
            time.sleep(0.002)
        time.sleep(chance.random() * 0.3)
        victims = launching._marked(mark)
        if chance.random() < 0.5 and len(victims) > 1:
            victims = [chance.choice(victims)]  # the launcher ends the others
        for victim in victims:
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            job.wait(5)
        launching._kill(job, mark)
        job.wait()
    return "while segments are made" if "making" in words else "at other moments"


if __name__ == "__main__":
    sys.exit(main())
