// Kernels of leto_ec for CUDA devices. The theory is in gf32.cuh, the host's side in _launch.py.
//
// Every kernel takes pages and rows as tables of device addresses (0: absent), so that strided groups and page lists
// are the same thing. Addresses are of 4-byte words at least; `words` is the length of a page in words. Grid: x
// covers the words of a page, y the groups. A result word is written by the thread that reads the words it depends on,
// so in_rows may equal out_rows.
//
// LETO_EC_FAULT: a build for fault injection, whose products stop in the middle of their results and trap; it is never
// part of a wheel.
#include "gf32.cuh"

using leto_ec::u32;
using leto_ec::u64;

namespace {

#ifdef LETO_EC_FAULT
__device__ u32 fault_seed, ended;

// How many of its rows a warp stores: a part of the warps stores all, a part none, the rest some.
__device__ __forceinline__ int rows_stored() {
    const u32 block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    u32 hash = (fault_seed ^ (block * (blockDim.x / 32) + threadIdx.x / 32) * 0x9E3779B9u) * 0x85EBCA6Bu;
    hash = (hash ^ hash >> 13) * 0xC2B2AE35u;
    const u32 part = hash >> 28;
    return part < 5 ? 16 : part < 10 ? 0 : (int)((hash >> 8) % 17);
}

// The last block to end stops the device; what the others have written stays written.
__device__ __forceinline__ void end_in_a_trap() {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(&ended, 1u) == gridDim.x * gridDim.y * gridDim.z - 1) __trap();
}
#else
__device__ __forceinline__ constexpr int rows_stored() { return 16; }
__device__ __forceinline__ void end_in_a_trap() {}
#endif

__device__ __forceinline__ u32 load_once(const u32* p) {
    u32 v;
    asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

__device__ __forceinline__ u32 word_of(u64 page, u64 col) { return page ? load_once((const u32*)page + col) : 0u; }

__device__ __forceinline__ void store_rows(u64 (&acc)[16], const u32 (&before)[16], const u64* out_rows, u64 col) {
    u32 row[16];
    leto_ec::finish(row, acc);
    const int stored = rows_stored();
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const u64 out = out_rows[i];
        if (out && i < stored) ((u32*)out)[col] = before[i] ^ row[i];
    }
}

__device__ __forceinline__ void store_rows(u64 (&acc)[16], const u64* in_rows, const u64* out_rows, u64 col) {
    u32 before[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) before[i] = word_of(in_rows[i], col);
    store_rows(acc, before, out_rows, col);
}

}  // namespace

#ifdef LETO_EC_FAULT
extern "C" __global__ void leto_ec_set_fault(u32 seed) { fault_seed = seed; }
#endif

// out_rows[i] = in_rows[i] ^ sum over blocks of block times pages, from word `first` on. One thread owns one word; any
// alignment of 4 bytes. Grid z: slices of 16 rows. pages: [groups][blocks][16]. f: [slices][blocks][16]. in_rows,
// out_rows: [groups][slices][16].
extern "C" __global__ void __launch_bounds__(128, 5)
leto_ec_product(const u64* pages, const u32* f, const u64* in_rows, const u64* out_rows, u64 first, u64 words,
                u32 blocks) {
    constexpr u32 table = 64;  // blocks whose addresses and coefficients are in shared memory at once
    __shared__ u64 s_page[table * 16];
    __shared__ u64 s_f[table * 16];
    const u64 col = first + (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const bool live = col < words;
    const u64 group = blockIdx.y, rows = (group * gridDim.z + blockIdx.z) * 16;
    pages += group * blocks * 16;
    f += (u64)blockIdx.z * blocks * 16;
    u64 acc[16] = {};
    for (u32 begin = 0; begin < blocks; begin += table) {
        const u32 count = min(blocks - begin, table);
        __syncthreads();
        for (u32 t = threadIdx.x; t < count * 16; t += blockDim.x) {
            s_page[t] = pages[begin * 16 + t];
            s_f[t] = f[begin * 16 + t];
        }
        __syncthreads();
        if (!live) continue;
        for (u32 b = 0; b < count; ++b) {
            u32 d[16];
#pragma unroll
            for (int i = 0; i < 16; ++i) d[i] = word_of(s_page[b * 16 + i], col);
            leto_ec::superset_sums(d);
            leto_ec::multiply_add(acc, d, s_f + b * 16);
        }
    }
    if (live) store_rows(acc, in_rows + rows, out_rows + rows, col);
    end_in_a_trap();
}

// The same for few blocks, where the rows are as much to read as the pages: they are fetched first, together with the
// pages of the first block. At most 16 blocks.
extern "C" __global__ void __launch_bounds__(128, 4)
leto_ec_product_short(const u64* pages, const u32* f, const u64* in_rows, const u64* out_rows, u64 first, u64 words,
                      u32 blocks) {
    __shared__ u64 s_page[16 * 16];
    __shared__ u64 s_f[16 * 16];
    __shared__ u64 s_in[16];
    const u64 group = blockIdx.y, rows = (group * gridDim.z + blockIdx.z) * 16;
    for (u32 t = threadIdx.x; t < blocks * 16; t += blockDim.x) {
        s_page[t] = pages[group * blocks * 16 + t];
        s_f[t] = f[(u64)blockIdx.z * blocks * 16 + t];
    }
    if (threadIdx.x < 16) s_in[threadIdx.x] = in_rows[rows + threadIdx.x];
    __syncthreads();
    const u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 col = first + (u64)blockIdx.x * blockDim.x + threadIdx.x; col < words; col += step) {
        u64 acc[16] = {};
        u32 before[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) before[i] = word_of(s_in[i], col);
        for (u32 b = 0; b < blocks; ++b) {
            u32 d[16];
#pragma unroll
            for (int i = 0; i < 16; ++i) d[i] = word_of(s_page[b * 16 + i], col);
            leto_ec::superset_sums(d);
            leto_ec::multiply_add(acc, d, s_f + b * 16);
        }
        store_rows(acc, before, out_rows + rows, col);
    }
    end_in_a_trap();
}

// The same for pages aligned to 16 bytes and a multiple of `threads` words: pages stream through shared memory by
// cp.async, `stages` blocks deep, so that loads stay in flight while the multiplications run.
template <int threads, int stages, u32 table>
__device__ __forceinline__ void product_stream(const u64* pages, const u32* f, const u64* in_rows, const u64* out_rows,
                                               u32 blocks) {
    extern __shared__ u64 shared[];
    u64* s_page = shared;
    u64* s_f = s_page + table * 16;
    u32* s_data = (u32*)(s_f + table * 16);  // [stages][16][threads]
    const u64 base = (u64)blockIdx.x * threads;
    const u64 group = blockIdx.y, rows = (group * gridDim.z + blockIdx.z) * 16;
    pages += group * blocks * 16;
    f += (u64)blockIdx.z * blocks * 16;
    u64 acc[16] = {};
    for (u32 begin = 0; begin < blocks; begin += table) {
        const u32 count = min(blocks - begin, table);
        __syncthreads();
        for (u32 t = threadIdx.x; t < count * 16; t += threads) {
            s_page[t] = pages[begin * 16 + t];
            s_f[t] = f[begin * 16 + t];
        }
        __syncthreads();
        auto issue = [&](u32 b) {
            if (b < count) {
                u32* stage = s_data + (b % stages) * 16 * threads;
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                    const int e = q * threads + threadIdx.x, row = e / (threads / 4), quad = e % (threads / 4);
                    const u64 page = s_page[b * 16 + row];
                    const u32 to = (u32)__cvta_generic_to_shared(stage + row * threads + quad * 4);
                    const u32* from = page ? (const u32*)page + base + quad * 4 : (const u32*)pages;
                    const int bytes = page ? 16 : 0;  // 0: the 16 bytes are filled with zeros, nothing is read
                    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                                 "r"(bytes)
                                 : "memory");
                }
            }
            asm volatile("cp.async.commit_group;" ::: "memory");
        };
#pragma unroll
        for (int s = 0; s < stages - 1; ++s) issue(s);
#pragma unroll 1
        for (u32 b = 0; b < count; ++b) {
            asm volatile("cp.async.wait_group %0;" ::"n"(stages - 2) : "memory");
            __syncthreads();  // block b has arrived, and everybody is done with the stage that is filled next
            issue(b + stages - 1);
            u32 d[16];
            const u32* stage = s_data + (b % stages) * 16 * threads + threadIdx.x;
#pragma unroll
            for (int i = 0; i < 16; ++i) d[i] = stage[i * threads];
            leto_ec::superset_sums(d);
            leto_ec::multiply_add(acc, d, s_f + b * 16);
        }
        asm volatile("cp.async.wait_group 0;" ::: "memory");
    }
    store_rows(acc, in_rows + rows, out_rows + rows, base + threadIdx.x);
    end_in_a_trap();
}

// Four blocks of threads have to fit a multiprocessor's shared memory: 48, 40 or 32 KiB each (_library.py chooses).
#define STREAM(name, threads, residents, stages, table)                                                     \
    extern "C" __global__ void __launch_bounds__(threads, residents)                                        \
    name(const u64* pages, const u32* f, const u64* in_rows, const u64* out_rows, u32 blocks) {             \
        product_stream<threads, stages, table>(pages, f, in_rows, out_rows, blocks);                        \
    }
STREAM(leto_ec_product_stream_48, 128, 4, 4, 64)
STREAM(leto_ec_product_stream_40, 128, 4, 3, 64)
STREAM(leto_ec_product_stream_32, 128, 4, 2, 64)

// One page of each group changes: out_rows[i] = in_rows[i] ^ coefficient[i] * (page ^ minus). Grid z: sets of
// `rows_each` rows. page, minus (0: none): [groups]. coefficient: [rows]. in_rows, out_rows: [groups][rows]. All
// addresses aligned to 16 bytes; `vectors` of 16 bytes.
extern "C" __global__ void __launch_bounds__(256)
leto_ec_delta(const u64* page, const u64* minus, const u32* coefficient, const u64* in_rows, const u64* out_rows,
              u64 vectors, u32 rows, u32 rows_each) {
    const u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= vectors) return;
    const u64 group = blockIdx.y;
    uint4 d = page[group] ? ((const uint4*)page[group])[at] : make_uint4(0, 0, 0, 0);
    if (minus[group]) {
        const uint4 m = ((const uint4*)minus[group])[at];
        d = make_uint4(d.x ^ m.x, d.y ^ m.y, d.z ^ m.z, d.w ^ m.w);
    }
    const u32 begin = blockIdx.z * rows_each;
    in_rows += group * rows;
    out_rows += group * rows;
#pragma unroll 4
    for (u32 i = begin; i < min(begin + rows_each, rows); ++i) {
        const uint4 q = __ldcs((const uint4*)in_rows[i] + at);
        const u64 c = coefficient[i];
        uint4 r;
        r.x = leto_ec::reduce(leto_ec::clmad(d.x, c, q.x));
        r.y = leto_ec::reduce(leto_ec::clmad(d.y, c, q.y));
        r.z = leto_ec::reduce(leto_ec::clmad(d.z, c, q.z));
        r.w = leto_ec::reduce(leto_ec::clmad(d.w, c, q.w));
        __stcs((uint4*)out_rows[i] + at, r);
    }
}

// The same word by word, from word `first` on, at any alignment of 4 bytes.
extern "C" __global__ void __launch_bounds__(256)
leto_ec_delta_words(const u64* page, const u64* minus, const u32* coefficient, const u64* in_rows, const u64* out_rows,
                    u64 first, u64 words, u32 rows, u32 rows_each) {
    const u64 at = first + (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= words) return;
    const u64 group = blockIdx.y;
    u32 d = page[group] ? ((const u32*)page[group])[at] : 0u;
    if (minus[group]) d ^= ((const u32*)minus[group])[at];
    const u32 begin = blockIdx.z * rows_each;
    in_rows += group * rows;
    out_rows += group * rows;
    for (u32 i = begin; i < min(begin + rows_each, rows); ++i)
        ((u32*)out_rows[i])[at] = leto_ec::reduce(leto_ec::clmad(d, coefficient[i], ((const u32*)in_rows[i])[at]));
}

// out[k] = in2[k] ^ sum over i < n of matrix[k][i] * in[i], k < m: solves for lost pages and rows. in: [groups][n].
// in2 (0: none), out: [groups][m]. matrix: [m][n]. A group whose verdict is not zero is left alone; verdict may be
// null, else it is [groups] words, `verdict_step` words apart.
extern "C" __global__ void __launch_bounds__(128)
leto_ec_combine(const u32* matrix, const u64* in, const u64* in2, const u64* out, u64 words, u32 n, u32 m,
                const u32* verdict, u32 verdict_step) {
    const u64 col = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 group = blockIdx.y;
    if (col >= words || (verdict && verdict[group * verdict_step])) return;
    in += group * n;
    for (u32 k0 = 0; k0 < m; k0 += 16) {
        u64 acc[16] = {};
        for (u32 i = 0; i < n; ++i) {
            const u64 d = ((const u32*)in[i])[col];
#pragma unroll
            for (int k = 0; k < 16; ++k)
                if (k0 + k < m) acc[k] = leto_ec::clmad(d, matrix[(k0 + k) * n + i], acc[k]);
        }
#pragma unroll
        for (int k = 0; k < 16; ++k)
            if (k0 + k < m) {
                const u64 extra = in2[group * m + k0 + k];
                ((u32*)out[group * m + k0 + k])[col] = leto_ec::reduce(acc[k]) ^ (extra ? ((const u32*)extra)[col] : 0u);
            }
    }
}

// Compares instead: found[group][0] and found[group][1 + k] become 1 where row k of the sum above differs from zero.
// Nothing else is written. found: [groups][1 + m], zero at the start.
extern "C" __global__ void __launch_bounds__(128)
leto_ec_verify(const u32* matrix, const u64* in, const u64* in2, u64 words, u32 n, u32 m, u32* found) {
    const u64 col = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 group = blockIdx.y;
    if (col >= words) return;
    in += group * n;
    found += group * (1 + m);
    for (u32 k0 = 0; k0 < m; k0 += 16) {
        u64 acc[16] = {};
        for (u32 i = 0; i < n; ++i) {
            const u64 d = ((const u32*)in[i])[col];
#pragma unroll
            for (int k = 0; k < 16; ++k)
                if (k0 + k < m) acc[k] = leto_ec::clmad(d, matrix[(k0 + k) * n + i], acc[k]);
        }
#pragma unroll
        for (int k = 0; k < 16; ++k)
            if (k0 + k < m && leto_ec::reduce(acc[k]) != ((const u32*)in2[group * m + k0 + k])[col]) {
                found[1 + k0 + k] = 1;  // many threads may store the same 1
                found[0] = 1;
            }
    }
}
