// One chunk transaction of the free-slot scheme in one pass over the chunk, for every element-wise optimizer.
//
// A chunk is `blocks` sub-blocks. A sub-block is RUN pages of every plane (masters first), which stand at positions
// plane * RUN + page of an aligned block of 16 points of the code; what is left of the 16 positions is absent. A block
// of THREADS threads owns as many columns (words of a page) and walks the sub-blocks: gradients and states come through
// shared memory by cp.async, STAGES - 1 sub-blocks ahead; new states go to the free slot; the delta of each column
// is added to its 16 accumulators. Parity is touched once a chunk: Q' = Q ^ delta, out of place. The old slot and Q are
// only read, so whoever is stopped in here leaves both as they were (invariant I-2).
//
// Elements belong to pieces: runs with one group of hyperparameters and contiguous gradients. The THREADS elements
// of a page that a block of threads owns are a strip. Nearly all strips lie in one piece; their gradients come by
// cp.async of 16 or 4 bytes, as they are aligned. Strips that hold a border, or gradients of two bytes at odd
// places, are read element by element. Elements of no piece are padding, and keep their values.
//
// An optimizer is a Rule: `planes` and `run`, and `apply(g, x, step)`, which turns the old values x[plane] of an
// element into the new ones with the rounding of every operation written out. g is the gradient, (g * inv_scale) * clip
// with two roundings; a rule whose update is not element-wise (Muon) is given its direction in place of the gradient.
//
// LEAN is another way to the same bits, and the usual one in machine code. Where all strips of a sub-block belong to the first group of hyperparameters, the
// host's largest, its constants are operands of the instructions instead of loads by index, and `Rule::quick` computes
// the RUN elements of a thread side by side, without branches; it says if it could not. Q is fetched ahead, through
// the stage that is free while the last sub-blocks are computed.
#pragma once
#if defined(LETO_RMU_HOST)
#include LETO_RMU_HOST  // the same on a processor, for tests
#else
#include "device.cuh"
#endif
#include "quick.cuh"

namespace leto_rmu {

using leto_ec::u32;
using leto_ec::u64;

static constexpr int THREADS = 128;
static constexpr int STAGES = 3;
static constexpr int TABLE = 64;     // sub-blocks whose coefficients and strips are in shared memory at once
static constexpr int STEPS = 16;     // hyperparameter groups in a chunk
static constexpr u32 IDLE = ~0u;     // strips of padding
static constexpr u32 MIXED = ~1u;    // strips that hold a border
static constexpr u32 GROUP = 255;    // which group a strip belongs to; no group has that number
static constexpr u32 WIDE = 1u << 8, WORD = 1u << 9;  // how a strip's gradients are read; neither: one by one
static constexpr u64 NO_COPY = ~0ull;

// Hyperparameters of one group, prepared by the host; what they mean is the rule's.
struct Step {
    float value[11];
    u32 flags;
};

// Elements lo..hi of the chunk, counted from its first one.
struct Piece {
    u64 lo, hi;
    u64 gradient;  // index of the first one's gradient
    u64 copy;      // index of the first one's bf16 copy, or NO_COPY
    u32 step;
    u32 unused;
};

struct Chunk {
    const float* source;      // master of the old slot; further planes are `plane` words apart
    float* target;            // of the free slot
    const void* gradients;    // all of the rank
    unsigned short* copies;   // derived region
    const Piece* pieces;
    const u32* coefficients;  // 16 of each sub-block
    const u32* before;        // Q: 16 rows
    u32* after;               // Q'
    u64 plane;
    u64 words;                // of a page, a multiple of THREADS
    u32 blocks;
    u32 piece_count;
    float inv_scale, clip;    // 1 where there is nothing to scale
    u32 table;                // sub-blocks that shared memory has room for
    u32 fault;                // seed; only a build for fault injection looks at it
    Piece first;              // of the pieces: where it is the only one, nobody has to look further
    Step steps[STEPS];
};

struct F32 {
    typedef float type;
    static __device__ __forceinline__ float wide(float a) { return a; }
};
struct BF16 {
    typedef unsigned short type;
    static __device__ __forceinline__ float wide(unsigned short a) { return __uint_as_float((u32)a << 16); }
};
struct F16 {
    typedef unsigned short type;
    static __device__ __forceinline__ float wide(unsigned short a) { return from_f16(a); }
};

// torch.optim.AdamW(foreach=True): planes master, exp_avg, exp_avg_sq.
struct AdamW {
    static constexpr int planes = 3, run = 5;
    enum { keep, weight, counterweight, beta2, one_minus_beta2, root_bias2, eps, minus_step };
    static __device__ __forceinline__ void apply(float g, float (&x)[planes], const Step& s) {
        float p = mul(x[0], s.value[keep]), m = x[1], v = x[2];
        const float ahead = sub(g, m);
        // torch's lerp with the weight 1 - beta1 has two forms
        m = s.value[weight] < 0.5f ? fma(s.value[weight], ahead, m) : fma(negative(ahead), s.value[counterweight], g);
        v = mul(v, s.value[beta2]);
        v = fma(s.value[one_minus_beta2], mul(g, g), v);
        const float d = add(div(root(v), s.value[root_bias2]), s.value[eps]);
        x[0] = fma(s.value[minus_step], div(m, d), p);
        x[1] = m;
        x[2] = v;
    }

    // The same for several elements at once; false, and nothing is changed, if one needs the long way.
    template <int N>
    static __device__ __forceinline__ bool quick(const float (&g)[N], float (&x)[N][planes], const Step& s) {
        const float bias = s.value[root_bias2], by_bias = reciprocal(bias);
        bool fit = fit_divisor(bias);
        float m[N], v[N], d[N];
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const float ahead = sub(g[j], x[j][1]);
            m[j] = s.value[weight] < 0.5f ? fma(s.value[weight], ahead, x[j][1])
                                          : fma(negative(ahead), s.value[counterweight], g[j]);
            v[j] = fma(s.value[one_minus_beta2], mul(g[j], g[j]), mul(x[j][2], s.value[beta2]));
            // A fit number's root is a fit dividend.
            d[j] = add(quick_div(quick_root(v[j]), bias, by_bias), s.value[eps]);
            fit = fit & fit_for_root(v[j]) & fit_dividend(m[j]) & fit_divisor(d[j]);
        }
        if (!fit) return false;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const float step = quick_div(m[j], d[j], reciprocal(d[j]));
            x[j][0] = fma(s.value[minus_step], step, mul(x[j][0], s.value[keep]));
            x[j][1] = m[j];
            x[j][2] = v[j];
        }
        return true;
    }
};

// torch.optim.SGD(foreach=True): planes master, momentum_buffer.
struct SGD {
    static constexpr int planes = 2, run = 8;
    enum { weight_decay, momentum, one_minus_dampening, minus_lr };
    static constexpr u32 DECAY = 1, MOMENTUM = 2, FIRST = 4, NESTEROV = 8;
    static __device__ __forceinline__ void apply(float g, float (&x)[planes], const Step& s) {
        if (s.flags & DECAY) g = fma(s.value[weight_decay], x[0], g);
        if (s.flags & MOMENTUM) {
            const float kept = mul(x[1], s.value[momentum]);
            x[1] = s.flags & FIRST ? g : fma(s.value[one_minus_dampening], g, kept);
            g = s.flags & NESTEROV ? fma(s.value[momentum], x[1], g) : x[1];
        }
        x[0] = fma(s.value[minus_lr], g, x[0]);
    }
};

// The piece that holds element `at`, or the next one after it.
__device__ __forceinline__ u32 find(const Chunk& c, u64 at) {
    if (at < c.first.hi) return 0;
    u32 low = 1, high = c.piece_count;
    while (low < high) {
        const u32 middle = (low + high) / 2;
        if (c.pieces[middle].hi <= at)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// What a thread needs to know of an element in a mixed strip.
__device__ __forceinline__ u32 locate(const Chunk& c, u64 at, u64& gradient, u64& copy) {
    const u32 k = find(c, at);
    if (k >= c.piece_count || c.pieces[k].lo > at) return IDLE;
    const Piece& p = c.pieces[k];
    gradient = p.gradient + (at - p.lo);
    copy = p.copy == NO_COPY ? NO_COPY : p.copy + (at - p.lo);
    return p.step;
}

template <class Rule, class Gradient, bool LEAN>
__device__ __forceinline__ void transaction(const Chunk& c) {
    typedef typename Gradient::type G;
    constexpr int PLANES = Rule::planes, RUN = Rule::run, STATES = PLANES * RUN, ROWS = STATES + RUN;
    constexpr int WARPS = THREADS / 32;
    static_assert(STATES <= 16 && ROWS % WARPS == 0, "a warp fetches a row at a time");
    LETO_RMU_SHARED(shared);
    float* stage = (float*)shared;                              // [STAGES][ROWS][THREADS]
    u64* s_f = shared + STAGES * ROWS * THREADS / 2;            // [table][16]
    u64* s_gradient = s_f + (u64)c.table * 16;                  // [table][RUN]: address
    u64* s_copy = s_gradient + c.table * RUN;                   // address, or 0
    u32* s_kind = (u32*)(s_copy + c.table * RUN);
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u64 base = (u64)blockIdx.x * THREADS;
    const u64 column = base + threadIdx.x;
    u64 acc[16] = {};
    int fetched = 0;  // the stage that Q is in, if LEAN

#ifdef LETO_RMU_FAULT
    // A part of the blocks does all of its work, a part none, the rest stops somewhere.
    u32 hash = (c.fault ^ blockIdx.x * 0x9E3779B9u) * 0x85EBCA6Bu;
    hash = (hash ^ hash >> 13) * 0xC2B2AE35u;
    const u32 part = hash >> 28;
    const u32 blocks = part < 5 ? c.blocks : part < 10 ? 0 : (hash >> 8) % (c.blocks + 1);
#else
    const u32 blocks = c.blocks;
#endif

    for (u32 begin = 0; begin < blocks; begin += c.table) {
        const int count = (int)min(blocks - begin, c.table);
        wait_for_fetches<0>();
        __syncthreads();

        auto states = [&](int b) {
            if (b >= count) return;
            float* to = stage + (b % STAGES) * ROWS * THREADS;
#pragma unroll
            for (int q = 0; q < (STATES + WARPS - 1) / WARPS; ++q) {
                const u32 row = q * WARPS + warp;
                if (row >= STATES) break;
                const u32 s = row / RUN, j = row % RUN;
                const u64 at = (u64)((begin + b) * RUN + j) * c.words + base + lane * 4;
                fetch<16>(to + row * THREADS + lane * 4, c.source + s * c.plane + at);
            }
        };
        // Where the strip of a row begins, and how it is read.
        auto strip = [&](u32 t, u64& gradient, u64& copy) -> u32 {
            const u64 first = (begin * RUN + t) * c.words + base;
            gradient = copy = 0;
            const u32 k = find(c, first);
            const Piece& p = k == 0 ? c.first : c.pieces[k];
            if (k >= c.piece_count || p.lo >= first + THREADS) return IDLE;
            if (p.lo > first || first + THREADS > p.hi) return MIXED;
            gradient = (u64)c.gradients + (p.gradient + (first - p.lo)) * sizeof(G);
            copy = p.copy == NO_COPY ? 0 : (u64)c.copies + (p.copy + (first - p.lo)) * 2;
            return p.step | (gradient % 16 == 0 ? WIDE : gradient % 4 == 0 ? WORD : 0);
        };
        auto gradient_row = [&](int b, u32 j, u32 kind, u64 from) {
            float* line = stage + ((b % STAGES) * ROWS + STATES + j) * THREADS;
            constexpr u32 WORDS = THREADS * sizeof(G) / 4;
            if (kind >= MIXED) {
                if (kind == IDLE) return;
                const u64 at = (u64)((begin + b) * RUN + j) * c.words + base;
                for (u32 e = lane; e < THREADS; e += 32) {
                    u64 gradient, copy;
                    const u32 step = locate(c, at + e, gradient, copy);
                    ((G*)line)[e] = step == IDLE ? (G)0 : ((const G*)c.gradients)[gradient];
                }
            } else if (kind & WIDE) {
                if (lane < WORDS / 4) fetch<16>(line + lane * 4, (const float*)from + lane * 4);
            } else if (kind & WORD) {
                for (u32 e = lane; e < WORDS; e += 32) fetch<4>(line + e, (const float*)from + e);
            } else {
                for (u32 e = lane; e < THREADS; e += 32) ((G*)line)[e] = ((const G*)from)[e];
            }
        };
        // The warps that have a state row less begin.
        const u32 first_row = (warp + WARPS - STATES % WARPS) % WARPS;

        // The first sub-blocks are on their way while the tables are made.
#pragma unroll
        for (int b = 0; b < STAGES - 1; ++b) {
            states(b);
            if (b < count)
                for (u32 j = first_row; j < RUN; j += WARPS) {
                    u64 gradient, copy;
                    const u32 kind = strip(b * RUN + j, gradient, copy);
                    gradient_row(b, j, kind, gradient);
                }
            commit_fetches();
        }
        for (u32 t = threadIdx.x; t < count * 16; t += THREADS) s_f[t] = c.coefficients[begin * 16 + t];
        for (u32 t = threadIdx.x; t < count * RUN; t += THREADS) {
            u64 gradient, copy;
            s_kind[t] = strip(t, gradient, copy);
            s_gradient[t] = gradient;
            s_copy[t] = copy;
        }

#pragma unroll 1
        for (int b = 0; b < count; ++b) {
            wait_for_fetches<STAGES - 2>();
            __syncthreads();  // sub-block b has arrived, and everybody is done with the stage that is filled next
            const int ahead = b + STAGES - 1;
            states(ahead);
            if (ahead < count)
                for (u32 j = first_row; j < RUN; j += WARPS)
                    gradient_row(ahead, j, s_kind[ahead * RUN + j], s_gradient[ahead * RUN + j]);
            if constexpr (LEAN) {
                // Nothing is left to be fetched into this stage: Q takes it, a warp a row at a time.
                if (begin + count == blocks && b == max(count - (STAGES - 1), 0)) {
                    fetched = ahead % STAGES;
#pragma unroll
                    for (int q = 0; q < 16 / WARPS; ++q) {
                        const u32 i = q * WARPS + warp, at = i * THREADS + lane * 4;
                        fetch<16>(stage + fetched * ROWS * THREADS + at, c.before + i * c.words + base + lane * 4);
                    }
                }
            }
            commit_fetches();
            const float* in = stage + (b % STAGES) * ROWS * THREADS + threadIdx.x;
            u32 d[16];
#pragma unroll
            for (int i = STATES; i < 16; ++i) d[i] = 0;
            bool done = false;
            if constexpr (LEAN) {
                u32 other = 0;  // strips of another group, of none, or of several
#pragma unroll
                for (int j = 0; j < RUN; ++j) other |= s_kind[b * RUN + j] & GROUP;
                if (other == 0) {
                    float g[RUN], x[RUN][PLANES];
                    const float* lines = stage + ((b % STAGES) * ROWS + STATES) * THREADS;
#pragma unroll
                    for (int j = 0; j < RUN; ++j) {
                        const G raw = ((const G*)(lines + j * THREADS))[threadIdx.x];
                        g[j] = mul(mul(Gradient::wide(raw), c.inv_scale), c.clip);
#pragma unroll
                        for (int s = 0; s < PLANES; ++s) x[j][s] = in[(s * RUN + j) * THREADS];
                    }
                    done = Rule::quick(g, x, c.steps[0]);
                    if (done) {
                        float* to = c.target + (u64)((begin + b) * RUN) * (u32)c.words + column;
#pragma unroll
                        for (int j = 0; j < RUN; ++j) {
                            const u64 copy = s_copy[b * RUN + j];
                            if (copy) store((unsigned short*)copy + threadIdx.x, to_bf16(x[j][0]));
#pragma unroll
                            for (int s = 0; s < PLANES; ++s) {
                                store(to + s * c.plane, x[j][s]);
                                const float old = in[(s * RUN + j) * THREADS];
                                d[s * RUN + j] = __float_as_uint(old) ^ __float_as_uint(x[j][s]);
                            }
                            to += c.words;
                        }
                    }
                }
            }
            if (!done)
#pragma unroll
            for (int j = 0; j < RUN; ++j) {
                const u32 t = b * RUN + j;
                const u64 at = (u64)(begin * RUN + t) * (u32)c.words + column;
                float x[PLANES];
#pragma unroll
                for (int s = 0; s < PLANES; ++s) x[s] = in[(s * RUN + j) * THREADS];
                const G* line = (const G*)(stage + ((b % STAGES) * ROWS + STATES + j) * THREADS);
                const float g = mul(mul(Gradient::wide(line[threadIdx.x]), c.inv_scale), c.clip);
                u32 kind = s_kind[t];
                u64 copy = s_copy[t];
                if (kind == MIXED) {
                    u64 unused, index = NO_COPY;
                    kind = locate(c, at, unused, index);
                    copy = index == NO_COPY ? 0 : (u64)(c.copies + index);
                } else if (copy) {
                    copy += 2 * threadIdx.x;
                }
                if (kind != IDLE) Rule::apply(g, x, c.steps[kind % STEPS]);
                if (copy) store((unsigned short*)copy, to_bf16(x[0]));
#pragma unroll
                for (int s = 0; s < PLANES; ++s) {
                    store(c.target + s * c.plane + at, x[s]);
                    d[s * RUN + j] = __float_as_uint(in[(s * RUN + j) * THREADS]) ^ __float_as_uint(x[s]);
                }
            }
            leto_ec::superset_sums(d);
            leto_ec::multiply_add(acc, d, s_f + b * 16);
        }
    }

#ifdef LETO_RMU_FAULT
    if (part >= 5) return;
#endif
    u32 row[16];
    leto_ec::finish(row, acc);
    if constexpr (LEAN) {
        wait_for_fetches<0>();
        __syncthreads();
        const u32* q = (const u32*)(stage + fetched * ROWS * THREADS) + threadIdx.x;
#pragma unroll
        for (int i = 0; i < 16; ++i) c.after[i * c.words + column] = q[i * THREADS] ^ row[i];
    } else {
#pragma unroll
        for (int i = 0; i < 16; ++i) c.after[i * c.words + column] = c.before[i * c.words + column] ^ row[i];
    }
}

}  // namespace leto_rmu
