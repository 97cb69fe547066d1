/* NEON: products with quant blocks of 256, plain and interleaved.
 *
 * A pass takes 16 columns of four rows: of each row a vector, or interleaved four vectors of 4
 * columns of all four. Scales are unpacked for the four rows at once in both layouts, a row a lane,
 * from the 4-byte words that hold them.
 */
#ifndef COLIBRI_BLOCKS256_NEON_H
#define COLIBRI_BLOCKS256_NEON_H

#include "blocks256.h"
#include "neon.h"

#define QUADS_TOKENS 4 /* at a time */

/* `mask` of the bytes after a move by `left` bits, right where negative. A variable one, so that
 * passes need not be unrolled: sixteen of them in a row take more registers than there are. */
COLIBRI_INLINE uint8x16_t move_bits(uint8x16_t a, const int left, const uint8_t mask) {
    return vandq_u8(vshlq_u8(a, vdupq_n_s8((int8_t)left)), vdupq_n_u8(mask));
}

/* Bytes `at` to at + 3 of the blocks of four rows, a row a lane; see load_scales. */
COLIBRI_INLINE uint8x16_t load_words(const int is_x16, const uint8_t *const p[4], const int quad,
                                     const int at) {
    if (is_x16) return load_part(1, p[0] + 16 * quad, at, 0);
    uint32_t words[4];
    for (int i = 0; i < 4; i++) memcpy(&words[i], p[i] + at, 4);
    uint32x4_t lanes = vdupq_n_u32(words[0]);
    lanes = vsetq_lane_u32(words[1], lanes, 1);
    lanes = vsetq_lane_u32(words[2], lanes, 2);
    return vreinterpretq_u8_u32(vsetq_lane_u32(words[3], lanes, 3));
}

/* Scales of 16 groups, 4 a word, and what sums of 16 columns are multiplied with; for Q4_K and
 * Q5_K 8 of each. */
COLIBRI_INLINE void unpack_scales(const int type, const int is_x16, const uint8_t *const p[4],
                                  const int quad, uint8x16_t scales[4], uint8x16_t mins[4]) {
    if (type == COLIBRI_Q2_K)
        for (int i = 0; i < 4; i++) {
            const uint8x16_t w = load_words(is_x16, p, quad, COLIBRI_Q2_K_SCALES + 4 * i);
            scales[i] = move_bits(w, 0, 15);
            mins[i] = move_bits(w, -4, 15);
        }
    if (type == COLIBRI_Q4_K || type == COLIBRI_Q5_K) {
        const uint8x16_t w0 = load_words(is_x16, p, quad, COLIBRI_Q4_K_SCALES);
        const uint8x16_t w1 = load_words(is_x16, p, quad, COLIBRI_Q4_K_SCALES + 4);
        const uint8x16_t w2 = load_words(is_x16, p, quad, COLIBRI_Q4_K_SCALES + 8);
        scales[0] = move_bits(w0, 0, 63);
        scales[1] = vorrq_u8(move_bits(w2, 0, 15), move_bits(w0, -2, 0x30));
        mins[0] = move_bits(w1, 0, 63);
        mins[1] = vorrq_u8(move_bits(w2, -4, 15), move_bits(w1, -2, 0x30));
    }
    if (type == COLIBRI_Q3_K) {
        const uint8x16_t w[2] = {load_words(is_x16, p, quad, COLIBRI_Q3_K_SCALES),
                                 load_words(is_x16, p, quad, COLIBRI_Q3_K_SCALES + 4)};
        const uint8x16_t high = load_words(is_x16, p, quad, COLIBRI_Q3_K_SCALES + 8);
        for (int i = 0; i < 4; i++) {
            const uint8x16_t low = move_bits(w[i % 2], i < 2 ? 0 : -4, 15);
            const uint8x16_t six = vorrq_u8(low, move_bits(high, 4 - 2 * i, 0x30));
            mins[i] = scales[i] = vsubq_u8(six, vdupq_n_u8(32));
        }
    }
    if (type == COLIBRI_Q6_K)
        for (int i = 0; i < 4; i++)
            mins[i] = scales[i] = load_words(is_x16, p, quad, COLIBRI_Q6_K_SCALES + 4 * i);
}

/* Byte k of every lane. */
COLIBRI_INLINE int32x4_t pick_byte(uint8x16_t bytes, const int k, const int is_signed) {
    const int32x4_t top =
        vshlq_s32(vreinterpretq_s32_u8(bytes), vdupq_n_s32(24 - 8 * k)); /* byte k is the highest */
    return is_signed ? vshrq_n_s32(top, 24)
                     : vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(top), 24));
}

/* Weights 16 pass to 16 pass + 15 of the block at p, without their zero taken off; interleaved, the
 * k-th 4 of these of four rows. */
COLIBRI_INLINE int8x16_t unpack_weights(const int type, const int is_x16, const uint8_t *p,
                                        const int pass, const int k) {
    uint8x16_t w;
    if (type == COLIBRI_Q4_K || type == COLIBRI_Q5_K) {
        const int start = type == COLIBRI_Q4_K ? COLIBRI_Q4_K_QUANTS : COLIBRI_Q5_K_QUANTS;
        w = load_part(is_x16, p, start + pass / 4 * 32 + pass % 2 * 16, k);
        w = move_bits(w, pass % 4 < 2 ? 0 : -4, 15);
        if (type == COLIBRI_Q5_K) {
            const int at = COLIBRI_Q5_K_FIFTH_BITS + pass % 2 * 16;
            w = vorrq_u8(w, move_bits(load_part(is_x16, p, at, k), 4 - pass / 2, 16));
        }
    } else if (type == COLIBRI_Q6_K) {
        const int low = COLIBRI_Q6_K_LOW + pass / 8 * 64 + pass % 4 * 16;
        const int high = COLIBRI_Q6_K_HIGH + pass / 8 * 32 + pass % 2 * 16;
        w = move_bits(load_part(is_x16, p, low, k), pass % 8 < 4 ? 0 : -4, 15);
        w = vorrq_u8(w, move_bits(load_part(is_x16, p, high, k), 4 - pass % 8 / 2 * 2, 0x30));
    } else {
        const int start = type == COLIBRI_Q2_K ? COLIBRI_Q2_K_QUANTS : COLIBRI_Q3_K_QUANTS;
        w = load_part(is_x16, p, start + pass / 8 * 32 + pass % 2 * 16, k);
        w = move_bits(w, -(pass % 8 / 2 * 2), 3);
        if (type == COLIBRI_Q3_K) {
            const int at = COLIBRI_Q3_K_THIRD_BITS + pass % 2 * 16;
            w = vorrq_u8(w, move_bits(load_part(is_x16, p, at, k), 2 - pass / 2, 4));
        }
    }
    return vreinterpretq_s8_u8(w);
}

/* One block of four rows, plain at p[0] to p[3] or the `quad`-th four of those at p[0], with the
 * groups of activations of n tokens. */
COLIBRI_INLINE void add_blocks(const int type, const int is_x16, const int d_at, const int dmin_at,
                               const uint8_t *const p[4], const int quad,
                               const struct colibri_act_row *act, const int n,
                               float32x4_t *totals) {
    const int is_32 = type == COLIBRI_Q4_K || type == COLIBRI_Q5_K; /* columns that share a scale */
    const int is_signed = type == COLIBRI_Q3_K || type == COLIBRI_Q6_K;
    const int n_groups = is_32 ? 8 : 16;
    const float32x4_t d = load_scales(is_x16, p, quad, d_at);
    uint8x16_t scales[4], mins[4];
    int32x4_t sum[QUADS_TOKENS], group[QUADS_TOKENS], offset[QUADS_TOKENS];
    unpack_scales(type, is_x16, p, quad, scales, mins);
    for (int t = 0; t < n; t++) offset[t] = group[t] = vdupq_n_s32(0);
    for (int i = 0; i < n_groups; i++) {
        const int32x4_t min = pick_byte(mins[i / 4], i % 4, is_signed);
        for (int t = 0; t < n; t++) {
            const int16_t *sums = act[t].sums16;
            offset[t] = vmlaq_n_s32(offset[t], min, is_32 ? sums[2 * i] + sums[2 * i + 1] : sums[i]);
        }
    }
    for (int t = 0; t < n; t++) {
        if (is_signed) { /* sum(scale * (q - zero) * x) begins at -zero * sum(scale * x) */
            sum[t] = vmulq_n_s32(offset[t], type == COLIBRI_Q3_K ? -4 : -32);
        } else {
            const float32x4_t dmin = load_scales(is_x16, p, quad, dmin_at);
            totals[t] = vfmsq_f32(totals[t], vmulq_n_f32(dmin, act[t].scales[0]),
                                  vcvtq_f32_s32(offset[t]));
            sum[t] = vdupq_n_s32(0);
        }
    }
    for (int pass = 0; pass < 16; pass++) {
        int8x16_t x[QUADS_TOKENS];
        int32x4_t rows[QUADS_TOKENS][4];
        for (int t = 0; t < n; t++) x[t] = vld1q_s8(act[t].values + 16 * pass);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            const int8x16_t w = is_x16 ? unpack_weights(type, 1, p[0] + 16 * quad, pass, k)
                                       : unpack_weights(type, 0, p[k], pass, 0);
            for (int t = 0; t < n; t++)
                if (is_x16)
                    group[t] = dot4_lane(group[t], w, x[t], k);
                else
                    rows[t][k] = dot4(vdupq_n_s32(0), w, x[t]);
        }
        if (!is_x16)
            for (int t = 0; t < n; t++) group[t] = vaddq_s32(group[t], sum_rows(rows[t]));
        if (is_32 && pass % 2 == 0) continue;
        const int at = is_32 ? pass / 2 : pass;
        const int32x4_t scale = pick_byte(scales[at / 4], at % 4, is_signed);
        for (int t = 0; t < n; t++) {
            sum[t] = vmlaq_s32(sum[t], group[t], scale);
            group[t] = vdupq_n_s32(0);
        }
    }
    for (int t = 0; t < n; t++)
        totals[t] =
            vfmaq_f32(totals[t], vmulq_n_f32(d, act[t].scales[0]), vcvtq_f32_s32(sum[t]));
}

/* Four plain rows or 16 interleaved ones with n tokens. */
COLIBRI_INLINE void quads_tokens(const int type, const int is_x16, const int bytes, const int d_at,
                                 const int dmin_at, const uint8_t *rows, int64_t row,
                                 int64_t n_rows, int n_blocks, const struct colibri_act_row *acts,
                                 const int n, float *out, int64_t out_stride) {
    const int n_quads = is_x16 ? COLIBRI_ROWS / 4 : 1;
    const uint8_t *p[4];
    struct colibri_act_row act[QUADS_TOKENS];
    float32x4_t totals[COLIBRI_ROWS / 4][QUADS_TOKENS];
    find_rows(is_x16, rows, row, n_rows, (int64_t)n_blocks * bytes, p);
    for (int t = 0; t < n; t++) act[t] = acts[t];
    for (int quad = 0; quad < n_quads; quad++)
        for (int t = 0; t < n; t++) totals[quad][t] = vdupq_n_f32(0);
    for (int b = 0; b < n_blocks; b++) {
        for (int quad = 0; quad < n_quads; quad++)
            add_blocks(type, is_x16, d_at, dmin_at, p, quad, act, n, totals[quad]);
        for (int t = 0; t < n; t++) colibri_act_advance(&act[t]);
        for (int i = 0; i < 4; i++) p[i] += is_x16 ? COLIBRI_ROWS * bytes : bytes;
    }
    for (int quad = 0; quad < n_quads; quad++)
        for (int t = 0; t < n; t++)
            store_rows(out + t * out_stride + row + 4 * quad, totals[quad][t],
                       n_rows - row - 4 * quad);
}

#define DEFINE_QUADS(name, is_x16, type, bytes, d_at, dmin_at)                                     \
    static void dot_##name(const uint8_t *rows, int64_t n_rows, const struct colibri_acts *acts,   \
                           int32_t first_token, int32_t n_tokens, float *out,                      \
                           int64_t out_stride) {                                                   \
        const int n_blocks = acts->columns / 256;                                                  \
        struct colibri_act_row act[COLIBRI_KERNEL_TOKENS];                                         \
        for (int t = 0; t < n_tokens; t++) act[t] = colibri_act_row(acts, first_token + t);        \
        for (int64_t r = 0; r < n_rows; r += is_x16 ? COLIBRI_ROWS : 4) {                          \
            int t = 0;                                                                             \
            for (; n_tokens - t >= 4; t += 4)                                                      \
                quads_tokens(type, is_x16, bytes, d_at, dmin_at, rows, r, n_rows, n_blocks,        \
                             act + t, 4, out + t * out_stride, out_stride);                        \
            if (n_tokens - t >= 2) {                                                               \
                quads_tokens(type, is_x16, bytes, d_at, dmin_at, rows, r, n_rows, n_blocks,        \
                             act + t, 2, out + t * out_stride, out_stride);                        \
                t += 2;                                                                            \
            }                                                                                      \
            if (n_tokens - t == 1)                                                                 \
                quads_tokens(type, is_x16, bytes, d_at, dmin_at, rows, r, n_rows, n_blocks,        \
                             act + t, 1, out + t * out_stride, out_stride);                        \
        }                                                                                          \
    }

#define DEFINE_BOTH(name, type, bytes, d_at, dmin_at)                                              \
    DEFINE_QUADS(name, 0, type, bytes, d_at, dmin_at)                                              \
    DEFINE_QUADS(name##_x16, 1, type, bytes, d_at, dmin_at)

DEFINE_BOTH(q2_k, COLIBRI_Q2_K, COLIBRI_Q2_K_BYTES, COLIBRI_Q2_K_D, COLIBRI_Q2_K_DMIN)
DEFINE_BOTH(q3_k, COLIBRI_Q3_K, COLIBRI_Q3_K_BYTES, COLIBRI_Q3_K_D, -1)
DEFINE_BOTH(q4_k, COLIBRI_Q4_K, COLIBRI_Q4_K_BYTES, COLIBRI_Q4_K_D, COLIBRI_Q4_K_DMIN)
DEFINE_BOTH(q5_k, COLIBRI_Q5_K, COLIBRI_Q5_K_BYTES, COLIBRI_Q4_K_D, COLIBRI_Q4_K_DMIN)
DEFINE_BOTH(q6_k, COLIBRI_Q6_K, COLIBRI_Q6_K_BYTES, COLIBRI_Q6_K_D, -1)

#endif
