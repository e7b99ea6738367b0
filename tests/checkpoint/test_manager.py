"""CheckpointManager: keeps the last ones, restores the newest that is whole, and says why others were skipped."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import checkpoint_of, watched
from replicas import RANK, all_raise, new_variable, outcomes

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.checkpoint.format import NAME, shard_name


@pytest.fixture
def folder(folder: Path) -> Path:
    return folder / "run one"


def made(strategy: ms.Strategy, folder: Path, keep: int | None = 3) -> tuple[ms.Variable, ms.CheckpointManager]:
    x = new_variable(strategy, 0.0)
    return x, ms.CheckpointManager(checkpoint_of(strategy, x=x), folder, keep)


def by_rank_0(strategy: ms.Strategy, what: Callable[[], Any]) -> None:
    if RANK == 0:
        what()
    strategy.barrier("done")


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (2, [4, 5]), (None, [1, 2, 3, 4, 5])])
def test_the_last_are_kept(
    strategy: ms.MirroredStrategy, folder: Path, wait: bool, keep: int | None, left: list[int]
) -> None:
    x, manager = made(strategy, folder, keep)
    assert manager.restore() is None
    for step in range(1, 6):
        x.assign(float(step))
        manager.save(step, wait=wait)
    manager.wait()
    strategy.barrier("removed")
    assert manager.steps() == left
    x.assign(0.0)
    assert manager.restore() == 5
    assert float(x) == 5
    assert manager.restored is not None
    assert manager.restored.path == manager.path_of(5)
    assert manager.skipped == {}
    manager.save(0)  # an older run is gone on with: what was saved last is kept, whatever its number
    strategy.barrier("removed")
    assert manager.steps() == [0, *(left[1:] if keep else left)]
    manager.close()


def test_the_newest_that_is_whole(strategy: ms.MirroredStrategy, folder: Path) -> None:
    x, manager = made(strategy, folder, 6)
    for step in range(1, 7):
        x.assign(float(step))
        manager.save(step)
    names = {step: os.path.basename(manager.path_of(step)) for step in range(1, 7)}

    def damage() -> None:
        paths = {step: Path(manager.path_of(step)) for step in names}
        (paths[6] / NAME).unlink()
        shard = paths[5] / shard_name(0)  # which has the array
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
        shutil.rmtree(paths[4])
        paths[4].symlink_to(paths[3])
        (folder / "step-x").mkdir()
        (folder / ".step-000000000009.saving-0123").mkdir()
        (folder / "notes.txt").touch()

    by_rank_0(strategy, damage)
    assert manager.restore() == 3
    assert float(x) == 3
    assert sorted(manager.skipped) == [".step-000000000009.saving-0123", *(names[step] for step in (4, 5, 6)), "step-x"]
    assert "no manifest.json" in manager.skipped[names[6]]
    assert "checksum" in manager.skipped[names[5]]
    assert "symbolic link" in manager.skipped[names[4]]
    x.assign(60.0)
    for step in (4, 5, 6, 7):  # a damaged one makes room; a link, and what has no manifest, is not ours to remove
        found = outcomes(manager.save, step)
        assert {outcome.error is None for outcome in found} == {step in (5, 7)}
    assert manager.restore() == 7
    assert float(x) == 60
    manager.close()


FOREIGN: dict[str, Callable[[Path], object]] = {
    "no manifest": lambda path: (path / "results.csv").write_text("mine"),
    "a shard by name": lambda path: (path / shard_name(0)).write_text("mine"),
    "a manifest of others": lambda path: (path / NAME).write_text('{"format": "orbax"}'),
    "a file beside": lambda path: (path / "notes.txt").write_text("mine"),
    "a folder inside": lambda path: (path / "more").mkdir(),
    "a folder by name": lambda path: (path / shard_name(7)).mkdir(),
    "a link": lambda path: path.symlink_to(path.rename(path.with_name(f"of others {path.name}"))),
}


@pytest.mark.one_rank
@pytest.mark.parametrize("what", FOREIGN)
def test_what_is_somebodys_own_stays(folder: Path, what: str) -> None:
    """Whatever its name is: no save removes or replaces anything else than a checkpoint."""
    manager = alone(folder)
    folder.mkdir()
    theirs = [folder / name for name in ("step-000000000001", "step-000000000002", ".step-000000000003.saving-0123",
                                         ".step-000000000009.replaced-0123", ".c.replaced-01", "c")]  # fmt: skip
    if what not in ("a shard by name", "a manifest of others"):  # what a job leaves has these names
        theirs.append(folder / ".step-000000000004.saving-00ff00ff00ff00ff")
    for path in theirs:
        if what in ("a file beside", "a folder inside", "a folder by name", "a link"):
            manager.checkpoint.save(path)
        else:
            path.mkdir()
        FOREIGN[what](path)
    before = {path: sorted(os.listdir(path)) for path in theirs}
    assert manager.restore() in (None, 2)
    manager.keep = 1
    for step in (8, 9):
        manager.save(step)
    assert manager.steps() == [9]
    with pytest.raises(errors.CheckpointExistsError):
        manager.save(2)
    with pytest.raises(errors.CheckpointExistsError):
        manager.checkpoint.save(folder / "c", overwrite=True)
    manager.close()
    assert {path: sorted(os.listdir(path)) for path in theirs} == before


def test_one_that_cannot_be_removed_stays_alone(strategy: ms.MirroredStrategy, folder: Path) -> None:
    """All ranks see at once what was removed."""

    def refuse(what: str, name: str) -> None:
        if what == "rename" and name.startswith("step-000000000001 "):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    _, manager = made(strategy, folder, 1)
    with watched(refuse):
        for step in (1, 2, 3):
            manager.save(step, wait=step < 3)
        manager.close()
        assert manager.steps() == [1, 3]


def test_a_checkpoint_that_does_not_fit_is_not_skipped(strategy: ms.MirroredStrategy, folder: Path) -> None:
    x, manager = made(strategy, folder)
    manager.save(1)
    manager.save(2)
    other = ms.CheckpointManager(checkpoint_of(strategy, x=new_variable(strategy, np.zeros(2))), folder)
    all_raise(errors.CheckpointMismatchError, other.restore)
    manager.close()
    assert float(x) == 0


def test_one_writer_for_a_folder(strategy: ms.MirroredStrategy, folder: Path) -> None:
    _, manager = made(strategy, folder)
    manager.save(1)
    _, other = made(strategy, folder)
    all_raise(errors.CheckpointExistsError, other.save, 2, words=["another job"])
    assert other.restore() == 1  # reading is anybody's
    manager.close()
    with other:
        other.save(2)
    manager.save(3)
    all_raise(errors.CheckpointExistsError, manager.save, 3)
    del manager, other
    made(strategy, folder)[1].save(4)


def test_bad_input(strategy: ms.MirroredStrategy, folder: Path) -> None:
    """Arguments of the constructor are tried in tests/whole/test_wrong_arguments.py."""
    _, manager = made(strategy, folder)
    all_raise(errors.OptionError, manager.save, -1)
    all_raise(errors.OptionTypeError, manager.save, "1")
    by_rank_0(strategy, lambda: folder.write_text("x"))
    all_raise(errors.CheckpointWriteError, manager.save, 1)
    all_raise(errors.CheckpointDamagedError, manager.restore)
    below = ms.CheckpointManager(manager.checkpoint, folder / "below")
    all_raise(errors.CheckpointDamagedError, below.restore)  # there may be checkpoints, out of reach


def test_after_a_failure_the_folder_is_free_for_another_strategy(folder: Path) -> None:
    managers = []
    for step in (1, 2):
        with suppress(ZeroDivisionError), ms.MirroredStrategy(on_error="raise") as strategy:
            managers.append(made(strategy, folder)[1])
            managers[-1].save(step)
            assert 1 / (step - 1)


def alone(folder: Path) -> ms.CheckpointManager:
    return made(ms.OneDeviceStrategy("CPU:0"), folder)[1]


@pytest.mark.one_rank
def test_a_forked_child_does_not_give_its_parents_lock_up_nor_save_without_one(folder: Path) -> None:
    manager = alone(folder)
    manager.save(1)
    child = os.fork()
    if child == 0:
        refused = [outcomes(manager.save, 2)[0].error]
        manager.close()
        refused += [outcomes(each.save, 2)[0].error for each in (manager, alone(folder))]
        os._exit(0 if refused == [errors.CheckpointExistsError] * 3 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(errors.CheckpointExistsError, match="another manager of this one"):
        alone(folder).save(2)
    manager.save(2)
    manager.close()
