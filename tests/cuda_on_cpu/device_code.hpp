// What CUDA's device code may use, for g++: included before every kernel.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <time.h>
#include <ucontext.h>
#include <utility>
#include <vector>
#include <vector_types.h>
#include "half.hpp"
#include "kernel.hpp"

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __forceinline__
#undef __launch_bounds__
#undef __noinline__
#define __global__ STANDIN_GLOBAL
#define __device__
#define __host__
#define __shared__ static thread_local
#define __constant__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __CUDACC_VER_MAJOR__ 13  // CuPy takes CUDA's own float16 then

struct StandinIndex {
    unsigned x, y, z;
};
static thread_local StandinIndex threadIdx, blockIdx, blockDim, gridDim;
static const int warpSize = 32;

namespace standin {
// The threads of a block whose kernel has barriers: each runs until the next one.
enum class State : char { ready, at_warp_barrier, at_block_barrier, done };
struct Block {
    ucontext_t here;
    std::vector<ucontext_t> threads;
    std::vector<StandinIndex> places;
    std::vector<State> states;
    std::size_t at;
};
static thread_local Block* block;
static thread_local std::vector<char> dynamic_shared;
static thread_local unsigned long long launched_at;
static thread_local bool has_asked_time;

static unsigned long long nanoseconds() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return 1000000000ull * (unsigned long long)time.tv_sec + (unsigned long long)time.tv_nsec;
}
// Threads run one after the other, but all began when the kernel was launched.
static inline unsigned long long global_timer() {
    if (has_asked_time) return nanoseconds();
    has_asked_time = true;
    return launched_at;
}

template <class... A>
struct Arguments {
    static constexpr std::size_t size(std::size_t index) {
        const std::size_t sizes[] = {sizeof(A)..., 0}, aligned[] = {alignof(A)..., 1};
        std::size_t offset = 0;
        for (std::size_t i = 0; i <= index; ++i) {
            offset = (offset + aligned[i] - 1) / aligned[i] * aligned[i];
            if (i < index) offset += sizes[i];
        }
        return offset;
    }
    static void* take(void** arguments) {
        char* taken = (char*)std::aligned_alloc(64, (size(sizeof...(A)) + 64) / 64 * 64);
        const std::size_t sizes[] = {sizeof(A)..., 0};
        for (std::size_t i = 0; i < sizeof...(A); ++i) std::memcpy(taken + size(i), arguments[i], sizes[i]);
        return taken;
    }
    template <class F, std::size_t... I>
    static void call(F function, void* taken, std::index_sequence<I...>) {
        function(*(A*)((char*)taken + size(I))...);
    }
};

template <class Thread>
static void one_by_one(const Launch&, Thread thread) {
    for (threadIdx.z = 0; threadIdx.z < blockDim.z; ++threadIdx.z)
        for (threadIdx.y = 0; threadIdx.y < blockDim.y; ++threadIdx.y)
            for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) {
                has_asked_time = false;
                thread();
            }
}

static thread_local void (*fiber_work)(void*);
static thread_local void* fiber_data;
static void fiber() {
    fiber_work(fiber_data);
    block->states[block->at] = State::done;
    swapcontext(&block->threads[block->at], &block->here);
}
// Make those who wait at this barrier ready, if everybody who is left does.
static bool let_go(Block& block, std::size_t begin, std::size_t end, State barrier) {
    bool is_somebody = false;
    for (std::size_t i = begin; i < end; ++i) {
        if (block.states[i] != barrier && block.states[i] != State::done) return false;
        is_somebody |= block.states[i] == barrier;
    }
    for (std::size_t i = begin; i < end; ++i)
        if (block.states[i] == barrier) block.states[i] = State::ready;
    return is_somebody;
}
static inline void wait_at(State barrier) {
    block->states[block->at] = barrier;
    swapcontext(&block->threads[block->at], &block->here);
}
template <class Thread>
static void together(const Launch& launch, Thread thread) {
    const std::size_t stack = 128 << 10;
    const std::size_t count = (std::size_t)launch.block[0] * launch.block[1] * launch.block[2];
    static thread_local std::vector<char> stacks;
    if (stacks.size() < count * stack) stacks.resize(count * stack);
    Block mine;
    mine.threads.resize(count);
    mine.places.resize(count);
    mine.states.assign(count, State::ready);
    block = &mine;
    fiber_work = [](void* data) { (*(Thread*)data)(); };
    fiber_data = &thread;
    for (std::size_t i = 0; i < count; ++i) {
        mine.places[i] = {(unsigned)(i % blockDim.x), (unsigned)(i / blockDim.x % blockDim.y),
                          (unsigned)(i / blockDim.x / blockDim.y)};
        getcontext(&mine.threads[i]);
        mine.threads[i].uc_stack.ss_sp = stacks.data() + i * stack;
        mine.threads[i].uc_stack.ss_size = stack;
        mine.threads[i].uc_link = nullptr;
        makecontext(&mine.threads[i], fiber, 0);
    }
    for (bool is_left = true; is_left;) {
        is_left = false;
        for (mine.at = 0; mine.at < count; ++mine.at) {
            if (mine.states[mine.at] != State::ready) continue;
            threadIdx = mine.places[mine.at];
            swapcontext(&mine.here, &mine.threads[mine.at]);
        }
        for (std::size_t warp = 0; warp < count; warp += 32)
            is_left |= let_go(mine, warp, std::min(warp + 32, count), State::at_warp_barrier);
        if (!is_left) is_left = let_go(mine, 0, count, State::at_block_barrier);
    }
}

// A kernel, as the driver calls it; NAME is a kernel and tells those with the same arguments apart.
template <auto NAME, bool HAS_BARRIERS>
struct Entry;
template <class... A, void (*NAME)(A...), bool HAS_BARRIERS>
struct Entry<NAME, HAS_BARRIERS> {
    static void run(void* taken, const Launch& launch) {
        launched_at = nanoseconds();
        gridDim = {launch.grid[0], launch.grid[1], launch.grid[2]};
        blockDim = {launch.block[0], launch.block[1], launch.block[2]};
        dynamic_shared.assign(launch.shared + 64, 0);
        auto thread = [taken] { Arguments<A...>::call(NAME, taken, std::index_sequence_for<A...>()); };
        for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z)
            for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
                for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
                    if constexpr (HAS_BARRIERS)
                        together(launch, thread);
                    else
                        one_by_one(launch, thread);
    }
    static constexpr Kernel made = {Arguments<A...>::take, run, std::free};
};
}  // namespace standin

static inline void __syncthreads() { standin::wait_at(standin::State::at_block_barrier); }
static inline void __syncwarp(unsigned = 0xffffffffu) { standin::wait_at(standin::State::at_warp_barrier); }
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __threadfence_system() {}

template <class T>
static inline T standin_shared() {
    const std::uintptr_t at = (std::uintptr_t)standin::dynamic_shared.data();
    return (T)((at + 63) / 64 * 64);
}

// Mathematics that C++ has no name for in the global namespace, or another.
using std::abs;  // C's own is of integers
using std::isfinite;
using std::isinf;
using std::isnan;
using std::signbit;
template <class A, class B>
static inline typename std::common_type<A, B>::type min(A a, B b) {
    typedef typename std::common_type<A, B>::type T;
    return (T)b < (T)a ? (T)b : (T)a;
}
template <class A, class B>
static inline typename std::common_type<A, B>::type max(A a, B b) {
    typedef typename std::common_type<A, B>::type T;
    return (T)a < (T)b ? (T)b : (T)a;
}
static inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
static inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
static inline float rsqrt(float x) { return 1.0f / std::sqrt(x); }
static inline long long __double_as_longlong(double x) {
    long long bits;
    std::memcpy(&bits, &x, 8);
    return bits;
}
static inline double __longlong_as_double(long long bits) {
    double x;
    std::memcpy(&x, &bits, 8);
    return x;
}
static inline int __float_as_int(float x) {
    int bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
static inline unsigned __float_as_uint(float x) { return (unsigned)__float_as_int(x); }
static inline float __int_as_float(int bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
static inline float __uint_as_float(unsigned bits) { return __int_as_float((int)bits); }
template <class T, class V>
static inline T atomicAdd(T* at, V value) {
    const T before = *at;
    *at = (T)(before + value);
    return before;
}
template <class T>
static inline T atomicCAS(T* at, T expected, T value) {
    __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return expected;
}
template <class T>
static inline T atomicExch(T* at, T value) {
    const T before = *at;
    *at = value;
    return before;
}
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
