"""save(wait=False): the checkpoint comes into place without a further call; the next call raises what has failed."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import launching
import numpy as np
import pytest
from checkpoints import checkpoint_of, held, in_threads, many_writers
from replicas import RANK, SIZE, gather_texts, new_variable, outcomes

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.checkpoint.saving import Saving
from mpistrategy.mpi.interface.ranks import Alone

Launch = Callable[..., launching.Finished]


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


with strategy.scope():
    checkpoint = ms.Checkpoint(x=ms.Variable(np.ones(1000)), own=lambda: np.full(9, strategy.rank))
checkpoint_files.watcher = slow
checkpoint.save(folder, wait=False)
if end == "plain":
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
