/* Groups of 16 interleaved rows that an AVX-512 kernel reads at once.
 *
 * A core asks for what it will read next page by page (Intel's Optimization Reference Manual: the
 * streamer keeps to a page and runs at most 20 lines ahead), so that one sequence of addresses
 * leaves most of its requests to memory unused, and several in turn do not: 512 MiB in one thread of
 * a Xeon (Sapphire Rapids) came at 13.9 to 16.2 GB/s in one sequence and 15.2 to 19.2 in four (`read`
 * of benchmarks/kernel_speed.py). Lines are asked for 2 KiB ahead besides. */
#ifndef COLIBRI_X16_STREAMS_H
#define COLIBRI_X16_STREAMS_H

#include <immintrin.h>
#include <stdint.h>

/* Groups that are read at once at most, and sums of groups and tokens that registers hold beside
 * the weights, for types whose weights need few others to unpack. */
#define COLIBRI_X16_STREAMS 4
#define COLIBRI_X16_SUMS 16

/* Whether m groups are read at once for n tokens, of a type for which registers hold `sums`. With 8
 * tokens arithmetic takes longer than reading, and one group keeps its sums in registers best. */
#define COLIBRI_X16_HOLDS(m, n, sums)                                                              \
    ((m) == 1 || ((n) < 8 && (m) <= COLIBRI_X16_STREAMS && (m) * (n) <= (sums)))

/* Where to ask, in bytes from what is read now: n_ahead blocks on in this group of rows, or as far
 * into the one that is read after it, `m` groups on, if fewer blocks are left; `alone` bytes on
 * where one group is read. */
static inline __attribute__((always_inline)) int64_t
colibri_x16_ahead(int64_t n_left, int64_t n_ahead, int64_t block_bytes, const int m,
                  int64_t stream_bytes, const int alone) {
    if (m == 1) return alone;
    return n_ahead * block_bytes + (n_left <= n_ahead ? (m - 1) * stream_bytes : 0);
}

#endif
