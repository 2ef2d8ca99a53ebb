/* The 128-bit carry-less kernel: x86-64 with PCLMULQDQ and SSE4.1 (Westmere of 2010 and later). */
#include "kernel.h"

#if defined(__x86_64__) && defined(__PCLMUL__) && defined(__SSE4_1__)

#include <immintrin.h>

typedef __m128i V;
#define LOAD(p) _mm_loadu_si128((const __m128i *)(const void *)(p))
#define STORE(p, v) _mm_storeu_si128((__m128i *)(void *)(p), v)
#define XOR(a, b) _mm_xor_si128(a, b)
#define XOR3(a, b, c) XOR(a, XOR(b, c))
#define AND(a, b) _mm_and_si128(a, b)
#define SPREAD(c) _mm_set1_epi64x((long long)(c))
#define FACTOR(p) _mm_loadu_si128((const __m128i *)(const void *)(p))
#define CLMUL(a, b, s) _mm_clmulepi64_si128(a, b, s)
#define EVENS(a, b) \
  _mm_castps_si128(_mm_shuffle_ps(_mm_castsi128_ps(a), _mm_castsi128_ps(b), _MM_SHUFFLE(2, 0, 2, 0)))
#define ODDS(a, b) \
  _mm_castps_si128(_mm_shuffle_ps(_mm_castsi128_ps(a), _mm_castsi128_ps(b), _MM_SHUFFLE(3, 1, 3, 1)))
#define LEFT(a, n) _mm_slli_epi32(a, n)
#define RIGHT(a, n) _mm_srli_epi32(a, n)
#define UPPERS(a, b) _mm_unpackhi_epi64(a, b)
#define LOWERS(a, b) _mm_unpacklo_epi64(a, b)
#define ROWS 4
#define NAME "pclmul"

#include "clmul.h"

static int supported(void) {
  __builtin_cpu_init();
  return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
}

const struct leto_ec_kernel leto_ec_pclmul = KERNEL;

#else

const struct leto_ec_kernel leto_ec_pclmul = {.name = "pclmul"};

#endif
