/* Fuzz target of the native kernels: sizes, offsets, strides, absent pages, unwanted rows, aliasing and threads are
 * taken from the input; results are compared with schoolbook arithmetic, and every buffer is an allocation of its own,
 * so that the address sanitizer sees a byte too far.
 *
 * With libFuzzer (run.py builds it): coverage-guided. With -DSTANDALONE: a main that runs pseudo-random inputs, for
 * compilers and machines without libFuzzer. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../native/leto_ec.h"

static const uint32_t tail = 0x400007;

static uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (; b != 0; b >>= 1) {
    if (b & 1) product ^= a;
    a = (a << 1) ^ (a >> 31 ? tail : 0);
  }
  return product;
}

static uint32_t inverse(uint32_t a) { /* a^(2^32 - 2) */
  uint32_t result = 1;
  for (int i = 0; i < 31; i++) {
    a = multiply(a, a);
    result = multiply(result, a);
  }
  return result;
}

static void dyadic(uint32_t coset, uint32_t f[16]) {
  for (uint32_t u = 0; u < 16; u++) f[u] = (coset ^ u) != 0 ? inverse(coset ^ u) : 0;
  for (int l = 1; l < 16; l <<= 1)
    for (int m = 0; m < 16; m++)
      if (!(m & l)) f[m] ^= f[m | l];
}

/* Polynomial W_l at x, straight from its definition: the product of x ^ v over v < 2^l. */
static uint32_t vanishing(int level, uint32_t x) {
  uint32_t product = 1;
  for (uint32_t v = 0; v < 1u << level; v++) product = multiply(product, x ^ v);
  return product;
}

static void fft(uint32_t coset, uint32_t f[16]) {
  int at = 0;
  for (int level = 0; level < 4; level++)
    for (uint32_t g = 0; g < 16; g += 2u << level)
      f[at++] = multiply(vanishing(level, coset ^ g), inverse(vanishing(level, 1u << level)));
  uint32_t spread = 1;
  for (uint32_t v = 1; v < 16; v++) spread = multiply(spread, v);
  f[15] = coset != 0 ? multiply(spread, inverse(vanishing(4, coset))) : 0;
}

struct source {
  const uint8_t *data;
  size_t size;
  uint32_t state;
};

static uint32_t take(struct source *s, uint32_t below) { /* from the input, and zeros after its end */
  uint32_t value = 0;
  for (int i = 0; i < 2; i++)
    if (s->size > 0) {
      value = value << 8 | *s->data++;
      s->size--;
    }
  return value % below;
}

static uint32_t noise(struct source *s) {
  s->state ^= s->state << 13;
  s->state ^= s->state >> 17;
  s->state ^= s->state << 5;
  return s->state & 7 ? s->state : s->state & 8 ? 0xffffffffu : 0x80000000u;
}

/* `bytes` bytes at an address that is `shift` off alignment, in an allocation that ends with them. */
static uint8_t *buffer(struct source *s, size_t bytes, size_t shift, void **memory) {
  uint8_t *all = malloc(bytes + shift);
  if (all == NULL) abort();
  *memory = all;
  for (size_t i = 0; i < bytes; i++) all[shift + i] = (uint8_t)noise(s);
  return all + shift;
}

static uint32_t word(const uint8_t *page, size_t at) {
  uint32_t value;
  memcpy(&value, page + 4 * at, 4);
  return value;
}

#define MOST_COLUMNS 96
#define MOST_ROWS 40

static void require(int condition, const char *what, const char *kernel) {
  if (condition) return;
  fprintf(stderr, "kernel %s: %s\n", kernel, what);
  abort();
}

/* leto_ec_update: rows with gaps in one allocation, coefficients with gaps. */
static void fuzz_update(struct source *s, uint32_t index, const char *kernel) {
  const size_t rows = 1 + take(s, LETO_EC_MOST_ROWS), words = take(s, 4) ? take(s, 300) : take(s, 9000), bytes = 4 * words;
  const size_t threads = 1 + take(s, 4), step = 1 + take(s, 3), gap = take(s, 70), stride = bytes + gap;
  void *memory[3];
  s->state = 1 + take(s, 65535);
  uint8_t *delta = buffer(s, bytes, take(s, 17), &memory[0]), *parity = buffer(s, rows * stride - gap, take(s, 17), &memory[1]);
  uint32_t *coefficients = calloc(rows * step, sizeof *coefficients);
  uint8_t *before = malloc(rows * stride + 1);
  if (coefficients == NULL || before == NULL) abort();
  for (size_t i = 0; i < rows * step; i++) coefficients[i] = noise(s);
  memcpy(before, parity, rows * stride - gap);
  require(leto_ec_update(index, threads, rows, bytes, coefficients, step, delta, parity, stride) == LETO_EC_OK, "status", kernel);
  for (size_t r = 0; r < rows; r++) {
    for (size_t w = 0; w < words; w += 1 + words * rows / 20000) {
      const uint32_t product = multiply(coefficients[r * step], word(delta, w));
      require(word(parity + r * stride, w) == (word(before + r * stride, w) ^ product), "wrong word of an update", kernel);
    }
    if (r + 1 < rows)
      require(memcmp(parity + r * stride + bytes, before + r * stride + bytes, gap) == 0, "a gap was written", kernel);
  }
  free(memory[0]);
  free(memory[1]);
  free(coefficients);
  free(before);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  struct source s = {data, size, 2463534242u};
  const char *kernel;
  uint32_t kernels = 0;
  while (leto_ec_kernel_name(kernels) != NULL) kernels++;
  const uint32_t index = take(&s, kernels);
  kernel = leto_ec_kernel_name(index);
  if (!leto_ec_kernel_supported(index)) return 0;
  const uint32_t kind = take(&s, 6); /* a product, a matrix (as it is or prepared), old and new contents, an update */
  if (kind == 5) {
    fuzz_update(&s, index, kernel);
    return 0;
  }
  const int blocks_wanted = kind < 2, planned = kind == 3, changed = kind == 4;
  const size_t columns = blocks_wanted ? 16 * take(&s, 7) : changed ? 1 + take(&s, 2) : take(&s, MOST_COLUMNS + 1);
  const size_t rows = blocks_wanted ? 16 : 1 + take(&s, MOST_ROWS);
  const size_t words = take(&s, 4) ? take(&s, 300) : take(&s, 9000), bytes = 4 * words;
  const size_t threads = 1 + take(&s, 4), shift = take(&s, 17);
  const int base_is = (int)take(&s, 4); /* none, separate, outputs, some missing */
  const uint32_t absent = take(&s, 5), unwanted = take(&s, 5);
  s.state = 1 + take(&s, 65535);

  void *memory[2 * MOST_ROWS + MOST_COLUMNS] = {0};
  size_t count = 0;
  const uint8_t *inputs[MOST_COLUMNS + 1];
  const uint8_t *base[MOST_ROWS];
  uint8_t *outputs[MOST_ROWS];
  uint32_t *matrix = calloc(rows * (columns + 1), sizeof *matrix), *expected = malloc(rows * (bytes + 4));
  if (matrix == NULL || expected == NULL) abort();
  for (size_t k = 0; k < columns; k++)
    inputs[k] = absent != 0 && noise(&s) % 5 < absent ? NULL : buffer(&s, bytes, k % 3 ? shift : 0, &memory[count++]);
  for (size_t r = 0; r < rows; r++) {
    outputs[r] = buffer(&s, bytes, shift, &memory[count++]);
    base[r] = base_is == 2 ? outputs[r] : base_is == 0 ? NULL : buffer(&s, bytes, 1, &memory[count++]);
    if (base_is == 3 && noise(&s) & 1) base[r] = NULL;
    if (unwanted != 0 && noise(&s) % 5 < unwanted) outputs[r] = NULL;
  }
  const size_t blocks = columns / 16;
  uint32_t coefficients[7 * 16], final[16];
  if (blocks_wanted) {
    const int basis = leto_ec_kernel_basis(index);
    for (size_t b = 0; b < blocks; b++) {
      uint32_t coset = 16 * (noise(&s) >> (4 + noise(&s) % 20));
      if (coset == 0) coset = 16;
      (basis == LETO_EC_FFT ? fft : dyadic)(coset, coefficients + 16 * b);
      for (uint32_t r = 0; r < 16; r++)
        for (uint32_t k = 0; k < 16; k++) matrix[r * columns + 16 * b + k] = inverse(coset ^ r ^ k);
    }
    (basis == LETO_EC_FFT ? fft : dyadic)(0, final);
  } else {
    for (size_t i = 0; i < rows * columns; i++) matrix[i] = changed && i % columns ? matrix[i - 1] : noise(&s);
  }
  /* a word or all: the schoolbook is slow */
  const size_t step = 1 + words * rows * columns / 20000;
  for (size_t r = 0; r < rows; r++)
    for (size_t w = 0; w < words; w += step) {
      uint32_t sum = base[r] != NULL ? word(base[r], w) : 0;
      for (size_t k = 0; k < columns; k++)
        if (inputs[k] != NULL) sum ^= multiply(matrix[r * columns + k], word(inputs[k], w));
      expected[r * (words + 1) + w] = sum;
    }
  int status;
  struct leto_ec_work work = {.kernel = index, .threads = threads, .blocks = blocks_wanted ? blocks : 0, .rows = rows,
                              .columns = columns, .bytes = bytes, .coefficients = matrix, .inputs = inputs,
                              .base = base_is ? base : NULL, .outputs = outputs};
  if (blocks_wanted && blocks != 0) {
    const size_t size_of_block = leto_ec_kernel_block_bytes(index);
    uint8_t *prepared = malloc(blocks * size_of_block + 1), *prepared_final = malloc(size_of_block);
    if (prepared == NULL || prepared_final == NULL) abort();
    require(leto_ec_prepare(index, blocks, coefficients, prepared) == LETO_EC_OK, "prepare", kernel);
    require(leto_ec_prepare(index, 1, final, prepared_final) == LETO_EC_OK, "prepare", kernel);
    work.prepared = prepared;
    work.final = prepared_final;
    status = leto_ec_run(&work, 1);
    free(prepared);
    free(prepared_final);
  } else {
    uint8_t *prepared = NULL; /* half of the time: in a plan, coefficients are prepared beforehand */
    const size_t size_of_matrix = leto_ec_matrix_bytes(index, rows, columns);
    if (planned && size_of_matrix != 0) {
      prepared = malloc(size_of_matrix);
      if (prepared == NULL) abort();
      require(leto_ec_prepare_matrix(index, rows, columns, matrix, prepared) == LETO_EC_OK, "prepare", kernel);
      work.prepared = prepared;
    }
    status = leto_ec_run(&work, 1);
    free(prepared);
  }
  require(status == LETO_EC_OK, "status", kernel);
  for (size_t r = 0; r < rows; r++)
    for (size_t w = 0; w < words && outputs[r] != NULL; w += step)
      require(word(outputs[r], w) == expected[r * (words + 1) + w], "wrong word", kernel);
  for (size_t i = 0; i < count; i++) free(memory[i]);
  free(matrix);
  free(expected);
  return 0;
}

#ifdef STANDALONE
int main(int argc, char **argv) {
  const uint32_t seed = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 0) : 1;
  const long runs = argc > 2 ? strtol(argv[2], NULL, 0) : 1000;
  uint32_t state = seed != 0 ? seed : 1;
  for (uint32_t i = 0; leto_ec_kernel_name(i) != NULL; i++)
    printf("%s%s ", leto_ec_kernel_name(i), leto_ec_kernel_supported(i) ? "" : " (not here)");
  printf("\nseed %u, %ld runs\n", seed, runs);
  for (long run = 0; run < runs; run++) {
    uint8_t input[32];
    for (size_t i = 0; i < sizeof input; i++) {
      state = state * 1664525u + 1013904223u;
      input[i] = (uint8_t)(state >> 24);
    }
    LLVMFuzzerTestOneInput(input, sizeof input);
  }
  printf("no difference\n");
  return 0;
}
#endif
