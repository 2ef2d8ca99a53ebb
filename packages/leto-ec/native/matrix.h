/* Multiplication by a constant as a matrix over GF(2), for the byte-plane kernels. */
#ifndef LETO_EC_MATRIX_H
#define LETO_EC_MATRIX_H

#include "kernel.h"

/* columns[k] = c x^k */
INLINE void leto_ec_columns(uint32_t c, uint32_t columns[32]) {
  for (int k = 0; k < 32; k++) {
    columns[k] = c;
    c = (c << 1) ^ ((uint32_t)((int32_t)c >> 31) & LETO_EC_TAIL);
  }
}

/* For gf2p8affineqb: byte 7 - i of blocks[n][o] holds row i of the 8 x 8 block that takes byte (o + n) & 3 of a word
 * to byte o of the product; bit j of a row belongs to bit j of the input. */
INLINE void leto_ec_affine_blocks(uint32_t c, uint64_t blocks[4][4]) {
  uint32_t columns[32];
  leto_ec_columns(c, columns);
  for (int o = 0; o < 4; o++)
    for (int k = 0; k < 4; k++) {
      uint64_t t = 0; /* byte j: byte o of column 8 k + j; then transposed as an 8 x 8 bit matrix */
      for (int j = 0; j < 8; j++) t |= (uint64_t)(columns[8 * k + j] >> (8 * o) & 0xff) << (8 * j);
      uint64_t x = (t ^ (t >> 7)) & 0x00aa00aa00aa00aau;
      t ^= x ^ (x << 7);
      x = (t ^ (t >> 14)) & 0x0000cccc0000ccccu;
      t ^= x ^ (x << 14);
      x = (t ^ (t >> 28)) & 0x00000000f0f0f0f0u;
      t ^= x ^ (x << 28);
      blocks[(k - o) & 3][o] = __builtin_bswap64(t);
    }
}

#endif
