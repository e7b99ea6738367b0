"""The kernels that update many variables at once have NumPy's bits; norms are exact, and the same in any alignment."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from kernels_on_cpu import HAS_COMPILER, Kernels

from mpistrategy.training import kernels
from mpistrategy.training.gpu import launching, norm_kernel, update_kernel
from mpistrategy.training.gpu.updates import formula_of

pytestmark = [pytest.mark.one_rank, pytest.mark.skipif(not HAS_COMPILER, reason="no g++")]

STEPS: dict[str, tuple[kernels.Kernel, tuple[str, ...]]] = {
    "sgd": (kernels.Sgd(0.1), ()),
    "momentum": (kernels.Momentum(0.03, 0.9, False), ("momentum",)),
    "nesterov": (kernels.Momentum(0.03, 0.9, True), ("momentum",)),
    "adam": (kernels.Adam(0.011, 0.8, 0.99, 1e-5), ("m", "v")),
    "adamw": (kernels.AfterDecay(0.01, kernels.Adam(0.011, 0.8, 0.99, 1e-5)), ("m", "v")),
}
DTYPES = [np.dtype(name) for name in update_kernel.TYPES]
SIZES = [1, 0, 3, 4, 5, 31, 4096, 4097, 10_001, 64]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    sources = {norm_kernel.SUM_NAME: norm_kernel.sum_source()}
    for dtype in DTYPES:
        sources[norm_kernel.squares_name(dtype)] = norm_kernel.squares_source(dtype)
        for step, _ in STEPS.values():
            formula = formula_of(step)[0]  # type: ignore[index]
            sources[formula.kernel_name(dtype)] = formula.source(dtype)
    return Kernels(tmp_path_factory.mktemp("kernels"), sources)


def drawn(random: np.random.Generator, size: int, dtype: np.dtype[Any], shift: int) -> np.ndarray:
    """Return numbers of many magnitudes, so many elements behind a multiple of 16 bytes."""
    memory = np.zeros(size + 16, dtype)
    begin = (-memory.ctypes.data // dtype.itemsize) % (16 // dtype.itemsize) + shift
    found = memory[begin : begin + size]
    with np.errstate(all="ignore"):
        found[...] = random.standard_normal(size) * 10.0 ** random.integers(-6, 5, size)
    return found


def addresses(*rows: list[np.ndarray]) -> np.ndarray:
    return np.array([[each.ctypes.data for each in row] for row in rows], np.uint64)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.slow
def test_an_update_has_the_bits_of_numpy(
    compiled: Kernels, name: str, dtype: Any, shift: int, scale: float | None
) -> None:
    step, slots = STEPS[name]
    random = np.random.default_rng(5)
    formula, numbers = formula_of(step)  # type: ignore[misc]
    rows = [[drawn(random, size, dtype, shift) for size in SIZES] for _ in range(2 + len(slots))]
    for square in rows[-1] if slots == ("m", "v") else ():
        np.abs(square, out=square)
    expected = [[each.copy() for each in row] for row in rows]
    rounded = np.zeros(1, [("each", np.float64, update_kernel.NUMBERS)])
    rounded["each"][0, : len(numbers)] = np.array(numbers).astype(dtype)
    shape = (dtype.itemsize, formula.table, formula.arrays, update_kernel.BLOCK_ELEMENTS)
    factor = np.array([0.0 if scale is None else scale])
    pointer = np.uint64(0 if scale is None else factor.ctypes.data)
    with np.errstate(all="ignore"):
        for _ in range(2):
            for launch in launching.launches(SIZES, *shape):
                arguments = (launch.filled(addresses(*rows)), rounded, pointer, np.int32(launch.count))
                compiled.run(formula.kernel_name(dtype), launch.blocks, update_kernel.THREADS, arguments)
            for parameter, gradient, *beside in zip(*expected, strict=True):
                taken = gradient if scale is None else gradient * scale
                scratch = [np.empty_like(parameter) for _ in range(kernels.SCRATCH_ARRAYS)]
                step(parameter, taken, dict(zip(slots, beside, strict=True)), scratch)
    for found, right in zip(rows, expected, strict=True):
        for one, other in zip(found, right, strict=True):
            assert np.array_equal(one, other, equal_nan=True)
            assert np.array_equal(np.signbit(one), np.signbit(other)) or np.isnan(other).any()


def norm_by_kernels(compiled: Kernels, arrays: list[np.ndarray], most: float) -> tuple[float, float, list[int]]:
    (dtype,) = {each.dtype for each in arrays}
    shape = (dtype.itemsize, norm_kernel.TABLE, norm_kernel.ARRAYS, norm_kernel.BLOCK_ELEMENTS)
    (launch,) = launching.launches([each.size for each in arrays], *shape)
    sums, broken, told = np.zeros((launch.blocks, 2)), np.zeros(len(arrays), np.uint8), np.zeros(2)
    arguments = (launch.filled(addresses(arrays)), np.int32(launch.count), sums, broken)
    compiled.run(norm_kernel.squares_name(dtype), launch.blocks, norm_kernel.THREADS, arguments, at_once=True)
    last = (sums, np.uint32(launch.blocks), np.float64(most), told)
    compiled.run(norm_kernel.SUM_NAME, 1, norm_kernel.THREADS, last, at_once=True)
    return float(told[0]), float(told[1]), np.flatnonzero(broken).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_are_exact_and_do_not_depend_on_alignment(compiled: Kernels, dtype: Any) -> None:
    found = []
    for shift in (0, 1):
        random = np.random.default_rng(8)
        arrays = [drawn(random, size, dtype, shift) for size in (5, 33_000, 1)]
        for each in arrays:
            each[~np.isfinite(each)] = 1
        exact = sum((Fraction(number) ** 2 for each in arrays for number in each.tolist()), Fraction(0))
        right = math.sqrt(exact)
        norm, scale, broken = norm_by_kernels(compiled, arrays, right / 4)
        assert abs(norm - right) <= 4 * math.ulp(right)
        assert (scale, broken) == (right / 4 / norm, [])
        found.append(norm)
    assert found[0] == found[1]


def test_what_is_not_finite_is_named(compiled: Kernels) -> None:
    arrays = [np.ones(5, np.float32) for _ in range(4)]
    arrays[1][3], arrays[3][4] = np.inf, np.nan
    norm, scale, broken = norm_by_kernels(compiled, arrays, 1.0)
    assert np.isnan(norm)
    assert np.isnan(scale)
    assert broken == [1, 3]
    norm, scale, broken = norm_by_kernels(compiled, arrays[:3], 1.0)
    assert norm == np.inf
    assert np.isnan(scale)
    large = [np.full(3, 1e200), np.zeros(2)]
    assert norm_by_kernels(compiled, large, 1.0)[0] == np.inf  # a square overflows; the numbers are finite
    assert norm_by_kernels(compiled, large, 1.0)[2] == []
    assert norm_by_kernels(compiled, [np.zeros(3), np.zeros(2)], 1.0) == (0.0, 1.0, [])
