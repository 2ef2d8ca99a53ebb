/* Strips, tails and threads: what every kernel needs and none should think about.
 *
 * Pages are walked in strips, all pages a strip at a time, so that the accumulators of a strip stay in the cache. A
 * strip is a job of its own; threads take the next one from a counter until none is left, so the
 * result cannot depend on their number. Threads live for one call (fork and join): nothing survives that a
 * fork() of the caller could break, and an idle library owns no thread. */
#include <stdlib.h>
#include <string.h>

#include "kernel.h"

#if !defined(_WIN32)
#include <pthread.h>
#define THREADS 1
#else
#define THREADS 0
#endif

/* Bytes of pages below which another thread costs more than it brings. */
#define WORTH_A_THREAD (256u << 10)

const uint8_t leto_ec_zeros[LETO_EC_LONGEST_STRIP];

struct shared {
  const struct leto_ec_job *job;
  size_t whole; /* bytes in whole granules */
  size_t next;  /* where the next strip begins: taken atomically */
};

static uint8_t *aligned(uint8_t *memory) { return (uint8_t *)(((uintptr_t)memory + 63) & ~(uintptr_t)63); }

/* Work until no strip is left. Returns 0 if there was no memory to work in: then nothing was taken. */
static int worker(struct shared *shared) {
  const struct leto_ec_kernel *kernel = shared->job->kernel;
  uint8_t *memory = malloc(kernel->scratch + 64);
  if (memory == NULL) return 0;
  struct leto_ec_strip strip = shared->job->all;
  strip.scratch = aligned(memory);
  for (;;) {
    strip.at = __atomic_fetch_add(&shared->next, kernel->strip, __ATOMIC_RELAXED);
    if (strip.at >= shared->whole) break;
    strip.bytes = shared->whole - strip.at < kernel->strip ? shared->whole - strip.at : kernel->strip;
    shared->job->work(&strip);
  }
  free(memory);
  return 1;
}

#if THREADS
static void *thread(void *shared) {
  (void)worker(shared); /* without memory its share falls to the others */
  return NULL;
}
#endif

/* The last bytes of every page, less than a granule: copied into whole granules and done there. */
static int tail(const struct leto_ec_job *job, size_t at) {
  const size_t granule = job->kernel->granule, size = job->all.bytes - at;
  const size_t rows = job->all.rows, columns = job->all.columns, buffers = columns + 2 * rows;
  uint8_t *memory = calloc(buffers, granule);
  uint8_t **pointers = calloc(buffers, sizeof *pointers);
  uint8_t *scratch = malloc(job->kernel->scratch + 64);
  int status = LETO_EC_NO_MEMORY;
  if (memory != NULL && pointers != NULL && scratch != NULL) {
    uint8_t **const inputs = pointers, **const base = inputs + columns, **const outputs = base + rows;
    for (size_t i = 0; i < columns; i++)
      if (job->all.inputs[i] != NULL) {
        inputs[i] = memory + i * granule;
        memcpy(inputs[i], job->all.inputs[i] + at, size);
      }
    for (size_t i = 0; i < rows; i++) {
      if (job->all.base != NULL && job->all.base[i] != NULL) {
        base[i] = memory + (columns + i) * granule;
        memcpy(base[i], job->all.base[i] + at, size);
      }
      if (job->all.outputs[i] != NULL) outputs[i] = memory + (columns + rows + i) * granule;
    }
    struct leto_ec_strip strip = job->all;
    strip.at = 0;
    strip.bytes = granule;
    strip.inputs = (const uint8_t *const *)inputs;
    strip.base = job->all.base != NULL ? (const uint8_t *const *)base : NULL;
    strip.outputs = outputs;
    strip.scratch = aligned(scratch);
    job->work(&strip);
    for (size_t i = 0; i < rows; i++)
      if (outputs[i] != NULL) memcpy(job->all.outputs[i] + at, outputs[i], size);
    status = LETO_EC_OK;
  }
  free(memory);
  free(pointers);
  free(scratch);
  return status;
}

int leto_ec_drive(const struct leto_ec_job *job) {
  struct shared shared = {job, job->all.bytes - job->all.bytes % job->kernel->granule, 0};
  /* Whatever may fail for want of memory comes before anything is written: first a trial of the scratch, then
   * the tail, which allocates before it writes. */
  if (shared.whole != 0) {
    uint8_t *trial = malloc(job->kernel->scratch + 64);
    if (trial == NULL) return LETO_EC_NO_MEMORY;
    free(trial);
  }
  if (shared.whole < job->all.bytes) {
    const int status = tail(job, shared.whole);
    if (status != LETO_EC_OK) return status;
  }
  if (shared.whole == 0) return LETO_EC_OK;
#if THREADS
  size_t wanted = (shared.whole + job->kernel->strip - 1) / job->kernel->strip;
  const size_t worth = shared.whole * (job->all.columns + job->all.rows) / WORTH_A_THREAD + 1;
  if (wanted > job->threads) wanted = job->threads;
  if (wanted > worth) wanted = worth;
  pthread_t threads[LETO_EC_MOST_THREADS];
  size_t started = 0;
  while (started + 1 < wanted && pthread_create(&threads[started], NULL, thread, &shared) == 0) started++;
  const int alone = worker(&shared);
  for (size_t i = 0; i < started; i++) pthread_join(threads[i], NULL);
  return alone || shared.next >= shared.whole ? LETO_EC_OK : LETO_EC_NO_MEMORY;
#else
  return worker(&shared) ? LETO_EC_OK : LETO_EC_NO_MEMORY;
#endif
}
