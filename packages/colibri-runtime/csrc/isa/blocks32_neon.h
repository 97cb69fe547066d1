/* NEON: products with quant blocks of 32, plain and interleaved, and with floats. */
#ifndef COLIBRI_BLOCKS32_NEON_H
#define COLIBRI_BLOCKS32_NEON_H

#define MOST_TOKENS 4
#include "blocks32.h"
#include "neon.h"

/* Q8_0 and MXFP4 are multiplied as they are. */
ALWAYS int32_t neon_excess(int32_t type) {
    return type == COLIBRI_Q4_0 || type == COLIBRI_Q5_0 ? excess_of(type) : 0;
}

/* 16 in the bytes of elements whose bit is set in `high`, the 4 bytes of fifth bits at p. */
ALWAYS uint8x16_t fifth_bits(const int is_x16, const uint8_t *p, const int at, const int half,
                             const int k) {
    static const uint8_t each[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    static const uint8_t low[16] = {1, 2, 4, 8, 1, 2, 4, 8, 1, 2, 4, 8, 1, 2, 4, 8};
    static const uint8_t rows[16] = {0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12};
    uint8x16_t bytes, bits;
    if (is_x16) {
        const uint8x16_t from = vaddq_u8(vld1q_u8(rows), vdupq_n_u8((uint8_t)(2 * half + k / 2)));
        bytes = vqtbl1q_u8(load_part(1, p, at, 0), from);
        bits = k % 2 ? vshlq_n_u8(vld1q_u8(low), 4) : vld1q_u8(low);
    } else {
        const uint8_t *first = p + at + 2 * half;
        bytes = vcombine_u8(vdup_n_u8(first[0]), vdup_n_u8(first[1]));
        bits = vld1q_u8(each);
    }
    return vandq_u8(vtstq_u8(bytes, bits), vdupq_n_u8(16));
}

/* Weights 16 half to 16 half + 15 of the block at p; interleaved, the k-th 4 of these of four rows.
 * Excess is added. */
ALWAYS int8x16_t unpack_neon(int32_t type, const int is_x16, const uint8_t *p, const int half,
                             const int k) {
    if (type == COLIBRI_Q8_0)
        return vreinterpretq_s8_u8(load_part(is_x16, p, 2 + 16 * half, k));
    const uint8x16_t bytes = load_part(is_x16, p, bytes_of(type) - 16, k);
    uint8x16_t nibbles = half ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15));
    if (type == COLIBRI_MXFP4) {
        static const int8_t doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
        return vqtbl1q_s8(vld1q_s8(doubled), nibbles);
    }
    if (type == COLIBRI_Q5_0 || type == COLIBRI_Q5_1)
        nibbles = vorrq_u8(nibbles, fifth_bits(is_x16, p, bytes_of(type) - 20, half, k));
    return vreinterpretq_s8_u8(nibbles);
}

ALWAYS float32x4_t scales_neon(int32_t type, const int is_x16, const uint8_t *const p[4],
                               const int quad) {
    if (type != COLIBRI_MXFP4) return load_scales(is_x16, p, quad, 0);
    float scales[4];
    for (int i = 0; i < 4; i++) scales[i] = half_of_e8m0(is_x16 ? p[0][4 * quad + i] : p[i][0]);
    return vld1q_f32(scales);
}

/* Sums of 32 products of one token with each of four rows; w[4 half + i] is of row i, interleaved
 * of columns 16 half + 4 i to 16 half + 4 i + 3. */
ALWAYS int32x4_t dot_32(int32_t type, const int is_x16, const int8x16_t w[8], const int8_t *x,
                        int32_t sum_x) {
    const int8x16_t acts[2] = {vld1q_s8(x), vld1q_s8(x + 16)};
    int32x4_t sum = vdupq_n_s32(-neon_excess(type) * sum_x);
    if (is_x16) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) sum = dot4_lane(sum, w[i], acts[i / 4], i % 4);
        return sum;
    }
    int32x4_t rows[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        rows[i] = dot4(dot4(vdupq_n_s32(0), w[i], acts[0]), w[4 + i], acts[1]);
    return vaddq_s32(sum, sum_rows(rows));
}

ALWAYS void dot_quads(int32_t type, const int is_x16, int32_t n_tokens, const uint8_t *rows,
                      int64_t n_rows, const struct colibri_acts *acts, int32_t first_token,
                      float *out, int64_t out_stride) {
    const int64_t columns = acts->columns, n_groups = columns / 32;
    const int32_t block_bytes = bytes_of(type), n_quads = is_x16 ? 4 : 1;
    const int32_t has_offset = type == COLIBRI_Q4_1 || type == COLIBRI_Q5_1;
    const int8_t *values = (const int8_t *)acts->values + first_token * columns;
    const float *scales = acts->scales + first_token * n_groups;
    const float *scaled_sums = has_offset ? acts->sums + first_token * n_groups : NULL;
    const int32_t *sums32 = acts->sums32 + first_token * n_groups;
    for (int64_t row = 0; row < n_rows; row += 4 * n_quads) {
        const uint8_t *p[4];
        float32x4_t sums[4][COLIBRI_KERNEL_TOKENS];
        find_rows(is_x16, rows, row, n_rows, n_groups * block_bytes, p);
        for (int quad = 0; quad < n_quads; quad++)
#pragma GCC unroll 8
            for (int32_t t = 0; t < n_tokens; t++) sums[quad][t] = vdupq_n_f32(0);
        for (int64_t group = 0; group < n_groups; group++) {
#pragma GCC unroll 1 /* quads mixed would want more registers than there are */
            for (int quad = 0; quad < n_quads; quad++) {
                int8x16_t w[8];
#pragma GCC unroll 8
                for (int i = 0; i < 8; i++)
                    w[i] = is_x16 ? unpack_neon(type, 1, p[0] + 16 * quad, i / 4, i % 4)
                                  : unpack_neon(type, 0, p[i % 4], i / 4, 0);
                const float32x4_t scale = scales_neon(type, is_x16, p, quad);
                const float32x4_t offset =
                    has_offset ? load_scales(is_x16, p, quad, 2) : vdupq_n_f32(0);
#pragma GCC unroll 8
                for (int32_t t = 0; t < n_tokens; t++) {
                    const int64_t at = t * n_groups + group;
                    const int32x4_t sum = dot_32(type, is_x16, w, values + at * 32, sums32[at]);
                    sums[quad][t] = vfmaq_f32(sums[quad][t], vcvtq_f32_s32(sum),
                                              vmulq_n_f32(scale, scales[at]));
                    if (has_offset)
                        sums[quad][t] = vfmaq_n_f32(sums[quad][t], offset, scaled_sums[at]);
                }
            }
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) p[i] += is_x16 ? 16 * block_bytes : block_bytes;
        }
        for (int quad = 0; quad < n_quads; quad++)
#pragma GCC unroll 8
            for (int32_t t = 0; t < n_tokens; t++)
                store_rows(out + t * out_stride + row + 4 * quad, sums[quad][t],
                           n_rows - row - 4 * quad);
    }
}

ALWAYS void dot_plain_neon(int32_t type, int32_t n_tokens, const uint8_t *rows, int64_t n_rows,
                           const struct colibri_acts *acts, int32_t first_token, float *out,
                           int64_t out_stride) {
    dot_quads(type, 0, n_tokens, rows, n_rows, acts, first_token, out, out_stride);
}

ALWAYS void dot_x16_neon(int32_t type, int32_t n_tokens, const uint8_t *rows, int64_t n_rows,
                         const struct colibri_acts *acts, int32_t first_token, float *out,
                         int64_t out_stride) {
    dot_quads(type, 1, n_tokens, rows, n_rows, acts, first_token, out, out_stride);
}

FOR_TOKENS(neon_q8_0, dot_plain_neon, COLIBRI_Q8_0)
FOR_TOKENS(neon_q4_0, dot_plain_neon, COLIBRI_Q4_0)
FOR_TOKENS(neon_q4_1, dot_plain_neon, COLIBRI_Q4_1)
FOR_TOKENS(neon_q5_0, dot_plain_neon, COLIBRI_Q5_0)
FOR_TOKENS(neon_q5_1, dot_plain_neon, COLIBRI_Q5_1)
FOR_TOKENS(neon_mxfp4, dot_plain_neon, COLIBRI_MXFP4)
FOR_TOKENS(neon_q8_0_x16, dot_x16_neon, COLIBRI_Q8_0)
FOR_TOKENS(neon_q4_0_x16, dot_x16_neon, COLIBRI_Q4_0)
FOR_TOKENS(neon_q4_1_x16, dot_x16_neon, COLIBRI_Q4_1)
FOR_TOKENS(neon_q5_0_x16, dot_x16_neon, COLIBRI_Q5_0)
FOR_TOKENS(neon_q5_1_x16, dot_x16_neon, COLIBRI_Q5_1)
FOR_TOKENS(neon_mxfp4_x16, dot_x16_neon, COLIBRI_MXFP4)

/* ---- floats ---- */

ALWAYS float32x4_t load_floats_4(int32_t type, const uint8_t *p) {
    if (type == COLIBRI_F32) return vreinterpretq_f32_u8(vld1q_u8(p));
    const uint8x8_t halves = vld1_u8(p);
    if (type == COLIBRI_F16) return vcvt_f32_f16(vreinterpret_f16_u8(halves));
    return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(halves), 16));
}

/* Two rows with 1 or 2 tokens; the second row may be the first again. Sums of every sixteenth
 * product, then of those, in the order of plain C. */
ALWAYS void dot_two_rows_neon(int32_t type, const int n_tokens, const uint8_t *a, const uint8_t *b,
                              const uint8_t *x, int64_t columns, float *out_a, float *out_b,
                              int64_t out_stride) {
    const int64_t size = type == COLIBRI_F32 ? 4 : 2;
    float32x4_t sums[2][2][4];
    for (int t = 0; t < 2; t++)
        for (int q = 0; q < 4; q++) sums[0][t][q] = sums[1][t][q] = vdupq_n_f32(0);
    uint8_t held[4][64] = {{0}}; /* what is left behind the last 16 columns, and zeros */
    for (int64_t i = 0; i < columns; i += 16) {
        const uint8_t *from[4] = {a + i * size, b + i * size, x + i * size,
                                  x + ((n_tokens - 1) * columns + i) * size};
        if (columns - i < 16)
            for (int k = 0; k < 4; k++)
                from[k] = memcpy(held[k], from[k], (size_t)((columns - i) * size));
#pragma GCC unroll 4
        for (int q = 0; q < 4; q++) {
            const float32x4_t wa = load_floats_4(type, from[0] + 4 * q * size);
            const float32x4_t wb = load_floats_4(type, from[1] + 4 * q * size);
#pragma GCC unroll 2
            for (int t = 0; t < n_tokens; t++) {
                const float32x4_t xt = load_floats_4(type, from[2 + t] + 4 * q * size);
                sums[0][t][q] = vfmaq_f32(sums[0][t][q], wa, xt);
                sums[1][t][q] = vfmaq_f32(sums[1][t][q], wb, xt);
            }
        }
    }
    for (int t = 0; t < n_tokens; t++)
        for (int row = 0; row < 2; row++) {
            const float32x4_t *of = sums[row][t];
            const float32x4_t four = vaddq_f32(vaddq_f32(of[0], of[2]), vaddq_f32(of[1], of[3]));
            const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            (row ? out_b : out_a)[t * out_stride] = vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
        }
}

ALWAYS void dot_floats_neon(int32_t type, int32_t n_tokens, const uint8_t *rows, int64_t n_rows,
                            const struct colibri_acts *acts, int32_t first_token, float *out,
                            int64_t out_stride) {
    const int64_t columns = acts->columns, row_bytes = columns * (type == COLIBRI_F32 ? 4 : 2);
    const uint8_t *x = (const uint8_t *)acts->values + first_token * row_bytes;
    for (int64_t row = 0; row < n_rows; row += 2) {
        const int64_t next = row + 1 < n_rows ? row + 1 : row;
        const uint8_t *a = rows + row * row_bytes, *b = rows + next * row_bytes;
        for (int32_t t = 0; t < n_tokens; t += 2)
            dot_two_rows_neon(type, n_tokens == 1 ? 1 : 2, a, b, x + t * row_bytes, columns,
                              out + t * out_stride + row, out + t * out_stride + next, out_stride);
    }
}

FOR_TOKENS(neon_f32, dot_floats_neon, COLIBRI_F32)
FOR_TOKENS(neon_f16, dot_floats_neon, COLIBRI_F16)
FOR_TOKENS(neon_bf16, dot_floats_neon, COLIBRI_BF16)

#endif
