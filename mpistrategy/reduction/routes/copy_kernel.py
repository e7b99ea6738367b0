"""The kernel that copies many arrays at once on a GPU, and the table that it is given.

One launch copies up to `ARRAYS` arrays, each from anywhere to anywhere.  The whole table goes along as the kernel's
argument, by value: nothing is uploaded first, nothing has to be kept until the kernel has run, and calls on several
streams cannot disturb each other.

The same source is C++ but for a few words, and tests run it on the CPU.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

NAME = "mpistrategy_move"
#: How many arrays go into one launch: with them the argument is just below the 4 KiB that every GPU takes.
ARRAYS = 170
THREADS = 256
#: How many bytes one block copies.  Each thread then moves 64 bytes, all of them on the way at the same time.
BLOCK_BYTES = 16384

#: The argument.  `size` counts bytes; `first` is the first of an array's blocks.
MOVES = np.dtype(
    {
        "names": ["source", "target", "size", "first"],
        "formats": [(each, ARRAYS) for each in (np.uint64, np.uint64, np.uint32, np.uint32)],
        "offsets": [each * ARRAYS for each in (0, 8, 16, 20)],
        "itemsize": 24 * ARRAYS,
    }
)

SOURCE = (
    f"""
#define ARRAYS {ARRAYS}
#define THREADS {THREADS}
#define BLOCK_BYTES {BLOCK_BYTES}u
#define NAME {NAME}
"""
    + r"""
typedef unsigned long long address;

struct Moves {
    address source[ARRAYS];
    address target[ARRAYS];
    unsigned int size[ARRAYS];
    unsigned int first[ARRAYS];
};

// ---- one block's part of one array

// Copy in units, where source and target are aligned alike; copy the bytes before and after them one by one.
template <typename Unit>
__device__ __forceinline__ void copy_units(address source, address target, unsigned int bytes) {
    const unsigned int before_first = (unsigned int)(0 - source) & (unsigned int)(sizeof(Unit) - 1);
    const unsigned int head = before_first < bytes ? before_first : bytes;
    const unsigned int units = (bytes - head) / (unsigned int)sizeof(Unit);
    const Unit* from = (const Unit*)(source + head);
    Unit* to = (Unit*)(target + head);
    unsigned int at = threadIdx.x;
    for (; at + 3 * THREADS < units; at += 4 * THREADS) {
        const Unit a = from[at], b = from[at + THREADS], c = from[at + 2 * THREADS], d = from[at + 3 * THREADS];
        to[at] = a;
        to[at + THREADS] = b;
        to[at + 2 * THREADS] = c;
        to[at + 3 * THREADS] = d;
    }
    for (; at < units; at += THREADS) to[at] = from[at];
    const unsigned int rest = head + units * (unsigned int)sizeof(Unit);
    for (at = threadIdx.x; at < head; at += THREADS) ((char*)target)[at] = ((const char*)source)[at];
    for (at = rest + threadIdx.x; at < bytes; at += THREADS) ((char*)target)[at] = ((const char*)source)[at];
}

__device__ __forceinline__ void copy(address source, address target, unsigned int bytes) {
    const unsigned int apart = (unsigned int)(source ^ target);
    if ((apart & 15u) == 0) copy_units<uint4>(source, target, bytes);
    else if ((apart & 7u) == 0) copy_units<uint2>(source, target, bytes);
    else if ((apart & 3u) == 0) copy_units<unsigned int>(source, target, bytes);
    else if ((apart & 1u) == 0) copy_units<unsigned short>(source, target, bytes);
    else copy_units<unsigned char>(source, target, bytes);
}

// ---- all arrays

// With fewer registers than five blocks leave to each, the compiler would keep some in memory.
extern "C" __global__ void __launch_bounds__(THREADS, 5) NAME(const Moves moves, int count) {
    int low = 0, high = count - 1;  // the last array whose first block is not after this one
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (moves.first[middle] <= blockIdx.x) low = middle;
        else high = middle - 1;
    }
    const unsigned int start = (blockIdx.x - moves.first[low]) * BLOCK_BYTES, left = moves.size[low] - start;
    copy(moves.source[low] + start, moves.target[low] + start, left < BLOCK_BYTES ? left : BLOCK_BYTES);
}
"""
)


@lru_cache(maxsize=1)
def kernel(cupy: Any) -> Any:
    """Return the kernel.

    CuPy compiles it with NVRTC the first time, for each device, and keeps the result in its cache on disk.
    """
    return cupy.RawModule(code=SOURCE, options=("-std=c++14",)).get_function(NAME)
