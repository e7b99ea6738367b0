"""Whole or absent: a job that is killed, or fails, at any change to the file system leaves the old or the new one.

save(wait=False): the checkpoint comes into place without a further call; the next call raises what has failed.
"""

from __future__ import annotations

import errno
import gc
import os
import stat
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import launching
import numpy as np
import pytest
from checkpoints import Counting, checkpoint_of, held, in_threads, many_writers, watched
from replicas import RANK, SIZE, all_raise, gather_texts, new_variable, outcomes

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.checkpoint.saving import REPLACED, SAVING, Saving
from mpistrategy.mpi.interface.ranks import Alone

Launch = Callable[..., launching.Finished]

# A child is killed at its n-th change to the file system, for every n there is; the parent looks what is left.
# Two replicas of one process save: the kill is that of a whole node.
KILLS = """
import itertools, os, signal, sys
import numpy as np
import mpistrategy as ms
from mpistrategy.checkpoint import saving
from mpistrategy.checkpoint import files as checkpoint_files
from mpistrategy.testing import run_replicas

folder, kind = sys.argv[1:]
saving.BYTES_A_WRITER = 1  # both write


def program(value, save):
    strategy = ms.MirroredStrategy()
    with strategy.scope():
        x = ms.Variable(np.full(1000, float(value)))
        y = ms.Variable(np.full(1000, float(value)))
        checkpoint = ms.Checkpoint(x=x, y=y, z=value)
    manager = ms.CheckpointManager(checkpoint, os.path.join(folder, "m"), keep=1)
    path = os.path.join(folder, "c")
    if save and kind == "manager":
        manager.save(value)
    elif save:
        checkpoint.save(path, overwrite=True, wait=kind != "async")
        checkpoint.wait()
    elif kind == "manager":
        manager.restore()
    else:
        checkpoint.restore(path)
    found = {*x.numpy().tolist(), *y.numpy().tolist(), checkpoint.objects["z"]}
    assert len(found) == 1, f"torn: {found}"
    return found.pop()


def saved_by_child(value, kill_at):
    child = os.fork()
    if child == 0:
        changes = itertools.count(1)

        def watcher(what, name):
            if kill_at in (next(changes), f"{what} {name}") or name.endswith(f"-> {kill_at}"):
                os.kill(os.getpid(), signal.SIGKILL)

        checkpoint_files.watcher = watcher
        run_replicas(lambda: program(value, True), 2)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


assert saved_by_child(1, 0)
old, kills, outcome = 1, 0, []
for kill_at in range(1, 200):
    new = old + 1
    ended = saved_by_child(new, kill_at)
    restored = set(run_replicas(lambda: program(0, False), 1))
    assert len(restored) == 1
    assert restored <= {float(old), float(new)}, f"killed at {kill_at}: {restored}, not {old} or {new}"
    assert not ended or restored == {float(new)}, "it was saved"
    old = int(restored.pop())
    if ended:
        break
    kills += 1
if kind == "overwrite":  # one that was replaced is left; and the next job ends when it has moved its own one away
    assert not saved_by_child(300, "unlink manifest.json")
    assert not saved_by_child(301, "c")
    assert run_replicas(lambda: program(0, False), 1) == [300.0]
    assert saved_by_child(302, 0)
left = sorted(name for name in os.listdir(os.path.join(folder, "m" if kind == "manager" else "")))
print(kills, "kills;", "left:", [name for name in left if name not in (".lock", "c")])
"""


@pytest.mark.parametrize("kind", ["overwrite", "async", "manager"])
@pytest.mark.slow
def test_killed_at_every_change(launch: Launch, tmp_path: Path, kind: str) -> None:
    job = launch(1, [launching.program(KILLS, tmp_path), tmp_path / "f", kind], env={"MPISTRATEGY_ALONE": "1"})
    kills, _, left = job.check().stdout.partition(" kills; left: ")
    assert int(kills) >= 16, job  # 50 together
    assert left.count("step-") + left.count(".c") <= (1 if kind == "manager" else 0), job  # all the rest is swept


REAL = """
import itertools, os, sys
import numpy as np
import mpistrategy as ms
from mpistrategy.checkpoint import saving
from mpistrategy.checkpoint import files as checkpoint_files

saving.BYTES_A_WRITER = 1  # both write
folder, rank_to_kill, at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
strategy = ms.MirroredStrategy()
with strategy.scope():
    x = ms.Variable(np.ones(10))
    checkpoint = ms.Checkpoint(x=x, own=np.full(2, strategy.replica_id_in_sync_group))
manager = ms.CheckpointManager(checkpoint, folder)
manager.save(1)
x.assign(np.full(10, 2.0))
if strategy.replica_id_in_sync_group == rank_to_kill:
    changes = itertools.count(1)

    def watcher(what, name):
        if next(changes) == at:
            os.kill(os.getpid(), 9)

    checkpoint_files.watcher = watcher
manager.save(2)
print("saved")
"""


@pytest.mark.parametrize(("rank", "at"), [(0, 6), (1, 3)])
def test_one_rank_is_killed_while_it_saves(launch: Launch, tmp_path: Path, rank: int, at: int) -> None:
    job = launch(2, [launching.program(REAL, tmp_path), tmp_path / "m", rank, at])
    assert job.returncode != 0
    assert "saved" not in job.stdout
    check = f"""
        import mpistrategy as ms
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            x = ms.Variable([0.0] * 10)
            manager = ms.CheckpointManager(ms.Checkpoint(x=x), {str(tmp_path / "m")!r})
        step = manager.restore(partial=True)
        manager.save(5)
        if strategy.replica_id_in_sync_group == 0:
            print(step, x.numpy()[0], len(manager.skipped), manager.steps())
    """
    again = launch(2, check).check()
    assert again.stdout.split("\n")[0] == "1 1.0 1 [1, 5]", again


# ------------------------------------------------------------------------------------------------ failures


@many_writers()
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("rank", [0, SIZE - 1])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_one_rank_fails_at_every_change(
    strategy: ms.MirroredStrategy, folder: Path, wait: bool, rank: int, number: int
) -> None:
    x = new_variable(strategy, [1.0, 2.0])
    checkpoint = checkpoint_of(strategy, x=x, own=lambda: RANK)
    checkpoint.save(folder / "c")
    old = 1.0

    def fail() -> None:
        raise OSError(number, os.strerror(number))

    for at in range(1, 100):
        x.assign([old + 1, 0.0])
        watcher = Counting(at, fail)
        with watched(watcher if rank == RANK else lambda what, name: None):
            found = outcomes(lambda: checkpoint.save(folder / "c", overwrite=True, wait=wait).wait())
        strategy.barrier("cleaned up")
        there = float(ms.Checkpoint.arrays(folder / "c")["x"][0]) if (folder / "c").exists() else None
        if found[rank].error is None:  # nothing has failed, or only what may: removing the one before
            assert there == old + 1
            old = there
            if int(gather_texts(str(watcher.count))[rank]) < at:
                break
            continue
        assert {outcome.error for outcome in found} == {errors.CheckpointWriteError}, found[0].text
        assert os.strerror(number) in found[0].text
        assert there in (old, old + 1)
        old = there
        names = [name for name in os.listdir(folder) if name.startswith(SAVING.format("c"))]
        assert names == [], watcher.seen
    strategy.barrier("all have looked")
    assert not [name for name in os.listdir(folder) if name.startswith(REPLACED.format("c"))]


@many_writers()
def test_a_shard_that_is_removed_by_somebody_else(strategy: ms.MirroredStrategy, folder: Path) -> None:
    """All ranks raise at once."""
    checkpoint = ms.Checkpoint(own=RANK)

    def remove(what: str, name: str) -> None:
        if what == "rename" and name.startswith(f"shard-{SIZE - 1:05}"):
            next(folder.glob(f".c.saving-*/{name.partition(' ')[0]}")).unlink()

    with watched(remove if RANK == SIZE - 1 else lambda what, name: None):
        text = all_raise(errors.CheckpointWriteError, checkpoint.save, folder / "c")
    assert "ENOENT" in text
    strategy.barrier("cleaned up")
    assert os.listdir(folder) == []


@pytest.mark.one_rank
@pytest.mark.parametrize(("number", "fails"), [(errno.EIO, True), (errno.EINVAL, False)])
def test_names_that_do_not_reach_the_disk(
    strategy: ms.MirroredStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, fails: bool
) -> None:
    """Some file systems cannot sync a folder, and say EINVAL."""
    sync = os.fsync

    def refuse(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(errors.CheckpointWriteError, match="EIO") if fails else nullcontext():
        checkpoint_of(strategy, x=1).save(tmp_path / "c")


@pytest.mark.one_rank
def test_the_names_of_new_folders_reach_the_disk(tmp_path: Path) -> None:
    synced = set()
    with watched(lambda what, name: synced.add((what, name))), ms.OneDeviceStrategy("CPU:0").scope():
        ms.Checkpoint(x=1).save(tmp_path / "a" / "b" / "c")
        ms.CheckpointManager(ms.Checkpoint(x=1), tmp_path / "d" / "e").save(1)
    assert synced >= {("fsync", name) for name in (tmp_path.name, "a", "b", "d", "e")}


@pytest.mark.parametrize("has_locks", [True, False])
def test_two_saves_to_one_place(
    strategy: ms.MirroredStrategy, folder: Path, monkeypatch: pytest.MonkeyPatch, has_locks: bool
) -> None:
    """The second is told; where a file system has no locks, the slower one."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    if not has_locks:
        monkeypatch.setattr("fcntl.flock", flock)
    first, second = checkpoint_of(strategy, x=1), checkpoint_of(strategy, x=2)
    is_held = threading.Event()
    with held("fsync" if has_locks else "rename", is_held):
        slow = first.save(folder / "c", wait=False)
        assert RANK or is_held.wait(60)
        before = gather_texts(str(sorted(os.listdir(folder))))
        found = outcomes(second.save, folder / "c")
        assert {outcome.error for outcome in found} == {errors.CheckpointExistsError if has_locks else None}
        if has_locks:
            assert "has begun and not ended" in found[0].text
            assert gather_texts(str(sorted(os.listdir(folder)))) == before
        strategy.barrier("it is there")
    refused = [] if has_locks else [errors.CheckpointExistsError, errors.CheckpointWriteError]
    for error in refused or [None]:
        assert {outcome.error for outcome in outcomes(slow.wait)} == {error}
    first.restore(folder / "c")
    assert first.objects["x"] == (1 if has_locks else 2)
    strategy.barrier("cleaned up")
    assert os.listdir(folder) == ["c"]


# Another job that saves here, and waits until it is told to go on, or is killed.
OTHER = """
import os, sys
import mpistrategy as ms
from mpistrategy.checkpoint import files as checkpoint_files

folder = sys.argv[1]
with ms.OneDeviceStrategy("CPU:0").scope():
    x = ms.Variable(7.0)
manager = ms.CheckpointManager(ms.Checkpoint(x=x), os.path.join(folder, "m"))
manager.save(1)


def watcher(what, name):
    if what == "rename":  # in the thread, which changes nothing while the test looks
        print("at work", flush=True)
        sys.stdin.read()


checkpoint_files.watcher = watcher
ms.Checkpoint(x=x).save(os.path.join(folder, "c"), wait=False)
"""


@pytest.mark.skipif(SIZE > 1, reason="runs in the session on 1 rank")
def test_another_job_saves_here(strategy: ms.MirroredStrategy, tmp_path: Path) -> None:
    """What it has is not touched; and when it is killed, its place is free."""
    checkpoint = checkpoint_of(strategy, x=new_variable(strategy, 1.0))
    manager = ms.CheckpointManager(checkpoint, tmp_path / "m")
    tries: list[Callable[[], object]] = [lambda: manager.save(2), lambda: checkpoint.save(tmp_path / "c")]
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=launching.environment(),
    ) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == b"at work\n"
            there = sorted(tmp_path.rglob("*"))
            for save, what in zip(tries, ("another job", "has begun and not ended"), strict=True):
                with pytest.raises(errors.CheckpointExistsError, match=what):
                    save()
            assert sorted(tmp_path.rglob("*")) == there
        finally:
            other.kill()
    for save in tries:
        save()
    manager.close()
    assert manager.steps() == [1, 2]
    assert sorted(os.listdir(tmp_path)) == ["c", "m"]  # what the other has left is swept


# In a tiny file system of its own, which becomes full and then read-only; two simulated ranks.
FULL = """
import ctypes, os, subprocess, sys
import numpy as np
import mpistrategy as ms
from mpistrategy.testing import run_replicas

folder = sys.argv[1]
if ctypes.CDLL(None, use_errno=True).unshare(0x20000):
    sys.exit(f"not run: no mounts here: {os.strerror(ctypes.get_errno())}")
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder]).returncode:
    sys.exit("not run: no mounts here")
kept = None


def program():
    with ms.MirroredStrategy().scope():
        x = ms.Variable(np.full(1000, 1.0))
        manager = ms.CheckpointManager(ms.Checkpoint(x=x), os.path.join(folder, "run one"))
    with manager:
        if save:
            x.assign(np.full(1000, value))
            large = np.full(10**4 if large_one else 1, value)
            manager.checkpoint.objects["large"] = large
            manager.save(int(value))
        else:
            manager.checkpoint.objects["large"] = large = np.zeros(1)
            step = manager.restore()
            assert {*x.numpy(), *large, step} == {1.0}, (step, manager.skipped)
        return len(manager.skipped)


def tried(what):
    try:
        return print(what, run_replicas(program, 2))
    except ms.errors.CheckpointError as error:
        print(what, type(error).__name__, str(error).split("found ")[1].split(" at ")[0])


save, value, large_one = True, 1.0, False
tried("saved")
value, large_one = 2.0, True
tried("full")
save = False
tried("restored")
print(sorted(os.listdir(folder + "/run one")))
subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
save, large_one = True, False
tried("read-only")
save = False
tried("restored")
"""


@pytest.mark.skipif(SIZE > 1, reason="runs in the session on 1 rank")
def test_a_full_disk_and_a_read_only_one(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], env=launching.environment(), capture_output=True, text=True,
        check=False, timeout=60,
    )  # fmt: skip
    if "not run: " in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.stdout.splitlines() == [
        "saved [0, 0]", "full CheckpointWriteError No space left on device (ENOSPC)", "restored [0, 0]",
        "['.lock', 'step-000000000001']", "read-only CheckpointWriteError Read-only file system (EROFS)",
        "restored [0, 0]",
    ], done  # fmt: skip


# ------------------------------------------------------------------------------------------------ in the background


def made(strategy: ms.Strategy, folder: Path) -> tuple[ms.Variable, ms.CheckpointManager]:
    """Return a manager of a variable and of an array that each rank has for itself."""
    x = new_variable(strategy, np.zeros(5))
    return x, ms.CheckpointManager(checkpoint_of(strategy, x=x, own=lambda: np.full(3, RANK)), folder)


# The disk of rank 0, which is in a collective, is slow when rank 1 comes to its end.
ENDS = """
import os, signal, sys, threading, time
import numpy as np
import mpistrategy as ms
from mpistrategy.checkpoint import saving
from mpistrategy.checkpoint import files as checkpoint_files

folder, end = sys.argv[1:]
saving.BYTES_A_WRITER = 1
strategy = ms.MirroredStrategy()


def slow(what, name):
    if what == "fsync" and strategy.rank == 0:
        time.sleep(0.3)
    elif what == "fsync" and end == "full":
        raise OSError(28, "No space left")


with strategy.scope():
    checkpoint = ms.Checkpoint(x=ms.Variable(np.ones(1000)), own=lambda: np.full(9, strategy.rank))
checkpoint_files.watcher = slow
checkpoint.save(folder, wait=False)
if end in ("plain", "full"):
    pass
elif strategy.rank == 0:
    strategy.barrier("later") if end != "exit" else sys.exit(0)
elif end == "error":
    raise ZeroDivisionError
elif end == "exit":
    sys.exit(0)
elif end == "interrupt":
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(10)
"""


@pytest.mark.parametrize("end", ["plain", "error", "exit", "interrupt"])
def test_the_end_of_the_program_waits(launch: Launch, tmp_path: Path, end: str) -> None:
    job = launch(2, [launching.program(ENDS, tmp_path), tmp_path / "c", end])
    assert (job.returncode == 0) == (end in ("plain", "exit")), job
    found = ms.Checkpoint.arrays(tmp_path / "c")
    assert found["x"].tolist() == [1.0] * 1000
    assert [found[f"own@{rank}"].tolist() for rank in range(2)] == [[0] * 9, [1] * 9]
    assert sorted(os.listdir(tmp_path / "c")) == ["manifest.json", *(f"shard-0000{n}.safetensors" for n in range(2))]


def test_the_end_of_the_program_says_what_was_not_saved(launch: Launch, tmp_path: Path) -> None:
    job = launch(2, [launching.program(ENDS, tmp_path), tmp_path / "c", "full"]).check()
    assert "/c' was not saved: No space left" in job.stderr, job


def test_it_comes_into_place_without_a_further_call(strategy: ms.MirroredStrategy, folder: Path) -> None:
    _, manager = made(strategy, folder / "m")
    manager.save(1)
    with many_writers(), held() as go:
        saving = manager.save(2, wait=False)
        assert (manager.latest, manager.steps(), saving.is_committed) == (1, [1], False)
        strategy.barrier("all have looked")
        go.set()
        end = time.monotonic() + 30
        while RANK == 0 and not os.path.exists(manager.path_of(2)) and time.monotonic() < end:
            time.sleep(0.01)
        gather_texts("in place")
    assert os.path.exists(manager.path_of(2))
    manager.wait()
    assert (manager.latest, manager.steps(), saving.is_committed) == (2, [1, 2], True)
    manager.close()


def test_a_copy_is_taken_before_save_returns(strategy: ms.MirroredStrategy, folder: Path) -> None:
    """And the arrays of the program are not kept: of JAX, each step makes a new one, on the GPU."""
    arrays = [np.ones(5)]
    seen = weakref.ref(arrays[0])
    weights = new_variable(strategy, np.ones(5))
    checkpoint = checkpoint_of(strategy, x=lambda: arrays[0], weights=weights, lists=[1, [2]])
    saving = checkpoint.save(folder / "c", wait=False)
    weights.assign(np.zeros(5))
    checkpoint.objects["lists"][1].append(3)
    arrays.clear()
    gc.collect()
    assert seen() is None
    saving.wait()
    arrays.append(np.zeros(5))
    checkpoint.restore(folder / "c")
    assert [*arrays[0], *weights.numpy(), *checkpoint.objects["lists"]] == [1.0] * 11 + [[2]]


@pytest.mark.parametrize("call", ["save", "wait", "close"])
@pytest.mark.parametrize("again", [True, False], ids=["for good", "once"])
@pytest.mark.parametrize("rank", sorted({0, SIZE - 1}))
def test_what_fails_in_a_thread_is_raised_by_the_next_call(
    strategy: ms.MirroredStrategy, folder: Path, rank: int, again: bool, call: str
) -> None:
    x, manager = made(strategy, folder / "m")
    failures: list[int] = []

    def fail() -> None:
        failures.append(1)
        if rank == RANK and (again or len(failures) == 1):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    manager.save(3)
    x.assign(np.ones(5))
    with many_writers(), in_threads("create", fail):
        manager.save(4, wait=False)._written.wait()
    assert manager.restore() == manager.latest == 3  # the way back is open
    assert x.numpy().tolist() == [0.0] * 5
    found = outcomes(getattr(manager, call), *([5] if call == "save" else []))
    assert {outcome.error for outcome in found} == {errors.CheckpointWriteError}
    for words in (f"CheckpointManager.{call}: ", f"0004' with wait=False has failed on rank {rank}", "ENOSPC"):
        assert all(words in text for text in gather_texts(found[RANK].text)), found[RANK].text
    manager.save(5)  # it was raised
    manager.close()
    strategy.barrier("cleaned up")
    assert sorted(os.listdir(manager.directory)) == [".lock", "step-000000000003", "step-000000000005"]


@pytest.mark.parametrize("rank", sorted({0, SIZE - 1}))
def test_where_no_thread_can_be_started(
    strategy: ms.MirroredStrategy, folder: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """The rank writes at once."""
    x, manager = made(strategy, folder / "m")

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    x.assign(np.ones(5))
    with many_writers(), monkeypatch.context() as patch:
        if rank == RANK:
            patch.setattr(threading.Thread, "start", refuse)
        assert {outcome.error for outcome in outcomes(lambda: manager.save(1, wait=False))} == {None}
    manager.close()
    x.assign(np.zeros(5))
    assert manager.restore() == 1
    assert x.numpy().tolist() == [1.0] * 5


@pytest.mark.one_rank
def test_rank_0_waits_as_long_as_shards_grow_or_get_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a shard gets its name while rank 0 looks."""
    saving, scandir = Saving(Alone(), str(tmp_path / "c"), False), os.scandir
    saving._folder = str(tmp_path)
    looks = saving._looks(0.0)
    (tmp_path / "a").touch()

    def renamed_meanwhile(folder: str) -> list[os.DirEntry[str]]:
        entries = [*scandir(folder)]
        (tmp_path / "b").rename(tmp_path / "c")
        return entries

    assert [next(looks), next(looks)] == [["a"]] * 2
    (tmp_path / "a").rename(tmp_path / "b")
    assert next(looks) == ["b"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", renamed_meanwhile)
        assert next(looks) == ["c"]
    (tmp_path / "c").write_text("x")
    assert next(looks) == ["c"]
    assert [*looks] == []
