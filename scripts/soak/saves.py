"""Kills processes while they save, or lets their power fail: the checkpoint before or the new one is there, whole.

A child of 1 to 3 simulated ranks is killed before a random change to the file system, or comes to its end.  Where the
power fails, besides, only what was synced is left: the bytes of files and the names in folders as of their last fsync;
or the names have reached the disk by themselves, before the bytes.  The checkpoint is then restored on 1 to 3 ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np

import mpistrategy as ms
from mpistrategy.checkpoint import files, saving
from mpistrategy.testing import run_replicas

KINDS = ("overwrite", "in the background", "manager")
WAYS = ("killed", "power failure", "power failure after the names")
MOST_CHANGES = 40


class Disk:
    """What has been synced of the files and folders in a folder, by their numbers."""

    def __init__(self, folder: Path, synced: Path) -> None:
        self.folder, self.synced = folder, synced
        for path in [folder, *folder.rglob("*")]:
            self.note(path)

    def note(self, path: Path) -> None:
        """Note what a file or folder has in it now."""
        copy = self.synced / str(path.stat().st_ino)
        if path.is_dir():
            copy.with_suffix(".names").write_text(json.dumps({entry.name: entry.inode() for entry in os.scandir(path)}))
        else:
            copy.with_suffix(".names").unlink(missing_ok=True)  # of a folder that had this number
            shutil.copyfile(path, copy)

    def fail(self, *, has_names: bool) -> None:
        """Lose what was not synced: bytes, and names unless they have reached the disk."""
        number = self.folder.stat().st_ino
        if has_names:
            for path in self.folder.rglob("*"):
                if path.is_file():
                    self._bring_bytes_back(path.stat().st_ino, path)
        else:
            shutil.rmtree(self.folder)
            self._bring_back(number, self.folder)

    def _bring_back(self, number: int, path: Path) -> None:
        names = self.synced / f"{number}.names"
        if names.exists():
            path.mkdir()
            for name, inner in json.loads(names.read_text()).items():
                self._bring_back(inner, path / name)
        else:
            self._bring_bytes_back(number, path)

    def _bring_bytes_back(self, number: int, path: Path) -> None:
        copy = self.synced / str(number)
        path.write_bytes(copy.read_bytes() if copy.exists() else b"")


def program(kind: str, folder: Path, value: int) -> int:
    """Save a value, unless it is 0, and return what is restored then; -1 where there is nothing."""
    with ms.MirroredStrategy().scope():
        array = ms.Variable(np.full(2000, float(value)))
        checkpoint = ms.Checkpoint(array=array, number=value)
    manager = ms.CheckpointManager(checkpoint, folder / "m", keep=1)
    if value and kind == "manager":
        with manager:
            manager.save(value)
    elif value:
        checkpoint.save(folder / "c", overwrite=True, wait=kind == "overwrite").wait()
    try:
        missing = manager.restore() is None if kind == "manager" else bool(checkpoint.restore(folder / "c") is None)
    except ms.errors.CheckpointMissingError:
        return -1
    values = {*array.numpy().tolist(), checkpoint.objects["number"]}
    assert len(values) == 1, f"torn: {values}"
    return -1 if missing else int(values.pop())


def saved_by_child(disk: Disk, job: Callable[[], object], kill_at: int) -> bool:
    """Have a child do a job and kill it before a change to the file system; return whether it came to its end."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    changes, sync = count(1), os.fsync

    def watcher(operation: str, name: str) -> None:
        if next(changes) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def noted(descriptor: int) -> None:
        sync(descriptor)
        with suppress(FileNotFoundError):  # another rank has removed it
            disk.note(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    files.watcher, os.fsync = watcher, noted
    try:
        job()
    except BaseException:
        traceback.print_exc()
    os._exit(0)  # where it has failed, the new value is not there


def soak(options: argparse.Namespace) -> bool:
    """Kill children; return whether something is wrong."""
    os.environ["MPISTRATEGY_ALONE"] = "1"  # whatever has started this process
    dice, outcomes, bad = random.Random(options.seed), Counter[str](), list[str]()
    old = dict.fromkeys(KINDS, -1)
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        for new in range(1, options.count + 1):
            kind, way, ranks = dice.choice(KINDS), dice.choice(WAYS), dice.randint(1, 3)
            folder, synced = Path(name, kind), Path(name, f"synced-{new}")
            folder.mkdir(exist_ok=True)
            synced.mkdir()
            disk = Disk(folder, synced)
            # Each rank writes a part, as of large checkpoints; or one rank writes all.
            saving.BYTES_A_WRITER = dice.choice((1, 2**26))
            job = partial(run_replicas, partial(program, kind, folder, new), ranks)
            ended = saved_by_child(disk, job, dice.randint(1, MOST_CHANGES))
            if way != "killed":
                disk.fail(has_names=way != "power failure")
            shutil.rmtree(synced)
            try:
                values = {
                    *run_replicas(partial(program, kind, folder, 0), 1 if old[kind] == -1 else dice.randint(1, 3))
                }
            except Exception as error:
                bad.append(f"number {new}, {kind}, {way}, {ranks} ranks: {type(error).__name__}: {error}")
                continue
            if not values <= ({new} if ended else {old[kind], new}) or len(values) > 1:
                bad.append(f"number {new}, {kind}, {way}, {ranks} ranks: {values}, neither {old[kind]} nor {new}")
            old[kind] = values.pop()
            outcomes[f"{way}{', at the end' if ended else ''}: {'new' if old[kind] == new else 'old'}"] += 1
    print(f"{options.count} children: {dict(sorted(outcomes.items()))}; wrong: {len(bad)}", *bad, sep="\n")
    return bool(bad)
