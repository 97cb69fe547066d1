/* Products with 16 interleaved rows of quant blocks of 256, AVX-512 with VNNI.
 *
 * A register holds the same 4 weights of 16 rows, one row a lane; the 4 activations they meet are
 * broadcast. So lanes never mix, and each row's sums are made in the order of its columns. A pass
 * takes two groups at a time, whose weights share bytes: two sums a token, 16 for 8 tokens.
 *
 * Several groups of 16 rows are read at once, a part of a block of each in turn: see x16_streams.h.
 */
#ifndef COLIBRI_BLOCKS256_AVX512_X16_H
#define COLIBRI_BLOCKS256_AVX512_X16_H

#include "blocks256_avx512_x16_parts.h"
#include "blocks256_avx512_x16_q23.h"

/* Q4_K, and Q5_K if `has_fifth`, of n tokens with m groups of rows. */
COLIBRI_INLINE void q45_k_x16(const uint8_t *p, int n_blocks, const struct colibri_act_row *acts,
                              const int n, const int m, const int has_fifth, float *out,
                              int64_t out_stride) {
    const int bytes = COLIBRI_ROWS * (has_fifth ? COLIBRI_Q5_K_BYTES : COLIBRI_Q4_K_BYTES);
    const int start = has_fifth ? COLIBRI_Q5_K_QUANTS : COLIBRI_Q4_K_QUANTS;
    const __m512i nibble = _mm512_set1_epi8(15), fifth = _mm512_set1_epi8(16);
    const __m512i two = _mm512_set1_epi8(0x30), six = _mm512_set1_epi8(63);
    const int64_t stream = (int64_t)n_blocks * bytes;
    struct colibri_act_row act[COLIBRI_KERNEL_TOKENS];
    __m512 total[COLIBRI_X16_SUMS];
    for (int t = 0; t < n; t++)
        act[t] = acts[t];
    for (int i = 0; i < n * m; i++)
        total[i] = _mm512_setzero_ps();
    for (int b = 0; b < n_blocks; b++, p += bytes) {
        const int64_t ahead = colibri_x16_ahead(n_blocks - b, X16_AHEAD, bytes, m, stream,
                                                X16_ALONE);
        __m512 sum[COLIBRI_X16_SUMS];
        __m512i scales[COLIBRI_X16_STREAMS][2];
#pragma GCC unroll 4
        for (int s = 0; s < m; s++) {
            const uint8_t *block = p + s * stream;
            const uint8_t *packed = block + COLIBRI_ROWS * COLIBRI_Q4_K_SCALES;
            __m512 dmin = load16_halves(block + COLIBRI_ROWS * COLIBRI_Q4_K_DMIN);
            ask16(block, ahead, m);
            __m512i w0 = load16_ahead(packed, ahead, m);
            __m512i w1 = load16_ahead(packed + 64, ahead, m);
            __m512i w2 = load16_ahead(packed + 128, ahead, m);
            __m512i mins[2] = {_mm512_and_si512(w1, six),
                               masked_or(_mm512_srli_epi16(w2, 4), nibble,
                                         _mm512_and_si512(_mm512_srli_epi16(w1, 2), two))};
            scales[s][0] = _mm512_and_si512(w0, six);
            scales[s][1] =
                masked_or(w2, nibble, _mm512_and_si512(_mm512_srli_epi16(w0, 2), two));
            __m512i offset[COLIBRI_KERNEL_TOKENS];
            for (int t = 0; t < n; t++) {
                sum[s * n + t] = _mm512_setzero_ps();
                offset[t] = _mm512_setzero_si512();
            }
#pragma GCC unroll 8
            for (int g = 0; g < 8; g++) {
                __m512i pair = pick(mins[g / 4], g % 4, 128, g % 4, 128);
                for (int t = 0; t < n; t++)
                    add_pairs(&offset[t], pair, act[t].sums16 + 2 * g);
            }
            for (int t = 0; t < n; t++) {
                __m512 scale = _mm512_mul_ps(dmin, _mm512_set1_ps(act[t].scales[0]));
                total[s * n + t] = _mm512_fnmadd_ps(scale, _mm512_cvtepi32_ps(offset[t]),
                                                    total[s * n + t]);
            }
        }
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
#pragma GCC unroll 4
            for (int s = 0; s < m; s++) {
                const uint8_t *fifths = p + s * stream + COLIBRI_ROWS * COLIBRI_Q5_K_FIFTH_BITS;
                const uint8_t *quants = p + s * stream + COLIBRI_ROWS * start;
                __m512i low[COLIBRI_KERNEL_TOKENS], high[COLIBRI_KERNEL_TOKENS];
                for (int t = 0; t < n; t++)
                    low[t] = high[t] = _mm512_setzero_si512();
#pragma GCC unroll 8
                for (int k = 0; k < 8; k++) {
                    __m512i w = load16_ahead(quants + 64 * (8 * c + k), ahead, m);
                    __m512i a = _mm512_and_si512(w, nibble);
                    /* Of Q4_K 16 times the weights, which their scales make good. */
                    __m512i h = has_fifth ? _mm512_and_si512(_mm512_srli_epi16(w, 4), nibble)
                                          : _mm512_andnot_si512(nibble, w);
                    if (has_fifth) {
                        __m512i bits = c == 0 ? load16_ahead(fifths + 64 * k, ahead, m)
                                              : load16(fifths + 64 * k);
                        a = masked_or(move_left(bits, 4 - 2 * c), fifth, a);
                        h = masked_or(move_left(bits, 3 - 2 * c), fifth, h);
                    }
                    for (int t = 0; t < n; t++) {
                        const int8_t *at = act[t].values + 64 * c + 4 * k;
                        add_products(&low[t], a, at);
                        add_products(&high[t], h, at + 32);
                    }
                }
                __m512i of_group = scales[s][c / 2];
                __m512 scale_low = _mm512_cvtepi32_ps(pick_byte(of_group, c % 2 * 2));
                __m512 scale_high = _mm512_cvtepi32_ps(pick_byte(of_group, c % 2 * 2 + 1));
                if (!has_fifth) scale_high = _mm512_mul_ps(scale_high, _mm512_set1_ps(0.0625f));
                for (int t = 0; t < n; t++) {
                    add_scaled(&sum[s * n + t], scale_low, low[t]);
                    add_scaled(&sum[s * n + t], scale_high, high[t]);
                }
            }
        }
#pragma GCC unroll 4
        for (int s = 0; s < m; s++) {
            __m512 d = load16_halves(p + s * stream + COLIBRI_ROWS * COLIBRI_Q4_K_D);
            for (int t = 0; t < n; t++) {
                __m512 scale = _mm512_mul_ps(d, _mm512_set1_ps(act[t].scales[0]));
                total[s * n + t] = _mm512_fmadd_ps(scale, sum[s * n + t], total[s * n + t]);
            }
        }
        for (int t = 0; t < n; t++)
            colibri_act_advance(&act[t]);
    }
    store16(total, n, m, out, out_stride);
}

/* Q6_K of n tokens with m groups of rows. */
COLIBRI_INLINE void q6_k_x16(const uint8_t *p, int n_blocks, const struct colibri_act_row *acts,
                             const int n, const int m, float *out, int64_t out_stride) {
    const int bytes = COLIBRI_ROWS * COLIBRI_Q6_K_BYTES;
    const __m512i nibble = _mm512_set1_epi8(15), two = _mm512_set1_epi8(0x30);
    const int64_t stream = (int64_t)n_blocks * bytes;
    _Alignas(64) int32_t starts[COLIBRI_KERNEL_TOKENS][16];
    struct colibri_act_row act[COLIBRI_KERNEL_TOKENS];
    __m512 total[COLIBRI_X16_SUMS];
    for (int t = 0; t < n; t++)
        act[t] = acts[t];
    for (int i = 0; i < n * m; i++)
        total[i] = _mm512_setzero_ps();
    for (int b = 0; b < n_blocks; b++, p += bytes) {
        const int64_t ahead = colibri_x16_ahead(n_blocks - b, X16_AHEAD, bytes, m, stream,
                                                X16_ALONE);
        __m512 sum[COLIBRI_X16_SUMS];
        for (int i = 0; i < n * m; i++)
            sum[i] = _mm512_setzero_ps();
        for (int t = 0; t < n; t++)
            zero_sums(act[t].sums16, 5, starts[t]);
#pragma GCC unroll 8
        for (int pass = 0; pass < 8; pass++) { /* 16 columns of each nibble */
            const int half = pass / 4, q = pass % 4;
#pragma GCC unroll 4
            for (int s = 0; s < m; s++) {
                const uint8_t *lows = p + s * stream + COLIBRI_ROWS * COLIBRI_Q6_K_LOW;
                const uint8_t *highs = p + s * stream + COLIBRI_ROWS * COLIBRI_Q6_K_HIGH;
                const uint8_t *scales = p + s * stream + COLIBRI_ROWS * COLIBRI_Q6_K_SCALES;
                __m512i low[COLIBRI_KERNEL_TOKENS], high[COLIBRI_KERNEL_TOKENS];
                for (int t = 0; t < n; t++) {
                    low[t] = spread(&starts[t][8 * half + q]);
                    high[t] = spread(&starts[t][8 * half + 4 + q]);
                }
#pragma GCC unroll 4
                for (int k = 0; k < 4; k++) {
                    const uint8_t *bits = highs + 64 * (8 * half + q % 2 * 4 + k);
                    __m512i w = load16_ahead(lows + 64 * (16 * half + 4 * q + k), ahead, m);
                    __m512i h = q < 2 ? load16_ahead(bits, ahead, m) : load16(bits);
                    __m512i up = q < 2 ? _mm512_slli_epi16(h, 4) : _mm512_slli_epi16(h, 2);
                    __m512i down = q < 2 ? h : _mm512_srli_epi16(h, 2);
                    __m512i u = masked_or(up, two, _mm512_and_si512(w, nibble));
                    __m512i v = masked_or(
                        down, two, _mm512_and_si512(_mm512_srli_epi16(w, 4), nibble));
                    for (int t = 0; t < n; t++) {
                        const int8_t *at = act[t].values + 128 * half + 16 * q + 4 * k;
                        add_products(&low[t], u, at);
                        add_products(&high[t], v, at + 64);
                    }
                }
                /* Scales of 4 groups a word: of the low and of the high nibbles. */
                const uint8_t *words = scales + 128 * half;
                __m512i word_low = q == 0 ? load16_ahead(words, ahead, m) : load16(words);
                __m512i word_high =
                    q == 0 ? load16_ahead(words + 64, ahead, m) : load16(words + 64);
                __m512 scale_low = _mm512_cvtepi32_ps(
                    _mm512_srai_epi32(_mm512_slli_epi32(word_low, (unsigned)(24 - 8 * q)), 24));
                __m512 scale_high = _mm512_cvtepi32_ps(
                    _mm512_srai_epi32(_mm512_slli_epi32(word_high, (unsigned)(24 - 8 * q)), 24));
                for (int t = 0; t < n; t++) {
                    add_scaled(&sum[s * n + t], scale_low, low[t]);
                    add_scaled(&sum[s * n + t], scale_high, high[t]);
                }
            }
        }
#pragma GCC unroll 4
        for (int s = 0; s < m; s++) {
            __m512 d = load16_halves(p + s * stream + COLIBRI_ROWS * COLIBRI_Q6_K_D);
            for (int t = 0; t < n; t++) {
                __m512 scale = _mm512_mul_ps(d, _mm512_set1_ps(act[t].scales[0]));
                total[s * n + t] = _mm512_fmadd_ps(scale, sum[s * n + t], total[s * n + t]);
            }
        }
        for (int t = 0; t < n; t++)
            colibri_act_advance(&act[t]);
    }
    store16(total, n, m, out, out_stride);
}

/* Each number of tokens is code of its own, so that sums stay in registers. */
COLIBRI_INLINE void x16_tokens(const int type, const uint8_t *p, int n_blocks,
                               const struct colibri_act_row *acts, const int n, const int m,
                               float *out, int64_t out_stride) {
    if (type == COLIBRI_Q2_K || type == COLIBRI_Q3_K)
        q23_k_x16(p, n_blocks, acts, n, m, type == COLIBRI_Q3_K, out, out_stride);
    if (type == COLIBRI_Q4_K || type == COLIBRI_Q5_K)
        q45_k_x16(p, n_blocks, acts, n, m, type == COLIBRI_Q5_K, out, out_stride);
    if (type == COLIBRI_Q6_K) q6_k_x16(p, n_blocks, acts, n, m, out, out_stride);
}

COLIBRI_INLINE void x16_rows(const int type, const uint8_t *rows, int64_t n_rows, int n_blocks,
                             int64_t row_bytes, const struct colibri_act_row *acts, const int n,
                             float *out, int64_t out_stride) {
    /* With more the rest of these would spill: Q5_K and Q6_K fell by 7 to 10 % at 4 tokens. */
    const int most = type == COLIBRI_Q4_K   ? COLIBRI_X16_SUMS
                     : type == COLIBRI_Q3_K ? 2
                                            : 4;
    int64_t row = 0;
#define STREAMS(m)                                                                                 \
    for (; COLIBRI_X16_HOLDS(m, n, most) && row + COLIBRI_ROWS * (m) <= n_rows;                    \
         row += COLIBRI_ROWS * (m))                                                                \
        x16_tokens(type, rows + row * row_bytes, n_blocks, acts, n, m, out + row, out_stride);
    STREAMS(4)
    STREAMS(2)
    STREAMS(1)
#undef STREAMS
}

#define DEFINE_X16(name, type)                                                                     \
    static void dot_##name##_x16(const uint8_t *rows, int64_t n_rows,                              \
                                 const struct colibri_acts *acts, int32_t first_token,             \
                                 int32_t n_tokens, float *out, int64_t out_stride) {               \
        const int n_blocks = acts->columns / 256;                                                  \
        const int64_t row_bytes = (int64_t)n_blocks * type##_BYTES;                                \
        struct colibri_act_row act[COLIBRI_KERNEL_TOKENS];                                         \
        for (int t = 0; t < n_tokens; t++)                                                         \
            act[t] = colibri_act_row(acts, first_token + t);                                       \
        int t = 0;                                                                                 \
        if (n_tokens == 8) {                                                                       \
            x16_rows(type, rows, n_rows, n_blocks, row_bytes, act, 8, out, out_stride);            \
            t = 8;                                                                                 \
        }                                                                                          \
        if (n_tokens - t >= 4) {                                                                   \
            x16_rows(type, rows, n_rows, n_blocks, row_bytes, act, 4, out, out_stride);            \
            t = 4;                                                                                 \
        }                                                                                          \
        if (n_tokens - t >= 2) {                                                                   \
            x16_rows(type, rows, n_rows, n_blocks, row_bytes, act + t, 2, out + t * out_stride,    \
                     out_stride);                                                                  \
            t += 2;                                                                                \
        }                                                                                          \
        if (n_tokens - t == 1)                                                                     \
            x16_rows(type, rows, n_rows, n_blocks, row_bytes, act + t, 1, out + t * out_stride,    \
                     out_stride);                                                                  \
    }

DEFINE_X16(q2_k, COLIBRI_Q2_K)
DEFINE_X16(q3_k, COLIBRI_Q3_K)
DEFINE_X16(q4_k, COLIBRI_Q4_K)
DEFINE_X16(q5_k, COLIBRI_Q5_K)
DEFINE_X16(q6_k, COLIBRI_Q6_K)

#endif
