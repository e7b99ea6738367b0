"""MIN, MAX and PROD, against NumPy: every dtype, algorithm and form of reduction; NaN wins; what has no order is
refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

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
    laid_out,
    made,
    outcomes,
    part_of,
    same_everywhere,
    still_works,
    value_of,
)

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.arrays.dtypes import Array

pytestmark = pytest.mark.mpi

ALGORITHMS: dict[str, Callable[[], ms.Strategy]] = {
    "MpiAllReduce": lambda: ms.MirroredStrategy(cross_device_ops=ms.MpiAllReduce()),
    "ReductionToOneDevice": lambda: ms.MirroredStrategy(cross_device_ops=ms.ReductionToOneDevice(f"task:{SIZE - 1}")),
    "hierarchical": lambda: OnNodes([r % 2 for r in RANKS], ms.HierarchicalCopyAllReduce()),
}
UFUNCS = {"MIN": np.minimum, "MAX": np.maximum, "PROD": np.multiply}
OPS = tuple(UFUNCS)
FLOATS = [dtype for dtype in DTYPES if dtype.kind == "f" or dtype == BFLOAT16]


@pytest.fixture(scope="module")
def strategies() -> Iterator[dict[str, ms.Strategy]]:
    yield from made(ALGORITHMS)


@pytest.fixture(scope="module", params=ALGORITHMS)
def strategy(strategies: dict[str, ms.Strategy], request: pytest.FixtureRequest) -> ms.Strategy:
    return strategies[request.param]


def factors_of(rank: int, dtype: Any, shape: Any, seed: int) -> Array:
    """Return rank's array, whose products with the others' are exact in any order."""
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        return value_of(rank, dtype, shape, seed)
    real = np.random.default_rng([seed, rank]).choice([-2.0, -1.0, 0.0, 0.5, 1.0, 1.5], shape)
    return np.asarray(real * (1 + 1j) if dtype.kind == "c" else real).astype(dtype)


def combined(op: str, arrays: list[Array]) -> Array:
    """Return what must come out: NumPy's own operation, in the dtype of the values."""
    result = arrays[0].copy()
    for array in arrays[1:]:
        result = UFUNCS[op](result, array, dtype=np.float32 if result.dtype in SIXTEEN_BITS else result.dtype)
        result = np.asarray(result).astype(arrays[0].dtype)
    return np.asarray(result)


def assert_equal(found: Any, right: Array) -> None:
    found = np.asarray(found)
    assert (found.dtype, found.shape) == (right.dtype, right.shape)
    assert bits(found + found.dtype.type(0)) == bits(right + right.dtype.type(0))  # 0.0 and -0.0 are one number


shapes = st.sampled_from([(), (0,), (1,), (7,), (13, 3), (2, 0, 3)])


@settings(max_examples=part_of(80))
@given(
    name=st.sampled_from(list(ALGORITHMS)),
    op=st.sampled_from(OPS),
    plan=st.lists(st.tuples(st.sampled_from(DTYPES), shapes, st.integers(0, 5)), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_all_reduce(strategies: dict[str, ms.Strategy], name: str, op: str, plan: list[Any], seed: int) -> None:
    plan = [leaf for leaf in plan if op == "PROD" or leaf[0].kind != "c"] or [(np.dtype(np.int8), (5,), 0)]
    everyone = [
        [factors_of(rank, dtype, shape, seed + i) for i, (dtype, shape, _) in enumerate(plan)] for rank in RANKS
    ]
    mine = [laid_out(leaf, layout + RANK) for leaf, (_, _, layout) in zip(everyone[RANK], plan, strict=True)]
    found = strategies[name].run(lambda: ms.get_replica_context().all_reduce(op.lower(), {"leaves": mine}))["leaves"]
    assert same_everywhere(found)
    for i, leaf in enumerate(found):
        assert_equal(leaf, combined(op, [leaves[i] for leaves in everyone]))


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("count", [2, 64])
def test_zeros_and_nan_of_ones_own_rows_have_one_order(
    strategies: dict[str, ms.Strategy], dtype: str, count: int
) -> None:
    """-0.0 is less than +0.0, wherever they stand; of NaN one pattern wins."""
    strategy = strategies["MpiAllReduce"]
    zeros = np.zeros(count, dtype)
    for negative in (slice(0, count, 2), slice(1, count, 2)):
        mixed = zeros.copy()
        mixed[negative] *= -1
        assert np.signbit(strategy.reduce("MIN", mixed, axis=0))
        assert not np.signbit(strategy.reduce("MAX", mixed, axis=0))
    mixed[0] = -np.float64(np.nan)
    for op in ("MIN", "MAX"):
        assert np.asarray(strategy.reduce(op, mixed, axis=0)).tobytes() == np.array(np.nan, dtype).tobytes()


@settings(max_examples=part_of(60))
@given(
    op=st.sampled_from(OPS),
    dtype=st.sampled_from(DTYPES),
    lengths=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    axis=st.sampled_from([0, 1, -1, (0, 2), [1, 0]]),
)
def test_along_an_axis_whose_length_differs(
    strategies: dict[str, ms.Strategy], op: str, dtype: Any, lengths: list[int], axis: Any
) -> None:
    """Ranks without elements take part; nothing on any rank has no least element, and the product 1."""
    if dtype.kind == "c":
        op = "PROD"
    along = [a % 3 for a in ([axis] if isinstance(axis, int) else axis)]
    lengths[0] = min(lengths[0], 3 - (op == "PROD"))

    def of(rank: int) -> Array:
        shape = [2, 2, 2]
        shape[along[0]] = lengths[rank]
        return factors_of(rank, dtype, shape, 7)

    strategy = strategies["MpiAllReduce"]
    together = np.concatenate([of(rank) for rank in RANKS], axis=along[0])
    rows = np.moveaxis(together, along, range(len(along))).reshape(-1, *np.delete(together.shape, along))
    if not len(rows) and op != "PROD":
        with pytest.raises(errors.ShapeError, match="no elements on any rank"):
            strategy.reduce(op, of(RANK), axis=axis)
        return
    found = strategy.reduce(op, of(RANK), axis=axis)
    assert same_everywhere(found)
    assert_equal(found, combined(op, list(rows)) if len(rows) else np.ones(rows.shape[1:], dtype))


@pytest.mark.parametrize("op", ["MIN", "MAX"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_not_a_number_wins(strategy: ms.Strategy, op: str, dtype: Any) -> None:
    """On whichever rank it is, beside infinities too."""
    values = np.arange(SIZE + 2, dtype=np.float64).astype(dtype)
    values[-1] = -np.inf if RANK == 0 else np.inf
    values[RANK] = np.nan
    found = strategy.reduce(op, values)
    assert np.isnan(found[:SIZE].astype(np.float64)).all()
    assert float(found[SIZE]) == SIZE
    assert float(found[SIZE + 1]) == (-np.inf if op == "MIN" or SIZE == 1 else np.inf)
    along = strategy.reduce(op, values, axis=0)
    assert np.isnan(float(along))


@pytest.mark.parametrize("op", OPS)
def test_to_one_rank_and_in_a_batch(strategy: ms.Strategy, op: str) -> None:
    def both(rank: int) -> Array:
        return np.array([rank, -rank], np.int16)

    pairs: list[Any] = [(both(RANK), f"task:{SIZE - 1}"), (np.float32(RANK + 1), "task:0"), (np.uint8(200), None)]
    pairs[2] = (pairs[2][0], pairs[2][0])
    results = strategy.extended.batch_reduce_to(op, pairs)
    right = [
        combined(op, [both(r) for r in RANKS]),
        combined(op, [np.asarray(np.float32(r + 1)) for r in RANKS]),
    ]
    for result, place, value in zip(results, (SIZE - 1, 0), right, strict=False):
        assert bool(result.values) == (place == RANK)
        if place == RANK:
            assert_equal(result.numpy(), value)
    assert_equal(results[2].numpy(), combined(op, [np.asarray(np.uint8(200))] * SIZE))


def test_a_mirrored_value_has_its_extremes_but_no_product(strategy: ms.Strategy) -> None:
    mirrored = strategy.extended.broadcast_to(np.float64(3.0), "CPU:0")
    assert float(strategy.reduce("MIN", mirrored)) == float(strategy.reduce("MAX", mirrored)) == 3.0
    with pytest.raises(errors.OptionError, match="Mirrored"):
        strategy.reduce("PROD", mirrored)


REFUSED: dict[str, tuple[Any, type[Exception]]] = {
    "complex MIN": (("MIN", np.complex64(1)), errors.DTypeError),
    "complex MAX in a nest": (("MAX", [np.float32(1), np.ones(2, complex)]), errors.DTypeError),
    "bool": (("MIN", np.bool_(True)), errors.DTypeError),
    "sparse PROD": (("PROD", ms.IndexedSlices(np.ones((1, 2)), [0], (3, 2))), errors.UnsupportedError),
    "sparse MIN": (("MIN", ms.IndexedSlices(np.ones((1, 2)), [0], (3, 2))), errors.UnsupportedError),
    "unknown": (("MEDIAN", np.ones(2)), errors.ReduceOpError),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("everywhere", [True, False], ids=["on all ranks", "on the last rank"])
def test_refused_on_every_rank(strategy: ms.Strategy, what: str, everywhere: bool) -> None:
    (op, value), kind = REFUSED[what]
    mine = (op, value) if everywhere or RANK == SIZE - 1 else ("MIN", np.ones(2))
    for call in (strategy.reduce, lambda *a: strategy.run(lambda: ms.get_replica_context().all_reduce(*a))):
        ended = outcomes(call, *mine)
        assert all(one.error is not None and issubclass(one.error, errors.MpiStrategyError) for one in ended), ended
        assert ended[SIZE - 1].error is kind
    assert still_works(strategy)


def test_different_operations_do_not_meet(strategy: ms.Strategy) -> None:
    if SIZE == 1:
        pytest.skip("needs two ranks")
    ended = outcomes(strategy.reduce, "MIN" if RANK else "MAX", np.ones(3))
    assert {one.error for one in ended} == {errors.CollectiveMismatchError}
    assert "op" in ended[0].text
    assert still_works(strategy)
