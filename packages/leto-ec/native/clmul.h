/* The carry-less kernels' common body: dyadic blocks, lazy accumulation, one Barrett reduction at the end.
 *
 * A file that includes this defines, for its vector width,
 *   V              the vector type; every 128-bit lane of it works for itself
 *   LOAD(p) STORE(p, v)     unaligned
 *   XOR(a, b) XOR3(a, b, c) AND(a, b)
 *   SPREAD(c)      the 64-bit value c in every 64-bit element
 *   FACTOR(p)      in every lane: the 64-bit values p[0], p[1]
 *   CLMUL(a, b, s) carry-less product of one 64-bit half of a and one of b in each lane; bit 0 of s picks
 *                  the upper half of a, bit 4 that of b
 *   EVENS(a, b)    per lane: 32-bit elements 0 and 2 of a, then 0 and 2 of b
 *   ODDS(a, b)     per lane: elements 1 and 3 of a, then 1 and 3 of b; and
 *   LEFT(a, n) RIGHT(a, n)  shifts of 32-bit elements: optional, where they are faster than multiplications
 *   UPPERS(a, b)   per lane: upper 64 bits of a, then upper 64 bits of b
 *   LOWERS(a, b)   per lane: lower 64 bits of a, then lower 64 bits of b
 *   ROWS           rows of a combination whose sums stay in registers together
 *   NAME           of the kernel, and `supported`, a function
 *
 * Sums. A lane holds words w0 w1 w2 w3. With the coefficient c in the lower half of a 64-bit operand,
 * w0 c is a 63-bit number in the lower 64 bits of the product. With both w1 and c in the upper halves of
 * theirs, the product is w1 c x^64: the upper 64 bits. So w0 c and w1 c share one register without meeting,
 * and two registers hold the sums of four words, in their order and with no shuffling.
 *
 * Blocks. The 16 x 16 matrix of a block is dyadic: 81 multiplications instead of 256 (theory: leto_ec.field).
 * Every line of a page is read once, in one go, so that pages whose addresses fall into the same sets of the cache
 * (as pages of 2 MiB do) cannot drive one another out half read.
 */
#ifndef LETO_EC_CLMUL_H
#define LETO_EC_CLMUL_H

#include <string.h>

#include "kernel.h"

#define STRIP 4096
#define PAGES 8 /* columns of a combination in a block */
#define HELD 16 /* rows whose sums are in the scratch buffer */
#define VECTOR sizeof(V)
#define LINE 64 /* of the cache */
#define AHEAD 512 /* bytes between what a product reads and what it fetches into the cache: few at a time, all along */

/* floor(x^64 / p): x^32 and, below it, the quotient of TAIL x^32 by p, found by long division. */
static uint64_t barrett(void) {
  uint64_t quotient = (uint64_t)1 << 32;
  uint64_t rest = (uint64_t)LETO_EC_TAIL << 32; /* x^64 - x^32 p */
  for (int bit = 31; bit >= 0; bit--)
    if (rest >> (bit + 32) & 1) {
      quotient |= (uint64_t)1 << bit;
      rest ^= (((uint64_t)1 << 32) | LETO_EC_TAIL) << bit;
    }
  return quotient;
}

struct constants {
  V even, odd; /* masks of the lower and the upper word of a 64-bit element */
  V factor;    /* lower half of a lane: mu; upper half: the tail */
};

INLINE struct constants constants(void) {
  const uint64_t low = 0xffffffffu;
  const uint64_t factor[2] = {barrett(), LETO_EC_TAIL};
  return (struct constants){SPREAD(low), SPREAD(low << 32), FACTOR(factor)};
}

/* Reduce the sums of four words a lane (see above) to words: what the upper word a of a sum folds into the lower is
 * floor(a mu / x^32) times p, of which only the lower 32 bits are of use. */
INLINE V reduce(V first, V second, const struct constants *k) {
#if defined(ODDS) && LETO_EC_TAIL == 0x400007u
  /* mu = x^32 + x^22 + x^12 + x + 1, and a has 31 bits: all words at a time, by shifts, which leave the multiplier alone. */
  (void)k;
  const V upper = ODDS(first, second), quotient = XOR3(upper, RIGHT(upper, 10), RIGHT(upper, 20));
  const V fold = XOR3(XOR(quotient, LEFT(quotient, 1)), LEFT(quotient, 2), LEFT(quotient, 22));
#else
  /* a in place (a x^32) times mu has the quotient in the upper 64 bits. */
  const V upper_first = AND(first, k->odd), upper_second = AND(second, k->odd);
  const V quotient_first = UPPERS(CLMUL(upper_first, k->factor, 0x00), CLMUL(upper_first, k->factor, 0x01));
  const V quotient_second = UPPERS(CLMUL(upper_second, k->factor, 0x00), CLMUL(upper_second, k->factor, 0x01));
  const V fold_first = LOWERS(CLMUL(quotient_first, k->factor, 0x10), CLMUL(quotient_first, k->factor, 0x11));
  const V fold_second = LOWERS(CLMUL(quotient_second, k->factor, 0x10), CLMUL(quotient_second, k->factor, 0x11));
  const V fold = EVENS(fold_first, fold_second);
#endif
  return XOR(EVENS(first, second), fold);
}

/* sums ^= words times c, for the words of one vector */
INLINE void multiply_add(V *first, V *second, V even, V odd, const uint64_t *factor) {
  const V c = FACTOR(factor);
  *first = XOR3(*first, CLMUL(even, c, 0x00), CLMUL(odd, c, 0x10));
  *second = XOR3(*second, CLMUL(even, c, 0x01), CLMUL(odd, c, 0x11));
}

/* d[m] becomes the XOR of d[s] over all s that contain m. */
INLINE void superset_sums(V d[BLOCK]) {
#pragma GCC unroll 4
  for (int l = 1; l < BLOCK; l <<= 1)
#pragma GCC unroll 16
    for (int i = 0; i < BLOCK; i++)
      if (!(i & l)) d[i] = XOR(d[i], d[i | l]);
}

static void prepare_block(const uint32_t coefficients[BLOCK], uint8_t *prepared) {
  for (int i = 0; i < BLOCK; i++) {
    const uint64_t pair[2] = {coefficients[i], (uint64_t)coefficients[i] << 32};
    memcpy(prepared + i * sizeof pair, pair, sizeof pair);
  }
}

static void product(const struct leto_ec_strip *s) {
  const struct constants k = constants();
  const size_t row = 2 * VECTOR; /* scratch: for every vector of the strip the sums of all rows */
  memset(s->scratch, 0, s->bytes / VECTOR * BLOCK * row);
  for (size_t b = 0; b < s->columns; b += BLOCK) {
    const uint64_t *f = (const uint64_t *)(const void *)(s->factors + b * 2 * sizeof(uint64_t));
    const uint8_t *pages[BLOCK], *next[BLOCK];
    for (size_t i = 0; i < BLOCK; i++) {
      pages[i] = leto_ec_page(s->inputs[b + i], s->at);
      next[i] = leto_ec_page(s->inputs[b + BLOCK < s->columns ? b + BLOCK + i : i], s->at);
      if (b + BLOCK >= s->columns && next[i] != leto_ec_zeros) next[i] += s->bytes; /* the next strip */
    }
    uint8_t *sums = s->scratch;
    uint8_t lines[BLOCK][LINE] __attribute__((aligned(LINE)));
    for (size_t at = 0; at < s->bytes; at += VECTOR, sums += BLOCK * row) {
      V d[BLOCK], split[BLOCK][2];
      const uint8_t *const *soon = at + AHEAD < s->bytes ? pages : next;
      const size_t there = at + AHEAD < s->bytes ? at + AHEAD : at + AHEAD - s->bytes;
      if (VECTOR < LINE && at % LINE == 0)
        for (int i = 0; i < BLOCK; i++) memcpy(lines[i], pages[i] + at, LINE);
#pragma GCC unroll 16
      for (int i = 0; i < BLOCK; i++) d[i] = VECTOR < LINE ? LOAD(lines[i] + at % LINE) : LOAD(pages[i] + at);
      superset_sums(d);
#pragma GCC unroll 16
      for (int i = 0; i < BLOCK; i++) {
        split[i][0] = AND(d[i], k.even);
        split[i][1] = AND(d[i], k.odd);
      }
#pragma GCC unroll 16
      for (int r = 0; r < BLOCK; r++) {
        V first = LOAD(sums + r * row), second = LOAD(sums + r * row + VECTOR);
        if (at % LINE == 0) __builtin_prefetch(soon[r] + there);
#pragma GCC unroll 16
        for (int m = 0; m < BLOCK; m++)
          if (!(m & ~r)) multiply_add(&first, &second, split[m][0], split[m][1], f + 2 * (r ^ m));
        STORE(sums + r * row, first);
        STORE(sums + r * row + VECTOR, second);
      }
    }
  }
  const uint8_t *sums = s->scratch;
  for (size_t at = 0; at < s->bytes; at += VECTOR, sums += BLOCK * row) {
    V d[BLOCK];
#pragma GCC unroll 16
    for (int r = 0; r < BLOCK; r++) d[r] = reduce(LOAD(sums + r * row), LOAD(sums + r * row + VECTOR), &k);
    superset_sums(d);
#pragma GCC unroll 16
    for (int r = 0; r < BLOCK; r++) {
      if (s->outputs[r] == NULL) continue;
      if (s->base != NULL && s->base[r] != NULL) d[r] = XOR(d[r], LOAD(s->base[r] + s->at + at));
      STORE(s->outputs[r] + s->at + at, d[r]);
    }
  }
}

/* Part of a combination: a block of columns, up to ROWS rows. */
struct part {
  const uint8_t *pages[PAGES], *next[PAGES];
  size_t pages_count, next_count;
  uint64_t factors[PAGES * ROWS][2];
  uint8_t *sums; /* 2 * bytes a row */
  const uint8_t *base[ROWS];
  uint8_t *outputs[ROWS];
  int first, last; /* sums begin at zero, sums are reduced */
};

INLINE void combine_rows(const struct leto_ec_strip *s, const struct part *b, const size_t rows,
                         const struct constants *k) {
  for (size_t i = 0; i < s->bytes; i += VECTOR) {
    V sum[ROWS][2];
#pragma GCC unroll 8
    for (size_t r = 0; r < rows; r++) {
      const uint8_t *held = b->sums + r * 2 * STRIP + 2 * i;
      sum[r][0] = b->first ? SPREAD(0) : LOAD(held);
      sum[r][1] = b->first ? SPREAD(0) : LOAD(held + VECTOR);
    }
    for (size_t p = 0; p < b->pages_count; p++) {
      const V data = LOAD(b->pages[p] + i);
      const V even = AND(data, k->even), odd = AND(data, k->odd);
      if (i % LINE == 0 && p < b->next_count) __builtin_prefetch(b->next[p] + i);
#pragma GCC unroll 8
      for (size_t r = 0; r < rows; r++)
        multiply_add(&sum[r][0], &sum[r][1], even, odd, b->factors[p * ROWS + r]);
    }
#pragma GCC unroll 8
    for (size_t r = 0; r < rows; r++) {
      if (!b->last) {
        STORE(b->sums + r * 2 * STRIP + 2 * i, sum[r][0]);
        STORE(b->sums + r * 2 * STRIP + 2 * i + VECTOR, sum[r][1]);
        continue;
      }
      if (b->outputs[r] == NULL) continue;
      V result = reduce(sum[r][0], sum[r][1], k);
      if (b->base[r] != NULL) result = XOR(result, LOAD(b->base[r] + i));
      STORE(b->outputs[r] + i, result);
    }
  }
}

static void combine_part(const struct leto_ec_strip *s, const struct part *b, size_t rows,
                         const struct constants *k) {
  switch (rows) {
    case 1: combine_rows(s, b, 1, k); break;
    case 2: combine_rows(s, b, 2, k); break;
    case 3: combine_rows(s, b, 3, k); break;
    case 4: combine_rows(s, b, 4, k); break;
#if ROWS >= 8
    case 5: combine_rows(s, b, 5, k); break;
    case 6: combine_rows(s, b, 6, k); break;
    case 7: combine_rows(s, b, 7, k); break;
    case 8: combine_rows(s, b, 8, k); break;
#endif
  }
}

/* All columns into up to HELD rows. */
static void combine_held(const struct leto_ec_strip *s, size_t row, size_t rows, const struct constants *k) {
  size_t done = 0;
  do {
    struct part b = {.first = done == 0};
    b.pages_count = s->columns - done < PAGES ? s->columns - done : PAGES;
    const size_t after = s->columns - done - b.pages_count;
    const size_t next_count = after < PAGES ? after : PAGES;
    b.last = after == 0;
    for (size_t p = 0; p < b.pages_count; p++) b.pages[p] = leto_ec_page(s->inputs[done + p], s->at);
    for (size_t p = 0; p < next_count; p++)
      b.next[p] = leto_ec_page(s->inputs[done + b.pages_count + p], s->at);
    for (size_t r = 0; r < rows; r += ROWS) {
      const size_t count = rows - r < ROWS ? rows - r : ROWS;
      b.next_count = r == 0 ? next_count : 0;
      b.sums = s->scratch + r * 2 * STRIP;
      for (size_t i = 0; i < count; i++) {
        const size_t index = row + r + i;
        b.base[i] = s->base != NULL && s->base[index] != NULL ? s->base[index] + s->at : NULL;
        b.outputs[i] = s->outputs[index] != NULL ? s->outputs[index] + s->at : NULL;
        for (size_t p = 0; p < b.pages_count; p++) {
          const uint64_t c = s->coefficients[index * s->columns + done + p];
          b.factors[p * ROWS + i][0] = c;
          b.factors[p * ROWS + i][1] = c << 32;
        }
      }
      combine_part(s, &b, count, k);
    }
    done += b.pages_count;
  } while (done < s->columns);
}

static void combine(const struct leto_ec_strip *s) {
  const struct constants k = constants();
  for (size_t row = 0; row < s->rows; row += HELD)
    combine_held(s, row, s->rows - row < HELD ? s->rows - row : HELD, &k);
}

#define KERNEL                                                                                              \
  {.name = NAME, .basis = LETO_EC_DYADIC, .granule = LINE, .strip = STRIP, .scratch = HELD * 2 * STRIP,    \
   .block = BLOCK * 2 * sizeof(uint64_t), .factor = 0, .block_cost = 81, .product_cost = 85, .supported = supported,             \
   .prepare_block = prepare_block, .product = product, .combine = combine}

#endif
