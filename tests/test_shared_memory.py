"""Memory that the ranks of a node share; and what becomes of a strategy when there is no room for it on one rank."""

from __future__ import annotations

import errno
import gc
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replicas import BFLOAT16, RANK, RANKS, SIZE, context, outcomes, same_everywhere, still_works

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.errors import FallbackWarning
from mpistrategy.mpi import shared_memory
from mpistrategy.mpi.shared_memory import ALIGNMENT, FOLDER, private_memory

pytestmark = pytest.mark.mpi


def files_in_memory() -> set[str]:
    return {name for name in os.listdir(FOLDER) if name.startswith("mpistrategy-")}


def lasting(names: set[str]) -> set[str]:
    """Return which of these files stay; another job's are there for a moment only."""
    end = time.monotonic() + 10
    while (names := names & files_in_memory()) and time.monotonic() < end:
        time.sleep(0.01)
    return names


def mappings() -> int:
    """Return how many of our nameless files this process has mapped."""
    return Path("/proc/self/maps").read_text().count("/dev/shm/mpistrategy-")


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 4095, 4096, 4097, 1_000_000])
def test_every_rank_sees_all_segments(strategy: ms.Strategy, nbytes: int) -> None:
    ranks = strategy.extended.communicator
    memory = ranks.shared(nbytes)
    assert memory.mine.size == nbytes
    assert memory.mine.dtype == np.uint8
    assert not memory.mine.any(), "zeroed"
    assert memory.is_shared == (SIZE > 1)
    if not memory.is_shared:
        return
    assert memory.local_rank == RANK
    assert len(memory.segments) == SIZE
    assert all(segment.__array_interface__["data"][0] % ALIGNMENT == 0 for segment in memory.segments)
    ranks.node_barrier()
    memory.mine[:] = RANK + 1
    ranks.node_barrier()
    assert [set(segment.tolist()) for segment in memory.segments] == [{r + 1} if nbytes else set() for r in RANKS]
    ranks.node_barrier()


def test_private_memory_has_the_same_alignment() -> None:
    for nbytes in (1, 100, 10_000):
        memory = private_memory(nbytes)
        assert memory.mine.size == nbytes
        assert not memory.is_shared
        assert memory.mine.__array_interface__["data"][0] % ALIGNMENT == 0


@pytest.mark.mpi(min_size=2)
def test_nothing_is_left_behind() -> None:
    """The file has no name from the beginning on; the mapping goes with the last array in it."""
    gc.collect()  # strategies of other tests
    mapped, files = mappings(), len(os.listdir("/proc/self/fd"))
    strategy = ms.MirroredStrategy()
    ranks = strategy.extended.communicator
    memory = ranks.shared(100_000)
    kept = memory.segments[0][5:10]
    ranks.node_barrier()
    assert not {name for name in files_in_memory() if f"{name}" in Path("/proc/self/maps").read_text()}
    assert mappings() == mapped + 2
    kept[...] = 7
    ranks.node_barrier()
    strategy.close()
    del memory, ranks, strategy
    gc.collect()
    assert mappings() == mapped + 1
    assert kept.tolist() == [7] * 5
    del kept
    gc.collect()
    assert mappings() == mapped
    assert len(os.listdir("/proc/self/fd")) <= files


# ------------------------------------------------------------------------------------- no room


def no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "FOLDER", "/dev/shm/there-is-no-such-folder")


def refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", refuse)


def no_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "ftruncate", refuse)


def no_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory.mmap, "mmap", refuse)


TROUBLES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "no folder": (no_folder, "No such file or directory"),
    "no room": (no_room, "No space left on device"),
    "no length": (no_length, "No space left on device"),
    "no mapping": (no_mapping, "No space left on device"),
}
# The first rank makes the file, each rank reserves and maps it.
CASES = [(0, "no folder"), (0, "no length"), *((rank, t) for rank in {0, SIZE - 1} for t in ("no room", "no mapping"))]


def assert_all_works(strategy: ms.Strategy) -> None:
    """Reduce arrays that go in cells, packs and chunks elsewhere; numbers, arenas, variables; and make a mistake."""

    def step(value: Any, **more: Any) -> Any:
        return strategy.run(lambda: context().all_reduce("SUM", value, **more))

    for dtype in (np.float64, np.float16, BFLOAT16, np.int8):
        for size in (0, 1, 100, 5000, 200_000):
            total = step(np.full(size, RANK + 1, dtype))
            assert np.all(total == sum(RANKS) + SIZE)
            assert same_everywhere(total)
    assert step(1.5) == 1.5 * SIZE
    assert step({"a": 1, "b": [2.0, np.ones(3)]})["a"] == SIZE
    value = np.ones(100_000)
    assert step(value, out=value) is value
    assert np.all(value == SIZE)
    with strategy.scope():
        variable = ms.Variable(np.full(3, 5.0), aggregation="SUM")
    arena = strategy.arena([np.ones(3)])
    arena.values[0][...] = RANK
    assert strategy.run(lambda: context().all_reduce("SUM", arena))[0].tolist() == [sum(RANKS)] * 3
    strategy.run(lambda: variable.assign(np.full(3, RANK + 1.0)))
    assert variable.numpy().tolist() == [sum(RANKS) + SIZE] * 3
    ends = outcomes(lambda: step(1.0 if RANK else np.ones(2)))
    assert [end.error for end in ends] == [errors.CollectiveMismatchError] * SIZE
    assert still_works(strategy)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("where", "trouble"), CASES)
def test_no_room_on_one_rank_means_mpi_on_all(monkeypatch: pytest.MonkeyPatch, where: int, trouble: str) -> None:
    make, reason = TROUBLES[trouble]
    before, open_files = files_in_memory(), len(os.listdir("/proc/self/fd"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with monkeypatch.context() as patched:
            if where == RANK:
                make(patched)
            strategy = ms.MirroredStrategy()
        ranks: Any = strategy.extended.communicator
        again = ranks.shared(1000)  # there would be room now, but what has been agreed stays
        assert_all_works(strategy)
    ours = [warning for warning in caught if issubclass(warning.category, FallbackWarning)]
    assert len(ours) == (RANK == 0), [str(warning.message) for warning in ours]
    if RANK == 0:
        assert reason in str(ours[0].message)
        assert "--shm-size" in str(ours[0].message)
    assert ranks.cells is None
    assert ranks.window is None
    assert not again.is_shared
    assert not lasting(files_in_memory() - before), "no file is left"
    ranks.node_barrier()
    strategy.close()
    del again, ranks, strategy
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= open_files + 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("where", [0, SIZE - 1])
def test_no_room_later(monkeypatch: pytest.MonkeyPatch, where: int) -> None:
    """A strategy that has its window goes on with it; only the new memory is each rank's own."""
    with ms.MirroredStrategy() as strategy:
        ranks = strategy.extended.communicator
        with warnings.catch_warnings(record=True) as caught, monkeypatch.context() as patched:
            warnings.simplefilter("always")
            if where == RANK:
                no_room(patched)
            memory = ranks.shared(10_000)
        assert len(caught) == (RANK == 0)
        assert all("cannot share more memory" in str(warning.message) for warning in caught)
        assert not memory.is_shared
        memory.mine[:] = 1
        assert ranks.cells is not None
        assert still_works(strategy)
        assert ranks.shared(10_000).is_shared, "where there is room again"
