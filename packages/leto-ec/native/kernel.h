/* What a kernel is, for the dispatcher and for the kernels. To add one: define its struct in a file of its
 * own, give the file its compiler flags in CMakeLists.txt, and list it in dispatch.c. */
#ifndef LETO_EC_KERNEL_H
#define LETO_EC_KERNEL_H

#include <stddef.h>
#include <stdint.h>

/* The field's polynomial is x^32 + LETO_EC_TAIL. Tests define a wrong tail to see the golden hashes fail. */
#ifndef LETO_EC_TAIL
#define LETO_EC_TAIL 0x400007u
#endif

struct leto_ec_job {
  size_t rows, columns, bytes;
  const uint32_t *coefficients; /* rows x columns */
  const uint8_t *const *inputs; /* columns */
  const uint8_t *const *base;   /* rows, or NULL */
  uint8_t *const *outputs;      /* rows */
};

struct leto_ec_kernel {
  const char *name;
  int (*supported)(void);
  int (*combine)(const struct leto_ec_job *job);
};

/* A kernel whose instructions the compiler could not be asked for has combine == NULL. */
extern const struct leto_ec_kernel leto_ec_portable;
extern const struct leto_ec_kernel leto_ec_pclmul;
extern const struct leto_ec_kernel leto_ec_vpclmul;

#endif
