"""Random streams: shared ones are equal everywhere, replicas' own are different, neither depends on how many."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from replicas import RANK, SIZE, gather_texts, part_of

import mpistrategy as ms
from mpistrategy.testing import run_replicas

pytestmark = pytest.mark.mpi


def numbers(generator: np.random.Generator) -> list[int]:
    return [int(x) for x in generator.integers(0, 2**63, 8)]


@settings(max_examples=part_of(30))
@given(seed=st.integers(0, 2**200))
def test_no_stream_depends_on_the_number_of_replicas(strategy: ms.Strategy, seed: int) -> None:
    """The first replicas of 5 have the numbers of these; a single one has replica 0's."""
    mine = strategy.rng(seed)
    found = [numbers(mine.shared), numbers(mine.replica), numbers(mine.at(3, 5))]

    def program() -> list[list[int]]:
        streams = ms.MirroredStrategy().rng(seed)
        return [numbers(streams.shared), numbers(streams.replica), numbers(streams.at(3, 5))]

    assert run_replicas(program, 5)[RANK] == found
    assert len(set(gather_texts(str(found[1])))) == SIZE
    alone = ms.OneDeviceStrategy().rng(seed)
    assert (numbers(alone.replica) == found[1]) == (RANK == 0)
    assert numbers(alone.shared) == found[0], "drawing from the own stream moves the shared one"


def test_equal_seeds_give_equal_streams_and_different_ones_do_not(strategy: ms.Strategy) -> None:
    int_like: Any = np.int64(3)
    assert numbers(strategy.rng(3).replica) == numbers(strategy.rng(int_like).replica)
    all_streams = [[s.shared, s.replica, s.at(), s.at(0), s.at(1), s.at(0, 0)] for s in map(strategy.rng, range(5))]
    drawn = [tuple(numbers(stream)) for stream in itertools.chain(*all_streams)]
    assert len(set(drawn)) == len(drawn)


@settings(max_examples=part_of(40))
@example(keys=[(2**32,), (0, 1), (1, 0), (0, 0, 1), (2**63,), (0, 2**31)])  # NumPy strings 32-bit words together
@given(keys=st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=3).map(tuple), min_size=2, max_size=5, unique=True))
def test_numbered_streams_differ_and_are_equal_everywhere(strategy: ms.Strategy, keys: list[tuple[int, ...]]) -> None:
    streams = strategy.rng(1)
    drawn = [tuple(numbers(streams.at(*key))) for key in keys]
    assert len(set(drawn)) == len(keys)
    assert drawn == [tuple(numbers(streams.at(*key))) for key in keys], "a numbered stream has no memory"
    assert len(set(gather_texts(str(drawn)))) == 1
