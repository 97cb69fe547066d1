/* AVX-512 with VNNI: products with plain rows of quant blocks of 32.
 *
 * Four blocks of a row at a time: a register holds the nibbles of four, 16 bytes each, or for Q8_0
 * the bytes of two. Scales of eight blocks are collected and multiplied with those of the
 * activations at once, and spread over the lanes of their block by one permutation. */
#ifndef COLIBRI_BLOCKS32_AVX512_PLAIN_H
#define COLIBRI_BLOCKS32_AVX512_PLAIN_H

#include "blocks32_avx512.h"

#define EIGHT 8

ALWAYS __m512i sixteen_of_four(const uint8_t *p, int32_t step) {
    __m512i v = _mm512_castsi128_si512(_mm_loadu_si128((const void *)p));
    v = _mm512_mask_broadcast_i32x4(v, 0x00f0, _mm_loadu_si128((const void *)(p + step)));
    v = _mm512_mask_broadcast_i32x4(v, 0x0f00, _mm_loadu_si128((const void *)(p + 2 * step)));
    return _mm512_mask_broadcast_i32x4(v, 0xf000, _mm_loadu_si128((const void *)(p + 3 * step)));
}

/* Four blocks, plus excess: for Q8_0 the first two and the last two; else the first and the last
 * 16 weights of each. */
ALWAYS void unpack_four(int32_t type, const uint8_t *block, __m512i w[2]) {
    const int32_t step = bytes_of(type);
    if (type == COLIBRI_Q8_0) {
        for (int32_t i = 0; i < 2; i++) {
            const uint8_t *p = block + 2 * i * step + 2;
            const __m512i first = _mm512_castsi256_si512(_mm256_loadu_si256((const void *)p));
            const __m256i second = _mm256_loadu_si256((const void *)(p + step));
            w[i] = _mm512_xor_si512(_mm512_inserti64x4(first, second, 1),
                                    _mm512_set1_epi8((char)0x80));
        }
        return;
    }
    const __m512i low = _mm512_set1_epi8(15), bytes = sixteen_of_four(block + step - 16, step);
    w[0] = _mm512_and_si512(bytes, low);
    w[1] = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low);
    if (type == COLIBRI_MXFP4) {
        const __m512i e2m1 = _mm512_broadcast_i32x4(
            _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
        w[0] = _mm512_shuffle_epi8(e2m1, w[0]);
        w[1] = _mm512_shuffle_epi8(e2m1, w[1]);
    }
    if (type != COLIBRI_Q5_0 && type != COLIBRI_Q5_1) return;
    __m512i high = _mm512_setzero_si512();
    for (int32_t i = 0; i < 4; i++) {
        int32_t of_block;
        memcpy(&of_block, block + i * step + step - 20, 4);
        high = _mm512_mask_set1_epi32(high, (__mmask16)(0xf << 4 * i), of_block);
    }
    const __m512i bits = _mm512_set1_epi64((int64_t)0x8040201008040201);
    for (int32_t i = 0; i < 2; i++) {
        const __m512i spread = _mm512_broadcast_i32x4(_mm_set_epi64x(
            0x0101010101010101 * (2 * i + 1), 0x0101010101010101 * (2 * i)));
        const __mmask64 set = _mm512_test_epi8_mask(_mm512_shuffle_epi8(high, spread), bits);
        w[i] = _mm512_mask_add_epi8(w[i], set, w[i], _mm512_set1_epi8(16));
    }
}

/* Activations in the order of unpack_four. */
ALWAYS void order_four(int32_t type, const int8_t *values, __m512i x[2]) {
    x[0] = _mm512_loadu_si512(values);
    x[1] = _mm512_loadu_si512(values + 64);
    if (type == COLIBRI_Q8_0) return;
    const __m512i first = _mm512_setr_epi64(0, 1, 4, 5, 8, 9, 12, 13);
    const __m512i last = _mm512_setr_epi64(2, 3, 6, 7, 10, 11, 14, 15);
    const __m512i firsts = _mm512_permutex2var_epi64(x[0], first, x[1]);
    x[1] = _mm512_permutex2var_epi64(x[0], last, x[1]);
    x[0] = firsts;
}

/* 16-bit floats at p and every `step` bytes, eight of them. */
ALWAYS __m256 eight_halves(const uint8_t *p, int32_t step) {
    __m128i halves = _mm_cvtsi32_si128(colibri_load_u16(p));
    halves = _mm_insert_epi16(halves, colibri_load_u16(p + step), 1);
    halves = _mm_insert_epi16(halves, colibri_load_u16(p + 2 * step), 2);
    halves = _mm_insert_epi16(halves, colibri_load_u16(p + 3 * step), 3);
    halves = _mm_insert_epi16(halves, colibri_load_u16(p + 4 * step), 4);
    halves = _mm_insert_epi16(halves, colibri_load_u16(p + 5 * step), 5);
    halves = _mm_insert_epi16(halves, colibri_load_u16(p + 6 * step), 6);
    halves = _mm_insert_epi16(halves, colibri_load_u16(p + 7 * step), 7);
    return _mm256_cvtph_ps(halves);
}

ALWAYS __m256 eight_scales(int32_t type, const uint8_t *block) {
    const int32_t step = bytes_of(type);
    if (type != COLIBRI_MXFP4) return eight_halves(block, step);
    return _mm256_setr_ps(half_of_e8m0(block[0]), half_of_e8m0(block[step]),
                          half_of_e8m0(block[2 * step]), half_of_e8m0(block[3 * step]),
                          half_of_e8m0(block[4 * step]), half_of_e8m0(block[5 * step]),
                          half_of_e8m0(block[6 * step]), half_of_e8m0(block[7 * step]));
}

/* Scale 4 * four + i in the lanes of sums of block i; for Q8_0, of blocks 2 * part and the next. */
ALWAYS __m512 spread_scales(int32_t type, __m256 scales, int32_t four, int32_t part) {
    const int32_t at = type == COLIBRI_Q8_0 ? 4 * four + 2 * part : 4 * four;
    const __m512i lanes = type == COLIBRI_Q8_0
                              ? _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1)
                              : _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return _mm512_permutexvar_ps(_mm512_add_epi32(lanes, _mm512_set1_epi32(at)),
                                 _mm512_castps256_ps512(scales));
}

/* What is summed for two rows and all tokens; a struct so that it stays in registers. */
struct plain_sums {
    __m512 products[2][COLIBRI_KERNEL_TOKENS];
    __m256 offsets[2][COLIBRI_KERNEL_TOKENS];
};

/* Activations of eight blocks: values, scales and scaled sums of token t at t times the stride. */
struct plain_acts {
    const int8_t *values;
    const float *scales;
    const float *sums;
    int64_t values_stride;
    int64_t stride;
};

ALWAYS void add_eight(int32_t type, int32_t n_tokens, const uint8_t *const rows[2],
                      const struct plain_acts *acts, struct plain_sums *sums) {
    const int32_t has_offset = type == COLIBRI_Q4_1 || type == COLIBRI_Q5_1;
    const __m512i excess = _mm512_set1_epi8((char)excess_of(type)), zero = _mm512_setzero_si512();
    __m256 scales[2], offsets[2];
#pragma GCC unroll 2
    for (int32_t row = 0; row < 2; row++) {
        scales[row] = eight_scales(type, rows[row]);
        offsets[row] = has_offset ? eight_halves(rows[row] + 2, bytes_of(type))
                                  : _mm256_setzero_ps();
    }
    if (has_offset) {
#pragma GCC unroll 8
        for (int32_t t = 0; t < n_tokens; t++) {
            const __m256 of_acts = _mm256_loadu_ps(acts->sums + t * acts->stride);
            for (int32_t row = 0; row < 2; row++)
                sums->offsets[row][t] =
                    _mm256_fmadd_ps(offsets[row], of_acts, sums->offsets[row][t]);
        }
    }
#pragma GCC unroll 2
    for (int32_t four = 0; four < 2; four++) {
        __m512i w[2][2];
#pragma GCC unroll 2
        for (int32_t row = 0; row < 2; row++)
            unpack_four(type, rows[row] + four * 4 * bytes_of(type), w[row]);
#pragma GCC unroll 8
        for (int32_t t = 0; t < n_tokens; t++) {
            __m512i x[2], start[2] = {zero, zero};
            order_four(type, acts->values + t * acts->values_stride + four * 128, x);
            const __m256 of_acts = _mm256_loadu_ps(acts->scales + t * acts->stride);
            /* Each sum is corrected by itself: were all corrected in one lane, sums of the others
             * would lose bits to it as float32. */
            if (type == COLIBRI_Q8_0) {
                start[0] = _mm512_sub_epi32(zero, _mm512_dpbusd_epi32(zero, excess, x[0]));
                start[1] = _mm512_sub_epi32(zero, _mm512_dpbusd_epi32(zero, excess, x[1]));
            } else if (excess_of(type)) {
                const __m512i half = _mm512_dpbusd_epi32(zero, excess, x[0]);
                start[0] = _mm512_sub_epi32(zero, _mm512_dpbusd_epi32(half, excess, x[1]));
            }
#pragma GCC unroll 2
            for (int32_t row = 0; row < 2; row++) {
                const __m256 scale = _mm256_mul_ps(scales[row], of_acts);
                __m512i sum = _mm512_dpbusd_epi32(start[0], w[row][0], x[0]);
                if (type == COLIBRI_Q8_0) {
                    sums->products[row][t] = _mm512_fmadd_ps(
                        _mm512_cvtepi32_ps(sum), spread_scales(type, scale, four, 0),
                        sums->products[row][t]);
                    sum = _mm512_dpbusd_epi32(start[1], w[row][1], x[1]);
                } else {
                    sum = _mm512_dpbusd_epi32(sum, w[row][1], x[1]);
                }
                sums->products[row][t] =
                    _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), spread_scales(type, scale, four, 1),
                                    sums->products[row][t]);
            }
        }
    }
}

/* The last blocks of two rows, and of their activations, made eight by zeros. */
struct plain_rest {
    uint8_t rows[2][EIGHT * 34];
    int8_t values[COLIBRI_KERNEL_TOKENS][EIGHT * 32];
    float scales[COLIBRI_KERNEL_TOKENS][EIGHT];
    float sums[COLIBRI_KERNEL_TOKENS][EIGHT];
};

ALWAYS void add_rest(int32_t type, int32_t n_tokens, const uint8_t *const rows[2], int64_t n,
                     const struct plain_acts *acts, struct plain_sums *sums) {
    struct plain_rest rest;
    memset(&rest, 0, sizeof(rest));
    memcpy(rest.rows[0], rows[0], (size_t)(n * bytes_of(type)));
    memcpy(rest.rows[1], rows[1], (size_t)(n * bytes_of(type)));
    for (int32_t t = 0; t < n_tokens; t++) {
        memcpy(rest.values[t], acts->values + t * acts->values_stride, (size_t)n * 32);
        memcpy(rest.scales[t], acts->scales + t * acts->stride, (size_t)n * 4);
        if (acts->sums != NULL)
            memcpy(rest.sums[t], acts->sums + t * acts->stride, (size_t)n * 4);
    }
    const uint8_t *const padded[2] = {rest.rows[0], rest.rows[1]};
    const struct plain_acts of_rest = {rest.values[0], rest.scales[0], rest.sums[0], EIGHT * 32,
                                       EIGHT};
    add_eight(type, n_tokens, padded, &of_rest, sums);
}

ALWAYS float sum_of_8(__m256 v) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

ALWAYS void dot_plain_rows(int32_t type, int32_t n_tokens, const uint8_t *rows, int64_t n_rows,
                           const struct colibri_acts *acts, int32_t first_token, float *out,
                           int64_t out_stride) {
    const int64_t n_groups = acts->columns / 32, row_bytes = n_groups * bytes_of(type);
    const int32_t has_offset = type == COLIBRI_Q4_1 || type == COLIBRI_Q5_1;
    for (int64_t row = 0; row < n_rows; row += 2) {
        const int64_t next = row + 1 < n_rows ? row + 1 : row;
        const uint8_t *at[2] = {rows + row * row_bytes, rows + next * row_bytes};
        struct plain_acts of_eight = {
            (const int8_t *)acts->values + (int64_t)first_token * acts->columns,
            acts->scales + first_token * n_groups,
            has_offset ? acts->sums + first_token * n_groups : NULL,
            acts->columns,
            n_groups,
        };
        struct plain_sums sums;
#pragma GCC unroll 8
        for (int32_t t = 0; t < n_tokens; t++) {
            sums.products[0][t] = sums.products[1][t] = _mm512_setzero_ps();
            sums.offsets[0][t] = sums.offsets[1][t] = _mm256_setzero_ps();
        }
        int64_t group = 0;
        for (; group + EIGHT <= n_groups; group += EIGHT) {
            for (int32_t line = 0; line < EIGHT * bytes_of(type); line += 64) {
                _mm_prefetch((const char *)at[0] + PREFETCH_BYTES + line, _MM_HINT_T0);
                _mm_prefetch((const char *)at[1] + PREFETCH_BYTES + line, _MM_HINT_T0);
            }
            add_eight(type, n_tokens, at, &of_eight, &sums);
            at[0] += EIGHT * bytes_of(type);
            at[1] += EIGHT * bytes_of(type);
            of_eight.values += EIGHT * 32;
            of_eight.scales += EIGHT;
            if (has_offset) of_eight.sums += EIGHT;
        }
        if (group < n_groups)
            add_rest(type, n_tokens, at, n_groups - group, &of_eight, &sums);
#pragma GCC unroll 8
        for (int32_t t = 0; t < n_tokens; t++) {
            float a = sum_of(sums.products[0][t]), b = sum_of(sums.products[1][t]);
            if (has_offset) {
                a += sum_of_8(sums.offsets[0][t]);
                b += sum_of_8(sums.offsets[1][t]);
            }
            out[t * out_stride + row] = a;
            out[t * out_stride + next] = b;
        }
    }
}

FOR_TOKENS(avx512_q8_0, dot_plain_rows, COLIBRI_Q8_0)
FOR_TOKENS(avx512_q4_0, dot_plain_rows, COLIBRI_Q4_0)
FOR_TOKENS(avx512_q4_1, dot_plain_rows, COLIBRI_Q4_1)
FOR_TOKENS(avx512_q5_0, dot_plain_rows, COLIBRI_Q5_0)
FOR_TOKENS(avx512_q5_1, dot_plain_rows, COLIBRI_Q5_1)
FOR_TOKENS(avx512_mxfp4, dot_plain_rows, COLIBRI_MXFP4)

#endif
