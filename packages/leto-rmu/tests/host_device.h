// device.cuh for a processor: threads of a block are fibers, which run in an order drawn at random from one barrier to
// the next; fetches arrive when they are waited for, and not before. So who reads too early, or writes too early, is
// found out.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <random>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __align__(n) alignas(n)
using std::max;
using std::min;

struct Index {
    unsigned x;
};
static Index threadIdx, blockIdx;

struct Fetch {
    void* to;
    const void* from;
    int bytes;
};

struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    std::vector<std::vector<Fetch>> groups;  // committed, not yet arrived
    std::vector<Fetch> open;
    bool done;
};

static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static std::vector<uint64_t> block_memory;

static void __syncthreads() { swapcontext(&fibers[threadIdx.x].context, &scheduler); }

#include "gf32.cuh"

#define LETO_RMU_SHARED(name) leto_ec::u64* name = (leto_ec::u64*)block_memory.data()

inline unsigned __float_as_uint(float a) {
    unsigned r;
    memcpy(&r, &a, 4);
    return r;
}
inline float __uint_as_float(unsigned a) {
    float r;
    memcpy(&r, &a, 4);
    return r;
}

namespace leto_rmu {

// Denormal numbers are zeros to the device's approximations, and to operators under -ftz=true.
inline float flushed(float a) { return fabsf(a) < 1.17549435e-38f ? copysignf(0, a) : a; }

// A float of the kernel. Its operators flush denormal numbers, as they do where CuPy has NVRTC compile; the functions
// below do not. LETO_RMU_EXACT: operators do not either, for the comparison.
struct Number {
    float value;
    Number() = default;
    Number(float a) : value(a) {}
#ifdef LETO_RMU_EXACT
    static float seen(float a) { return a; }
#else
    static float seen(float a) { return flushed(a); }
#endif
    friend Number operator-(Number a) { return seen(-a.value); }
    friend Number operator+(Number a, Number b) { return seen(seen(a.value) + seen(b.value)); }
    friend Number operator-(Number a, Number b) { return seen(seen(a.value) - seen(b.value)); }
    friend Number operator*(Number a, Number b) { return seen(seen(a.value) * seen(b.value)); }
    friend Number operator/(Number a, Number b) { return seen(seen(a.value) / seen(b.value)); }
    friend bool operator<(Number a, Number b) { return seen(a.value) < seen(b.value); }
    friend bool operator==(Number a, Number b) { return seen(a.value) == seen(b.value); }
};
static_assert(sizeof(Number) == 4, "as a float");

inline unsigned __float_as_uint(Number a) { return ::__float_as_uint(a.value); }
inline Number __uint_as_float(unsigned a) { return ::__uint_as_float(a); }

inline Number add(Number a, Number b) { return a.value + b.value; }
inline Number sub(Number a, Number b) { return a.value - b.value; }
inline Number mul(Number a, Number b) { return a.value * b.value; }
inline Number fma(Number a, Number b, Number c) { return fmaf(a.value, b.value, c.value); }
inline Number div(Number a, Number b) { return a.value / b.value; }
inline Number root(Number a) { return sqrtf(a.value); }
inline Number negative(Number a) { return -a.value; }

inline Number near_reciprocal(Number a) { return flushed((float)(1 / (double)flushed(a.value))); }
inline Number near_reciprocal_root(Number a) { return flushed((float)(1 / sqrt((double)flushed(a.value)))); }

inline unsigned short to_bf16(Number a) {  // to the nearest, ties to even; a NaN as torch has it
    const unsigned bits = __float_as_uint(a);
    if (a.value != a.value) return 0x7fc0;
    return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline Number from_f16(unsigned short a) {
    const unsigned exponent = a >> 10 & 31, fraction = a & 1023;
    if (exponent == 31) return fraction ? NAN : a >> 15 ? -INFINITY : INFINITY;
    const float size = exponent ? ldexpf(1024 + fraction, (int)exponent - 25) : ldexpf(fraction, -24);
    return a >> 15 ? -size : size;
}

template <int BYTES>
inline void fetch(void* to, const void* from) {
    if ((uintptr_t)to % BYTES || (uintptr_t)from % BYTES) __builtin_trap();
    fibers[threadIdx.x].open.push_back({to, from, BYTES});
    memset(to, 0xa5, BYTES);
}

inline void commit_fetches() {
    Fiber& f = fibers[threadIdx.x];
    f.groups.push_back(f.open);
    f.open.clear();
}

template <int LEFT>
inline void wait_for_fetches() {
    Fiber& f = fibers[threadIdx.x];
    while (f.groups.size() > LEFT) {
        for (const Fetch& one : f.groups.front()) memcpy(one.to, one.from, one.bytes);
        f.groups.erase(f.groups.begin());
    }
}

template <class T>
inline void store(T* to, T value) {
    *to = value;
}

}  // namespace leto_rmu

// The kernel's headers, which follow, compute with numbers of this kind.
#define float leto_rmu::Number
