"""The memory of an arena is given back when its close() returns, unless one of its arrays is still held."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replicas import RANKS, SIZE, OnNodes, context, made, still_works

import mpistrategy as ms
from mpistrategy.reduction.arena import Arena

pytestmark = pytest.mark.mpi

STRATEGIES: dict[str, Callable[[], ms.Strategy]] = {
    "one node": ms.MirroredStrategy,
    "to one device": lambda: ms.MirroredStrategy(cross_device_ops=ms.ReductionToOneDevice()),
    "every rank a node": lambda: OnNodes(list(RANKS), ms.MpiAllReduce()),
    "nodes": lambda: OnNodes([rank // 2 for rank in RANKS], ms.MpiAllReduce()),
}
COUNT = 300_000


@pytest.fixture(scope="module")
def strategies() -> Iterator[dict[str, ms.Strategy]]:
    yield from made(STRATEGIES)


def reduce_in_step(strategy: ms.Strategy, arena: Arena) -> None:
    strategy.run(lambda: context().all_reduce("SUM", arena))


def reduce_in_the_background(strategy: ms.Strategy, arena: Arena) -> None:
    strategy.run(lambda: context().all_reduce_async("SUM", arena, out=arena).wait())


def reduce_outside(strategy: ms.Strategy, arena: Arena) -> None:
    strategy.reduce("SUM", arena)


def reduce_to(strategy: ms.Strategy, arena: Arena) -> None:
    strategy.extended.reduce_to("SUM", arena, arena)


WAYS = [reduce_in_step, reduce_in_the_background, reduce_outside, reduce_to]


@pytest.fixture
def no_gc() -> Iterator[None]:
    """Only what nobody refers to is freed, at once."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def mappings() -> int:
    """Return how many pieces of shared memory of ours this process sees."""
    return len(re.findall(r"(/dev/shm/|memfd:)mpistrategy", Path("/proc/self/maps").read_text()))


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", STRATEGIES)
def test_the_memory_is_back_when_close_returns(
    strategies: dict[str, ms.Strategy], where: str, way: Callable[[ms.Strategy, Arena], None]
) -> None:
    strategy = strategies[where]
    for shared_result in (False, True):
        if shared_result and way is reduce_in_the_background:
            continue
        way(strategy, strategy.arena([np.zeros(COUNT)], shared_result=shared_result))  # what is made once is there
        before = mappings()
        for _ in range(2):
            arena = strategy.arena([np.zeros(COUNT)], shared_result=shared_result)
            arena.values[0][...] = 1
            for _ in range(2):
                way(strategy, arena)
            held = [weakref.ref(arena._leaves[0]), *(weakref.ref(bucket.mine) for bucket in arena._buckets)]
            arena.close()
            assert not any(ref() is not None for ref in held)
            assert mappings() <= before
    assert still_works(strategy)


@pytest.mark.parametrize("where", STRATEGIES)
def test_an_array_that_is_held_keeps_its_memory(strategies: dict[str, ms.Strategy], where: str) -> None:
    strategy = strategies[where]
    arena = strategy.arena([np.zeros(COUNT), np.zeros(3)])
    arena.values[0][...] = arena.values[1][...] = 1
    reduce_in_step(strategy, arena)
    kept: Any = arena.values[1]
    arena.close()
    for _ in range(3):  # others take memory meanwhile
        other = strategy.arena([np.zeros(COUNT)])
        reduce_in_step(strategy, other)
        other.close()
    assert kept.tolist() == [SIZE] * 3
