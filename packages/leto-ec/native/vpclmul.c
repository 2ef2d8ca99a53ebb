/* The 512-bit carry-less kernel: x86-64 with AVX-512 and VPCLMULQDQ (Ice Lake, Zen 4 and later). */
#include "kernel.h"

#if defined(__x86_64__) && defined(__VPCLMULQDQ__) && defined(__AVX512F__)

#include <immintrin.h>

typedef __m512i V;
#define LOAD(p) _mm512_loadu_si512(p)
#define STORE(p, v) _mm512_storeu_si512(p, v)
#define XOR(a, b) _mm512_xor_si512(a, b)
#define XOR3(a, b, c) _mm512_ternarylogic_epi64(a, b, c, 0x96)
#define AND(a, b) _mm512_and_si512(a, b)
#define SPREAD(c) _mm512_set1_epi64((long long)(c))
#define FACTOR(p) _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)(p)))
#define CLMUL(a, b, s) _mm512_clmulepi64_epi128(a, b, s)
#define EVENS(a, b) \
  _mm512_castps_si512(_mm512_shuffle_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), _MM_SHUFFLE(2, 0, 2, 0)))
#define ODDS(a, b) \
  _mm512_castps_si512(_mm512_shuffle_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), _MM_SHUFFLE(3, 1, 3, 1)))
#define LEFT(a, n) _mm512_slli_epi32(a, n)
#define RIGHT(a, n) _mm512_srli_epi32(a, n)
#define UPPERS(a, b) _mm512_unpackhi_epi64(a, b)
#define LOWERS(a, b) _mm512_unpacklo_epi64(a, b)
#define ROWS 8
#define NAME "vpclmul"

#include "clmul.h"

static int supported(void) {
  __builtin_cpu_init(); /* __builtin_cpu_supports also asks whether the system saves the registers */
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
}

const struct leto_ec_kernel leto_ec_vpclmul = KERNEL;

#else

const struct leto_ec_kernel leto_ec_vpclmul = {.name = "vpclmul"};

#endif
