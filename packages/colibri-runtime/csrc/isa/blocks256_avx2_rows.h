/* Products with plain rows of quant blocks of 256, AVX2.
 *
 * Two rows advance together: their scales are unpacked at once, a row in each half of a register.
 * A block of a row is eight registers of 32 consecutive weights. Pairs of products fit 16 bits
 * (2 * 63 * 127 at most), so the scales multiply pairs.
 */
#ifndef COLIBRI_BLOCKS256_AVX2_ROWS_H
#define COLIBRI_BLOCKS256_AVX2_ROWS_H

#include "../half.h"
#include "blocks256.h"
#include "blocks256_avx2_x16.h"

#define ROWS2_TOKENS 4 /* at a time */

/* int16 of one block in each of 2 rows, row i in half i. */
struct rows2 {
    __m256i scales[2]; /* of groups 0 to 7 and 8 to 15; Q4_K, Q5_K: the first alone */
    __m256i mins[2];   /* what sums of 16 columns 0 to 7 and 8 to 15 are multiplied with */
};

COLIBRI_INLINE __m256i both(__m128i half) { return _mm256_broadcastsi128_si256(half); }

/* 16 bytes from `offset` on of the block of each row. */
COLIBRI_INLINE __m256i load_rows2(const uint8_t *const *p, const int offset) {
    __m128i first = _mm_loadu_si128((const __m128i *)(p[0] + offset));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(first),
                                   _mm_loadu_si128((const __m128i *)(p[1] + offset)), 1);
}

COLIBRI_INLINE void widen2(__m256i bytes, const int is_signed, __m256i *low_high) {
    __m256i zero = _mm256_setzero_si256();
    if (is_signed) {
        low_high[0] = _mm256_srai_epi16(_mm256_unpacklo_epi8(zero, bytes), 8);
        low_high[1] = _mm256_srai_epi16(_mm256_unpackhi_epi8(zero, bytes), 8);
    } else {
        low_high[0] = _mm256_unpacklo_epi8(bytes, zero);
        low_high[1] = _mm256_unpackhi_epi8(bytes, zero);
    }
}

COLIBRI_INLINE void unpack_rows2(const int type, const uint8_t *const *p, struct rows2 *rows) {
    if (type == COLIBRI_Q2_K) {
        __m256i packed = load_rows2(p, COLIBRI_Q2_K_SCALES);
        widen2(and_bytes(packed, 15), 0, rows->scales);
        widen2(move_bits(packed, -4, 15), 0, rows->mins);
    }
    if (type == COLIBRI_Q4_K || type == COLIBRI_Q5_K) {
        __m256i start = load_rows2(p, 0); /* d, dmin and the words w0, w1, w2 of 4 packed bytes */
        /* Scales and minima 0 to 3: six bits of w0 and w1. 4 to 7: the low and the high nibbles
         * of w2, below the upper two bits of w0 and w1. */
        __m256i nibbles = _mm256_srlv_epi32(_mm256_shuffle_epi32(start, 0xff),
                                            both(_mm_setr_epi32(0, 0, 4, 4)));
        __m256i upper = _mm256_shuffle_epi32(move_bits(start, -2, 0x30), 0xa5);
        __m256i bytes = _mm256_blend_epi32(_mm256_shuffle_epi32(and_bytes(start, 63), 0xa5),
                                           _mm256_or_si256(and_bytes(nibbles, 15), upper), 0xaa);
        widen2(bytes, 0, rows->scales); /* scales 0 to 7, minima 0 to 7 */
        rows->mins[0] = _mm256_unpacklo_epi16(rows->scales[1], rows->scales[1]);
        rows->mins[1] = _mm256_unpackhi_epi16(rows->scales[1], rows->scales[1]);
    }
    if (type == COLIBRI_Q3_K) {
        /* The last 16 bytes: 2 of quants, 12 of scales, 2 of d. */
        __m256i end = load_rows2(p, COLIBRI_Q3_K_BYTES - 16);
        __m256i low = _mm256_shuffle_epi8(
            end, both(_mm_setr_epi8(2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5, 6, 7, 8, 9)));
        __m256i high = _mm256_shuffle_epi8(end, both(_mm_set1_epi32(0x0d0c0b0a)));
        low = and_bytes(_mm256_srlv_epi32(low, both(_mm_setr_epi32(0, 0, 4, 4))), 15);
        high = _mm256_srlv_epi32(high, both(_mm_setr_epi32(0, 2, 4, 6)));
        high = _mm256_slli_epi16(and_bytes(high, 3), 4);
        widen2(_mm256_sub_epi8(_mm256_or_si256(low, high), _mm256_set1_epi8(32)), 1,
               rows->scales);
    }
    if (type == COLIBRI_Q6_K) widen2(load_rows2(p, COLIBRI_Q6_K_SCALES), 1, rows->scales);
    if (type == COLIBRI_Q3_K || type == COLIBRI_Q6_K) {
        rows->mins[0] = rows->scales[0];
        rows->mins[1] = rows->scales[1];
    }
}

/* Weights 32 i to 32 i + 31 of a block, as unsigned bytes. */
COLIBRI_INLINE __m256i weights_of_row(const int type, const uint8_t *p, const int i) {
    const int half = i / 4, k = i % 4;
    if (type == COLIBRI_Q4_K || type == COLIBRI_Q5_K) {
        const int start = type == COLIBRI_Q4_K ? COLIBRI_Q4_K_QUANTS : COLIBRI_Q5_K_QUANTS;
        __m256i low = move_bits(load8(p + start + i / 2 * 32), i % 2 * -4, 15);
        if (type == COLIBRI_Q4_K) return low;
        return _mm256_or_si256(low, move_bits(load8(p + COLIBRI_Q5_K_FIFTH_BITS), 4 - i, 16));
    }
    if (type == COLIBRI_Q6_K) {
        __m256i low = load8(p + COLIBRI_Q6_K_LOW + 64 * half + k % 2 * 32);
        __m256i high = load8(p + COLIBRI_Q6_K_HIGH + 32 * half);
        return _mm256_or_si256(move_bits(low, k / 2 * -4, 15), move_bits(high, 4 - 2 * k, 0x30));
    }
    const int start = type == COLIBRI_Q2_K ? COLIBRI_Q2_K_QUANTS : COLIBRI_Q3_K_QUANTS;
    __m256i low = move_bits(load8(p + start + 32 * half), -2 * k, 3);
    if (type == COLIBRI_Q2_K) return low;
    return _mm256_or_si256(low, move_bits(load8(p + COLIBRI_Q3_K_THIRD_BITS), 2 - i, 4));
}

/* The scale of each pair of these weights; `scales` as stored from the halves of struct rows2. */
COLIBRI_INLINE __m256i scales_of_row(const int type, const int16_t *low, const int16_t *high,
                                     const int i) {
    const int is_32 = type == COLIBRI_Q4_K || type == COLIBRI_Q5_K;
    const int16_t *from = is_32 || i < 4 ? low : high;
    const int first = is_32 ? i : i % 4 * 2, second = is_32 ? i : i % 4 * 2 + 1;
    __m256i index = _mm256_setr_m128i(_mm_set1_epi16((int16_t)(0x100 + 0x202 * first)),
                                      _mm_set1_epi16((int16_t)(0x100 + 0x202 * second)));
    return _mm256_shuffle_epi8(both(_mm_load_si128((const __m128i *)from)), index);
}

COLIBRI_INLINE float sum_of_lanes(__m256 a) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

COLIBRI_INLINE float half_at(const uint8_t *p) {
    return colibri_float_of_half(colibri_load_u16(p));
}

/* sums[2 * t + r]: row r with token t. */
COLIBRI_INLINE void rows2_tokens(const int type, const int bytes, const int d_at,
                                 const int dmin_at, const uint8_t *const *rows, int n_blocks,
                                 const struct colibri_act_row *acts, const int n, float *sums) {
    struct colibri_act_row act[ROWS2_TOKENS];
    const uint8_t *p[2] = {rows[0], rows[1]};
    const int64_t ahead = 2 * (int64_t)n_blocks * bytes; /* the next two rows */
    __m256 sum[2][ROWS2_TOKENS], offset[ROWS2_TOKENS];
    for (int t = 0; t < n; t++) {
        act[t] = acts[t];
        offset[t] = sum[0][t] = sum[1][t] = _mm256_setzero_ps();
    }
    for (int b = 0; b < n_blocks; b++) {
        struct rows2 header;
        _Alignas(32) int16_t scales[2][16];
        unpack_rows2(type, p, &header);
        _mm256_store_si256((__m256i *)scales[0], header.scales[0]);
        _mm256_store_si256((__m256i *)scales[1], header.scales[1]);
        float d[2] = {half_at(p[0] + d_at), half_at(p[1] + d_at)};
        const float zero = type == COLIBRI_Q3_K ? 4.0f : 32.0f;
        float less[2] = {dmin_at < 0 ? zero * d[0] : half_at(p[0] + dmin_at),
                         dmin_at < 0 ? zero * d[1] : half_at(p[1] + dmin_at)};
        __m256 dmin = _mm256_setr_m128(_mm_set1_ps(less[0]), _mm_set1_ps(less[1]));
        for (int t = 0; t < n; t++) {
            const __m128i *sums16 = (const __m128i *)act[t].sums16;
            __m256i products = _mm256_add_epi32(
                _mm256_madd_epi16(header.mins[0], both(_mm_loadu_si128(sums16))),
                _mm256_madd_epi16(header.mins[1], both(_mm_loadu_si128(sums16 + 1))));
            offset[t] = _mm256_fmadd_ps(_mm256_mul_ps(dmin, _mm256_set1_ps(act[t].scales[0])),
                                        _mm256_cvtepi32_ps(products), offset[t]);
        }
#pragma GCC unroll 2
        for (int r = 0; r < 2; r++) {
            __m256i products[ROWS2_TOKENS];
            for (int t = 0; t < n; t++)
                products[t] = _mm256_setzero_si256();
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                __m256i weights = weights_of_row(type, p[r], i);
                __m256i scale = scales_of_row(type, scales[0] + 8 * r, scales[1] + 8 * r, i);
                for (int t = 0; t < n; t++) {
                    const int8_t *x = act[t].values + 32 * i;
                    __m256i pairs = _mm256_maddubs_epi16(
                        weights, _mm256_load_si256((const __m256i *)x));
                    products[t] = add_widened(products[t], pairs, scale);
                }
            }
            for (int t = 0; t < n; t++)
                sum[r][t] = _mm256_fmadd_ps(_mm256_set1_ps(d[r] * act[t].scales[0]),
                                            _mm256_cvtepi32_ps(products[t]), sum[r][t]);
            colibri_fetch(p[r], ahead, bytes);
            p[r] += bytes;
        }
        for (int t = 0; t < n; t++)
            colibri_act_advance(&act[t]);
    }
    for (int t = 0; t < n; t++) {
        _Alignas(32) float m[8];
        _mm256_store_ps(m, offset[t]);
        sums[2 * t] = sum_of_lanes(sum[0][t]) - ((m[0] + m[1]) + (m[2] + m[3]));
        sums[2 * t + 1] = sum_of_lanes(sum[1][t]) - ((m[4] + m[5]) + (m[6] + m[7]));
    }
}

#define DEFINE_ROWS(name, type, bytes, d_at, dmin_at)                                              \
    static void dot_##name(const uint8_t *rows, int64_t n_rows, const struct colibri_acts *acts,   \
                           int32_t first_token, int32_t n_tokens, float *out,                      \
                           int64_t out_stride) {                                                   \
        const int n_blocks = acts->columns / 256;                                                  \
        const int64_t row_bytes = (int64_t)n_blocks * bytes;                                       \
        struct colibri_act_row act[COLIBRI_KERNEL_TOKENS];                                         \
        for (int t = 0; t < n_tokens; t++)                                                         \
            act[t] = colibri_act_row(acts, first_token + t);                                       \
        for (int64_t r = 0; r < n_rows; r += 2) {                                                  \
            const int n = n_rows - r < 2 ? 1 : 2;                                                  \
            const uint8_t *p[2] = {rows + r * row_bytes, rows + (r + n - 1) * row_bytes};          \
            float sums[COLIBRI_KERNEL_TOKENS * 2];                                                 \
            int t = 0;                                                                             \
            for (; n_tokens - t >= 4; t += 4)                                                      \
                rows2_tokens(type, bytes, d_at, dmin_at, p, n_blocks, act + t, 4, sums + 2 * t);   \
            if (n_tokens - t >= 2) {                                                               \
                rows2_tokens(type, bytes, d_at, dmin_at, p, n_blocks, act + t, 2, sums + 2 * t);   \
                t += 2;                                                                            \
            }                                                                                      \
            if (n_tokens - t == 1)                                                                 \
                rows2_tokens(type, bytes, d_at, dmin_at, p, n_blocks, act + t, 1, sums + 2 * t);   \
            for (t = 0; t < n_tokens; t++)                                                         \
                for (int i = 0; i < n; i++)                                                        \
                    out[t * out_stride + r + i] = sums[2 * t + i];                                 \
        }                                                                                          \
    }

DEFINE_ROWS(q2_k, COLIBRI_Q2_K, COLIBRI_Q2_K_BYTES, COLIBRI_Q2_K_D, COLIBRI_Q2_K_DMIN)
DEFINE_ROWS(q3_k, COLIBRI_Q3_K, COLIBRI_Q3_K_BYTES, COLIBRI_Q3_K_D, -1)
DEFINE_ROWS(q4_k, COLIBRI_Q4_K, COLIBRI_Q4_K_BYTES, COLIBRI_Q4_K_D, COLIBRI_Q4_K_DMIN)
DEFINE_ROWS(q5_k, COLIBRI_Q5_K, COLIBRI_Q5_K_BYTES, COLIBRI_Q4_K_D, COLIBRI_Q4_K_DMIN)
DEFINE_ROWS(q6_k, COLIBRI_Q6_K, COLIBRI_Q6_K_BYTES, COLIBRI_Q6_K_D, -1)

#endif
