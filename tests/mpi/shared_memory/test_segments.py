"""Memory that the ranks of a node share; and what becomes of a strategy when there is no room for it on one rank."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replicas import RANK, RANKS, SIZE, all_raise, context, one_node, still_works

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.mpi.shared_memory import memory_limits, segments
from mpistrategy.mpi.shared_memory.memory_limits import Room

pytestmark = [pytest.mark.mpi, one_node]


def mappings() -> int:
    """Return how many of our nameless files this process has mapped."""
    return len(re.findall(r"/memfd:mpistrategy ", Path("/proc/self/maps").read_text()))


@pytest.mark.mpi(min_size=2)
def test_nothing_is_left_behind() -> None:
    """No file ever has a name; the mapping goes with the last array in it."""
    gc.collect()  # strategies of other tests
    mapped, files = mappings(), len(os.listdir("/proc/self/fd"))
    strategy = ms.MirroredStrategy()
    ranks = strategy.extended.communicator
    memory = ranks.shared(100_000)
    kept = memory.segments[0][5:10]
    ranks.node_barrier()
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


def refuse(*_: object) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


#: What a rank finds, and the reason that rank 0 gives.  In a container that does not see the first rank's process, its
#: number is that of another process.
TROUBLES: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "no file": (segments, "_new_file", refuse, "No space left on device"),
    "another file": (
        *(segments, "_identity", lambda handle: f"that of {RANK}"),
        "no file for shared memory that all ranks of a node can open",
    ),
    "no room": (os, "posix_fallocate", refuse, "No space left on device"),
    "no mapping": (segments.mmap, "mmap", refuse, "No space left on device"),
    "a limit": (
        *(memory_limits, "memory", lambda: Room(100, 2**30, "what a made-up limit allows")),
        "where 0 MiB are free of what a made-up limit allows",
    ),
}
# The first rank makes the file, each rank reserves and maps it.
CASES = [(0, "no file"), *((rank, t) for rank in sorted({0, SIZE - 1}) for t in TROUBLES if t != "no file")]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("where", "trouble"), CASES)
def test_no_room_on_one_rank_means_mpi_on_all(monkeypatch: pytest.MonkeyPatch, where: int, trouble: str) -> None:
    *patch, reason = TROUBLES[trouble]
    open_files = len(os.listdir("/proc/self/fd"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with monkeypatch.context() as patched:
            if where == RANK:
                patched.setattr(*patch)
            strategy = ms.MirroredStrategy()
        ranks: Any = strategy.extended.communicator
        again = ranks.shared(1000)  # there would be room now, but what has been agreed stays
        for size in (0, 1, 100, 5000, 200_000):
            total = strategy.run(lambda size=size: context().all_reduce("SUM", np.full(size, RANK + 1, np.float16)))
            assert np.all(total == sum(RANKS) + SIZE)
        with strategy.scope():
            variable, arena = ms.Variable(np.zeros(3), aggregation="SUM"), strategy.arena([np.ones(3)])
        arena.values[0][...] = 1
        assert strategy.run(lambda: context().all_reduce("SUM", arena))[0].tolist() == [SIZE] * 3
        strategy.run(lambda: variable.assign(np.ones(3)))
        assert variable.numpy().tolist() == [SIZE] * 3
        all_raise(errors.CollectiveMismatchError, strategy.reduce, "SUM", 1.0 if RANK else np.ones(2))
    ours = [warning for warning in caught if issubclass(warning.category, errors.FallbackWarning)]
    assert len(ours) == (RANK == 0), [str(warning.message) for warning in ours]
    if RANK == 0:
        assert reason in str(ours[0].message)
        assert "srun --mem" in str(ours[0].message)
    assert ranks.mailboxes is None
    assert ranks.node_sum is None
    assert not again.is_shared
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
            if where == RANK:  # the first rank looks for room for all ranks of the node
                short = Room(SIZE * 3 * mmap.PAGESIZE - 1, 2**30, "this test")
                patched.setattr(memory_limits, "memory", lambda: None if RANK else short)
                patched.setattr(os, "posix_fallocate", refuse if RANK else os.posix_fallocate)
            memory = ranks.shared(3 * mmap.PAGESIZE)
        assert len(caught) == (RANK == 0)
        assert all("can share no more memory" in str(warning.message) for warning in caught)
        assert not memory.is_shared
        memory.own_segment[:] = 1
        assert ranks.mailboxes is not None
        assert still_works(strategy)
        assert ranks.shared(10_000).is_shared, "where there is room again"


# ------------------------------------------------------------------------------------- limits

V2 = {"memory.max": "8388608", "memory.current": "6291456", "memory.stat": "anon 5242880\nactive_file 512\n"}
V1 = {
    "memory.limit_in_bytes": "8388608",
    "memory.usage_in_bytes": "6291456",
    "memory.stat": "cache 5\ntotal_inactive_file 512\n",
}
NONE_V1 = {**V1, "memory.limit_in_bytes": "9223372036854771712"}
GROUPS: dict[str, tuple[str, dict[str, dict[str, str]], int]] = {
    "version 2": ("0::/job/step\n", {"job/step": V2}, 2**21 + 512),
    "of the group above": ("0::/job/step\n", {"job/step": {**V2, "memory.max": "max"}, "job": V2}, 2**21 + 512),
    "seen from inside a container": ("0::/hidden/by/the/container\n", {"": V2}, 2**21 + 512),
    "version 1": ("5:cpu,memory:/job\n1:name=systemd:/x\n", {"memory/job": V1}, 2**21 + 512),
    "none in version 1": ("5:memory:/job\n", {"memory/job": NONE_V1}, 2**30),
    "none": ("0::/job\n", {"job": {**V2, "memory.max": "max"}}, 2**30),
    "used up": ("0::/job\n", {"job": {**V2, "memory.current": "9388608"}}, 0),
    "unreadable": ("0::/../..\nnonsense\n", {"": {"memory.max": "lots", "memory.current": ""}}, 2**30),
}


@pytest.mark.mpi(max_size=1)
@pytest.mark.parametrize("case", GROUPS)
def test_the_limits_of_control_groups_are_known_beforehand(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str
) -> None:
    groups, folders, free = GROUPS[case]
    (tmp_path / "meminfo").write_text("MemTotal: 2097152 kB\nMemFree: 5 kB\nMemAvailable: 1048576 kB\n")
    (tmp_path / "cgroup").write_text(groups)
    for folder, files in folders.items():
        (tmp_path / "mount" / folder).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (tmp_path / "mount" / folder / name).write_text(text)
    monkeypatch.setattr(memory_limits, "_MEMINFO", str(tmp_path / "meminfo"))
    monkeypatch.setattr(memory_limits, "_CGROUP", str(tmp_path / "cgroup"))
    monkeypatch.setattr(memory_limits, "_MOUNT", str(tmp_path / "mount"))
    room = memory_limits.memory()
    assert room is not None
    assert room.free == free
    assert ("the node's memory" if free == 2**30 else str(tmp_path)) in room.of
