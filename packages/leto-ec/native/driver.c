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
#define WORTH_A_THREAD (2u << 20)

/* Bytes of all buffers that the second-level cache may well hold from the last call: fetching ahead would cost more than
 * it brings. */
#define IN_CACHE (5u << 18)

/* Bytes of a page from which its edges are worth being done apart. */
#define WORTH_ALIGNING (16u << 10)

#define LINE 64 /* of the cache */

const uint8_t leto_ec_zeros[LETO_EC_LONGEST_STRIP];

struct shared {
  const struct leto_ec_job *job;
  size_t end;  /* of whole granules */
  size_t next; /* where the next strip begins: taken atomically */
};

static uint8_t *aligned(uint8_t *memory) { return (uint8_t *)(((uintptr_t)memory + LINE - 1) & ~(uintptr_t)(LINE - 1)); }

/* Work until no strip is left. Returns 0 if there was no memory to work in: then nothing was taken. */
static int worker(struct shared *shared) {
  const struct leto_ec_kernel *kernel = shared->job->kernel;
  uint8_t *memory = malloc(kernel->scratch + LINE);
  if (memory == NULL) return 0;
  struct leto_ec_strip strip = shared->job->all;
  strip.scratch = aligned(memory);
  for (;;) {
    strip.at = __atomic_fetch_add(&shared->next, kernel->strip, __ATOMIC_RELAXED);
    if (strip.at >= shared->end) break;
    strip.bytes = shared->end - strip.at < kernel->strip ? shared->end - strip.at : kernel->strip;
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

/* Bytes before the pages' first line of the cache, so that the strips start with one: a vector of 64 bytes at another
 * address costs two accesses, and arrays of numpy begin 16 bytes into a line. Where not all buffers can have it, those
 * have it that are accessed most. */
static size_t head(const struct leto_ec_job *job) {
  const uint8_t *first = NULL;
  if (job->all.bytes < WORTH_ALIGNING || job->kernel->strip < 2 * job->kernel->granule) return 0;
  if (job->all.base == NULL || job->all.columns > 2 * job->all.rows)
    for (size_t i = 0; i < job->all.columns && first == NULL; i++) first = job->all.inputs[i];
  for (size_t i = 0; i < job->all.rows && first == NULL; i++) first = job->all.outputs[i];
  const size_t size = -(uintptr_t)first % LINE;
  return size % sizeof(uint32_t) == 0 ? size : 0;
}

/* The first `head` bytes of every page and those from `end` on, less than a line and less than a granule: copied into
 * whole granules and done there. */
static int edges(const struct leto_ec_job *job, size_t head, size_t end) {
  const size_t granule = job->kernel->granule, rest = job->all.bytes - end;
  const size_t size = (head + rest + granule - 1) / granule * granule;
  const size_t rows = job->all.rows, columns = job->all.columns, buffers = columns + 2 * rows;
  uint8_t *memory = calloc(buffers, size);
  uint8_t **pointers = calloc(buffers, sizeof *pointers);
  uint8_t *scratch = malloc(job->kernel->scratch + LINE);
  int status = LETO_EC_NO_MEMORY;
  if (memory != NULL && pointers != NULL && scratch != NULL) {
    uint8_t **const inputs = pointers, **const base = inputs + columns, **const outputs = base + rows;
    for (size_t i = 0; i < columns; i++)
      if (job->all.inputs[i] != NULL) {
        inputs[i] = memory + i * size;
        memcpy(inputs[i], job->all.inputs[i], head);
        memcpy(inputs[i] + head, job->all.inputs[i] + end, rest);
      }
    for (size_t i = 0; i < rows; i++) {
      if (job->all.base != NULL && job->all.base[i] != NULL) {
        base[i] = memory + (columns + i) * size;
        memcpy(base[i], job->all.base[i], head);
        memcpy(base[i] + head, job->all.base[i] + end, rest);
      }
      if (job->all.outputs[i] != NULL) outputs[i] = memory + (columns + rows + i) * size;
    }
    struct leto_ec_strip strip = job->all;
    strip.at = 0;
    strip.bytes = size;
    strip.inputs = (const uint8_t *const *)inputs;
    strip.base = job->all.base != NULL ? (const uint8_t *const *)base : NULL;
    strip.outputs = outputs;
    strip.scratch = aligned(scratch);
    job->work(&strip);
    for (size_t i = 0; i < rows; i++)
      if (outputs[i] != NULL) {
        memcpy(job->all.outputs[i], outputs[i], head);
        memcpy(job->all.outputs[i] + end, outputs[i] + head, rest);
      }
    status = LETO_EC_OK;
  }
  free(memory);
  free(pointers);
  free(scratch);
  return status;
}

int leto_ec_drive(struct leto_ec_job given) {
  given.all.fetch = given.all.bytes > IN_CACHE / (given.all.rows + given.all.columns);
  const struct leto_ec_job *const job = &given;
  const size_t start = head(job), end = job->all.bytes - (job->all.bytes - start) % job->kernel->granule;
  struct shared shared = {job, end, start};
  /* Whatever may fail for want of memory comes before anything is written: first a trial of the scratch, then
   * the edges, which allocate before they write. */
  if (start < end) {
    uint8_t *trial = malloc(job->kernel->scratch + LINE);
    if (trial == NULL) return LETO_EC_NO_MEMORY;
    free(trial);
  }
  if (start > 0 || end < job->all.bytes) {
    const int status = edges(job, start, end);
    if (status != LETO_EC_OK) return status;
  }
  if (start == end) return LETO_EC_OK;
#if THREADS
  size_t wanted = (end - start + job->kernel->strip - 1) / job->kernel->strip;
  const size_t worth = (end - start) * (job->all.columns + job->all.rows) / WORTH_A_THREAD + 1;
  if (wanted > job->threads) wanted = job->threads;
  if (wanted > worth) wanted = worth;
  pthread_t threads[LETO_EC_MOST_THREADS];
  size_t started = 0;
  while (started + 1 < wanted && pthread_create(&threads[started], NULL, thread, &shared) == 0) started++;
  const int alone = worker(&shared);
  for (size_t i = 0; i < started; i++) pthread_join(threads[i], NULL);
  return alone || shared.next >= end ? LETO_EC_OK : LETO_EC_NO_MEMORY;
#else
  return worker(&shared) ? LETO_EC_OK : LETO_EC_NO_MEMORY;
#endif
}
