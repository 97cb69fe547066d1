/* Products block by block in plain C, for every type, plain and interleaved. */
#ifndef COLIBRI_BLOCKS32_SCALAR_H
#define COLIBRI_BLOCKS32_SCALAR_H

#include "../kernels.h"
#include "e8m0.h"

/* A quant block taken apart: weight i is values[i] * scale + offset. */
struct unpacked {
    int8_t values[32];
    float scale;
    float offset;
};

typedef void unpack(const uint8_t *block, struct unpacked *out);

static void unpack_q8_0(const uint8_t *block, struct unpacked *out) {
    out->scale = colibri_float_of_half(colibri_load_u16(block));
    memcpy(out->values, block + 2, 32);
}

static void unpack_q4_0(const uint8_t *block, struct unpacked *out) {
    out->scale = colibri_float_of_half(colibri_load_u16(block));
    for (int32_t i = 0; i < 16; i++) {
        out->values[i] = (int8_t)((block[2 + i] & 15) - 8);
        out->values[i + 16] = (int8_t)((block[2 + i] >> 4) - 8);
    }
}

static void unpack_q4_1(const uint8_t *block, struct unpacked *out) {
    out->scale = colibri_float_of_half(colibri_load_u16(block));
    out->offset = colibri_float_of_half(colibri_load_u16(block + 2));
    for (int32_t i = 0; i < 16; i++) {
        out->values[i] = (int8_t)(block[4 + i] & 15);
        out->values[i + 16] = (int8_t)(block[4 + i] >> 4);
    }
}

static void unpack_fives(const uint8_t *high, const uint8_t *nibbles, int32_t less, int8_t *out) {
    uint32_t bits;
    memcpy(&bits, high, 4);
    for (int32_t i = 0; i < 16; i++) {
        out[i] = (int8_t)(((nibbles[i] & 15) | (bits >> i & 1) << 4) - less);
        out[i + 16] = (int8_t)((nibbles[i] >> 4 | (bits >> (i + 16) & 1) << 4) - less);
    }
}

static void unpack_q5_0(const uint8_t *block, struct unpacked *out) {
    out->scale = colibri_float_of_half(colibri_load_u16(block));
    unpack_fives(block + 2, block + 6, 16, out->values);
}

static void unpack_q5_1(const uint8_t *block, struct unpacked *out) {
    out->scale = colibri_float_of_half(colibri_load_u16(block));
    out->offset = colibri_float_of_half(colibri_load_u16(block + 2));
    unpack_fives(block + 4, block + 8, 0, out->values);
}

/* Twice the values of E2M1, by nibble (OCP Microscaling Formats 1.0, 5.3.3). */
#define E2M1_DOUBLED 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12

static void unpack_mxfp4(const uint8_t *block, struct unpacked *out) {
    static const int8_t doubled[16] = {E2M1_DOUBLED};
    out->scale = half_of_e8m0(block[0]);
    for (int32_t i = 0; i < 16; i++) {
        out->values[i] = doubled[block[1 + i] & 15];
        out->values[i + 16] = doubled[block[1 + i] >> 4];
    }
}

/* One row's quant block out of sixteen interleaved ones. Units are 4 bytes wide, but for the head:
 * one or two of 2 bytes, or one of 1 byte (specification of .colibri, section 9). */
static inline void pick_block(const uint8_t *blocks, int32_t row, int32_t block_bytes,
                              uint8_t *out) {
    int32_t start = 0;
    switch (block_bytes % 4) {
    case 1:
        out[0] = blocks[row];
        start = 1;
        break;
    case 2:
        memcpy(out, blocks + row * 2, 2);
        start = 2;
        break;
    case 0:
        memcpy(out, blocks + row * 2, 2);
        memcpy(out + 2, blocks + 32 + row * 2, 2);
        start = 4;
        break;
    }
    for (; start < block_bytes; start += 4)
        memcpy(out + start, blocks + start * 16 + row * 4, 4);
}

static inline void dot_unpacked(const struct unpacked *block, const struct colibri_acts *acts,
                                int32_t first_token, int32_t n_tokens, int64_t group, float *sums) {
    const int64_t n_groups = acts->columns / 32;
    for (int32_t t = 0; t < n_tokens; t++) {
        const int64_t at = (first_token + t) * n_groups + group;
        const int8_t *values = (const int8_t *)acts->values + at * 32;
        int32_t sum = 0;
        for (int32_t i = 0; i < 32; i++) sum += block->values[i] * values[i];
        sums[t] += (float)sum * (block->scale * acts->scales[at]);
        if (acts->sums != NULL) sums[t] += block->offset * acts->sums[at];
    }
}

static inline void dot_blocks(const uint8_t *rows, int64_t n_rows, const struct colibri_acts *acts,
                              int32_t first_token, int32_t n_tokens, float *out,
                              int64_t out_stride, int32_t block_bytes, int32_t row_interleave,
                              unpack *unpack) {
    const int64_t n_groups = acts->columns / 32;
    for (int64_t row = 0; row < n_rows; row++) {
        float sums[COLIBRI_KERNEL_TOKENS] = {0};
        for (int64_t group = 0; group < n_groups; group++) {
            struct unpacked block;
            uint8_t picked[40];
            const uint8_t *bytes = rows + (row * n_groups + group) * block_bytes;
            if (row_interleave) {
                pick_block(rows + (row / 16 * n_groups + group) * 16 * block_bytes,
                           (int32_t)(row % 16), block_bytes, picked);
                bytes = picked;
            }
            block.offset = 0.0f;
            unpack(bytes, &block);
            dot_unpacked(&block, acts, first_token, n_tokens, group, sums);
        }
        for (int32_t t = 0; t < n_tokens; t++) out[t * out_stride + row] = sums[t];
    }
}

#define SCALAR_DOT(name, block_bytes, row_interleave, unpack)                                      \
    static void name(const uint8_t *rows, int64_t n_rows, const struct colibri_acts *acts,         \
                     int32_t first_token, int32_t n_tokens, float *out, int64_t out_stride) {      \
        dot_blocks(rows, n_rows, acts, first_token, n_tokens, out, out_stride, block_bytes,        \
                   row_interleave, unpack);                                                        \
    }

SCALAR_DOT(scalar_q8_0, 34, 0, unpack_q8_0)
SCALAR_DOT(scalar_q4_0, 18, 0, unpack_q4_0)
SCALAR_DOT(scalar_q4_1, 20, 0, unpack_q4_1)
SCALAR_DOT(scalar_q5_0, 22, 0, unpack_q5_0)
SCALAR_DOT(scalar_q5_1, 24, 0, unpack_q5_1)
SCALAR_DOT(scalar_mxfp4, 17, 0, unpack_mxfp4)
SCALAR_DOT(scalar_q8_0_x16, 34, 16, unpack_q8_0)
SCALAR_DOT(scalar_q4_0_x16, 18, 16, unpack_q4_0)
SCALAR_DOT(scalar_q4_1_x16, 20, 16, unpack_q4_1)
SCALAR_DOT(scalar_q5_0_x16, 22, 16, unpack_q5_0)
SCALAR_DOT(scalar_q5_1_x16, 24, 16, unpack_q5_1)
SCALAR_DOT(scalar_mxfp4_x16, 17, 16, unpack_mxfp4)

/* ---- floats ---- */

#define LANES 16

static inline float load_f32(const void *p) {
    float value;
    memcpy(&value, p, 4);
    return value;
}
static inline float load_f16(const void *p) { return colibri_float_of_half(colibri_load_u16(p)); }
static inline float load_bf16(const void *p) { return colibri_float_of_bfloat(colibri_load_u16(p)); }

/* Sums of every sixteenth product, then of those: the order that vectors of 16 sum in. */
#define SCALAR_FLOATS(name, load, size)                                                            \
    static void name(const uint8_t *rows, int64_t n_rows, const struct colibri_acts *acts,         \
                     int32_t first_token, int32_t n_tokens, float *out, int64_t out_stride) {      \
        const int64_t n = acts->columns;                                                           \
        for (int32_t t = 0; t < n_tokens; t++) {                                                   \
            const uint8_t *x = (const uint8_t *)acts->values + (first_token + t) * n * size;       \
            for (int64_t row = 0; row < n_rows; row++) {                                           \
                const uint8_t *w = rows + row * n * size;                                          \
                float sums[LANES] = {0};                                                           \
                int64_t i = 0;                                                                     \
                for (; i + LANES <= n; i += LANES)                                                 \
                    for (int32_t lane = 0; lane < LANES; lane++)                                   \
                        sums[lane] += load(w + (i + lane) * size) * load(x + (i + lane) * size);   \
                for (int32_t lane = 0; i + lane < n; lane++)                                       \
                    sums[lane] += load(w + (i + lane) * size) * load(x + (i + lane) * size);       \
                for (int32_t half = LANES / 2; half > 0; half /= 2)                                \
                    for (int32_t lane = 0; lane < half; lane++) sums[lane] += sums[lane + half];   \
                out[t * out_stride + row] = sums[0];                                               \
            }                                                                                      \
        }                                                                                          \
    }

SCALAR_FLOATS(scalar_f32, load_f32, 4)
SCALAR_FLOATS(scalar_f16, load_f16, 2)
SCALAR_FLOATS(scalar_bf16, load_bf16, 2)

#endif
