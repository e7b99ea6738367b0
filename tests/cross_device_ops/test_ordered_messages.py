"""OrderedAllReduce between nodes: two collectives of MPI for each piece, and memory for a few pieces."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from counting import counted_calls
from replicas import RANKS, SIZE, OnNodes, context

import mpistrategy as ms
from mpistrategy.arrays.dtypes import Array
from mpistrategy.cross_device_ops import ordered
from mpistrategy.cross_device_ops.ordered import combine_by_shares
from mpistrategy.reduction import collectives

PIECE = collectives.PIECE_BYTES


@pytest.fixture(scope="module")
def strategy() -> Iterator[ms.Strategy]:
    with OnNodes(RANKS, ms.OrderedAllReduce()) as made:
        yield made


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("count", [1, 1000, PIECE // 4, PIECE // 2 + 12_345])
def test_two_collectives_a_piece(strategy: ms.Strategy, count: int) -> None:
    ranks: Any = strategy.extended.communicator
    pieces = -(-count // (SIZE * -(-PIECE // 4 // SIZE)))
    with counted_calls(ranks) as calls:
        strategy.run(lambda: context().all_reduce("SUM", np.ones(count, np.float32)))
    assert calls == {"Alltoall": 2 * pieces}


class Pretended:
    """So many ranks, all of which bring what this one brings."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = size // 2, size
        self.calls: Counter[str] = Counter()
        self.guard = SimpleNamespace(on_all=lambda work: work())

    def alltoall(self, sent: Array, received: Array) -> None:
        self.calls["alltoall"] += 1
        received[...] = sent.reshape(self.size, -1)[self.rank]


@pytest.mark.skipif(SIZE > 1, reason="needs no MPI")
@pytest.mark.parametrize("size", [2, 16, 1024, 10_000])
def test_many_ranks_take_no_more(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 MB: the same calls and the same memory for any number of ranks."""

    def first(arrays: list[Array], targets: list[Array], *_: Any) -> None:
        for target in targets:
            np.copyto(target, arrays[0])

    monkeypatch.setattr(ordered, "combine_ordered", first)
    ranks: Any = Pretended(size)
    source, target = np.ones(25_000_000, np.float32), np.zeros(25_000_000, np.float32)
    tracemalloc.start()
    combine_by_shares(ranks, "SUM", source, target)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert ranks.calls["alltoall"] == ranks.calls.total() == 24
    assert peak < 4 * PIECE + size * 300
    assert (target == 1).all()
