/* AVX-512 with VNNI: products with interleaved quant blocks of 32, and with floats. */
#ifndef COLIBRI_BLOCKS32_AVX512_H
#define COLIBRI_BLOCKS32_AVX512_H

#include "blocks32_x86.h"
#include "x16_streams.h"

/* ---- sixteen rows interleaved ----
 *
 * A register holds 4 bytes of each of 16 rows, so that VPDPBUSD with 4 activations, repeated for
 * all rows, adds to one sum a row and nothing is ever summed across a register. */

ALWAYS __m512 load_halves(const uint8_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

/* half_of_e8m0 for 16 bytes. */
ALWAYS __m512 load_e8m0(const uint8_t *p) {
    const __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
    const __m512i small = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), e);
    const __mmask16 is_small = _mm512_cmplt_epu32_mask(e, _mm512_set1_epi32(2));
    return _mm512_castsi512_ps(_mm512_mask_mov_epi32(normal, is_small, small));
}

/* Adds 16 to byte k of each of 16 rows where bit 4 * unit + k of the row's `high` is set. */
ALWAYS __m512i add_fifth(__m512i nibbles, __m512i high, int32_t unit) {
    const __m512i spread = _mm512_set4_epi32(
        0x0c0c0c0c + 0x01010101 * (unit / 2), 0x08080808 + 0x01010101 * (unit / 2),
        0x04040404 + 0x01010101 * (unit / 2), 0x01010101 * (unit / 2));
    const __m512i bits = _mm512_set1_epi32(unit % 2 ? (int32_t)0x80402010 : 0x08040201);
    const __mmask64 set = _mm512_test_epi8_mask(_mm512_shuffle_epi8(high, spread), bits);
    return _mm512_mask_add_epi8(nibbles, set, nibbles, _mm512_set1_epi8(16));
}

/* Sixteen rows' weights, plus excess: register u holds elements 4u to 4u+3. */
ALWAYS void unpack_x16(int32_t type, const uint8_t *block, __m512i w[8]) {
    const int32_t head = bytes_of(type) % 4 == 0 ? 64 : bytes_of(type) % 4 * 16;
    const uint8_t *p = block + head;
    if (type == COLIBRI_Q8_0) {
        for (int32_t u = 0; u < 8; u++)
            w[u] = _mm512_xor_si512(_mm512_loadu_si512(p + 64 * u),
                                    _mm512_set1_epi8((char)0x80));
        return;
    }
    const __m512i low = _mm512_set1_epi8(15);
    __m512i high = _mm512_setzero_si512();
    if (type == COLIBRI_Q5_0 || type == COLIBRI_Q5_1) {
        high = _mm512_loadu_si512(p);
        p += 64;
    }
    const __m512i e2m1 = _mm512_broadcast_i32x4(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    for (int32_t u = 0; u < 4; u++) {
        __m512i bytes = _mm512_loadu_si512(p + 64 * u);
        __asm__("" : "+v"(bytes)); /* or GCC reads memory twice */
        w[u] = _mm512_and_si512(bytes, low);
        w[u + 4] = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low);
        if (type == COLIBRI_MXFP4) {
            w[u] = _mm512_shuffle_epi8(e2m1, w[u]);
            w[u + 4] = _mm512_shuffle_epi8(e2m1, w[u + 4]);
        }
        if (type == COLIBRI_Q5_0 || type == COLIBRI_Q5_1) {
            w[u] = add_fifth(w[u], high, u);
            w[u + 4] = add_fifth(w[u + 4], high, u + 4);
        }
    }
}

/* Adds the products of 4 weights of each row with 4 activations. In assembly, since GCC 12 never
 * makes the repeated load an operand: 1.5 times the time. */
ALWAYS __m512i add_products(__m512i sum, __m512i w, const int8_t *x) {
    typedef int32_t __attribute__((may_alias)) four;
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*(const four *)x));
    return sum;
}

/* Bytes, at least, that a line is asked for ahead of its use where several groups of rows are read
 * at once: 4 blocks of Q8_0, 8 of Q4_0. */
#define X16_AHEAD 2048

/* `n_streams` groups of 16 rows with `n_tokens` tokens, a block of each group in turn. */
ALWAYS void dot_x16_streams(int32_t type, int32_t n_tokens, int32_t n_streams, const uint8_t *rows,
                            const struct colibri_acts *acts, int32_t first_token, float *out,
                            int64_t out_stride) {
    const int64_t columns = acts->columns, n_groups = columns / 32;
    const int32_t block_bytes = 16 * bytes_of(type);
    const int32_t has_offset = type == COLIBRI_Q4_1 || type == COLIBRI_Q5_1;
    const int64_t n_ahead = (X16_AHEAD + block_bytes - 1) / block_bytes;
    const int64_t stream_bytes = n_groups * block_bytes;
    const int8_t *x[COLIBRI_KERNEL_TOKENS];
    int64_t at = first_token * n_groups;
    __m512 sums[COLIBRI_X16_SUMS];
#pragma GCC unroll 16
    for (int32_t i = 0; i < n_streams * n_tokens; i++) sums[i] = _mm512_setzero_ps();
#pragma GCC unroll 8
    for (int32_t t = 0; t < n_tokens; t++)
        x[t] = (const int8_t *)acts->values + (first_token + t) * columns;
    for (int64_t group = 0; group < n_groups; group++, at++, rows += block_bytes) {
        const int64_t ahead =
            colibri_x16_ahead(n_groups - group, n_ahead, block_bytes, n_streams, stream_bytes,
                              PREFETCH_BYTES);
#pragma GCC unroll 4
        for (int32_t s = 0; s < n_streams; s++) {
            const uint8_t *block = rows + s * stream_bytes;
            for (int32_t line = 0; line < block_bytes; line += 64)
                _mm_prefetch((const char *)block + ahead + line, _MM_HINT_T0);
            __m512i w[8];
            unpack_x16(type, block, w);
            const __m512 scale = type == COLIBRI_MXFP4 ? load_e8m0(block) : load_halves(block);
            const __m512 offset = has_offset ? load_halves(block + 32) : _mm512_setzero_ps();
#pragma GCC unroll 8
            for (int32_t t = 0; t < n_tokens; t++) {
                const float *of_token = acts->scales + at + t * n_groups;
                const int32_t sum_x = acts->sums32[at + t * n_groups];
                __m512i sum = excess_of(type) ? _mm512_set1_epi32(-excess_of(type) * sum_x)
                                              : _mm512_setzero_si512();
                /* Two sums where unpacking leaves less time to wait for one. */
                __m512i odd = _mm512_setzero_si512();
#pragma GCC unroll 4
                for (int32_t u = 0; u < 8; u += 2) {
                    sum = add_products(sum, w[u], x[t] + 4 * u);
                    if (type == COLIBRI_Q8_0)
                        sum = add_products(sum, w[u + 1], x[t] + 4 * u + 4);
                    else
                        odd = add_products(odd, w[u + 1], x[t] + 4 * u + 4);
                }
                if (type != COLIBRI_Q8_0) sum = _mm512_add_epi32(sum, odd);
                if (s == n_streams - 1) x[t] += 32;
                __m512 *to = &sums[s * n_tokens + t];
                *to = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum),
                                      _mm512_mul_ps(scale, _mm512_set1_ps(*of_token)), *to);
                if (has_offset)
                    *to = _mm512_fmadd_ps(offset, _mm512_set1_ps(acts->sums[at + t * n_groups]),
                                          *to);
            }
        }
    }
#pragma GCC unroll 4
    for (int32_t s = 0; s < n_streams; s++)
#pragma GCC unroll 8
        for (int32_t t = 0; t < n_tokens; t++)
            _mm512_storeu_ps(out + t * out_stride + 16 * s, sums[s * n_tokens + t]);
}

ALWAYS void dot_x16(int32_t type, int32_t n_tokens, const uint8_t *rows, int64_t n_rows,
                    const struct colibri_acts *acts, int32_t first_token, float *out,
                    int64_t out_stride) {
    const int64_t row_bytes = acts->columns / 32 * bytes_of(type);
    const int32_t most = type == COLIBRI_MXFP4 ? 4 : COLIBRI_X16_SUMS;
    int64_t row = 0;
#define STREAMS(n)                                                                                 \
    for (; COLIBRI_X16_HOLDS(n, n_tokens, most) && row + 16 * (n) <= n_rows; row += 16 * (n))      \
        dot_x16_streams(type, n_tokens, n, rows + row * row_bytes, acts, first_token, out + row,   \
                        out_stride);
    STREAMS(4)
    STREAMS(2)
    STREAMS(1)
#undef STREAMS
}

FOR_TOKENS(avx512_q8_0_x16, dot_x16, COLIBRI_Q8_0)
FOR_TOKENS(avx512_q4_0_x16, dot_x16, COLIBRI_Q4_0)
FOR_TOKENS(avx512_q4_1_x16, dot_x16, COLIBRI_Q4_1)
FOR_TOKENS(avx512_q5_0_x16, dot_x16, COLIBRI_Q5_0)
FOR_TOKENS(avx512_q5_1_x16, dot_x16, COLIBRI_Q5_1)
FOR_TOKENS(avx512_mxfp4_x16, dot_x16, COLIBRI_MXFP4)

/* ---- floats ---- */

ALWAYS __m512 load_floats(int32_t type, const uint8_t *p, __mmask16 which) {
    if (type == COLIBRI_F32) return _mm512_maskz_loadu_ps(which, p);
    const __m256i halves = _mm256_maskz_loadu_epi16(which, p);
    if (type == COLIBRI_F16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

ALWAYS float sum_of(__m512 v) {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

/* Two rows with all tokens; the second may be the first again. Each product has two sums, of the
 * even and of the odd vectors of 16. */
ALWAYS void dot_two_rows(int32_t type, int32_t n_tokens, const uint8_t *a, const uint8_t *b,
                         const uint8_t *x, int64_t columns, float *out_a, float *out_b,
                         int64_t out_stride) {
    const int64_t size = type == COLIBRI_F32 ? 4 : 2;
    __m512 sums_a[COLIBRI_KERNEL_TOKENS][2], sums_b[COLIBRI_KERNEL_TOKENS][2];
#pragma GCC unroll 8
    for (int32_t t = 0; t < n_tokens; t++)
        sums_a[t][0] = sums_a[t][1] = sums_b[t][0] = sums_b[t][1] = _mm512_setzero_ps();
    for (int64_t i = 0; i < columns; i += 32) {
        _mm_prefetch((const char *)a + i * size + PREFETCH_BYTES, _MM_HINT_T0);
        _mm_prefetch((const char *)b + i * size + PREFETCH_BYTES, _MM_HINT_T0);
#pragma GCC unroll 2
        for (int32_t part = 0; part < 2; part++) {
            const int64_t at = i + 16 * part, left = columns - at;
            const __mmask16 which =
                left >= 16 ? (__mmask16)0xffff
                           : (left > 0 ? (__mmask16)((1u << left) - 1) : (__mmask16)0);
            const __m512 wa = load_floats(type, a + at * size, which);
            const __m512 wb = load_floats(type, b + at * size, which);
#pragma GCC unroll 8
            for (int32_t t = 0; t < n_tokens; t++) {
                const __m512 xt = load_floats(type, x + (t * columns + at) * size, which);
                sums_a[t][part] = _mm512_fmadd_ps(wa, xt, sums_a[t][part]);
                sums_b[t][part] = _mm512_fmadd_ps(wb, xt, sums_b[t][part]);
            }
        }
    }
#pragma GCC unroll 8
    for (int32_t t = 0; t < n_tokens; t++) {
        out_a[t * out_stride] = sum_of(_mm512_add_ps(sums_a[t][0], sums_a[t][1]));
        out_b[t * out_stride] = sum_of(_mm512_add_ps(sums_b[t][0], sums_b[t][1]));
    }
}

ALWAYS void dot_floats(int32_t type, int32_t n_tokens, const uint8_t *rows, int64_t n_rows,
                       const struct colibri_acts *acts, int32_t first_token, float *out,
                       int64_t out_stride) {
    const int64_t columns = acts->columns, row_bytes = columns * (type == COLIBRI_F32 ? 4 : 2);
    const uint8_t *x = (const uint8_t *)acts->values + first_token * row_bytes;
    for (int64_t row = 0; row < n_rows; row += 2) {
        const int64_t next = row + 1 < n_rows ? row + 1 : row;
        dot_two_rows(type, n_tokens, rows + row * row_bytes, rows + next * row_bytes, x, columns,
                     out + row, out + next, out_stride);
    }
}

FOR_TOKENS(avx512_f32, dot_floats, COLIBRI_F32)
FOR_TOKENS(avx512_f16, dot_floats, COLIBRI_F16)
FOR_TOKENS(avx512_bf16, dot_floats, COLIBRI_BF16)

#endif
