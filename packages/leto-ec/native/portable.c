/* The portable kernel: plain C that any compiler vectorises, for processors without carry-less multiply.
 *
 * For a tile of words w of one page, and for each of the eight 4-bit digits of a coefficient, the sixteen
 * sums of w x^(4n), ..., w x^(4n+3) are tabled; every row then adds the entry that its digit names. The
 * tables belong to the data, not to the coefficients, so all rows share them: a row costs eight XORs a
 * word. Doubling reduces at once, since plain C has no use for 64-bit products.
 */
#include <string.h>

#include "kernel.h"
#include "leto_ec.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are little-endian: on this machine leto_ec uses its numpy reference"
#endif

#define TILE 64 /* words: 16 tables of 256 bytes and 16 rows of sums stay in 8 KiB */
#define ROWS 16

/* Add one page's tile to the sums of `rows` rows; `step` is the distance of their coefficients. */
static void add_page(uint32_t sums[ROWS][TILE], size_t rows, const uint32_t *coefficients, size_t step,
                     uint32_t word[TILE]) {
  uint32_t table[16][TILE];
  memset(table[0], 0, sizeof table[0]);
  for (unsigned digit = 0; digit < 8; digit++) {
    for (unsigned bit = 1; bit < 16; bit <<= 1) {
      for (unsigned low = 0; low < bit; low++)
        for (size_t i = 0; i < TILE; i++) table[bit + low][i] = table[low][i] ^ word[i];
      for (size_t i = 0; i < TILE; i++)
        word[i] = (word[i] << 1) ^ ((uint32_t)((int32_t)word[i] >> 31) & LETO_EC_TAIL);
    }
    for (size_t r = 0; r < rows; r++) {
      const uint32_t *entry = table[coefficients[r * step] >> (4 * digit) & 15u];
      for (size_t i = 0; i < TILE; i++) sums[r][i] ^= entry[i];
    }
  }
}

static int combine(const struct leto_ec_job *job) {
  uint32_t sums[ROWS][TILE], word[TILE];
  for (size_t at = 0; at < job->bytes; at += sizeof word) {
    const size_t size = job->bytes - at < sizeof word ? job->bytes - at : sizeof word;
    for (size_t row = 0; row < job->rows; row += ROWS) {
      const size_t rows = job->rows - row < ROWS ? job->rows - row : ROWS;
      memset(sums, 0, sizeof sums);
      if (job->base != NULL)
        for (size_t r = 0; r < rows; r++) memcpy(sums[r], job->base[row + r] + at, size);
      for (size_t k = 0; k < job->columns; k++) {
        memset(word, 0, sizeof word);
        memcpy(word, job->inputs[k] + at, size);
        add_page(sums, rows, job->coefficients + row * job->columns + k, job->columns, word);
      }
      for (size_t r = 0; r < rows; r++) memcpy(job->outputs[row + r] + at, sums[r], size);
    }
  }
  return LETO_EC_OK;
}

static int supported(void) { return 1; }

const struct leto_ec_kernel leto_ec_portable = {"portable", supported, combine};
