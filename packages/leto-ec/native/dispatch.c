/* The exported functions, and the choice of a kernel by name. */
#include "leto_ec.h"

#include <string.h>

#include "kernel.h"

static const struct leto_ec_kernel *const kernels[] = {&leto_ec_vpclmul, &leto_ec_pclmul, &leto_ec_portable};

#define KERNELS (sizeof kernels / sizeof kernels[0])

/* Kernels that were not compiled in do not count. */
static const struct leto_ec_kernel *kernel_at(uint32_t index) {
  for (size_t i = 0; i < KERNELS; i++)
    if (kernels[i]->combine != NULL && index-- == 0) return kernels[i];
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

int leto_ec_combine(const char *name, size_t rows, size_t columns, size_t bytes,
                    const uint32_t *coefficients, const uint8_t *const *inputs,
                    const uint8_t *const *base, uint8_t *const *outputs) {
  const struct leto_ec_job job = {rows, columns, bytes, coefficients, inputs, base, outputs};
  if (bytes % 4 != 0 || name == NULL) return LETO_EC_BAD_ARGUMENT;
  if (rows == 0 || bytes == 0) return LETO_EC_OK;
  for (uint32_t i = 0; kernel_at(i) != NULL; i++) {
    const struct leto_ec_kernel *kernel = kernel_at(i);
    if (strcmp(kernel->name, name) != 0) continue;
    if (!kernel->supported()) return LETO_EC_UNKNOWN_KERNEL; /* rather than an illegal instruction */
    return kernel->combine(&job);
  }
  return LETO_EC_UNKNOWN_KERNEL;
}
