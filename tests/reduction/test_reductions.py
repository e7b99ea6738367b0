"""Reductions against their definition: every algorithm, dtype, shape, memory layout and structure, on every rank.

All ranks know all ranks' values (`value_of`), so that each can compute what the result must be.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import (
    BFLOAT16,
    DTYPES,
    RANK,
    RANKS,
    SIXTEEN_BITS,
    SIZE,
    OnNodes,
    bits,
    expected,
    laid_out,
    made,
    part_of,
    pieces_of,
    same_everywhere,
    value_of,
)

import mpistrategy as ms
from mpistrategy import CommunicationOptions, errors
from mpistrategy.arrays import nest
from mpistrategy.arrays.dtypes import Array

pytestmark = pytest.mark.mpi


def add_in_order(values: list[Array]) -> Array:
    wide = [v.astype(np.float32) for v in values] if values[0].dtype in SIXTEEN_BITS else values
    with np.errstate(over="ignore"):
        return functools.reduce(np.add, wide)


ALGORITHMS: dict[str, Any] = {
    "MpiAllReduce": lambda: ms.MirroredStrategy(cross_device_ops=ms.MpiAllReduce()),
    "ReductionToOneDevice": lambda: ms.MirroredStrategy(cross_device_ops=ms.ReductionToOneDevice()),
    "to the last rank": lambda: ms.MirroredStrategy(cross_device_ops=ms.ReductionToOneDevice(f"task:{SIZE - 1}")),
    "accumulation_fn": lambda: ms.MirroredStrategy(
        cross_device_ops=ms.ReductionToOneDevice(accumulation_fn=add_in_order)
    ),
    "hierarchical": lambda: ms.MirroredStrategy(cross_device_ops=ms.HierarchicalCopyAllReduce()),
    "hierarchical, 0 packs": lambda: ms.MirroredStrategy(cross_device_ops=ms.HierarchicalCopyAllReduce(0)),
    "every rank a node": lambda: OnNodes(list(RANKS), ms.HierarchicalCopyAllReduce(3)),
    "odd and even ranks": lambda: OnNodes([r % 2 for r in RANKS], ms.HierarchicalCopyAllReduce()),
    "one alone, the rest together": lambda: OnNodes([min(r, 1) for r in RANKS], ms.HierarchicalCopyAllReduce(2)),
}


@pytest.fixture(scope="module")
def strategies() -> Iterator[dict[str, ms.Strategy]]:
    yield from made(ALGORITHMS)


@pytest.fixture(scope="module", params=ALGORITHMS)
def strategy(strategies: dict[str, ms.Strategy], request: pytest.FixtureRequest) -> ms.Strategy:
    return strategies[request.param]


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Gradients:
    weights: Any
    bias: Any


def as_dict(parts: list[Any], rank: int) -> dict[str, Any]:
    """Each rank fills its dictionary in another order."""
    order = [(i + rank) % len(parts) for i in range(len(parts))]
    return {f"k{i}": parts[i] for i in order}


NESTS: list[Any] = [
    lambda parts, rank: parts,
    lambda parts, rank: tuple(parts),
    as_dict,
    lambda parts, rank: Pair(parts[0], as_dict(parts, rank)),
    lambda parts, rank: Gradients([parts[0]], (parts[-1], {"all": parts})),
]
shapes = st.sampled_from([(), (0,), (1,), (7,), (13, 17), (2, 0, 3), (1, 1, 5), (4, 3, 2), (64,)])
leaves = st.tuples(st.sampled_from(DTYPES), shapes, st.integers(0, 5))
ops = st.sampled_from(["SUM", "MEAN"])


def parts_of(rank: int, plan: list[tuple[Any, tuple[int, ...], int]], seed: int) -> list[Array]:
    return [
        laid_out(value_of(rank, dtype, shape, seed + i), layout + rank) for i, (dtype, shape, layout) in enumerate(plan)
    ]


def assert_equal(found: Any, right: Array) -> None:
    assert found.dtype == right.dtype
    assert found.dtype.isnative
    assert found.shape == right.shape
    assert found.astype(np.clongdouble).tolist() == right.astype(np.clongdouble).tolist()


@settings(max_examples=part_of(60))
@given(
    name=st.sampled_from(list(ALGORITHMS)),
    op=ops,
    plan=st.lists(leaves, min_size=1, max_size=6),
    shape=st.sampled_from(range(len(NESTS))),
    bytes_per_pack=st.sampled_from([0, 1, 8, 1024]),
    seed=st.integers(0, 1000),
)
def test_all_reduce(
    strategies: dict[str, ms.Strategy],
    name: str,
    op: str,
    plan: list[tuple[Any, tuple[int, ...], int]],
    shape: int,
    bytes_per_pack: int,
    seed: int,
) -> None:
    values = [NESTS[shape](parts_of(rank, plan, seed), rank) for rank in RANKS]
    mine, structure = nest.flatten(values[RANK])
    before = [leaf.copy() for leaf in mine]
    options = CommunicationOptions(bytes_per_pack=bytes_per_pack)

    def step() -> Any:
        return ms.get_replica_context().all_reduce(op, values[RANK], options)

    result = strategies[name].run(step)
    found, same_structure = nest.flatten(result)

    assert same_structure.text == structure.text
    assert same_everywhere(result)
    everyone = [nest.flatten(value)[0] for value in values]
    for i, leaf in enumerate(found):
        assert isinstance(leaf, np.ndarray)
        assert_equal(leaf, expected(op, [np.asarray(leaves[i], leaf_dtype(leaves[i])) for leaves in everyone]))
    for leaf, copy in zip(mine, before, strict=True):
        assert bits(leaf) == bits(copy), "an input was changed"
    assert_nothing_shared([*found, *nest.flatten(strategies[name].run(step))[0]], mine)


def leaf_dtype(leaf: Array) -> np.dtype[Any]:
    return leaf.dtype.newbyteorder("=")


def assert_nothing_shared(results: list[Array], inputs: list[Array]) -> None:
    for i, result in enumerate(results):
        assert result.flags.writeable
        for other in [*results[:i], *inputs]:
            assert not np.shares_memory(result, other)


@settings(max_examples=part_of(40))
@given(name=st.sampled_from(list(ALGORITHMS)), op=ops, leaf=leaves, seed=st.integers(0, 1000))
def test_reduce(strategies: dict[str, ms.Strategy], name: str, op: str, leaf: Any, seed: int) -> None:
    dtype, shape, layout = leaf
    everyone = [value_of(rank, dtype, shape, seed) for rank in RANKS]
    mine = laid_out(everyone[RANK], layout + RANK)
    result = strategies[name].reduce(op, mine)
    assert_equal(result, expected(op, everyone))
    assert same_everywhere(result)
    assert not np.shares_memory(result, mine)


@settings(max_examples=part_of(40))
@given(
    name=st.sampled_from(list(ALGORITHMS)),
    op=ops,
    dtype=st.sampled_from(DTYPES),
    lengths=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    axis=st.sampled_from([0, 1, 2, -1, -3, (0, 2), [1, 0]]),
    layout=st.integers(0, 5),
)
def test_reduce_along_an_axis_whose_length_differs(
    strategies: dict[str, ms.Strategy], name: str, op: str, dtype: Any, lengths: list[int], axis: Any, layout: int
) -> None:
    along = [a % 3 for a in ([axis] if isinstance(axis, int) else axis)]
    first = along[0]

    def of(rank: int) -> Array:
        shape = [2, 3, 2]
        shape[first] = lengths[rank]
        return value_of(rank, dtype, shape)

    result = strategies[name].reduce(op, laid_out(of(RANK), layout + RANK), axis=axis)

    together = np.concatenate([of(rank) for rank in RANKS], axis=first)
    flat = np.moveaxis(together, along, range(len(along)))
    rows = flat.reshape((-1, *flat.shape[len(along) :]))
    if len(rows):
        right = expected(op, list(rows))
        assert result.dtype == right.dtype
        # Each rank adds its own rows first, so integers wrap and exact floats agree whatever the order.
        assert_equal(np.asarray(result), right)
    else:
        assert result.shape == flat.shape[len(along) :]
        assert np.isnan(result.astype(complex)).all() if op == "MEAN" else not result.any()
    assert same_everywhere(result)


def test_the_mean_along_an_axis_weighs_a_short_last_batch_right(strategy: ms.Strategy) -> None:
    """Rank 0 has three rows of 1, every other rank one row of 5: each row counts once."""
    rows = np.ones((3, 2)) if RANK == 0 else np.full((1, 2), 5.0)
    right = (3 + 5 * (SIZE - 1)) / (3 + SIZE - 1)
    np.testing.assert_allclose(strategy.reduce("MEAN", rows, axis=0), [right, right], rtol=1e-15)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16"])
def test_a_mean_of_short_integers_does_not_wrap(strategy: ms.Strategy, dtype: str) -> None:
    rows = np.full((400, 2), 120, dtype)
    for found in (
        strategy.reduce("MEAN", rows, axis=0),
        strategy.reduce("MEAN", rows)[0],
        strategy.reduce("MEAN", rows[0], weight=3),
        strategy.run(lambda: ms.get_replica_context().all_reduce("MEAN", rows[0])),
    ):
        np.testing.assert_allclose(found, [120, 120], rtol=1e-6)


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("target", RANKS)
def test_reduce_to_one_rank_and_to_all(strategy: ms.Strategy, op: str, target: int) -> None:
    right = expected(op, [value_of(rank, "float32", (5,)) for rank in RANKS])
    mine = value_of(RANK, "float32", (5,))
    there = strategy.extended.reduce_to(op, mine, f"task:{target}")
    if target == RANK:
        assert_equal(there.numpy(), right)
    elif SIZE > 1:
        with pytest.raises(errors.PlacementError, match=f"rank {target}"):
            np.asarray(there)
    for everywhere in (mine, "CPU:0", [f"task:{rank}" for rank in RANKS], there):
        result = strategy.extended.reduce_to(op, ms.PerReplica((mine,)), everywhere)
        assert isinstance(result, ms.Mirrored)
        assert_equal(result.numpy(), right)


def test_reduce_to_some_ranks(strategy: ms.Strategy) -> None:
    some = sorted({0, SIZE - 1})
    result = strategy.extended.reduce_to("SUM", np.float32(RANK), [f"task:{rank}" for rank in some])
    assert len(result.values) == (RANK in some)
    if RANK in some:
        assert float(result) == sum(RANKS)


@pytest.mark.parametrize("bytes_per_pack", [0, 1, 8, 1024])
def test_batch_reduce_to_mixed_destinations(strategy: ms.Strategy, bytes_per_pack: int) -> None:
    """One batch whose values go to different places, in any container, sparse and dense, of several dtypes."""
    with strategy.scope():
        variable = ms.Variable(np.zeros(3))
    slices = ms.IndexedSlices(np.full((RANK, 2), float(RANK)), np.arange(RANK), (SIZE, 2))
    pairs = [
        (value_of(RANK, "int16", (3,), 1), "task:0"),
        (ms.PerReplica((value_of(RANK, "float16", (2, 2), 2),)), variable),
        (value_of(RANK, "float64", (), 3), f"task:{SIZE - 1}"),
        (slices, variable),
        (value_of(RANK, "int16", (0,), 4), "CPU:0"),
        (value_of(RANK, "float64", (4,), 5), ["task:0", f"task:{SIZE - 1}"]),
    ]
    results = strategy.extended.batch_reduce_to("SUM", iter(pairs), CommunicationOptions(bytes_per_pack=bytes_per_pack))
    dense = [
        ("int16", (3,), 1),
        ("float16", (2, 2), 2),
        ("float64", (), 3),
        None,
        ("int16", (0,), 4),
        ("float64", (4,), 5),
    ]
    lives = [{0}, set(RANKS), {SIZE - 1}, set(RANKS), set(RANKS), {0, SIZE - 1}]
    for result, plan, ranks in zip(results, dense, lives, strict=True):
        assert bool(result.values) == (RANK in ranks)
        if plan is not None and result.values:
            assert_equal(result.numpy(), expected("SUM", [value_of(rank, *plan) for rank in RANKS]))
    np.testing.assert_array_equal(variable.local_copy(), np.zeros(3))  # a destination is never changed
    joined = results[3].values[0]
    np.testing.assert_array_equal(joined.indices, np.concatenate([np.arange(rank) for rank in RANKS]))
    np.testing.assert_array_equal(joined.values[:, 0], np.concatenate([np.full(rank, float(rank)) for rank in RANKS]))


def test_a_mean_of_slices_divides_the_values(strategy: ms.Strategy) -> None:
    slices = ms.IndexedSlices(np.full((2, 2), RANK + 1, np.int32), np.array([0, 0]), (1, 2))
    mean = strategy.run(lambda: ms.get_replica_context().all_reduce("MEAN", {"g": slices}))["g"]
    assert mean.values.dtype == np.float64
    np.testing.assert_allclose(mean.values[:, 1], np.repeat(np.arange(1, SIZE + 1), 2) / SIZE)
    total = SIZE * (SIZE + 1) / SIZE
    np.testing.assert_allclose(mean.to_dense(), [[total, total]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_messages_longer_than_mpi_can_count_are_cut(strategy: ms.Strategy, dtype: Any) -> None:
    with pieces_of(strategy, 7):
        arrays = [value_of(rank, dtype, (5, 10)) for rank in RANKS]
        assert_equal(strategy.reduce("SUM", arrays[RANK]), expected("SUM", arrays))
        at_end = strategy.extended.reduce_to("MEAN", arrays[RANK], f"task:{SIZE - 1}")
        if RANK == SIZE - 1:
            assert_equal(at_end.numpy(), expected("MEAN", arrays))


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_sixteen_bit_floats_are_rounded_once(strategy: ms.Strategy, dtype: Any) -> None:
    """1 + many tiny values: in 16 bits each addition would lose the tiny one."""
    tiny = float(np.finfo(np.float32).eps) * 1024 if dtype == np.float16 else 2.0**-10
    rows = np.full(2000, tiny, dtype)
    rows[0] = 1.0
    total = strategy.reduce("SUM", rows, axis=0)
    assert total.dtype == dtype
    exact = SIZE * (1 + 1999 * float(np.asarray(tiny, dtype)))
    assert abs(float(total) - exact) <= exact * 2.0**-8
    many = strategy.reduce("SUM", np.asarray(1 + 2.0**-7 if RANK == 0 else 2.0**-9, dtype))
    assert_equal(many, np.asarray(1 + 2.0**-7 + (SIZE - 1) * 2.0**-9, np.float32).astype(dtype))


@pytest.mark.parametrize(("dtype", "large"), [(np.dtype("float16"), 60000.0), (BFLOAT16, 3e38)], ids=str)
def test_a_mean_that_fits_does_not_overflow(strategy: ms.Strategy, dtype: Any, large: float) -> None:
    value = np.full(3, large, dtype)
    if dtype == np.float16:
        assert_equal(strategy.reduce("MEAN", value), value)
        assert np.isinf(strategy.reduce("SUM", value).astype(np.float32)).all() == (SIZE > 1)
        assert_equal(np.asarray(strategy.reduce("MEAN", value, axis=0)), value[0].reshape(()))
    else:  # 3e38 + 3e38 is too large for float32, in which bfloat16 is summed
        assert np.isinf(strategy.reduce("SUM", value).astype(np.float32)).all() == (SIZE > 1)


def test_nan_and_infinity_propagate(strategy: ms.Strategy) -> None:
    value = np.array([np.nan if RANK == 0 else 1.0, np.inf if RANK == SIZE - 1 else 1.0, -0.0])
    total = strategy.reduce("SUM", value)
    assert np.isnan(total[0])
    assert total[1] == np.inf
    assert str(total[2]) == "-0.0"
