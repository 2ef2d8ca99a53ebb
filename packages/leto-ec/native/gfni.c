/* The 512-bit affine kernel: x86-64 with AVX-512 (BW) and GFNI (Ice Lake, Zen 4 and later). */
#include "kernel.h"

#if defined(__x86_64__) && defined(__GFNI__) && defined(__AVX512BW__)

#include <immintrin.h>

#include "matrix.h"

typedef __m512i V;
#define LOAD(p) _mm512_loadu_si512(p)
#define STORE(p, v) _mm512_storeu_si512(p, v)
#define ZERO _mm512_setzero_si512()
#define XOR(a, b) _mm512_xor_si512(a, b)
#define XOR3(a, b, c) _mm512_ternarylogic_epi64(a, b, c, 0x96)

typedef struct {
  uint64_t blocks[4][4];
} affine;
#define FACTOR affine
#define PREPARE(c, factor) leto_ec_affine_blocks(c, (factor)->blocks)

#define TIMES(v, block) _mm512_gf2p8affine_epi64_epi8(v, _mm512_set1_epi64((long long)(block)), 0)

INLINE void affine_multiply_add(V a[4], const V e[4], const affine *f) {
#pragma GCC unroll 4
  for (int o = 0; o < 4; o++) {
    const V low = XOR3(a[o], TIMES(e[0], f->blocks[o][0]), TIMES(e[1], f->blocks[o][1]));
    a[o] = XOR3(low, TIMES(e[2], f->blocks[o][2]), TIMES(e[3], f->blocks[o][3]));
  }
}
#define MULTIPLY_ADD(a, e, f) affine_multiply_add(a, e, f)

/* The 4 x 4 transposition of the 32-bit elements of four vectors, lane by lane. */
INLINE void transpose(V v[4]) {
  const V a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
  const V c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
  v[0] = _mm512_unpacklo_epi64(a, c);
  v[1] = _mm512_unpackhi_epi64(a, c);
  v[2] = _mm512_unpacklo_epi64(b, d);
  v[3] = _mm512_unpackhi_epi64(b, d);
}

/* In every lane, the 4 x 4 transposition of its bytes: its own inverse. */
INLINE void transpose_bytes(V v[4]) {
  const V order = _mm512_broadcast_i32x4(_mm_set_epi8(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0));
  for (int i = 0; i < 4; i++) v[i] = _mm512_shuffle_epi8(v[i], order);
}

INLINE void to_planes(V v[4]) {
  transpose_bytes(v);
  transpose(v);
}
#define TO_PLANES(v) to_planes(v)

INLINE void from_planes(V v[4]) {
  transpose(v);
  transpose_bytes(v);
}
#define FROM_PLANES(v) from_planes(v)

#define NAME "gfni"

#include "planes.h"

static int supported(void) {
  __builtin_cpu_init(); /* __builtin_cpu_supports also asks whether the system saves the registers */
  return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("gfni");
}

const struct leto_ec_kernel leto_ec_gfni = KERNEL;

#else

const struct leto_ec_kernel leto_ec_gfni = {.name = "gfni"};

#endif
