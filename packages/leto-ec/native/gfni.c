/* The 512-bit affine kernel: x86-64 with AVX-512 (BW, VBMI) and GFNI (Ice Lake, Zen 4 and later). */
#include "kernel.h"

#if defined(__x86_64__) && defined(__GFNI__) && defined(__AVX512BW__) && defined(__AVX512VBMI__)

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
#define AFFINE affine
#define PREPARE(c, factor) prepare_affine(c, factor)
#define TRANSFORM(v, m) _mm512_gf2p8affine_epi64_epi8(v, m, 0)
#define TIMES(v, block) TRANSFORM(v, _mm512_set1_epi64((long long)(block)))

/* Output byte o takes input byte (o + n) & 3 by blocks[n][o]. */
INLINE void affine_multiply_add(V a[4], const V e[4], const affine *f) {
#pragma GCC unroll 4
  for (int o = 0; o < 4; o++) {
    const V low = XOR3(a[o], TIMES(e[o], f->blocks[0][o]), TIMES(e[(o + 1) & 3], f->blocks[1][o]));
    a[o] = XOR3(low, TIMES(e[(o + 2) & 3], f->blocks[2][o]), TIMES(e[(o + 3) & 3], f->blocks[3][o]));
  }
}
#define MULTIPLY_ADD(a, e, f) affine_multiply_add(a, e, f)

#define LOW32(a, b) _mm512_unpacklo_epi32(a, b)
#define HIGH32(a, b) _mm512_unpackhi_epi32(a, b)
#define LOW64(a, b) _mm512_unpacklo_epi64(a, b)
#define HIGH64(a, b) _mm512_unpackhi_epi64(a, b)
#define SHUFFLE(v, order) _mm512_shuffle_epi8(v, _mm512_broadcast_i32x4(order))

/* v x^n for the words whose bit in `which` is set, n up to 8. */
INLINE V times(V v, const int n, __mmask16 which) {
  const V top = _mm512_srli_epi32(v, 32 - n);
  V product = _mm512_slli_epi32(v, n);
#pragma GCC unroll 25
  for (int t = 0; t < 25; t++)
    if (LETO_EC_TAIL >> t & 1) product = XOR(product, _mm512_slli_epi32(top, t));
  return _mm512_mask_mov_epi32(v, which, product);
}

/* Where in the words c x^(8 k + j), 32 of them, the matrix of blocks[n][o] has its columns: last first. */
#define COLUMN(n, o, j) (4 * (8 * (((n) + (o)) & 3) + (j)) + (o))
#define COLUMNS(n, o)                                                                                             \
  COLUMN(n, o, 7), COLUMN(n, o, 6), COLUMN(n, o, 5), COLUMN(n, o, 4), COLUMN(n, o, 3), COLUMN(n, o, 2),           \
      COLUMN(n, o, 1), COLUMN(n, o, 0)
static const uint8_t columns_of[2][64] = {
    {COLUMNS(0, 0), COLUMNS(0, 1), COLUMNS(0, 2), COLUMNS(0, 3), COLUMNS(1, 0), COLUMNS(1, 1), COLUMNS(1, 2), COLUMNS(1, 3)},
    {COLUMNS(2, 0), COLUMNS(2, 1), COLUMNS(2, 2), COLUMNS(2, 3), COLUMNS(3, 0), COLUMNS(3, 1), COLUMNS(3, 2), COLUMNS(3, 3)}};

/* What leto_ec_affine_blocks does, all 16 blocks at a time: a matrix that is applied to the unit vectors is transposed. */
INLINE void prepare_affine(uint32_t c, affine *factor) {
  const uint32_t c1 = leto_ec_times(c, 8), c2 = leto_ec_times(c1, 8), c3 = leto_ec_times(c2, 8);
  V low = _mm512_inserti64x4(_mm512_set1_epi32((int)c), _mm256_set1_epi32((int)c1), 1);
  V high = _mm512_inserti64x4(_mm512_set1_epi32((int)c2), _mm256_set1_epi32((int)c3), 1);
  low = times(times(times(low, 1, 0xaaaa), 2, 0xcccc), 4, 0xf0f0);
  high = times(times(times(high, 1, 0xaaaa), 2, 0xcccc), 4, 0xf0f0);
  const V units = _mm512_set1_epi64(0x0102040810204080);
  for (int half = 0; half < 2; half++)
    STORE(&factor->blocks[2 * half], TRANSFORM(units, _mm512_permutex2var_epi8(low, LOAD(columns_of[half]), high)));
}

/* A quarter is a lane. */
INLINE V quarters(const uint64_t *blocks) {
  const __m512i twice = _mm512_set_epi64(3, 3, 2, 2, 1, 1, 0, 0);
  return _mm512_permutexvar_epi64(twice, _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(const void *)blocks)));
}
#define MATRICES(p) quarters(p)

/* from[4 * k + i] is byte k of word i .. */
INLINE V group(V v) {
  const __m128i byte = _mm_set_epi8(60, 56, 52, 48, 44, 40, 36, 32, 28, 24, 20, 16, 12, 8, 4, 0);
  const V which = _mm512_broadcast_i32x4(byte);
  const V k = _mm512_set_epi64(0x0303030303030303, 0x0303030303030303, 0x0202020202020202, 0x0202020202020202,
                               0x0101010101010101, 0x0101010101010101, 0, 0);
  return _mm512_permutexvar_epi8(_mm512_or_si512(which, k), v);
}
#define GROUP(v) group(v)

INLINE V ungroup(V v) {
  const V order = _mm512_set_epi32(0x3f2f1f0f, 0x3e2e1e0e, 0x3d2d1d0d, 0x3c2c1c0c, 0x3b2b1b0b, 0x3a2a1a0a, 0x39291909,
                                   0x38281808, 0x37271707, 0x36261606, 0x35251505, 0x34241404, 0x33231303, 0x32221202,
                                   0x31211101, 0x30201000);
  return _mm512_permutexvar_epi8(order, v);
}
#define UNGROUP(v) ungroup(v)
#define TURN(v, n) _mm512_shuffle_i32x4(v, v, (n) == 1 ? 0x39 : (n) == 2 ? 0x4e : 0x93)

#define BLOCK_COST 68
#define PRODUCT_COST 90
#define MANY &leto_ec_vpclmul
#define ROOM 4

#define NAME "gfni"

#include "planes.h"

static int supported(void) {
  __builtin_cpu_init(); /* __builtin_cpu_supports also asks whether the system saves the registers */
  return __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("gfni") &&
         leto_ec_vpclmul.product != NULL && leto_ec_vpclmul.supported();
}

const struct leto_ec_kernel leto_ec_gfni = KERNEL;

#else

const struct leto_ec_kernel leto_ec_gfni = {.name = "gfni"};

#endif
