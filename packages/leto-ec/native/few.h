/* Combinations of few pages, as when a page changed: every row takes each page times one coefficient.
 *
 * Then the rows' memory is what counts, and planes.h would spend more on turning rows to planes and back than on the
 * products. Here a vector keeps its words to itself: GROUP brings byte k of all its words into its quarter k. With
 * the vector turned by n quarters, one affine transformation, whose quarter o holds the bit matrix that takes byte
 * (o + n) & 3 to byte o, is a quarter of the product of all words; four of them are the product. Turned vectors
 * are made once and serve all rows; a row is one stream of loads and stores, a strip long, whose matrices stay in
 * registers.
 *
 * A file that includes this defines, beside what planes.h asks for,
 *   AFFINE                  type of a prepared coefficient with the member blocks[n][o]
 *   MATRICES(p)             quarter o becomes copies of the 64-bit value p[o]
 *   TRANSFORM(v, m)         the affine transformation
 *   GROUP(v) UNGROUP(v)     see above, and the inverse
 *   TURN(v, n)              quarter o becomes quarter (o + n) & 3; n is a constant
 */
#ifndef LETO_EC_FEW_H
#define LETO_EC_FEW_H

#include "kernel.h"

#define FEW 4           /* pages that are done together */
#define FEW_BYTES 16384 /* of turned vectors at a time: they share the first-level cache with a row */

INLINE void few_prepare(const uint8_t *page, uint8_t *turned, size_t bytes) {
  for (size_t at = 0; at < bytes; at += sizeof(V), turned += 4 * sizeof(V)) {
    const V v = GROUP(LOAD(page + at));
    STORE(turned, v);
    STORE(turned + sizeof(V), TURN(v, 1));
    STORE(turned + 2 * sizeof(V), TURN(v, 2));
    STORE(turned + 3 * sizeof(V), TURN(v, 3));
  }
}

/* output = base ^ sum over `columns` (a constant) of factors[column * stride] times a page; next: what to fetch. */
INLINE void few_row(const size_t columns, const uint8_t *turned, size_t bytes, const AFFINE *factors, size_t stride,
                    const uint8_t *base, uint8_t *output, const uint8_t *next) {
  V matrices[FEW][4];
#pragma GCC unroll 4
  for (size_t c = 0; c < columns; c++)
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++) matrices[c][n] = MATRICES(factors[c * stride].blocks[n]);
  for (size_t at = 0; at < bytes; at += sizeof(V)) {
    V sum = ZERO;
#pragma GCC unroll 4
    for (size_t c = 0; c < columns; c++) {
      const uint8_t *v = turned + 4 * (c * bytes + at);
      const V a = TRANSFORM(LOAD(v), matrices[c][0]), b = TRANSFORM(LOAD(v + sizeof(V)), matrices[c][1]);
      const V d = TRANSFORM(LOAD(v + 2 * sizeof(V)), matrices[c][2]);
      const V e = TRANSFORM(LOAD(v + 3 * sizeof(V)), matrices[c][3]);
      sum = c == 0 ? XOR(XOR3(a, b, d), e) : XOR3(XOR3(sum, a, b), d, e);
    }
    sum = UNGROUP(sum);
    if (base != NULL) sum = XOR(sum, LOAD(base + at));
    if (at % 64 == 0) __builtin_prefetch(next + at, 1);
    STORE(output + at, sum);
  }
}

static void few(const struct leto_ec_strip *s) {
  for (size_t first = 0; first < s->columns; first += FEW) {
    const size_t columns = s->columns - first < FEW ? s->columns - first : FEW, most = FEW_BYTES / 4 / columns / STEP * STEP;
    for (size_t from = 0; from < s->bytes; from += most) {
      const size_t bytes = s->bytes - from < most ? s->bytes - from : most, at = s->at + from;
      for (size_t c = 0; c < columns; c++) {
        const uint8_t *page = s->inputs[first + c] != NULL ? s->inputs[first + c] + at : leto_ec_zeros;
        few_prepare(page, s->scratch + 4 * c * bytes, bytes);
      }
      for (size_t r = 0; r < s->rows; r++) {
        if (s->outputs[r] == NULL) continue;
        const uint8_t *base = first > 0 ? s->outputs[r] : s->base != NULL ? s->base[r] : NULL;
        const uint8_t *next = r + 1 < s->rows && s->outputs[r + 1] != NULL ? s->outputs[r + 1] + at : leto_ec_zeros;
        const AFFINE *f = (const AFFINE *)(const void *)s->factors + first * s->rows + r;
        if (base != NULL) base += at;
        switch (columns) {
          case 1: few_row(1, s->scratch, bytes, f, s->rows, base, s->outputs[r] + at, next); break;
          case 2: few_row(2, s->scratch, bytes, f, s->rows, base, s->outputs[r] + at, next); break;
          case 3: few_row(3, s->scratch, bytes, f, s->rows, base, s->outputs[r] + at, next); break;
          default: few_row(4, s->scratch, bytes, f, s->rows, base, s->outputs[r] + at, next); break;
        }
      }
    }
  }
}

#endif
