/* Interface of the native kernels of leto_ec: a plain C library, called through ctypes (leto_ec/_native.py).
 *
 * All functions may be called by any number of threads at once; the library keeps no state between calls.
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
#define LETO_EC_ABI 3u

/* Pages of a block and rows of a product. */
#define LETO_EC_BLOCK 16

#define LETO_EC_MOST_THREADS 256
#define LETO_EC_MOST_ROWS 64

_Static_assert(sizeof(void *) == 8, "the interface passes addresses in fields of 64 bits");

enum leto_ec_status {
  LETO_EC_OK = 0,
  LETO_EC_NO_MEMORY = 1,
  LETO_EC_UNKNOWN_KERNEL = 2,
  LETO_EC_BAD_ARGUMENT = 3
};

/* What the 16 coefficients of a block are (leto_ec/_blocks.py computes them). */
enum leto_ec_basis {
  LETO_EC_DYADIC = 0, /* superset sums of 1 / (coset ^ u) */
  LETO_EC_FFT = 1     /* 15 twiddle factors of the inverse additive FFT on the coset, then the scale */
};

LETO_EC_EXPORT uint32_t leto_ec_abi(void);

/* Names of the kernels in this library, fastest first; NULL past the end. */
LETO_EC_EXPORT const char *leto_ec_kernel_name(uint32_t index);

/* 1 if this processor and operating system can run the kernel. */
LETO_EC_EXPORT int leto_ec_kernel_supported(uint32_t index);

/* Of a kernel by index: its enum leto_ec_basis; bytes of a prepared block; what a product costs, each block and all
 * the rest, in units of one coefficient times one page. */
LETO_EC_EXPORT int leto_ec_kernel_basis(uint32_t index);
LETO_EC_EXPORT size_t leto_ec_kernel_block_bytes(uint32_t index);
LETO_EC_EXPORT size_t leto_ec_kernel_block_cost(uint32_t index);
LETO_EC_EXPORT size_t leto_ec_kernel_product_cost(uint32_t index);

/* Turn the coefficients of `blocks` blocks (16 each) into what the kernel's product reads. */
LETO_EC_EXPORT int leto_ec_prepare(uint32_t kernel, size_t blocks, const uint32_t *coefficients, uint8_t *prepared);

/* The same for a combination: its bytes, 0 where the kernel takes coefficients as they are, and the work. */
LETO_EC_EXPORT size_t leto_ec_matrix_bytes(uint32_t kernel, size_t rows, size_t columns);
LETO_EC_EXPORT int leto_ec_prepare_matrix(uint32_t kernel, size_t rows, size_t columns, const uint32_t *coefficients,
                                          uint8_t *prepared);

/* One piece of work: all fields have 64 bits. Addresses need no alignment, `bytes` is a multiple of 4.
 *
 * Product (blocks > 0, rows = 16, columns = 16 blocks):
 *   outputs[r] = base[r] ^ sum over blocks and positions s of inputs[16 block + s] / (coset_block ^ r ^ s)
 * `prepared` and, for kernels of the FFT basis, `final` (one block) come from leto_ec_prepare.
 *
 * Combination (blocks = 0), any matrix, one multiplication for each of its elements:
 *   outputs[r] = base[r] ^ sum over k of coefficients[r * columns + k] * inputs[k] in GF(2^32)
 * `prepared` comes from leto_ec_prepare_matrix; NULL: that is done on the way.
 *
 * An input that is NULL is zero; base may be NULL, and so may its entries; outputs that are NULL are not wanted. base
 * may equal outputs. Apart from that, outputs must not overlap one another or anything else. The result does not
 * depend on `threads` (1 to LETO_EC_MOST_THREADS). */
struct leto_ec_work {
  uint64_t kernel, threads, blocks, rows, columns, bytes;
  const uint32_t *coefficients;
  const uint8_t *prepared, *final;
  const uint8_t *const *inputs, *const *base;
  uint8_t *const *outputs;
};

/* Do pieces of work one after the other, up to the first that fails. */
LETO_EC_EXPORT int leto_ec_run(const struct leto_ec_work *work, size_t count);

/* A page changed by `delta`: parity + r * stride ^= coefficients[r * step] * delta for each of `rows` rows, at most
 * LETO_EC_MOST_ROWS. A combination of one page, for callers who have no tables. */
LETO_EC_EXPORT int leto_ec_update(uint32_t kernel, size_t threads, size_t rows, size_t bytes, const uint32_t *coefficients,
                                  size_t step, const uint8_t *delta, uint8_t *parity, size_t stride);

#endif
