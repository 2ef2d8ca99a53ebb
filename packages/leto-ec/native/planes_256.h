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
#define XOR3(a, b, c) XOR(a, XOR(b, c))

#define LOW32(a, b) _mm256_unpacklo_epi32(a, b)
#define HIGH32(a, b) _mm256_unpackhi_epi32(a, b)
#define LOW64(a, b) _mm256_unpacklo_epi64(a, b)
#define HIGH64(a, b) _mm256_unpackhi_epi64(a, b)
#define SHUFFLE(v, order) _mm256_shuffle_epi8(v, _mm256_broadcastsi128_si256(order))

#endif
