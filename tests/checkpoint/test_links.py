"""Symbolic links that are swapped in while a checkpoint is saved or restored: nothing outside is written or removed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import Counting, many_writers, watched
from replicas import ALL, SIZE

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.checkpoint.storage.manifest import NAME
from mpistrategy.checkpoint.storage.shards import pieces_of, shard_name
from mpistrategy.testing import run_replicas

pytestmark = pytest.mark.skipif(SIZE > 1, reason="has ranks of its own: runs in the session on 1 rank")

OLD, NEW, OUTSIDE = 1.0, 2.0, 666.0
#: Simulated ranks do not tell each other what has failed: the one that goes on waits in vain, and is told so.
REFUSED = (errors.CheckpointError, errors.CollectiveMismatchError)
#: Swaps what the arguments name and links to the folder outside, again and again, until it is ended.
SWAPPER = """
import ctypes, os, sys
folder, outside, *names = sys.argv[1:]
exchange = ctypes.CDLL(None).renameat2
os.chdir(folder)
for name in names:
    os.symlink(outside, f"link-{name}")
print("ready", flush=True)
while True:
    for name in names:
        exchange(-100, f"link-{name}".encode(), -100, name.encode(), 2)
"""


@pytest.fixture(autouse=True)
def _many_writers() -> Iterator[None]:
    with many_writers():
        yield


def program(kind: str, folder: Path, value: float, save: bool) -> float:
    """Save or restore on two ranks; return the value that the ranks have then."""

    def replica() -> float:
        with ms.MirroredStrategy().scope():
            x, y = (ms.Variable(np.full(50, value)) for _ in range(2))
            checkpoint = ms.Checkpoint(x=x, y=y, z=value)
        manager = ms.CheckpointManager(checkpoint, folder / "m", keep=1)
        with contextlib.ExitStack() as ending:
            ending.callback(manager._release)
            if kind == "manager":
                _ = manager.save(int(value)) if save else manager.restore()
            else:
                _ = checkpoint.save(folder / "c", overwrite=True) if save else checkpoint.restore(folder / "c")
        found = {*x.numpy().tolist(), *y.numpy().tolist(), checkpoint.objects["z"]}
        assert len(found) == 1, f"torn: {found}"
        return float(found.pop())

    one, two = run_replicas(replica, 2)
    assert one == two
    return one


def snapshot(folder: Path) -> list[Any]:
    """Return everything about a folder that a change would change."""
    paths = [folder, *sorted(folder.rglob("*"))]
    return [(path, path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in paths]


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A folder that is nobody's business: a checkpoint, with files of all names there are."""
    folder = tmp_path / "outside"
    folder.mkdir()
    program("overwrite", folder, OUTSIDE, save=True)
    (folder / "c").rename(folder / "step-000000000009")
    for name in (NAME, shard_name(0), shard_name(1), ".lock", "precious"):
        (folder / name).write_text("kept")
    before = snapshot(folder)
    yield folder
    assert snapshot(folder) == before


def entries(folder: Path) -> list[Path]:
    """Return what is in the folder of the checkpoints, and in the folders in it."""
    return [path for path in sorted(folder.rglob("*")) if not path.is_symlink()]


def swap(path: Path, outside: Path) -> None:
    """Put a link in the place of a file or folder, which goes elsewhere."""
    target = outside if path.is_dir() else outside / path.name
    path.rename(path.parent.parent / f"elsewhere-{path.name}")
    path.symlink_to(target)


@pytest.mark.parametrize("kind", ["overwrite", "manager"])
@pytest.mark.slow
def test_a_link_swapped_in_before_every_change(tmp_path: Path, outside: Path, kind: str) -> None:
    saved: dict[bool, int] = {True: 0, False: 0}
    stride = 1 if ALL else 4
    for at in range(1, 100):
        which = count = at % stride
        while which == count or which < count:
            folder = tmp_path / f"{at}-{which}"
            folder.mkdir()
            program(kind, folder, OLD, save=True)
            there = folder / "m" if kind == "manager" else folder

            def swap_one(there: Path = there, which: int = which) -> None:
                nonlocal count
                found = entries(there)
                count = len(found)
                swap(found[which % count], outside)

            watcher = Counting(at, swap_one)
            error: Exception | None = None
            with watched(watcher):
                try:
                    assert program(kind, folder, NEW, save=True) == NEW
                except REFUSED as caught:
                    error = caught
            saved[error is None] += 1
            with contextlib.suppress(*REFUSED):
                restored = program(kind, folder, 0.0, save=False)
                # 0: a manager has found no checkpoint that is whole
                assert restored in ((OLD, NEW, 0.0) if kind == "manager" else (OLD, NEW)), (at, which, error)
            which += stride
        if watcher.count < at:
            break
    assert saved[False] >= 12 // stride, saved
    assert saved[True] >= 40 // stride, saved


@contextlib.contextmanager
def swapping(folder: Path, outside: Path, *names: str) -> Iterator[None]:
    command = [sys.executable, "-c", SWAPPER, str(folder), str(outside), *names]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as swapper:
        try:
            assert swapper.stdout is not None
            assert swapper.stdout.readline() == "ready\n"
            yield
        finally:
            swapper.kill()


RACES: dict[str, Callable[[Path, float], object]] = {
    "save": lambda folder, value: program("overwrite", folder, value, save=True),
    "restore": lambda folder, _: program("overwrite", folder, 0.0, save=False),
}


@pytest.mark.parametrize("what", RACES)
@pytest.mark.slow
def test_links_swapped_in_all_the_time(tmp_path: Path, outside: Path, what: str) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    program("overwrite", folder, OLD, save=True)
    with swapping(folder, outside / "step-000000000009", "c"):
        for value in range(2, 42):
            with contextlib.suppress(*REFUSED):
                # Whatever is there when it is restored, it was saved here.
                assert RACES[what](folder, float(value)) in (OLD, float(value))


def test_a_link_in_the_place_of_a_lock(tmp_path: Path, outside: Path) -> None:
    program("manager", tmp_path, OLD, save=True)
    (tmp_path / "m" / ".lock").unlink()
    (tmp_path / "m" / ".lock").symlink_to(outside / "precious")
    with pytest.raises(errors.CheckpointExistsError, match="something that is not a file"):
        program("manager", tmp_path, NEW, save=True)
    assert program("manager", tmp_path, 0.0, save=False) == OLD


def test_a_save_does_not_end_well_when_another_folder_was_put_in_its_place(tmp_path: Path) -> None:
    """Nor is the checkpoint lost that was there before."""
    program("overwrite", tmp_path, OLD, save=True)

    def put_another(what: str, name: str) -> None:
        if what == "rename" and name.startswith(".c.saving-"):
            (mine,) = tmp_path.glob(".c.saving-*")
            mine.rename(tmp_path / "elsewhere")
            mine.mkdir()
            (mine / NAME).write_text("foreign")

    with watched(put_another), pytest.raises(errors.CheckpointWriteError, match="found something else at"):
        program("overwrite", tmp_path, NEW, save=True)
    assert program("overwrite", tmp_path, 0.0, save=False) == OLD
    assert sorted(os.listdir(tmp_path / "elsewhere")) == [NAME, shard_name(0), shard_name(1)]


@pytest.mark.parametrize("file", [shard_name(0), shard_name(1), NAME])
def test_a_link_where_a_file_is_about_to_be_made(tmp_path: Path, outside: Path, file: str) -> None:
    program("overwrite", tmp_path, OLD, save=True)

    def plant(what: str, name: str) -> None:
        if (what, name) == ("create", file):
            (mine,) = tmp_path.glob(".c.saving-*")
            (mine / file).symlink_to(outside / file)

    with watched(plant), pytest.raises(REFUSED):
        program("overwrite", tmp_path, NEW, save=True)
    assert program("overwrite", tmp_path, 0.0, save=False) == OLD


@pytest.mark.parametrize("ending", ["npy", "npz", "safetensors"])
def test_a_file_of_arrays_may_be_named_by_a_link(tmp_path: Path, ending: str) -> None:
    (tmp_path / "real").mkdir()
    file = tmp_path / "real" / f"x.{ending}"
    if ending == "safetensors":
        file.write_bytes(b"".join(bytes(piece) for piece in pieces_of({"a": np.ones(3)})))
    elif ending == "npz":
        np.savez(file, a=np.ones(3))
    else:
        np.save(file, np.ones(3))
    (tmp_path / f"first.{ending}").symlink_to(f"second.{ending}")
    (tmp_path / f"second.{ending}").symlink_to(os.path.join("real", f"x.{ending}"))
    (array,) = ms.Checkpoint.arrays(tmp_path / f"first.{ending}").values()
    assert array.tolist() == [1, 1, 1]
    (tmp_path / f"circle.{ending}").symlink_to(f"circle.{ending}")
    with pytest.raises(errors.CheckpointDamagedError, match=r"a symbolic link at .*circle.*Put the file itself there"):
        ms.Checkpoint.arrays(tmp_path / f"circle.{ending}")
    (tmp_path / f"nowhere.{ending}").symlink_to("none")
    with pytest.raises(errors.CheckpointMissingError):
        ms.Checkpoint.arrays(tmp_path / f"nowhere.{ending}")


def test_a_link_that_another_user_put_there_is_not_followed(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("not run: only root can give links to another user")
    tmp_path.chmod(0o1777)
    (tmp_path / "theirs").mkdir()
    np.save(tmp_path / "theirs" / "x.npy", np.ones(3))
    (tmp_path / "l.npy").symlink_to(os.path.join("theirs", "x.npy"))
    for path in (tmp_path / "theirs", tmp_path / "theirs" / "x.npy", tmp_path / "l.npy"):
        os.chown(path, 65534, 65534, follow_symlinks=False)
    assert ms.Checkpoint.arrays(tmp_path / "theirs" / "x.npy")[""].tolist() == [1, 1, 1], "a folder that was named"
    with pytest.raises(errors.CheckpointReadError, match="in a folder that everybody can write to"):
        ms.Checkpoint.arrays(tmp_path / "l.npy")
