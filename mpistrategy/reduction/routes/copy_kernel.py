"""The kernel that copies many arrays at once on a GPU, and the table that it is given.

One launch copies up to `ARRAYS` arrays, each from anywhere to anywhere, and makes float32 of floats of 16 bits.  The
whole table goes along as the kernel's argument, by value: nothing is uploaded first, nothing has to be kept until the
kernel has run, and calls on several streams cannot disturb each other.

The same source is C++ but for a few words, and tests run it on the CPU.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from mpistrategy.errors import FallbackWarning
from mpistrategy.mpi.contract.call_sites import warn

NAME = "mpistrategy_move"
#: How many arrays go into one launch: with them the argument is just below the 4 KiB that every GPU takes.
ARRAYS = 162
THREADS = 256
#: What one block copies: bytes of an array that is copied as it is, or elements of one that is converted.  Each thread
#: then moves 64 bytes, all of them on the way at the same time.
BLOCK_BYTES = 16384
BLOCK_ELEMENTS = 4096

AS_IT_IS = 0
#: What the kernel does with elements of one dtype that shall become another.
KINDS = {("float16", "float32"): 1, ("bfloat16", "float32"): 2}

#: The argument.  `size` counts what BLOCK_BYTES or BLOCK_ELEMENTS count; `first` is the first of an array's blocks.
MOVES = np.dtype(
    {
        "names": ["source", "target", "size", "first", "kind"],
        "formats": [(each, ARRAYS) for each in (np.uint64, np.uint64, np.uint32, np.uint32, np.uint8)],
        "offsets": [each * ARRAYS for each in (0, 8, 16, 20, 24)],
        "itemsize": -(-25 * ARRAYS // 8) * 8,
    }
)

SOURCE = (
    f"""
#define ARRAYS {ARRAYS}
#define THREADS {THREADS}
#define BLOCK_BYTES {BLOCK_BYTES}u
#define BLOCK_ELEMENTS {BLOCK_ELEMENTS}u
#define NAME {NAME}
"""
    + r"""
typedef unsigned long long address;

struct Moves {
    address source[ARRAYS];
    address target[ARRAYS];
    unsigned int size[ARRAYS];
    unsigned int first[ARRAYS];
    unsigned char kind[ARRAYS];
};

struct Half { unsigned short bits; };
struct Brain { unsigned short bits; };

// ---- one element

__device__ __forceinline__ float as_float(unsigned int bits) {
    union { unsigned int u; float f; } both;
    both.u = bits;
    return both.f;
}

__device__ __forceinline__ void convert(Half from, float& to) {
#ifdef __CUDA_ARCH__
    asm("cvt.f32.f16 %0, %1;" : "=f"(to) : "h"(from.bits));
#else
    to = half_to_float(from.bits);
#endif
}

__device__ __forceinline__ void convert(Brain from, float& to) {
    to = as_float((unsigned int)from.bits << 16);
}

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

template <typename T>
struct alignas(4 * sizeof(T)) Four { T each[4]; };

template <typename From>
__device__ __forceinline__ void convert_four(const Four<From>& from, Four<float>& to) {
    Four<float> made;
    convert(from.each[0], made.each[0]);
    convert(from.each[1], made.each[1]);
    convert(from.each[2], made.each[2]);
    convert(from.each[3], made.each[3]);
    to = made;
}

// Convert in fours where source and target are aligned alike; else one by one.
template <typename From>
__device__ __forceinline__ void convert_all(address source, address target, unsigned int count) {
    const From* from = (const From*)source;
    float* to = (float*)target;
    const unsigned int place = (unsigned int)(source / sizeof(From)) & 3u;
    unsigned int head = (4u - place) & 3u, fours = 0;
    if (place == ((unsigned int)(target / sizeof(float)) & 3u) && count > head) fours = (count - head) / 4u;
    if (fours == 0) head = 0;
    const Four<From>* from4 = (const Four<From>*)(from + head);
    Four<float>* to4 = (Four<float>*)(to + head);
    unsigned int at = threadIdx.x;
    for (; at + 3 * THREADS < fours; at += 4 * THREADS) {
        const Four<From> a = from4[at], b = from4[at + THREADS];
        const Four<From> c = from4[at + 2 * THREADS], d = from4[at + 3 * THREADS];
        convert_four(a, to4[at]);
        convert_four(b, to4[at + THREADS]);
        convert_four(c, to4[at + 2 * THREADS]);
        convert_four(d, to4[at + 3 * THREADS]);
    }
    for (; at < fours; at += THREADS) {
        const Four<From> a = from4[at];
        convert_four(a, to4[at]);
    }
    for (at = threadIdx.x; at < head; at += THREADS) convert(from[at], to[at]);
    for (at = head + 4 * fours + threadIdx.x; at < count; at += THREADS) convert(from[at], to[at]);
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
    const address source = moves.source[low], target = moves.target[low];
    const unsigned int kind = moves.kind[low], block = blockIdx.x - moves.first[low];
    const unsigned int step = kind ? BLOCK_ELEMENTS : BLOCK_BYTES;
    const unsigned int start = block * step, left = moves.size[low] - start;
    const unsigned int size = left < step ? left : step;
#define CONVERT(From) convert_all<From>(source + start * sizeof(From), target + start * sizeof(float), size)
    switch (kind) {
        case 0: copy(source + start, target + start, size); break;
        case 1: CONVERT(Half); break;
        case 2: CONVERT(Brain); break;
    }
}
"""
)


@lru_cache(maxsize=1)
def kernel(cupy: Any) -> Any:
    """Return the kernel, compiled for the current device; None, with one warning, where that cannot be.

    CuPy compiles it with NVRTC the first time, for each device, and keeps the result in its cache on disk.
    """
    try:
        module = cupy.RawModule(code=SOURCE, options=("-std=c++14",))
        module.compile()
        return module.get_function(NAME)
    except Exception as error:  # of many types: no NVRTC, no headers, a disk that is full
        reason = str(error).strip().partition("\n")[0]
        warn(
            f"arrays in GPU memory are packed one by one: the kernel for all of them cannot be compiled ({reason})",
            FallbackWarning,
        )
        return None
