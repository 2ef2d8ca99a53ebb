// AdamW, the parity delta and the bf16 copy of the masters in one pass over a chunk: a study of variants.
//
// A chunk is `blocks` sub-blocks. A sub-block is 5 pages of masters, 5 of exp_avg and 5 of exp_avg_sq, which
// stand at positions 0-4, 5-9 and 10-14 of an aligned block of 16 points of the code; position 15 is absent. A
// thread owns one column (word `column` of every page) and walks the sub-blocks: it reads the gradient and the
// three states of an element, updates them, writes them, and adds the delta of the 15 words to its 16
// accumulators. Parity is touched once a chunk: Q' = Q ^ delta, out of place.
//
// Variants
//   plain        free slot, no parity: what the update costs by itself
//   slot         reads the chunk's slot, writes the free slot below it: the old slot is the undo copy
//   undo         writes the old states to an undo buffer and updates in place
// each with plain loads ("ldg") or with cp.async through shared memory ("async", three or four stages).
//
// The arithmetic is that of torch.optim.AdamW(foreach=True) on CUDA, operation by operation, rounding by
// rounding, for beta1 >= 0.5 (below it, torch's lerp takes its other form). Before it the gradient is scaled as the
// updater does: (g * inv_scale) * clip, two roundings; 1.0 where there is nothing to scale.
#include "gf32.cuh"

using leto_ec::u32;
using leto_ec::u64;

static constexpr int PAGES = 5;            // of each plane in a sub-block
static constexpr int ROWS = 4 * PAGES;     // gradients and three states
static constexpr int PARITY = 16;

struct Step {
    float keep;             // 1 - lr * weight_decay
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float root_bias2;       // sqrt(1 - beta2^t)
    float eps;
    float minus_step;       // -lr / (1 - beta1^t)
    float inv_scale;
    float clip;
};

struct Chunk {
    const float* gradients;        // pages of one plane, one after the other
    const float* source;           // masters; exp_avg and exp_avg_sq are `plane` and 2 * `plane` words further
    float* target;
    float* undo;                   // same shape, planes `undo_plane` words apart
    unsigned short* half;          // bf16 masters
    const u32* coefficients;       // 16 of each sub-block
    const u32* before;             // Q: 16 rows
    u32* after;                    // Q'
    u64 plane;
    u64 undo_plane;
    u64 words;                     // of a page
    u64 blocks;
    Step step;
};

__device__ __forceinline__ void adamw(float g, float& p, float& m, float& v, const Step& s) {
    g = __fmul_rn(__fmul_rn(g, s.inv_scale), s.clip);
    p = __fmul_rn(p, s.keep);
    m = __fmaf_rn(s.one_minus_beta1, __fsub_rn(g, m), m);
    v = __fmul_rn(v, s.beta2);
    v = __fmaf_rn(s.one_minus_beta2, __fmul_rn(g, g), v);
    const float d = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), s.root_bias2), s.eps);
    p = __fmaf_rn(s.minus_step, __fdiv_rn(m, d), p);
}

__device__ __forceinline__ unsigned short to_bf16(float a) {
    unsigned short r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(a));
    return r;
}

__device__ __forceinline__ u32 change(float a, float b) { return __float_as_uint(a) ^ __float_as_uint(b); }

// One element: updated, written, its three deltas left in `d`.
template <bool UNDO>
__device__ __forceinline__ void element(const Chunk& c, u64 at, float g, float p0, float m0, float v0, u32& dp,
                                        u32& dm, u32& dv) {
    if (UNDO) {
        __stcs(c.undo + at, p0);
        __stcs(c.undo + c.undo_plane + at, m0);
        __stcs(c.undo + 2 * c.undo_plane + at, v0);
    }
    float p = p0, m = m0, v = v0;
    adamw(g, p, m, v, c.step);
    __stcs(c.target + at, p);
    __stcs(c.target + c.plane + at, m);
    __stcs(c.target + 2 * c.plane + at, v);
    __stcs(c.half + at, to_bf16(p));
    dp = change(p0, p);
    dm = change(m0, m);
    dv = change(v0, v);
}

__device__ __forceinline__ void load_coefficients(u64* f, const Chunk& c) {
    for (u64 t = threadIdx.x; t < c.blocks * 16; t += blockDim.x) f[t] = c.coefficients[t];
}

__device__ __forceinline__ void store_parity(const Chunk& c, u64 column, const u64 (&acc)[16]) {
    u32 row[16];
    leto_ec::finish(row, acc);
#pragma unroll
    for (int i = 0; i < PARITY; ++i) c.after[i * c.words + column] = c.before[i * c.words + column] ^ row[i];
}

// Plain loads: all 20 of a sub-block are issued before the first is used.
template <bool UNDO, bool DELTA>
__device__ __forceinline__ void direct(const Chunk& c) {
    extern __shared__ u64 f[];
    if (DELTA) {
        load_coefficients(f, c);
        __syncthreads();
    }
    const u64 column = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u64 acc[16] = {};
#pragma unroll 1
    for (int b = 0; b < (int)c.blocks; ++b) {
        const u64 first = (u64)b * PAGES * c.words + column;
        float g[PAGES], old[3 * PAGES];
#pragma unroll
        for (int j = 0; j < PAGES; ++j) {
            const u64 at = first + j * c.words;
            g[j] = __ldcs(c.gradients + at);
#pragma unroll
            for (int s = 0; s < 3; ++s) old[s * PAGES + j] = __ldcs(c.source + s * c.plane + at);
        }
        u32 d[16];
        d[15] = 0;
#pragma unroll
        for (int j = 0; j < PAGES; ++j)
            element<UNDO>(c, first + j * c.words, g[j], old[j], old[PAGES + j], old[2 * PAGES + j], d[j],
                          d[PAGES + j], d[2 * PAGES + j]);
        if (DELTA) {
            leto_ec::superset_sums(d);
            leto_ec::multiply_add(acc, d, f + b * 16);
        }
    }
    if (DELTA) store_parity(c, column, acc);
}

// cp.async: STAGES - 1 sub-blocks are on their way while one is computed. A block of threads owns its columns in
// source, target and undo, so that updating in place races with nobody.
template <bool UNDO, int THREADS, int STAGES>
__device__ __forceinline__ void streamed(const Chunk& c) {
    extern __shared__ u64 shared[];
    u64* f = shared;
    float* stage = (float*)(shared + c.blocks * 16);
    load_coefficients(f, c);
    const u64 base = (u64)blockIdx.x * THREADS;
    const int blocks = (int)c.blocks;
    auto issue = [&](int b) {
        if (b < blocks) {
            float* to = stage + (b % STAGES) * ROWS * THREADS;
#pragma unroll
            for (int q = 0; q < PAGES; ++q) {
                const int e = q * THREADS + threadIdx.x, row = e / (THREADS / 4), quad = e % (THREADS / 4);
                const int s = row / PAGES, j = row % PAGES;
                const u64 at = (u64)(b * PAGES + j) * c.words + base + quad * 4;
                const float* from = s == 3 ? c.gradients + at : c.source + s * c.plane + at;
                const u32 address = (u32)__cvta_generic_to_shared(to + row * THREADS + quad * 4);
                asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(address), "l"(from)
                             : "memory");
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) issue(s);
    u64 acc[16] = {};
    const u32 column = (u32)base + threadIdx.x;
#pragma unroll 1
    for (int b = 0; b < blocks; ++b) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncthreads();
        issue(b + STAGES - 1);
        const float* in = stage + (b % STAGES) * ROWS * THREADS + threadIdx.x;
        u32 d[16];
        d[15] = 0;
#pragma unroll
        for (int j = 0; j < PAGES; ++j)
            element<UNDO>(c, (u64)(b * PAGES + j) * (u32)c.words + column, in[(3 * PAGES + j) * THREADS],
                          in[j * THREADS], in[(PAGES + j) * THREADS], in[(2 * PAGES + j) * THREADS], d[j],
                          d[PAGES + j], d[2 * PAGES + j]);
        leto_ec::superset_sums(d);
        leto_ec::multiply_add(acc, d, f + b * 16);
    }
    store_parity(c, column, acc);
}

#define DIRECT(NAME, UNDO, DELTA, THREADS, RESIDENT) \
    extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) NAME(Chunk c) { direct<UNDO, DELTA>(c); }
#define STREAMED(NAME, UNDO, THREADS, STAGES, RESIDENT) \
    extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) NAME(Chunk c) { streamed<UNDO, THREADS, STAGES>(c); }

STREAMED(slot_async_128_3, false, 128, 3, 4)
#ifndef LETO_RMU_ONE
DIRECT(plain_ldg_256, false, false, 256, 4)
DIRECT(slot_ldg_256, false, true, 256, 3)
DIRECT(slot_ldg_128, false, true, 128, 5)
DIRECT(undo_ldg_256, true, true, 256, 3)
STREAMED(slot_async_128_4, false, 128, 4, 4)
STREAMED(slot_async_256_3, false, 256, 3, 2)
STREAMED(undo_async_128_3, true, 128, 3, 4)
STREAMED(undo_async_128_4, true, 128, 4, 4)
STREAMED(undo_async_256_3, true, 256, 3, 2)
#endif
