/* Quant blocks of 256 weights: where their parts lie, plain and interleaved.
 *
 * The layouts are ggml's (ggml-common.h: block_q2_K to block_q6_K; the order of elements is that of
 * dequantize_row_q*_K in ggml-quants.c). A block is 8 groups of 32 weights (Q4_K, Q5_K) or 16 of 16
 * that share a scale; with q the stored quant, a weight is
 *     Q2_K, Q4_K, Q5_K: d * scale * q - dmin * min,  q >= 0
 *     Q3_K, Q6_K:       d * scale * (q - zero),      zero 4 and 32
 * so a product with activations x * act_scale is, all sums but the last in integers,
 *     act_scale * (d * sum(scale * sum(q * x)) - dmin * sum(min * sum(x))).
 *
 * Interleaved (16 rows; colibri-format's spec, section 9) every offset below is 16 times as far,
 * and the 4 bytes (2 for half floats) that start there in a row are followed by the other 15 rows'.
 */
#ifndef COLIBRI_BLOCKS256_H
#define COLIBRI_BLOCKS256_H

#include "../kernels.h"
#include "kernels_isa.h"

#define COLIBRI_INLINE static inline __attribute__((always_inline))
#define COLIBRI_ROWS 16 /* that are interleaved */

enum colibri_layout {
    COLIBRI_Q2_K_SCALES = 0, /* 16 bytes: scale | min << 4 */
    COLIBRI_Q2_K_QUANTS = 16,
    COLIBRI_Q2_K_D = 80,
    COLIBRI_Q2_K_DMIN = 82,
    COLIBRI_Q2_K_BYTES = 84,

    COLIBRI_Q3_K_THIRD_BITS = 0, /* bit i of byte j: element 32 i + j */
    COLIBRI_Q3_K_QUANTS = 32,
    COLIBRI_Q3_K_SCALES = 96, /* 16 of 6 bits, less 32 */
    COLIBRI_Q3_K_D = 108,
    COLIBRI_Q3_K_BYTES = 110,

    COLIBRI_Q4_K_D = 0,
    COLIBRI_Q4_K_DMIN = 2,
    COLIBRI_Q4_K_SCALES = 4, /* 8 scales and 8 minima of 6 bits */
    COLIBRI_Q4_K_QUANTS = 16,
    COLIBRI_Q4_K_BYTES = 144,

    COLIBRI_Q5_K_FIFTH_BITS = 16, /* bit i of byte j: element 32 i + j; before it as Q4_K */
    COLIBRI_Q5_K_QUANTS = 48,
    COLIBRI_Q5_K_BYTES = 176,

    COLIBRI_Q6_K_LOW = 0,   /* 4 bits of each */
    COLIBRI_Q6_K_HIGH = 128, /* 2 bits of each */
    COLIBRI_Q6_K_SCALES = 192, /* 16 int8 */
    COLIBRI_Q6_K_D = 208,
    COLIBRI_Q6_K_BYTES = 210
};

/* Activations of one token: pointers to its first group of 256. */
struct colibri_act_row {
    const int8_t *values;  /* starts at a multiple of 64 bytes */
    const float *scales;   /* one for 256 values */
    const int16_t *sums16; /* 16 for 256 values */
};

COLIBRI_INLINE struct colibri_act_row colibri_act_row(const struct colibri_acts *acts,
                                                      int32_t token) {
    int64_t columns = acts->columns;
    struct colibri_act_row row = {(const int8_t *)acts->values + token * columns,
                                  acts->scales + token * (columns / 256),
                                  acts->sums16 + token * (columns / 16)};
    return row;
}

/* Asks for `bytes` bytes that stand `ahead` bytes after p, if they are there, in the second cache.
 * Processors fetch ahead by themselves within pages of 4 KiB only, and plain rows, several of
 * which are read at once, are multiplied twice as fast with this. */
COLIBRI_INLINE void colibri_fetch(const uint8_t *p, const int64_t ahead, const int bytes) {
    for (int i = 0; i < bytes; i += 64)
        __builtin_prefetch((const void *)((uintptr_t)p + (uintptr_t)ahead + (uintptr_t)i), 0, 2);
}

/* To the next group of 256. */
COLIBRI_INLINE void colibri_act_advance(struct colibri_act_row *row) {
    row->values += 256;
    row->scales += 1;
    row->sums16 += 16;
}

#endif
