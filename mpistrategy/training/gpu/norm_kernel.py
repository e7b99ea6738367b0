"""The kernels that sum the squares of many arrays on a GPU, and find which of them are not finite.

Squares are summed in float64 with the rounding errors of the sums carried along, in an order that depends on the sizes
of the arrays alone: the same on every rank and in every run.  The norm is the exact one, rounded, but for the rounding
of squares of float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrategy.training.gpu.update_kernel import NUMBER_TYPES, TYPES

THREADS = 256
#: What one block sums: elements of one array.
BLOCK_ELEMENTS = 16384
#: How many arrays go into one launch: the argument is below the 4 KiB that every GPU takes.
ARRAYS = 240
#: The argument: where the arrays begin, their sizes in elements, the first of each array's blocks.
TABLE = np.dtype(
    {
        "names": ["addresses", "size", "first"],
        "formats": [(np.uint64, (1, ARRAYS)), (np.uint32, ARRAYS), (np.uint32, ARRAYS)],
        "offsets": [0, 8 * ARRAYS, 12 * ARRAYS],
        "itemsize": 16 * ARRAYS,
    }
)
OPTIONS = ("-std=c++14", "--fmad=false", "--ftz=false")
SUM_NAME = "mpistrategy_norm"


def squares_name(dtype: np.dtype[Any]) -> str:
    """Return the name of the kernel for arrays of `dtype`."""
    return f"mpistrategy_squares_{dtype.name}"


def squares_source(dtype: np.dtype[Any]) -> str:
    """Return the program that sums the squares of each block's elements."""
    head = {
        "ARRAYS": ARRAYS,
        "THREADS": THREADS,
        "BLOCK_ELEMENTS": f"{BLOCK_ELEMENTS}u",
        "Element": TYPES[dtype.name],
        "NAME": squares_name(dtype),
    }
    return "".join(f"#define {name} {value}\n" for name, value in head.items()) + NUMBER_TYPES + _SUMS + _SQUARES


def sum_source() -> str:
    """Return the program that makes the norm of all blocks' sums."""
    return f"#define THREADS {THREADS}\n#define NAME {SUM_NAME}\n" + _SUMS + _NORM


_SUMS = r"""
// A sum, and the rounding error that it has so far.
struct Sum { double high, low; };

__device__ __forceinline__ void add(Sum& total, double value) {
    const double sum = total.high + value, back = sum - total.high;
    total.low += (total.high - (sum - back)) + (value - back);
    total.high = sum;
}

// Add the sums of all threads of the block; thread 0 has the result.
__device__ __forceinline__ Sum of_block(Sum mine) {
    __shared__ Sum sums[THREADS];
    sums[threadIdx.x] = mine;
    for (unsigned int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            Sum total = sums[threadIdx.x];
            add(total, sums[threadIdx.x + half].high);
            total.low += sums[threadIdx.x + half].low;
            sums[threadIdx.x] = total;
        }
    }
    return sums[0];
}
"""

_SQUARES = r"""
typedef unsigned long long address;

struct Table {
    address addresses[1][ARRAYS];
    unsigned int size[ARRAYS];
    unsigned int first[ARRAYS];
};

#define LANES (16u / (unsigned int)sizeof(Element))
struct alignas(16) Lanes { Element each[LANES]; };

__device__ __forceinline__ double number(Half from) { return (double)widened(from); }
__device__ __forceinline__ double number(float from) { return (double)from; }
__device__ __forceinline__ double number(double from) { return from; }

// Write each block's sum of squares, and 1 for each array that has a number which is not finite.
extern "C" __global__ void __launch_bounds__(THREADS)
NAME(const Table table, int count, Sum* sums, unsigned char* is_broken) {
    int low = 0, high = count - 1;  // the last array whose first block is not after this one
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (table.first[middle] <= blockIdx.x) low = middle;
        else high = middle - 1;
    }
    const unsigned int start = (blockIdx.x - table.first[low]) * BLOCK_ELEMENTS, left = table.size[low] - start;
    const unsigned int size = left < BLOCK_ELEMENTS ? left : BLOCK_ELEMENTS;
    const Element* memory = (const Element*)table.addresses[0][low] + start;
    Sum total = {0.0, 0.0};
    bool is_finite = true;
    // Each thread adds LANES neighbours at a time, however the array is aligned: the order is the same everywhere.
    for (unsigned int at = threadIdx.x * LANES; at < size; at += THREADS * LANES) {
        Lanes taken;
        const unsigned int most = size - at < LANES ? size - at : LANES;
        if (most == LANES && ((address)(memory + at) & 15u) == 0) taken = *(const Lanes*)(memory + at);
        else for (unsigned int lane = 0; lane < most; ++lane) taken.each[lane] = memory[at + lane];
        for (unsigned int lane = 0; lane < most; ++lane) {
            const double value = number(taken.each[lane]);
            is_finite = is_finite && value - value == 0.0;
            add(total, value * value);
        }
    }
    if (!is_finite) is_broken[low] = 1;
    total = of_block(total);
    if (threadIdx.x == 0) sums[blockIdx.x] = total;
}
"""

_NORM = r"""
// Write the norm of everything, and what makes it at most `most`: NaN where the norm is not finite.
extern "C" __global__ void __launch_bounds__(THREADS)
NAME(const Sum* sums, unsigned int count, double most, double* told) {
    Sum total = {0.0, 0.0};
    for (unsigned int at = threadIdx.x; at < count; at += THREADS) {
        add(total, sums[at].high);
        total.low += sums[at].low;
    }
    total = of_block(total);
    if (threadIdx.x) return;
    const bool is_finite = total.high - total.high == 0.0;
    const double norm = sqrt(is_finite ? total.high + total.low : total.high);
    const double quotient = most / norm;
    told[0] = norm;
    told[1] = !is_finite ? norm - norm : norm == 0.0 || quotient > 1.0 ? 1.0 : quotient;
}
"""
