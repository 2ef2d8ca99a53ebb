/* What a kernel is, for the dispatcher, the driver and the kernels. To add one: define its struct in a file of
 * its own, give the file its compiler flags in CMakeLists.txt, and list it in dispatch.c. */
#ifndef LETO_EC_KERNEL_H
#define LETO_EC_KERNEL_H

#include <stddef.h>
#include <stdint.h>

#include "leto_ec.h"

/* The field's polynomial is x^32 + LETO_EC_TAIL. Tests define a wrong tail to see the golden hashes fail. */
#ifndef LETO_EC_TAIL
#define LETO_EC_TAIL 0x400007u
#endif

#define INLINE static inline __attribute__((always_inline))
#define BLOCK LETO_EC_BLOCK

/* Bytes at .. at + bytes of every page. `bytes` is a multiple of the kernel's granule and at most its strip. */
struct leto_ec_strip {
  size_t at, bytes;
  size_t rows, columns;         /* a product has BLOCK rows and whole blocks of columns */
  const uint32_t *coefficients; /* combine: row by row */
  const uint8_t *factors;       /* product: prepared blocks; combine: prepared coefficients, column by column */
  const uint8_t *final;         /* product: the block prepared for the way back */
  const uint8_t *const *inputs; /* one address a column; NULL is a page of zeros */
  const uint8_t *const *base;   /* NULL, or one address a row; a NULL among them is zero */
  uint8_t *const *outputs;      /* one address a row; NULL: not wanted */
  uint8_t *scratch;             /* the kernel's own, aligned to 64 bytes */
  int fetch;                    /* the buffers are more than a cache holds: fetch ahead */
};

struct leto_ec_kernel {
  const char *name;
  int basis;         /* enum leto_ec_basis: what the coefficients of a block are */
  size_t granule;    /* bytes that one step takes from a page */
  size_t strip;      /* bytes of a page that are worked on before the next strip */
  size_t scratch;    /* bytes */
  size_t block;      /* bytes of a prepared block */
  size_t factor;     /* bytes of a prepared coefficient, 0: combine uses coefficients as they are */
  size_t block_cost; /* what a block costs, in units of one coefficient times one page */
  size_t product_cost; /* what a product costs beside its blocks */
  const struct leto_ec_kernel *many; /* NULL, or who combines other numbers of columns than 1 to `most` */
  size_t most;
  int (*supported)(void);
  void (*prepare_block)(const uint32_t coefficients[BLOCK], uint8_t *prepared);
  void (*prepare_factor)(uint32_t coefficient, uint8_t *prepared);
  void (*product)(const struct leto_ec_strip *strip);
  void (*combine)(const struct leto_ec_strip *strip);
};

/* A kernel whose instructions the compiler could not be asked for has product == NULL. */
extern const struct leto_ec_kernel leto_ec_gfni;
extern const struct leto_ec_kernel leto_ec_gfni_256;
extern const struct leto_ec_kernel leto_ec_avx2;
extern const struct leto_ec_kernel leto_ec_vpclmul;
extern const struct leto_ec_kernel leto_ec_vpclmul_256;
extern const struct leto_ec_kernel leto_ec_pclmul;
extern const struct leto_ec_kernel leto_ec_neon;
extern const struct leto_ec_kernel leto_ec_portable;

/* A job for the driver, which cuts it into strips, pads the tail, and shares the strips among threads. */
struct leto_ec_job {
  const struct leto_ec_kernel *kernel;
  void (*work)(const struct leto_ec_strip *strip);
  struct leto_ec_strip all; /* of all bytes; scratch unset */
  size_t threads;
};

int leto_ec_drive(struct leto_ec_job job);

/* A page of zeros, for absent pages: a strip of any kernel. */
#define LETO_EC_LONGEST_STRIP 8192
extern const uint8_t leto_ec_zeros[LETO_EC_LONGEST_STRIP];

INLINE const uint8_t *leto_ec_page(const uint8_t *page, size_t at) {
  return page != NULL ? page + at : leto_ec_zeros;
}

#endif
