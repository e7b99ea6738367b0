"""All-reduces of what slow kernels have yet to write: right in the order that the library keeps, wrong without it.

The kernels take a millisecond each, and there are 1,000 of them, or 100 where a processor stands in for the GPU.
"""

from __future__ import annotations

from typing import Any

import gpu_here
import numpy as np
import pytest
from delayed_writes import delayed_fill
from replicas import ALL, RANK, SIZE

import mpistrategy as ms
from mpistrategy.options import GPU_PATH

pytestmark = pytest.mark.skipif(SIZE > 2 and not ALL, reason="two ranks show it")
ITERATIONS = 1000 if gpu_here.IS_GPU else 100
SECONDS = 1e-3
SIZES = (3, 1000, 70_000)


def wrong_sums(cupy: Any, path: str, monkeypatch: pytest.MonkeyPatch, iterations: int) -> int:
    """Return how many of the sums were wrong: what is read, and what the sums become part of, later on the stream."""
    monkeypatch.setenv(GPU_PATH, path)
    ranks = SIZE * (SIZE + 1) / 2
    with gpu_here.strategy() as strategy, cupy.cuda.Stream(non_blocking=True) as stream:  # a stream of this rank's GPU
        gradients = [cupy.asarray(np.full(size, -1.0)) for size in SIZES]
        wrong = cupy.asarray(np.zeros(1))

        def step(number: int) -> None:
            for at, gradient in enumerate(gradients):
                delayed_fill(cupy, gradient, (RANK + 1) * (number % 97 + at + 1), SECONDS if at == 0 else 0)
            sums = ms.get_replica_context().all_reduce("SUM", gradients)
            for at, (total, gradient) in enumerate(zip(sums, gradients, strict=True)):
                gradient[...] = -1.0  # nobody may read it any more
                wrong[...] += (total * 2 != 2 * ranks * (number % 97 + at + 1)).any()

        for number in range(iterations):
            strategy.run(step, args=(number,))
        return int(wrong.get(stream=stream)[0])


@pytest.mark.parametrize("path", gpu_here.PATHS)
def test_sums_of_what_slow_kernels_write_are_right(cupy: Any, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrong_sums(cupy, path, monkeypatch, ITERATIONS) == 0
