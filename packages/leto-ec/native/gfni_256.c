/* The 256-bit affine kernel: x86-64 with AVX2 and GFNI but no AVX-512 (Alder Lake and later). */
#include "kernel.h"

#if defined(__x86_64__) && defined(__GFNI__) && defined(__AVX2__)

#include "planes_256.h"

typedef struct {
  uint64_t blocks[4][4];
} affine;
#define FACTOR affine
#define PREPARE(c, factor) leto_ec_affine_blocks(c, (factor)->blocks)

#define TIMES(v, block) _mm256_gf2p8affine_epi64_epi8(v, _mm256_set1_epi64x((long long)(block)), 0)

INLINE void affine_multiply_add(V a[4], const V e[4], const affine *f) {
#pragma GCC unroll 4
  for (int o = 0; o < 4; o++) {
    const V low = XOR(TIMES(e[0], f->blocks[o][0]), TIMES(e[1], f->blocks[o][1]));
    const V high = XOR(TIMES(e[2], f->blocks[o][2]), TIMES(e[3], f->blocks[o][3]));
    a[o] = XOR(a[o], XOR(low, high));
  }
}
#define MULTIPLY_ADD(a, e, f) affine_multiply_add(a, e, f)
#define NAME "gfni-256"

#include "planes.h"

static int supported(void) {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("gfni");
}

const struct leto_ec_kernel leto_ec_gfni_256 = KERNEL;

#else

const struct leto_ec_kernel leto_ec_gfni_256 = {.name = "gfni-256"};

#endif
