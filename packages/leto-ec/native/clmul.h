/* The carry-less kernels' common body: strip-mining, lazy accumulation, one Barrett reduction at the end.
 *
 * A file that includes this defines, for its vector width,
 *   V              the vector type; every 128-bit lane of it works for itself
 *   LOAD(p) STORE(p, v)     unaligned
 *   XOR(a, b) AND(a, b)
 *   SPREAD(c)      the 64-bit value c in every 64-bit element
 *   CLMUL(a, b, s) carry-less product of one 64-bit half of a and one of b in each lane; bit 0 of s picks
 *                  the upper half of a, bit 4 that of b
 *   EVENS(a, b)    per lane: 32-bit elements 0 and 2 of a, then 0 and 2 of b
 *   UPPERS(a, b)   per lane: upper 64 bits of a, then upper 64 bits of b
 *   LOWERS(a, b)   per lane: lower 64 bits of a, then lower 64 bits of b
 *   ROWS           rows whose sums stay in registers together
 *
 * Sums. A lane holds words w0 w1 w2 w3. With the coefficient c in the lower half of a 64-bit operand,
 * w0 c is a 63-bit number in the lower 64 bits of the product. With both w1 and c in the upper halves of
 * theirs, the product is w1 c x^64: the upper 64 bits. So w0 c and w1 c share one register without meeting,
 * and two registers hold the sums of four words, in their order and with no shuffling.
 *
 * Strips. Pages are walked in strips, a block of pages at a time, so that a block of strips is in the
 * first-level cache while all rows use it. Between blocks the 64-bit sums of a strip rest in a scratch
 * buffer; they are reduced once, after the last page.
 */
#ifndef LETO_EC_CLMUL_H
#define LETO_EC_CLMUL_H

#include <stdlib.h>
#include <string.h>

#include "kernel.h"
#include "leto_ec.h"

#define STRIP 4096    /* bytes of a page, at most */
#define PAGES 8       /* pages in a block */
#define ROWS_HELD 16  /* rows whose sums are in the scratch buffer */
#define VECTOR sizeof(V)

#define INLINE static inline __attribute__((always_inline))

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
  V even, odd;   /* masks of the lower and the upper word of a 64-bit element */
  V factor;      /* lower half of a lane: mu; upper half: the tail */
};

/* Reduce the sums of four words a lane (see above) to words. */
INLINE V reduce(V first, V second, const struct constants *k) {
  /* The upper word a of a sum, in place (a x^32), times mu has floor(a mu / x^32) in the upper 64 bits. */
  const V upper_first = AND(first, k->odd), upper_second = AND(second, k->odd);
  const V quotient_first = UPPERS(CLMUL(upper_first, k->factor, 0x00), CLMUL(upper_first, k->factor, 0x01));
  const V quotient_second = UPPERS(CLMUL(upper_second, k->factor, 0x00), CLMUL(upper_second, k->factor, 0x01));
  /* The quotient times p, of which only the lower 32 bits are of use. */
  const V fold_first = LOWERS(CLMUL(quotient_first, k->factor, 0x10), CLMUL(quotient_first, k->factor, 0x11));
  const V fold_second = LOWERS(CLMUL(quotient_second, k->factor, 0x10), CLMUL(quotient_second, k->factor, 0x11));
  return EVENS(XOR(first, fold_first), XOR(second, fold_second));
}

/* Part of a job: one strip, one block of pages, up to ROWS rows. */
struct block {
  const uint8_t *const *pages;
  const uint8_t *const *next; /* the block to fetch ahead, or NULL */
  size_t pages_count, next_count;
  size_t at, bytes; /* within the page; bytes is a multiple of VECTOR */
  const uint64_t (*factors)[2]; /* [page * ROWS + row]: c in the lower half, c in the upper half */
  uint8_t *sums[ROWS];          /* 2 * bytes each */
  const uint8_t *base[ROWS];
  uint8_t *outputs[ROWS];
  int first, last; /* sums begin at zero, sums are reduced */
  int has_base;
};

INLINE void work(const struct block *b, const size_t rows, const struct constants *k) {
  for (size_t i = 0; i < b->bytes; i += VECTOR) {
    V sum[ROWS][2];
#pragma GCC unroll 8
    for (size_t r = 0; r < rows; r++) {
      sum[r][0] = b->first ? SPREAD(0) : LOAD(b->sums[r] + 2 * i);
      sum[r][1] = b->first ? SPREAD(0) : LOAD(b->sums[r] + 2 * i + VECTOR);
    }
    for (size_t p = 0; p < b->pages_count; p++) {
      const V data = LOAD(b->pages[p] + b->at + i);
      const V even = AND(data, k->even), odd = AND(data, k->odd);
#pragma GCC unroll 8
      for (size_t r = 0; r < rows; r++) {
        const V c = FACTOR(b->factors[p * ROWS + r]);
        sum[r][0] = XOR(sum[r][0], XOR(CLMUL(even, c, 0x00), CLMUL(odd, c, 0x10)));
        sum[r][1] = XOR(sum[r][1], XOR(CLMUL(even, c, 0x01), CLMUL(odd, c, 0x11)));
      }
    }
    if (b->next != NULL && i % 64 == 0)
      for (size_t p = 0; p < b->next_count; p++) __builtin_prefetch(b->next[p] + b->at + i);
#pragma GCC unroll 8
    for (size_t r = 0; r < rows; r++) {
      if (!b->last) {
        STORE(b->sums[r] + 2 * i, sum[r][0]);
        STORE(b->sums[r] + 2 * i + VECTOR, sum[r][1]);
        continue;
      }
      V result = reduce(sum[r][0], sum[r][1], k);
      if (b->has_base) result = XOR(result, LOAD(b->base[r] + b->at + i));
      STORE(b->outputs[r] + b->at + i, result);
    }
  }
}

static void work_rows(const struct block *b, size_t rows, const struct constants *k) {
  switch (rows) {
    case 1: work(b, 1, k); break;
    case 2: work(b, 2, k); break;
    case 3: work(b, 3, k); break;
    case 4: work(b, 4, k); break;
#if ROWS >= 8
    case 5: work(b, 5, k); break;
    case 6: work(b, 6, k); break;
    case 7: work(b, 7, k); break;
    case 8: work(b, 8, k); break;
#endif
  }
}

/* All pages into up to ROWS_HELD rows of one strip. */
static void strip(const struct leto_ec_job *job, size_t row, size_t rows, size_t at, size_t bytes,
                  uint8_t *scratch, const struct constants *k) {
  uint64_t factors[PAGES * ROWS][2];
  size_t done = 0;
  do {
    const size_t pages = job->columns - done < PAGES ? job->columns - done : PAGES;
    const size_t after = job->columns - done - pages;
    for (size_t r = 0; r < rows; r += ROWS) {
      struct block b = {.pages = job->inputs + done, .pages_count = pages, .at = at, .bytes = bytes,
                        .factors = (const uint64_t(*)[2])factors, .first = done == 0, .last = after == 0,
                        .has_base = job->base != NULL};
      const size_t count = rows - r < ROWS ? rows - r : ROWS;
      if (r == 0 && after != 0) {
        b.next = job->inputs + done + pages;
        b.next_count = after < PAGES ? after : PAGES;
      }
      for (size_t i = 0; i < count; i++) {
        const size_t index = row + r + i;
        b.sums[i] = scratch + (r + i) * 2 * STRIP;
        b.base[i] = job->base != NULL ? job->base[index] : NULL;
        b.outputs[i] = job->outputs[index];
        for (size_t p = 0; p < pages; p++) {
          const uint64_t c = job->coefficients[index * job->columns + done + p];
          factors[p * ROWS + i][0] = c;
          factors[p * ROWS + i][1] = c << 32;
        }
      }
      work_rows(&b, count, k);
    }
    done += pages;
  } while (done < job->columns);
}

/* The last bytes of every page, less than a vector: copied into whole vectors and done there. */
static int tail(const struct leto_ec_job *job, size_t at, const struct constants *k, uint8_t *scratch) {
  const size_t size = job->bytes - at;
  const size_t buffers = job->columns + 2 * job->rows;
  uint8_t *memory = calloc(buffers, VECTOR);
  uint8_t **pointers = malloc(buffers * sizeof *pointers);
  if (memory == NULL || pointers == NULL) {
    free(memory);
    free(pointers);
    return LETO_EC_NO_MEMORY;
  }
  uint8_t **const inputs = pointers, **const base = inputs + job->columns, **const outputs = base + job->rows;
  for (size_t i = 0; i < buffers; i++) pointers[i] = memory + i * VECTOR;
  for (size_t i = 0; i < job->columns; i++) memcpy(inputs[i], job->inputs[i] + at, size);
  for (size_t i = 0; i < job->rows && job->base != NULL; i++) memcpy(base[i], job->base[i] + at, size);
  const struct leto_ec_job part = {job->rows, job->columns, VECTOR, job->coefficients,
                                   (const uint8_t *const *)inputs,
                                   job->base != NULL ? (const uint8_t *const *)base : NULL, outputs};
  for (size_t row = 0; row < job->rows; row += ROWS_HELD)
    strip(&part, row, job->rows - row < ROWS_HELD ? job->rows - row : ROWS_HELD, 0, VECTOR, scratch, k);
  for (size_t i = 0; i < job->rows; i++) memcpy(job->outputs[i] + at, outputs[i], size);
  free(memory);
  free(pointers);
  return LETO_EC_OK;
}

static int combine(const struct leto_ec_job *job) {
  const uint64_t low = 0xffffffffu;
  const uint64_t factor[2] = {barrett(), LETO_EC_TAIL};
  const struct constants k = {SPREAD(low), SPREAD(low << 32), FACTOR(factor)};
  const size_t whole = job->bytes - job->bytes % VECTOR;
  const size_t held = job->rows < ROWS_HELD ? job->rows : ROWS_HELD;
  uint8_t *scratch = malloc(held * 2 * STRIP);
  int status = LETO_EC_OK;
  if (scratch == NULL) return LETO_EC_NO_MEMORY;
  /* The tail goes first: it may fail for want of memory, and then nothing was written. */
  if (whole < job->bytes) status = tail(job, whole, &k, scratch);
  for (size_t at = 0; at < whole && status == LETO_EC_OK; at += STRIP) {
    const size_t bytes = whole - at < STRIP ? whole - at : STRIP;
    for (size_t row = 0; row < job->rows; row += ROWS_HELD)
      strip(job, row, job->rows - row < ROWS_HELD ? job->rows - row : ROWS_HELD, at, bytes, scratch, &k);
  }
  free(scratch);
  return status;
}

#endif
