"""Another user of the node, who was there first: in folders of checkpoints, run directories, caches and traces."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import hostile_others
import pytest

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.cli import main
from mpistrategy.mpi.tuning import thresholds as path_files
from mpistrategy.mpi.watchdog.run_directory import RunDirectory
from mpistrategy.telemetry.tracing.timeline import timeline_of

pytestmark = pytest.mark.one_rank

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="not run: only root can play another user")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder as /tmp is: everybody can write to it, and nobody remove what is another's."""
    path = Path(tempfile.mkdtemp(prefix="mpistrategy-users-", dir="/tmp"))
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


def by_another_user(what: Callable[[], object]) -> str:
    """Call a function as another user, in a process of its own; return what it says, or its error."""
    told, telling = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            said = str(what())
        except BaseException as error:
            said = type(error).__name__
        os.write(telling, said.encode())
        os._exit(0)
    os.close(telling)
    with os.fdopen(told) as file:
        said = file.read()
    os.waitpid(child, 0)
    return said


@contextmanager
def held_by_another_user(path: Path) -> Iterator[str]:
    """Have another user lock a file or folder, if it can; yield what came of it."""
    told, telling = os.pipe()
    waits, end = os.pipe()
    child = os.fork()
    if child == 0:
        said = "locked"
        try:
            os.close(end)
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException as error:
            said = type(error).__name__
        os.write(telling, said.encode())
        os.close(telling)
        os.read(waits, 1)
        os._exit(0)
    os.close(telling)
    os.close(waits)
    with os.fdopen(told) as file:
        said = file.read()
    try:
        yield said
    finally:
        os.close(end)
        os.waitpid(child, 0)


def give_away(path: Path) -> None:
    """Make a file, or a folder and what is in it, another user's."""
    for one in (path, *path.rglob("*")):
        os.chown(one, NOBODY, NOBODY, follow_symlinks=False)


def made(value: float = 1.0) -> tuple[ms.Variable, ms.Checkpoint]:
    with ms.OneDeviceStrategy("CPU:0").scope():
        x = ms.Variable(value)
        return x, ms.Checkpoint(x=x)


# ------------------------------------------------------------------------------------------------ checkpoints


@as_root
def test_another_user_cannot_hold_the_lock(open_folder: Path) -> None:
    _, checkpoint = made()
    with ms.CheckpointManager(checkpoint, open_folder / "run") as manager:
        manager.save(1)
    (open_folder / "run").chmod(0o755)  # so that the other one gets as far as that
    with held_by_another_user(open_folder / "run" / ".lock") as said:
        assert said == "PermissionError"
        with ms.CheckpointManager(checkpoint, open_folder / "run") as manager:
            manager.save(2)
        assert manager.steps() == [1, 2]


@as_root
def test_another_users_lock_is_not_taken(open_folder: Path) -> None:
    (open_folder / ".lock").touch(0o600)

    def save() -> str:
        try:
            ms.CheckpointManager(made()[1], open_folder).save(1)
        except errors.CheckpointError as error:
            return f"{type(error).__name__}: {error}"
        return "saved"

    said = by_another_user(save)
    assert said.startswith("CheckpointWriteError")
    assert f"Permission denied (EACCES) at {str(open_folder / '.lock')!r}" in said
    assert os.listdir(open_folder) == [".lock"]


@pytest.mark.parametrize("what", [Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_lock_is_refused(tmp_path: Path, what: Callable[[Path], object]) -> None:
    _, checkpoint = made()
    what(tmp_path / ".lock")
    with pytest.raises(errors.CheckpointWriteError, match=r"\.lock"):
        ms.CheckpointManager(checkpoint, tmp_path).save(1)


@as_root
@pytest.mark.parametrize("mode", [0o1777, 0o755, 0o2770])
def test_another_users_checkpoint(open_folder: Path, mode: int) -> None:
    """Where everybody can write it is not restored; in a folder of somebody's or of a group's it is."""
    x, checkpoint = made(7.0)
    with ms.CheckpointManager(checkpoint, open_folder, keep=None) as manager:
        manager.save(1)
        x.assign(8.0)
        manager.save(9)
    give_away(open_folder / "step-000000000009")
    open_folder.chmod(mode)
    x.assign(0.0)
    restored = manager.restore()
    if mode != 0o1777:
        assert (restored, float(x)) == (9, 8.0)
        assert float(ms.Checkpoint.arrays(manager.path_of(9))["x"]) == 8
        return
    assert (restored, float(x)) == (1, 7.0)
    assert "uid 65534" in manager.skipped["step-000000000009"]
    for read in (checkpoint.restore, ms.Checkpoint.arrays):
        with pytest.raises(errors.CheckpointReadError, match="in a folder that everybody can write to"):
            read(manager.path_of(9))
    os.rename(manager.path_of(9), open_folder / ".step-000000000008.replaced")
    with pytest.raises(errors.CheckpointReadError):
        checkpoint.restore(manager.path_of(8))


@as_root
def test_a_folder_above_that_cannot_be_listed(open_folder: Path) -> None:
    def work() -> object:
        x, checkpoint = made(3.0)
        with ms.CheckpointManager(checkpoint, open_folder / "run") as manager:
            manager.save(1)
            x.assign(0.0)
            return manager.restore(), float(x)

    (open_folder / "run").mkdir()
    give_away(open_folder / "run")
    open_folder.chmod(0o711)
    assert by_another_user(work) == "(1, 3.0)"


@as_root
def test_a_whole_folder_that_another_user_made_first(open_folder: Path) -> None:
    x, checkpoint = made(7.0)
    with ms.CheckpointManager(checkpoint, open_folder / "run") as manager:
        manager.save(1)
    give_away(open_folder / "run")
    (open_folder / "run").chmod(0o777)
    with pytest.raises(errors.CheckpointReadError, match="uid 65534"):
        manager.save(2)
    with pytest.raises(errors.CheckpointReadError, match="uid 65534"):
        manager.restore()
    assert float(x) == 7


# ------------------------------------------------------------------------------------------------ run directories


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_who_may_read_a_run_directory(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        assert RunDirectory(str(tmp_path / "a" / "run")).write("rank-0.txt", "x")
        (tmp_path / "group").mkdir()
        (tmp_path / "group").chmod(0o2770)
        assert RunDirectory(str(tmp_path / "group" / "run")).write("rank-0.txt", "x")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a", tmp_path / "a" / "run")]
    assert modes == [0o700, 0o700]
    assert stat.S_IMODE((tmp_path / "a" / "run" / "rank-0.txt").stat().st_mode) == 0o600
    group = 0 if umask else 0o050
    assert stat.S_IMODE((tmp_path / "group" / "run").stat().st_mode) & 0o777 == 0o700 | group
    assert stat.S_IMODE((tmp_path / "group" / "run" / "rank-0.txt").stat().st_mode) == 0o600 | group & 0o040


# ------------------------------------------------------------------------------------------------ thresholds, traces


@pytest.mark.parametrize("what", ["pipe", "device", "link", "folder", "another user's", "endless"])
def test_thresholds_that_are_no_own_small_file(open_folder: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    file = open_folder / "paths.json"
    others = replace(path_files.DEFAULT, pack_bytes=2**20)
    path_files.save(others, file)
    monkeypatch.setenv(path_files.VARIABLE, str(file))
    assert hostile_others.agreed_alone("Open MPI v5.0.11").pack_bytes == 2**20
    if what == "pipe":
        file.unlink()
        os.mkfifo(file)
    elif what == "device":
        file = Path("/dev/zero")
    elif what == "link":
        (open_folder / "link").symlink_to(file)
        file = open_folder / "link"
    elif what == "folder":
        file = open_folder
    elif what == "endless":
        os.truncate(file, 2**42)
    elif os.geteuid() == 0:
        give_away(file)
    else:
        pytest.skip("not run: only root can give files to another user")
    monkeypatch.setenv(path_files.VARIABLE, str(file))
    began = time.monotonic()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        paths = hostile_others.agreed_alone("Open MPI v5.0.11")
    assert paths == path_files.default_for("Open MPI")
    assert time.monotonic() - began < 1
    (warning,) = warned
    assert issubclass(warning.category, errors.FallbackWarning)
    assert f"the thresholds in {file} cannot be used" in str(warning.message)


@pytest.mark.parametrize("is_of_group", [False, True])
def test_who_may_read_a_recording(tmp_path: Path, is_of_group: bool) -> None:
    tmp_path.chmod(0o2770 if is_of_group else 0o700)
    before = os.umask(0)
    try:
        with ms.telemetry.trace(tmp_path / "a" / "b"), ms.telemetry.span("x"):
            pass
        assert main.main(["trace", str(tmp_path / "a" / "b")]) == 0
        assert main.main(["trace", str(tmp_path / "a" / "b"), "-o", str(tmp_path / "a" / "x.json")]) == 0
    finally:
        os.umask(before)
    group = 0o050 if is_of_group else 0
    folders = (tmp_path / "a", tmp_path / "a" / "b")
    assert {stat.S_IMODE(path.stat().st_mode) & 0o777 for path in folders} == {0o700 | group}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600 | group & 0o040}
    assert json.loads((tmp_path / "a" / "x.json").read_text())["traceEvents"]


def test_who_may_read_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tmp_path.chmod(0o700)
    with ms.telemetry.trace(tmp_path / "t"), ms.telemetry.span("x"):
        pass
    before = os.umask(0)
    try:
        assert main.main(["trace", str(tmp_path / "t"), "--png", str(tmp_path / "x.png")]) == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x.png").stat().st_mode) == 0o600
    assert sorted(os.listdir(tmp_path)) == ["t", "x.png"]


@pytest.mark.parametrize("what", ["pipe", "link", "another user's", "endless"])
def test_recordings_that_are_no_own_small_file(open_folder: Path, what: str) -> None:
    file = open_folder / "rank-0.json"
    if what == "pipe":
        os.mkfifo(file)
    elif what == "link":
        file.symlink_to("/dev/zero")
    elif what == "endless":
        file.touch()
        os.truncate(file, 2**42)
    elif os.geteuid() == 0:
        file.write_text("{}")
        give_away(file)
    else:
        pytest.skip("not run: only root can give files to another user")
    began = time.monotonic()
    with pytest.raises(errors.TraceError, match=r"rank-0\.json"):
        timeline_of(str(open_folder))
    assert time.monotonic() - began < 1
