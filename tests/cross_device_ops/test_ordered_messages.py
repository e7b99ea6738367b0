"""OrderedAllReduce between nodes: two collectives of MPI for each piece, and memory for a few pieces."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from counting import counted_calls
from replicas import RANKS, SIZE, OnNodes, context

import mpistrategy as ms
from mpistrategy.arrays.dtypes import Array
from mpistrategy.cross_device_ops import ordered
from mpistrategy.cross_device_ops.ordered import gather_and_combine
from mpistrategy.reduction.layout.destinations import EVERY_RANK, Destination

PIECE = ordered._PIECE_BYTES


@pytest.fixture(scope="module")
def strategy() -> Iterator[ms.Strategy]:
    with OnNodes(RANKS, ms.OrderedAllReduce()) as made:
        yield made


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("count", [1, 1000, PIECE // 4, PIECE // 2 + 12_345])
def test_two_collectives_a_piece(strategy: ms.Strategy, count: int) -> None:
    ranks: Any = strategy.extended.communicator
    pieces = -(-count // (SIZE * (PIECE // 4 // SIZE)))
    with counted_calls(ranks) as calls:
        strategy.run(lambda: context().all_reduce("SUM", np.ones(count, np.float32)))
    assert calls == {"Alltoall": pieces, "Allgather": pieces}
    with counted_calls(ranks) as calls:
        strategy.extended.reduce_to("SUM", np.ones(count, np.float32), f"task:{SIZE - 1}")
    assert calls["Alltoall"] == calls["Gather"] + calls["Gatherv"] == pieces == calls.total() / 2


class Pretended:
    """So many ranks, all of which bring what this one brings."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = size // 2, size
        self.calls: Counter[str] = Counter()
        self.guard = SimpleNamespace(on_all=lambda work: work())

    def alltoall(self, sent: Array, received: Array) -> None:
        self.calls["alltoall"] += 1
        received[...] = sent.reshape(self.size, -1)[self.rank]

    def allgatherv(self, block: Array, counts: Sequence[int], together: Array) -> None:
        self.calls["allgatherv"] += 1
        assert block.size == counts[self.rank]
        assert together.size == sum(counts)

    def gatherv(self, block: Array, counts: Sequence[int], together: Array | None, root: int) -> None:
        self.calls["gatherv"] += 1


@pytest.mark.skipif(SIZE > 1, reason="needs no MPI")
@pytest.mark.parametrize("size", [2, 16, 1024, 10_000])
@pytest.mark.parametrize("destination", [EVERY_RANK, Destination((0,))], ids=str)
def test_many_ranks_take_no_more(size: int, destination: Destination, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 MB: the same calls and the same memory for any number of ranks."""

    def first(arrays: list[Array], targets: list[Array], *_: Any) -> None:
        np.copyto(targets[0], arrays[0])

    monkeypatch.setattr(ordered, "combine_ordered", first)
    ranks: Any = Pretended(size)
    source, target = np.ones(25_000_000, np.float32), np.zeros(25_000_000, np.float32)
    tracemalloc.start()
    gather_and_combine(ranks, "SUM", destination, source, target)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert ranks.calls["alltoall"] == 12
    assert ranks.calls.total() == 24
    assert peak < 4 * PIECE + size * 300
    if destination is EVERY_RANK:
        count = PIECE // 4 // size
        assert (target[ranks.rank * count : (ranks.rank + 1) * count] == 1).all(), (
            "this rank's share of the first piece"
        )
