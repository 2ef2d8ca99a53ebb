/* The 256-bit affine kernel: x86-64 with AVX2 and GFNI but no AVX-512 (Alder Lake and later). */
#include "kernel.h"

#if defined(__x86_64__) && defined(__GFNI__) && defined(__AVX2__)

#include "planes_256.h"

typedef struct {
  uint64_t blocks[4][4];
} affine;
#define FACTOR affine
#define AFFINE affine
#define PREPARE(c, factor) leto_ec_affine_blocks(c, (factor)->blocks)
#define TRANSFORM(v, m) _mm256_gf2p8affine_epi64_epi8(v, m, 0)
#define TIMES(v, block) TRANSFORM(v, _mm256_set1_epi64x((long long)(block)))

/* Output byte o takes input byte (o + n) & 3 by blocks[n][o]. */
INLINE void affine_multiply_add(V a[4], const V e[4], const affine *f) {
#pragma GCC unroll 4
  for (int o = 0; o < 4; o++) {
    const V low = XOR(TIMES(e[o], f->blocks[0][o]), TIMES(e[(o + 1) & 3], f->blocks[1][o]));
    const V high = XOR(TIMES(e[(o + 2) & 3], f->blocks[2][o]), TIMES(e[(o + 3) & 3], f->blocks[3][o]));
    a[o] = XOR3(a[o], low, high);
  }
}
#define MULTIPLY_ADD(a, e, f) affine_multiply_add(a, e, f)

/* A quarter is 64 bits. */
#define MATRICES(p) LOAD(p)
#define GROUP(v) _mm256_permutevar8x32_epi32(SHUFFLE(v, BYTES), _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0))
#define UNGROUP(v) SHUFFLE(_mm256_permutevar8x32_epi32(v, _mm256_set_epi32(7, 5, 3, 1, 6, 4, 2, 0)), BYTES)
#define TURN(v, n) _mm256_permute4x64_epi64(v, (n) == 1 ? 0x39 : (n) == 2 ? 0x4e : 0x93)

#define BLOCK_COST 68
#define PRODUCT_COST 90
#define MANY &leto_ec_vpclmul_256
#define ROOM 2

#define NAME "gfni-256"

#include "planes.h"

static int supported(void) {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("gfni") &&
         leto_ec_vpclmul_256.product != NULL && leto_ec_vpclmul_256.supported();
}

const struct leto_ec_kernel leto_ec_gfni_256 = KERNEL;

#else

const struct leto_ec_kernel leto_ec_gfni_256 = {.name = "gfni-256"};

#endif
