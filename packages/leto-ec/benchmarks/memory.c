/* What memory alone costs, for the comparison in cpu_bench.py: the same bytes, no multiplication. Compiled by the
 * benchmark where there is a C compiler; vectors are the compiler's, but for stores past the cache. */
#include <stddef.h>
#include <stdint.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define STRIP 4096
#define LINE 64

/* Every page read once, a strip of all pages at a time as the kernels do. Returns the XOR of all words. */
uint64_t read_pages(const uint8_t *const *pages, size_t count, size_t bytes) {
  uint64_t sum[8] = {0};
  for (size_t from = 0; from < bytes; from += STRIP) {
    const size_t end = bytes - from < STRIP ? bytes : from + STRIP;
    for (size_t i = 0; i < count; i++) {
      const uint64_t *words = (const uint64_t *)(const void *)pages[i];
      for (size_t w = from / 8; w < end / 8; w += 8)
        for (int k = 0; k < 8; k++) sum[k] ^= words[w + k];
    }
  }
  return sum[0] ^ sum[1] ^ sum[2] ^ sum[3] ^ sum[4] ^ sum[5] ^ sum[6] ^ sum[7];
}

/* rows[i] ^= delta, `strip` bytes of every row at a time. */
void xor_rows(uint8_t *const *rows, size_t count, size_t bytes, const uint8_t *delta, size_t strip) {
  for (size_t from = 0; from < bytes; from += strip) {
    const size_t end = bytes - from < strip ? bytes : from + strip;
    for (size_t i = 0; i < count; i++) {
      uint64_t *row = (uint64_t *)(void *)rows[i];
      const uint64_t *change = (const uint64_t *)(const void *)delta;
      for (size_t w = from / 8; w < end / 8; w++) row[w] ^= change[w];
    }
  }
}

/* The same, stored past the cache: whole lines at addresses of whole lines. Returns 0 where that cannot be. */
int xor_rows_past(uint8_t *const *rows, size_t count, size_t bytes, const uint8_t *delta, size_t strip) {
#if defined(__AVX512F__)
  for (size_t from = 0; from < bytes; from += strip) {
    const size_t end = bytes - from < strip ? bytes : from + strip;
    for (size_t i = 0; i < count; i++)
      for (size_t at = from; at < end; at += LINE)
        _mm512_stream_si512((__m512i *)(void *)(rows[i] + at),
                            _mm512_xor_si512(_mm512_loadu_si512(rows[i] + at), _mm512_loadu_si512(delta + at)));
  }
  return 1;
#else
  (void)rows, (void)count, (void)bytes, (void)delta, (void)strip;
  return 0;
#endif
}
