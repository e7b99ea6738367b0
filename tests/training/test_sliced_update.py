"""Each rank updates its share of all copies: to the bit what every rank would do to its own copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replicas import RANK, RANKS, SIZE, bits, outcomes, same_everywhere, still_works

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.arrays.dtypes import Array
from mpistrategy.options import ReduceOp
from mpistrategy.training import kernels
from mpistrategy.training.kernels import Scratch
from mpistrategy.training.sliced.update import MemoryRange, Run, SlicedUpdate

pytestmark = [pytest.mark.mpi]
several = pytest.mark.mpi(min_size=2)

#: Kernels of one step, with the names of their slots.
KERNELS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "SGD": (kernels.Sgd(0.1), ()),
    "nesterov": (kernels.Momentum(0.03, 0.9, True), ("momentum",)),
    "Adam": (kernels.Adam(0.01, 0.8, 0.99, 1e-5), ("m", "v")),
    "AdamW": (kernels.AfterDecay(0.01, kernels.Adam(0.01, 0.8, 0.99, 1e-5)), ("m", "v")),
}
MOST = 3000  # elements in all of one test's arrays


# ------------------------------------------------------------------------------------------------- the shares


class Memory:
    """A bump allocator in memory that all ranks see: what the pool of variables does."""

    def __init__(self, strategy: ms.Strategy) -> None:
        self.shared = strategy.extended.communicator.shared(8 * MOST * 8)
        self.failures = strategy.extended.communicator.shared(1)
        self.used = 0

    def clear(self) -> None:
        self.used = 0
        self.shared.mine[:] = 255  # what others have left there: every number of it is NaN

    def place(self, value: Array, gap: int = 0) -> tuple[MemoryRange, Array]:
        place = MemoryRange(self.shared.segments, self.used + 64 * gap)
        self.used += 64 * gap + -(-value.nbytes // 64) * 64
        mine = place.view(0, value.nbytes, value.dtype)[self.shared.local_rank]
        mine[:] = value
        return place, mine


@pytest.fixture(scope="module")
def memory(strategy: ms.Strategy) -> Memory:
    return Memory(strategy)


def gradients_of(rank: int, sizes: Sequence[int], dtypes: Sequence[str], seed: int) -> list[Array]:
    random = np.random.default_rng([seed, rank])
    return [random.standard_normal(size).astype(dtype) for size, dtype in zip(sizes, dtypes, strict=True)]


@several
@given(
    name=st.sampled_from(list(KERNELS)),
    layout=st.lists(
        st.tuples(st.integers(0, 120), st.sampled_from(["float32", "float64"]), st.integers(0, 1)),
        min_size=1,
        max_size=6,
    ),
    op=st.sampled_from([ReduceOp.SUM, ReduceOp.MEAN]),
    chunk=st.sampled_from([64, 256, 2**18]),
    merged=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_shares_make_the_plain_step(
    strategy: ms.Strategy,
    memory: Memory,
    name: str,
    layout: list[tuple[int, str, int]],
    op: ReduceOp,
    chunk: int,
    merged: bool,
    seed: int,
) -> None:
    """Odd sizes, fewer elements than ranks, several dtypes, gaps: the sum in rank order and the kernel on all of it."""
    kernel, slot_names = KERNELS[name]
    sizes, dtypes, gaps = zip(*layout, strict=True)
    starts = gradients_of(SIZE, sizes, dtypes, seed)
    of_ranks = [gradients_of(rank, sizes, dtypes, seed) for rank in RANKS]
    memory.clear()
    groups: dict[str, list[tuple[MemoryRange, Array]]] = {}
    for group in ("parameter", "gradient", *slot_names):
        values = of_ranks[RANK] if group == "gradient" else starts if group == "parameter" else map(np.abs, starts)
        groups[group] = [
            memory.place(value, gap if group == "parameter" else 0) for value, gap in zip(values, gaps, strict=True)
        ]
        if group == "gradient":  # an arena is made of zeros
            for (place, mine), _ in zip(groups[group], sizes, strict=True):
                padding = place.offset + mine.nbytes
                memory.shared.mine[padding : -(-padding // 64) * 64] = 0
    runs = [
        Run(
            np.dtype(dtypes[i]),
            starts[i].nbytes,
            groups["parameter"][i][0],
            groups["gradient"][i][0],
            {slot: groups[slot][i][0] for slot in slot_names},
        )
        for i in range(len(sizes))
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "CHUNK_BYTES", chunk)
        update = SlicedUpdate(runs, strategy.extended.communicator, memory.failures, Scratch(), merged)
    strategy.extended.communicator.node_barrier()
    update.run(kernel, op)
    for i, start in enumerate(starts):
        total = of_ranks[0][i]
        for rank in RANKS[1:]:
            total = total + of_ranks[rank][i]
        if op is ReduceOp.MEAN:
            total = total / total.dtype.type(SIZE)
        right = {"parameter": start.copy(), **{slot: np.abs(start) for slot in slot_names}}
        kernel(right["parameter"], total, right, [np.empty_like(start), np.empty_like(start)])
        for group, array in right.items():
            assert bits(groups[group][i][1]) == bits(array), (group, i)
        assert bits(groups["gradient"][i][1]) == bits(of_ranks[RANK][i])


@several
def test_neighbours_are_one_run(strategy: ms.Strategy, memory: Memory) -> None:
    memory.clear()
    values = [np.ones(n, np.float32) for n in (3, 16, 100)]
    parameters = [memory.place(value)[0] for value in values]
    gradients = [memory.place(value)[0] for value in values]
    runs = [Run(v.dtype, v.nbytes, p, g, {}) for v, p, g in zip(values, parameters, gradients, strict=True)]
    ranks = strategy.extended.communicator
    assert SlicedUpdate(runs, ranks, memory.failures, Scratch()).runs == 1
    assert SlicedUpdate(runs, ranks, memory.failures, Scratch(), merged=False).runs == 3
    assert SlicedUpdate([runs[0], runs[2]], ranks, memory.failures, Scratch()).runs == 2
    assert SlicedUpdate([runs[1], runs[0], runs[2]], ranks, memory.failures, Scratch()).runs == 3


@several
def test_a_share_that_fails_raises_on_every_rank(strategy: ms.Strategy, memory: Memory) -> None:
    memory.clear()
    values = np.ones(1000)
    run = Run(values.dtype, values.nbytes, memory.place(values)[0], memory.place(values)[0], {})
    update = SlicedUpdate([run], strategy.extended.communicator, memory.failures, Scratch())

    def fails_on_the_last(parameter: Array, *rest: Any) -> None:
        if RANK == SIZE - 1:
            raise KeyError("mine")

    strategy.extended.communicator.node_barrier()
    ended = outcomes(update.run, fails_on_the_last, ReduceOp.SUM)
    assert [one.error for one in ended] == [errors.RemoteError] * (SIZE - 1) + [Exception]
    assert f"rank {SIZE - 1}" in ended[0].text
    update.run(KERNELS["SGD"][0], ReduceOp.SUM)
    assert still_works(strategy)
    assert same_everywhere(memory.shared.mine[: values.nbytes])
