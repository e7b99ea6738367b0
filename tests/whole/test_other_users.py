"""Another user of the node, who was there first: in folders of checkpoints, run directories, caches and traces."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
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


def give_away(path: Path) -> None:
    """Make a file, or a folder and what is in it, another user's."""
    for one in (path, *path.rglob("*")):
        os.chown(one, NOBODY, NOBODY, follow_symlinks=False)


def made(value: float = 1.0) -> tuple[ms.Variable, ms.Checkpoint]:
    with ms.OneDeviceStrategy("CPU:0").scope():
        x = ms.Variable(value)
        return x, ms.Checkpoint(x=x)


# ------------------------------------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize("what", [Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_lock_is_refused(tmp_path: Path, what: Callable[[Path], object]) -> None:
    _, checkpoint = made()
    what(tmp_path / ".lock")
    with pytest.raises(errors.CheckpointWriteError, match=r"\.lock"):
        ms.CheckpointManager(checkpoint, tmp_path).save(1)


@as_root
def test_folders_that_another_user_made_first(open_folder: Path) -> None:
    """What they own is not read; a folder above that cannot be listed is no hindrance."""
    x, checkpoint = made(7.0)
    with ms.CheckpointManager(checkpoint, open_folder / "run") as manager:
        manager.save(1)
    (open_folder / "own").mkdir()
    for name in ("run", "own"):
        give_away(open_folder / name)
    (open_folder / "run").chmod(0o777)
    for call in (lambda: manager.save(2), manager.restore):
        with pytest.raises(errors.CheckpointReadError, match="uid 65534"):
            call()
    assert float(x) == 7

    def work() -> object:
        with ms.CheckpointManager(made(3.0)[1], open_folder / "own") as manager:
            manager.save(1)
            return manager.restore()

    open_folder.chmod(0o711)
    assert by_another_user(work) == "1"


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


# ------------------------------------------------------------------------------------------------ who may read


def saves(folder: Path) -> None:
    checkpoint = made()[1]
    checkpoint.save(folder / "c")
    checkpoint.save(folder / "asynchronous", wait=False)
    checkpoint.wait()
    with ms.CheckpointManager(checkpoint, folder / "m") as manager:
        manager.save(1)


def traces(folder: Path) -> None:
    with ms.telemetry.trace(folder / "t"), ms.telemetry.span("x"):
        pass
    assert main.main(["trace", str(folder / "t"), "-o", str(folder / "x.json")]) == 0


def draws(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    traces(folder)
    assert main.main(["trace", str(folder / "t"), "--png", str(folder / "x.png")]) == 0


WRITERS: dict[str, Callable[[Path], object]] = {
    "checkpoints": saves,
    "a recording": traces,
    "a picture": draws,
    "reports": lambda folder: RunDirectory(str(folder / "run"), warns=False).write("rank-0.txt", "x"),
}


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize("is_of_group", [False, True])
@pytest.mark.parametrize("what", WRITERS)
def test_who_may_read_what_is_written(tmp_path: Path, what: str, umask: int, is_of_group: bool) -> None:
    """The user alone, whatever the umask; where the folder is a group's, the group, if the umask lets it."""
    if is_of_group:
        os.chown(tmp_path, -1, os.getgroups()[-1] if os.getgroups() else os.getegid())
        tmp_path.chmod(0o2770)
    before = os.umask(umask)
    try:
        WRITERS[what](tmp_path / "deep" / "er")
    finally:
        os.umask(before)
    group = 0o050 if is_of_group and umask != 0o077 else 0
    paths = {path for path in tmp_path.rglob("*") if path.name != ".lock"}
    modes = {path.stat().st_mode & 0o777 for path in paths if path.is_dir()}
    assert modes == {0o700 | group}
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_file()} == {0o600 | group & 0o040}
    assert {path.stat().st_gid for path in paths} == {tmp_path.stat().st_gid}
    for lock in tmp_path.rglob(".lock"):
        assert lock.stat().st_mode & 0o777 == 0o600, "who can open a lock can hold it"


# ------------------------------------------------------------------------------------------------ thresholds, traces

#: What may stand under a name that is read.
OTHERS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to a file": lambda path: path.symlink_to(__file__),
    "a sparse file": lambda path: [path.touch(), os.truncate(path, 2**42)],
    "another user's": lambda path: [path.write_text("{}"), give_away(path)],
}
other_files = pytest.mark.parametrize(
    "what", [pytest.param(what, marks=as_root if what == "another user's" else ()) for what in OTHERS]
)


@other_files
def test_thresholds_that_are_no_own_small_file(open_folder: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    file = open_folder / "paths.json"
    monkeypatch.setenv(path_files.VARIABLE, str(file))
    path_files.save(replace(path_files.DEFAULT, pack_bytes=2**20), file)
    assert hostile_others.agreed_alone("Open MPI v5.0.11").pack_bytes == 2**20
    file.unlink()
    OTHERS[what](file)
    began = time.monotonic()
    with pytest.warns(errors.FallbackWarning, match=f"the thresholds in {file} cannot be used"):
        paths = hostile_others.agreed_alone("Open MPI v5.0.11")
    assert paths == path_files.default_for("Open MPI")
    assert time.monotonic() - began < 1


@pytest.mark.parametrize(
    "what",
    ["a pipe", "a folder", "a link to a device", "a link to a file", pytest.param("another user's", marks=as_root)],
)
def test_recordings_that_are_no_own_file(open_folder: Path, what: str) -> None:
    OTHERS[what](open_folder / "rank-0.json")
    began = time.monotonic()
    with pytest.raises(errors.TraceError, match=r"rank-0\.json"):
        timeline_of(str(open_folder))
    assert time.monotonic() - began < 1


SETTINGS = [
    ("MPISTRATEGY_PATHS", "{folder}/pipe"), ("MPISTRATEGY_PATHS", "/dev/zero"),
    ("MPISTRATEGY_TIMEOUT_SECONDS", "9" * 5000),
    ("MPISTRATEGY_TRACE", "{folder}/pipe"), ("MPISTRATEGY_RUN_DIR", "/dev/full"), ("MPISTRATEGY_CHECK", "\x1b[2J"),
    ("XDG_CACHE_HOME", "x" * 5000),
]  # fmt: skip


@pytest.mark.slow
def test_thresholds_and_settings_that_were_made_up_to_harm(launch: object, tmp_path: Path) -> None:
    """Jobs with the settings; scripts/soak hostile_files tries many more."""
    for figures in (
        hostile_others.read_thresholds(tmp_path, 200, random.Random(7)),
        hostile_others.read_environment(tmp_path, SETTINGS),
    ):
        assert figures.foreign == [], figures.line()
