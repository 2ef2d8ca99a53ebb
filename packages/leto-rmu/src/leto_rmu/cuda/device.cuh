// What the transaction kernel asks of a device: single operations, and copies that arrive later.
#pragma once
#include "gf32.cuh"

#define LETO_RMU_SHARED(name) extern __shared__ __align__(16) leto_ec::u64 name[]

namespace leto_rmu {

__device__ __forceinline__ unsigned short to_bf16(float a) {
    unsigned short r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(a));
    return r;
}

// Single operations with their own rounding, denormal numbers included, whatever the compiler was told: CuPy has NVRTC
// flush denormal numbers to zero (-ftz=true), and it does so in every operator of the language, a minus sign too.
// Nothing that goes into a state is computed by an operator, therefore.
__device__ __forceinline__ float add(float a, float b) {
    float r;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
__device__ __forceinline__ float sub(float a, float b) {
    float r;
    asm("sub.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
__device__ __forceinline__ float mul(float a, float b) {
    float r;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
__device__ __forceinline__ float fma(float a, float b, float c) {
    float r;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
    return r;
}
__device__ __forceinline__ float div(float a, float b) {
    float r;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
__device__ __forceinline__ float negative(float a) {
    float r;
    asm("neg.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
}
__device__ __forceinline__ float root(float a) {
    float r;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
}

// Not exact: what the device has in one instruction. quick.cuh makes exact quotients and roots of them.
__device__ __forceinline__ float near_reciprocal(float a) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
}
__device__ __forceinline__ float near_reciprocal_root(float a) {
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
}

__device__ __forceinline__ float from_f16(unsigned short a) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(a));
    return r;
}

// BYTES (16 or 4) from global to shared memory, both aligned to them; they are there after the group of fetches has been
// waited for.
template <int BYTES>
__device__ __forceinline__ void fetch(void* to, const void* from) {
    const leto_ec::u32 address = (leto_ec::u32)__cvta_generic_to_shared(to);
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(from) : "memory");
}

// Everything that this thread has fetched since the last time is a group.
__device__ __forceinline__ void commit_fetches() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait for all groups of this thread but the newest LEFT.
template <int LEFT>
__device__ __forceinline__ void wait_for_fetches() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

template <class T>
__device__ __forceinline__ void store(T* to, T value) {
    __stcs(to, value);
}

}  // namespace leto_rmu
