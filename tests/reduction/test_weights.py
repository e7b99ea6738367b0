"""`weight=`: the mean of parts of unequal size is the mean of the whole."""

from __future__ import annotations

from fractions import Fraction
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
    SIZE,
    all_raise,
    context,
    outcomes,
    part_of,
    same_everywhere,
    value_of,
)

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.arrays.dtypes import mean_dtype

pytestmark = pytest.mark.mpi
WAYS = ("all_reduce", "reduce", "out", "some ranks are looked at each time")


def weighted(strategy: ms.Strategy, way: str, value: Any, weight: Any, op: str = "MEAN") -> Any:
    """Return a weighted mean, asked for in one of the ways."""
    if way == "reduce":
        return strategy.reduce(op, value, weight=weight)
    is_array = isinstance(value, np.ndarray)
    out = np.empty(value.shape, mean_dtype(value.dtype)) if way == "out" and is_array else None
    mine = ms.PerReplica((value,)) if way.startswith("some") and is_array and RANK % 2 else value
    return strategy.run(lambda: context().all_reduce(op, mine, weight=weight, out=out))


@settings(max_examples=part_of(50))
@given(
    rows=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    columns=st.integers(0, 5),
    seed=st.integers(0, 100),
    way=st.sampled_from(WAYS[:2]),
)
def test_means_of_uneven_parts_are_the_mean_of_the_whole(
    strategy: ms.Strategy, rows: list[int], columns: int, seed: int, way: str
) -> None:
    """A rank without rows has the mean NaN and the weight 0."""
    parts = [np.random.default_rng([seed, r]).integers(-1000, 1000, (rows[r], columns)) / 8 for r in RANKS]
    mine, whole = parts[RANK], np.concatenate(parts)
    with np.errstate(all="ignore"):
        mean = mine.sum(axis=0) / np.float64(len(mine))
    found = weighted(strategy, way, {"columns": mean, "first": mean[:1]}, len(mine))
    assert same_everywhere(found)
    if len(whole):
        np.testing.assert_allclose(found["columns"], whole.mean(axis=0), rtol=1e-13, atol=1e-13)
        np.testing.assert_array_equal(found["first"], found["columns"][:1])
        np.testing.assert_allclose(found["columns"], strategy.reduce("MEAN", mine, axis=0), rtol=1e-13, atol=1e-13)
    else:
        assert np.isnan(found["columns"]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_equal_weights_give_the_mean_in_its_dtype(strategy: ms.Strategy, way: str, dtype: Any) -> None:
    """The sum of weighted values is taken in floating point."""
    small = [(value_of(rank, "int8", (3, 2)).astype(np.int64) % 50).astype(dtype) for rank in RANKS]
    mine = small[RANK].copy()
    found = weighted(strategy, way, mine, 2)
    assert (found.dtype, found.shape) == (mean_dtype(dtype), (3, 2))
    right = np.sum([array.astype(np.complex128) for array in small], axis=0) / SIZE
    np.testing.assert_allclose(found.astype(np.complex128), right, rtol=2.0**-8 if dtype.itemsize == 2 else 1e-6)
    np.testing.assert_array_equal(mine, small[RANK])
    assert same_everywhere(found)


@pytest.mark.parametrize("way", WAYS)
def test_the_weight_may_be_any_real_number(strategy: ms.Strategy, way: str) -> None:
    right = sum((r + 1) * r for r in RANKS) / sum(r + 1 for r in RANKS)
    for weight in (RANK + 1, float(RANK + 1), np.int8(RANK + 1), np.float32(RANK + 1), np.array(RANK + 1.0)):
        assert float(weighted(strategy, way, float(RANK), weight)) == pytest.approx(right, rel=1e-14)
    assert type(weighted(strategy, way, np.float32(1), 1)) is np.float32


LARGEST = np.array([np.finfo(np.float32).max, np.finfo(np.float32).tiny], np.float32)
FIRST = RANK == 0
#: This rank's value and weight, and the mean: NaN and infinity times 0 would be NaN; a weight of 1e-40 is a number of
#: float32 with five digits.
LIMITS: dict[str, tuple[Any, float, Any]] = {
    "what weighs nothing says nothing": (np.array([2.0, 4] if FIRST else [np.nan, np.inf]), 3 * FIRST, [2.0, 4.0]),
    "nobody weighs anything": (np.full(2, RANK), 0.0, [np.nan] * 2),
    "fits": (np.full(2, 60000, np.float16), 1000 + RANK, [60000.0] * 2),
    "small weight": (np.full(3, 0 if FIRST else 1e30, np.float32), 1.0 if FIRST else 1e-40, [(SIZE - 1) * 1e-10] * 3),
    "largest numbers": (LARGEST, 3 + 2 * RANK, LARGEST),
}


@pytest.mark.parametrize("case", LIMITS)
@pytest.mark.parametrize("way", WAYS)
def test_numbers_at_their_limits(strategy: ms.Strategy, way: str, case: str) -> None:
    value, weight, right = LIMITS[case]
    np.testing.assert_allclose(weighted(strategy, way, value, weight), right, rtol=3e-7)


EXTREME_WEIGHTS = [0, 5e-324, 1e-310, 1e-46, 1e-40, 1e-7, 0.1, 1, 3, 1e7, 1e38, 1e39, 3e300, 1.7e308]


@settings(max_examples=part_of(120))
@given(
    weights=st.lists(st.sampled_from(EXTREME_WEIGHTS), min_size=4, max_size=4),
    scale=st.sampled_from([1.0, 1e-30, 1e30, 3e38]),
    dtype=st.sampled_from(["int8", "float16", BFLOAT16, "float32", "float64", "complex64"]),
    seed=st.integers(0, 9),
    way=st.sampled_from(WAYS),
)
def test_weights_of_any_magnitude(
    strategy: ms.Strategy, weights: list[float], scale: float, dtype: Any, seed: int, way: str
) -> None:
    """They may be larger and smaller than a number of the dtype, and their sum larger than any; nothing warns."""
    dtype, weights = np.dtype(dtype), weights[:SIZE]
    scale = {"int8": 100.0, "float16": 1.0, "bfloat16": 1.0}.get(dtype.name, scale)
    parts = [(np.random.default_rng([seed, r]).uniform(-1, 1, 5) * scale).astype(dtype) for r in RANKS]
    found = weighted(strategy, way, parts[RANK], weights[RANK])
    assert found.dtype == mean_dtype(dtype)
    assert same_everywhere(found)
    if not any(weights):
        assert np.isnan(found).all()
        return
    total = sum(map(Fraction, weights))
    shares = [float(Fraction(weight) / total) for weight in weights]
    wide = np.clongdouble if dtype.kind == "c" else np.longdouble
    terms = [share * part.astype(wide) for share, part in zip(shares, parts, strict=True)]
    digits = ml_dtypes.finfo(found.real.dtype)
    bound = 4 * float(digits.eps) * np.sum(np.abs(terms), axis=0) + 4 * SIZE * float(digits.smallest_subnormal)
    assert (np.abs(found.astype(wide) - np.sum(terms, axis=0)) <= bound).all()


ONES, SLICES = np.ones(2), ms.IndexedSlices(np.ones((1, 2)), [0], (3, 2))
BAD: dict[str, tuple[Any, Any, str, type[Exception]]] = {
    "negative": (ONES, -1, "MEAN", errors.OptionError),
    "nan": (ONES, float("nan"), "MEAN", errors.OptionError),
    "infinite": (ONES, np.inf, "MEAN", errors.OptionError),
    "bool": (ONES, True, "MEAN", errors.OptionTypeError),
    "complex": (ONES, 1j, "MEAN", errors.OptionTypeError),
    "ragged": (ONES, [[1], [1, 2]], "MEAN", errors.OptionTypeError),
    **{op: (ONES, 1, op, errors.OptionError) for op in ("SUM", "MIN", "MAX", "PROD")},
    "slices": (SLICES, 1, "MEAN", errors.UnsupportedError),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("where", ["everywhere", "last rank"])
@pytest.mark.parametrize("way", WAYS[:2])
def test_a_bad_weight_raises_on_every_rank(strategy: ms.Strategy, way: str, what: str, where: str) -> None:
    bad, kind = BAD[what][:3], BAD[what][3]
    all_raise(kind, weighted, strategy, way, *(bad if where == "everywhere" or RANK == SIZE - 1 else (ONES, 1)))
    ended = outcomes(weighted, strategy, way, ONES, None if RANK == SIZE - 1 else 1)
    assert {one.error for one in ended} == {errors.CollectiveMismatchError if SIZE > 1 else None}
    for value, more in ((np.ones((2, 2)), {"weight": 1}), (strategy.arena(np.ones((2, 2))), {})):
        with pytest.raises(errors.OptionError, match="axis=0 with an arena or weight="):  # rows are the weights there
            strategy.reduce("MEAN", value, axis=0, **more)
