/* What the kernels for blocks of 32 share on x86. */
#ifndef COLIBRI_BLOCKS32_X86_H
#define COLIBRI_BLOCKS32_X86_H

#include <immintrin.h>

#include "../kernels.h"
#include "e8m0.h"

#define ALWAYS static inline __attribute__((always_inline))
/* How far ahead of its use a line is asked for. Measured on 1 GiB of interleaved Q4_0 and Q8_0 at 4
 * tokens, Xeon (Sapphire Rapids): none 7.4 and 7.6 GB/s, 1024 8.4 and 9.3, 2048 9.7 and 10.5, 4096
 * 10.3 and 11.2, 8192 10.9 and 11.2; into the first level only (NTA) 9.0 and 6.5. */
#define PREFETCH_BYTES 4096

/* The first operand of VPMADDUBSW and VPDPBUSD is unsigned: weights get this excess added, and it
 * times the sum of the activations is taken from the sum of products, which is exact. */
ALWAYS int32_t excess_of(int32_t type) {
    switch (type) {
    case COLIBRI_Q8_0:
        return 128;
    case COLIBRI_Q4_0:
        return 8;
    case COLIBRI_Q5_0:
        return 16;
    case COLIBRI_MXFP4:
        return 12;
    default:
        return 0;
    }
}

ALWAYS int32_t bytes_of(int32_t type) {
    switch (type) {
    case COLIBRI_Q8_0:
        return 34;
    case COLIBRI_Q4_0:
        return 18;
    case COLIBRI_Q4_1:
        return 20;
    case COLIBRI_Q5_0:
        return 22;
    case COLIBRI_Q5_1:
        return 24;
    default:
        return 17;
    }
}

/* Copies of `body` for 1, 2, 4 and 8 tokens, so that sums stay in registers; other numbers are made
 * of these. Rows are read again from a cache then, as chunks are small. */
#define FOR_TOKENS(name, body, type)                                                               \
    static void name(const uint8_t *rows, int64_t n_rows, const struct colibri_acts *acts,         \
                     int32_t first_token, int32_t n_tokens, float *out, int64_t out_stride) {      \
        const int32_t last = first_token + n_tokens;                                               \
        for (int32_t n = 0, t = first_token; t < last; t += n, out += n * out_stride) {            \
            n = last - t;                                                                          \
            if (n >= 8) {                                                                          \
                n = 8;                                                                             \
                body(type, 8, rows, n_rows, acts, t, out, out_stride);                             \
            } else if (n >= 4) {                                                                   \
                n = 4;                                                                             \
                body(type, 4, rows, n_rows, acts, t, out, out_stride);                             \
            } else if (n >= 2) {                                                                   \
                n = 2;                                                                             \
                body(type, 2, rows, n_rows, acts, t, out, out_stride);                             \
            } else {                                                                               \
                body(type, 1, rows, n_rows, acts, t, out, out_stride);                             \
            }                                                                                      \
        }                                                                                          \
    }

#endif
