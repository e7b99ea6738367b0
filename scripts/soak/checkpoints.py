"""Kills processes while they save checkpoints, and shows that the one before or the new one is there, whole.

    python scripts/soak checkpoints [--kills 1000] [--seed 0]        in one process: its children are killed
    python scripts/soak checkpoints --whole-jobs 200        jobs of 3 ranks that save with wait=False; all are killed

A child, of 1 to 3 simulated ranks, is killed before a change to the file system (each of them in turn: mkdir, create,
write, fsync, rename, unlink, rmdir), in the middle of a write, or at a random time. Or the power fails: what was not
seen on the disk is then cut or gone, and what was renamed may have its old name. After each kill the checkpoint is
restored on 1 to 3 ranks.

Of a whole job that is killed, what was on the disk 2 seconds before must be restored: a step of which all ranks that
write had synced their shards. The next job restores it, and goes on.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import mpistrategy as ms
from mpistrategy.checkpoint import collecting
from mpistrategy.checkpoint.saving import Saving
from mpistrategy.checkpoint.storage import files
from mpistrategy.testing import run_replicas

KINDS = ("overwrite", "asynchronous", "manager")
WAYS = ("before a change", "in a write", "at a random time", "power failure", "power failure after the end")
NOTHING = -1


class TornError(Exception):
    """What was restored is neither the old state nor the new one."""


class Program:
    """A program with an array, an integer that is counted on all ranks, and a number: all of them the same one."""

    def __init__(self, kind: str, folder: Path, value: int) -> None:
        self.kind, self.path = kind, folder / "a run" / "c"
        self.strategy = ms.MirroredStrategy()
        with self.strategy.scope():
            self.array = ms.Variable(np.full(2000, float(value)))
            self.count = ms.Variable(0, synchronization="ON_READ", aggregation="SUM")
            self.checkpoint = ms.Checkpoint(array=self.array, count=self.count, number=value)
        own = value // self.strategy.num_replicas_in_sync
        if self.strategy.replica_id_in_sync_group == 0:
            own = value - own * (self.strategy.num_replicas_in_sync - 1)
        self.strategy.run(lambda: self.count.assign(own))
        self.manager = ms.CheckpointManager(self.checkpoint, self.path.with_name("m"), keep=1)

    def save(self, value: int) -> None:
        """Save."""
        if self.kind == "manager":
            with self.manager:
                self.manager.save(value)
        else:
            self.checkpoint.save(self.path, overwrite=True, wait=self.kind == "overwrite")
            self.checkpoint.wait()

    def restore(self) -> int:
        """Restore; return the number that all of it is, or NOTHING."""
        try:
            if self.kind == "manager":
                if self.manager.restore() is None:
                    return NOTHING
            else:
                self.checkpoint.restore(self.path)
        except ms.errors.CheckpointMissingError:
            return NOTHING
        found = {*self.array.numpy().tolist(), int(self.count), self.checkpoint.objects["number"]}
        if len(found) != 1:
            raise TornError(f"{sorted(found)[:3]}")
        return int(found.pop())


# ------------------------------------------------------------------------------------------------ children


class Disk:
    """What would be lost if the power failed now: a list of what was done since it was last seen on the disk."""

    def __init__(self, folder: Path, dice: random.Random) -> None:
        self.folder, self.dice = folder, dice
        self.inner = folder
        self.files: set[Path] = set()  # of which the bytes may be missing
        self.entries: list[tuple[str, Path, Path]] = []  # of which the names may be missing: what, old and new name

    def note(self, what: str, name: str) -> None:
        """Note a change that was made."""
        if what == "mkdir" and name.startswith("/"):
            self.entries.append((what, Path(name), Path(name)))
            self.inner = Path(name)
        elif what == "mkdir":
            outer = self.inner if self.inner.name in ("m", "a run") else self.folder
            self.inner = outer / name
            self.entries.append((what, self.inner, self.inner))
        elif what == "create":
            self.files.add(self.inner / name)
            self.entries.append((what, self.inner / name, self.inner / name))
        elif what == "fsync" and name.startswith("/"):
            self.entries = [entry for entry in self.entries if str(entry[2].parent) != name]
        elif what == "fsync":
            self.files.discard(self.inner / name)
        elif what == "rename":
            old, new = (self.inner.parent / part for part in name.split(" -> "))
            self.entries.append((what, old, new))
            if old == self.inner:
                self.inner = new
                self.files = {new / path.name if path.parent == old else path for path in self.files}
                moved = [(w, *(new / p.name if p.parent == old else p for p in pair)) for w, *pair in self.entries[:-1]]
                self.entries[:-1] = [(w, a, b) for w, a, b in moved]

    def fail(self) -> None:
        """Lose it: all bytes that may be missing, and the names from some moment on."""
        for path in self.files:
            if path.exists():
                os.truncate(path, self.dice.randint(0, path.stat().st_size))
        names = [entry for entry in self.entries if entry[0] == "create"]
        for _, path, _ in self.dice.sample(names, self.dice.randint(0, len(names))):
            path.unlink(missing_ok=True)
        others = [entry for entry in self.entries if entry[0] != "create"]
        for what, old, new in reversed(others[self.dice.randint(0, len(others)) :]):
            if what == "mkdir":
                shutil.rmtree(new, ignore_errors=True)
            elif new.exists() and not old.exists():
                new.rename(old)


def end() -> None:
    """End this process as nothing else does."""
    os.kill(os.getpid(), signal.SIGKILL)


def saved_by_child(way: str, at: int, seed: int, job: Callable[[], None], folder: Path) -> tuple[bool, int]:
    """Have a child do the job and kill it; return whether it came to its end, and how many changes it had made."""
    dice = random.Random(seed)
    told, telling = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(told)
        disk, last, changes = Disk(folder, dice), ("", ""), itertools.count(1)

        def watcher(what: str, name: str) -> None:
            nonlocal last
            os.write(telling, b".")
            disk.note(*last)  # it is made, now that the next one is
            last = (what, name)
            if next(changes) != at or way.endswith("the end"):
                return
            if way == "power failure":
                disk.fail()
            if way == "power failure" or way == "before a change" or (way == "in a write" and what != "write"):
                end()
            if way == "in a write":
                files._write_all = in_a_write

        def in_a_write(descriptor: int, part: memoryview) -> None:
            os.write(descriptor, part[: dice.randint(0, len(part))])
            end()

        files.watcher = watcher
        try:
            job()
        except BaseException as error:
            sys.stderr.write(f"a child failed: {type(error).__name__}: {error}\n")
            os._exit(1)
        if way.endswith("the end"):
            disk.note(*last)
            disk.fail()
        os._exit(0)
    os.close(telling)
    count = 0
    if way == "at a random time":
        count += len(os.read(told, 1))  # it has begun
        time.sleep(dice.random() * 0.006)
        os.kill(child, signal.SIGKILL)
    while piece := os.read(told, 4096):
        count += len(piece)
    os.close(told)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit("a child failed")
    return status == 0, count


def restored(kind: str, place: Path, ranks: int) -> list[int]:
    """Return what each of some ranks restores."""
    return run_replicas(lambda: Program(kind, place, 0).restore(), ranks)


def soak(kills: int, seed: int) -> int:
    """Kill children until there were `kills`; return the exit status."""
    dice = random.Random(seed)
    done: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    bad: list[str] = []
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder, old, began = Path(name), dict.fromkeys(KINDS, NOTHING), time.monotonic()
        turns: Counter[tuple[str, str]] = Counter()
        for new in itertools.count(1):
            if sum(done.values()) >= kills or bad:
                break
            kind = KINDS[new % len(KINDS)]
            place = folder / kind
            place.mkdir(exist_ok=True)
            if dice.random() < 0.05:  # where nothing is yet
                shutil.rmtree(place)
                place.mkdir()
                old[kind] = NOTHING
            way, ranks = dice.choice(WAYS), dice.randint(1, 3)
            turns[kind, way] += 1

            def job(kind: str = kind, place: Path = place, new: int = new, ranks: int = ranks) -> None:
                if new % 4 < 2:  # each rank writes a part, as of large checkpoints; else one rank writes all
                    collecting.BYTES_A_WRITER = collecting.BYTES_A_PART = 1
                run_replicas(lambda: Program(kind, place, new).save(new), ranks)

            ended, changes = saved_by_child(way, turns[kind, way], new, job, place)
            if ended:  # else the next one is killed at the next change, up to the last
                turns[kind, way] = 0
            allowed = {new} if ended else {old[kind], new}
            if not ended or way.endswith("the end"):
                done[way] += 1
            what = f"number {new}, {kind}, {way}, {ranks} ranks, after {changes} changes"
            try:
                found = restored(kind, place, 1)
                if found != [NOTHING]:  # simulated ranks are not told what another one has found missing
                    found += restored(kind, place, dice.randint(1, 3))
            except TornError as error:
                bad.append(f"torn: {what}: {error}")
            except Exception as error:
                bad.append(f"unrecoverable: {what}: {type(error).__name__}: {error}")
            else:
                if len(set(found)) != 1 or found[0] not in allowed:
                    bad.append(f"{'unrecoverable' if NOTHING in found else 'torn'}: {what}: {found}, not {allowed}")
                kept["the new one" if found[0] == new else "nothing yet" if found[0] == NOTHING else "the old one"] += 1
                old[kind] = found[0]
    unrecoverable = sum(text.startswith("unrecoverable") for text in bad)
    print(
        f"{sum(done.values())} kills in {time.monotonic() - began:.0f} s ({_list(done)}): {unrecoverable} "
        f"unrecoverable, {len(bad) - unrecoverable} torn; there was then {_list(kept)}"
    )
    print("\n".join(bad), end="\n" if bad else "")
    return int(bool(bad))


def _list(counts: Counter[str]) -> str:
    return ", ".join(f"{what} {count}" for what, count in sorted(counts.items()))


# ------------------------------------------------------------------------------------------------ whole jobs


def job_in_background(folder: Path, seed: int) -> int:
    """Restore, and save without waiting until the job is killed; note when this rank's part is on the disk."""
    dice, write = random.Random(seed), Saving._write
    if seed % 2:
        collecting.BYTES_A_WRITER = collecting.BYTES_A_PART = 1
    program = Program("manager", folder, 0)
    assert program.strategy.size == 3
    notes = os.open(folder / f"notes-{seed}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def noted(saving: Saving, pieces: Any) -> Any:
        mark = write(saving, pieces)
        os.write(notes, f"{int(saving.path[-12:])} {len(saving._writers)} {time.monotonic()}\n".encode())
        return mark

    Saving._write = noted  # type: ignore[method-assign]
    for value in itertools.count(max(program.restore(), 0) + 1):
        program.array.assign(np.full(2000, float(value)))
        program.strategy.run(lambda value=value: program.count.assign(value if program.strategy.rank == 0 else 0))
        program.checkpoint.objects["number"] = value
        program.manager.save(value, wait=False)
        time.sleep(dice.random() * 0.5)  # the program computes
    return 1


def kill_whole_jobs(kills: int, seed: int) -> int:
    """Kill jobs, all ranks at once; return the exit status."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "jobs"))
    import launching

    dice, began, bad, torn = random.Random(seed), time.monotonic(), list[str](), 0
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder, newest = Path(name), NOTHING
        for number in range(seed * kills, (seed + 1) * kills):
            notes, mark = folder / f"notes-{number}", f"whole-jobs-{os.getpid()}-{number}"
            job = subprocess.Popen(
                [*launching._mpiexec(), "-n", "3", sys.executable, __file__, "--in-background", folder, "--seed",
                 str(number)],
                env={**launching.environment(), "MPISTRATEGY_ALONE": "", launching.JOB_MARK: mark},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            while not (notes.exists() and notes.read_text()) and job.poll() is None:
                time.sleep(0.01)
            time.sleep(2 + dice.random() * 1.5)
            killed_at = time.monotonic()
            for victim in launching._marked(mark):
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
            launching._kill(job, mark)
            job.wait()
            written: dict[int, list[float]] = {}
            writers = 0
            for step, count, at in map(str.split, notes.read_text().splitlines()):
                written.setdefault(int(step), []).append(float(at))
                writers = int(count)
            whole = {step: max(times) for step, times in written.items() if len(times) == writers}
            on_disk = max((step for step, at in whole.items() if at < killed_at - 2), default=newest)
            try:
                found = restored("manager", folder, 1)[0]
            except Exception as error:
                torn += 1
                bad.append(f"job {number}: {type(error).__name__}: {error}")
                continue
            if found < on_disk:
                bad.append(f"job {number}: step {found} was restored, {on_disk} was on the disk")
            newest = found
    print(
        f"{kills} kills of whole jobs in {time.monotonic() - began:.0f} s: {torn} torn, {len(bad) - torn} times what "
        f"was on the disk 2 s before was lost; {newest} was restored last"
    )
    print("\n".join(bad), end="\n" if bad else "")
    return int(bool(bad))


def main() -> int:
    """Do what the options say; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--whole-jobs", type=int, metavar="KILLS")
    parser.add_argument("--in-background", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.in_background:
        os.environ["MPISTRATEGY_ALONE"] = "1"  # whatever has started this process
    if options.whole_jobs:
        return kill_whole_jobs(options.whole_jobs, options.seed)
    if options.in_background:
        return job_in_background(options.in_background, options.seed)
    return soak(options.kills, options.seed)


if __name__ == "__main__":
    sys.exit(main())
