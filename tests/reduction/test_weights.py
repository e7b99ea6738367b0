"""`weight=`: the mean of parts of unequal size is the mean of the whole."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import BFLOAT16, DTYPES, RANK, RANKS, SIZE, outcomes, part_of, same_everywhere, still_works, value_of

import mpistrategy as ms
from mpistrategy import errors
from mpistrategy.arrays.dtypes import mean_dtype

pytestmark = pytest.mark.mpi


@pytest.fixture(params=["all_reduce", "reduce"])
def weighted_mean(strategy: ms.Strategy, request: pytest.FixtureRequest) -> Any:
    """A function (value, weight, op): the two ways to ask for the same thing."""
    if request.param == "reduce":
        return lambda value, weight, op="MEAN": strategy.reduce(op, value, weight=weight)
    return lambda value, weight, op="MEAN": strategy.run(
        lambda: ms.get_replica_context().all_reduce(op, value, weight=weight)
    )


@settings(max_examples=part_of(50))
@given(
    rows=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    columns=st.integers(0, 5),
    seed=st.integers(0, 100),
    in_step=st.booleans(),
)
def test_means_of_uneven_parts_are_the_mean_of_the_whole(
    strategy: ms.Strategy, rows: list[int], columns: int, seed: int, in_step: bool
) -> None:
    """A rank without rows has the mean NaN and the weight 0."""
    parts = [np.random.default_rng([seed, r]).integers(-1000, 1000, (rows[r], columns)) / 8 for r in RANKS]
    mine = parts[RANK]
    with np.errstate(all="ignore"):
        means = [p.sum(axis=0) / np.float64(len(p)) for p in parts]
    value = {"columns": means[RANK], "first": means[RANK][:1]}

    def ask() -> Any:
        return ms.get_replica_context().all_reduce("MEAN", value, weight=len(mine))

    found = strategy.run(ask) if in_step else strategy.reduce("MEAN", value, weight=len(mine))
    assert same_everywhere(found)
    whole = np.concatenate(parts)
    if len(whole):
        np.testing.assert_allclose(found["columns"], whole.mean(axis=0), rtol=1e-13, atol=1e-13)
        np.testing.assert_array_equal(found["first"], found["columns"][:1])
        np.testing.assert_allclose(found["columns"], strategy.reduce("MEAN", mine, axis=0), rtol=1e-13, atol=1e-13)
    else:
        assert np.isnan(found["columns"]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(weighted_mean: Any, dtype: Any) -> None:
    """Equal weights give the mean, in its dtype; the sum of weighted values is taken in floating point."""
    small = [(value_of(rank, "int8", (3, 2)).astype(np.int64) % 50).astype(dtype) for rank in RANKS]
    found = weighted_mean(small[RANK], 2)
    assert found.dtype == mean_dtype(np.dtype(dtype))
    assert found.shape == (3, 2)
    wide = np.clongdouble if np.dtype(dtype).kind == "c" else np.longdouble
    right = np.sum([a.astype(np.float64 if dtype == BFLOAT16 else wide) for a in small], axis=0) / SIZE
    coarse = 2.0**-8 if np.dtype(dtype).itemsize == 2 else 1e-6
    np.testing.assert_allclose(found.astype(np.complex128), right.astype(np.complex128), rtol=coarse)
    assert same_everywhere(found)


def test_the_weight_may_be_any_real_number(weighted_mean: Any) -> None:
    right = sum((r + 1) * r for r in RANKS) / sum(r + 1 for r in RANKS)
    for weight in (RANK + 1, float(RANK + 1), np.int8(RANK + 1), np.float32(RANK + 1), np.array(RANK + 1.0)):
        assert float(weighted_mean(float(RANK), weight)) == pytest.approx(right, rel=1e-14)
    assert type(weighted_mean(np.float32(1), 1)) is np.float32


def test_what_weighs_nothing_says_nothing(weighted_mean: Any) -> None:
    """NaN and infinity times 0 would be NaN."""
    first = RANK == 0
    value = np.array([2.0, 4.0]) if first else np.array([np.nan, np.inf])
    np.testing.assert_array_equal(weighted_mean(value, 3 if first else 0), [2.0, 4.0])
    assert np.isnan(weighted_mean(np.float64(RANK), 0))
    assert np.isnan(weighted_mean({"ints": np.arange(3)}, 0.0)["ints"]).all()


def test_a_weighted_mean_that_fits_does_not_overflow(weighted_mean: Any) -> None:
    value = np.full(2, 60000, np.float16)
    np.testing.assert_array_equal(weighted_mean(value, 1000 + RANK), value)


EXTREME_WEIGHTS = [0, 5e-324, 1e-310, 1e-46, 1e-40, 1e-7, 0.1, 1, 3, 1e7, 1e38, 1e39, 3e300, 1.7e308]


@settings(max_examples=part_of(90))
@given(
    weights=st.lists(st.sampled_from(EXTREME_WEIGHTS), min_size=4, max_size=4),
    scale=st.sampled_from([1.0, 1e-30, 1e30, 3e38]),
    dtype=st.sampled_from(["int8", "float16", BFLOAT16, "float32", "float64", "complex64"]),
    seed=st.integers(0, 9),
    in_step=st.booleans(),
)
def test_weights_of_any_magnitude(
    strategy: ms.Strategy, weights: list[float], scale: float, dtype: Any, seed: int, in_step: bool
) -> None:
    """They may be larger and smaller than a number of the dtype, and their sum larger than any; nothing warns."""
    dtype, weights = np.dtype(dtype), weights[:SIZE]
    scale = scale if dtype in (np.float32, np.float64, np.complex64) else 1.0
    parts = [(np.random.default_rng([seed, r]).uniform(-1, 1, 5) * scale).astype(dtype) for r in RANKS]
    mine, weight = parts[RANK], weights[RANK]

    def ask() -> Any:
        return ms.get_replica_context().all_reduce("MEAN", mine, weight=weight)

    found = strategy.run(ask) if in_step else strategy.reduce("MEAN", mine, weight=weight)
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


def test_a_small_weight_keeps_its_digits(weighted_mean: Any) -> None:
    """A weight of 1e-40 is a number of float32 with five digits; its product with 1e30 has all."""
    first = RANK == 0
    value = np.full(3, 0 if first else 1e30, np.float32)
    found = weighted_mean(value, 1.0 if first else 1e-40)
    np.testing.assert_allclose(found, np.full(3, (SIZE - 1) * 1e-10, np.float32), rtol=3e-7)


def test_a_weighted_mean_of_the_largest_numbers(weighted_mean: Any) -> None:
    value = np.array([np.finfo(np.float32).max, np.finfo(np.float32).tiny], np.float32)
    np.testing.assert_allclose(weighted_mean(value, 3 + 2 * RANK), value, rtol=3e-7)


def test_inputs_are_not_changed(weighted_mean: Any) -> None:
    value = np.full((2, 3), RANK, np.float64)
    weighted_mean(value, 7)
    np.testing.assert_array_equal(value, np.full((2, 3), RANK))


BAD_WEIGHTS: dict[str, tuple[Any, type[Exception]]] = {
    "negative": (-1, errors.OptionError),
    "nan": (float("nan"), errors.OptionError),
    "infinite": (np.inf, errors.OptionError),
    "text": ("3", errors.OptionTypeError),
    "bool": (True, errors.OptionTypeError),
    "array": (np.ones(2), errors.OptionTypeError),
    "complex": (1j, errors.OptionTypeError),
    "ragged": ([[1], [1, 2]], errors.OptionTypeError),
    "none on some ranks": (None, errors.CollectiveMismatchError),
}


@pytest.mark.parametrize("what", BAD_WEIGHTS)
@pytest.mark.parametrize("where", ["everywhere", "last rank"])
def test_a_bad_weight_raises_on_every_rank(strategy: ms.Strategy, weighted_mean: Any, what: str, where: str) -> None:
    weight, kind = BAD_WEIGHTS[what]
    if weight is None and (where == "everywhere" or SIZE == 1):
        pytest.skip("no weight at all is right")
    ended = outcomes(weighted_mean, np.ones(2), weight if where == "everywhere" or RANK == SIZE - 1 else 1)
    assert [one.error for one in ended] == [kind] * SIZE, ended
    assert still_works(strategy)


@pytest.mark.parametrize("op", ["SUM", "MIN", "MAX", "PROD"])
def test_only_a_mean_has_weights(strategy: ms.Strategy, weighted_mean: Any, op: str) -> None:
    assert {one.error for one in outcomes(weighted_mean, np.ones(2), 1, op)} == {errors.OptionError}
    assert still_works(strategy)


def test_with_an_axis_rows_are_the_weights(strategy: ms.Strategy) -> None:
    ended = outcomes(lambda: strategy.reduce("MEAN", np.ones((2, 2)), axis=0, weight=1))
    assert {one.error for one in ended} == {errors.OptionError}


def test_sparse_values_have_no_weights(strategy: ms.Strategy, weighted_mean: Any) -> None:
    slices = ms.IndexedSlices(np.ones((1, 2)), [0], (3, 2))
    assert {one.error for one in outcomes(weighted_mean, slices, 1)} == {errors.UnsupportedError}
    assert still_works(strategy)


class Own(ms.MpiAllReduce):
    """Reduces as MpiAllReduce does, by code of the program."""

    def batch_reduce_implementation(self, *args: Any) -> list[Any]:
        return super().batch_reduce_implementation(*args)


def test_an_algorithm_of_ones_own_reduces_the_products() -> None:
    with ms.MirroredStrategy(cross_device_ops=Own()) as own:
        found = own.reduce("MEAN", np.full(3, float(RANK)), weight=RANK + 1)
    right = sum((r + 1) * r for r in RANKS) / sum(r + 1 for r in RANKS)
    np.testing.assert_allclose(found, np.full(3, right), rtol=1e-14)
