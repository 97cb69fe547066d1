/* AVX2: products with quant blocks of 32, plain and interleaved, and with floats. */
#ifndef COLIBRI_BLOCKS32_AVX2_H
#define COLIBRI_BLOCKS32_AVX2_H

#include "blocks32_avx2_plain.h"
#include "blocks32_x86.h"

/* ---- sixteen rows interleaved: eight in a register, 4 bytes of each ---- */

ALWAYS __m256 load_halves_8(const uint8_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

/* half_of_e8m0 for 8 bytes. */
ALWAYS __m256 load_e8m0_8(const uint8_t *p) {
    const __m256i e = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
    const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
    const __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
    const __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, small, is_small));
}

/* Adds 16 to byte k of each of 8 rows where bit 4 * unit + k of the row's `high` is set. */
ALWAYS __m256i add_fifth_8(__m256i nibbles, __m256i high, int32_t unit) {
    const int32_t from = 0x01010101 * (unit / 2);
    const __m256i spread =
        _mm256_setr_epi32(from, from + 0x04040404, from + 0x08080808, from + 0x0c0c0c0c, from,
                          from + 0x04040404, from + 0x08080808, from + 0x0c0c0c0c);
    const __m256i bits = _mm256_set1_epi32(unit % 2 ? (int32_t)0x80402010 : 0x08040201);
    const __m256i found = _mm256_and_si256(_mm256_shuffle_epi8(high, spread), bits);
    const __m256i set = _mm256_cmpeq_epi8(found, bits);
    return _mm256_or_si256(nibbles, _mm256_and_si256(set, _mm256_set1_epi8(16)));
}

/* Eight rows' weights: register u holds elements 4u to 4u+3. Excess is added but for Q8_0. */
ALWAYS void unpack_x8(int32_t type, const uint8_t *block, int32_t half, __m256i w[8]) {
    const int32_t head = bytes_of(type) % 4 == 0 ? 64 : bytes_of(type) % 4 * 16;
    const uint8_t *p = block + head + 32 * half;
    if (type == COLIBRI_Q8_0) {
        for (int32_t u = 0; u < 8; u++) w[u] = _mm256_loadu_si256((const void *)(p + 64 * u));
        return;
    }
    const __m256i low = _mm256_set1_epi8(15);
    __m256i high = _mm256_setzero_si256();
    if (type == COLIBRI_Q5_0 || type == COLIBRI_Q5_1) {
        high = _mm256_loadu_si256((const void *)p);
        p += 64;
    }
    const __m256i e2m1 = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    for (int32_t u = 0; u < 4; u++) {
        const __m256i bytes = _mm256_loadu_si256((const void *)(p + 64 * u));
        w[u] = _mm256_and_si256(bytes, low);
        w[u + 4] = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low);
        if (type == COLIBRI_MXFP4) {
            w[u] = _mm256_shuffle_epi8(e2m1, w[u]);
            w[u + 4] = _mm256_shuffle_epi8(e2m1, w[u + 4]);
        }
        if (type == COLIBRI_Q5_0 || type == COLIBRI_Q5_1) {
            w[u] = add_fifth_8(w[u], high, u);
            w[u + 4] = add_fifth_8(w[u + 4], high, u + 4);
        }
    }
}

/* Sums of 32 products for each of 8 rows. VPMADDUBSW saturates at 32767, so it matters how many of
 * its sums of two are added up in 16 bits: with |x| <= 128, eight of nibbles give 30720, four of
 * five bits or of E2M1 give 31744, and one of Q8_0, |w| <= 128, gives 32768 only for w = x = -128,
 * which a finite activation is never rounded to. */
ALWAYS __m256i dot_units(int32_t type, const __m256i w[8], const int8_t *x, int32_t sum_x) {
    const __m256i ones = _mm256_set1_epi16(1);
    const int32_t run = type == COLIBRI_Q8_0 ? 1
                        : type == COLIBRI_Q4_0 || type == COLIBRI_Q4_1 ? 8
                                                                      : 4;
    const int32_t excess = type == COLIBRI_Q8_0 ? 0 : excess_of(type);
    __m256i sum = _mm256_set1_epi32(-excess * sum_x);
    for (int32_t first = 0; first < 8; first += run) {
        __m256i pairs = _mm256_setzero_si256();
        for (int32_t u = first; u < first + run; u++) {
            int32_t four;
            memcpy(&four, x + 4 * u, 4);
            const __m256i acts = _mm256_set1_epi32(four);
            const __m256i both =
                type == COLIBRI_Q8_0
                    ? _mm256_maddubs_epi16(_mm256_abs_epi8(w[u]), _mm256_sign_epi8(acts, w[u]))
                    : _mm256_maddubs_epi16(w[u], acts);
            pairs = run == 1 ? both : _mm256_add_epi16(pairs, both);
        }
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
    }
    return sum;
}

ALWAYS void dot_x16_avx2(int32_t type, int32_t n_tokens, const uint8_t *rows, int64_t n_rows,
                         const struct colibri_acts *acts, int32_t first_token, float *out,
                         int64_t out_stride) {
    const int64_t columns = acts->columns, n_groups = columns / 32;
    const int32_t block_bytes = 16 * bytes_of(type);
    const int32_t has_offset = type == COLIBRI_Q4_1 || type == COLIBRI_Q5_1;
    const int8_t *values = (const int8_t *)acts->values + first_token * columns;
    const float *scales = acts->scales + first_token * n_groups;
    const float *scaled_sums = has_offset ? acts->sums + first_token * n_groups : NULL;
    const int32_t *sums32 = acts->sums32 + first_token * n_groups;
    const uint8_t *block = rows;
    for (int64_t row = 0; row < n_rows; row += 16) {
        __m256 sums[2][COLIBRI_KERNEL_TOKENS];
#pragma GCC unroll 8
        for (int32_t t = 0; t < n_tokens; t++) sums[0][t] = sums[1][t] = _mm256_setzero_ps();
        for (int64_t group = 0; group < n_groups; group++, block += block_bytes) {
            for (int32_t line = 0; line < block_bytes; line += 64)
                _mm_prefetch((const char *)block + PREFETCH_BYTES + line, _MM_HINT_T0);
#pragma GCC unroll 2
            for (int32_t half = 0; half < 2; half++) {
                __m256i w[8];
                unpack_x8(type, block, half, w);
                const __m256 scale = type == COLIBRI_MXFP4 ? load_e8m0_8(block + 8 * half)
                                                           : load_halves_8(block + 16 * half);
                const __m256 offset =
                    has_offset ? load_halves_8(block + 32 + 16 * half) : _mm256_setzero_ps();
#pragma GCC unroll 8
                for (int32_t t = 0; t < n_tokens; t++) {
                    const int64_t at = t * n_groups + group;
                    const __m256i sum = dot_units(type, w, values + at * 32, sums32[at]);
                    sums[half][t] = _mm256_fmadd_ps(
                        _mm256_cvtepi32_ps(sum), _mm256_mul_ps(scale, _mm256_set1_ps(scales[at])),
                        sums[half][t]);
                    if (has_offset)
                        sums[half][t] = _mm256_fmadd_ps(offset, _mm256_set1_ps(scaled_sums[at]),
                                                        sums[half][t]);
                }
            }
        }
#pragma GCC unroll 8
        for (int32_t t = 0; t < n_tokens; t++) {
            _mm256_storeu_ps(out + t * out_stride + row, sums[0][t]);
            _mm256_storeu_ps(out + t * out_stride + row + 8, sums[1][t]);
        }
    }
}

FOR_TOKENS(avx2_q8_0_x16, dot_x16_avx2, COLIBRI_Q8_0)
FOR_TOKENS(avx2_q4_0_x16, dot_x16_avx2, COLIBRI_Q4_0)
FOR_TOKENS(avx2_q4_1_x16, dot_x16_avx2, COLIBRI_Q4_1)
FOR_TOKENS(avx2_q5_0_x16, dot_x16_avx2, COLIBRI_Q5_0)
FOR_TOKENS(avx2_q5_1_x16, dot_x16_avx2, COLIBRI_Q5_1)
FOR_TOKENS(avx2_mxfp4_x16, dot_x16_avx2, COLIBRI_MXFP4)

/* ---- floats ---- */

ALWAYS __m256 load_floats_8(int32_t type, const uint8_t *p) {
    if (type == COLIBRI_F32) return _mm256_loadu_ps((const float *)p);
    const __m128i halves = _mm_loadu_si128((const __m128i *)p);
    if (type == COLIBRI_F16) return _mm256_cvtph_ps(halves);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

/* The first n < 8 values, and zeros. */
ALWAYS __m256 load_rest_8(int32_t type, const uint8_t *p, int64_t n) {
    uint8_t held[32] = {0};
    memcpy(held, p, (size_t)n * (type == COLIBRI_F32 ? 4 : 2));
    return load_floats_8(type, held);
}

/* Two rows with all tokens; the second may be the first again. Each product has two sums, of the
 * even and of the odd vectors of 8. */
ALWAYS void dot_two_rows_avx2(int32_t type, int32_t n_tokens, const uint8_t *a, const uint8_t *b,
                              const uint8_t *x, int64_t columns, float *out_a, float *out_b,
                              int64_t out_stride) {
    const int64_t size = type == COLIBRI_F32 ? 4 : 2;
    __m256 sums[2][2][COLIBRI_KERNEL_TOKENS];
#pragma GCC unroll 8
    for (int32_t t = 0; t < n_tokens; t++)
        sums[0][0][t] = sums[0][1][t] = sums[1][0][t] = sums[1][1][t] = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + 16 <= columns; i += 16) {
        _mm_prefetch((const char *)a + i * size + PREFETCH_BYTES, _MM_HINT_T0);
        _mm_prefetch((const char *)b + i * size + PREFETCH_BYTES, _MM_HINT_T0);
#pragma GCC unroll 2
        for (int32_t part = 0; part < 2; part++) {
            const int64_t at = (i + 8 * part) * size;
            const __m256 wa = load_floats_8(type, a + at), wb = load_floats_8(type, b + at);
#pragma GCC unroll 8
            for (int32_t t = 0; t < n_tokens; t++) {
                const __m256 xt = load_floats_8(type, x + t * columns * size + at);
                sums[0][part][t] = _mm256_fmadd_ps(wa, xt, sums[0][part][t]);
                sums[1][part][t] = _mm256_fmadd_ps(wb, xt, sums[1][part][t]);
            }
        }
    }
    for (; i < columns; i += 8) {
        const int64_t n = columns - i < 8 ? columns - i : 8;
        const __m256 wa = load_rest_8(type, a + i * size, n);
        const __m256 wb = load_rest_8(type, b + i * size, n);
        for (int32_t t = 0; t < n_tokens; t++) {
            const __m256 xt = load_rest_8(type, x + (t * columns + i) * size, n);
            sums[0][0][t] = _mm256_fmadd_ps(wa, xt, sums[0][0][t]);
            sums[1][0][t] = _mm256_fmadd_ps(wb, xt, sums[1][0][t]);
        }
    }
#pragma GCC unroll 8
    for (int32_t t = 0; t < n_tokens; t++) {
        out_a[t * out_stride] = sum_of_8(_mm256_add_ps(sums[0][0][t], sums[0][1][t]));
        out_b[t * out_stride] = sum_of_8(_mm256_add_ps(sums[1][0][t], sums[1][1][t]));
    }
}

ALWAYS void dot_floats_avx2(int32_t type, int32_t n_tokens, const uint8_t *rows, int64_t n_rows,
                            const struct colibri_acts *acts, int32_t first_token, float *out,
                            int64_t out_stride) {
    const int64_t columns = acts->columns, row_bytes = columns * (type == COLIBRI_F32 ? 4 : 2);
    const uint8_t *x = (const uint8_t *)acts->values + first_token * row_bytes;
    for (int64_t row = 0; row < n_rows; row += 2) {
        const int64_t next = row + 1 < n_rows ? row + 1 : row;
        dot_two_rows_avx2(type, n_tokens, rows + row * row_bytes, rows + next * row_bytes, x,
                          columns, out + row, out + next, out_stride);
    }
}

FOR_TOKENS(avx2_f32, dot_floats_avx2, COLIBRI_F32)
FOR_TOKENS(avx2_f16, dot_floats_avx2, COLIBRI_F16)
FOR_TOKENS(avx2_bf16, dot_floats_avx2, COLIBRI_BF16)

#endif
