"""What is special about some reductions: axes, destinations, rows, numbers at their limits, scalars, large counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import ml_dtypes
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
    all_reduce,
    bits,
    expected,
    laid_out,
    made,
    new_variable,
    part_of,
    rows,
    same_everywhere,
    unaligned,
    value_of,
)

import mpistrategy as ms
from mpistrategy import CommunicationOptions, errors
from mpistrategy.arrays import nest
from mpistrategy.arrays.dtypes import Array

pytestmark = pytest.mark.mpi

STRATEGIES: dict[str, Callable[[], ms.Strategy]] = {
    "one node": ms.MirroredStrategy,
    "to the last rank": lambda: ms.MirroredStrategy(cross_device_ops=ms.ReductionToOneDevice(f"task:{SIZE - 1}")),
    "odd and even ranks": lambda: OnNodes([r % 2 for r in RANKS], ms.HierarchicalCopyAllReduce()),
}


@pytest.fixture(scope="module")
def strategies() -> Iterator[dict[str, ms.Strategy]]:
    yield from made(STRATEGIES)


@pytest.fixture(scope="module", params=STRATEGIES)
def strategy(strategies: dict[str, ms.Strategy], request: pytest.FixtureRequest) -> ms.Strategy:
    return strategies[request.param]


# ------------------------------------------------------------------------------------- along axes


def extreme(op: str, dtype: np.dtype[Any], values: Array) -> Array:
    """Return MIN or MAX by the definition: -0.0 is less than +0.0, NaN wins and is NumPy's."""
    if dtype.kind in "iu":
        return np.asarray((np.min if op == "MIN" else np.max)(values, axis=0))
    wide = values.astype(np.longdouble)
    turned = np.sort(np.where(wide == 0, np.copysign(np.longdouble(1e-4000), wide), wide), axis=0)  # NaN comes last
    found = np.where(np.isnan(turned[-1]), np.longdouble(np.nan), turned[0 if op == "MIN" else -1])
    return np.asarray(found.astype(dtype))


@settings(max_examples=part_of(150))
@given(
    name=st.sampled_from(list(STRATEGIES)),
    op=st.sampled_from(["SUM", "MEAN", "MIN", "MAX", "PROD"]),
    dtype=st.sampled_from(DTYPES),
    lengths=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    axis=st.sampled_from([0, 1, 2, -1, -3, (0, 2), [1, 0]]),
    layout=st.integers(0, 6),
)
def test_along_axes_whose_lengths_differ(
    strategies: dict[str, ms.Strategy], name: str, op: str, dtype: Any, lengths: list[int], axis: Any, layout: int
) -> None:
    """Each row counts once, and 16-bit numbers are rounded once; nothing on any rank has no extreme, and product 1."""
    along = [a % 3 for a in ([axis] if isinstance(axis, int) else axis)]

    def of(rank: int) -> Array:
        shape = [2, 3, 2]
        shape[along[0]] = lengths[rank]
        if op in ("SUM", "MEAN") or dtype.kind in "iu":
            return value_of(rank, dtype, shape)
        some = [-2, -1, -0.0, 0, 0.5, 1, 2, *([np.nan] if op != "PROD" else [])]
        return np.asarray(np.random.default_rng(rank).choice(some, shape)).astype(dtype)

    if dtype.kind == "c" and op in ("MIN", "MAX"):
        op = "SUM"
    together = np.concatenate([of(rank) for rank in RANKS], axis=along[0])
    values = np.moveaxis(together, along, range(len(along))).reshape(-1, *np.delete(together.shape, along))
    mine = laid_out(of(RANK), layout + RANK)
    if not len(values) and op in ("MIN", "MAX"):
        with pytest.raises(errors.ShapeError, match="no elements on any rank"):
            strategies[name].reduce(op, mine, axis=axis)
        return
    found = np.asarray(strategies[name].reduce(op, mine, axis=axis))
    if op in ("MIN", "MAX"):
        right = extreme(op, dtype, values)
        assert bits(found) == bits(right)
    elif op == "PROD":
        wide = np.float32 if dtype in SIXTEEN_BITS else dtype
        right = np.asarray(np.prod(values, axis=0, dtype=wide), dtype)
    else:
        with np.errstate(all="ignore"):
            right = expected(op, list(values)) if len(values) else np.asarray(values.sum(axis=0) / (op != "MEAN"))
    assert found.shape == right.shape
    assert found.dtype == right.dtype or not len(values)
    if op not in ("MIN", "MAX"):
        np.testing.assert_array_equal(found.astype(np.clongdouble), right.astype(np.clongdouble))
    assert same_everywhere(found)


# ------------------------------------------------------------------------------------- destinations, rows


@pytest.mark.parametrize("bytes_per_pack", [0, 8])
@pytest.mark.parametrize("op", ["SUM", "MAX"])
def test_a_batch_with_mixed_destinations(strategy: ms.Strategy, op: str, bytes_per_pack: int) -> None:
    variable = new_variable(strategy, np.zeros(3))
    plans = [("int16", (3,)), ("float16", (2, 2)), ("float64", ()), ("int16", (0,)), ("float64", (4,))]
    places: list[Any] = ["task:0", variable, f"task:{SIZE - 1}", "CPU:0", ["task:0", f"task:{SIZE - 1}"]]
    lives = [{0}, set(RANKS), {SIZE - 1}, set(RANKS), {0, SIZE - 1}]
    pairs = [(value_of(RANK, *plan, seed), place) for seed, (plan, place) in enumerate(zip(plans, places, strict=True))]
    options = CommunicationOptions(bytes_per_pack=bytes_per_pack)
    results = strategy.extended.batch_reduce_to(op, iter(pairs), options)
    for seed, (result, plan, ranks) in enumerate(zip(results, plans, lives, strict=True)):
        assert isinstance(result, ms.Mirrored)
        assert bool(result.values) == (RANK in ranks)
        everyone = [value_of(rank, *plan, seed) for rank in RANKS]
        right = expected(op, everyone) if op == "SUM" else np.max(everyone, axis=0)
        if result.values:
            np.testing.assert_array_equal(result.numpy(), right)
            assert result.dtype == right.dtype
        else:
            with pytest.raises(errors.PlacementError, match=r"rank"):
                np.asarray(result)
    assert not variable.local_copy().any(), "a destination is never changed"


def test_slices_are_joined_and_their_values_divided(strategy: ms.Strategy) -> None:
    slices = ms.IndexedSlices(np.full((RANK + 1, 2), RANK + 1, np.int32), np.arange(RANK + 1), (SIZE, 2))
    mean = all_reduce(strategy, "MEAN", {"g": slices})["g"]
    assert mean.values.dtype == np.float64
    np.testing.assert_array_equal(mean.indices, np.concatenate([np.arange(rank + 1) for rank in RANKS]))
    np.testing.assert_allclose(mean.values[:, 1], np.concatenate([np.full(r + 1, r + 1) for r in RANKS]) / SIZE)
    np.testing.assert_allclose(mean.to_dense()[0], [(SIZE + 1) / 2] * 2)
    assert strategy.extended.reduce_to("SUM", slices, slices).values[0].values.shape == (SIZE * (SIZE + 1) // 2, 2)


def odd(array: Any) -> Array:
    """Return an array that is not aligned on the last rank, and is on the others."""
    return unaligned(np.asarray(array)) if RANK == SIZE - 1 else np.asarray(array)


@pytest.mark.parametrize(("name", "size"), rows(1, STRATEGIES, (3, 5000, 80_000)))
def test_unaligned_arrays_of_one_rank(strategies: dict[str, ms.Strategy], name: str, size: int) -> None:
    """Gradients and variables, and the values and indices of slices."""
    strategy, mine, optimizer = strategies[name], odd(np.full((size, 2), RANK + 1, np.float32)), ms.optimizers.SGD(0.5)
    slices = ms.IndexedSlices(mine, odd(np.arange(size)), mine.shape)
    variable = new_variable(strategy, odd(np.zeros(mine.shape, np.float32)))
    total = new_variable(strategy, np.zeros(mine.shape, np.float32), aggregation="SUM")
    for _ in range(2):
        strategy.run(lambda: optimizer.apply_gradients([(mine, variable)]))
    strategy.run(lambda: total.scatter_add(slices))
    for found in (-variable.numpy(), total.numpy(), all_reduce(strategy, "SUM", slices).to_dense()):
        np.testing.assert_array_equal(found, np.float32(SIZE * (SIZE + 1) / 2))
        assert same_everywhere(found)


# ------------------------------------------------------------------------------------- numbers at their limits

LIMITS: list[tuple[Any, float, Any]] = [
    (np.float64, 1.7e308, np.inf),
    (np.float32, 3.4e38, np.inf),
    (np.float16, 6e4, np.inf),
    (BFLOAT16, 3.3e38, np.inf),
    (np.int64, 2**63 - 1, None),
    (np.int8, 127, None),
]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("limits", "shape", "strict"), rows(2, LIMITS, [(), (5,), (50_000,)], [False, True]))
def test_overflow_underflow_and_what_is_no_number_do_not_warn(
    strategy: ms.Strategy, limits: Any, shape: tuple[int, ...], strict: bool
) -> None:
    dtype, most, right = limits
    value = np.full(shape, most, dtype)
    with np.errstate(all="raise" if strict else "warn"), closing(strategy.arena(value)) as arena:
        arena.values[...] = value
        for given_value in (value, [value, value], value[()] if shape == () else {"a": value}, arena):
            for op in ("PROD", "SUM", "MEAN") if given_value is not arena else ("PROD",):
                first = np.asarray(nest.flatten(all_reduce(strategy, op, given_value))[0][0])
                # a MEAN of such floats is divided in float32, between nodes in float64
                if right is not None and not (op == "MEAN" and dtype in (np.float16, np.float32)):
                    assert np.all(first == right), (op, first)
        if right is None:
            return
        for small in (ml_dtypes.finfo(dtype).smallest_subnormal, ml_dtypes.finfo(dtype).smallest_normal):
            for op in ("MEAN", "PROD"):
                all_reduce(strategy, op, np.full(shape, small, dtype), out=value.copy())
        total = all_reduce(strategy, "SUM", np.full(shape, np.inf if RANK else -np.inf, dtype))
        assert np.isnan(np.asarray(total, np.float32)).all()


# ------------------------------------------------------------------------------------- what is given


@pytest.mark.parametrize(
    ("value", "sum_type", "mean_type"),
    [
        (2, np.int64, np.float64),
        (2.0, np.float64, np.float64),
        (2j, np.complex128, np.complex128),
        (np.float32(2), np.float32, np.float32),
        (np.int8(2), np.int8, np.float32),
        (np.array(2, np.int8), np.ndarray, np.ndarray),
        (np.array(2.0), np.ndarray, np.ndarray),
    ],
    ids=str,
)
def test_a_scalar_stays_a_scalar_and_an_array_an_array(
    strategy: ms.Strategy, value: Any, sum_type: type, mean_type: type
) -> None:
    for reduce in (all_reduce, lambda strategy, *given: strategy.reduce(*given)):
        total, mean = reduce(strategy, "SUM", value), reduce(strategy, "MEAN", value)
        assert type(total) is sum_type
        assert type(mean) is mean_type
        assert (total, mean) == (value * SIZE, value)
    for _ in range(2):
        [component] = strategy.extended.reduce_to("SUM", value, value).values
        assert type(component) is sum_type


def test_a_mirrored_value_is_its_own_mean_and_has_no_sum(strategy: ms.Strategy) -> None:
    mirrored = strategy.extended.broadcast_to(np.array([RANK, 5.0]), "CPU:0")
    for reduce in (all_reduce, lambda strategy, *given: strategy.reduce(*given)):
        for op in ("MEAN", "MIN", "MAX"):
            np.testing.assert_array_equal(reduce(strategy, op, mirrored), [0, 5])
        for op in ("SUM", "PROD"):
            with pytest.raises(errors.OptionError, match="Mirrored"):
                reduce(strategy, op, mirrored)
