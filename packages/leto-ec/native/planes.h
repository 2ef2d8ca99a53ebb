/* The byte-plane kernels' common body: an additive FFT a block, products as 4 x 4 blocks of 8 x 8 bit matrices.
 *
 * A file that includes this defines, for its vector width,
 *   V                       the vector type
 *   LOAD(p) STORE(p, v)     unaligned
 *   ZERO, XOR(a, b)
 *   XOR3(a, b, c)
 *   LOW32(a, b) HIGH32(a, b) LOW64(a, b) HIGH64(a, b)  interleave the lower or upper halves of every 128-bit lane, in
 *                           units of 32 or 64 bits
 *   SHUFFLE(v, order)       the bytes of every lane in the order of an __m128i
 *   FACTOR                  type of a prepared coefficient
 *   PREPARE(c, factor)      make one
 *   MULTIPLY_ADD(a, e, f)   V a[4] ^= V e[4] times FACTOR *f
 *   AFFINE                  if it has what few.h asks for
 *   BLOCK_COST, PRODUCT_COST  measured: see kernel.h
 *   MANY                    who combines many pages; NULL without AFFINE
 *   NAME                    of the kernel, and `supported`, a function
 *
 * Multiplication by a constant is linear over GF(2): output byte o is the XOR over input bytes i of an 8 x 8 bit
 * matrix times byte i. Products come out reduced, so nothing is gained by being lazy, and a block takes the fewest
 * multiplications: 32 butterflies of the inverse FFT and 16 by the block's scale, 3 a word (theory: leto_ec.field).
 * The way back, one FFT of 16 points, is taken once, after the last block.
 *
 * Coefficients of a block: twiddle factors of level 0 (8 of them), 1 (4), 2 (2), 3 (1), then the scale.
 */
#ifndef LETO_EC_PLANES_H
#define LETO_EC_PLANES_H

#include <string.h>

#include "kernel.h"

#define STRIP 4096
#define PAGES 4  /* columns of a combination in a block */
#define ROWS 4   /* rows of a combination whose sums stay in registers together */
#define HELD 16  /* rows whose sums are in the scratch buffer */
#define STEP (4 * sizeof(V))
#define AHEAD 512 /* bytes between what a product reads and what it fetches into the cache: few at a time, all along */
#define SCALE (BLOCK - 1)

/* In every lane, the 4 x 4 transposition of its bytes: its own inverse. */
#define BYTES _mm_set_epi8(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0)

/* The 4 x 4 transposition of the 32-bit elements of four vectors, lane by lane. */
INLINE void transpose(V v[4]) {
  const V a = LOW32(v[0], v[1]), b = HIGH32(v[0], v[1]), c = LOW32(v[2], v[3]), d = HIGH32(v[2], v[3]);
  v[0] = LOW64(a, c);
  v[1] = HIGH64(a, c);
  v[2] = LOW64(b, d);
  v[3] = HIGH64(b, d);
}

#ifdef AFFINE
#include "few.h"
#endif

typedef struct {
  V plane[4]; /* plane k holds byte k of every word */
} element;

INLINE element zero(void) { return (element){{ZERO, ZERO, ZERO, ZERO}}; }

INLINE element load_words(const uint8_t *p) {
  element e = {{LOAD(p), LOAD(p + sizeof(V)), LOAD(p + 2 * sizeof(V)), LOAD(p + 3 * sizeof(V))}};
  for (int i = 0; i < 4; i++) e.plane[i] = SHUFFLE(e.plane[i], BYTES);
  transpose(e.plane);
  return e;
}

/* p[..] = e ^ base[..], as words */
INLINE void store_words(uint8_t *p, const uint8_t *base, element e) {
  transpose(e.plane);
  for (int i = 0; i < 4; i++) {
    e.plane[i] = SHUFFLE(e.plane[i], BYTES);
    if (base != NULL) e.plane[i] = XOR(e.plane[i], LOAD(base + i * sizeof(V)));
    STORE(p + i * sizeof(V), e.plane[i]);
  }
}

INLINE element load(const uint8_t *p) {
  return (element){{LOAD(p), LOAD(p + sizeof(V)), LOAD(p + 2 * sizeof(V)), LOAD(p + 3 * sizeof(V))}};
}

INLINE void store(uint8_t *p, element e) {
  for (int i = 0; i < 4; i++) STORE(p + i * sizeof(V), e.plane[i]);
}

INLINE void add(element *a, const element *b) {
  for (int i = 0; i < 4; i++) a->plane[i] = XOR(a->plane[i], b->plane[i]);
}

/* Values at two points -> coefficients, and back. */
INLINE void inverse_butterfly(element *u, element *v, const FACTOR *twiddle) {
  add(v, u);
  MULTIPLY_ADD(u->plane, v->plane, twiddle);
}

INLINE void butterfly(element *u, element *v, const FACTOR *twiddle) {
  MULTIPLY_ADD(u->plane, v->plane, twiddle);
  add(v, u);
}

static void prepare_factor(uint32_t coefficient, uint8_t *prepared) {
  FACTOR factor;
  PREPARE(coefficient, &factor);
  memcpy(prepared, &factor, sizeof factor);
}

static void prepare_block(const uint32_t coefficients[BLOCK], uint8_t *prepared) {
  for (int i = 0; i < BLOCK; i++) prepare_factor(coefficients[i], prepared + i * sizeof(FACTOR));
}

INLINE void fetch(const uint8_t *p) {
  for (size_t line = 0; line < STEP; line += 64) __builtin_prefetch(p + line);
}

/* sums[16 elements] ^= scale times the inverse FFT of one step of 16 pages; soon: what to fetch. */
INLINE void gather(const uint8_t *const pages[BLOCK], size_t at, const uint8_t *const soon[BLOCK], size_t there,
                   const FACTOR *f, uint8_t *sums, uint8_t *temporary) {
  for (int q = 0; q < 4; q++) {
    fetch(soon[2 * q] + there);
    fetch(soon[2 * q + 1] + there);
    element a = load_words(pages[4 * q] + at), b = load_words(pages[4 * q + 1] + at);
    inverse_butterfly(&a, &b, &f[2 * q]);
    element c = load_words(pages[4 * q + 2] + at), d = load_words(pages[4 * q + 3] + at);
    inverse_butterfly(&c, &d, &f[2 * q + 1]);
    inverse_butterfly(&a, &c, &f[8 + q]);
    inverse_butterfly(&b, &d, &f[8 + q]);
    store(temporary + (4 * q) * STEP, a);
    store(temporary + (4 * q + 1) * STEP, b);
    store(temporary + (4 * q + 2) * STEP, c);
    store(temporary + (4 * q + 3) * STEP, d);
  }
  for (int r = 0; r < 4; r++) {
    fetch(soon[8 + 2 * r] + there);
    fetch(soon[9 + 2 * r] + there);
    element a = load(temporary + r * STEP), b = load(temporary + (4 + r) * STEP);
    inverse_butterfly(&a, &b, &f[12]);
    element c = load(temporary + (8 + r) * STEP), d = load(temporary + (12 + r) * STEP);
    inverse_butterfly(&c, &d, &f[13]);
    inverse_butterfly(&a, &c, &f[14]);
    inverse_butterfly(&b, &d, &f[14]);
    const element all[4] = {a, b, c, d};
    for (int j = 0; j < 4; j++) {
      uint8_t *sum = sums + (r + 4 * j) * STEP;
      element s = load(sum);
      MULTIPLY_ADD(s.plane, all[j].plane, &f[SCALE]);
      store(sum, s);
    }
  }
}

/* The FFT of the sums: 16 rows of one step. */
INLINE void scatter(const struct leto_ec_strip *s, size_t at, const FACTOR *f, uint8_t *sums) {
  for (int r = 0; r < 4; r++) {
    element a = load(sums + r * STEP), b = load(sums + (4 + r) * STEP);
    element c = load(sums + (8 + r) * STEP), d = load(sums + (12 + r) * STEP);
    butterfly(&a, &c, &f[14]);
    butterfly(&b, &d, &f[14]);
    butterfly(&a, &b, &f[12]);
    butterfly(&c, &d, &f[13]);
    store(sums + r * STEP, a);
    store(sums + (4 + r) * STEP, b);
    store(sums + (8 + r) * STEP, c);
    store(sums + (12 + r) * STEP, d);
  }
  for (int q = 0; q < 4; q++) {
    element e[4];
    for (int j = 0; j < 4; j++) e[j] = load(sums + (4 * q + j) * STEP);
    butterfly(&e[0], &e[2], &f[8 + q]);
    butterfly(&e[1], &e[3], &f[8 + q]);
    butterfly(&e[0], &e[1], &f[2 * q]);
    butterfly(&e[2], &e[3], &f[2 * q + 1]);
    for (int j = 0; j < 4; j++) {
      const int r = 4 * q + j;
      if (s->outputs[r] == NULL) continue;
      const uint8_t *base = s->base != NULL && s->base[r] != NULL ? s->base[r] + s->at + at : NULL;
      store_words(s->outputs[r] + s->at + at, base, e[j]);
    }
  }
}

static void product(const struct leto_ec_strip *s) {
  uint8_t *const temporary = s->scratch, *const all = s->scratch + BLOCK * STEP;
  memset(all, 0, s->bytes * BLOCK);
  for (size_t b = 0; b < s->columns; b += BLOCK) {
    const FACTOR *f = (const FACTOR *)(const void *)(s->factors + b * sizeof(FACTOR));
    const uint8_t *pages[BLOCK], *next[BLOCK];
    for (size_t i = 0; i < BLOCK; i++) {
      pages[i] = leto_ec_page(s->inputs[b + i], s->at);
      next[i] = leto_ec_page(s->inputs[b + BLOCK < s->columns ? b + BLOCK + i : i], s->at);
      if (b + BLOCK >= s->columns && next[i] != leto_ec_zeros) next[i] += s->bytes;
    }
    uint8_t *sums = all;
    for (size_t at = 0; at < s->bytes; at += STEP, sums += BLOCK * STEP) {
      const uint8_t *const *soon = at + AHEAD < s->bytes ? pages : next;
      const size_t there = at + AHEAD < s->bytes ? at + AHEAD : at + AHEAD - s->bytes;
      gather(pages, at, soon, there, f, sums, temporary);
    }
  }
  uint8_t *sums = all;
  for (size_t at = 0; at < s->bytes; at += STEP, sums += BLOCK * STEP)
    scatter(s, at, (const FACTOR *)(const void *)s->final, sums);
}

#ifdef AFFINE

static void combine(const struct leto_ec_strip *s) { few(s); }

#define MOST FEW

#else

/* Columns first .. first + count into rows row .. row + rows (at most ROWS). */
INLINE void combine_rows(const struct leto_ec_strip *s, size_t first, size_t count, size_t row, const size_t rows,
                         uint8_t *held, int last) {
  const size_t ahead = row % HELD != 0 ? 0 : s->columns - first - count; /* the first rows fetch the next columns */
  for (size_t at = 0; at < s->bytes; at += STEP) {
    element sum[ROWS];
#pragma GCC unroll 4
    for (size_t r = 0; r < rows; r++) sum[r] = first == 0 ? zero() : load(held + r * STRIP + at);
    for (size_t p = first; p < first + count; p++) {
      if (p - first < ahead) fetch(leto_ec_page(s->inputs[p + count], s->at) + at);
      if (s->inputs[p] == NULL) continue;
      const element e = load_words(s->inputs[p] + s->at + at);
      const FACTOR *f = (const FACTOR *)(const void *)(s->factors + (p * s->rows + row) * sizeof(FACTOR));
#pragma GCC unroll 4
      for (size_t r = 0; r < rows; r++) MULTIPLY_ADD(sum[r].plane, e.plane, f + r);
    }
#pragma GCC unroll 4
    for (size_t r = 0; r < rows; r++) {
      const size_t index = row + r;
      if (!last)
        store(held + r * STRIP + at, sum[r]);
      else if (s->outputs[index] != NULL)
        store_words(s->outputs[index] + s->at + at,
                    s->base != NULL && s->base[index] != NULL ? s->base[index] + s->at + at : NULL, sum[r]);
    }
  }
}

static void combine(const struct leto_ec_strip *s) {
  for (size_t first_row = 0; first_row < s->rows; first_row += HELD) {
    const size_t end = s->rows - first_row < HELD ? s->rows : first_row + HELD;
    size_t done = 0;
    do {
      const size_t count = s->columns - done < PAGES ? s->columns - done : PAGES;
      const int last = done + count == s->columns;
      for (size_t row = first_row; row < end; row += ROWS) {
        uint8_t *held = s->scratch + (row - first_row) * STRIP;
        switch (end - row) {
          case 1: combine_rows(s, done, count, row, 1, held, last); break;
          case 2: combine_rows(s, done, count, row, 2, held, last); break;
          case 3: combine_rows(s, done, count, row, 3, held, last); break;
          default: combine_rows(s, done, count, row, 4, held, last); break;
        }
      }
      done += count;
    } while (done < s->columns);
  }
}

#define MOST 0

#endif

#define KERNEL                                                                                                 \
  {.name = NAME, .basis = LETO_EC_FFT, .granule = STEP, .strip = STRIP, .scratch = BLOCK * (STRIP + STEP),      \
   .block = BLOCK * sizeof(FACTOR), .factor = sizeof(FACTOR), .block_cost = BLOCK_COST,                         \
   .product_cost = PRODUCT_COST, .many = MANY, .most = MOST, .supported = supported,                            \
   .prepare_block = prepare_block, .prepare_factor = prepare_factor, .product = product, .combine = combine}

#endif
