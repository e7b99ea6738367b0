"""NodeSum: arrays of any sizes come out as their combination in rank order, on all ranks, however late these are."""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import DTYPES, RANK, RANKS, SIXTEEN_BITS, SIZE, bits, one_node, part_of, same_everywhere

import mpistrategy as ms
from mpistrategy.arrays.dtypes import COMBINE, Array, host_wire_dtype
from mpistrategy.cross_device_ops.algorithms import combine_ordered
from mpistrategy.mpi.shared_memory import node_sum
from mpistrategy.mpi.shared_memory.node_sum import (
    Combination,
    NodeSum,
    ShareOfNode,
    in_rank_order,
    segment_bytes,
)
from mpistrategy.mpi.shared_memory.segments import ALIGNMENT
from mpistrategy.mpi.shared_memory.spin_wait import SpinWait

pytestmark = [pytest.mark.mpi(min_size=2), one_node]

WIRE_DTYPES = [dtype for dtype in DTYPES if dtype not in SIXTEEN_BITS]
CHUNKS = [64, 192, 4096]
#: In place of the size of chunks: where the arrays are; in blocks of the node, where there is one.
WHERE_THEY_ARE, IN_BLOCKS = 0, 1
#: How a rank adds what all have brought.
COMBINATIONS: dict[str, Combination] = {"rank order": in_rank_order, "order of the values": combine_ordered}
SPECIAL = [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 5e-324, 1.7e308, 1.1, -3.3]


@pytest.fixture(scope="module")
def sums(strategy: ms.Strategy) -> dict[int, NodeSum]:
    """Sums in other chunks than a strategy's own."""
    ranks = strategy.extended.communicator
    assert strategy.extended.communicator.node_of == (0,) * SIZE
    waiting = SpinWait(lambda: None, is_crowded=len(os.sched_getaffinity(0)) < SIZE).until
    made = {size: NodeSum(ranks.shared(segment_bytes(size)), size, waiting) for size in CHUNKS}
    made[IN_BLOCKS] = NodeSum(ranks.shared(segment_bytes(4096)), 4096, waiting, ranks.shared)
    return made


@pytest.fixture(autouse=True)
def blocks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_sum, "LEAST_BYTES", 1)


def idle(loops: int) -> None:
    """Be late: nothing waits for a clock here, nor sleeps."""
    for _ in range(loops):
        pass


def brought(rank: int, dtype: Any, count: int, seed: int, *, special: bool = False) -> Array:
    random = np.random.default_rng([seed, rank, count])
    kind = np.dtype(dtype).kind
    if kind in "iu":
        return random.integers(0, 100, count).astype(dtype)
    values = random.standard_normal(count)  # sums of these depend on their order
    with np.errstate(all="ignore"):
        if special:
            values = np.where(random.integers(0, 2, count), random.choice(SPECIAL, count), values)
        return np.asarray(values + 1j * random.standard_normal(count) if kind == "c" else values).astype(dtype)


def by_definition(op: str, arrays: list[Array], divisor: int = 1, combination: str = "rank order") -> Array:
    """Return the combination in one piece; that of 16-bit floats is rounded once."""
    dtype, wide = arrays[0].dtype, host_wire_dtype(arrays[0].dtype)
    with np.errstate(all="ignore"):
        if combination == "rank order":
            total: Array = functools.reduce(COMBINE[op], [array.astype(wide) for array in arrays])
            return (total if divisor == 1 else np.true_divide(total, wide.type(divisor))).astype(dtype)
        total = np.empty_like(arrays[0])
        combine_ordered(arrays[::-1], [total], op, divisor)
        return total


# Around the borders of chunks of every size, and of the ranks' shares of them, for items of 1 to 32 bytes.
counts = st.sampled_from(
    [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 23, 24, 25, 63, 64, 65, 128, 511, 512, 513, 1024, 1025]
)


@settings(max_examples=part_of(200))
@given(
    chunk=st.sampled_from([*CHUNKS, IN_BLOCKS, WHERE_THEY_ARE]),
    dtype=st.sampled_from(DTYPES),
    sizes=st.lists(counts, min_size=1, max_size=6),
    op=st.sampled_from(list(COMBINE)),
    combination=st.sampled_from(list(COMBINATIONS)),
    mean=st.booleans(),
    special=st.booleans(),
    into=st.integers(0, 2**6 - 1),
    offset=st.lists(st.integers(0, 7), min_size=SIZE, max_size=SIZE),
    late=st.lists(st.integers(0, 5000), min_size=SIZE, max_size=SIZE),
)
def test_sums(
    strategy: ms.Strategy,
    sums: dict[int, NodeSum],
    chunk: int,
    dtype: np.dtype[Any],
    sizes: list[int],
    op: str,
    combination: str,
    mean: bool,
    special: bool,
    into: int,
    offset: list[int],
    late: list[int],
) -> None:
    """Copied in chunks or into blocks, or where they are: the bits of the definition, the same on all ranks."""
    if chunk and dtype in SIXTEEN_BITS:
        dtype = np.dtype(np.float32)  # as which they come
    if dtype.kind == "c":  # no order; and NumPy's products of them depend on where a slice ends
        op = "SUM"
    if chunk == WHERE_THEY_ARE:
        combination = "rank order"
    divisor = SIZE if mean and dtype.kind not in "iu" else 1
    everyones = [[brought(rank, dtype, n, i, special=special) for i, n in enumerate(sizes)] for rank in RANKS]
    mine = everyones[RANK]
    idle(late[RANK])
    if chunk:
        sources = [np.empty(array.size + 8, dtype)[offset[RANK] :][: array.size] for array in mine]
        for source, array in zip(sources, mine, strict=True):
            source[...] = array
        targets = [s if into >> i & 1 else sums[chunk].new(s.shape, dtype) for i, s in enumerate(sources)]
        sums[chunk].run(list(zip(sources, targets, strict=True)), op, divisor, COMBINATIONS[combination])
        for i, (source, array) in enumerate(zip(sources, mine, strict=True)):
            assert into >> i & 1 or bits(source) == bits(array), "what is brought stays as it is"
    else:
        targets = [
            seen_by_all(strategy, array, op, divisor, everywhere=bool(into >> i & 1)) for i, array in enumerate(mine)
        ]
    for i, target in enumerate(targets):
        right = by_definition(op, [theirs[i] for theirs in everyones], divisor, combination)
        if special and combination == "rank order" and op in ("SUM", "PROD"):
            wide = host_wire_dtype(dtype)
            np.testing.assert_array_equal(
                target.astype(wide), right.astype(wide)
            )  # of NaN NumPy takes any bits, but all ranks the same
        else:
            assert bits(target) == bits(right)
    assert same_everywhere(targets)


def seen_by_all(strategy: ms.Strategy, mine: Array, op: str, divisor: int, *, everywhere: bool) -> Array:
    """Return the combination of arrays that the ranks see, in this rank's own, or else in the first rank's."""
    ranks = strategy.extended.communicator
    memory = ranks.shared(mine.nbytes + ALIGNMENT)
    arrays = [segment[: mine.nbytes].view(mine.dtype) for segment in memory.segments]
    arrays[RANK][...] = mine
    ranks.node_barrier()
    with np.errstate(all="ignore"):
        ShareOfNode(arrays, arrays if everywhere else arrays[:1], op, divisor, RANK).combine()
    ranks.node_barrier()
    return arrays[RANK if everywhere else 0]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_rank_that_is_late_within_a_reduction(
    sums: dict[int, NodeSum], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of chunks each rank stops now and then: nobody runs over what it has not read yet."""
    own = np.random.default_rng([7, RANK])

    def slow(*arrays: Array, out: Array) -> Array:
        if own.integers(4) == 0:
            idle(int(own.integers(0, 30_000)))
        return np.add(*arrays, out=out)

    count = 40 * chunk // 8
    values = [brought(rank, np.float64, count, 3) for rank in RANKS]
    right = by_definition("SUM", values)
    monkeypatch.setitem(COMBINE, "SUM", slow)  # type: ignore[arg-type]
    for _ in range(3):
        target = values[RANK].copy()
        sums[chunk].run([(target, target)])
        assert bits(target) == bits(right)
