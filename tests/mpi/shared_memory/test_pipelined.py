"""The node's window: lists of arrays of any sizes come out as their reduction in rank order, however late ranks are."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import DTYPES, RANK, RANKS, SIXTEEN_BITS, SIZE, bits, part_of, same_everywhere

import mpistrategy as ms
from mpistrategy.arrays.dtypes import COMBINE, Array
from mpistrategy.mpi.shared_memory import bounce_buffers, setup
from mpistrategy.mpi.shared_memory.pipelined import PipelinedAllReduce
from mpistrategy.mpi.shared_memory.segments import ALIGNMENT
from mpistrategy.mpi.shared_memory.spin_wait import Waiting

pytestmark = pytest.mark.mpi(min_size=2)

WIRE_DTYPES = [dtype for dtype in DTYPES if dtype not in SIXTEEN_BITS]
CHUNKS = [64, 192, 4096]


@pytest.fixture(scope="module")
def windows(strategy: ms.Strategy) -> dict[int, PipelinedAllReduce]:
    """Windows of other chunk sizes than a strategy's own."""
    ranks = strategy.extended.communicator
    assert strategy.extended.communicator.node_of == (0,) * SIZE
    waiting = Waiting(SIZE, lambda: None)
    return {size: PipelinedAllReduce(ranks.shared(setup.pipelined_bytes(size)), size, waiting) for size in CHUNKS}


def idle(loops: int) -> None:
    """Be late: nothing waits for a clock here, nor sleeps."""
    for _ in range(loops):
        pass


def brought(rank: int, dtype: Any, count: int, seed: int) -> Array:
    random = np.random.default_rng([seed, rank, count])
    kind = np.dtype(dtype).kind
    if kind in "iu":
        return random.integers(0, 100, count).astype(dtype)
    values = random.standard_normal(count)  # sums of these depend on their order
    return np.asarray(values + 1j * random.standard_normal(count) if kind == "c" else values).astype(dtype)


def in_rank_order(op: str, arrays: list[Array], divisor: int) -> Array:
    total: Array = functools.reduce(COMBINE[op], arrays)
    return total if divisor == 1 else np.asarray(np.true_divide(total, total.dtype.type(divisor)))


# Around the borders of chunks of every size, and of the ranks' shares of them, for items of 1 to 32 bytes.
counts = st.sampled_from(
    [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 23, 24, 25, 63, 64, 65, 128, 511, 512, 513, 1024, 1025]
)


@settings(max_examples=part_of(100))
@given(
    chunk=st.sampled_from(CHUNKS),
    dtype=st.sampled_from(WIRE_DTYPES),
    sizes=st.lists(counts, min_size=1, max_size=8),
    op=st.sampled_from(list(COMBINE)),
    in_place=st.integers(0, 2**8 - 1),
    mean=st.booleans(),
    late=st.lists(st.integers(0, 5000), min_size=SIZE, max_size=SIZE),
)
def test_lists(
    windows: dict[int, PipelinedAllReduce],
    chunk: int,
    dtype: Any,
    sizes: list[int],
    op: str,
    in_place: int,
    mean: bool,
    late: list[int],
) -> None:
    if np.dtype(dtype).kind == "c":  # no order; and NumPy's products of them depend on where a slice ends
        op = "SUM"
    divisor = SIZE if mean and np.dtype(dtype).kind not in "iu" else 1
    everyones = [[brought(rank, dtype, n, i) for i, n in enumerate(sizes)] for rank in RANKS]
    sources = [array.copy() for array in everyones[RANK]]
    targets = [s if in_place >> i & 1 else np.full(s.shape, 77, dtype) for i, s in enumerate(sources)]
    idle(late[RANK])
    windows[chunk].allreduce_many(list(zip(sources, targets, strict=True)), op, divisor)
    for i, target in enumerate(targets):
        right = in_rank_order(op, [theirs[i] for theirs in everyones], divisor)
        assert bits(target) == bits(right)
        if target is not sources[i]:
            assert bits(sources[i]) == bits(everyones[RANK][i]), "what is brought stays as it is"
    assert same_everywhere(targets)


SPECIAL = [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 5e-324, 1.7e308, 1.1, -3.3]


@settings(max_examples=part_of(100))
@given(
    chunk=st.sampled_from(CHUNKS),
    dtype=st.sampled_from([dtype for dtype in WIRE_DTYPES if dtype.kind in "fc"]),
    count=counts,
    op=st.sampled_from(list(COMBINE)),
    offsets=st.lists(st.integers(0, 7), min_size=2 * SIZE, max_size=2 * SIZE),
    in_place=st.integers(0, 2**SIZE - 1),
    seed=st.integers(0, 1000),
)
def test_equal_bits_on_all_ranks_wherever_each_rank_has_its_arrays(
    windows: dict[int, PipelinedAllReduce],
    chunk: int,
    dtype: Any,
    count: int,
    op: str,
    offsets: list[int],
    in_place: int,
    seed: int,
) -> None:
    """Signs of zeros and of NaN, products of complex numbers: NumPy may do what it likes, but the same everywhere."""
    if np.dtype(dtype).kind == "c" and op in ("MIN", "MAX"):
        op = "PROD"
    random = np.random.default_rng([seed, RANK])
    with np.errstate(all="ignore"):
        values = np.where(random.integers(0, 2, count), random.choice(SPECIAL, count), random.standard_normal(count))
        if np.dtype(dtype).kind == "c":
            values = values + 1j * random.standard_normal(count)
        values = values.astype(dtype)
    source, target = (np.empty(count + 8, dtype)[offset:][:count] for offset in offsets[2 * RANK :][:2])
    source[...] = values
    if in_place >> RANK & 1:
        target = source
    windows[chunk].allreduce_many([(source, target)], op)
    assert same_everywhere(target)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("lateness", [0, 300, 20_000])
def test_many_reductions_in_a_row_never_mix(windows: dict[int, PipelinedAllReduce], chunk: int, lateness: int) -> None:
    common, own = np.random.default_rng(chunk), np.random.default_rng([chunk, RANK])
    for number in range(300 if lateness < 1000 else 60):
        idle(int(own.integers(0, lateness + 1)))
        dtype = WIRE_DTYPES[common.integers(len(WIRE_DTYPES))]
        sizes = common.integers(0, 3 * chunk // dtype.itemsize + 2, common.integers(1, 4))
        pairs = [(np.full(n, RANK + number % 50, dtype), np.empty(n, dtype)) for n in sizes]
        windows[chunk].allreduce_many(pairs)
        for _, target in pairs:
            assert np.all(target == np.array(sum(RANKS) + SIZE * (number % 50)).astype(dtype))
        if common.integers(5) == 0:
            windows[chunk].barrier()


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_rank_that_is_late_within_a_reduction(
    windows: dict[int, PipelinedAllReduce], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of chunks each rank stops now and then: nobody runs over what it has not read yet."""
    own = np.random.default_rng([7, RANK])

    def slow(*arrays: Array, out: Array) -> Array:
        if own.integers(4) == 0:
            idle(int(own.integers(0, 30_000)))
        return np.add(*arrays, out=out)

    count = 40 * chunk // 8
    values = [brought(rank, np.float64, count, 3) for rank in RANKS]
    right = in_rank_order("SUM", values, 1)
    monkeypatch.setitem(COMBINE, "SUM", slow)  # type: ignore[arg-type]
    for _ in range(3):
        target = values[RANK].copy()
        windows[chunk].allreduce_many([(target, target)])
        assert bits(target) == bits(right)


def test_what_was_written_before_a_barrier_is_seen_after_it(strategy: ms.Strategy) -> None:
    ranks = strategy.extended.communicator
    memory = ranks.shared(8 * 100)
    mine = [segment.view(np.int64) for segment in memory.segments]
    own = np.random.default_rng(RANK)
    for number in range(1, 300):
        idle(int(own.integers(0, 3000)))
        mine[RANK][:] = number
        ranks.node_barrier()
        assert all(np.all(theirs == number) for theirs in mine)
        ranks.node_barrier()


@settings(max_examples=part_of(200))
@given(count=st.integers(0, 5000), parts=st.integers(2, 64), itemsize=st.sampled_from([1, 2, 4, 8, 16, 32]))
def test_shares_are_whole_and_meet_at_cache_lines(count: int, parts: int, itemsize: int) -> None:
    borders = [bounce_buffers.share(count, part, parts, itemsize) for part in range(parts)]
    assert borders[0][0] == 0
    assert borders[-1][1] == count
    for (_, end), (begin, _) in itertools.pairwise(borders):
        assert end == begin
        assert end == count or end * itemsize % ALIGNMENT == 0
    lengths = [end - begin for begin, end in borders]
    assert min(lengths) >= 0
    assert max(lengths) <= -(-count // parts) + 2 * max(1, ALIGNMENT // itemsize)


def test_the_window_of_a_strategy_takes_large_arrays_and_no_small_ones(
    strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks: Any = strategy.extended.communicator
    went: list[int] = []
    usual: Callable[..., None] = ranks.pipelined.allreduce_many
    monkeypatch.setattr(
        ranks.pipelined,
        "allreduce_many",
        lambda pairs, *more: (went.extend(t.size for _, t in pairs), usual(pairs, *more)),
    )
    limit = ranks.thresholds.window_bytes // 4
    for size in (limit, limit - 1, 10 * limit):
        target = np.ones(size, np.float32)
        ranks.allreduce_many([(target, target)], nbytes=target.nbytes)
        assert np.all(target == SIZE)
    assert went == [limit, 10 * limit]


def test_no_warning_in_the_middle(windows: dict[int, PipelinedAllReduce]) -> None:
    """It would end one rank and leave its peers waiting."""
    with np.errstate(all="raise"):
        for op, value in (("SUM", 1.7e308), ("PROD", 1e300), ("PROD", 1e-300), ("SUM", np.inf * (-1) ** RANK)):
            target = np.full(100, value)
            windows[192].allreduce_many([(target, target)], op)
            windows[192].allreduce_many(((np.full(100, 5e-324), target),), "MIN", SIZE)
