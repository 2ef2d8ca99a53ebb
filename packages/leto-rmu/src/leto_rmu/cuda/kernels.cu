// Kernels of leto_rmu for CUDA devices. The theory is in transaction.cuh, the host's side in fused.py and marks.py.
//
// LETO_EC_CLMAD: the compiler knows PTX 9.3. LETO_RMU_FAULT: a build for fault injection, whose transactions stop in
// the middle and trap; it is never part of a wheel.
#include "transaction.cuh"

using namespace leto_rmu;

#ifdef LETO_RMU_FAULT
__device__ u32 leto_rmu_ended;

// The last block to end stops the device; what the others have written stays written.
__device__ __forceinline__ void end_in_a_trap() {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(&leto_rmu_ended, 1u) == gridDim.x - 1) __trap();
}
#else
__device__ __forceinline__ void end_in_a_trap() {}
#endif

#define TRANSACTION(name, rule, gradient, lean)                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS, 4) name(const __grid_constant__ Chunk c) {     \
        transaction<rule, gradient, lean>(c);                                                          \
        end_in_a_trap();                                                                               \
    }
TRANSACTION(leto_rmu_adamw_f32, AdamW, F32, false)
TRANSACTION(leto_rmu_adamw_bf16, AdamW, BF16, false)
TRANSACTION(leto_rmu_adamw_f16, AdamW, F16, false)
TRANSACTION(leto_rmu_sgd_f32, SGD, F32, false)
TRANSACTION(leto_rmu_sgd_bf16, SGD, BF16, false)
TRANSACTION(leto_rmu_sgd_f16, SGD, F16, false)
// Without PTX 9.3 parity costs so much that the rest does not count, and compiling takes users' time.
#if defined(LETO_EC_CLMAD) || defined(LETO_RMU_FAULT)
TRANSACTION(leto_rmu_adamw_f32_lean, AdamW, F32, true)
TRANSACTION(leto_rmu_adamw_bf16_lean, AdamW, BF16, true)
TRANSACTION(leto_rmu_adamw_f16_lean, AdamW, F16, true)
#endif

// A record of the marker, into all its replicas in host memory. The stream has completed what the record speaks of, and
// goes on only when the record is on its way to the host ahead of anything else.
struct Mark {
    u64 to[3];
    uint4 content[8];
};

extern "C" __global__ void __launch_bounds__(32) leto_rmu_mark(const __grid_constant__ Mark m) {
    const u32 replica = threadIdx.x / 8, part = threadIdx.x % 8;
    if (replica < 3) {
        const uint4 v = m.content[part];
        asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(m.to[replica] + part * 16), "r"(v.x),
                     "r"(v.y), "r"(v.z), "r"(v.w)
                     : "memory");
    }
    __threadfence_system();
}
