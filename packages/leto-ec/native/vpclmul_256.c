/* The 256-bit carry-less kernel: x86-64 with AVX2 and VPCLMULQDQ but no AVX-512 (Zen 3). */
#include "kernel.h"

#if defined(__x86_64__) && defined(__VPCLMULQDQ__) && defined(__AVX2__)

#include <immintrin.h>

typedef __m256i V;
#define LOAD(p) _mm256_loadu_si256((const __m256i *)(const void *)(p))
#define STORE(p, v) _mm256_storeu_si256((__m256i *)(void *)(p), v)
#define XOR(a, b) _mm256_xor_si256(a, b)
#define XOR3(a, b, c) XOR(a, XOR(b, c))
#define AND(a, b) _mm256_and_si256(a, b)
#define SPREAD(c) _mm256_set1_epi64x((long long)(c))
#define FACTOR(p) _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)(p)))
#define CLMUL(a, b, s) _mm256_clmulepi64_epi128(a, b, s)
#define EVENS(a, b) \
  _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), _MM_SHUFFLE(2, 0, 2, 0)))
#define ODDS(a, b) \
  _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), _MM_SHUFFLE(3, 1, 3, 1)))
#define LEFT(a, n) _mm256_slli_epi32(a, n)
#define RIGHT(a, n) _mm256_srli_epi32(a, n)
#define UPPERS(a, b) _mm256_unpackhi_epi64(a, b)
#define LOWERS(a, b) _mm256_unpacklo_epi64(a, b)
#define ROWS 4
#define NAME "vpclmul-256"

#include "clmul.h"

static int supported(void) {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("vpclmulqdq");
}

const struct leto_ec_kernel leto_ec_vpclmul_256 = KERNEL;

#else

const struct leto_ec_kernel leto_ec_vpclmul_256 = {.name = "vpclmul-256"};

#endif
