"""The kernels that update many variables at once on a GPU, and the table that they are given.

One launch updates up to `arrays` variables: each element of a variable, its gradient and its slots is read once and
written once.  The operations are those of `mpistrategy.training.kernels`, in the same order, each rounded to the dtype:
the results have NumPy's bits.  Multiplications and additions are therefore not fused (``--fmad=false``).

The table goes along as the kernel's argument, by value, as in `mpistrategy.reduction.routes.gpu`.  The same
source is C++ but for a few words, and tests run it on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

THREADS = 256
#: What one block updates: elements of one variable.
BLOCK_ELEMENTS = 4096
#: The most bytes that every GPU takes as arguments.
_ARGUMENT_BYTES = 4096
#: What the numbers, the address of the scale and the count need of them.
_OTHER_BYTES = 96
#: How many numbers a formula may have.
NUMBERS = 7
#: The C++ type of an element of each dtype.
TYPES = {"float16": "Half", "float32": "float", "float64": "double"}
OPTIONS = ("-std=c++14", "--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false")


@dataclass(frozen=True)
class Formula:
    """What a kernel does to an element.

    Attributes:
        name: of the kernel.
        slots: the names of the slots, in the order of the table.
        code: of one element: ``x[0]`` is the variable's, ``x[1]`` the gradient's, the slots' follow; ``n`` has the
            numbers.
    """

    name: str
    slots: tuple[str, ...]
    code: str

    @property
    def arrays(self) -> int:
        """How many variables one launch updates, at most."""
        return (_ARGUMENT_BYTES - _OTHER_BYTES) // (8 * (2 + len(self.slots)) + 8)

    @property
    def table(self) -> np.dtype[Any]:
        """The argument: addresses of all arrays; sizes in elements; the first of each variable's blocks."""
        return _table(2 + len(self.slots), self.arrays)

    def decayed(self) -> Formula:
        """Return the formula that subtracts ``n[6]`` times the variable first."""
        return Formula(f"{self.name}_decayed", self.slots, f"x[0] = x[0] - n[6] * x[0];\n{self.code}")

    def source(self, dtype: np.dtype[Any]) -> str:
        """Return the kernel's program for variables of `dtype`."""
        head = {
            "ARRAYS": self.arrays,
            "POINTERS": 2 + len(self.slots),
            "NUMBERS": NUMBERS,
            "THREADS": THREADS,
            "BLOCK_ELEMENTS": f"{BLOCK_ELEMENTS}u",
            "Element": TYPES[dtype.name],
            "NAME": self.kernel_name(dtype),
        }
        defines = "".join(f"#define {name} {value}\n" for name, value in head.items())
        return defines + NUMBER_TYPES + _SOURCE.replace("CODE", self.code)

    def kernel_name(self, dtype: np.dtype[Any]) -> str:
        """Return the kernel's name in its program."""
        return f"mpistrategy_{self.name}_{dtype.name}"


@cache
def _table(pointers: int, arrays: int) -> np.dtype[Any]:
    return np.dtype(
        {
            "names": ["addresses", "size", "first"],
            "formats": [(np.uint64, (pointers, arrays)), (np.uint32, arrays), (np.uint32, arrays)],
            "offsets": [0, 8 * pointers * arrays, (8 * pointers + 4) * arrays],
            "itemsize": -(-(8 * pointers + 8) * arrays // 8) * 8,
        }
    )


SGD = Formula("sgd", (), "x[0] = x[0] - n[0] * x[1];")
MOMENTUM = Formula("momentum", ("momentum",), "x[2] = n[1] * x[2] - n[0] * x[1];\nx[0] = x[0] + x[2];")
NESTEROV = Formula(
    "nesterov", ("momentum",), "x[2] = n[1] * x[2] - n[0] * x[1];\nx[0] = x[0] - (n[0] * x[1] - n[1] * x[2]);"
)
ADAM = Formula(
    "adam",
    ("m", "v"),
    "x[2] = n[1] * x[2] + n[2] * x[1];\n"
    "x[3] = n[3] * x[3] + n[4] * x[1] * x[1];\n"
    "x[0] = x[0] - n[0] * x[2] / (root(x[3]) + n[5]);",
)

#: 16-bit floats with NumPy's arithmetic: each operation in float32, then rounded.
NUMBER_TYPES = r"""
struct Half { unsigned short bits; };

__device__ __forceinline__ float widened(Half from) {
#ifdef __CUDA_ARCH__
    float to;
    asm("cvt.f32.f16 %0, %1;" : "=f"(to) : "h"(from.bits));
    return to;
#else
    return half_to_float(from.bits);
#endif
}
__device__ __forceinline__ Half rounded(float from) {
    Half to;
#ifdef __CUDA_ARCH__
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(from));
#else
    to.bits = half_of(from);
#endif
    return to;
}
__device__ __forceinline__ Half operator+(Half a, Half b) { return rounded(widened(a) + widened(b)); }
__device__ __forceinline__ Half operator-(Half a, Half b) { return rounded(widened(a) - widened(b)); }
__device__ __forceinline__ Half operator*(Half a, Half b) { return rounded(widened(a) * widened(b)); }
__device__ __forceinline__ Half operator/(Half a, Half b) { return rounded(widened(a) / widened(b)); }
__device__ __forceinline__ Half root(Half a) { return rounded(sqrtf(widened(a))); }
__device__ __forceinline__ float root(float a) { return sqrtf(a); }
__device__ __forceinline__ double root(double a) { return sqrt(a); }

// A number of float64, rounded once.
__device__ __forceinline__ void set(Half& to, double from) {
#ifdef __CUDA_ARCH__
    asm("cvt.rn.f16.f64 %0, %1;" : "=h"(to.bits) : "d"(from));
#else
    to.bits = half_of(from);
#endif
}
__device__ __forceinline__ void set(float& to, double from) { to = (float)from; }
__device__ __forceinline__ void set(double& to, double from) { to = from; }
"""

_SOURCE = r"""
typedef unsigned long long address;

struct Table {
    address addresses[POINTERS][ARRAYS];
    unsigned int size[ARRAYS];
    unsigned int first[ARRAYS];
};
struct Numbers { double each[NUMBERS]; };

#define LANES (16u / (unsigned int)sizeof(Element))
struct alignas(16) Lanes { Element each[LANES]; };

__device__ __forceinline__ void step(Element* x, const Element* n) {
CODE
}

// Update variables; the gradients are multiplied by *scale first, if there is one.
extern "C" __global__ void __launch_bounds__(THREADS)
NAME(const Table table, const Numbers numbers, const double* scale, int count) {
    int low = 0, high = count - 1;  // the last variable whose first block is not after this one
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (table.first[middle] <= blockIdx.x) low = middle;
        else high = middle - 1;
    }
    Element n[NUMBERS], factor;
    for (int i = 0; i < NUMBERS; ++i) set(n[i], numbers.each[i]);
    set(factor, scale ? *scale : 1.0);
    const unsigned int start = (blockIdx.x - table.first[low]) * BLOCK_ELEMENTS, left = table.size[low] - start;
    const unsigned int size = left < BLOCK_ELEMENTS ? left : BLOCK_ELEMENTS;
    Element* memory[POINTERS];
    address together = 0;
    for (int i = 0; i < POINTERS; ++i) {
        memory[i] = (Element*)table.addresses[i][low] + start;
        together |= (address)memory[i];
    }
    const unsigned int whole = together & 15u ? 0u : size / LANES;
    for (unsigned int at = threadIdx.x; at < whole; at += THREADS) {
        Lanes taken[POINTERS];
        for (int i = 0; i < POINTERS; ++i) taken[i] = ((const Lanes*)memory[i])[at];
        for (unsigned int lane = 0; lane < LANES; ++lane) {
            Element x[POINTERS];
            for (int i = 0; i < POINTERS; ++i) x[i] = taken[i].each[lane];
            if (scale) x[1] = x[1] * factor;
            step(x, n);
            for (int i = 0; i < POINTERS; ++i) taken[i].each[lane] = x[i];
        }
        for (int i = 0; i < POINTERS; ++i)
            if (i != 1) ((Lanes*)memory[i])[at] = taken[i];
    }
    for (unsigned int at = whole * LANES + threadIdx.x; at < size; at += THREADS) {
        Element x[POINTERS];
        for (int i = 0; i < POINTERS; ++i) x[i] = memory[i][at];
        if (scale) x[1] = x[1] * factor;
        step(x, n);
        for (int i = 0; i < POINTERS; ++i)
            if (i != 1) memory[i][at] = x[i];
    }
}
"""
