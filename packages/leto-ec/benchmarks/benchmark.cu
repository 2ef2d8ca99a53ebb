// For gpu_bench.py, no part of the library: the rates that bound its kernels, and kernels that lost against them.
#include "kernels.cu"

// Bytes read.
extern "C" __global__ void __launch_bounds__(256) leto_ec_bound_read(const uint4* p, u32* sink, u64 vectors) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 step = (u64)gridDim.x * blockDim.x;
    u32 s = 0;
    for (; i + 3 * step < vectors; i += 4 * step) {
        const uint4 a = __ldcs(p + i), b = __ldcs(p + i + step), c = __ldcs(p + i + 2 * step), d = __ldcs(p + i + 3 * step);
        s ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    if (s == 0x12345u) *sink = s;
}

// Carry-less multiply-adds: eight independent chains a thread.
extern "C" __global__ void leto_ec_bound_multiply(u64* sink, int iterations, u32 seed) {
    u64 a[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i] = threadIdx.x * 17 + i;
    u64 x = threadIdx.x + 1;
    const u64 y = seed | 0x80000001u;
    for (int it = 0; it < iterations; ++it) {
#pragma unroll
        for (int i = 0; i < 8; ++i) a[i] = leto_ec::clmad(x, y, a[i]);
        x ^= a[0] & 1;
    }
    u64 s = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) s ^= a[i];
    sink[(u64)blockIdx.x * blockDim.x + threadIdx.x] = s;
}

// The matrix as it is: 16 multiplications a word. coefficients: [pages][16]; pages a multiple of 64.
extern "C" __global__ void __launch_bounds__(256)
leto_ec_plain(const u64* pages, const u32* coefficients, const u64* out_rows, u32 count) {
    __shared__ u64 s_page[64];
    __shared__ u64 s_c[64 * 16];
    const u64 col = (u64)blockIdx.x * 256 + threadIdx.x;
    u64 acc[16] = {};
    for (u32 begin = 0; begin < count; begin += 64) {
        __syncthreads();
        for (u32 t = threadIdx.x; t < 64 * 16; t += 256) s_c[t] = coefficients[begin * 16 + t];
        if (threadIdx.x < 64) s_page[threadIdx.x] = pages[begin + threadIdx.x];
        __syncthreads();
#pragma unroll 4
        for (int j = 0; j < 64; ++j) {
            const u64 d = __ldcs((const u32*)s_page[j] + col);
#pragma unroll
            for (int i = 0; i < 16; ++i) acc[i] = leto_ec::clmad(d, s_c[j * 16 + i], acc[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) ((u32*)out_rows[i])[col] = leto_ec::reduce(acc[i]);
}

// Dyadic blocks with loads straight into registers: `width` words a thread, the next block loaded ahead or not.
template <int threads, int width, bool ahead>
__device__ __forceinline__ void product_direct(const u64* pages, const u32* f, const u64* out_rows, u32 blocks) {
    extern __shared__ u64 shared[];
    u64 *s_page = shared, *s_f = shared + blocks * 16;
    for (u32 t = threadIdx.x; t < blocks * 16; t += threads) s_page[t] = pages[t], s_f[t] = f[t];
    __syncthreads();
    const u64 col = ((u64)blockIdx.x * threads + threadIdx.x) * width;
    u64 acc[width][16] = {};
    u32 next[width][16];
    auto fetch = [&](u32 b, u32 (&to)[width][16]) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const u32* p = (const u32*)s_page[b * 16 + i] + col;
            if constexpr (width == 1) {
                to[0][i] = load_once(p);
            } else {
                const uint2 v = __ldcs((const uint2*)p);
                to[0][i] = v.x;
                to[width - 1][i] = v.y;
            }
        }
    };
    if (ahead) fetch(0, next);
#pragma unroll 1
    for (u32 b = 0; b < blocks; ++b) {
        u32 d[width][16];
        if (ahead) {
#pragma unroll
            for (int w = 0; w < width; ++w)
#pragma unroll
                for (int i = 0; i < 16; ++i) d[w][i] = next[w][i];
            if (b + 1 < blocks) fetch(b + 1, next);
        } else {
            fetch(b, d);
        }
#pragma unroll
        for (int w = 0; w < width; ++w) {
            leto_ec::superset_sums(d[w]);
            leto_ec::multiply_add(acc[w], d[w], s_f + b * 16);
        }
    }
#pragma unroll
    for (int w = 0; w < width; ++w) {
        u32 row[16];
        leto_ec::finish(row, acc[w]);
#pragma unroll
        for (int i = 0; i < 16; ++i) ((u32*)out_rows[i])[col + w] = row[i];
    }
}

#define DIRECT(name, threads, residents, width, ahead)                              \
    extern "C" __global__ void __launch_bounds__(threads, residents)                \
    name(const u64* pages, const u32* f, const u64* out_rows, u32 blocks) {         \
        product_direct<threads, width, ahead>(pages, f, out_rows, blocks);          \
    }
DIRECT(leto_ec_direct_1_256x3, 256, 3, 1, false)
DIRECT(leto_ec_direct_1_ahead_256x2, 256, 2, 1, true)
DIRECT(leto_ec_direct_2_128x4, 128, 4, 2, false)
DIRECT(leto_ec_direct_2_ahead_128x3, 128, 3, 2, true)
STREAM(leto_ec_stream_256x2_4, 256, 2, 4, 128)
STREAM(leto_ec_stream_128x4_5, 128, 4, 5, 64)
STREAM(leto_ec_stream_256x2_3, 256, 2, 3, 128)
STREAM(leto_ec_stream_512x1_3, 512, 1, 3, 128)
