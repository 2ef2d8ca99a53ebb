/* The carry-less kernel of 64-bit ARM with the crypto extension (PMULL, PMULL2). */
#include "kernel.h"

#if defined(__aarch64__) && (defined(__ARM_FEATURE_AES) || defined(__ARM_FEATURE_CRYPTO))

#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif

typedef uint64x2_t V;

INLINE V neon_clmul(V a, V b, const int s) {
  const poly64x2_t x = vreinterpretq_p64_u64(a), y = vreinterpretq_p64_u64(b);
  const poly64_t half_x = s & 0x01 ? vgetq_lane_p64(x, 1) : vgetq_lane_p64(x, 0);
  const poly64_t half_y = s & 0x10 ? vgetq_lane_p64(y, 1) : vgetq_lane_p64(y, 0);
  return vreinterpretq_u64_p128(vmull_p64(half_x, half_y));
}

#define LOAD(p) vreinterpretq_u64_u8(vld1q_u8(p))
#define STORE(p, v) vst1q_u8(p, vreinterpretq_u8_u64(v))
#define XOR(a, b) veorq_u64(a, b)
#define XOR3(a, b, c) XOR(a, XOR(b, c))
#define AND(a, b) vandq_u64(a, b)
#define SPREAD(c) vdupq_n_u64(c)
#define FACTOR(p) vld1q_u64(p)
#define CLMUL(a, b, s) neon_clmul(a, b, s)
#define EVENS(a, b) vreinterpretq_u64_u32(vuzp1q_u32(vreinterpretq_u32_u64(a), vreinterpretq_u32_u64(b)))
#define UPPERS(a, b) vzip2q_u64(a, b)
#define LOWERS(a, b) vzip1q_u64(a, b)
#define ROWS 4
#define NAME "neon"

#include "clmul.h"

static int supported(void) {
#if defined(__linux__)
  return (getauxval(AT_HWCAP) & (1ul << 4)) != 0; /* HWCAP_PMULL */
#else
  return 1; /* Apple's processors all have it */
#endif
}

const struct leto_ec_kernel leto_ec_neon = KERNEL;

#else

const struct leto_ec_kernel leto_ec_neon = {.name = "neon"};

#endif
