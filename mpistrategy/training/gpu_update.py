"""Updates of many variables in GPU memory by one kernel, in as few launches as its table allows.

One launch updates up to 100 variables: each element of a variable, its gradient and its slots is read once and written
once.  What it does to an element is the formula's own text (`mpistrategy.training.formulas`): its operations are
written down as C while it runs on symbols.  Each is rounded to the dtype, and multiplications and additions are not
fused (``--fmad=false``), so the results have NumPy's bits.

The table goes along as the kernel's argument, by value, as in `mpistrategy.reduction.gpu`.  The same
source is C++ but for a few words, and tests run it on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from mpistrategy.arrays.convert import DeviceArray, by_value, cupy_for, is_on_device
from mpistrategy.arrays.dtypes import Array
from mpistrategy.training.formulas import SCRATCH_ARRAYS, Kernel

NAME = "mpistrategy_update"
THREADS = 256
#: What one block updates: elements of one variable.
BLOCK_ELEMENTS = 4096
#: The most bytes that every GPU takes as arguments, and what the numbers and the count need of them.
_ARGUMENT_BYTES, _OTHER_BYTES = 4096, 96
#: How many numbers a formula may have.
NUMBERS = 8
#: The kernel's indices have 32 bits.
_MOST_ELEMENTS = 2**32
#: The C++ type of an element of each dtype.
TYPES = {"float16": "Half", "float32": "float", "float64": "double"}
_OPTIONS = ("-std=c++14", "--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false")
_OPERATIONS: Mapping[np.ufunc, str] = {
    np.add: "{} + {}",
    np.subtract: "{} - {}",
    np.multiply: "{} * {}",
    np.divide: "{} / {}",
    np.sqrt: "root({})",
}


class _Symbol:
    """Stands for an array: NumPy's operations on it are written down as C.

    Args:
        name: the function in C.
        lines: where operations are written down.
        numbers: where the numbers in them are.
    """

    dtype = np.dtype(np.float64)

    def __init__(self, name: str, lines: list[str], numbers: list[float]) -> None:
        self.word, self._lines, self._numbers = name, lines, numbers

    def _word(self, operand: Any) -> str:
        if isinstance(operand, _Symbol):
            return operand.word
        self._numbers.append(float(operand))
        return f"n[{len(self._numbers) - 1}]"

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *operands: Any, out: tuple[_Symbol]) -> _Symbol:
        self._lines.append(f"{out[0].word} = {_OPERATIONS[ufunc].format(*map(self._word, operands))};")
        return out[0]


def written_down(kernel: Kernel, slots: Sequence[str]) -> tuple[str, list[float]]:
    """Return what a kernel does to an element, as C, and the numbers in it.

    ``x[0]`` is the variable's element, ``x[1]`` the gradient's, the slots' follow; ``t`` are temporary, ``n`` numbers.
    """
    lines: list[str] = []
    numbers: list[float] = []
    parameter, gradient, *beside = (_Symbol(f"x[{at}]", lines, numbers) for at in range(2 + len(slots)))
    scratch = [_Symbol(f"t[{at}]", lines, numbers) for at in range(SCRATCH_ARRAYS)]
    kernel(parameter, gradient, dict(zip(slots, beside, strict=True)), scratch)
    return "\n".join(lines), numbers


def source(code: str, dtype: np.dtype[Any], pointers: int) -> str:
    """Return the program of a kernel that does `code` to elements of `dtype` in so many arrays for each variable."""
    head = {
        "ARRAYS": arrays_of(pointers),
        "POINTERS": pointers,
        "NUMBERS": NUMBERS,
        "SCRATCH": SCRATCH_ARRAYS,
        "THREADS": THREADS,
        "BLOCK_ELEMENTS": f"{BLOCK_ELEMENTS}u",
        "Element": TYPES[dtype.name],
        "NAME": NAME,
    }
    defines = "".join(f"#define {name} {value}\n" for name, value in head.items())
    return defines + _NUMBER_TYPES + _SOURCE.replace("CODE", code)


def arrays_of(pointers: int) -> int:
    """Return how many variables one launch updates, at most, with so many arrays for each."""
    return (_ARGUMENT_BYTES - _OTHER_BYTES) // (8 * pointers + 8)


@cache
def _compiled(program: str) -> Any:
    """Return the kernel, which CuPy compiles the first time, for each device, and keeps in its cache on disk."""
    return cupy_for("variables in GPU memory").RawModule(code=program, options=_OPTIONS).get_function(NAME)


def can_be_fused(parameter: Array) -> bool:
    """Return whether there are kernels for a variable's memory."""
    return is_on_device(parameter) and parameter.dtype.name in TYPES and parameter.size < _MOST_ELEMENTS


class FusedUpdate:
    """Variables of one dtype on one GPU, and their slots: `run` makes a step of all of them.

    Args:
        parameters: the variables' memory, C-contiguous.
        slots: each one's slots by name, of the same shape and dtype.
    """

    def __init__(self, parameters: Sequence[DeviceArray], slots: Sequence[Mapping[str, DeviceArray]]) -> None:
        self._device, self._dtype = parameters[0].device, parameters[0].dtype
        self._slots = tuple(slots[0])
        rows = [parameters, parameters, *([arrays[name] for arrays in slots] for name in self._slots)]
        #: For each launch, its variables, and its argument without the gradients.
        self._tables: list[tuple[slice, Array, int]] = []
        most = arrays_of(len(rows))
        # Addresses of all arrays; sizes in elements; the first of each variable's blocks.
        layout = [("addresses", np.uint64, (len(rows), most)), ("size", np.uint32, most), ("first", np.uint32, most)]
        for first in range(0, len(parameters), most):
            part = slice(first, min(first + most, len(parameters)))
            sizes = np.array([array.size for array in parameters[part]], np.int64)
            blocks, table = -(-sizes // BLOCK_ELEMENTS), np.zeros(1, layout)
            table["addresses"][0, :, : len(sizes)] = [_addresses(row[part]) for row in rows]
            table["size"][0, : len(sizes)] = sizes
            table["first"][0, : len(sizes)] = np.cumsum(blocks) - blocks
            self._tables.append((part, table, int(blocks.sum())))

    def run(self, kernel: Kernel, gradients: Sequence[DeviceArray]) -> None:
        """Make one step on the current stream.

        Args:
            kernel: the step.
            gradients: of the variables' shapes and dtype; they share no memory with the variables and slots.
        """
        code, numbers = written_down(kernel, self._slots)
        with self._device:
            function = _compiled(source(code, self._dtype, 2 + len(self._slots)))
            rounded = np.zeros(NUMBERS, np.float64)
            with np.errstate(over="ignore"):
                rounded[: len(numbers)] = np.array(numbers).astype(self._dtype)  # as NumPy rounds a Python number
            # Copies are kept until all launches are on the stream.
            gradients = [gradient if gradient.flags.c_contiguous else gradient.copy() for gradient in gradients]
            for part, table, blocks in self._tables:
                argument, count = table.copy(), part.stop - part.start
                argument["addresses"][0, 1, :count] = _addresses(gradients[part])
                function((blocks,), (THREADS,), (by_value(argument), by_value(rounded), np.int32(count)))


def _addresses(arrays: Sequence[DeviceArray]) -> Array:
    return np.fromiter((array.data.ptr for array in arrays), np.uint64, len(arrays))


#: 16-bit floats with NumPy's arithmetic: each operation in float32, then rounded.
_NUMBER_TYPES = r"""
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
    Element t[SCRATCH];
CODE
}

// Update variables.
extern "C" __global__ void __launch_bounds__(THREADS)
NAME(const Table table, const Numbers numbers, int count) {
    int low = 0, high = count - 1;  // the last variable whose first block is not after this one
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (table.first[middle] <= blockIdx.x) low = middle;
        else high = middle - 1;
    }
    Element n[NUMBERS];
    for (int i = 0; i < NUMBERS; ++i) set(n[i], numbers.each[i]);
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
            step(x, n);
            for (int i = 0; i < POINTERS; ++i) taken[i].each[lane] = x[i];
        }
        for (int i = 0; i < POINTERS; ++i)
            if (i != 1) ((Lanes*)memory[i])[at] = taken[i];
    }
    for (unsigned int at = whole * LANES + threadIdx.x; at < size; at += THREADS) {
        Element x[POINTERS];
        for (int i = 0; i < POINTERS; ++i) x[i] = memory[i][at];
        step(x, n);
        for (int i = 0; i < POINTERS; ++i)
            if (i != 1) memory[i][at] = x[i];
    }
}
"""
