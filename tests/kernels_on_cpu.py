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

from mpistrategy.reduction.routes import copy_kernel, gpu_copy

HAS_COMPILER = shutil.which("g++") is not None

# What CUDA knows and C++ does not.
_SHIM = r"""
#include <cstring>
#include "half.hpp"
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
struct alignas(16) uint4 { unsigned int x, y, z, w; };
struct alignas(8) uint2 { unsigned int x, y; };
struct Place { unsigned int x; };
static thread_local Place blockIdx, threadIdx;
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
    driver = _DRIVER.replace("SIZE_OF_MOVES", str(copy_kernel.MOVES.itemsize))
    source.write_text(_SHIM + copy_kernel.SOURCE + driver)
    flags = [
        f"-I{Path(__file__).parent / 'cuda_on_cpu'}",
        "-std=c++14",
        "-O1",
        "-fPIC",
        "-shared",
        "-fno-strict-aliasing",
    ]
    flags += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["g++", *flags, "-o", library, source], check=True, timeout=100)
    return ctypes.CDLL(str(library))


def move(library: ctypes.CDLL, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray]) -> int:
    """Copy each source into its target by the kernel; return how often it was started."""
    moves = []
    for source, target in zip(sources, targets, strict=True):
        kind = gpu_copy.kind_of(source.dtype, target.dtype)
        assert kind is not None
        moves.append((kind, source.size, source.itemsize, target.itemsize))
    launches = gpu_copy.launches(tuple(moves))
    for launch in launches:
        argument = launch.argument(_addresses(sources), _addresses(targets))
        pointer: Any = ctypes.c_void_p(argument.ctypes.data)
        library.run_move(pointer, launch.count, launch.blocks, copy_kernel.THREADS)
    return len(launches)


def _addresses(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([array.ctypes.data for array in arrays], np.uint64)
