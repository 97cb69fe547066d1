/* Products with quant blocks of 256 in portable C: a block is taken apart once for all tokens. */
#ifndef COLIBRI_BLOCKS256_SCALAR_H
#define COLIBRI_BLOCKS256_SCALAR_H

#include <string.h>

#include "../half.h"
#include "blocks256.h"

/* One block taken apart: quants less zero, and scale and min of each 16 of them. */
struct block256 {
    int8_t quants[256];
    int16_t scales[16];
    int16_t mins[16];
    float d;
    float dmin;
};

static float half_to_float(const uint8_t *p) {
    return colibri_float_of_half(colibri_load_u16(p));
}

static void decode_q2_k(const uint8_t *p, struct block256 *block) {
    for (int i = 0; i < 16; i++) {
        block->scales[i] = p[COLIBRI_Q2_K_SCALES + i] & 15;
        block->mins[i] = p[COLIBRI_Q2_K_SCALES + i] >> 4;
    }
    for (int i = 0; i < 256; i++)
        block->quants[i] =
            p[COLIBRI_Q2_K_QUANTS + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
    block->d = half_to_float(p + COLIBRI_Q2_K_D);
    block->dmin = half_to_float(p + COLIBRI_Q2_K_DMIN);
}

static void decode_q3_k(const uint8_t *p, struct block256 *block) {
    const uint8_t *scales = p + COLIBRI_Q3_K_SCALES;
    for (int i = 0; i < 16; i++) {
        int low = i < 8 ? scales[i] & 15 : scales[i - 8] >> 4;
        int high = scales[8 + i % 4] >> (i / 4 * 2) & 3;
        block->scales[i] = (int16_t)((low | high << 4) - 32);
        block->mins[i] = 0;
    }
    for (int i = 0; i < 256; i++) {
        int low = p[COLIBRI_Q3_K_QUANTS + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
        int third = p[COLIBRI_Q3_K_THIRD_BITS + i % 32] >> (i / 32) & 1;
        block->quants[i] = (int8_t)((low | third << 2) - 4);
    }
    block->d = half_to_float(p + COLIBRI_Q3_K_D);
    block->dmin = 0;
}

/* What Q4_K and Q5_K share. */
static void decode_scales_q4_k(const uint8_t *p, struct block256 *block) {
    const uint8_t *packed = p + COLIBRI_Q4_K_SCALES;
    for (int i = 0; i < 16; i++) {
        int group = i / 2, scale, min;
        if (group < 4) {
            scale = packed[group] & 63;
            min = packed[group + 4] & 63;
        } else {
            scale = (packed[group + 4] & 15) | packed[group - 4] >> 6 << 4;
            min = packed[group + 4] >> 4 | packed[group] >> 6 << 4;
        }
        block->scales[i] = (int16_t)scale;
        block->mins[i] = (int16_t)min;
    }
    block->d = half_to_float(p + COLIBRI_Q4_K_D);
    block->dmin = half_to_float(p + COLIBRI_Q4_K_DMIN);
}

static void decode_q4_k(const uint8_t *p, struct block256 *block) {
    decode_scales_q4_k(p, block);
    for (int i = 0; i < 256; i++)
        block->quants[i] =
            p[COLIBRI_Q4_K_QUANTS + i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4) & 15;
}

static void decode_q5_k(const uint8_t *p, struct block256 *block) {
    decode_scales_q4_k(p, block);
    for (int i = 0; i < 256; i++) {
        int low = p[COLIBRI_Q5_K_QUANTS + i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4) & 15;
        int fifth = p[COLIBRI_Q5_K_FIFTH_BITS + i % 32] >> (i / 32) & 1;
        block->quants[i] = (int8_t)(low | fifth << 4);
    }
}

static void decode_q6_k(const uint8_t *p, struct block256 *block) {
    for (int i = 0; i < 16; i++) {
        block->scales[i] = (int8_t)p[COLIBRI_Q6_K_SCALES + i];
        block->mins[i] = 0;
    }
    for (int i = 0; i < 256; i++) {
        int low = p[COLIBRI_Q6_K_LOW + i / 128 * 64 + i % 64] >> (i % 128 / 64 * 4) & 15;
        int high = p[COLIBRI_Q6_K_HIGH + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
        block->quants[i] = (int8_t)((low | high << 4) - 32);
    }
    block->d = half_to_float(p + COLIBRI_Q6_K_D);
    block->dmin = 0;
}

/* Adds the product of a block with one group of activations to *sum. */
COLIBRI_INLINE void add_block(const struct block256 *block, const int8_t *values, float scale,
                              const int16_t *sums16, float *sum) {
    int32_t products = 0, offsets = 0;
    for (int i = 0; i < 16; i++) {
        int32_t dot = 0;
        for (int j = 0; j < 16; j++)
            dot += (int32_t)block->quants[16 * i + j] * values[16 * i + j];
        products += block->scales[i] * dot;
        offsets += block->mins[i] * sums16[i];
    }
    *sum += scale * (block->d * (float)products - block->dmin * (float)offsets);
}

/* A quant block of row `row` of an interleaved group of 16, as ggml has it. `n_first` and `n_last`
 * half floats stand before and after the 4-byte units. */
COLIBRI_INLINE void gather_block(const uint8_t *blocks, int row, int n_first, int n_words,
                                 int n_last, uint8_t *plain) {
    for (int i = 0; i < n_first; i++, blocks += 2 * COLIBRI_ROWS, plain += 2)
        memcpy(plain, blocks + 2 * row, 2);
    for (int i = 0; i < n_words; i++, blocks += 4 * COLIBRI_ROWS, plain += 4)
        memcpy(plain, blocks + 4 * row, 4);
    for (int i = 0; i < n_last; i++, blocks += 2 * COLIBRI_ROWS, plain += 2)
        memcpy(plain, blocks + 2 * row, 2);
}

#define DEFINE_DOTS(name, bytes, n_first, n_words, n_last)                                         \
    static void dot_##name(const uint8_t *rows, int64_t n_rows, const struct colibri_acts *acts,   \
                           int32_t first_token, int32_t n_tokens, float *out,                      \
                           int64_t out_stride) {                                                   \
        int32_t n_blocks = acts->columns / 256;                                                    \
        for (int64_t r = 0; r < n_rows; r++) {                                                     \
            float sums[COLIBRI_KERNEL_TOKENS] = {0};                                               \
            for (int32_t b = 0; b < n_blocks; b++, rows += bytes) {                                \
                struct block256 block;                                                             \
                decode_##name(rows, &block);                                                       \
                add_tokens(&block, acts, first_token, n_tokens, b, sums);                          \
            }                                                                                      \
            for (int32_t t = 0; t < n_tokens; t++)                                                 \
                out[t * out_stride + r] = sums[t];                                                 \
        }                                                                                          \
    }                                                                                              \
    static void dot_##name##_x16(const uint8_t *rows, int64_t n_rows,                              \
                                 const struct colibri_acts *acts, int32_t first_token,             \
                                 int32_t n_tokens, float *out, int64_t out_stride) {               \
        int32_t n_blocks = acts->columns / 256;                                                    \
        for (int64_t r = 0; r < n_rows; r++) {                                                     \
            const uint8_t *group = rows + r / COLIBRI_ROWS * COLIBRI_ROWS * n_blocks * bytes;      \
            float sums[COLIBRI_KERNEL_TOKENS] = {0};                                               \
            for (int32_t b = 0; b < n_blocks; b++, group += COLIBRI_ROWS * bytes) {                \
                uint8_t plain[bytes];                                                              \
                struct block256 block;                                                             \
                gather_block(group, (int)(r % COLIBRI_ROWS), n_first, n_words, n_last, plain);     \
                decode_##name(plain, &block);                                                      \
                add_tokens(&block, acts, first_token, n_tokens, b, sums);                          \
            }                                                                                      \
            for (int32_t t = 0; t < n_tokens; t++)                                                 \
                out[t * out_stride + r] = sums[t];                                                 \
        }                                                                                          \
    }

static void add_tokens(const struct block256 *block, const struct colibri_acts *acts,
                       int32_t first_token, int32_t n_tokens, int32_t b, float *sums) {
    for (int32_t t = 0; t < n_tokens; t++) {
        struct colibri_act_row act = colibri_act_row(acts, first_token + t);
        add_block(block, act.values + 256 * b, act.scales[b], act.sums16 + 16 * b, sums + t);
    }
}

DEFINE_DOTS(q2_k, COLIBRI_Q2_K_BYTES, 0, 20, 2)
DEFINE_DOTS(q3_k, COLIBRI_Q3_K_BYTES, 0, 27, 1)
DEFINE_DOTS(q4_k, COLIBRI_Q4_K_BYTES, 2, 35, 0)
DEFINE_DOTS(q5_k, COLIBRI_Q5_K_BYTES, 2, 43, 0)
DEFINE_DOTS(q6_k, COLIBRI_Q6_K_BYTES, 0, 52, 1)

#endif
