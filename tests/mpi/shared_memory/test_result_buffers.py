"""Ordinary arrays are reduced in blocks of memory that the ranks of a node share, and the results stay there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from replicas import RANK, SIZE, context, expected, value_of

import mpistrategy as ms
from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.shared_memory import memory_limits
from mpistrategy.mpi.shared_memory.memory_limits import Room
from mpistrategy.mpi.shared_memory.result_buffers import buffer_bytes_for
from mpistrategy.mpi.tuning.files import trying
from mpistrategy.mpi.tuning.thresholds import DEFAULT

pytestmark = pytest.mark.skipif(SIZE == 1, reason="one rank shares with nobody")


@pytest.fixture(scope="module")
def strategy() -> Iterator[ms.MirroredStrategy]:
    """A strategy that leaves nothing of this size to MPI, whatever is best with this one."""
    with trying(DEFAULT), ms.MirroredStrategy() as made:
        yield made


def arrays_of(rank: int, round_: int, dtype: str = "float32") -> list[Array]:
    """Return a list that is too large for the mailboxes and small enough for a block."""
    shapes: list[tuple[int, ...]] = [(length,) for length in range(1, 300)] + [(7, 9), (), (0,)]
    return [value_of(rank, dtype, shape, 1000 * round_ + at) for at, shape in enumerate(shapes)]


def reduced(strategy: ms.Strategy, value: Any, op: str = "SUM") -> Any:
    return strategy.run(lambda: context().all_reduce(op, value))


def check(found: list[Array], round_: int, op: str = "SUM", dtype: str = "float32") -> None:
    everybodys = [arrays_of(rank, round_, dtype) for rank in range(SIZE)]
    for at, array in enumerate(found):
        wanted = expected(op, [theirs[at] for theirs in everybodys])
        np.testing.assert_array_equal(array, wanted)
        assert array.dtype == wanted.dtype
        assert array.shape == wanted.shape


def test_results_that_are_kept_stay(strategy: ms.Strategy) -> None:
    """More are kept than there are blocks, and of some only a part: another number on every rank."""
    kept = []
    for round_ in range(6):
        found = reduced(strategy, arrays_of(RANK, round_))
        kept.append(found if round_ % (RANK + 1) == 0 else [found[200][50:60]])
    for round_, found in enumerate(kept):
        if round_ % (RANK + 1) == 0:
            check(found, round_)
        else:
            everybodys = [arrays_of(rank, round_)[200] for rank in range(SIZE)]
            np.testing.assert_array_equal(found[0], expected("SUM", everybodys)[50:60])


def address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def in_block(strategy: ms.Strategy, array: Array) -> bool:
    """Return whether an array lies in one of this rank's blocks."""
    blocks = strategy.extended.communicator.result_buffers
    assert blocks is not None
    mine = [block for size in blocks._sizes.values() for block in size.mine]
    return any(address(block) <= address(array) < address(block) + block.nbytes for block in mine)


def test_memory_is_used_again(strategy: ms.Strategy) -> None:
    for _ in range(4):
        reduced(strategy, arrays_of(RANK, 0))
    places = {address(reduced(strategy, arrays_of(RANK, round_))[100]) for round_ in range(8)}
    assert len(places) == 1, "nobody holds a result"


@pytest.mark.parametrize("dtype", ["float32", "int8", "float16"])
@pytest.mark.parametrize("shape", [(10_007,), (2**18 + 1,)])
def test_a_large_array(strategy: ms.Strategy, shape: tuple[int, ...], dtype: str) -> None:
    for round_ in range(6):
        everybodys = [value_of(rank, dtype, shape, round_) for rank in range(SIZE)]
        for op in ("SUM", "MEAN") if dtype == "float32" else ("SUM",):
            mine = everybodys[RANK].copy()
            found = reduced(strategy, mine, op)
            np.testing.assert_array_equal(found, expected(op, everybodys))
            np.testing.assert_array_equal(mine, everybodys[RANK], "what a rank brings stays as it is")
    # Those of float16 are rounded to memory of their own; a few kilobytes travel in the mailboxes.
    assert in_block(strategy, found) == (dtype != "float16" and found.nbytes >= 2**15)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 2000)), min_size=1, max_size=12),
    dtypes=st.lists(st.sampled_from(["float32", "float64", "int64", "int16", "float16"]), min_size=1, max_size=3),
    op=st.sampled_from(["SUM", "MEAN", "MAX", "PROD"]),
)
def test_the_bits_are_those_of_the_window(
    strategy: ms.Strategy, shapes: list[tuple[int, int]], dtypes: list[str], op: str
) -> None:
    """Whether there are blocks depends on what came before: it must not be seen in a result."""
    arrays = [value_of(RANK, dtypes[at % len(dtypes)], shape, at) for at, shape in enumerate(shapes)]
    turned = [np.asfortranarray(array) if at % 3 == 1 else array for at, array in enumerate(arrays)]
    through_window = reduced(strategy, turned, op)
    for _ in range(4):
        found = reduced(strategy, turned, op)
        for one, other in zip(through_window, found, strict=True):
            assert one.tobytes() == other.tobytes()
            assert (one.dtype, one.shape) == (other.dtype, other.shape)


def test_ranks_may_ask_for_different_places(strategy: ms.Strategy) -> None:
    """One rank gives `out`, which takes no block: nobody takes one, and the next call does."""
    target = np.zeros(40_000, np.float32)
    for round_ in range(8):
        everybodys = [value_of(rank, "float32", target.shape, round_) for rank in range(SIZE)]
        out = target if round_ % SIZE == RANK else None
        found = strategy.run(lambda mine=everybodys[RANK], out=out: context().all_reduce("SUM", mine, out=out))
        assert (found is target) == (out is not None)
        np.testing.assert_array_equal(found, expected("SUM", everybodys))
    for _ in range(7):
        found = reduced(strategy, target)
    assert in_block(strategy, found)


def test_large_results_that_are_kept_stay(strategy: ms.Strategy) -> None:
    """More than there will ever be blocks."""
    everybodys = [[value_of(rank, "float64", (70_000,), round_) for rank in range(SIZE)] for round_ in range(40)]
    kept = [reduced(strategy, arrays[RANK])[RANK::7] for arrays in everybodys]
    for found, arrays in zip(kept, everybodys, strict=True):
        np.testing.assert_array_equal(found, expected("SUM", arrays)[RANK::7])
    assert any(in_block(strategy, found) for found in kept)
    assert not in_block(strategy, kept[-1])


def test_a_small_result_keeps_no_large_one(strategy: ms.Strategy) -> None:
    for _ in range(7):
        small, large = reduced(strategy, [np.ones(50), np.ones(400_000)])
    assert small.base.nbytes < 2**20 < large.base.nbytes
    assert in_block(strategy, small)
    assert in_block(strategy, large)


def test_sizes_that_are_not_asked_for_make_room(strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = strategy.extended.communicator.result_buffers
    assert blocks is not None
    monkeypatch.setattr("mpistrategy.mpi.shared_memory.result_buffers._KEPT_FOR", 20)
    monkeypatch.setattr(blocks, "_left", 2**20)
    sizes, left = {}, blocks._left
    monkeypatch.setattr(blocks, "_sizes", sizes)
    for _ in range(4):
        first = None
        first = reduced(strategy, np.ones(90_000))
    assert in_block(strategy, first)
    for _ in range(30):
        second = None
        second = reduced(strategy, np.ones(120_000))
    assert in_block(strategy, second)
    assert 0 <= blocks._left <= left
    assert len(sizes) == 1
    assert (first == SIZE).all(), "the block lives as long as its view"


def test_where_there_is_no_room_nothing_is_said(strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one rank sees that the memory is short; the window does it for all."""
    communicator = strategy.extended.communicator
    asked = []

    def no_room(nbytes: int) -> None:
        asked.append(nbytes)

    monkeypatch.setattr(communicator.result_buffers, "_share", no_room)
    for round_ in range(6):
        everybodys = [value_of(rank, "float32", (777_777,), round_) for rank in range(SIZE)]
        np.testing.assert_array_equal(reduced(strategy, everybodys[RANK]), expected("SUM", everybodys))
    assert len(asked) == 1, "it is not tried in every call"


def test_half_of_the_memory_stays_free(strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    little = Room(2 * SIZE * buffer_bytes_for(8 * 1_234_567) - 1, 2**30, "a made-up limit")
    with monkeypatch.context() as patch:
        if RANK == 0:
            patch.setattr(memory_limits, "memory", lambda: little)
        for _ in range(4):
            assert (reduced(strategy, np.ones(1_234_567)) == SIZE).all()
    blocks = strategy.extended.communicator.result_buffers
    assert blocks is not None
    assert not blocks._sizes[buffer_bytes_for(8 * 1_234_567)].mine


@given(nbytes=st.integers(1, 2**40))
def test_a_block_is_at_most_an_eighth_too_large(nbytes: int) -> None:
    length = buffer_bytes_for(nbytes)
    assert nbytes <= length <= max(2**18, nbytes * 9 / 8 + 1)
    assert buffer_bytes_for(length) == length


def test_ranks_that_differ_are_told_and_go_on(strategy: ms.Strategy) -> None:
    reduced(strategy, arrays_of(RANK, 0))
    value = arrays_of(RANK, 1)
    if RANK == SIZE - 1:
        value[3] = value[3].astype(np.float64)
    with pytest.raises(ms.errors.CollectiveMismatchError):
        reduced(strategy, value)
    check(reduced(strategy, arrays_of(RANK, 2)), 2)


def test_overflow_does_not_warn(strategy: ms.Strategy) -> None:
    value = [np.full(3000, 3e38, np.float32) for _ in range(20)]
    for _ in range(2):
        assert all(np.isinf(array).all() for array in reduced(strategy, value))
