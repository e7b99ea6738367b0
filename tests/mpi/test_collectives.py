"""The collectives over MPI's own collectives: what a rank brings stays as it is, wherever it lies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from replicas import RANK, RANKS, SIZE, bits, value_of

import mpistrategy as ms
from mpistrategy.arrays.dtypes import COMBINE

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Any]:
    """Ranks that leave all-reduces to MPI, in pieces of 4 KiB."""
    with ms.MirroredStrategy() as strategy:
        communicator: Any = strategy.extended.communicator
        communicator.thresholds = replace(communicator.thresholds, window_bytes=2**40, lanes_bytes=2**40)
        communicator.piece_bytes = 4096
        yield communicator


@pytest.mark.parametrize("op", ["SUM", "MIN", "MAX"])
@pytest.mark.parametrize("count", [0, 1, 511, 512, 513, 5000, 2**16 + 1])
@pytest.mark.parametrize("where", ["elsewhere", "in place", "overlapping"])
def test_allreduce_of_a_source(ranks: Any, op: str, count: int, where: str) -> None:
    memory = np.zeros(count + 7)
    source, target = value_of(RANK, np.float64, (count,), 3), memory[:count]
    if where != "elsewhere":
        held = target if where == "in place" else memory[7:]
        held[...] = source
        source = held
    brought = source.copy()
    assert ranks.route(target.nbytes, target.dtype, op) == "mpi"
    ranks.allreduce(target, op, source)
    right = value_of(0, np.float64, (count,), 3)
    for rank in RANKS[1:]:
        right = COMBINE[op](right, value_of(rank, np.float64, (count,), 3))
    np.testing.assert_array_equal(target, right)  # exact in any order
    if where == "elsewhere":
        assert bits(source) == bits(brought), "what is brought stays as it is"


def test_a_source_may_be_read_only_and_have_gaps(ranks: Any) -> None:
    whole = np.arange(40.0) + RANK
    whole.setflags(write=False)
    target = np.empty(20)
    ranks.allreduce(target, "SUM", whole[::2])
    np.testing.assert_array_equal(target, SIZE * np.arange(0.0, 40.0, 2) + sum(RANKS))
