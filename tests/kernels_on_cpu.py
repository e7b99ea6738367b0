"""Our CUDA kernels, compiled as C++ by g++ and run by the processor: one thread after the other, block after block.

None of them has threads that wait for each other, so that any order does.  Reads and writes of several elements at once
at an address that a GPU would refuse end the process here, too.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpistrategy.cross_device_ops import device_moves, move_kernel

HAS_COMPILER = shutil.which("g++") is not None

# What CUDA knows and C++ does not; the 16-bit floats by their bits, since g++ has no type for them before version 13.
_SHIM = r"""
#include <cmath>
#include <cstring>
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
struct alignas(16) uint4 { unsigned int x, y, z, w; };
struct alignas(8) uint2 { unsigned int x, y; };
struct Place { unsigned int x; };
static thread_local Place blockIdx, threadIdx;

static float half_to_float(unsigned short bits) {
    const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
    float value;
    if (exponent == 31) value = fraction ? NAN : INFINITY;
    else if (exponent) value = std::ldexp((float)(1024 + fraction), exponent - 25);
    else value = std::ldexp((float)fraction, -24);
    return bits & 0x8000 ? -value : value;
}

static unsigned short float_to_half(float value) {
    const unsigned short sign = std::signbit(value) ? 0x8000 : 0;
    value = std::fabs(value);
    if (std::isnan(value)) return sign | 0x7e00;
    if (value >= 65520.0f) return sign | 0x7c00;
    if (value < 6.103515625e-05f) return sign | (unsigned short)std::nearbyint(std::ldexp(value, 24));
    int exponent;
    std::frexp(value, &exponent);  // 2^(exponent - 1) <= value
    const unsigned int fraction = (unsigned int)std::nearbyint(std::ldexp(value, 11 - exponent));
    return sign | (unsigned short)(((exponent + 13) << 10) + fraction);  // a fraction of 2048 carries over
}
"""
_DRIVER = r"""
static_assert(sizeof(Moves) == SIZE_OF_MOVES, "as in Python");

extern "C" void run_move(const Moves* moves, int count, unsigned int blocks, unsigned int threads) {
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) NAME(*moves, count);
}
"""


def compiled(folder: Path) -> ctypes.CDLL:
    """Return the library, made in `folder`."""
    source, library = folder / "move.cpp", folder / "move.so"
    driver = _DRIVER.replace("SIZE_OF_MOVES", str(move_kernel.MOVES.itemsize))
    source.write_text(_SHIM + move_kernel.SOURCE + driver)
    flags = ["-std=c++14", "-O1", "-fPIC", "-shared", "-fno-strict-aliasing"]
    flags += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["g++", *flags, "-o", library, source], check=True, timeout=100)
    return ctypes.CDLL(str(library))


def move(library: ctypes.CDLL, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray]) -> int:
    """Copy each source into its target by the kernel; return how often it was started."""
    moves = []
    for source, target in zip(sources, targets, strict=True):
        kind = device_moves.kind_of(source.dtype, target.dtype)
        assert kind is not None
        moves.append((kind, source.size, source.itemsize, target.itemsize))
    launches = device_moves.launches(tuple(moves))
    for launch in launches:
        argument = launch.argument(_addresses(sources), _addresses(targets))
        pointer: Any = ctypes.c_void_p(argument.ctypes.data)
        library.run_move(pointer, launch.count, launch.blocks, move_kernel.THREADS)
    return len(launches)


def _addresses(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([array.ctypes.data for array in arrays], np.uint64)
