/* The exported functions, and the choice of a kernel by name. */
#include "leto_ec.h"

#include <stdlib.h>

#include "kernel.h"

static const struct leto_ec_kernel *const kernels[] = {
    &leto_ec_gfni, &leto_ec_vpclmul, &leto_ec_gfni_256, &leto_ec_vpclmul_256, &leto_ec_avx2,
    &leto_ec_pclmul, &leto_ec_neon, &leto_ec_portable};

#define KERNELS (sizeof kernels / sizeof kernels[0])

/* Kernels that were not compiled in do not count. */
static const struct leto_ec_kernel *kernel_at(uint32_t index) {
  for (size_t i = 0; i < KERNELS; i++)
    if (kernels[i]->product != NULL && index-- == 0) return kernels[i];
  return NULL;
}

/* The kernel at this index, if it can run here (rather than an illegal instruction). */
static const struct leto_ec_kernel *usable(uint64_t index) {
  const struct leto_ec_kernel *kernel = index < KERNELS ? kernel_at((uint32_t)index) : NULL;
  return kernel != NULL && kernel->supported() ? kernel : NULL;
}

/* Who combines so many columns for this kernel. */
static const struct leto_ec_kernel *combiner(const struct leto_ec_kernel *kernel, size_t columns) {
  return kernel->many == NULL || (columns >= 1 && columns <= kernel->most) ? kernel : kernel->many;
}

uint32_t leto_ec_abi(void) { return LETO_EC_ABI; }

const char *leto_ec_kernel_name(uint32_t index) {
  const struct leto_ec_kernel *kernel = kernel_at(index);
  return kernel == NULL ? NULL : kernel->name;
}

int leto_ec_kernel_supported(uint32_t index) {
  const struct leto_ec_kernel *kernel = kernel_at(index);
  return kernel != NULL && kernel->supported();
}

int leto_ec_kernel_basis(uint32_t index) {
  const struct leto_ec_kernel *kernel = kernel_at(index);
  return kernel == NULL ? -1 : kernel->basis;
}

size_t leto_ec_kernel_block_bytes(uint32_t index) {
  const struct leto_ec_kernel *kernel = kernel_at(index);
  return kernel == NULL ? 0 : kernel->block;
}

size_t leto_ec_kernel_block_cost(uint32_t index) {
  const struct leto_ec_kernel *kernel = kernel_at(index);
  return kernel == NULL ? 0 : kernel->block_cost;
}

size_t leto_ec_kernel_product_cost(uint32_t index) {
  const struct leto_ec_kernel *kernel = kernel_at(index);
  return kernel == NULL ? 0 : kernel->product_cost;
}

int leto_ec_prepare(uint32_t index, size_t blocks, const uint32_t *coefficients, uint8_t *prepared) {
  const struct leto_ec_kernel *kernel = usable(index);
  if (kernel == NULL) return LETO_EC_UNKNOWN_KERNEL;
  for (size_t b = 0; b < blocks; b++) kernel->prepare_block(coefficients + b * BLOCK, prepared + b * kernel->block);
  return LETO_EC_OK;
}

size_t leto_ec_matrix_bytes(uint32_t index, size_t rows, size_t columns) {
  const struct leto_ec_kernel *kernel = usable(index);
  return kernel == NULL ? 0 : rows * columns * combiner(kernel, columns)->factor;
}

/* Column by column, as kernels read them. */
static void prepare_matrix(const struct leto_ec_kernel *kernel, size_t rows, size_t columns, const uint32_t *coefficients,
                           uint8_t *prepared) {
  for (size_t k = 0; k < columns; k++)
    for (size_t r = 0; r < rows; r++, prepared += kernel->factor)
      kernel->prepare_factor(coefficients[r * columns + k], prepared);
}

int leto_ec_prepare_matrix(uint32_t index, size_t rows, size_t columns, const uint32_t *coefficients,
                           uint8_t *prepared) {
  const struct leto_ec_kernel *kernel = usable(index);
  if (kernel == NULL) return LETO_EC_UNKNOWN_KERNEL;
  kernel = combiner(kernel, columns);
  if (kernel->factor != 0) prepare_matrix(kernel, rows, columns, coefficients, prepared);
  return LETO_EC_OK;
}

/* Any matrix. */
static int combine(const struct leto_ec_kernel *kernel, struct leto_ec_strip all, size_t threads) {
  uint8_t *prepared = NULL;
  if (all.rows == 0 || all.bytes == 0) return LETO_EC_OK;
  kernel = combiner(kernel, all.columns);
  if (kernel->factor != 0 && all.columns != 0 && all.factors == NULL) {
    if (all.columns > SIZE_MAX / all.rows / kernel->factor) return LETO_EC_BAD_ARGUMENT;
    prepared = malloc(all.rows * all.columns * kernel->factor);
    if (prepared == NULL) return LETO_EC_NO_MEMORY;
    prepare_matrix(kernel, all.rows, all.columns, all.coefficients, prepared);
    all.factors = prepared;
  }
  const struct leto_ec_job job = {kernel, kernel->combine, all, threads};
  const int status = leto_ec_drive(job);
  free(prepared);
  return status;
}

static int run(const struct leto_ec_work *work) {
  const struct leto_ec_kernel *kernel = usable(work->kernel);
  if (kernel == NULL) return LETO_EC_UNKNOWN_KERNEL;
  if (work->bytes % 4 != 0 || work->threads < 1 || work->threads > LETO_EC_MOST_THREADS) return LETO_EC_BAD_ARGUMENT;
  const struct leto_ec_strip all = {
      .bytes = work->bytes, .rows = work->rows, .columns = work->columns, .coefficients = work->coefficients,
      .factors = work->prepared, .final = work->final, .inputs = work->inputs, .base = work->base,
      .outputs = work->outputs};
  if (work->blocks == 0) return combine(kernel, all, work->threads);
  if (work->rows != BLOCK || work->columns / BLOCK != work->blocks || work->columns % BLOCK != 0)
    return LETO_EC_BAD_ARGUMENT;
  const struct leto_ec_job job = {kernel, kernel->product, all, work->threads};
  return leto_ec_drive(job);
}

int leto_ec_run(const struct leto_ec_work *work, size_t count) {
  int status = LETO_EC_OK;
  for (size_t i = 0; i < count && status == LETO_EC_OK; i++) status = run(&work[i]);
  return status;
}

int leto_ec_update(uint32_t index, size_t threads, size_t rows, size_t bytes, const uint32_t *coefficients, size_t step,
                   const uint8_t *delta, uint8_t *parity, size_t stride) {
  uint32_t column[LETO_EC_MOST_ROWS];
  uint8_t *addresses[LETO_EC_MOST_ROWS];
  if (usable(index) == NULL) return LETO_EC_UNKNOWN_KERNEL;
  if (rows > LETO_EC_MOST_ROWS) return LETO_EC_BAD_ARGUMENT;
  for (size_t r = 0; r < rows; r++) {
    column[r] = coefficients[r * step];
    addresses[r] = parity + r * stride;
  }
  const struct leto_ec_work work = {
      .kernel = index, .threads = threads, .rows = rows, .columns = 1, .bytes = bytes, .coefficients = column,
      .inputs = &delta, .base = (const uint8_t *const *)addresses, .outputs = addresses};
  return run(&work);
}
