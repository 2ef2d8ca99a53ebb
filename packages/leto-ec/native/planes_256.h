/* What the two 256-bit byte-plane kernels have in common. */
#ifndef LETO_EC_PLANES_256_H
#define LETO_EC_PLANES_256_H

#include <immintrin.h>

#include "matrix.h"

typedef __m256i V;
#define LOAD(p) _mm256_loadu_si256((const __m256i *)(const void *)(p))
#define STORE(p, v) _mm256_storeu_si256((__m256i *)(void *)(p), v)
#define ZERO _mm256_setzero_si256()
#define XOR(a, b) _mm256_xor_si256(a, b)

/* The 4 x 4 transposition of the 32-bit elements of four vectors, lane by lane. */
INLINE void transpose(V v[4]) {
  const V a = _mm256_unpacklo_epi32(v[0], v[1]), b = _mm256_unpackhi_epi32(v[0], v[1]);
  const V c = _mm256_unpacklo_epi32(v[2], v[3]), d = _mm256_unpackhi_epi32(v[2], v[3]);
  v[0] = _mm256_unpacklo_epi64(a, c);
  v[1] = _mm256_unpackhi_epi64(a, c);
  v[2] = _mm256_unpacklo_epi64(b, d);
  v[3] = _mm256_unpackhi_epi64(b, d);
}

/* In every lane, the 4 x 4 transposition of its bytes: its own inverse. */
INLINE void transpose_bytes(V v[4]) {
  const V order = _mm256_broadcastsi128_si256(_mm_set_epi8(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0));
  for (int i = 0; i < 4; i++) v[i] = _mm256_shuffle_epi8(v[i], order);
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

#endif
