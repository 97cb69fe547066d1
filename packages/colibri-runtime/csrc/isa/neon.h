/* What the NEON kernels share, with and without SDOT (FEAT_DotProd, optional from Armv8.2 on).
 *
 * Kernels compute four rows at once, one a lane; of plain rows a vector holds 16 weights of one
 * row, interleaved 4 of each of four. Sums within a quant block are integers, so a product has the
 * same bits in both layouts and with either way to multiply. Nothing here asks for lines ahead: how
 * far would have to be measured on such a processor.
 */
#ifndef COLIBRI_NEON_H
#define COLIBRI_NEON_H

#include <arm_neon.h>
#include <string.h>

#include "../half.h"

#define NEON_INLINE static inline __attribute__((always_inline))

/* Adds the products of bytes 4 i to 4 i + 3 to lane i. Without SDOT sums of two products are of 16
 * bits: |w| <= 128 and |x| <= 127, which finite activations are rounded to, give 32512. */
NEON_INLINE int32x4_t dot4(int32x4_t sum, int8x16_t w, int8x16_t x) {
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_s32(sum, w, x);
#else
    const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x));
    return vpadalq_s16(sum, vpaddq_s16(low, vmull_high_s8(w, x)));
#endif
}

/* The same with bytes 4 k to 4 k + 3 of x in every lane. */
NEON_INLINE int32x4_t dot4_lane(int32x4_t sum, int8x16_t w, int8x16_t x, const int k) {
#if defined(__ARM_FEATURE_DOTPROD)
#define DOT4_LANE(k) vdotq_laneq_s32(sum, w, x, k)
#else
#define DOT4_LANE(k)                                                                               \
    dot4(sum, w, vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(x), k)))
#endif
    switch (k) { /* intrinsics take constants alone */
    case 0:
        return DOT4_LANE(0);
    case 1:
        return DOT4_LANE(1);
    case 2:
        return DOT4_LANE(2);
    default:
        return DOT4_LANE(3);
    }
#undef DOT4_LANE
}

/* Lane i: the sum of the lanes of rows[i]. */
NEON_INLINE int32x4_t sum_rows(const int32x4_t rows[4]) {
    return vpaddq_s32(vpaddq_s32(rows[0], rows[1]), vpaddq_s32(rows[2], rows[3]));
}

/* Bytes `at` to at + 15 of a plain block; of 16 interleaved blocks bytes at + 4 k to at + 4 k + 3 of
 * four rows, the first of which has its 4-byte units from p on. */
NEON_INLINE uint8x16_t load_part(const int is_x16, const uint8_t *p, const int at, const int k) {
    return vld1q_u8(is_x16 ? p + 16 * (at + 4 * k) : p + at);
}

/* The half floats at byte `at` of the blocks of four rows: of those at p[0] to p[3], or of the
 * `quad`-th four of the interleaved ones at p[0]. */
NEON_INLINE float32x4_t load_scales(const int is_x16, const uint8_t *const p[4], const int quad,
                                    const int at) {
    if (is_x16) return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p[0] + 16 * at + 8 * quad)));
    uint16x4_t halves = vdup_n_u16(colibri_load_u16(p[0] + at));
    halves = vset_lane_u16(colibri_load_u16(p[1] + at), halves, 1);
    halves = vset_lane_u16(colibri_load_u16(p[2] + at), halves, 2);
    halves = vset_lane_u16(colibri_load_u16(p[3] + at), halves, 3);
    return vcvt_f32_f16(vreinterpret_f16_u16(halves));
}

/* Where rows `row` to row + 3 begin; the last one again behind the end. Interleaved: where their
 * group does, four times. */
NEON_INLINE void find_rows(const int is_x16, const uint8_t *rows, int64_t row, int64_t n_rows,
                           int64_t row_bytes, const uint8_t *p[4]) {
    for (int i = 0; i < 4; i++) {
        const int64_t at = is_x16 ? row : row + i < n_rows ? row + i : n_rows - 1;
        p[i] = rows + at * row_bytes;
    }
}

NEON_INLINE void store_rows(float *out, float32x4_t sums, int64_t n) {
    if (n >= 4) {
        vst1q_f32(out, sums);
        return;
    }
    float each[4];
    vst1q_f32(each, sums);
    memcpy(out, each, (size_t)n * sizeof *out);
}

#endif
