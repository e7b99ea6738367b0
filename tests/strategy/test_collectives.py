"""The collectives beside all_reduce: reduce_scatter, scan and broadcast; and None among the leaves."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from itertools import accumulate
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import (
    DTYPES,
    INTEGERS,
    RANK,
    RANKS,
    SIXTEEN_BITS,
    SIZE,
    OnNodes,
    bits,
    context,
    in_step,
    new_variable,
    part_of,
    pieces_of,
    still_works,
    value_of,
)

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.arrays import nest
from mpistrategy.arrays.dtypes import COMBINE, Array
from mpistrategy.reduction import collectives as module

pytestmark = pytest.mark.mpi


def made(strategy: ms.Strategy, method: str, *arguments: Any, **named: Any) -> Any:
    return strategy.run(lambda: getattr(context(), method)(*arguments, **named))


# ------------------------------------------------------------------------------------------------- reduce_scatter


@settings(max_examples=part_of(60))
@given(
    dtype=st.sampled_from([dtype for dtype in DTYPES if dtype.kind in "iuf"]),
    shape=st.sampled_from([(0,), (1,), (5,), (7, 3), (2, 0, 4), (3, 4, 5), (40_001,)]),
    axis=st.integers(-3, 2),
    op=st.sampled_from(["SUM", "MEAN", "MIN", "MAX", "PROD"]),
    max_count=st.sampled_from([2**30, 16]),
)
def test_parts_are_those_of_an_all_reduce_in_rank_order(
    strategy: ms.Strategy, dtype: Any, shape: tuple[int, ...], axis: int, op: Any, max_count: int
) -> None:
    axis = axis % len(shape) - len(shape) * (axis < 0)
    mine = value_of(RANK, dtype, shape)
    before = mine.copy()
    whole = strategy.run(lambda: context().all_reduce(op, mine))
    with pieces_of(strategy, max_count):
        part = made(strategy, "reduce_scatter", op, mine, axis)
    length = shape[axis]
    rows = -(-length // SIZE)
    first = min(RANK * rows, length)
    expected = np.take(whole, range(first, min(first + rows, length)), axis=axis)
    assert (part.dtype, part.shape) == (expected.dtype, expected.shape)
    assert bits(part) == bits(expected)
    assert bits(mine) == bits(before)
    assert part.flags.owndata
    together = strategy.run(lambda: context().all_gather(part, axis))
    assert bits(together) == bits(np.ascontiguousarray(whole))


@pytest.mark.parametrize(
    "algorithm", [ms.HierarchicalCopyAllReduce(), ms.OrderedAllReduce(), ms.ReductionToOneDevice()], ids=repr
)
def test_every_algorithm_reduces_and_scatters(algorithm: ms.CrossDeviceOps) -> None:
    with ms.MirroredStrategy(cross_device_ops=algorithm) as strategy:
        part = made(strategy, "reduce_scatter", "SUM", np.full(2 * SIZE, RANK + 1.0))
        np.testing.assert_array_equal(part, np.full(2, SIZE * (SIZE + 1) / 2))


def test_a_nest_a_variable_and_numbers_of_rows_that_differ_by_leaf(strategy: ms.Strategy) -> None:
    weights = new_variable(strategy, np.arange(2.0 * SIZE))
    found = made(
        strategy, "reduce_scatter", "MEAN", {"v": weights, "none": None, "a": [np.ones((SIZE, 2)), np.ones((1, 3))]}
    )
    assert found["none"] is None
    np.testing.assert_array_equal(found["v"], np.arange(2.0 * SIZE)[2 * RANK : 2 * RANK + 2])
    assert found["a"][0].shape == (1, 2)
    assert found["a"][1].shape == (1 if RANK == 0 else 0, 3)


# ------------------------------------------------------------------------------------------------- scan

OPS = ("SUM", "MIN", "MAX", "PROD")
NEUTRAL: dict[str, Any] = {"SUM": 0, "PROD": 1, "MIN": np.inf, "MAX": -np.inf}


def neutral(op: str, dtype: Any) -> Any:
    if dtype.kind in "iu" and op in ("MIN", "MAX"):
        return getattr(np.iinfo(dtype), {"MIN": "max", "MAX": "min"}[op])
    return NEUTRAL[op]


def expected(op: str, dtype: Any, parts: list[Array], exclusive: bool) -> Array:
    """Return what this rank gets, by the definition."""
    wide = np.dtype(np.float32) if dtype in SIXTEEN_BITS else dtype
    with np.errstate(all="ignore"):
        totals = list(accumulate([part.astype(wide) for part in parts], COMBINE[op]))
        if exclusive:
            totals = [np.full(parts[0].shape, neutral(op, dtype), wide), *totals]
        return np.asarray(totals[RANK]).astype(dtype)


@settings(max_examples=part_of(90))
@given(
    dtype=st.sampled_from([dtype for dtype in DTYPES if dtype.kind != "c"]),
    shape=st.sampled_from([(), (0,), (1,), (5,), (7, 3), (40_001,)]),
    op=st.sampled_from(OPS),
    exclusive=st.booleans(),
    piece=st.sampled_from([2**23, 1000]),
)
def test_values_of_the_ranks_before_in_rank_order(
    strategy: ms.Strategy, dtype: Any, shape: tuple[int, ...], op: str, exclusive: bool, piece: int
) -> None:
    parts = [value_of(rank, dtype, shape) for rank in RANKS]
    mine = parts[RANK].copy()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "PIECE_BYTES", piece)
        found = made(strategy, "scan", op, mine, exclusive)
    right = expected(op, dtype, parts, exclusive)
    assert (found.dtype, np.shape(found)) == (dtype, shape)
    assert bits(np.asarray(found)) == bits(right)
    assert bits(mine) == bits(parts[RANK])
    assert not np.may_share_memory(found, mine)
    if not exclusive:  # what all ranks have together is the last one's
        last = strategy.broadcast(found, root=SIZE - 1)
        if dtype.kind in "iu" or op in ("MIN", "MAX"):
            whole = strategy.run(lambda: context().all_reduce(op, mine))
            assert bits(np.asarray(last)) == bits(np.asarray(whole))


def test_zeros_and_nan_are_those_of_all_reduce(strategy: ms.Strategy) -> None:
    zeros = np.array([-0.0, 0.0, np.nan, 1.0]) if RANK == 0 else np.array([0.0, -0.0, 1.0, -np.nan])
    for op in ("MIN", "MAX"):
        last = strategy.broadcast(made(strategy, "scan", op, zeros), root=SIZE - 1)
        if SIZE > 1:
            assert bits(last) == bits(strategy.run(lambda: context().all_reduce(op, zeros)))  # noqa: B023


def test_a_nest_with_a_variable_numbers_and_none(strategy: ms.Strategy) -> None:
    variable = new_variable(strategy, np.arange(3.0))
    value = {"v": variable, "none": None, "n": [RANK + 1, float(RANK), np.float32(2)], "z": 1 + 2j}
    found = made(strategy, "scan", "SUM", value)
    np.testing.assert_array_equal(found["v"], np.arange(3.0) * (RANK + 1))
    assert found["none"] is None
    assert [type(each) for each in found["n"]] == [np.int64, np.float64, np.float32]
    assert found["n"] == [sum(range(1, RANK + 2)), sum(range(RANK + 1)), 2 * (RANK + 1)]
    assert found["z"] == (RANK + 1) * (1 + 2j)
    assert made(strategy, "scan", "SUM", {"a": None}) == {"a": None}


def test_on_nodes_and_simulated_replicas() -> None:
    with OnNodes(RANKS, ms.MpiAllReduce()) as apart:
        for number in INTEGERS[:4]:
            assert made(apart, "scan", "SUM", np.full(2, RANK + 1, number)).tolist() == 2 * [
                (RANK + 1) * (RANK + 2) // 2
            ]

    def program() -> Any:
        strategy = ms.MirroredStrategy()
        return made(strategy, "scan", "SUM", strategy.rank + 1).tolist(), made(
            strategy, "scan", "MIN", 3, exclusive=True
        ).tolist()

    assert ms.testing.run_replicas(program, 3) == [(1, 2**63 - 1), (3, 3), (6, 3)]


# ------------------------------------------------------------------------------------------------- broadcast

SENT = [
    "?",
    "i1",
    "u8",
    "f2",
    ml_dtypes.bfloat16,
    "f4",
    "f8",
    "c16",
    "S3",
    "U2",
    "M8[s]",
    [("a", "i4"), ("b", "f8")],
]


@pytest.mark.parametrize("root", RANKS)
def test_every_rank_gets_the_value_of_one(strategy: ms.MirroredStrategy, root: int) -> None:
    variable = new_variable(strategy, np.zeros(3))
    strategy.extended.update(variable, lambda v: v.assign(np.full(3, RANK + 1.0)))
    given = {"n": RANK, "x": RANK / 2, "large": np.full((300, 300), RANK), "v": variable, "more": [np.arange(3) + RANK]}
    found = strategy.broadcast(given, root)
    assert [type(each) for each in found.values()] == [np.int64, np.float64, np.ndarray, np.ndarray, list]
    assert (found["n"], found["x"], found["v"].tolist()) == (root, root / 2, [root + 1.0] * 3)
    np.testing.assert_array_equal(found["large"], np.full((300, 300), root))
    assert found["more"][0].tolist() == [root, root + 1, root + 2]
    found["more"][0][:] = -1  # plain memory of its own
    assert np.all(variable.numpy() == RANK + 1)


@settings(max_examples=part_of(60), deadline=None)
@given(data=st.data())
def test_any_dtypes_and_shapes(strategy: ms.MirroredStrategy, data: st.DataObject) -> None:
    shapes = st.lists(st.integers(0, 5), max_size=3)
    layouts = data.draw(st.lists(st.tuples(st.sampled_from(range(len(SENT))), shapes), max_size=5), label="layouts")
    root = data.draw(st.sampled_from(RANKS), label="root")
    dtypes = [(np.dtype(SENT[number]), tuple(shape)) for number, shape in layouts]

    def value(rank: int) -> list[Any]:
        random = np.random.default_rng(rank)
        return [
            np.frombuffer(random.integers(0, 2, int(np.prod(shape)) * dtype.itemsize, np.uint8).tobytes(), dtype)
            .reshape(shape)
            .copy("F")
            for dtype, shape in dtypes
        ]

    found = strategy.broadcast(value(RANK), root)
    for one, wanted in zip(found, value(root), strict=True):
        assert (one.dtype, one.shape, one.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())


def test_in_any_context_and_across_nodes(strategy: ms.MirroredStrategy) -> None:
    assert in_step(strategy, lambda _: strategy.broadcast(RANK, SIZE - 1)) == SIZE - 1
    assert in_step(strategy, lambda ctx: ctx.merge_call(lambda s: s.broadcast(RANK + 1.0))) == 1.0
    with strategy.scope():
        assert strategy.broadcast(RANK) == 0
    nodes = OnNodes([rank % 2 for rank in RANKS], ms.MpiAllReduce())
    assert nodes.broadcast([np.full(5, RANK), RANK], SIZE - 1)[0].tolist() == [SIZE - 1] * 5
    nodes.close()
    assert ms.OneDeviceStrategy().broadcast({"a": 3}) == {"a": 3}


@settings(max_examples=part_of(30))
@given(
    value=st.recursive(
        st.one_of(
            st.none(),
            st.integers(-9, 9),
            st.floats(-9, 9),
            st.booleans(),
            st.text("ab\0é", min_size=1, max_size=3),
            st.builds(
                np.ones,
                st.tuples(st.integers(0, 3)),
                st.sampled_from(["f4", "i1", ">i8", ml_dtypes.bfloat16, "S3", "c8"]),
            ),
            st.builds(np.float32, st.floats(0, 1, width=16)),
        ),
        lambda each: st.one_of(
            st.lists(each, max_size=3),
            st.tuples(each, each),
            st.dictionaries(st.one_of(st.text("ab", max_size=2), st.integers(0, 9)), each, max_size=3),
        ),
        max_leaves=6,
    ).filter(lambda value: value is not None),
    root=st.integers(0, 3),
    has=st.integers(0, 3),
)
def test_ranks_that_give_none_get_what_the_root_has(strategy: ms.Strategy, value: Any, root: int, has: int) -> None:
    root, is_known = root % SIZE, RANK in (root % SIZE, has % SIZE)
    wanted = strategy.broadcast(value, root)
    found = strategy.broadcast(value if is_known else None, root)
    assert repr(found) == repr(wanted)
    assert [getattr(leaf, "dtype", None) for leaf in nest.flatten(found)[0]] == [
        getattr(leaf, "dtype", None) for leaf in nest.flatten(wanted)[0]
    ]


@pytest.mark.skipif(SIZE == 1, reason="one rank has its own value")
def test_what_cannot_be_told_to_ranks_that_give_none_raises_everywhere(strategy: ms.Strategy) -> None:
    def of_root(value: Any) -> Any:
        return value if RANK == 0 else None

    record = namedtuple("record", "x")
    for value in (record(1), {frozenset({1}): 1.0}, np.zeros(1, [("a", int)]), OrderedDict(a=1)):
        with pytest.raises(errors.UnsupportedError, match="Give every rank a value of this structure"):
            strategy.broadcast(of_root(value))
        assert still_works(strategy)
    for value in (object(), None):
        with pytest.raises(errors.LeafError, match="the value"):
            strategy.broadcast(of_root(value))
    if SIZE > 2:  # the ranks that have values compare theirs
        with pytest.raises(errors.CollectiveMismatchError, match=r"float64\[3\]"):
            strategy.broadcast(None if RANK == 1 else np.ones(2 + (SIZE - 1 == RANK)))
    with pytest.raises(errors.CollectiveMismatchError, match="collective"):
        strategy.broadcast(None) if RANK else strategy.reduce("SUM", 1.0)


# ---------------------------------------------------------------------------------------------- None among leaves


@pytest.mark.parametrize("lone", [False, True])
def test_none_stays_none(strategy: ms.Strategy, lone: bool) -> None:
    one, total = np.float64(RANK + 1), SIZE * (SIZE + 1) / 2
    value: Any = [None] if lone else {"a": None, "b": [one, None]}
    right: Any = [None] if lone else {"a": None, "b": [total, None]}
    for _ in range(2):
        for found in (
            strategy.run(lambda: context().all_reduce("SUM", value)),
            strategy.run(lambda: context().all_reduce_async("SUM", value).wait()),
            strategy.reduce("SUM", value),
        ):
            assert found == right
    out: Any = {"a": None, "b": [np.zeros(()), None]}
    if not lone:
        assert strategy.run(lambda: context().all_reduce("SUM", value, out=out)) == out == right
        assert strategy.run(lambda: context().all_reduce("MEAN", value, weight=2.0))["b"][0] == total / SIZE
    gathered = strategy.gather((None, np.ones(1)), 0)
    assert (gathered[0], gathered[1].shape) == (None, (SIZE,))
    assert strategy.reduce("MEAN", None, axis=0) is strategy.gather(None, 0) is None


def test_an_error_names_the_leaf_beside_none(strategy: ms.Strategy) -> None:
    with pytest.raises(errors.DTypeError, match=r"\['b'\]"):
        strategy.run(lambda: context().all_reduce("SUM", {"a": None, "b": True}))
