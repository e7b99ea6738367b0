"""Gathers and exchanges: one MPI collective for what MPI can count, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from counting import counted_calls
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import RANK, RANKS, SIZE, OnNodes, bits, part_of, pieces_of, value_of

import mpistrategy as ms
from mpistrategy.mpi.interface.ranks import Alone
from mpistrategy.testing import run_replicas

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture(scope="module", params=["one node", "each its node"])
def strategy(request: pytest.FixtureRequest) -> Iterator[ms.Strategy]:
    makers = {"one node": ms.MirroredStrategy, "each its node": lambda: OnNodes(RANKS, ms.MpiAllReduce())}
    with makers[request.param]() as made:
        yield made


def blocks_of(counts: list[int], dtype: Any = "f4") -> list[np.ndarray]:
    return [value_of(rank, dtype, (count,), 7) for rank, count in enumerate(counts)]


@settings(max_examples=part_of(120), deadline=None)
@given(
    counts=st.lists(st.integers(0, 40), min_size=SIZE, max_size=SIZE) | st.integers(0, 40).map(lambda n: [n] * SIZE),
    most=st.sampled_from([1, 7, 64, 100, 2**30]),
    root=st.sampled_from(RANKS),
    dtype=st.sampled_from(["u1", "f4", "c16"]),
    is_there=st.booleans(),
)
def test_blocks_lie_one_after_the_other(
    strategy: ms.Strategy, counts: list[int], most: int, root: int, dtype: str, is_there: bool
) -> None:
    ranks: Any = strategy.extended.communicator
    blocks = blocks_of(counts, dtype)
    wanted = np.concatenate(blocks)
    start = sum(counts[:RANK])
    with pieces_of(strategy, most):
        for way in ("all", "one"):
            together = np.zeros(sum(counts), dtype)
            mine = blocks[RANK].copy()
            if is_there:
                mine = together[start : start + counts[RANK]]
                mine[...] = blocks[RANK]
            with counted_calls(ranks) as calls:
                if way == "all":
                    ranks.allgatherv(mine, counts, together)
                else:
                    ranks.gatherv(mine, counts, together if root == RANK else None, root)
            assert calls.total() == 1 or wanted.nbytes > most or way == "one"
            if way == "all" or root == RANK:
                assert bits(together) == bits(wanted)
            if not is_there:
                assert bits(mine) == bits(blocks[RANK])


@pytest.mark.parametrize("dtype", ["u1", "f8", "c8"])
def test_each_rank_gets_its_part_of_all(strategy: ms.Strategy, dtype: str) -> None:
    ranks: Any = strategy.extended.communicator
    for count in (0, 1, 5000):
        sent = [value_of(rank, dtype, (SIZE * count,), 5) for rank in RANKS]
        received = np.zeros((SIZE, count), dtype)
        with counted_calls(ranks) as calls:
            ranks.alltoall(sent[RANK], received)
        assert calls == {"Alltoall": 1}
        for rank, row in enumerate(received):
            assert bits(row) == bits(sent[rank][RANK * count : (RANK + 1) * count])


def _all_three(ranks: Any) -> tuple[list[float], list[float], list[float]]:
    rank, size = ranks.rank, ranks.size
    counts = [number + 1 for number in range(size)]
    mine = np.full(rank + 1, float(rank))
    everyones, of_last = np.zeros(sum(counts)), np.zeros(sum(counts))
    ranks.allgatherv(mine, counts, everyones)
    ranks.gatherv(mine, counts, of_last if rank == size - 1 else None, size - 1)
    received = np.zeros((size, 2))
    ranks.alltoall(np.arange(2.0 * size) + 100 * rank, received)
    return everyones.tolist(), of_last.tolist(), received.reshape(-1).tolist()


def test_one_rank_and_threads_do_the_same(strategy: ms.Strategy) -> None:
    assert _all_three(Alone()) == ([0.0], [0.0], [0.0, 1.0])
    simulated = run_replicas(lambda: _all_three(ms.MirroredStrategy().extended.communicator), SIZE)
    assert _all_three(strategy.extended.communicator) == simulated[RANK]
