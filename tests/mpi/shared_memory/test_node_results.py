"""Results of large sums stay in memory of the node: not overwritten while a part of them is held, then used again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replicas import RANK, RANKS, SIZE, in_step, one_node

import mpistrategy as ms
from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.shared_memory import memory_limits, node_sum
from mpistrategy.mpi.shared_memory.memory_limits import Room
from mpistrategy.mpi.tuning.thresholds import DEFAULT, trying

pytestmark = [pytest.mark.mpi(min_size=2), one_node]

#: Elements of the smallest array that has a block.
COUNT = node_sum.LEAST_BYTES // 8


@pytest.fixture
def strategy() -> Iterator[ms.MirroredStrategy]:
    """A strategy that leaves nothing of this size to MPI, whatever is best with this one."""
    with trying(DEFAULT), ms.MirroredStrategy() as made:
        yield made


def reduced(strategy: ms.Strategy, seed: float, count: int = COUNT, **more: Any) -> Array:
    found: Array = in_step(strategy, lambda ctx: ctx.all_reduce("SUM", np.full(count, float(seed + RANK)), **more))
    assert found[0] == found[-1] == SIZE * seed + sum(RANKS)
    return found


def address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def is_of_the_node(array: Array) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    places = [line.split()[0].split("-") for line in lines if "memfd:mpistrategy" in line]
    return any(int(start, 16) <= address(array) < int(end, 16) for start, end in places)


#: What a program may keep of an array instead of the array.
PARTS: dict[str, Callable[[Array], Any]] = {
    "itself": lambda a: a,
    "every third": lambda a: a[::-3],
    "ravel": lambda a: a.reshape(2, -1).ravel(),
    "another dtype": lambda a: a.view(np.int64),
    "a part of a memoryview": lambda a: memoryview(a)[3:9],
    "data": lambda a: a.reshape(2, -1).data,
    "frombuffer": lambda a: np.frombuffer(a, np.uint8),
    "a view of a view of a slice": lambda a: a[2:].reshape(-1, 2)[1:].T.view(),
    "a matrix": lambda a: a.reshape(2, -1).view(np.matrix),  # type: ignore[type-var]
    "a part of a record array": lambda a: a.view([("x", "f8")]).view(np.recarray).x[3:],
    "an iterator": lambda a: a.flat,
    "DLPack": lambda a: np.from_dlpack(a),
    "a strided window": lambda a: np.lib.stride_tricks.sliding_window_view(a, 3),
    "a mask": lambda a: np.ma.masked_array(a, a > 3),
    "broadcast": lambda a: np.broadcast_to(a, (3, a.size)),
}


def test_what_is_kept_of_a_result_stays_and_then_its_memory_is_used_again(strategy: ms.MirroredStrategy) -> None:
    """Each rank keeps another part at a time, as their programs may."""
    for _ in range(4):
        result = reduced(strategy, 1)
    for number, part in enumerate(PARTS.values()):
        result = reduced(strategy, number)
        where, kept = address(result), part(result) if (number + RANK) % 3 else None
        if kept is not None:
            before = np.array(kept, copy=True)
        del result
        gc.collect()
        places = [address(reduced(strategy, number + more)) for more in (1, 2, 3)]
        if kept is not None:
            assert where not in places
            np.testing.assert_array_equal(np.array(kept), before)
    del kept
    gc.collect()
    results = [reduced(strategy, 1) for _ in range(3)]
    assert where in map(address, results)
    assert any(map(is_of_the_node, results))


def test_more_results_than_there_will_be_blocks(strategy: ms.MirroredStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some ranks keep all, some a few: where one has no block, the sum goes in chunks; out= takes one for the call."""
    monkeypatch.setattr(node_sum, "_MOST_BLOCKS", 4)
    kept = []
    for number in range(12):
        target = np.empty(COUNT) if number % 4 == RANK else None
        kept.append(reduced(strategy, number, out=target))
        if RANK and number % (RANK + 1):
            del kept[-1]
    for result in kept:
        assert (result == result[0]).all()
    assert len({float(result[0]) for result in kept}) == len(kept)


@pytest.mark.parametrize("short", ["no memory", "half of it must stay free"])
def test_where_there_is_no_room_nothing_is_said(
    strategy: ms.MirroredStrategy, monkeypatch: pytest.MonkeyPatch, short: str
) -> None:
    """Only one rank sees that memory is short; it is not tried in every call."""
    asked: list[None] = []
    room = Room(2**20 if short == "no memory" else 2 * SIZE * 8 * COUNT - 1, 2**30, "this test")
    if RANK == 0:
        monkeypatch.setattr(memory_limits, "memory", lambda: (asked.append(None), room)[1])
    gc.collect()  # strategies of other tests
    files = Path("/proc/self/maps").read_text().count("memfd:mpistrategy")
    for number in range(5):
        reduced(strategy, number)
    assert RANK or len(asked) == 1
    assert Path("/proc/self/maps").read_text().count("memfd:mpistrategy") <= files


def test_results_outlive_the_strategy() -> None:
    with trying(DEFAULT), ms.MirroredStrategy() as strategy:
        for number in range(3):
            kept = reduced(strategy, number)
    del strategy
    gc.collect()
    assert (kept == 2 * SIZE + sum(RANKS)).all()
