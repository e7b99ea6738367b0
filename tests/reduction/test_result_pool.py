"""Memory of results: used again once nobody holds it, and never while somebody does, in whatever form."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import RANK, SIZE, bits, context, part_of

import mpistrategy as ms
from mpistrategy.arrays import nest
from mpistrategy.arrays.dtypes import Array
from mpistrategy.mpi.interface.buffers import Pool
from mpistrategy.mpi.tuning.files import trying
from mpistrategy.mpi.tuning.thresholds import DEFAULT, Thresholds

pytestmark = pytest.mark.mpi

FLOAT = np.dtype(np.float64)
LARGE = 2**17  # bytes, enough for the pool
N = LARGE // 8
#: Elements of blocks that the pool makes of huge pages, where the system has any.
HUGE = 2**18 + 8
WAYS: dict[str, Thresholds] = {
    "the defaults": DEFAULT,
    "everything in the window": Thresholds(64, 0, 4096, 64, 2**20),
    "nothing in the window": Thresholds(64, 2**40, 4096, 256, 2**20),
}


@pytest.fixture(scope="module", params=WAYS)
def any_strategy(request: pytest.FixtureRequest) -> Iterator[ms.Strategy]:
    with trying(WAYS[request.param]):
        made = ms.MirroredStrategy()
    with closing(made):
        yield made


def reduced(strategy: ms.Strategy, value: Any, op: str = "SUM", **more: Any) -> Any:
    return strategy.run(lambda: context().all_reduce(op, value, **more))


def address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


# ------------------------------------------------------------------------------------- the pool by itself

#: What a program may keep of an array instead of the array.
PARTS: dict[str, Callable[[Array], Any]] = {
    "itself": lambda a: a,
    "a slice": lambda a: a[5:50],
    "every third": lambda a: a[::-3],
    "another shape": lambda a: a.reshape(2, -1),
    "ravel": lambda a: a.reshape(2, -1).ravel(),
    "another dtype": lambda a: a.view(np.int64),
    "a memoryview": lambda a: memoryview(a),
    "data": lambda a: a.reshape(2, -1).data,
    "a part of a memoryview": lambda a: memoryview(a)[3:9],
    "frombuffer": lambda a: np.frombuffer(a, np.uint8),
    "a view of a view of a slice": lambda a: a[2:].reshape(-1, 2)[1:].T.view(),
    "a matrix": lambda a: a.reshape(2, -1).view(np.matrix),  # type: ignore[type-var]
    "a part of a record array": lambda a: a.view([("x", "f8")]).view(np.recarray).x[3:],
    "an iterator": lambda a: a.flat,
    "DLPack": lambda a: np.from_dlpack(a),
    "asarray": lambda a: np.asarray(a)[1:],
    "a strided window": lambda a: np.lib.stride_tricks.sliding_window_view(a, 3),
    "a mask": lambda a: np.ma.masked_array(a, a > 3),
    "broadcast": lambda a: np.broadcast_to(a, (3, a.size)),
}


@pytest.mark.parametrize("count", [N, HUGE])
@pytest.mark.parametrize("part", PARTS)
def test_a_block_is_not_used_again_while_a_part_of_it_is_held(part: str, count: int) -> None:
    pool = Pool()
    array = pool.take(FLOAT, (count,))
    array[:] = 1.5
    where = address(array)
    kept = PARTS[part](array)
    del array
    gc.collect()
    others = [pool.take(FLOAT, (count,)) for _ in range(3)]
    for other in others:
        assert not where <= address(other) < where + 8 * count
        other[:] = -1
    held = kept if isinstance(kept, np.ndarray) else np.array(kept)
    assert not np.any(np.asarray(held).view(np.ndarray) == -1)
    del others, other, held, kept
    gc.collect()
    again = [pool.take(FLOAT, (count,)) for _ in range(4)]
    assert where in map(address, again), "and is used again afterwards"


def test_large_blocks_begin_with_a_page_of_their_own() -> None:
    """The kernel makes huge pages of whole ones only."""
    pool = Pool()
    assert [address(pool.take(FLOAT, (HUGE,))) % 2**21 for _ in range(3)] == [0, 0, 0]


@settings(max_examples=part_of(60))
@given(steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.sampled_from(list(PARTS))), max_size=60))
def test_no_two_holders_share_memory(steps: list[tuple[int, int, str]]) -> None:
    pool = Pool()
    held: list[tuple[int, int, Any]] = []
    for size, drop, part in steps:
        array = pool.take(FLOAT, (N + size % 2 * N,))
        begin, end = address(array), address(array) + array.nbytes
        assert all(end <= other_begin or other_end <= begin for other_begin, other_end, _ in held)
        held.append((begin, end, PARTS[part](array)))
        del array
        if drop < len(held):
            held.pop(drop)


@pytest.mark.parametrize("shape", [(N,), (2, N // 2), (4, 1, N // 4)])
def test_dropped_memory_comes_again_for_any_dtype_of_its_size(shape: tuple[int, ...]) -> None:
    pool = Pool()
    first = pool.take(FLOAT, shape)
    where = address(first)
    assert first.shape == shape
    assert first.flags.c_contiguous
    assert first.flags.writeable
    del first
    second = pool.take(np.dtype(np.complex64), shape)
    assert address(second) == where
    del second
    assert address(pool.take(np.dtype(np.float32), (2 * N,))) == where


def test_dropped_memory_of_ever_new_sizes_is_given_back() -> None:
    """A program whose arrays never have the same size again must not collect all that it ever had."""
    pool = Pool()
    for number in range(300):
        pool.take(np.dtype(np.uint8), (2**22 + 64 * number,))
    assert pool_bytes(pool) <= 2**29


def test_memory_in_use_does_not_count_against_what_is_kept() -> None:
    """A model whose gradients are large in sum finds all its blocks again in the next step."""
    pool = Pool()
    sizes = [(2**25 + 64 * number,) for number in range(20)]  # 640 MiB, untouched
    addresses = []
    for _ in range(3):
        step = [pool.take(np.dtype(np.uint8), size) for size in sizes]
        addresses.append([address(array) for array in step])
        del step
    assert addresses[0] == addresses[1] == addresses[2]


def pool_bytes(pool: Pool) -> int:
    return sum(entry[0].nbytes for entries in pool._blocks.values() for entry in entries)


# ------------------------------------------------------------------------------------- results of a strategy


def values(seed: int) -> dict[str, Any]:
    """Return arrays that go alone, in packs, and in mailboxes."""
    return {
        "large": np.full(N, seed + RANK, FLOAT),
        "shaped": np.full((3, N), seed + RANK, np.float32),
        "half": np.full(N, seed + RANK, np.float16),
        "small": [np.full(3 + i, seed + RANK, FLOAT) for i in range(4)],
        "many": [np.full(900, seed + RANK, FLOAT) for _ in range(20)],
        "whole": np.full(N, seed + RANK, np.int64),
    }


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_results_share_nothing_with_each_other_nor_with_the_values(any_strategy: ms.Strategy, op: str) -> None:
    given_value = values(1)
    results = [reduced(any_strategy, given_value, op) for _ in range(3)]
    everything = [leaf for value in (given_value, *results) for leaf in nest.flatten(value)[0]]
    before = [bits(leaf) for leaf in everything]
    for number, leaf in enumerate(everything):
        assert leaf.flags.writeable
        kept = leaf.copy()
        leaf[...] = -7
        for other in range(len(everything)):
            if other != number:
                assert bits(everything[other]) == before[other]
        leaf[...] = kept


@pytest.mark.parametrize("part", PARTS)
def test_a_kept_part_is_never_overwritten(any_strategy: ms.Strategy, part: str) -> None:
    for value in (np.full(N, 1.0 + RANK), [np.full(900, 1.0 + RANK)] * 20, np.full(90, 1.0 + RANK)):
        result = nest.flatten(reduced(any_strategy, value))[0][0]
        right = bits(result)
        kept = PARTS[part](result)
        before = np.array(kept, copy=True)
        del result
        for seed in range(4):
            changed = nest.flatten(nest.map_structure(lambda leaf: leaf + seed + 1, value))[0]  # noqa: B023
            new = reduced(any_strategy, changed if isinstance(value, list) else changed[0])
            assert bits(nest.flatten(new)[0][0]) != right
            np.testing.assert_array_equal(np.array(kept), before)


def test_memory_of_dropped_results_is_used_again(any_strategy: ms.Strategy) -> None:
    packed = any_strategy.extended.communicator.thresholds.pack_bytes > 7200
    for value in (np.full(N, 1.0), {"a": np.full((2, N), 1.0)}, [np.full(900 if packed else N, 1.0)] * 20):
        seen = set()
        for _ in range(5):  # blocks are made when they are missed
            result = reduced(any_strategy, value)
        del result
        for _ in range(6):
            result = reduced(any_strategy, value)
            seen.add(address(nest.flatten(result)[0][0]))
            del result
        assert len(seen) == 1
        seen.clear()
        for _ in range(6):  # the usual loop: the old result goes when the new one is there
            result = reduced(any_strategy, value)
            seen.add(address(nest.flatten(result)[0][0]))
        assert len(seen) == 2
        del result


def test_a_lone_number_keeps_no_pack_alive(any_strategy: ms.Strategy) -> None:
    value = [np.array(1.0), np.ones(1), *[np.full(900, 1.0) for _ in range(20)], 2.0]
    for number in (0, 1, -1):
        kept = reduced(any_strategy, value)[number]
        base = getattr(kept, "base", None)
        assert base is None or base.nbytes <= 4096, "a few bytes hold the memory of a whole pack"


def test_memory_does_not_grow_with_ever_new_sizes(any_strategy: ms.Strategy) -> None:
    pool = any_strategy.extended.communicator.pool
    for number in range(100):
        assert reduced(any_strategy, np.ones(2**19 + number))[-1] == SIZE
    assert pool_bytes(pool) <= 2**29


def test_results_outlive_the_strategy() -> None:
    strategy = ms.MirroredStrategy()
    kept = reduced(strategy, [np.full(N, 1.0), np.full(5, 2.0)])
    strategy.close()
    del strategy
    gc.collect()
    assert np.all(kept[0] == SIZE)
    assert np.all(kept[1] == 2 * SIZE)
