/* The 256-bit table kernel: x86-64 with AVX2 alone (Haswell of 2013 to Zen 2). A product is looked up, four bits of
 * the input at a time, by byte shuffles. */
#include "kernel.h"

#if defined(__x86_64__) && defined(__AVX2__)

#include "planes_256.h"

typedef struct {
  uint8_t table[4][2][4][16]; /* [input byte][lower or upper digit][output byte][digit] */
} tables;
#define FACTOR tables

static void prepare_tables(uint32_t c, tables *t) {
  uint32_t columns[8][4];
  leto_ec_columns(c, columns);
  for (int digit = 0; digit < 8; digit++)
    for (int value = 0; value < 16; value++) {
      uint32_t product = 0;
      for (int bit = 0; bit < 4; bit++)
        if (value >> bit & 1) product ^= columns[(4 * digit + bit) & 7][digit / 2];
      for (int o = 0; o < 4; o++) t->table[digit / 2][digit % 2][o][value] = (uint8_t)(product >> (8 * o));
    }
}
#define PREPARE(c, factor) prepare_tables(c, factor)

INLINE V looked_up(V digits, const uint8_t table[16]) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)table)),
                             digits);
}

INLINE void table_multiply_add(V a[4], const V e[4], const tables *f) {
  const V low = _mm256_set1_epi8(15);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const V lower = _mm256_and_si256(e[i], low), upper = _mm256_and_si256(_mm256_srli_epi64(e[i], 4), low);
#pragma GCC unroll 4
    for (int o = 0; o < 4; o++)
      a[o] = XOR(a[o], XOR(looked_up(lower, f->table[i][0][o]), looked_up(upper, f->table[i][1][o])));
  }
}
#define MULTIPLY_ADD(a, e, f) table_multiply_add(a, e, f)
#define BLOCK_COST 48
#define PRODUCT_COST 48
#define MANY NULL
#define NAME "avx2"

#include "planes.h"

static int supported(void) {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2");
}

const struct leto_ec_kernel leto_ec_avx2 = KERNEL;

#else

const struct leto_ec_kernel leto_ec_avx2 = {.name = "avx2"};

#endif
