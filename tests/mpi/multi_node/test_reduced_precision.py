"""bfloat16 between nodes: within the stated bound, equal everywhere, and nothing else changes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import hypothesis.extra.numpy as hnp
import launching
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import (
    BFLOAT16,
    RANK,
    RANKS,
    SIZE,
    OnNodes,
    all_raise,
    bits,
    context,
    part_of,
    same_everywhere,
    several,
)

import mpistrategy as ms
from mpistrategy.arrays.dtypes import Array
from mpistrategy.errors import OptionError
from mpistrategy.mpi.multi_node import two_level

pytestmark = pytest.mark.mpi

U = 2.0**-8
SHORT = ms.CommunicationOptions(wire="bfloat16")
PLACEMENTS: dict[str, Sequence[int]] = {
    "every rank a node": list(RANKS),
    "odd and even": [r % 2 for r in RANKS],
    "one alone": [min(r, 1) for r in RANKS],
    "one node": [0] * SIZE,
}
ALGORITHMS = {"default": ms.MpiAllReduce, "hierarchical": ms.HierarchicalCopyAllReduce}


@pytest.fixture(scope="module", params=[(p, a) for p in PLACEMENTS for a in ALGORITHMS], ids=" ".join)
def placed(request: pytest.FixtureRequest) -> Iterator[tuple[ms.Strategy, Sequence[int]]]:
    """Yield a strategy, and for each rank what counts as its node: it alone where nodes have different sizes."""
    where, algorithm = request.param
    node_of = PLACEMENTS[where]
    with pytest.MonkeyPatch.context() as patch, closing(OnNodes(node_of, ALGORITHMS[algorithm]())) as made:
        patch.setattr(two_level, "PIECE_BYTES", 2**12)
        yield made, node_of if len({node_of.count(node) for node in node_of}) == 1 else RANKS


def reduced(strategy: ms.Strategy, op: str, value: Any, options: ms.CommunicationOptions | None = SHORT) -> Any:
    return strategy.run(lambda: context().all_reduce(op, value, options))


def node_sums(arrays: Sequence[Array], node_of: Sequence[int]) -> list[Array]:
    """Return the exact sum of each node's arrays, in float64."""
    members = [[r for r in RANKS if node_of[r] == node] for node in sorted(set(node_of))]
    return [np.sum([arrays[r].astype(np.float64) for r in of_one], axis=0) for of_one in members]


FLOATS = hnp.arrays(
    np.float32,
    st.tuples(st.just(SIZE), st.integers(0, 300)),
    elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=True),
)


@settings(max_examples=part_of(40))
@given(values=FLOATS, op=st.sampled_from(["SUM", "MEAN"]))
def test_the_error_is_within_the_bound(placed: tuple[ms.Strategy, Sequence[int]], values: Array, op: str) -> None:
    strategy, node_of = placed
    result = reduced(strategy, op, values[RANK])
    assert same_everywhere(result)
    sums = node_sums(list(values), node_of)
    exact, magnitude = np.sum(sums, axis=0), np.sum(np.abs(sums), axis=0)
    float32 = SIZE * 2.0**-23 * np.sum(np.abs(values.astype(np.float64)), axis=0)
    bound = (2 * U + U**2) * magnitude + (1 + 2 * U) * float32 + (SIZE + 1) * 2.0**-134
    if len(set(node_of)) == 1:
        bound = float32
    count = SIZE if op == "MEAN" else 1
    slack = 2.0**-149 + np.abs(exact / count) * 2.0**-23 if op == "MEAN" else 0.0
    assert (np.abs(result.astype(np.float64) - exact / count) <= bound / count + slack).all()


def test_the_bits_are_those_of_the_definition(placed: tuple[ms.Strategy, Sequence[int]]) -> None:
    strategy, node_of = placed
    values = [np.random.default_rng(rank).integers(-4000, 4000, 3000).astype(np.float32) for rank in RANKS]
    sums = [total.astype(np.float32) for total in node_sums(values, node_of)]  # exact: integers
    wanted = np.sum([total.astype(BFLOAT16).astype(np.float32) for total in sums], axis=0, dtype=np.float32)
    wanted = wanted.astype(BFLOAT16).astype(np.float32) if len(sums) > 1 else sums[0]
    assert bits(reduced(strategy, "SUM", values[RANK])) == bits(wanted)


@several
def test_other_dtypes_and_operations_keep_all_digits(placed: tuple[ms.Strategy, Sequence[int]]) -> None:
    """In one list with what is rounded."""
    value = [np.full(5, 1 + 2.0**-40), np.full(5, 2**30 + 1), np.full(5, 1 + 2.0**-12, np.float32)]
    for op, factor in (("SUM", SIZE), ("MAX", 1)):
        found = reduced(placed[0], op, value)
        for total, mine in list(zip(found, value, strict=True))[: 2 if op == "SUM" else 3]:
            np.testing.assert_array_equal(total, factor * mine)


@pytest.mark.parametrize("word", ["float16", "FLOAT16"])
def test_float16_keeps_all_digits_on_the_host(placed: tuple[ms.Strategy, Sequence[int]], word: Any) -> None:
    """Only NCCL sends it."""
    strategy, _ = placed
    value, options = np.full(10, 1 + 2.0**-20, np.float32), ms.CommunicationOptions(wire=word)
    for op in ("SUM", "MEAN"):
        np.testing.assert_array_equal(reduced(strategy, op, value, options), reduced(strategy, op, value, None))
    large = np.full(10, 1e6, np.float32)
    np.testing.assert_array_equal(reduced(strategy, "SUM", large, options), SIZE * large)


def test_without_ml_dtypes_every_rank_says_what_to_install(
    strategy: ms.MirroredStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_level.bfloat16.cache_clear()
    if RANK == SIZE - 1:  # on one rank only: all must be told
        monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    new = np.ones(11, np.float32)  # no call before had this shape, and so a plan
    all_raise(OptionError, lambda: reduced(strategy, "SUM", new), words=["pip install ml_dtypes"])
    monkeypatch.undo()


EMPTY = """
import itertools
import numpy as np
import mpistrategy as ms

NESTS = [
    [np.zeros(0, np.float32)],
    {"a": np.zeros((0, 4), np.float16), "b": np.zeros((2, 0)), "c": np.ones(3)},
    [np.zeros(0, np.float32), np.ones(100_000), np.zeros(0, np.int8)],
]
algorithms = (ms.MpiAllReduce, ms.HierarchicalCopyAllReduce, ms.ReductionToOneDevice)
for algorithm, wire, shared in itertools.product(algorithms, ("bfloat16", None), (False, True)):
    with ms.MirroredStrategy(cross_device_ops=algorithm()) as strategy:
        node_of, size = strategy.extended.communicator.node_of, strategy.num_replicas_in_sync
        assert sorted(map(node_of.count, set(node_of))) == [1, 2], node_of
        options = ms.CommunicationOptions(wire=wire)
        for like in NESTS:
            arena = strategy.arena(like, shared_result=shared)
            for leaf, value in zip(arena._leaves, like.values() if isinstance(like, dict) else like):
                leaf[...] = value

            def step():
                context = ms.get_replica_context()
                found = [context.all_reduce("SUM", given, options) for given in (like, arena)]
                return [*found, context.all_reduce_async("SUM", like, options).wait()]

            for found in strategy.run(step):
                for leaf in found.values() if isinstance(found, dict) else found:
                    assert (leaf == size).all()
            strategy.extended.broadcast_to(arena, "CPU:0")
            arena.close()
        rank = strategy.replica_id_in_sync_group
        slices = ms.IndexedSlices(np.ones((rank, 2), np.float32), np.arange(rank), (9, 2))
        assert strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", slices, options)).values.shape == (3, 2)
        assert strategy.gather(np.ones((0 if rank else 2, 2)), 0).shape == (2, 2)
"""


@pytest.mark.each_mpi
@pytest.mark.skipif(not launching.LIBRARY.startswith("MPICH"), reason="only MPICH pretends to run on several nodes")
@pytest.mark.slow
def test_empty_arrays_on_nodes_of_two_ranks_and_of_one(launch: launching.Launch) -> None:
    """What the ranks make together the first time must not depend on whether there is something to reduce."""
    launch(3, EMPTY, env={"MPIR_CVAR_NUM_CLIQUES": "2", "MPIR_CVAR_CLIQUES_BY_BLOCK": "1"}).check()


@pytest.mark.parametrize("dtype", ["int8", "int16", "uint32"])
def test_means_of_integers_keep_their_digits(placed: tuple[ms.Strategy, Sequence[int]], dtype: str) -> None:
    """Weighted ones, too, whose sums are floats."""
    strategy, _ = placed
    values = [np.arange(100, 120).astype(dtype) + np.dtype(dtype).type(rank) for rank in RANKS]
    for weights in ([1] * SIZE, [rank + 1 for rank in RANKS]):
        weight = None if weights[-1] == 1 else weights[RANK]
        found = strategy.run(lambda weight=weight: context().all_reduce("MEAN", values[RANK], SHORT, weight=weight))
        np.testing.assert_allclose(found, np.average(values, axis=0, weights=weights), rtol=1e-7)
