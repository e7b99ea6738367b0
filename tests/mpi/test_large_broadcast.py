"""The broadcast of large arrays: on one node through shared memory, else by one Bcast of MPI."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from counting import counted_calls
from replicas import RANK, RANKS, SIZE, OnNodes, same_everywhere

import mpistrategy as ms
from mpistrategy.mpi.over_mpi.collectives import SHARED_BROADCAST_BYTES as LEAST_BYTES
from mpistrategy.mpi.over_mpi.communicator import MpiCommunicator
from mpistrategy.mpi.shared_memory import memory_limits, node_broadcast
from mpistrategy.mpi.shared_memory.memory_limits import Room

pytestmark = pytest.mark.mpi(min_size=2)

NODES = {
    "one node": [0] * SIZE,
    "two nodes": [rank // 2 for rank in RANKS],
    "odd and even ranks": [rank % 2 for rank in RANKS],
    "the last alone": [int(rank == SIZE - 1) for rank in RANKS],
    "the first alone": [min(rank, 1) for rank in RANKS],
}
SLOT = node_broadcast.slot_bytes_for(SIZE)


@pytest.fixture(autouse=True)
def with_cores_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine may have fewer cores than there are ranks."""
    monkeypatch.setattr(MpiCommunicator, "is_crowded", False)


@pytest.fixture(params=NODES)
def node_of(request: pytest.FixtureRequest) -> list[int]:
    return NODES[request.param]


@pytest.fixture
def strategy(node_of: list[int]) -> Iterator[ms.Strategy]:
    with OnNodes(node_of, ms.MpiAllReduce()) as made:
        yield made


def content(nbytes: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def sent(ranks: Any, nbytes: int, root: int, seed: int) -> Any:
    """Return what the ranks have after a broadcast."""
    buffer = content(nbytes, seed) if root == RANK else np.zeros(nbytes, np.uint8)
    ranks.bcast(buffer, root)
    return buffer


def test_every_size_arrives_from_every_rank(strategy: ms.Strategy, node_of: list[int]) -> None:
    ranks: Any = strategy.extended.communicator
    sizes = [0, 1, LEAST_BYTES - 1, LEAST_BYTES, SLOT - 1, SLOT + 1, 9 * 2**18 + 5, 2 * 2**20, 10 * SLOT + 3]
    for seed, nbytes in enumerate(sizes):
        for root in RANKS:
            found = sent(ranks, nbytes, root, seed)
            assert np.array_equal(found, content(nbytes, seed)), (nbytes, root)
    assert (ranks.once.made.get("node broadcast") is not None) == (max(node_of) == 0)


def test_many_in_turn_from_changing_ranks(strategy: ms.Strategy) -> None:
    """A slot is written again only when all have read it, whoever writes."""
    ranks: Any = strategy.extended.communicator
    random = np.random.default_rng(1)
    found = []
    for seed in range(60):
        nbytes, root = int(random.integers(LEAST_BYTES, 3 * SLOT)), int(random.integers(SIZE))
        found.append(sent(ranks, nbytes, root, seed)[:: 2**10])
        assert np.array_equal(found[-1], content(nbytes, seed)[:: 2**10])
    assert same_everywhere(found)


def test_mpi_is_not_called_on_one_node(strategy: ms.Strategy, node_of: list[int]) -> None:
    ranks: Any = strategy.extended.communicator
    with counted_calls(ranks) as calls:
        sent(ranks, 5 * 2**20, SIZE - 1, 1)
    assert calls == ({"Bcast": 1} if max(node_of) else {})


def test_small_ones_and_crowded_nodes_take_one_bcast(strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: Any = strategy.extended.communicator
    with counted_calls(ranks) as calls:
        sent(ranks, LEAST_BYTES - 1, 0, 0)
    assert calls == {"Bcast": 1}
    monkeypatch.setattr(MpiCommunicator, "is_crowded", True)
    with counted_calls(ranks) as calls:
        found = sent(ranks, 2**22, SIZE - 1, 1)
    assert calls == {"Bcast": 1}
    assert np.array_equal(found, content(2**22, 1))


def test_without_room_mpi_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with ms.MirroredStrategy() as strategy:
        ranks: Any = strategy.extended.communicator
        if RANK == 0:
            monkeypatch.setattr(memory_limits, "memory", lambda: Room(2**20, 2**20, "this test"))
        with counted_calls(ranks) as calls:
            found = sent(ranks, 2**22, 1, 1)
        assert calls == {"Bcast": 1}
        assert np.array_equal(found, content(2**22, 1))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 64, 128])
def test_a_node_shares_a_few_mebibytes(ranks: int) -> None:
    assert 2**21 < ranks * node_broadcast.segment_bytes(ranks) <= 9 * 2**20
    assert node_broadcast.slot_bytes_for(ranks) % 64 == 0
