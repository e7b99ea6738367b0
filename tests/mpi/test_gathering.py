"""Gathers and exchanges: one MPI collective for what MPI can count, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import RANK, RANKS, SIZE, OnNodes, bits, part_of, pieces_of, value_of

import mpistrategy as ms

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
            if way == "all":
                ranks.allgatherv(mine, counts, together)
            else:
                ranks.gatherv(mine, counts, together if root == RANK else None, root)
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
        ranks.alltoall(sent[RANK], received)
        for rank, row in enumerate(received):
            assert bits(row) == bits(sent[rank][RANK * count : (RANK + 1) * count])
