"""MIN and MAX of floats as MIN and MAX of integers, for libraries whose MIN and MAX of floats may lose a NaN.

The bits of a float become a signed integer of the same order: -0.0 is less than +0.0, and a NaN is the greatest number
for MAX and the least for MIN.  Converted back, the result has the bits of `mpistrategy.arrays.dtypes.Extreme`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from mpistrategy.arrays.gpu import DeviceArray

THREADS = 256
MOST_BLOCKS = 1024
#: The kernels' names, by the size of a number: from floats to keys, and back.
NAMES: dict[int, tuple[str, str]] = {
    4: ("keys_of_float32", "float32_of_keys"),
    8: ("keys_of_float64", "float64_of_keys"),
}
KEYS: dict[int, np.dtype[Any]] = {4: np.dtype(np.int32), 8: np.dtype(np.int64)}

#: The arguments of every kernel: the numbers, how many they are, and whether they are for a MIN.
SOURCE = r"""
typedef unsigned long long u64;

#define KERNELS(to_keys, to_floats, Bits, sign, infinity, nan)                                       \
    extern "C" __global__ void to_keys(Bits* numbers, u64 size, int is_minimum) {                    \
        const u64 step = gridDim.x * (u64)blockDim.x;                                                \
        for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < size; i += step) {              \
            const Bits bits = numbers[i];                                                            \
            const Bits key = bits & sign ? bits ^ ~sign : bits;                                      \
            numbers[i] = (bits & ~sign) <= infinity ? key : is_minimum ? sign : ~sign;               \
        }                                                                                            \
    }                                                                                                \
    extern "C" __global__ void to_floats(Bits* numbers, u64 size, int is_minimum) {                  \
        const u64 step = gridDim.x * (u64)blockDim.x;                                                \
        for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < size; i += step) {              \
            const Bits key = numbers[i];                                                             \
            const Bits bits = key & sign ? key ^ ~sign : key;                                        \
            numbers[i] = (bits & ~sign) <= infinity ? bits : nan;                                    \
        }                                                                                            \
    }
KERNELS(keys_of_float32, float32_of_keys, unsigned int, 0x80000000u, 0x7f800000u, 0x7fc00000u)
KERNELS(keys_of_float64, float64_of_keys, u64, 0x8000000000000000ull, 0x7ff0000000000000ull, 0x7ff8000000000000ull)
"""


def are_for(dtype: np.dtype[Any], op: str) -> bool:
    """Return whether arrays of a dtype are combined as keys."""
    return op in ("MIN", "MAX") and dtype.kind == "f" and dtype.itemsize in NAMES


@contextmanager
def in_order(cupy: Any, buffer: DeviceArray, op: str) -> Iterator[DeviceArray]:
    """Yield the array to combine for a buffer: its keys, which become floats again afterwards, or the buffer itself."""
    if not are_for(buffer.dtype, op):
        yield buffer
        return
    keys = to_keys(cupy, buffer, op)
    yield keys
    to_floats(cupy, keys, op)


def to_keys(cupy: Any, buffer: DeviceArray, op: str) -> DeviceArray:
    """Make keys of floats where they are, in contiguous memory; return them as integers."""
    keys = buffer.view(KEYS[buffer.itemsize])
    _launch(cupy, NAMES[keys.itemsize][0], keys, op)
    return keys


def to_floats(cupy: Any, keys: DeviceArray, op: str) -> DeviceArray:
    """Make floats of keys where they are; return them as floats."""
    _launch(cupy, NAMES[keys.itemsize][1], keys, op)
    return keys.view(f"f{keys.itemsize}")


def _launch(cupy: Any, name: str, keys: DeviceArray, op: str) -> None:
    if keys.size:
        grid = (min(-(-keys.size // THREADS), MOST_BLOCKS),)
        compile_for(cupy)[name](grid, (THREADS,), (keys, np.uint64(keys.size), np.int32(op == "MIN")))


@lru_cache(maxsize=1)
def compile_for(cupy: Any) -> dict[str, Any]:
    """Return the kernels by their names; to be called before the ranks agree, since it may fail."""
    module = cupy.RawModule(code=SOURCE, options=("--std=c++17",))
    return {name: module.get_function(name) for names in NAMES.values() for name in names}
