/* Products with 16 interleaved rows of quant blocks of 256, AVX-512 with VNNI.
 *
 * A register holds the same 4 weights of 16 rows, one row a lane; the 4 activations they meet are
 * broadcast. So lanes never mix, and each row's sums are made in the order of its columns. A pass
 * takes two groups at a time, whose weights share bytes: two sums a token, 16 for 8 tokens.
 */
#ifndef COLIBRI_BLOCKS256_AVX512_X16_H
#define COLIBRI_BLOCKS256_AVX512_X16_H

#include <immintrin.h>
#include <string.h>

#include "blocks256.h"

#define X16_AHEAD 8192 /* bytes */

/* In a register: where a compiler sees two uses it would read memory twice. */
COLIBRI_INLINE __m512i load16(const uint8_t *p) {
    __m512i bytes = _mm512_loadu_si512(p);
    __asm__("" : "+v"(bytes));
    return bytes;
}

COLIBRI_INLINE __m512i load16_ahead(const uint8_t *p) {
    colibri_fetch(p, X16_AHEAD, 64);
    return load16(p);
}

COLIBRI_INLINE __m512 load16_halves(const uint8_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

/* The 4 bytes at p in every lane. */
COLIBRI_INLINE __m512i spread(const void *p) {
    int32_t bytes;
    memcpy(&bytes, p, 4);
    return _mm512_set1_epi32(bytes);
}

/* sum += products of the 4 weights of each lane with the 4 activations at x, and of 2 with 2 sums.
 * The broadcast is part of the instruction: as one of its own, which compilers make of
 * _mm512_set1_epi32, it costs a third of the speed. */
COLIBRI_INLINE void add_products(__m512i *sum, __m512i weights, const int8_t *x) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0"
            : "+v"(*sum)
            : "v"(weights), "m"(*(const int8_t(*)[4])x));
}

COLIBRI_INLINE void add_pairs(__m512i *sum, __m512i weights, const int16_t *sums16) {
    __asm__("vpdpwssd %2%{1to16%}, %1, %0"
            : "+v"(*sum)
            : "v"(weights), "m"(*(const int16_t(*)[2])sums16));
}

/* Bytes a to d of every lane; 128 gives zero. */
COLIBRI_INLINE __m512i pick(__m512i lanes, const int a, const int b, const int c, const int d) {
    uint32_t bytes = (uint32_t)(a | b << 8 | c << 16) | (uint32_t)d << 24;
    uint32_t step = 0x04040404 & ~(bytes >> 5); /* to the next lane; none from 128 */
    __m128i index = _mm_setr_epi32((int)bytes, (int)(bytes + step), (int)(bytes + 2 * step),
                                   (int)(bytes + 3 * step));
    return _mm512_shuffle_epi8(lanes, _mm512_broadcast_i32x4(index));
}

/* Byte k of every lane, an unsigned number. */
COLIBRI_INLINE __m512i pick_byte(__m512i lanes, int k) { return pick(lanes, k, 128, 128, 128); }

/* (a & mask) | b */
COLIBRI_INLINE __m512i masked_or(__m512i a, __m512i mask, __m512i b) {
    return _mm512_ternarylogic_epi32(b, a, mask, 0xf8);
}

/* The bits of 16-bit numbers moved left, or right by -n. */
COLIBRI_INLINE __m512i move_left(__m512i a, const int n) {
    return n > 0   ? _mm512_slli_epi16(a, (unsigned)n)
           : n < 0 ? _mm512_srli_epi16(a, (unsigned)-n)
                   : a;
}

COLIBRI_INLINE void add_scaled(__m512 *sum, __m512 scale, __m512i products) {
    *sum = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(products), *sum);
}

/* -zero * sum for each 16 activations: products with q begin there, to be those with q - zero. */
COLIBRI_INLINE void zero_sums(const int16_t *sums16, int log2_zero, int32_t *starts) {
    __m512i sums = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)sums16));
    sums = _mm512_slli_epi32(sums, (unsigned)log2_zero);
    _mm512_store_si512(starts, _mm512_sub_epi32(_mm512_setzero_si512(), sums));
}

/* Q4_K, and Q5_K if `has_fifth`, of n tokens. */
COLIBRI_INLINE void q45_k_x16(const uint8_t *p, int n_blocks, const struct colibri_act_row *acts,
                              const int n, const int has_fifth, float *out, int64_t out_stride) {
    const int bytes = has_fifth ? COLIBRI_Q5_K_BYTES : COLIBRI_Q4_K_BYTES;
    const int start = has_fifth ? COLIBRI_Q5_K_QUANTS : COLIBRI_Q4_K_QUANTS;
    const __m512i nibble = _mm512_set1_epi8(15), fifth = _mm512_set1_epi8(16);
    const __m512i two = _mm512_set1_epi8(0x30);
    struct colibri_act_row act[COLIBRI_KERNEL_TOKENS];
    __m512 total[COLIBRI_KERNEL_TOKENS];
    for (int t = 0; t < n; t++) {
        act[t] = acts[t];
        total[t] = _mm512_setzero_ps();
    }
    for (int b = 0; b < n_blocks; b++, p += COLIBRI_ROWS * bytes) {
        const uint8_t *packed = p + COLIBRI_ROWS * COLIBRI_Q4_K_SCALES;
        const uint8_t *fifths = p + COLIBRI_ROWS * COLIBRI_Q5_K_FIFTH_BITS;
        const uint8_t *quants = p + COLIBRI_ROWS * start;
        __m512 d = load16_halves(p + COLIBRI_ROWS * COLIBRI_Q4_K_D);
        __m512 dmin = load16_halves(p + COLIBRI_ROWS * COLIBRI_Q4_K_DMIN);
        __m512i w0 = load16_ahead(packed), w1 = load16_ahead(packed + 64);
        __m512i w2 = load16_ahead(packed + 128);
        __m512i six = _mm512_set1_epi8(63);
        __m512i scales[2] = {_mm512_and_si512(w0, six),
                             masked_or(w2, nibble,
                                       _mm512_and_si512(_mm512_srli_epi16(w0, 2), two))};
        __m512i mins[2] = {_mm512_and_si512(w1, six),
                           masked_or(_mm512_srli_epi16(w2, 4), nibble,
                                     _mm512_and_si512(_mm512_srli_epi16(w1, 2), two))};
        __m512 sum[COLIBRI_KERNEL_TOKENS];
        __m512i offset[COLIBRI_KERNEL_TOKENS];
        for (int t = 0; t < n; t++) {
            sum[t] = _mm512_setzero_ps();
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
            total[t] = _mm512_fnmadd_ps(scale, _mm512_cvtepi32_ps(offset[t]), total[t]);
        }
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            __m512i low[COLIBRI_KERNEL_TOKENS], high[COLIBRI_KERNEL_TOKENS];
            for (int t = 0; t < n; t++)
                low[t] = high[t] = _mm512_setzero_si512();
#pragma GCC unroll 8
            for (int k = 0; k < 8; k++) {
                __m512i w = load16_ahead(quants + 64 * (8 * c + k));
                __m512i a = _mm512_and_si512(w, nibble);
                /* Of Q4_K 16 times the weights, which their scales make good. */
                __m512i h = has_fifth ? _mm512_and_si512(_mm512_srli_epi16(w, 4), nibble)
                                      : _mm512_andnot_si512(nibble, w);
                if (has_fifth) {
                    __m512i bits = c == 0 ? load16_ahead(fifths + 64 * k) : load16(fifths + 64 * k);
                    a = masked_or(move_left(bits, 4 - 2 * c), fifth, a);
                    h = masked_or(move_left(bits, 3 - 2 * c), fifth, h);
                }
                for (int t = 0; t < n; t++) {
                    const int8_t *at = act[t].values + 64 * c + 4 * k;
                    add_products(&low[t], a, at);
                    add_products(&high[t], h, at + 32);
                }
            }
            __m512 scale_low = _mm512_cvtepi32_ps(pick_byte(scales[c / 2], c % 2 * 2));
            __m512 scale_high = _mm512_cvtepi32_ps(pick_byte(scales[c / 2], c % 2 * 2 + 1));
            if (!has_fifth) scale_high = _mm512_mul_ps(scale_high, _mm512_set1_ps(0.0625f));
            for (int t = 0; t < n; t++) {
                add_scaled(&sum[t], scale_low, low[t]);
                add_scaled(&sum[t], scale_high, high[t]);
            }
        }
        for (int t = 0; t < n; t++) {
            __m512 scale = _mm512_mul_ps(d, _mm512_set1_ps(act[t].scales[0]));
            total[t] = _mm512_fmadd_ps(scale, sum[t], total[t]);
            colibri_act_advance(&act[t]);
        }
    }
    for (int t = 0; t < n; t++)
        _mm512_storeu_ps(out + t * out_stride, total[t]);
}

COLIBRI_INLINE void q6_k_x16(const uint8_t *p, int n_blocks, const struct colibri_act_row *acts,
                             const int n, float *out, int64_t out_stride) {
    const __m512i nibble = _mm512_set1_epi8(15), two = _mm512_set1_epi8(0x30);
    _Alignas(64) int32_t starts[COLIBRI_KERNEL_TOKENS][16];
    struct colibri_act_row act[COLIBRI_KERNEL_TOKENS];
    __m512 total[COLIBRI_KERNEL_TOKENS];
    for (int t = 0; t < n; t++) {
        act[t] = acts[t];
        total[t] = _mm512_setzero_ps();
    }
    for (int b = 0; b < n_blocks; b++, p += COLIBRI_ROWS * COLIBRI_Q6_K_BYTES) {
        const uint8_t *lows = p + COLIBRI_ROWS * COLIBRI_Q6_K_LOW;
        const uint8_t *highs = p + COLIBRI_ROWS * COLIBRI_Q6_K_HIGH;
        const uint8_t *scales = p + COLIBRI_ROWS * COLIBRI_Q6_K_SCALES;
        __m512 d = load16_halves(p + COLIBRI_ROWS * COLIBRI_Q6_K_D);
        __m512 sum[COLIBRI_KERNEL_TOKENS];
        for (int t = 0; t < n; t++) {
            sum[t] = _mm512_setzero_ps();
            zero_sums(act[t].sums16, 5, starts[t]);
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            /* Scales of 4 groups a word: of the low and of the high nibbles. */
            __m512i word_low = load16_ahead(scales + 64 * (2 * half));
            __m512i word_high = load16_ahead(scales + 64 * (2 * half + 1));
#pragma GCC unroll 4
            for (int q = 0; q < 4; q++) { /* 16 columns of each nibble */
                __m512i low[COLIBRI_KERNEL_TOKENS], high[COLIBRI_KERNEL_TOKENS];
                for (int t = 0; t < n; t++) {
                    low[t] = spread(&starts[t][8 * half + q]);
                    high[t] = spread(&starts[t][8 * half + 4 + q]);
                }
#pragma GCC unroll 4
                for (int k = 0; k < 4; k++) {
                    const uint8_t *bits = highs + 64 * (8 * half + q % 2 * 4 + k);
                    __m512i w = load16_ahead(lows + 64 * (16 * half + 4 * q + k));
                    __m512i h = q < 2 ? load16_ahead(bits) : load16(bits);
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
                __m512 scale_low = _mm512_cvtepi32_ps(
                    _mm512_srai_epi32(_mm512_slli_epi32(word_low, (unsigned)(24 - 8 * q)), 24));
                __m512 scale_high = _mm512_cvtepi32_ps(
                    _mm512_srai_epi32(_mm512_slli_epi32(word_high, (unsigned)(24 - 8 * q)), 24));
                for (int t = 0; t < n; t++) {
                    add_scaled(&sum[t], scale_low, low[t]);
                    add_scaled(&sum[t], scale_high, high[t]);
                }
            }
        }
        for (int t = 0; t < n; t++) {
            __m512 scale = _mm512_mul_ps(d, _mm512_set1_ps(act[t].scales[0]));
            total[t] = _mm512_fmadd_ps(scale, sum[t], total[t]);
            colibri_act_advance(&act[t]);
        }
    }
    for (int t = 0; t < n; t++)
        _mm512_storeu_ps(out + t * out_stride, total[t]);
}

/* sum += scales of two groups times their sums of products, which fit 16 bits. */
COLIBRI_INLINE void add_two_groups(__m512i *sum, __m512i scales, __m512i first, __m512i second) {
    __m512i both = _mm512_mask_blend_epi16(0xaaaaaaaa, first, _mm512_slli_epi32(second, 16));
    *sum = _mm512_dpwssd_epi32(*sum, both, scales);
}

/* Q2_K, and Q3_K if `has_third`, of n tokens. A pass takes two groups, whose weights are bits 0
 * and 1, and bits 2 and 3 of the same bytes: of the second it makes 4 times the products, of the
 * first it takes 4 times the scale. */
COLIBRI_INLINE void q23_k_x16(const uint8_t *p, int n_blocks, const struct colibri_act_row *acts,
                              const int n, const int has_third, float *out, int64_t out_stride) {
    const int bytes = has_third ? COLIBRI_Q3_K_BYTES : COLIBRI_Q2_K_BYTES;
    const int start = has_third ? COLIBRI_Q3_K_QUANTS : COLIBRI_Q2_K_QUANTS;
    const __m512i nibble = _mm512_set1_epi8(15), two = _mm512_set1_epi8(0x30);
    const __m512i bits01 = _mm512_set1_epi8(3), bits23 = _mm512_set1_epi8(12);
    const __m512i bit2 = _mm512_set1_epi8(4), bit4 = _mm512_set1_epi8(16);
    _Alignas(64) int32_t starts[COLIBRI_KERNEL_TOKENS][16];
    struct colibri_act_row act[COLIBRI_KERNEL_TOKENS];
    __m512 total[COLIBRI_KERNEL_TOKENS];
    for (int t = 0; t < n; t++) {
        act[t] = acts[t];
        total[t] = _mm512_setzero_ps();
    }
    for (int b = 0; b < n_blocks; b++, p += COLIBRI_ROWS * bytes) {
        const uint8_t *packed =
            p + COLIBRI_ROWS * (has_third ? COLIBRI_Q3_K_SCALES : COLIBRI_Q2_K_SCALES);
        const uint8_t *thirds = p + COLIBRI_ROWS * COLIBRI_Q3_K_THIRD_BITS;
        const uint8_t *quants = p + COLIBRI_ROWS * start;
        __m512 d = load16_halves(p + COLIBRI_ROWS * (has_third ? COLIBRI_Q3_K_D : COLIBRI_Q2_K_D));
        __m512i scales[4], sum[COLIBRI_KERNEL_TOKENS];
        for (int t = 0; t < n; t++)
            sum[t] = _mm512_setzero_si512();
        if (has_third) {
            __m512i w0 = load16_ahead(packed), w1 = load16_ahead(packed + 64);
            __m512i w2 = load16_ahead(packed + 128);
            scales[0] = masked_or(_mm512_slli_epi16(w2, 4), two, _mm512_and_si512(w0, nibble));
            scales[1] = masked_or(_mm512_slli_epi16(w2, 2), two, _mm512_and_si512(w1, nibble));
            scales[2] = masked_or(w2, two, _mm512_and_si512(_mm512_srli_epi16(w0, 4), nibble));
            scales[3] = masked_or(_mm512_srli_epi16(w2, 2), two,
                                  _mm512_and_si512(_mm512_srli_epi16(w1, 4), nibble));
            for (int i = 0; i < 4; i++)
                scales[i] = _mm512_sub_epi8(scales[i], _mm512_set1_epi8(32));
            /* Sums begin at -4 sum(x), second ones at 4 times that. */
            for (int t = 0; t < n; t++) {
                __m512i sums = _mm512_cvtepi16_epi32(
                    _mm256_loadu_si256((const __m256i *)(act[t].sums16)));
                sums = _mm512_sllv_epi32(
                    sums, _mm512_set_epi32(4, 4, 2, 2, 4, 4, 2, 2, 4, 4, 2, 2, 4, 4, 2, 2));
                _mm512_store_si512(starts[t], _mm512_sub_epi32(_mm512_setzero_si512(), sums));
            }
        } else {
            __m512 dmin = load16_halves(p + COLIBRI_ROWS * COLIBRI_Q2_K_DMIN);
            __m512i offset[COLIBRI_KERNEL_TOKENS];
            for (int t = 0; t < n; t++)
                offset[t] = _mm512_setzero_si512();
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                __m512i w = load16_ahead(packed + 64 * i);
                __m512i mins = _mm512_and_si512(_mm512_srli_epi16(w, 4), nibble);
                __m512i first = pick(mins, 0, 128, 1, 128), second = pick(mins, 2, 128, 3, 128);
                scales[i] = _mm512_and_si512(w, nibble);
                for (int t = 0; t < n; t++) {
                    const int16_t *sums = act[t].sums16 + 4 * i;
                    add_pairs(&offset[t], first, sums);
                    add_pairs(&offset[t], second, sums + 2);
                }
            }
            for (int t = 0; t < n; t++) {
                __m512 scale = _mm512_mul_ps(dmin, _mm512_set1_ps(act[t].scales[0]));
                total[t] = _mm512_fnmadd_ps(scale, _mm512_cvtepi32_ps(offset[t]), total[t]);
            }
        }
#pragma GCC unroll 8
        for (int pass = 0; pass < 8; pass++) {
            /* Columns 16 q of a half and those 32 and, at the upper nibble, 64 on share bytes. */
            const int half = pass / 4, q = pass / 2 % 2, upper = pass % 2;
            const int group = 8 * half + 4 * upper + q, bit = 4 * half + 2 * upper;
            __m512i first[COLIBRI_KERNEL_TOKENS], second[COLIBRI_KERNEL_TOKENS];
            for (int t = 0; t < n; t++) {
                first[t] = has_third ? spread(&starts[t][group]) : _mm512_setzero_si512();
                second[t] = has_third ? spread(&starts[t][group + 2]) : _mm512_setzero_si512();
            }
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                const uint8_t *unit = quants + 64 * (8 * half + 4 * q + k);
                __m512i w = upper ? _mm512_srli_epi16(load16(unit), 4) : load16_ahead(unit);
                __m512i u = _mm512_and_si512(w, bits01), v = _mm512_and_si512(w, bits23);
                if (has_third) {
                    const uint8_t *at = thirds + 64 * (4 * q + k);
                    __m512i h = upper || half ? load16(at) : load16_ahead(at);
                    u = masked_or(move_left(h, 2 - bit), bit2, u);
                    v = masked_or(move_left(h, 4 - (bit + 1)), bit4, v);
                }
                for (int t = 0; t < n; t++) {
                    const int8_t *at = act[t].values + 128 * half + 64 * upper + 16 * q + 4 * k;
                    add_products(&first[t], u, at);
                    add_products(&second[t], v, at + 32);
                }
            }
            /* Scales of the two groups: bytes q and q + 2 of a word. */
            __m512i word = scales[2 * half + upper];
            __m512i pair = has_third ? _mm512_srav_epi16(pick(word, 128, q, 128, q + 2),
                                                         _mm512_set1_epi32(8 << 16 | 6))
                                     : _mm512_sllv_epi16(pick(word, q, 128, q + 2, 128),
                                                         _mm512_set1_epi32(2));
            for (int t = 0; t < n; t++)
                add_two_groups(&sum[t], pair, first[t], second[t]);
        }
        d = _mm512_mul_ps(d, _mm512_set1_ps(0.25f));
        for (int t = 0; t < n; t++) {
            __m512 scale = _mm512_mul_ps(d, _mm512_set1_ps(act[t].scales[0]));
            total[t] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(sum[t]), total[t]);
            colibri_act_advance(&act[t]);
        }
    }
    for (int t = 0; t < n; t++)
        _mm512_storeu_ps(out + t * out_stride, total[t]);
}

/* Each number of tokens is code of its own, so that sums stay in registers. */
COLIBRI_INLINE void x16_tokens(const int type, const uint8_t *p, int n_blocks,
                               const struct colibri_act_row *acts, const int n, float *out,
                               int64_t out_stride) {
    if (type == COLIBRI_Q2_K || type == COLIBRI_Q3_K)
        q23_k_x16(p, n_blocks, acts, n, type == COLIBRI_Q3_K, out, out_stride);
    if (type == COLIBRI_Q4_K || type == COLIBRI_Q5_K)
        q45_k_x16(p, n_blocks, acts, n, type == COLIBRI_Q5_K, out, out_stride);
    if (type == COLIBRI_Q6_K) q6_k_x16(p, n_blocks, acts, n, out, out_stride);
}

#define DEFINE_X16(name, type)                                                                     \
    static void dot_##name##_x16(const uint8_t *rows, int64_t n_rows,                              \
                                 const struct colibri_acts *acts, int32_t first_token,             \
                                 int32_t n_tokens, float *out, int64_t out_stride) {               \
        const int n_blocks = acts->columns / 256;                                                  \
        struct colibri_act_row act[COLIBRI_KERNEL_TOKENS];                                         \
        for (int t = 0; t < n_tokens; t++)                                                         \
            act[t] = colibri_act_row(acts, first_token + t);                                       \
        for (int64_t r = 0; r < n_rows; r += COLIBRI_ROWS) {                                       \
            float *to = out + r;                                                                   \
            int t = 0;                                                                             \
            if (n_tokens == 8) {                                                                   \
                x16_tokens(type, rows, n_blocks, act, 8, to, out_stride);                          \
                t = 8;                                                                             \
            }                                                                                      \
            if (n_tokens - t >= 4) {                                                               \
                x16_tokens(type, rows, n_blocks, act, 4, to, out_stride);                          \
                t = 4;                                                                             \
            }                                                                                      \
            if (n_tokens - t >= 2) {                                                               \
                x16_tokens(type, rows, n_blocks, act + t, 2, to + t * out_stride, out_stride);     \
                t += 2;                                                                            \
            }                                                                                      \
            if (n_tokens - t == 1)                                                                 \
                x16_tokens(type, rows, n_blocks, act + t, 1, to + t * out_stride, out_stride);     \
            rows += (int64_t)COLIBRI_ROWS * n_blocks * type##_BYTES;                               \
        }                                                                                          \
    }

DEFINE_X16(q2_k, COLIBRI_Q2_K)
DEFINE_X16(q3_k, COLIBRI_Q3_K)
DEFINE_X16(q4_k, COLIBRI_Q4_K)
DEFINE_X16(q5_k, COLIBRI_Q5_K)
DEFINE_X16(q6_k, COLIBRI_Q6_K)

#endif
