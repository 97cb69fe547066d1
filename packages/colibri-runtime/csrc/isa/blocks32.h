/* What the vector kernels for blocks of 32 share. */
#ifndef COLIBRI_BLOCKS32_H
#define COLIBRI_BLOCKS32_H

#include "../kernels.h"
#include "e8m0.h"

#define ALWAYS static inline __attribute__((always_inline))

/* Vectors hold weights with this added, so that none is negative (the first operand of VPMADDUBSW
 * and VPDPBUSD is unsigned; NEON is spared the subtractions). It times the sum of the activations
 * is taken from the sum of products, which is exact. */
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

/* Copies of `body` for 1, 2, 4 and 8 tokens, or as many as MOST_TOKENS says, so that sums stay in
 * registers; other numbers are made of these. Rows are read again from a cache then, as chunks are
 * small. */
#ifndef MOST_TOKENS
#define MOST_TOKENS 8
#endif
#define FOR_TOKENS(name, body, type)                                                               \
    static void name(const uint8_t *rows, int64_t n_rows, const struct colibri_acts *acts,         \
                     int32_t first_token, int32_t n_tokens, float *out, int64_t out_stride) {      \
        const int32_t last = first_token + n_tokens;                                               \
        for (int32_t n = 0, t = first_token; t < last; t += n, out += n * out_stride) {            \
            n = last - t;                                                                          \
            if (n >= 8 && MOST_TOKENS == 8) {                                                      \
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
