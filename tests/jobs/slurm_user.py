"""Users of a Slurm that tests have started: somebody with an account, in a folder with copies of slurm/."""

from __future__ import annotations

import functools
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launching
import pytest
from slurm_bed import PMIX, Job, SlurmBed

ROOT = Path(__file__).resolve().parents[2]
MPI_TYPE = "pmix" if launching.IS_OPEN_MPI else "pmi2"
#: For a module whose tests need it.
NEEDS_SLURM = [pytest.mark.slow, pytest.mark.one_rank]
needs_srun = pytest.mark.skipif(
    launching.IS_OPEN_MPI and not PMIX, reason="not run: Slurm's plugin for PMIx finds no libpmix.so"
)
# srun ends the ranks that are left when one has failed; and its status is the greatest of all ranks'.
ENDED = (128 + 15, 128 + 9)
STEPS, SAVE_EVERY = 40, 5


class User:
    """Somebody with an account, in a folder with copies of slurm/."""

    def __init__(self, bed: SlurmBed, folder: Path) -> None:
        self.bed, self.folder = bed, folder
        for path in (*(ROOT / "slurm").glob("*.*"), ROOT / "tests" / "jobs" / "preempted.py"):
            shutil.copy(path, folder)
        self.environment = launching.environment() | {
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests" / "jobs"))),
            "PYTHONDONTWRITEBYTECODE": "1",
            "SLURM_MPI_TYPE": MPI_TYPE,
        }

    def edit(self, file: str, *arguments: str) -> None:
        """Give the program of a script these arguments."""
        path = self.folder / file
        text, count = re.subn(r"^program=\(.*\)$", f"program=({' '.join(arguments)})", path.read_text(), flags=re.M)
        assert count == 1
        path.write_text(text)

    def trains(self, file: str = "requeue.sbatch", *options: str) -> None:
        """Let a script run a training that writes down what it does."""
        what = f"preempted.py . --pause 0.05 --steps {STEPS} --save-every {SAVE_EVERY}".split()
        self.edit(file, *what, *options)
        path = self.folder / file
        path.write_text(path.read_text().replace("--ntasks-per-node=2", "--ntasks-per-node=1"))

    def submit(self, file: str, *options: str) -> str:
        done = self.bed.run("sbatch", "--parsable", *options, file, cwd=self.folder, env=self.environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def output(self, job: str) -> Path:
        return self.folder / f"mpistrategy-{job}.out"

    def run(self, file: str, *options: str) -> Job:
        job = self.submit(file, *options)
        return self.bed.wait(job, self.output(job))

    def made(self, step: int) -> None:
        """Wait until preempted.py has made a step."""
        path = self.folder / "journal"
        self.bed.until(lambda: path.exists() and f"made {step}\n" in path.read_text(), 60, f"step {step}", path)

    def says(self, job: str, what: str) -> None:
        """Wait until a program, or the script, has said something."""
        path = self.output(job)
        self.bed.until(lambda: path.exists() and what in path.read_text(), 60, f"{what!r}", path)

    def ends(self) -> dict[str, bytes]:
        """Return what each rank has written at the end: every number of its state, to the last bit."""
        return {path.name: path.read_bytes() for path in sorted(self.folder.glob("end-*.txt"))}


def twice(test: Callable[..., None]) -> Callable[..., None]:
    """Try again where MPICH 5.0.2 and Slurm's pmi2 misunderstood each other on several nodes (see the guide)."""

    @functools.wraps(test)
    def again(user: User, **others: Any) -> None:
        for attempt in range(3):
            try:
                return test(user, **others)
            except (AssertionError, TimeoutError) as error:
                if attempt == 2 or launching.IS_OPEN_MPI or not re.search(r"mpi/pmi2:|Connection refused", str(error)):
                    raise
                user.bed.run("scancel", "--user=root")
                folder = user.folder / "again"
                folder.mkdir()
                user = User(user.bed, folder)
                user.environment["PADDING"] = "x" * 300 * (attempt + 1)  # it depends on where things lie in memory
        raise AssertionError("not reached")

    return again
