// GF(2^32) arithmetic and the dyadic-block Reed-Solomon product for the GPU.
//
// Include this header to fuse parity updates into a kernel of your own: gather 16 words (one from each page of an
// aligned block, zero where a page is absent), call superset_sums and multiply_add once a block, and finish once at
// the end. leto_ec.cuda.include_dir() says where the header is, leto_ec.cuda.block_coefficients() gives the
// coefficients. All names are in namespace leto_ec. The header needs no other header and compiles with nvcc and with
// NVRTC. Define LETO_EC_CLMAD where the compiler knows PTX 9.3 (CUDA 13.3 and later) for the carry-less instruction.
//
// Field: GF(2)[x] / (x^32 + x^22 + x^2 + x + 1), tail 0x400007. A word is one element, bit k is x^k.
//
// Code: parity_i = sum over j of data_j / (i ^ y_j), with y_j = H + j. Cut the y axis into aligned blocks of 16. Within
// block b and for 16 rows i = 16 a + r the coefficient depends on r XOR s alone, where s is the position in the
// block: the 16 x 16 matrix is dyadic, and its product with the data is an XOR convolution, a product in
// GF(2^32)[x0..x3] / (x_l^2 - 1). With z_l = x_l + 1 this is GF(2^32)[z0..z3] / (z_l^2): z_l squares to zero, so only
// disjoint index sets meet and 3^4 = 81 multiplications replace 256. The way from x to z and back is the same map,
// the superset XOR sum, 32 XORs; the way back is linear and is taken once, after all blocks.
//
// Products are not reduced one by one: two 32-bit words give 63 bits, XOR keeps sums within them, and reduction is
// linear over XOR, so the accumulator of a row is reduced once.
#pragma once

namespace leto_ec {

typedef unsigned int u32;
typedef unsigned long long u64;

static constexpr u64 tail = 0x400007ull;      // x^32 mod P

// c XOR (a * b without carries), low 64 bits. Both factors below 2^32 give the whole product.
__device__ __forceinline__ u64 clmad(u64 a, u64 b, u64 c) {
#if defined(LETO_EC_CLMAD)
    u64 d;
    asm("clmad.lo.u64 %0, %1, %2, %3;" : "=l"(d) : "l"(a), "l"(b), "l"(c));
    return d;
#else
    // Integer multiplication with holes: every fourth bit of each factor, so that at most eight ones meet in a
    // column and no carry reaches the next live bit. Exact for factors below 2^32.
    const u32 x = (u32)a, y = (u32)b;
    const u32 x0 = x & 0x11111111u, x1 = x & 0x22222222u, x2 = x & 0x44444444u, x3 = x & 0x88888888u;
    const u32 y0 = y & 0x11111111u, y1 = y & 0x22222222u, y2 = y & 0x44444444u, y3 = y & 0x88888888u;
    const u64 z0 = ((u64)x0 * y0) ^ ((u64)x1 * y3) ^ ((u64)x2 * y2) ^ ((u64)x3 * y1);
    const u64 z1 = ((u64)x0 * y1) ^ ((u64)x1 * y0) ^ ((u64)x2 * y3) ^ ((u64)x3 * y2);
    const u64 z2 = ((u64)x0 * y2) ^ ((u64)x1 * y1) ^ ((u64)x2 * y0) ^ ((u64)x3 * y3);
    const u64 z3 = ((u64)x0 * y3) ^ ((u64)x1 * y2) ^ ((u64)x2 * y1) ^ ((u64)x3 * y0);
    return c ^ (z0 & 0x1111111111111111ull) ^ (z1 & 0x2222222222222222ull) ^ (z2 & 0x4444444444444444ull) ^
           (z3 & 0x8888888888888888ull);
#endif
}

// The element congruent to a sum of products. Each fold takes ten degrees off: 62, 52, 42, 32, 22.
__device__ __forceinline__ u32 reduce(u64 v) {
#pragma unroll
    for (int fold = 0; fold < 4; ++fold) v = clmad(v >> 32, tail, v & 0xffffffffull);
    return (u32)v;
}

// d[m] becomes the XOR of d[s] over all s that contain m. An involution.
__device__ __forceinline__ void superset_sums(u32 (&d)[16]) {
#pragma unroll
    for (int l = 1; l < 16; l <<= 1)
#pragma unroll
        for (int i = 0; i < 16; ++i)
            if (!(i & l)) d[i] ^= d[i | l];
}

// acc[k] ^= sum over m within k of f[k ^ m] * d[m]. `f`: the 16 coefficients of the block, zero-extended.
__device__ __forceinline__ void multiply_add(u64 (&acc)[16], const u32 (&d)[16], const u64* f) {
#pragma unroll
    for (int t = 0; t < 16; ++t) {
        const u64 c = f[t];
#pragma unroll
        for (int m = 0; m < 16; ++m)
            if (!(m & t)) acc[m | t] = clmad((u64)d[m], c, acc[m | t]);
    }
}

// The 16 parity words of the accumulated blocks.
__device__ __forceinline__ void finish(u32 (&row)[16], const u64 (&acc)[16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) row[i] = reduce(acc[i]);
    superset_sums(row);
}

}  // namespace leto_ec
