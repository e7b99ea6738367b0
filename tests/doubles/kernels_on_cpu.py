"""Our CUDA kernels, compiled as C++ by g++ and run by the processor, block after block.

A block's threads run one after the other, or at the same time where they wait for each other.  Reads and writes of
several elements at once at an address that a GPU would refuse end the process here, too.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpistrategy.reduction.routes import gpu as gpu_route

HAS_COMPILER = shutil.which("g++") is not None

# What CUDA knows and C++ does not.
_SHIM = r"""
#include <cstring>
#include <pthread.h>
#include <thread>
#include <vector>
#include "half.hpp"
#define __global__
#define __device__
#define __forceinline__ static inline
#define __launch_bounds__(...)
struct alignas(16) uint4 { unsigned int x, y, z, w; };
struct alignas(8) uint2 { unsigned int x, y; };
struct Place { unsigned int x; };
static thread_local Place blockIdx, threadIdx;
#define __shared__ static
static pthread_barrier_t barrier;
static inline void __syncthreads() { pthread_barrier_wait(&barrier); }
"""
_DRIVER = r"""
static_assert(sizeof(Moves) == SIZE_OF_MOVES, "as in Python");

extern "C" void run_move(const Moves* moves, int count, unsigned int blocks, unsigned int threads) {
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) NAME(*moves, count);
}
"""


# A kernel with any arguments of up to 8 bytes: `run(words, blocks, threads, at_once)`.
_RUNNER = r"""
template <class... A, std::size_t... I>
static void call(void (*kernel)(A...), void** given, std::index_sequence<I...>) {
    kernel(*(std::decay_t<A>*)given[I]...);
}
template <class... A>
static void each(void (*kernel)(A...), void** given, unsigned int block, unsigned int thread) {
    blockIdx.x = block;
    threadIdx.x = thread;
    call(kernel, given, std::index_sequence_for<A...>());
}
extern "C" void RUN(void** given, unsigned int blocks, unsigned int threads, int at_once) {
    for (unsigned int block = 0; block < blocks; ++block) {
        if (!at_once) {
            for (unsigned int thread = 0; thread < threads; ++thread) each(NAME, given, block, thread);
            continue;
        }
        std::vector<std::thread> all;
        pthread_barrier_init(&barrier, nullptr, threads);
        for (unsigned int thread = 0; thread < threads; ++thread)
            all.emplace_back([=] { each(NAME, given, block, thread); });
        for (auto& one : all) one.join();
        pthread_barrier_destroy(&barrier);
    }
}
"""


class Kernels:
    """Kernels by name.

    Args:
        folder: where they are compiled.
        sources: the programs, by the names of their kernels.
    """

    def __init__(self, folder: Path, sources: Mapping[str, str]) -> None:
        files = []
        (folder / "shim.hpp").write_text(_SHIM + "#include <utility>\n")
        _compiled(folder / "shim.hpp.gch", "-x", "c++-header", folder / "shim.hpp")  # once, for all of them
        for name, source in sources.items():
            file = folder / f"{name}.cpp"
            file.write_text('#include "shim.hpp"\n' + source + _RUNNER.replace("RUN", f"run_{name}"))
            files.append(file)
        self._library = _built(folder / "kernels.so", *files)

    def run(self, name: str, blocks: int, threads: int, arguments: Sequence[Any], *, at_once: bool = False) -> None:
        """Run a kernel; arguments are NumPy's arrays, which go by address, structures of one element, and scalars."""
        held = [np.array([each]) if isinstance(each, np.generic) else each for each in arguments]
        held = [np.array([each.ctypes.data]) if each.dtype.names is None and each.size != 1 else each for each in held]
        pointers = (ctypes.c_void_p * len(held))(*[each.ctypes.data for each in held])
        getattr(self._library, f"run_{name}")(pointers, blocks, threads, int(at_once))


def compiled(folder: Path) -> ctypes.CDLL:
    """Return the library, made in `folder`."""
    source = folder / "move.cpp"
    driver = _DRIVER.replace("SIZE_OF_MOVES", str(gpu_route.MOVES.itemsize))
    source.write_text(_SHIM + gpu_route.SOURCE + driver)
    return _built(folder / "move.so", source)


def _built(library: Path, *sources: Path) -> ctypes.CDLL:
    _compiled(library, "-shared", *sources)
    return ctypes.CDLL(str(library))


def _compiled(made: Path, *what: str | Path) -> None:
    flags = [f"-I{Path(__file__).parents[1] / 'cuda_on_cpu'}", "-std=c++14", "-O1", "-fPIC", "-pthread"]
    flags += ["-ffp-contract=off", "-fno-strict-aliasing", "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
    flags += ["-Wall", "-Wextra", "-Werror", "-Wno-unused-function"]
    subprocess.run(["g++", *flags, "-o", made, *what], check=True, timeout=100)


def move(library: ctypes.CDLL, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray]) -> int:
    """Copy each source into its target by the kernel; return how often it was started."""
    moves = [(s.ctypes.data, t.ctypes.data, s.nbytes) for s, t in zip(sources, targets, strict=True)]
    starts = range(0, len(moves), gpu_route.ARRAYS)
    for start in starts:
        argument, blocks, count = gpu_route.launch(moves[start : start + gpu_route.ARRAYS])
        pointer: Any = ctypes.c_void_p(argument.ctypes.data)
        library.run_move(pointer, count, blocks, gpu_route.THREADS)
    return len(starts)
