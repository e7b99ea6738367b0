"""The kernels that combine what all ranks of a node have written: SUM, MIN and MAX of floats and signed integers.

Every rank adds the same values in the same order, rank 0's first, so all get the same bits.  Signed integers are added
as unsigned ones: they wrap around.  A NaN, wherever it comes from, stays; of MIN and MAX of floats the bits are those
of `mpistrategy.arrays.dtypes`.
"""

from __future__ import annotations

OPTIONS = ("--std=c++17",)
THREADS = 256
MOST_BLOCKS = 1024
#: How many bytes a thread reads at once.
PACK_BYTES = 16

#: The arguments of every kernel: where the result goes; the addresses of all ranks' memory, in rank order, and how many
#: they are; how far into each the values begin; how many packs and how many elements there are.  The packs, of
#: PACK_BYTES, come first; the elements behind them are done one by one.
SOURCE = r"""
typedef unsigned long long u64;

template <typename T> struct Sum {
    static __device__ __forceinline__ T of(T a, T b) { return a + b; }
};
template <typename T> struct Min {
    static __device__ __forceinline__ T of(T a, T b) { return b < a ? b : a; }
};
template <typename T> struct Max {
    static __device__ __forceinline__ T of(T a, T b) { return a < b ? b : a; }
};
// Of floats that are equal, two zeros perhaps, the signs decide; comparisons with a NaN are false.
template <typename T, typename Bits>
__device__ __forceinline__ T neither_less(T a, T b, bool is_minimum, Bits nan) {
    union { T value; Bits bits; } one, other;
    one.value = a;
    other.value = b;
    one.bits = a != b ? nan : is_minimum ? one.bits | other.bits : one.bits & other.bits;
    return one.value;
}
#define FLOATS(T, nan)                                                                \
    template <> struct Min<T> {                                                       \
        static __device__ __forceinline__ T of(T a, T b) {                            \
            return a < b ? a : b < a ? b : neither_less(a, b, true, nan);             \
        }                                                                             \
    };                                                                                \
    template <> struct Max<T> {                                                       \
        static __device__ __forceinline__ T of(T a, T b) {                            \
            return b < a ? a : a < b ? b : neither_less(a, b, false, nan);            \
        }                                                                             \
    };
FLOATS(float, 0x7fc00000u)
FLOATS(double, 0x7ff8000000000000ull)

template <typename T> struct alignas(16) Pack {
    static const int length = 16 / sizeof(T);
    T at[length];
};

// No __restrict__ and no const memory: other GPUs have written what is read here since the last launch.
template <typename T, typename Op>
__device__ __forceinline__ void combine(T* out, const u64* ranks, int count, u64 offset, u64 packs, u64 size) {
    const u64 first = blockIdx.x * (u64)blockDim.x + threadIdx.x;
    const u64 step = gridDim.x * (u64)blockDim.x;
    for (u64 i = first; i < packs; i += step) {
        Pack<T> total = ((Pack<T>*)(ranks[0] + offset))[i];
        for (int rank = 1; rank < count; ++rank) {
            const Pack<T> next = ((Pack<T>*)(ranks[rank] + offset))[i];
            for (int j = 0; j < Pack<T>::length; ++j) total.at[j] = Op::of(total.at[j], next.at[j]);
        }
        ((Pack<T>*)out)[i] = total;
    }
#pragma unroll 1
    for (u64 i = packs * Pack<T>::length + first; i < size; i += step) {
        T total = ((T*)(ranks[0] + offset))[i];
#pragma unroll 1
        for (int rank = 1; rank < count; ++rank) total = Op::of(total, ((T*)(ranks[rank] + offset))[i]);
        out[i] = total;
    }
}

#define KERNEL(name, T, Op)                                                                                  \
    extern "C" __global__ void name(void* out, const u64* ranks, int count, u64 offset, u64 packs, u64 size) { \
        combine<T, Op<T>>((T*)out, ranks, count, offset, packs, size);                                       \
    }
#define KERNELS(name, T, Unsigned)         \
    KERNEL(sum_##name, Unsigned, Sum)      \
    KERNEL(min_##name, T, Min)             \
    KERNEL(max_##name, T, Max)

KERNELS(float32, float, float)
KERNELS(float64, double, double)
KERNELS(int32, int, unsigned int)
KERNELS(int64, long long, u64)
"""

NAMES = tuple(f"{op}_{dtype}" for dtype in ("float32", "float64", "int32", "int64") for op in ("sum", "min", "max"))
