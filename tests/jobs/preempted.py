"""A training that is interrupted: goes on where it ended, and writes down at its end all there is, on every rank.

mpiexec -n 3 python preempted.py FOLDER [--steps 20] [--tell STEP:RANK:SIGNAL[:launcher]] [--deaf]

In FOLDER: `journal`, a line for each start ("from STEP"), step ("made STEP", by rank 0, before it can be saved) and
checkpoint that it saves by itself ("saved STEP", once it is there); and `end-RANK.txt` once all steps are made.
AT_FIRST in the environment has further options for the first start of a job of Slurm.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

from checkpoints import Training

import mpistrategy as ms

LAUNCHERS = ("mpiexec", "mpirun", "prterun")


class Run(NamedTuple):
    """What the journal says of one start: after which step, the last step made, and the last that surely is saved."""

    begun: int
    made: int
    saved: int


def runs_in(folder: Path) -> list[Run]:
    """Read the journal."""
    runs = []
    for text in (folder / "journal").read_text().split("from ")[1:]:
        begun = int(text.split()[0])
        made, saved = (max([begun, *map(int, re.findall(rf"{word} (\d+)", text))]) for word in ("made", "saved"))
        runs.append(Run(begun, made, saved))
    return runs


def launcher() -> int:
    """Return the process that has started the ranks of this machine."""
    pid = os.getppid()
    while not Path(f"/proc/{pid}/comm").read_text().startswith(LAUNCHERS):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds in each step")
    parser.add_argument("--save-every", type=int, default=10**6)
    parser.add_argument("--tell", default="", help="STEP:RANK:SIGNAL, or ...:launcher, which hands it on")
    parser.add_argument("--deaf", action="store_true", help="know nothing of signals")
    at_first = os.environ.get("AT_FIRST", "") if os.environ.get("SLURM_RESTART_COUNT", "0") == "0" else ""
    given = parser.parse_args([*sys.argv[1:], *at_first.split()])

    strategy = ms.MirroredStrategy()
    rank = strategy.replica_id_in_sync_group
    training = Training(strategy)
    manager = ms.CheckpointManager(training.checkpoint, given.folder / "checkpoints")
    handler = None
    if given.deaf:
        manager.restore()
    else:
        handler = ms.PreemptionCheckpointHandler(manager, termination_config=ms.TerminationConfig(grace_period=60))
    journal = (given.folder / "journal").open("a") if rank == 0 else open(os.devnull, "w")  # noqa: SIM115
    begun = training.progress["step"]
    print(f"from {begun}", file=journal, flush=True)
    if rank == 0:
        print(f"from step {begun}", flush=True)
    tell = given.tell.split(":")

    def step() -> None:
        number = training.progress["step"] + 1
        time.sleep(given.pause)
        if tell[:2] == [str(number), str(rank)]:
            os.kill(launcher() if tell[3:] else os.getpid(), signal.Signals[tell[2]])
            while tell[3:] and handler and not handler.is_told:  # the launcher hands it on
                time.sleep(0.01)
        training.step()
        print(f"made {number}", file=journal, flush=True)

    while (done := training.progress["step"]) < given.steps:
        handler.run(step) if handler else step()
        if (done + 1) % given.save_every == 0:
            manager.save(done + 1)
            print(f"saved {done + 1}", file=journal, flush=True)
    (given.folder / f"end-{rank}.txt").write_text(repr(training.everything()))
    manager.close()
    strategy.close()
    if rank == 0:
        print("made all steps", flush=True)


if __name__ == "__main__":
    main()
