/* Combinations of few pages, as when a page changed: every row takes each page times one coefficient.
 *
 * Then the rows' memory is what counts, and planes.h would spend more on turning rows to planes and back than on the
 * products. Here a vector keeps its words to itself: GROUP brings byte k of all its words into its quarter k. With
 * the vector turned by n quarters, one affine transformation, whose quarter o holds the bit matrix that takes byte
 * (o + n) & 3 to byte o, is a quarter of the product of all words; four of them are the product. Turned vectors
 * are made once and serve all rows; a row is one stream of loads and stores, a strip long, whose matrices stay in
 * registers, those of several rows where there is room: then a turned vector is loaded once for them.
 *
 * Two pages with the same coefficients are the old and the new contents of one: they are added first and are one.
 *
 * A file that includes this defines, beside what planes.h asks for,
 *   AFFINE                  type of a prepared coefficient with the member blocks[n][o]
 *   MATRICES(p)             quarter o becomes copies of the 64-bit value p[o]
 *   TRANSFORM(v, m)         the affine transformation
 *   GROUP(v) UNGROUP(v)     see above, and the inverse
 *   TURN(v, n)              quarter o becomes quarter (o + n) & 3; n is a constant
 *   ROOM                    rows of one page whose matrices, 4 vectors each, fit the registers: 4 or 2
 */
#ifndef LETO_EC_FEW_H
#define LETO_EC_FEW_H

#include "kernel.h"

#define FEW 4           /* pages that are done together, and at most */
#define FEW_BYTES 16384 /* of turned vectors at a time: they share the first-level cache with the rows */

/* plus: another page, to be added, or NULL */
INLINE void few_prepare(const uint8_t *page, const uint8_t *plus, uint8_t *turned, size_t bytes) {
  for (size_t at = 0; at < bytes; at += sizeof(V), turned += 4 * sizeof(V)) {
    const V v = GROUP(plus == NULL ? LOAD(page + at) : XOR(LOAD(page + at), LOAD(plus + at)));
    STORE(turned, v);
    STORE(turned + sizeof(V), TURN(v, 1));
    STORE(turned + 2 * sizeof(V), TURN(v, 2));
    STORE(turned + 3 * sizeof(V), TURN(v, 3));
  }
}

/* Rows that are done together. */
struct few_rows {
  const AFFINE *factors[ROOM]; /* of the first page; those of the others follow `stride` apart */
  const uint8_t *base[ROOM], *next[ROOM]; /* next: what to fetch */
  uint8_t *output[ROOM];
};

/* output = base ^ sum over pages of factor times page, for `bytes` of `rows` rows; pages, rows and fetch are constants. */
INLINE void few_part(const size_t pages, const size_t rows, const int fetch, const uint8_t *turned, size_t bytes,
                     size_t stride, const struct few_rows *s) {
  V matrices[ROOM][FEW][4];
#pragma GCC unroll 4
  for (size_t r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (size_t p = 0; p < pages; p++)
#pragma GCC unroll 4
      for (int n = 0; n < 4; n++) matrices[r][p][n] = MATRICES(s->factors[r][p * stride].blocks[n]);
  for (size_t at = 0; at < bytes; at += sizeof(V)) {
    V sum[ROOM];
#pragma GCC unroll 4
    for (size_t p = 0; p < pages; p++) {
      const uint8_t *v = turned + 4 * (p * bytes + at);
      const V turn[4] = {LOAD(v), LOAD(v + sizeof(V)), LOAD(v + 2 * sizeof(V)), LOAD(v + 3 * sizeof(V))};
#pragma GCC unroll 4
      for (size_t r = 0; r < rows; r++) {
        const V a = TRANSFORM(turn[0], matrices[r][p][0]), b = TRANSFORM(turn[1], matrices[r][p][1]);
        const V c = TRANSFORM(turn[2], matrices[r][p][2]), d = TRANSFORM(turn[3], matrices[r][p][3]);
        sum[r] = p == 0 ? XOR(XOR3(a, b, c), d) : XOR3(XOR3(sum[r], a, b), c, d);
      }
    }
    /* All loads before all stores: rows are often a multiple of 4 KiB apart, where a load waits for a store. */
#pragma GCC unroll 4
    for (size_t r = 0; r < rows; r++) sum[r] = XOR(UNGROUP(sum[r]), LOAD(s->base[r] + at));
    if (fetch && at % 64 == 0)
#pragma GCC unroll 4
      for (size_t r = 0; r < rows; r++) __builtin_prefetch(s->next[r] + at, 1);
#pragma GCC unroll 4
    for (size_t r = 0; r < rows; r++) STORE(s->output[r] + at, sum[r]);
  }
}

#define FEW_PART(pages, rows)                                               \
  do {                                                                      \
    if (fetch)                                                              \
      few_part(pages, rows, 1, turned, bytes, stride, s);                   \
    else                                                                    \
      few_part(pages, rows, 0, turned, bytes, stride, s);                   \
  } while (0)

static void few_alone(size_t pages, int fetch, const uint8_t *turned, size_t bytes, size_t stride,
                      const struct few_rows *s) {
  switch (pages) {
    case 1: FEW_PART(1, 1); break;
    case 2: FEW_PART(2, 1); break;
    case 3: FEW_PART(3, 1); break;
    default: FEW_PART(4, 1); break;
  }
}

static void few_together(size_t pages, int fetch, const uint8_t *turned, size_t bytes, size_t stride,
                         const struct few_rows *s) {
#if ROOM == 4
  if (pages == 2) {
    FEW_PART(2, 2);
    return;
  }
#endif
  (void)pages;
  FEW_PART(1, ROOM);
}

INLINE size_t few_at_once(size_t pages) { return pages <= ROOM ? ROOM / pages : 1; }

/* All rows of one portion of the pages, of `bytes` bytes from `at` on. */
static void few_portion(const struct leto_ec_strip *s, size_t pages, size_t at, size_t bytes) {
  const size_t together = few_at_once(pages);
  for (size_t row = 0; row < s->rows;) {
    struct few_rows now;
    size_t wanted[ROOM], count = 0;
    for (; count < together && row < s->rows; row++)
      if (s->outputs[row] != NULL) wanted[count++] = row;
    for (size_t i = 0; i < count; i++) {
      const size_t r = wanted[i], soon = row + i;
      now.factors[i] = (const AFFINE *)(const void *)s->factors + r;
      now.base[i] = s->base != NULL && s->base[r] != NULL ? s->base[r] + at : leto_ec_zeros;
      now.output[i] = s->outputs[r] + at;
      now.next[i] = soon < s->rows && s->outputs[soon] != NULL ? s->outputs[soon] + at : leto_ec_zeros;
    }
    if (count == together && together > 1) {
      few_together(pages, s->fetch, s->scratch, bytes, s->rows, &now);
      continue;
    }
    for (size_t i = 0; i < count; i++) {
      const struct few_rows one = {{now.factors[i]}, {now.base[i]}, {now.next[i]}, {now.output[i]}};
      few_alone(pages, s->fetch, s->scratch, bytes, s->rows, &one);
    }
  }
}

/* 1 to FEW columns. */
static void few(const struct leto_ec_strip *s) {
  const int change = s->columns == 2 && s->inputs[0] != NULL && s->inputs[1] != NULL &&
                     memcmp(s->factors, s->factors + s->rows * sizeof(AFFINE), s->rows * sizeof(AFFINE)) == 0;
  const size_t pages = change ? 1 : s->columns, most = FEW_BYTES / 4 / pages / STEP * STEP;
  for (size_t from = 0; from < s->bytes; from += most) {
    const size_t bytes = s->bytes - from < most ? s->bytes - from : most, at = s->at + from;
    for (size_t p = 0; p < pages; p++)
      few_prepare(leto_ec_page(s->inputs[p], at), change ? s->inputs[1] + at : NULL, s->scratch + 4 * p * bytes, bytes);
    few_portion(s, pages, at, bytes);
  }
}

#endif
