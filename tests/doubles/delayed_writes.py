"""A kernel that keeps the GPU waiting before it writes: whoever reads too early finds what was there before."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

NAME = "delayed_fill"
SOURCE = r"""
extern "C" __global__ void delayed_fill(double* target, int size, double value, long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < (unsigned long long)nanoseconds);
    for (int at = blockIdx.x * blockDim.x + threadIdx.x; at < size; at += gridDim.x * blockDim.x) target[at] = value;
}
"""


def delayed_fill(cupy: Any, target: Any, value: float, seconds: float) -> None:
    """Put on the current stream: wait for so long, then fill a float64 array."""
    _kernel(cupy)((4,), (128,), (target, np.int32(target.size), np.float64(value), np.int64(seconds * 1e9)))


@lru_cache(maxsize=1)
def _kernel(cupy: Any) -> Any:
    return cupy.RawModule(code=SOURCE).get_function(NAME)
