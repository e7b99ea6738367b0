#!/usr/bin/env python3
"""Interrupts trainings at random, and shows that no step that was saved is lost and that nothing else has changed.

scripts/soak_preemption.py [--stops 20] [--ranks 1,2,3,4] [--no-slurm] [--slurm-only] [--interruptions 500]

Under mpiexec: a training is told to stop `stops` times, at random moments and on random ranks, and started again each
time; at its end it has on every rank the same weights, slots, random numbers, metrics and next batch as one that was
never interrupted. On a Slurm of its own (tests/jobs/slurm_bed.py; root): two nodes, slurm/requeue.sbatch; USR2 through
the script, TERM past it, real time limits, crashes of a node, and the cap on restarts.  Run it with the Python of an
environment that has an MPI.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "jobs"), str(ROOT)]

import launching  # noqa: E402
import slurm_bed  # noqa: E402
from preempted import runs_in  # noqa: E402
from slurm_scripts import script  # noqa: E402

TRAINING = ROOT / "tests" / "jobs" / "preempted.py"
PAUSE, SAVE_EVERY = 0.01, 7
PATHS = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'jobs'}"}
AGAIN = 75


def ends_of(folder: Path, ranks: int) -> list[str]:
    """Return all there is at the end, on every rank."""
    return [(folder / f"end-{rank}.txt").read_text() for rank in range(ranks)]


def under_mpiexec(ranks: int, stops: int, plan: random.Random) -> str:
    """Interrupt a training; return a line of figures."""
    steps, wanted = 400, stops
    with tempfile.TemporaryDirectory() as name:
        whole, folder = Path(name) / "whole", Path(name) / "interrupted"
        for path in (whole, folder):
            path.mkdir()
        launching.launch(ranks, [TRAINING, whole, "--steps", str(steps)], 300, PATHS).check()
        statuses: list[int] = []
        saved: list[int] = []
        while not statuses or statuses[-1] == AGAIN:
            options = ["--steps", str(steps), "--pause", str(PAUSE)]
            if plan.random() < 0.5:
                options += ["--save-every", str(SAVE_EVERY)]
            if len(saved) < wanted:
                reach = steps * PAUSE / (wanted + 2)
                options += ["--after", f"{plan.uniform(0, 2 * reach):.3f}:{plan.randrange(ranks)}"]
            done = launching.launch(ranks, [TRAINING, folder, *options], 300, PATHS)
            assert done.returncode in (0, AGAIN), done
            statuses.append(done.returncode)
            saved += [int(step) for step in re.findall(r"saved step (\d+)", done.stderr)]
            assert len(statuses) < 3 * wanted + 10, done
        begun, ended, _ = zip(*runs_in(folder), strict=True)
        assert begun == (0, *saved), (begun, saved)
        assert ended == (*saved, steps), (ended, saved)
        assert ends_of(folder, ranks) == ends_of(whole, ranks)
    return (
        f"{ranks} ranks: {len(saved)} stops at steps {saved}, status 75 each; ends bit for bit as the uninterrupted run"
    )


def interrupted(count: int, plan: random.Random) -> str:
    """Interrupt so many trainings once each, beside busy processes; return a line of figures.

    Each must end with status 75, and say on stderr why.
    """
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    statuses: Counter[int] = Counter()
    silent = []
    try:
        for _ in range(count):
            ranks = plan.randint(1, 4)
            with tempfile.TemporaryDirectory() as folder:
                after = f"{plan.uniform(0, 0.5):.3f}:{plan.randrange(ranks)}"
                arguments = [TRAINING, folder, "--steps", "100000", "--after", after]
                done = launching.launch(ranks, arguments, 120, PATHS)
            statuses[done.returncode] += 1
            if done.returncode != AGAIN or "saved step" not in done.stderr:
                silent.append(done)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    for done in silent:
        print(f"--- no reason, or another status: {done}")
    assert not silent
    return f"{count} trainings interrupted once beside busy processes: statuses {dict(statuses)}, each with a reason"


class SlurmRun:
    """A training in a requeue job on a Slurm of its own."""

    def __init__(self, bed: slurm_bed.SlurmBed, folder: Path, steps: int, statement: dict[str, object]) -> None:
        folder.mkdir()
        self.bed, self.folder, self.steps = bed, folder, steps
        shutil.copy(TRAINING, folder)
        training = f"preempted.py . --pause 0.05 --steps {steps} --save-every {SAVE_EVERY}"
        text = script("requeue", {"program": training.split()[0], "max_restarts": 200} | statement)
        text = re.sub(r"^program=\(.*\)$", f"program=({training})", text, flags=re.M)
        (folder / "job.sbatch").write_text(text)
        self.environment = (
            launching.environment()
            | PATHS
            | {
                "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
                "SLURM_MPI_TYPE": "pmix" if launching.IS_OPEN_MPI else "pmi2",
            }
        )
        done = bed.run("sbatch", "--parsable", "job.sbatch", cwd=folder, env=self.environment)
        assert done.returncode == 0, done.stderr
        self.job = done.stdout.strip()
        self.output = folder / f"mpistrategy-{self.job}.out"

    def text(self) -> str:
        """Return what the job has said."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def lines(self) -> int:
        """Return how many steps and starts are in the journal."""
        journal = self.folder / "journal"
        return journal.read_text().count("\n") if journal.exists() else 0

    def is_over(self) -> bool:
        """Return whether the job has ended."""
        return self.bed.show(self.job)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")

    def next_run(self, runs: int) -> None:
        """Wait until the training has begun so many times and made a step, or the job is over."""
        journal = self.folder / "journal"

        def begun() -> bool:
            if not journal.exists():
                return self.is_over()
            parts = journal.read_text().split("from ")
            return (len(parts) > runs and "made" in parts[runs]) or self.is_over()

        self.bed.until(begun, 120, f"run {runs}", self.output)

    def crash(self, restarts: int) -> None:
        """Make the second node crash, and come back once Slurm has taken the job back."""
        self.bed.crash("node2")
        told = lambda: int(self.bed.show(self.job)["Restarts"]) > restarts  # noqa: E731
        self.bed.until(told, 60, "a requeue after the crash", self.output)
        self.bed.revive("node2")


def on_slurm(stops: int, plan: random.Random) -> None:
    """Interrupt jobs on a Slurm; print lines of figures."""
    folder = Path(tempfile.mkdtemp(prefix="ms-soak-"))
    try:
        with slurm_bed.SlurmBed(folder) as bed:
            print(cap(bed, folder / "c"), flush=True)
            print(deliveries(bed, folder / "d", stops, plan), flush=True)
            print(limit(bed, folder / "l"), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def deliveries(bed: slurm_bed.SlurmBed, folder: Path, stops: int, plan: random.Random) -> str:
    """Tell a job to stop at random moments, and crash a node now and then; return a line of figures."""
    steps, began = 60 * stops, time.monotonic()
    run = SlurmRun(bed, folder, steps, {})
    what: Counter[str] = Counter()
    failed_starts = 0
    while what["USR2 through the script"] + what["TERM to the ranks"] < stops and not run.is_over():
        run.next_run(sum(what.values()) + 1)
        time.sleep(plan.uniform(0, 1.5))
        restarts = int(bed.show(run.job)["Restarts"])
        kind = plan.choice(["USR2 through the script"] * 5 + ["TERM to the ranks"] * 3 + ["a crash"])
        what[kind] += 1
        if kind == "a crash":
            run.crash(restarts)
        else:
            script = kind.startswith("USR2")
            bed.run("scancel", *(["--batch", "--signal=USR2"] if script else ["--signal=TERM"]), run.job)
        while int(bed.show(run.job)["Restarts"]) == restarts and not run.is_over():
            time.sleep(0.2)
    bed.run("scontrol", "update", f"jobid={run.job}", "timelimit=60")
    done = bed.wait(run.job, run.output, timeout=600)
    assert (done.state, done.status) == ("COMPLETED", 0), done.output[-5000:]
    runs = runs_in(folder)
    failed_starts = done.output.count("mpi/pmi2: value not properly") // 2
    kept = {0, steps, *(int(step) for step in re.findall(r"saved step (\d+)", done.output))}
    for run, last in zip(runs[1:], runs, strict=False):
        # Nothing that was saved is lost: it goes on after the last step, or after a crash from what surely was saved,
        # or from what was being saved.
        being_saved = max(last.saved, last.made // SAVE_EVERY * SAVE_EVERY)
        assert run.begun in ({last.made} & kept) | {last.saved, being_saved}, runs
        assert last.made - run.begun <= SAVE_EVERY, runs
    assert runs[-1].made == steps, (runs, done.output[-3000:])
    told = ", ".join(f"{count} {name}" for name, count in sorted(what.items()))
    repeated = sum(last.made - run.begun for run, last in zip(runs[1:], runs, strict=False))
    statuses = Counter(re.findall(r"the program stopped with status (\d+)", done.output))
    return (
        f"Slurm, 2 nodes, 4 ranks: {told}; statuses {dict(statuses)}; {len(runs)} runs, {repeated} steps made twice "
        f"(after crashes), no saved step lost; {failed_starts} starts failed in MPI; {time.monotonic() - began:.0f} s"
    )


def cap(bed: slurm_bed.SlurmBed, folder: Path) -> str:
    """Tell a job to stop more often than it may restart; return a line of figures."""
    run = SlurmRun(bed, folder, 10**6, {"nodes": 1, "max_restarts": 2})
    for number in range(3):
        run.next_run(number + 1)
        bed.run("scancel", "--batch", "--signal=USR2", run.job)
        waited = lambda number=number: run.text().count("saved step") > number  # noqa: E731
        bed.until(waited, 60, "a checkpoint", run.output)
    done = bed.wait(run.job, run.output)
    assert (done.state, done.status) == ("FAILED", AGAIN), done.output
    assert "not done after 2 restarts; not requeued" in done.output
    return f"the cap: 3 runs with max_restarts=2, then {done.state} with status {done.status}"


def limit(bed: slurm_bed.SlurmBed, folder: Path) -> str:
    """Let a job run into its time limit again and again; return a line of figures."""
    run = SlurmRun(bed, folder, 900, {"time": "1", "signal_lead": 30})
    done = bed.wait(run.job, run.output, timeout=600)
    assert (done.state, done.status) == ("COMPLETED", 0), done.output[-5000:]
    begun, ended, _ = zip(*runs_in(folder), strict=True)
    # A signal that comes while a program ends that has made all steps may make it start once more.
    assert begun[1:] == ended[:-1] or (begun[1:-1] == ended[:-2] and ended[-2] == run.steps), (begun, ended)
    told = done.output.count("the time is nearly up")
    assert told == len(begun) - 1 > 0, done.output
    return f"time limits of 1 min: {len(begun)} runs that ended at steps {ended}, told by Slurm {told} times"


def main() -> int:
    """Run the soak; return 0 when everything was as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--ranks", default="1,2,3,4", help="default: %(default)s")
    parser.add_argument("--interruptions", type=int, default=500, help="default: %(default)s; 0 for none")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="default: another each time")
    parser.add_argument("--no-slurm", action="store_true")
    parser.add_argument("--slurm-only", action="store_true")
    given = parser.parse_args()
    plan = random.Random(given.seed)
    print(f"seed {given.seed}, {launching.LIBRARY.splitlines()[0][:40].strip()}", flush=True)
    if not given.slurm_only:
        for ranks in map(int, given.ranks.split(",")):
            print(under_mpiexec(ranks, given.stops, plan), flush=True)
        print(interrupted(given.interruptions, plan), flush=True)
    why_not = slurm_bed.why_not()
    if given.no_slurm or why_not:
        print(f"Slurm: not run: {why_not or '--no-slurm'}")
        return 0
    on_slurm(given.stops, plan)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
