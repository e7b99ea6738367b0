"""The kernel that updates many variables at once on a GPU has NumPy's bits."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from kernels_on_cpu import HAS_COMPILER, Kernels

from mpistrategy.training import formulas, gpu_update
from mpistrategy.training.formulas import Kernel

pytestmark = [pytest.mark.one_rank, pytest.mark.skipif(not HAS_COMPILER, reason="no g++")]

ADAM = partial(formulas.adam, size=0.011, beta_1=0.8, beta_2=0.99, epsilon=1e-5)
STEPS: dict[str, tuple[Kernel, tuple[str, ...]]] = {
    "sgd": (partial(formulas.sgd, rate=0.1), ()),
    "momentum": (partial(formulas.momentum, rate=0.03, decay=0.9, nesterov=False), ("momentum",)),
    "nesterov": (partial(formulas.momentum, rate=0.03, decay=0.9, nesterov=True), ("momentum",)),
    "adam": (ADAM, ("m", "v")),
    "adamw": (partial(formulas.decayed, decay=0.01, then=ADAM), ("m", "v")),
}
DTYPES = [np.dtype(name) for name in gpu_update.TYPES]
SIZES = [1, 0, 3, 4, 5, 31, 4096, 4097, 10_001, 64]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    sources = {}
    for dtype in DTYPES:
        for name, (step, slots) in STEPS.items():
            program = gpu_update.source(gpu_update.written_down(step, slots)[0], dtype, 2 + len(slots))
            sources[f"{name}_{dtype.name}"] = program.replace(gpu_update.NAME, f"{name}_{dtype.name}")
    return Kernels(tmp_path_factory.mktemp("kernels"), sources)


def drawn(random: np.random.Generator, size: int, dtype: np.dtype[Any], shift: int) -> np.ndarray:
    """Return numbers of many magnitudes, so many elements behind a multiple of 16 bytes."""
    memory = np.zeros(size + 16, dtype)
    begin = (-memory.ctypes.data // dtype.itemsize) % (16 // dtype.itemsize) + shift
    found = memory[begin : begin + size]
    with np.errstate(all="ignore"):
        found[...] = random.standard_normal(size) * 10.0 ** random.integers(-6, 5, size)
    return found


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.slow
def test_an_update_has_the_bits_of_numpy(compiled: Kernels, name: str, dtype: Any, shift: int) -> None:
    step, slots = STEPS[name]
    random = np.random.default_rng(5)
    numbers = gpu_update.written_down(step, slots)[1]
    rows = [[drawn(random, size, dtype, shift) for size in SIZES] for _ in range(2 + len(slots))]
    for square in rows[-1] if slots == ("m", "v") else ():
        np.abs(square, out=square)
    expected = [[each.copy() for each in row] for row in rows]
    rounded = np.zeros(1, [("each", np.float64, gpu_update.NUMBERS)])
    rounded["each"][0, : len(numbers)] = np.array(numbers).astype(dtype)
    blocks = np.array([-(-size // gpu_update.BLOCK_ELEMENTS) for size in SIZES])
    table = np.zeros(1, gpu_update.table_of(2 + len(slots)))
    table["addresses"][0, :, : len(SIZES)] = [[each.ctypes.data for each in row] for row in rows]
    table["size"][0, : len(SIZES)] = SIZES
    table["first"][0, : len(SIZES)] = np.cumsum(blocks) - blocks
    with np.errstate(all="ignore"):
        for _ in range(2):
            arguments = (table, rounded, np.int32(len(SIZES)))
            compiled.run(f"{name}_{dtype.name}", int(blocks.sum()), gpu_update.THREADS, arguments)
            for parameter, gradient, *beside in zip(*expected, strict=True):
                scratch = [np.empty_like(parameter) for _ in range(formulas.SCRATCH_ARRAYS)]
                step(parameter, gradient, dict(zip(slots, beside, strict=True)), scratch)
    for found, right in zip(rows, expected, strict=True):
        for one, other in zip(found, right, strict=True):
            assert np.array_equal(one, other, equal_nan=True)
            assert np.array_equal(np.signbit(one), np.signbit(other)) or np.isnan(other).any()
