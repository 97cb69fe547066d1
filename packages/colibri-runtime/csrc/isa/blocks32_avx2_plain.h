/* AVX2: products with plain rows of quant blocks of 32. */
#ifndef COLIBRI_BLOCKS32_AVX2_PLAIN_H
#define COLIBRI_BLOCKS32_AVX2_PLAIN_H

#include "blocks32_x86.h"

ALWAYS float sum_of_8(__m256 v) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

/* The 32 weights of a block in order; excess is added but for Q8_0. */
ALWAYS __m256i unpack_plain(int32_t type, const uint8_t *block) {
    if (type == COLIBRI_Q8_0) return _mm256_loadu_si256((const void *)(block + 2));
    const __m128i bytes = _mm_loadu_si128((const void *)(block + bytes_of(type) - 16));
    const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(bytes),
                                                 _mm_srli_epi16(bytes, 4), 1);
    const __m256i nibbles = _mm256_and_si256(both, _mm256_set1_epi8(15));
    if (type == COLIBRI_MXFP4)
        return _mm256_shuffle_epi8(
            _mm256_broadcastsi128_si256(
                _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)),
            nibbles);
    if (type != COLIBRI_Q5_0 && type != COLIBRI_Q5_1) return nibbles;
    int32_t high;
    memcpy(&high, block + bytes_of(type) - 20, 4);
    const __m256i spread =
        _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bits = _mm256_set1_epi64x((int64_t)0x8040201008040201);
    const __m256i found =
        _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(high), spread), bits);
    const __m256i set = _mm256_cmpeq_epi8(found, bits);
    return _mm256_or_si256(nibbles, _mm256_and_si256(set, _mm256_set1_epi8(16)));
}

/* What the excess adds to sums of 2 products. Each is corrected by itself: were all corrected in
 * one place, sums of the others would lose bits to it as float32. */
ALWAYS __m256i excess_sums(int32_t type, __m256i x) {
    return _mm256_maddubs_epi16(_mm256_set1_epi8((char)excess_of(type)), x);
}

/* Sums of 4 products each. A single VPMADDUBSW never saturates here (blocks32_avx2.h). */
ALWAYS __m256i dot_plain(int32_t type, __m256i w, __m256i x, __m256i excess) {
    const __m256i ones = _mm256_set1_epi16(1);
    if (type == COLIBRI_Q8_0)
        return _mm256_madd_epi16(
            _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)), ones);
    const __m256i pairs = _mm256_maddubs_epi16(w, x);
    return _mm256_madd_epi16(excess_of(type) ? _mm256_sub_epi16(pairs, excess) : pairs, ones);
}

ALWAYS float plain_scale(int32_t type, const uint8_t *block) {
    return type == COLIBRI_MXFP4 ? half_of_e8m0(block[0])
                                 : colibri_float_of_half(colibri_load_u16(block));
}

/* Two rows with all tokens; the second may be the first again. */
ALWAYS void dot_two_plain(int32_t type, int32_t n_tokens, const uint8_t *a, const uint8_t *b,
                          const struct colibri_acts *acts, int32_t first_token, float *out_a,
                          float *out_b, int64_t out_stride) {
    const int64_t columns = acts->columns, n_groups = columns / 32;
    const int32_t has_offset = type == COLIBRI_Q4_1 || type == COLIBRI_Q5_1;
    const int8_t *values = (const int8_t *)acts->values + first_token * columns;
    const float *scales = acts->scales + first_token * n_groups;
    const float *scaled_sums = has_offset ? acts->sums + first_token * n_groups : NULL;
    __m256 sums[2][COLIBRI_KERNEL_TOKENS];
    __m128 offsets[2][COLIBRI_KERNEL_TOKENS];
#pragma GCC unroll 8
    for (int32_t t = 0; t < n_tokens; t++) {
        sums[0][t] = sums[1][t] = _mm256_setzero_ps();
        offsets[0][t] = offsets[1][t] = _mm_setzero_ps();
    }
    for (int64_t group = 0; group < n_groups; group++) {
        __m256i w[2];
        float scale[2], offset[2];
#pragma GCC unroll 2
        for (int32_t row = 0; row < 2; row++) {
            const uint8_t *block = (row ? b : a) + group * bytes_of(type);
            _mm_prefetch((const char *)block + PREFETCH_BYTES, _MM_HINT_T0);
            w[row] = unpack_plain(type, block);
            scale[row] = plain_scale(type, block);
            offset[row] = has_offset ? colibri_float_of_half(colibri_load_u16(block + 2)) : 0.0f;
        }
#pragma GCC unroll 8
        for (int32_t t = 0; t < n_tokens; t++) {
            const int64_t at = t * n_groups + group;
            const __m256i x = _mm256_loadu_si256((const void *)(values + at * 32));
            const __m256i excess = excess_sums(type, x);
#pragma GCC unroll 2
            for (int32_t row = 0; row < 2; row++) {
                const __m256i sum = dot_plain(type, w[row], x, excess);
                sums[row][t] =
                    _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum),
                                    _mm256_set1_ps(scale[row] * scales[at]), sums[row][t]);
                if (has_offset)
                    offsets[row][t] =
                        _mm_fmadd_ss(_mm_set_ss(offset[row]), _mm_set_ss(scaled_sums[at]),
                                     offsets[row][t]);
            }
        }
    }
#pragma GCC unroll 8
    for (int32_t t = 0; t < n_tokens; t++) {
        out_a[t * out_stride] = sum_of_8(sums[0][t]) + _mm_cvtss_f32(offsets[0][t]);
        out_b[t * out_stride] = sum_of_8(sums[1][t]) + _mm_cvtss_f32(offsets[1][t]);
    }
}

ALWAYS void dot_plain_rows(int32_t type, int32_t n_tokens, const uint8_t *rows, int64_t n_rows,
                           const struct colibri_acts *acts, int32_t first_token, float *out,
                           int64_t out_stride) {
    const int64_t row_bytes = acts->columns / 32 * bytes_of(type);
    for (int64_t row = 0; row < n_rows; row += 2) {
        const int64_t next = row + 1 < n_rows ? row + 1 : row;
        dot_two_plain(type, n_tokens, rows + row * row_bytes, rows + next * row_bytes, acts,
                      first_token, out + row, out + next, out_stride);
    }
}

FOR_TOKENS(avx2_q8_0, dot_plain_rows, COLIBRI_Q8_0)
FOR_TOKENS(avx2_q4_0, dot_plain_rows, COLIBRI_Q4_0)
FOR_TOKENS(avx2_q4_1, dot_plain_rows, COLIBRI_Q4_1)
FOR_TOKENS(avx2_q5_0, dot_plain_rows, COLIBRI_Q5_0)
FOR_TOKENS(avx2_q5_1, dot_plain_rows, COLIBRI_Q5_1)
FOR_TOKENS(avx2_mxfp4, dot_plain_rows, COLIBRI_MXFP4)

#endif
