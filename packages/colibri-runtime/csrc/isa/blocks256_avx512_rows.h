/* Products with plain rows of quant blocks of 256, AVX-512.
 *
 * Four rows advance together: their scales are unpacked at once, a row in each quarter of a
 * register, and share the activations. A block of a row is four registers of 64 weights, in the
 * order in which its bytes hold them; activations are put into the same order. Pairs of products
 * fit 16 bits (2 * 63 * 127 at most), so the scales, too, multiply pairs.
 */
#ifndef COLIBRI_BLOCKS256_AVX512_ROWS_H
#define COLIBRI_BLOCKS256_AVX512_ROWS_H

#include <immintrin.h>

#include "blocks256.h"

#define ROWS4_TOKENS 4 /* at a time: their sums for 4 rows fill 16 registers */

/* Of one block in each of 4 rows; each register holds row i in its quarter i. */
struct rows4 {
    __m512i scales[2]; /* int16, of groups 0 to 7 and 8 to 15; Q4_K, Q5_K: the first alone */
    __m512i mins[2];   /* int16, what sums of 16 columns 0 to 7 and 8 to 15 are multiplied with */
    __m512 d;
    __m512 dmin; /* the factor of mins */
};

/* 16 bytes from `offset` on of the block of each row. */
COLIBRI_INLINE __m512i load_rows4(const uint8_t *const *p, int offset) {
    __m512i rows = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(p[0] + offset)));
    rows = _mm512_inserti32x4(rows, _mm_loadu_si128((const __m128i *)(p[1] + offset)), 1);
    rows = _mm512_inserti32x4(rows, _mm_loadu_si128((const __m128i *)(p[2] + offset)), 2);
    return _mm512_inserti32x4(rows, _mm_loadu_si128((const __m128i *)(p[3] + offset)), 3);
}

/* Half float k of each quarter, in all four lanes of the quarter. */
COLIBRI_INLINE __m512 halves_rows4(__m512i rows, int k) {
    __m512i index = _mm512_castsi256_si512(_mm256_add_epi16(
        _mm256_set1_epi16((int16_t)k),
        _mm256_setr_epi16(0, 0, 0, 0, 8, 8, 8, 8, 16, 16, 16, 16, 24, 24, 24, 24)));
    return _mm512_cvtph_ps(_mm512_castsi512_si256(_mm512_permutexvar_epi16(index, rows)));
}

COLIBRI_INLINE __m512i and8(__m512i a, int mask) {
    return _mm512_and_si512(a, _mm512_set1_epi8((char)mask));
}

/* (a & mask) | b, for each byte */
COLIBRI_INLINE __m512i and8_or(__m512i a, int mask, __m512i b) {
    return _mm512_ternarylogic_epi32(b, a, _mm512_set1_epi8((char)mask), 0xf8);
}

COLIBRI_INLINE __m512i quarters(__m128i quarter) { return _mm512_broadcast_i32x4(quarter); }

/* 32 bytes at each of two places. */
COLIBRI_INLINE __m512i load_halves(const void *first, const void *second) {
    __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)first));
    return _mm512_inserti64x4(low, _mm256_loadu_si256((const __m256i *)second), 1);
}

/* Numbers of 16 bits, one for each half. */
COLIBRI_INLINE __m512i pair_of_halves(int first, int second) {
    return _mm512_inserti64x4(_mm512_set1_epi16((int16_t)first),
                              _mm256_set1_epi16((int16_t)second), 1);
}

/* 256 activations in the order in which the bytes of a block hold its weights. */
COLIBRI_INLINE void order_acts(const int type, const int8_t *x, __m512i *acts) {
    for (int i = 0; i < 4; i++)
        if (type == COLIBRI_Q6_K)
            acts[i] = _mm512_loadu_si512(x + 64 * i);
        else if (type == COLIBRI_Q4_K || type == COLIBRI_Q5_K)
            acts[i] = load_halves(x + i / 2 * 128 + i % 2 * 32, x + i / 2 * 128 + i % 2 * 32 + 64);
        else
            acts[i] = load_halves(x + 32 * i, x + 128 + 32 * i);
}

/* int16 a of the first quarter all over that quarter, b of the second, c and d. */
COLIBRI_INLINE __m512i spread_scales(__m512i scales, int a, int b, int c, int d) {
    __m512i index = _mm512_castsi128_si512(_mm_set1_epi16((int16_t)(0x100 + 0x202 * a)));
    index = _mm512_inserti32x4(index, _mm_set1_epi16((int16_t)(0x100 + 0x202 * b)), 1);
    index = _mm512_inserti32x4(index, _mm_set1_epi16((int16_t)(0x100 + 0x202 * c)), 2);
    index = _mm512_inserti32x4(index, _mm_set1_epi16((int16_t)(0x100 + 0x202 * d)), 3);
    return _mm512_shuffle_epi8(scales, index);
}

/* The scale of each pair of products of a row; low and high: the row's quarters of struct rows4. */
COLIBRI_INLINE void scales_of_row(const int type, const int16_t *low, const int16_t *high,
                                  __m512i *scales) {
    __m512i first = quarters(_mm_load_si128((const __m128i *)low));
    if (type == COLIBRI_Q4_K || type == COLIBRI_Q5_K) {
        scales[0] = spread_scales(first, 0, 0, 2, 2);
        scales[1] = spread_scales(first, 1, 1, 3, 3);
        scales[2] = spread_scales(first, 4, 4, 6, 6);
        scales[3] = spread_scales(first, 5, 5, 7, 7);
    } else if (type == COLIBRI_Q6_K) {
        __m512i second = quarters(_mm_load_si128((const __m128i *)high));
        scales[0] = spread_scales(first, 0, 1, 2, 3);
        scales[1] = spread_scales(first, 4, 5, 6, 7);
        scales[2] = spread_scales(second, 0, 1, 2, 3);
        scales[3] = spread_scales(second, 4, 5, 6, 7);
    } else {
        first = _mm512_mask_broadcast_i32x4(first, 0xff00, _mm_load_si128((const __m128i *)high));
        for (int j = 0; j < 4; j++)
            scales[j] = spread_scales(first, 2 * j, 2 * j + 1, 2 * j, 2 * j + 1);
    }
}

/* Unsigned bytes of each quarter as int16. */
COLIBRI_INLINE void widen(__m512i bytes, __m512i *low_high) {
    low_high[0] = _mm512_unpacklo_epi8(bytes, _mm512_setzero_si512());
    low_high[1] = _mm512_unpackhi_epi8(bytes, _mm512_setzero_si512());
}

COLIBRI_INLINE void widen_signed(__m512i bytes, __m512i *low_high) {
    low_high[0] = _mm512_srai_epi16(_mm512_unpacklo_epi8(bytes, bytes), 8);
    low_high[1] = _mm512_srai_epi16(_mm512_unpackhi_epi8(bytes, bytes), 8);
}

COLIBRI_INLINE struct rows4 header_q2_k(const uint8_t *const *p) {
    struct rows4 rows;
    __m512i packed = load_rows4(p, COLIBRI_Q2_K_SCALES);
    __m512i end = load_rows4(p, COLIBRI_Q2_K_BYTES - 16);
    widen(and8(packed, 15), rows.scales);
    widen(and8(_mm512_srli_epi16(packed, 4), 15), rows.mins);
    rows.d = halves_rows4(end, 6);
    rows.dmin = halves_rows4(end, 7);
    return rows;
}

COLIBRI_INLINE void weights_q2_k(const uint8_t *p, __m512i *weights) {
    __m512i w = _mm512_loadu_si512(p + COLIBRI_Q2_K_QUANTS);
    for (int j = 0; j < 4; j++)
        weights[j] = and8(_mm512_srli_epi16(w, (unsigned)(2 * j)), 3);
}

COLIBRI_INLINE struct rows4 header_q3_k(const uint8_t *const *p) {
    struct rows4 rows;
    /* The last 16 bytes: 2 of quants, 12 of scales, 2 of d. */
    __m512i end = load_rows4(p, COLIBRI_Q3_K_BYTES - 16);
    __m512i low = _mm512_shuffle_epi8(
        end, quarters(_mm_setr_epi8(2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5, 6, 7, 8, 9)));
    __m512i high = _mm512_shuffle_epi8(
        end, quarters(_mm_setr_epi8(10, 11, 12, 13, 10, 11, 12, 13, 10, 11, 12, 13, 10, 11, 12,
                                    13)));
    low = and8(_mm512_srlv_epi32(low, quarters(_mm_setr_epi32(0, 0, 4, 4))), 15);
    high = _mm512_srlv_epi32(high, quarters(_mm_setr_epi32(0, 2, 4, 6)));
    high = _mm512_slli_epi16(and8(high, 3), 4);
    widen_signed(_mm512_sub_epi8(_mm512_or_si512(low, high), _mm512_set1_epi8(32)), rows.scales);
    rows.mins[0] = rows.scales[0];
    rows.mins[1] = rows.scales[1];
    rows.d = halves_rows4(end, 7);
    rows.dmin = _mm512_mul_ps(rows.d, _mm512_set1_ps(4));
    return rows;
}

COLIBRI_INLINE void weights_q3_k(const uint8_t *p, __m512i *weights) {
    __m512i w = _mm512_loadu_si512(p + COLIBRI_Q3_K_QUANTS);
    __m512i bits = load_halves(p + COLIBRI_Q3_K_THIRD_BITS, p + COLIBRI_Q3_K_THIRD_BITS);
    bits = _mm512_sllv_epi16(bits, pair_of_halves(4, 0)); /* bits 4 to 7 count in both halves */
    for (int j = 0; j < 4; j++)
        weights[j] = and8_or(_mm512_srli_epi16(bits, (unsigned)(2 + j)), 4,
                             and8(_mm512_srli_epi16(w, (unsigned)(2 * j)), 3));
}

COLIBRI_INLINE struct rows4 header_q45_k(const uint8_t *const *p) {
    struct rows4 rows;
    __m512i start = load_rows4(p, 0); /* d, dmin and the words w0, w1, w2 of 4 packed bytes */
    __m512i six = and8(start, 63), two = and8(_mm512_srli_epi16(start, 2), 0x30);
    /* Scales and minima 0 to 3: six bits of w0 and w1. 4 to 7: the low and the high nibbles of
     * w2, below the upper two bits of w0 and w1. */
    __m512i nibbles = and8(_mm512_srlv_epi32(_mm512_shuffle_epi32(start, 0xff),
                                             quarters(_mm_setr_epi32(0, 0, 4, 4))), 15);
    __m512i bytes = _mm512_mask_or_epi32(_mm512_shuffle_epi32(six, 0xa5), 0xaaaa, nibbles,
                                         _mm512_shuffle_epi32(two, 0xa5));
    widen(bytes, rows.scales); /* scales 0 to 7, minima 0 to 7 */
    rows.mins[0] = _mm512_unpacklo_epi16(rows.scales[1], rows.scales[1]);
    rows.mins[1] = _mm512_unpackhi_epi16(rows.scales[1], rows.scales[1]);
    rows.d = halves_rows4(start, 0);
    rows.dmin = halves_rows4(start, 1);
    return rows;
}

COLIBRI_INLINE void nibbles_q45_k(const uint8_t *p, __m512i *weights) {
    for (int i = 0; i < 2; i++) {
        __m512i w = _mm512_loadu_si512(p + 64 * i);
        weights[2 * i] = and8(w, 15);
        weights[2 * i + 1] = and8(_mm512_srli_epi16(w, 4), 15);
    }
}

COLIBRI_INLINE void weights_q4_k(const uint8_t *p, __m512i *weights) {
    nibbles_q45_k(p + COLIBRI_Q4_K_QUANTS, weights);
}

COLIBRI_INLINE void weights_q5_k(const uint8_t *p, __m512i *weights) {
    __m512i bits = load_halves(p + COLIBRI_Q5_K_FIFTH_BITS, p + COLIBRI_Q5_K_FIFTH_BITS);
    nibbles_q45_k(p + COLIBRI_Q5_K_QUANTS, weights);
    /* Groups 0 and 2, 1 and 3, 4 and 6, 5 and 7: that bit of each byte to bit 4. */
    weights[0] = and8_or(_mm512_sllv_epi16(bits, pair_of_halves(4, 2)), 16, weights[0]);
    weights[1] = and8_or(_mm512_sllv_epi16(bits, pair_of_halves(3, 1)), 16, weights[1]);
    weights[2] = and8_or(_mm512_srlv_epi16(bits, pair_of_halves(0, 2)), 16, weights[2]);
    weights[3] = and8_or(_mm512_srlv_epi16(bits, pair_of_halves(1, 3)), 16, weights[3]);
}

COLIBRI_INLINE struct rows4 header_q6_k(const uint8_t *const *p) {
    struct rows4 rows;
    widen_signed(load_rows4(p, COLIBRI_Q6_K_SCALES), rows.scales);
    rows.mins[0] = rows.scales[0];
    rows.mins[1] = rows.scales[1];
    rows.d = halves_rows4(load_rows4(p, COLIBRI_Q6_K_BYTES - 16), 7);
    rows.dmin = _mm512_mul_ps(rows.d, _mm512_set1_ps(32));
    return rows;
}

COLIBRI_INLINE void weights_q6_k(const uint8_t *p, __m512i *weights) {
    for (int half = 0; half < 2; half++) {
        const uint8_t *high = p + COLIBRI_Q6_K_HIGH + 32 * half;
        __m512i w = _mm512_loadu_si512(p + COLIBRI_Q6_K_LOW + 64 * half);
        __m512i bits = load_halves(high, high);
        weights[2 * half] =
            and8_or(_mm512_sllv_epi16(bits, pair_of_halves(4, 2)), 0x30, and8(w, 15));
        weights[2 * half + 1] = and8_or(_mm512_srlv_epi16(bits, pair_of_halves(0, 2)), 0x30,
                                        and8(_mm512_srli_epi16(w, 4), 15));
    }
}

COLIBRI_INLINE struct rows4 unpack_rows4(const int type, const uint8_t *const *p) {
    if (type == COLIBRI_Q2_K) return header_q2_k(p);
    if (type == COLIBRI_Q3_K) return header_q3_k(p);
    if (type == COLIBRI_Q6_K) return header_q6_k(p);
    return header_q45_k(p);
}

COLIBRI_INLINE void unpack_row(const int type, const uint8_t *p, __m512i *weights) {
    if (type == COLIBRI_Q2_K) weights_q2_k(p, weights);
    if (type == COLIBRI_Q3_K) weights_q3_k(p, weights);
    if (type == COLIBRI_Q4_K) weights_q4_k(p, weights);
    if (type == COLIBRI_Q5_K) weights_q5_k(p, weights);
    if (type == COLIBRI_Q6_K) weights_q6_k(p, weights);
}

/* sums[4 * t + r]: row r with token t. */
COLIBRI_INLINE void rows4_tokens(const int type, const int bytes, const uint8_t *const *rows,
                                 int n_blocks, const struct colibri_act_row *acts, const int n,
                                 float *sums) {
    const uint8_t *p[4] = {rows[0], rows[1], rows[2], rows[3]};
    const int64_t ahead = 4 * (int64_t)n_blocks * bytes; /* the next four rows */
    struct colibri_act_row act[ROWS4_TOKENS];
    __m512 sum[4][ROWS4_TOKENS], offset[ROWS4_TOKENS];
    for (int t = 0; t < n; t++) {
        act[t] = acts[t];
        offset[t] = sum[0][t] = sum[1][t] = sum[2][t] = sum[3][t] = _mm512_setzero_ps();
    }
    for (int b = 0; b < n_blocks; b++) {
        struct rows4 header = unpack_rows4(type, p);
        _Alignas(64) int16_t scales[2][32];
        _Alignas(64) float d[ROWS4_TOKENS][16];
        __m512i x[ROWS4_TOKENS][4];
        _mm512_store_si512(scales[0], header.scales[0]);
        _mm512_store_si512(scales[1], header.scales[1]);
        for (int t = 0; t < n; t++) {
            const __m128i *sums16 = (const __m128i *)act[t].sums16;
            __m512 scale = _mm512_set1_ps(act[t].scales[0]);
            __m512i products =
                _mm512_madd_epi16(header.mins[0], quarters(_mm_loadu_si128(sums16)));
            products = _mm512_dpwssd_epi32(products, header.mins[1],
                                           quarters(_mm_loadu_si128(sums16 + 1)));
            offset[t] = _mm512_fmadd_ps(_mm512_mul_ps(header.dmin, scale),
                                        _mm512_cvtepi32_ps(products), offset[t]);
            _mm512_store_ps(d[t], _mm512_mul_ps(header.d, scale));
            order_acts(type, act[t].values, x[t]);
            colibri_act_advance(&act[t]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            __m512i weights[4], scale[4];
            unpack_row(type, p[r], weights);
            scales_of_row(type, scales[0] + 8 * r, scales[1] + 8 * r, scale);
            for (int t = 0; t < n; t++) {
                __m512i products =
                    _mm512_madd_epi16(_mm512_maddubs_epi16(weights[0], x[t][0]), scale[0]);
                for (int i = 1; i < 4; i++)
                    products = _mm512_dpwssd_epi32(
                        products, _mm512_maddubs_epi16(weights[i], x[t][i]), scale[i]);
                sum[r][t] = _mm512_fmadd_ps(_mm512_set1_ps(d[t][4 * r]),
                                            _mm512_cvtepi32_ps(products), sum[r][t]);
            }
            colibri_fetch(p[r], ahead, bytes);
            p[r] += bytes;
        }
    }
    for (int t = 0; t < n; t++) {
        _Alignas(64) float minus[16];
        _mm512_store_ps(minus, offset[t]);
        for (int r = 0; r < 4; r++) {
            const float *m = minus + 4 * r;
            sums[4 * t + r] = _mm512_reduce_add_ps(sum[r][t]) - ((m[0] + m[1]) + (m[2] + m[3]));
        }
    }
}

#define DEFINE_ROWS(name, type)                                                                    \
    static void dot_##name(const uint8_t *rows, int64_t n_rows, const struct colibri_acts *acts,   \
                           int32_t first_token, int32_t n_tokens, float *out,                      \
                           int64_t out_stride) {                                                   \
        const int n_blocks = acts->columns / 256;                                                  \
        const int64_t row_bytes = (int64_t)n_blocks * type##_BYTES;                                \
        struct colibri_act_row act[COLIBRI_KERNEL_TOKENS];                                         \
        for (int t = 0; t < n_tokens; t++)                                                         \
            act[t] = colibri_act_row(acts, first_token + t);                                       \
        for (int64_t r = 0; r < n_rows; r += 4) {                                                  \
            const uint8_t *p[4];                                                                   \
            float sums[COLIBRI_KERNEL_TOKENS * 4];                                                 \
            const int n = n_rows - r < 4 ? (int)(n_rows - r) : 4;                                  \
            int t = 0;                                                                             \
            for (int i = 0; i < 4; i++) /* past the end: the last row again */                     \
                p[i] = rows + (r + (i < n ? i : n - 1)) * row_bytes;                               \
            for (; n_tokens - t >= 4; t += 4)                                                      \
                rows4_tokens(type, type##_BYTES, p, n_blocks, act + t, 4, sums + 4 * t);           \
            if (n_tokens - t >= 2) {                                                               \
                rows4_tokens(type, type##_BYTES, p, n_blocks, act + t, 2, sums + 4 * t);           \
                t += 2;                                                                            \
            }                                                                                      \
            if (n_tokens - t == 1)                                                                 \
                rows4_tokens(type, type##_BYTES, p, n_blocks, act + t, 1, sums + 4 * t);           \
            for (t = 0; t < n_tokens; t++)                                                         \
                for (int i = 0; i < n; i++)                                                        \
                    out[t * out_stride + r + i] = sums[4 * t + i];                                 \
        }                                                                                          \
    }

DEFINE_ROWS(q2_k, COLIBRI_Q2_K)
DEFINE_ROWS(q3_k, COLIBRI_Q3_K)
DEFINE_ROWS(q4_k, COLIBRI_Q4_K)
DEFINE_ROWS(q5_k, COLIBRI_Q5_K)
DEFINE_ROWS(q6_k, COLIBRI_Q6_K)

#endif
