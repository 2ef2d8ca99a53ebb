/* The portable kernel: plain C that any compiler vectorises, for processors without anything better.
 *
 * A product collects, for every row and every bit t of the coefficients, the XOR of the words whose coefficient has
 * bit t; multiplication by x is left to the end, where each row takes 32 doublings. Four words of a block at a
 * time, their 16 sums are tabled, so that a row and bit adds at most one table entry for four words.
 *
 * A combination tables, for each of the eight 4-bit digits of a coefficient, the sixteen sums of
 * w x^(4n), ..., w x^(4n+3); every row then adds the entry that its digit names.
 */
#include <string.h>

#include "kernel.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are little-endian: on this machine leto_ec uses its numpy reference"
#endif

#define TILE 64 /* words */
#define ROWS 16
#define BITS 32
#define GROUPS (BLOCK / 4)

INLINE uint32_t doubled(uint32_t word) {
  return (word << 1) ^ ((uint32_t)((int32_t)word >> 31) & LETO_EC_TAIL);
}

/* [row][bit][group]: which of the group's four words have the bit in the coefficient of this row. */
typedef uint8_t choice[BLOCK][BITS][GROUPS];

static void prepare_block(const uint32_t coefficients[BLOCK], uint8_t *prepared) {
  choice *chosen = (choice *)(void *)prepared;
  memset(chosen, 0, sizeof *chosen);
  for (int r = 0; r < BLOCK; r++)
    for (int m = 0; m < BLOCK; m++)
      if (!(m & ~r))
        for (int t = 0; t < BITS; t++)
          (*chosen)[r][t][m / 4] |= (uint8_t)((coefficients[r ^ m] >> t & 1u) << (m % 4));
}

static void superset_sums(uint32_t d[BLOCK][TILE]) {
  for (int l = 1; l < BLOCK; l <<= 1)
    for (int m = 0; m < BLOCK; m++)
      if (!(m & l))
        for (int i = 0; i < TILE; i++) d[m][i] ^= d[m | l][i];
}

static void product(const struct leto_ec_strip *s) {
  uint32_t(*sums)[BITS][TILE] = (void *)s->scratch;
  uint32_t(*table)[16][TILE] = (void *)(s->scratch + sizeof(uint32_t[BLOCK][BITS][TILE]));
  uint32_t d[BLOCK][TILE];
  memset(sums, 0, sizeof(uint32_t[BLOCK][BITS][TILE]));
  for (size_t b = 0; b < s->columns; b += BLOCK) {
    const choice *chosen = (const choice *)(const void *)(s->factors + b / BLOCK * sizeof(choice));
    memset(d, 0, sizeof d);
    for (int m = 0; m < BLOCK; m++)
      if (s->inputs[b + m] != NULL) memcpy(d[m], s->inputs[b + m] + s->at, s->bytes);
    superset_sums(d);
    for (int g = 0; g < GROUPS; g++) {
      memset(table[g][0], 0, sizeof table[g][0]);
      for (int bit = 0; bit < 4; bit++)
        for (int low = 0; low < 1 << bit; low++)
          for (int i = 0; i < TILE; i++) table[g][(1 << bit) + low][i] = table[g][low][i] ^ d[4 * g + bit][i];
    }
    for (int r = 0; r < BLOCK; r++)
      for (int t = 0; t < BITS; t++) {
        const uint8_t *c = (*chosen)[r][t];
        uint32_t *sum = sums[r][t];
        const uint32_t *w0 = table[0][c[0]], *w1 = table[1][c[1]], *w2 = table[2][c[2]], *w3 = table[3][c[3]];
        switch (r / 4) { /* groups that meet this row */
          case 0: for (int i = 0; i < TILE; i++) sum[i] ^= w0[i]; break;
          case 1: for (int i = 0; i < TILE; i++) sum[i] ^= w0[i] ^ w1[i]; break;
          case 2: for (int i = 0; i < TILE; i++) sum[i] ^= w0[i] ^ w2[i]; break;
          default: for (int i = 0; i < TILE; i++) sum[i] ^= w0[i] ^ w1[i] ^ w2[i] ^ w3[i]; break;
        }
      }
  }
  for (int r = 0; r < BLOCK; r++) {
    memcpy(d[r], sums[r][BITS - 1], sizeof d[r]);
    for (int t = BITS - 2; t >= 0; t--)
      for (int i = 0; i < TILE; i++) d[r][i] = doubled(d[r][i]) ^ sums[r][t][i];
  }
  superset_sums(d);
  for (int r = 0; r < BLOCK; r++) {
    if (s->outputs[r] == NULL) continue;
    uint32_t base[TILE] = {0};
    if (s->base != NULL && s->base[r] != NULL) memcpy(base, s->base[r] + s->at, s->bytes);
    for (int i = 0; i < TILE; i++) d[r][i] ^= base[i];
    memcpy(s->outputs[r] + s->at, d[r], s->bytes);
  }
}

/* Add one page's tile to the sums of `rows` rows; `step` is the distance of their coefficients. */
static void add_page(uint32_t sums[ROWS][TILE], size_t rows, const uint32_t *coefficients, size_t step,
                     uint32_t word[TILE]) {
  uint32_t table[16][TILE];
  memset(table[0], 0, sizeof table[0]);
  for (unsigned digit = 0; digit < 8; digit++) {
    for (unsigned bit = 1; bit < 16; bit <<= 1) {
      for (unsigned low = 0; low < bit; low++)
        for (size_t i = 0; i < TILE; i++) table[bit + low][i] = table[low][i] ^ word[i];
      for (size_t i = 0; i < TILE; i++) word[i] = doubled(word[i]);
    }
    for (size_t r = 0; r < rows; r++) {
      const uint32_t *entry = table[coefficients[r * step] >> (4 * digit) & 15u];
      for (size_t i = 0; i < TILE; i++) sums[r][i] ^= entry[i];
    }
  }
}

static void combine(const struct leto_ec_strip *s) {
  uint32_t sums[ROWS][TILE], word[TILE];
  for (size_t row = 0; row < s->rows; row += ROWS) {
    const size_t rows = s->rows - row < ROWS ? s->rows - row : ROWS;
    memset(sums, 0, sizeof sums);
    for (size_t r = 0; r < rows; r++)
      if (s->base != NULL && s->base[row + r] != NULL) memcpy(sums[r], s->base[row + r] + s->at, s->bytes);
    for (size_t k = 0; k < s->columns; k++) {
      if (s->inputs[k] == NULL) continue;
      memcpy(word, s->inputs[k] + s->at, s->bytes);
      add_page(sums, rows, s->coefficients + row * s->columns + k, s->columns, word);
    }
    for (size_t r = 0; r < rows; r++)
      if (s->outputs[row + r] != NULL) memcpy(s->outputs[row + r] + s->at, sums[r], s->bytes);
  }
}

static int supported(void) { return 1; }

const struct leto_ec_kernel leto_ec_portable = {
    .name = "portable", .basis = LETO_EC_DYADIC, .granule = 4 * TILE, .strip = 4 * TILE,
    .scratch = sizeof(uint32_t[BLOCK][BITS][TILE]) + sizeof(uint32_t[GROUPS][16][TILE]),
    .block = sizeof(choice), .factor = 0, .block_cost = 96, .product_cost = 96, .supported = supported,
    .prepare_block = prepare_block, .product = product, .combine = combine};
