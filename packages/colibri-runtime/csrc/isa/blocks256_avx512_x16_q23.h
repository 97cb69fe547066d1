/* Products with 16 interleaved rows of Q2_K and Q3_K, AVX-512 with VNNI. */
#ifndef COLIBRI_BLOCKS256_AVX512_X16_Q23_H
#define COLIBRI_BLOCKS256_AVX512_X16_Q23_H

#include "blocks256_avx512_x16_parts.h"

/* sum += scales of two groups times their sums of products, which fit 16 bits. */
COLIBRI_INLINE void add_two_groups(__m512i *sum, __m512i scales, __m512i first, __m512i second) {
    __m512i both = _mm512_mask_blend_epi16(0xaaaaaaaa, first, _mm512_slli_epi32(second, 16));
    *sum = _mm512_dpwssd_epi32(*sum, both, scales);
}

/* Q2_K, and Q3_K if `has_third`, of n tokens. A pass takes two groups, whose weights are bits 0
 * and 1, and bits 2 and 3 of the same bytes: of the second it makes 4 times the products, of the
 * first it takes 4 times the scale. */
COLIBRI_INLINE void q23_k_x16(const uint8_t *p, int n_blocks, const struct colibri_act_row *acts,
                              const int n, const int m, const int has_third, float *out,
                              int64_t out_stride) {
    const int bytes = COLIBRI_ROWS * (has_third ? COLIBRI_Q3_K_BYTES : COLIBRI_Q2_K_BYTES);
    const int start = has_third ? COLIBRI_Q3_K_QUANTS : COLIBRI_Q2_K_QUANTS;
    const __m512i nibble = _mm512_set1_epi8(15), two = _mm512_set1_epi8(0x30);
    const __m512i bits01 = _mm512_set1_epi8(3), bits23 = _mm512_set1_epi8(12);
    const __m512i bit2 = _mm512_set1_epi8(4), bit4 = _mm512_set1_epi8(16);
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
        __m512i scales[COLIBRI_X16_STREAMS][4], sum[COLIBRI_X16_SUMS];
        for (int i = 0; i < n * m; i++)
            sum[i] = _mm512_setzero_si512();
        /* Sums begin at -4 sum(x), second ones at 4 times that. */
        for (int t = 0; has_third && t < n; t++) {
            __m512i sums =
                _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)(act[t].sums16)));
            sums = _mm512_sllv_epi32(
                sums, _mm512_set_epi32(4, 4, 2, 2, 4, 4, 2, 2, 4, 4, 2, 2, 4, 4, 2, 2));
            _mm512_store_si512(starts[t], _mm512_sub_epi32(_mm512_setzero_si512(), sums));
        }
#pragma GCC unroll 4
        for (int s = 0; s < m; s++) {
            const uint8_t *block = p + s * stream;
            const uint8_t *packed =
                block + COLIBRI_ROWS * (has_third ? COLIBRI_Q3_K_SCALES : COLIBRI_Q2_K_SCALES);
            __m512i *of_stream = scales[s];
            if (has_third) {
                __m512i w0 = load16_ahead(packed, ahead, m);
                __m512i w1 = load16_ahead(packed + 64, ahead, m);
                __m512i w2 = load16_ahead(packed + 128, ahead, m);
                of_stream[0] =
                    masked_or(_mm512_slli_epi16(w2, 4), two, _mm512_and_si512(w0, nibble));
                of_stream[1] =
                    masked_or(_mm512_slli_epi16(w2, 2), two, _mm512_and_si512(w1, nibble));
                of_stream[2] =
                    masked_or(w2, two, _mm512_and_si512(_mm512_srli_epi16(w0, 4), nibble));
                of_stream[3] = masked_or(_mm512_srli_epi16(w2, 2), two,
                                         _mm512_and_si512(_mm512_srli_epi16(w1, 4), nibble));
                for (int i = 0; i < 4; i++)
                    of_stream[i] = _mm512_sub_epi8(of_stream[i], _mm512_set1_epi8(32));
                continue;
            }
            __m512 dmin = load16_halves(block + COLIBRI_ROWS * COLIBRI_Q2_K_DMIN);
            __m512i offset[COLIBRI_KERNEL_TOKENS];
            for (int t = 0; t < n; t++)
                offset[t] = _mm512_setzero_si512();
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                __m512i w = load16_ahead(packed + 64 * i, ahead, m);
                __m512i mins = _mm512_and_si512(_mm512_srli_epi16(w, 4), nibble);
                __m512i first = pick(mins, 0, 128, 1, 128), second = pick(mins, 2, 128, 3, 128);
                of_stream[i] = _mm512_and_si512(w, nibble);
                for (int t = 0; t < n; t++) {
                    const int16_t *sums = act[t].sums16 + 4 * i;
                    add_pairs(&offset[t], first, sums);
                    add_pairs(&offset[t], second, sums + 2);
                }
            }
            for (int t = 0; t < n; t++) {
                __m512 *to = &total[s * n + t];
                __m512 scale = _mm512_mul_ps(dmin, _mm512_set1_ps(act[t].scales[0]));
                *to = _mm512_fnmadd_ps(scale, _mm512_cvtepi32_ps(offset[t]), *to);
            }
        }
#pragma GCC unroll 8
        for (int pass = 0; pass < 8; pass++) {
            /* Columns 16 q of a half and those 32 and, at the upper nibble, 64 on share bytes. */
            const int half = pass / 4, q = pass / 2 % 2, upper = pass % 2;
            const int group = 8 * half + 4 * upper + q, bit = 4 * half + 2 * upper;
#pragma GCC unroll 4
            for (int s = 0; s < m; s++) {
                const uint8_t *thirds = p + s * stream + COLIBRI_ROWS * COLIBRI_Q3_K_THIRD_BITS;
                const uint8_t *quants = p + s * stream + COLIBRI_ROWS * start;
                __m512i first[COLIBRI_KERNEL_TOKENS], second[COLIBRI_KERNEL_TOKENS];
                for (int t = 0; t < n; t++) {
                    first[t] = has_third ? spread(&starts[t][group]) : _mm512_setzero_si512();
                    second[t] = has_third ? spread(&starts[t][group + 2]) : _mm512_setzero_si512();
                }
#pragma GCC unroll 4
                for (int k = 0; k < 4; k++) {
                    const uint8_t *unit = quants + 64 * (8 * half + 4 * q + k);
                    __m512i w = upper ? _mm512_srli_epi16(load16(unit), 4)
                                      : load16_ahead(unit, ahead, m);
                    __m512i u = _mm512_and_si512(w, bits01), v = _mm512_and_si512(w, bits23);
                    if (has_third) {
                        const uint8_t *at = thirds + 64 * (4 * q + k);
                        __m512i h = upper || half ? load16(at) : load16_ahead(at, ahead, m);
                        u = masked_or(move_left(h, 2 - bit), bit2, u);
                        v = masked_or(move_left(h, 4 - (bit + 1)), bit4, v);
                    }
                    for (int t = 0; t < n; t++) {
                        const int8_t *at =
                            act[t].values + 128 * half + 64 * upper + 16 * q + 4 * k;
                        add_products(&first[t], u, at);
                        add_products(&second[t], v, at + 32);
                    }
                }
                /* Scales of the two groups: bytes q and q + 2 of a word. */
                __m512i word = scales[s][2 * half + upper];
                __m512i pair = has_third ? _mm512_srav_epi16(pick(word, 128, q, 128, q + 2),
                                                             _mm512_set1_epi32(8 << 16 | 6))
                                         : _mm512_sllv_epi16(pick(word, q, 128, q + 2, 128),
                                                             _mm512_set1_epi32(2));
                for (int t = 0; t < n; t++)
                    add_two_groups(&sum[s * n + t], pair, first[t], second[t]);
            }
        }
#pragma GCC unroll 4
        for (int s = 0; s < m; s++) {
            __m512 d = load16_halves(p + s * stream +
                                     COLIBRI_ROWS * (has_third ? COLIBRI_Q3_K_D : COLIBRI_Q2_K_D));
            d = _mm512_mul_ps(d, _mm512_set1_ps(0.25f));
            for (int t = 0; t < n; t++) {
                __m512 *to = &total[s * n + t];
                __m512 scale = _mm512_mul_ps(d, _mm512_set1_ps(act[t].scales[0]));
                *to = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(sum[s * n + t]), *to);
            }
        }
        for (int t = 0; t < n; t++)
            colibri_act_advance(&act[t]);
    }
    store16(total, n, m, out, out_stride);
}

#endif
