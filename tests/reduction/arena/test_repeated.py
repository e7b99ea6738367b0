"""What reduces an arena again and again: the same sums, and the same errors on all ranks, as any other call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from replicas import RANK, SIZE

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.options import ReduceOp
from mpistrategy.reduction.arena.repeated import RepeatedSum, repeated_sum

pytestmark = pytest.mark.mpi(min_size=2)  # one rank shares memory with none
LAST = SIZE - 1


@pytest.fixture
def apart() -> Iterator[ms.MirroredStrategy]:
    """A strategy for this test alone."""
    with closing(ms.MirroredStrategy()) as made:
        yield made


def arena_of(strategy: ms.Strategy) -> tuple[Any, RepeatedSum]:
    arena = strategy.arena([np.zeros(5, np.float32), np.zeros((2, 3)), np.zeros(70_000, np.float32)])
    repeated = repeated_sum(arena, ReduceOp.MEAN, "add up", "a test")
    assert repeated is not None
    return arena, repeated


def call(arena: Any, repeated: RepeatedSum, *numbers: int, fill: Callable[[], None] | None = None) -> None:
    """Sum what depends on the rank, and look at the result."""

    def filled() -> None:
        for at, array in enumerate(arena.values):
            array[...] = (RANK + at + 1) / 3 + numbers[0]

    step, number = numbers
    repeated.run((step, number), f"step {step}, sum {number}: all", "all", fill or filled)


def right(arena: Any, repeated: RepeatedSum, *numbers: int) -> None:
    call(arena, repeated, *numbers)
    for at, array in enumerate(arena.values):
        total = array.dtype.type(0)
        for rank in range(SIZE):
            total += array.dtype.type((rank + at + 1) / 3 + numbers[0])
        assert (array == total / array.dtype.type(SIZE)).all()


def test_sums(apart: ms.MirroredStrategy) -> None:
    arena, repeated = arena_of(apart)
    for step in range(300):
        assert repeated.is_ready
        right(arena, repeated, step, step % 2)


@pytest.mark.parametrize("numbers", [(4, 0), (3, 1), (2, 5)])
def test_numbers_that_differ(apart: ms.MirroredStrategy, numbers: tuple[int, int]) -> None:
    arena, repeated = arena_of(apart)
    right(arena, repeated, 1, 0)
    for _ in range(2):
        with pytest.raises(errors.CollectiveMismatchError, match=f"step {numbers[0]}, sum {numbers[1]}"):
            call(arena, repeated, *(numbers if RANK == LAST else (3, 0)))
        right(arena, repeated, 3, 0)


def test_another_call(apart: ms.MirroredStrategy) -> None:
    arena, repeated = arena_of(apart)

    def mistake() -> None:
        if RANK == LAST:
            ms.get_replica_context().all_reduce("MEAN", arena)
        else:
            call(arena, repeated, 2, 0)

    for _ in range(2):
        right(arena, repeated, 1, 0)
        with pytest.raises(errors.CollectiveMismatchError, match="add up"):
            apart.run(mistake)


def test_a_rank_that_cannot_write_the_arena(apart: ms.MirroredStrategy) -> None:
    arena, repeated = arena_of(apart)

    def fails() -> None:
        raise ValueError("no gradient")

    for _ in range(2):
        with pytest.raises(ValueError if RANK == LAST else errors.RemoteError, match="no gradient"):
            call(arena, repeated, 1, 0, fill=fails if RANK == LAST else None)
        right(arena, repeated, 1, 0)


def test_a_raised_flag(apart: ms.MirroredStrategy) -> None:
    arena, repeated = arena_of(apart)
    guard: Any = apart.extended.communicator.guard
    for step in range(2):
        if RANK == LAST:
            guard.raise_flag()
        right(arena, repeated, step, 0)
        assert guard.flag_was_seen
        guard.lower_flags()


def test_when_the_general_way_is_asked(apart: ms.MirroredStrategy) -> None:
    _, repeated = arena_of(apart)
    found = []
    with apart.scope():
        found.append(repeated.is_ready)
    with closing(ms.MirroredStrategy()) as other, other.scope():
        found.append(repeated.is_ready)
    apart.close()
    found.append(repeated.is_ready)
    assert found == [True, False, False]
