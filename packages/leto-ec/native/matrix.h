/* Multiplication by a constant as a matrix over GF(2), for the byte-plane kernels. */
#ifndef LETO_EC_MATRIX_H
#define LETO_EC_MATRIX_H

#include "kernel.h"

/* c x^n, n up to 8: TAIL's degree is below 25, so what is folded down stays below x^32. */
INLINE uint32_t leto_ec_times(uint32_t c, int n) {
  const uint32_t top = c >> (32 - n);
  c <<= n;
#pragma GCC unroll 25
  for (int t = 0; t < 25; t++)
    if (LETO_EC_TAIL >> t & 1) c ^= top << t;
  return c;
}

/* columns[j][k] = c x^(8 k + j): four chains of eight, so that none is long. */
INLINE void leto_ec_columns(uint32_t c, uint32_t columns[8][4]) {
  for (int k = 0; k < 4; k++, c = leto_ec_times(c, 8)) columns[0][k] = c;
  for (int j = 1; j < 8; j++)
    for (int k = 0; k < 4; k++) {
      const uint32_t word = columns[j - 1][k];
      columns[j][k] = (word << 1) ^ ((uint32_t)((int32_t)word >> 31) & LETO_EC_TAIL);
    }
}

/* For gf2p8affineqb: byte 7 - i of blocks[n][o] holds row i of the 8 x 8 block that takes byte (o + n) & 3 of a word
 * to byte o of the product; bit j of a row belongs to bit j of the input. */
INLINE void leto_ec_affine_blocks(uint32_t c, uint64_t blocks[4][4]) {
  uint32_t columns[8][4];
  leto_ec_columns(c, columns);
  uint64_t all[16] = {0}; /* [4 o + k], byte j: byte o of c x^(8 k + j); then transposed as an 8 x 8 bit matrix */
  for (int j = 0; j < 8; j++)
    for (int o = 0; o < 4; o++)
      for (int k = 0; k < 4; k++) all[4 * o + k] |= (uint64_t)(columns[j][k] >> (8 * o) & 0xff) << (8 * j);
  for (int i = 0; i < 16; i++) {
    uint64_t t = all[i], x = (t ^ (t >> 7)) & 0x00aa00aa00aa00aau;
    t ^= x ^ (x << 7);
    x = (t ^ (t >> 14)) & 0x0000cccc0000ccccu;
    t ^= x ^ (x << 14);
    x = (t ^ (t >> 28)) & 0x00000000f0f0f0f0u;
    t ^= x ^ (x << 28);
    all[i] = __builtin_bswap64(t);
  }
  for (int o = 0; o < 4; o++)
    for (int k = 0; k < 4; k++) blocks[(k - o) & 3][o] = all[4 * o + k];
}

#endif
