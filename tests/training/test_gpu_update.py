"""Steps of optimizers in GPU memory have the bits of those in host memory."""

from __future__ import annotations

from typing import Any

import gpu_here
import numpy as np
import pytest
from optimizing import OPTIMIZERS, apply, gradients_for, model
from replicas import bits

import mpistrategy as ms

cupy = gpu_here.cupy_or_skip()
pytestmark = pytest.mark.mpi
SIZES = (1, 0, 3, 4, 5, 31, 4096, 4097, 10_001, 64)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_has_the_bits_of_numpy(strategy: ms.Strategy, name: str, dtype: str) -> None:
    shapes = [((size,), dtype) for size in SIZES]
    there, here = gpu_here.strategy(), strategy
    ours, theirs = model(there, shapes), model(here, shapes)
    one, two = OPTIMIZERS[name](0.1), OPTIMIZERS[name](0.1)
    for step in range(3):
        gradients: list[Any] = gradients_for(theirs, step)
        apply(there, one, [cupy.asarray(gradient) for gradient in gradients], ours)
        apply(here, two, gradients, theirs)
        for mine, right in zip(ours, theirs, strict=True):
            assert isinstance(mine.local_copy(), cupy.ndarray)
            assert bits(np.asarray(mine.numpy())) == bits(right)
            for key, slot in one.slots_of(mine).items():
                assert bits(np.asarray(slot.numpy())) == bits(two.slots_of(right)[key])
    there.close()
