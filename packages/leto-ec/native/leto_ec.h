/* Interface of the native kernels of leto_ec: a plain C library, called through ctypes (leto_ec/_native.py).
 *
 * All functions may be called by any number of threads at once; the library keeps no state.
 */
#ifndef LETO_EC_H
#define LETO_EC_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define LETO_EC_EXPORT __attribute__((visibility("default")))
#elif defined(_WIN32)
#define LETO_EC_EXPORT __declspec(dllexport)
#else
#define LETO_EC_EXPORT
#endif

/* Raise it with every change of what is declared here, together with ABI in _native.py. */
#define LETO_EC_ABI 1u

enum leto_ec_status {
  LETO_EC_OK = 0,
  LETO_EC_NO_MEMORY = 1,
  LETO_EC_UNKNOWN_KERNEL = 2,
  LETO_EC_BAD_ARGUMENT = 3
};

LETO_EC_EXPORT uint32_t leto_ec_abi(void);

/* Names of the kernels in this library, fastest first; NULL past the end. */
LETO_EC_EXPORT const char *leto_ec_kernel_name(uint32_t index);

/* 1 if this processor and operating system can run the kernel. */
LETO_EC_EXPORT int leto_ec_kernel_supported(uint32_t index);

/* outputs[r] = base[r] ^ sum over k of coefficients[r * columns + k] * inputs[k] in GF(2^32), for `bytes`
 * bytes each (a multiple of 4). base may be NULL (zero) or equal outputs. Apart from that, outputs must
 * not overlap one another or anything else. No address needs to be aligned. */
LETO_EC_EXPORT int leto_ec_combine(const char *kernel, size_t rows, size_t columns, size_t bytes,
                                   const uint32_t *coefficients, const uint8_t *const *inputs,
                                   const uint8_t *const *base, uint8_t *const *outputs);

#endif
