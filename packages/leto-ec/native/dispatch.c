/* The exported functions, and the choice of a kernel by name. */
#include "leto_ec.h"

#include <stdlib.h>
#include <string.h>

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

/* The kernel of this name, if it can run here (rather than an illegal instruction). */
static const struct leto_ec_kernel *kernel_named(const char *name) {
  for (size_t i = 0; name != NULL && i < KERNELS; i++)
    if (strcmp(kernels[i]->name, name) == 0)
      return kernels[i]->product != NULL && kernels[i]->supported() ? kernels[i] : NULL;
  return NULL;
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

int leto_ec_prepare(const char *name, size_t blocks, const uint32_t *coefficients, uint8_t *prepared) {
  const struct leto_ec_kernel *kernel = kernel_named(name);
  if (kernel == NULL) return LETO_EC_UNKNOWN_KERNEL;
  for (size_t b = 0; b < blocks; b++) kernel->prepare_block(coefficients + b * BLOCK, prepared + b * kernel->block);
  return LETO_EC_OK;
}

static int arguments(size_t bytes, size_t threads) {
  return bytes % 4 == 0 && threads >= 1 && threads <= LETO_EC_MOST_THREADS;
}

int leto_ec_product(const char *name, size_t blocks, size_t bytes, const uint8_t *prepared, const uint8_t *final,
                    const uint8_t *const *inputs, const uint8_t *const *base, uint8_t *const *outputs,
                    size_t threads) {
  const struct leto_ec_kernel *kernel = kernel_named(name);
  if (kernel == NULL) return LETO_EC_UNKNOWN_KERNEL;
  if (!arguments(bytes, threads)) return LETO_EC_BAD_ARGUMENT;
  const struct leto_ec_job job = {
      kernel, kernel->product,
      {.bytes = bytes, .rows = BLOCK, .columns = blocks * BLOCK, .factors = prepared, .final = final,
       .inputs = inputs, .base = base, .outputs = outputs},
      threads};
  return leto_ec_drive(&job);
}

int leto_ec_combine(const char *name, size_t rows, size_t columns, size_t bytes, const uint32_t *coefficients,
                    const uint8_t *const *inputs, const uint8_t *const *base, uint8_t *const *outputs,
                    size_t threads) {
  const struct leto_ec_kernel *kernel = kernel_named(name);
  uint8_t *factors = NULL;
  if (kernel == NULL) return LETO_EC_UNKNOWN_KERNEL;
  if (!arguments(bytes, threads)) return LETO_EC_BAD_ARGUMENT;
  if (rows == 0 || bytes == 0) return LETO_EC_OK;
  if (kernel->factor != 0 && columns != 0) {
    if (columns > SIZE_MAX / rows / kernel->factor) return LETO_EC_BAD_ARGUMENT;
    factors = malloc(rows * columns * kernel->factor);
    if (factors == NULL) return LETO_EC_NO_MEMORY;
    for (size_t k = 0; k < columns; k++)
      for (size_t r = 0; r < rows; r++)
        kernel->prepare_factor(coefficients[r * columns + k], factors + (k * rows + r) * kernel->factor);
  }
  const struct leto_ec_job job = {
      kernel, kernel->combine,
      {.bytes = bytes, .rows = rows, .columns = columns, .coefficients = coefficients, .factors = factors,
       .inputs = inputs, .base = base, .outputs = outputs},
      threads};
  const int status = leto_ec_drive(&job);
  free(factors);
  return status;
}
