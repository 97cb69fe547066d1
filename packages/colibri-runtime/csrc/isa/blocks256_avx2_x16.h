/* Products with 16 interleaved rows of quant blocks of 256, AVX2.
 *
 * A register holds the same 4 weights of 8 rows, one row a lane; the other 8 rows follow in a
 * second round. A pass takes 16 columns of each of two groups, whose weights share bytes; 8 passes
 * are a block. Products of unsigned bytes with signed ones are added in pairs to 16 bits, and
 * `deep` of these pairs fit there before scales widen them to 32.
 */
#ifndef COLIBRI_BLOCKS256_AVX2_X16_H
#define COLIBRI_BLOCKS256_AVX2_X16_H

#include <immintrin.h>
#include <string.h>

#include "blocks256.h"

#define X16_TOKENS 4 /* at a time */
#define X16_AHEAD 4096 /* bytes */

COLIBRI_INLINE __m256i load8(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }

COLIBRI_INLINE __m256 load8_halves(const uint8_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

/* The 4 bytes at p in every lane. */
COLIBRI_INLINE __m256i spread8(const void *p) {
    int32_t bytes;
    memcpy(&bytes, p, 4);
    return _mm256_set1_epi32(bytes);
}

/* Bytes k and l of every lane as two int16. */
COLIBRI_INLINE __m256i pick_pair(__m256i lanes, const int k, const int l, const int is_signed) {
    const int step = is_signed ? 0x04000400 : 0x00040004;
    const int first = is_signed ? (int)(0x00800080u | (unsigned)k << 8 | (unsigned)l << 24)
                                : (int)(0x80008000u | (unsigned)k | (unsigned)l << 16);
    __m128i index = _mm_setr_epi32(first, first + step, first + 2 * step, first + 3 * step);
    __m256i pair = _mm256_shuffle_epi8(lanes, _mm256_broadcastsi128_si256(index));
    return is_signed ? _mm256_srai_epi16(pair, 8) : pair;
}

COLIBRI_INLINE __m256i and_bytes(__m256i a, const int mask) {
    return _mm256_and_si256(a, _mm256_set1_epi8((char)mask));
}

/* `mask` of the bytes after a move by `left` bits, right where negative. */
COLIBRI_INLINE __m256i move_bits(__m256i a, const int left, const int mask) {
    __m256i moved = left > 0   ? _mm256_slli_epi16(a, left)
                    : left < 0 ? _mm256_srli_epi16(a, -left)
                               : a;
    return and_bytes(moved, mask);
}

/* Scales of 16 groups, 4 a word, and what sums of 16 columns are multiplied with; for Q4_K and
 * Q5_K 8 of each. */
COLIBRI_INLINE void unpack_scales(const int type, const uint8_t *p, __m256i *scales,
                                  __m256i *mins) {
    if (type == COLIBRI_Q2_K)
        for (int i = 0; i < 4; i++) {
            __m256i w = load8(p + COLIBRI_ROWS * COLIBRI_Q2_K_SCALES + 64 * i);
            scales[i] = and_bytes(w, 15);
            mins[i] = move_bits(w, -4, 15);
        }
    if (type == COLIBRI_Q4_K || type == COLIBRI_Q5_K) {
        const uint8_t *packed = p + COLIBRI_ROWS * COLIBRI_Q4_K_SCALES;
        __m256i w0 = load8(packed), w1 = load8(packed + 64), w2 = load8(packed + 128);
        scales[0] = and_bytes(w0, 63);
        scales[1] = _mm256_or_si256(and_bytes(w2, 15), move_bits(w0, -2, 0x30));
        mins[0] = and_bytes(w1, 63);
        mins[1] = _mm256_or_si256(move_bits(w2, -4, 15), move_bits(w1, -2, 0x30));
    }
    if (type == COLIBRI_Q3_K) {
        const uint8_t *packed = p + COLIBRI_ROWS * COLIBRI_Q3_K_SCALES;
        __m256i w[2] = {load8(packed), load8(packed + 64)}, high = load8(packed + 128);
        for (int i = 0; i < 4; i++) {
            __m256i low = i < 2 ? and_bytes(w[i], 15) : move_bits(w[i - 2], -4, 15);
            __m256i six = _mm256_or_si256(low, move_bits(high, 4 - 2 * i, 0x30));
            mins[i] = scales[i] = _mm256_sub_epi8(six, _mm256_set1_epi8(32));
        }
    }
    if (type == COLIBRI_Q6_K)
        for (int i = 0; i < 4; i++)
            mins[i] = scales[i] = load8(p + COLIBRI_ROWS * COLIBRI_Q6_K_SCALES + 64 * i);
}

/* The first column of part 0 or 1 of a pass: 16 columns whose weights share bytes with those of
 * the other part. */
COLIBRI_INLINE int column_of(const int type, const int pass, const int part) {
    if (type == COLIBRI_Q4_K || type == COLIBRI_Q5_K)
        return pass / 2 * 64 + pass % 2 * 16 + 32 * part;
    if (type == COLIBRI_Q6_K) return pass / 4 * 128 + pass % 4 * 16 + 64 * part;
    return pass / 4 * 128 + pass % 2 * 64 + pass / 2 % 2 * 16 + 32 * part;
}

/* The k-th 4 weights of a part of a pass, k < 4, as unsigned bytes. */
COLIBRI_INLINE __m256i unpack_weights(const int type, const uint8_t *p, const int pass,
                                      const int part, const int k) {
    if (type == COLIBRI_Q4_K || type == COLIBRI_Q5_K) {
        const int start = type == COLIBRI_Q4_K ? COLIBRI_Q4_K_QUANTS : COLIBRI_Q5_K_QUANTS;
        const uint8_t *fifths = p + COLIBRI_ROWS * COLIBRI_Q5_K_FIFTH_BITS;
        __m256i w = load8(p + COLIBRI_ROWS * start + 64 * (4 * pass + k));
        w = move_bits(w, -4 * part, 15);
        if (type == COLIBRI_Q4_K) return w;
        __m256i bits = load8(fifths + 64 * (pass % 2 * 4 + k));
        return _mm256_or_si256(w, move_bits(bits, 4 - (pass / 2 * 2 + part), 16));
    }
    if (type == COLIBRI_Q6_K) {
        const int half = pass / 4, q = pass % 4;
        const uint8_t *highs = p + COLIBRI_ROWS * COLIBRI_Q6_K_HIGH;
        __m256i w = load8(p + COLIBRI_ROWS * COLIBRI_Q6_K_LOW + 64 * (4 * pass + k));
        __m256i bits = load8(highs + 64 * (8 * half + q % 2 * 4 + k));
        return _mm256_or_si256(move_bits(w, -4 * part, 15),
                               move_bits(bits, (q < 2 ? 4 : 2) - 4 * part, 0x30));
    }
    const int start = type == COLIBRI_Q2_K ? COLIBRI_Q2_K_QUANTS : COLIBRI_Q3_K_QUANTS;
    const int half = pass / 4, q = pass / 2 % 2, upper = pass % 2;
    const uint8_t *thirds = p + COLIBRI_ROWS * COLIBRI_Q3_K_THIRD_BITS;
    __m256i w = load8(p + COLIBRI_ROWS * start + 64 * (8 * half + 4 * q + k));
    w = move_bits(w, -4 * upper - 2 * part, 3);
    if (type == COLIBRI_Q2_K) return w;
    __m256i bits = load8(thirds + 64 * (4 * q + k));
    return _mm256_or_si256(w, move_bits(bits, 2 - (4 * half + 2 * upper + part), 4));
}

/* Adds scale times the 16-bit sums of a row to its 32-bit sum. */
COLIBRI_INLINE __m256i add_widened(__m256i sum, __m256i sums, __m256i scale) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(sums, scale));
}

/* Eight rows, the first or the second half of a group, with n tokens. */
COLIBRI_INLINE void rows8_tokens(const int type, const int bytes, const int d_at,
                                 const int dmin_at, const uint8_t *group, const int64_t half,
                                 int n_blocks, const struct colibri_act_row *acts, const int n,
                                 float *out, int64_t out_stride) {
    struct colibri_act_row act[X16_TOKENS];
    const int is_32 = type == COLIBRI_Q4_K || type == COLIBRI_Q5_K; /* columns that share a scale */
    const int is_signed = type == COLIBRI_Q3_K || type == COLIBRI_Q6_K;
    /* 4 * 2 * 127 * 31 and 2 * 2 * 127 * 63 are below 2^15. */
    const int deep = type == COLIBRI_Q6_K ? 2 : 4;
    __m256 total[X16_TOKENS];
    for (int t = 0; t < n; t++) {
        act[t] = acts[t];
        total[t] = _mm256_setzero_ps();
    }
    for (int b = 0; b < n_blocks; b++, group += COLIBRI_ROWS * bytes) {
        const uint8_t *p = group + 32 * half; /* where 4-byte units of these rows begin */
        const uint8_t *halves = group + 16 * half;
        __m256 d = load8_halves(halves + COLIBRI_ROWS * d_at);
        __m256i scales[4], mins[4], sum[X16_TOKENS];
        if (half == 0) colibri_fetch(group, X16_AHEAD, COLIBRI_ROWS * bytes);
        unpack_scales(type, p, scales, mins);
        for (int t = 0; t < n; t++) {
            __m256i offset = _mm256_setzero_si256();
            for (int i = 0; i < 8; i++) {
                __m256i pair = is_32 ? pick_pair(mins[i / 4], i % 4, i % 4, 0)
                                     : pick_pair(mins[i / 2], i % 2 * 2, i % 2 * 2 + 1, is_signed);
                offset = add_widened(offset, pair, spread8(act[t].sums16 + 2 * i));
            }
            if (is_signed) { /* sum(scale * (q - zero) * x) begins at -zero * sum(scale * x) */
                const int log2_zero = type == COLIBRI_Q3_K ? 2 : 5;
                sum[t] = _mm256_sub_epi32(_mm256_setzero_si256(),
                                          _mm256_slli_epi32(offset, log2_zero));
            } else {
                __m256 dmin = load8_halves(halves + COLIBRI_ROWS * dmin_at);
                dmin = _mm256_mul_ps(dmin, _mm256_set1_ps(act[t].scales[0]));
                total[t] = _mm256_fnmadd_ps(dmin, _mm256_cvtepi32_ps(offset), total[t]);
                sum[t] = _mm256_setzero_si256();
            }
        }
        /* Two parts one after the other: four sums of each at once would not fit 16 registers. */
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            const int pass = i / 2, part = i % 2, column = column_of(type, pass, part);
            const int scale_at = column / (is_32 ? 32 : 16);
            __m256i scale = pick_pair(scales[scale_at / 4], scale_at % 4, scale_at % 4, is_signed);
            __m256i sums[X16_TOKENS];
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                __m256i weights = unpack_weights(type, p, pass, part, k);
                for (int t = 0; t < n; t++) {
                    const int8_t *x = act[t].values + column + 4 * k;
                    __m256i products = _mm256_maddubs_epi16(weights, spread8(x));
                    sums[t] = k % deep ? _mm256_add_epi16(sums[t], products) : products;
                    if (k % deep == deep - 1) sum[t] = add_widened(sum[t], sums[t], scale);
                }
            }
        }
        for (int t = 0; t < n; t++) {
            __m256 scale = _mm256_mul_ps(d, _mm256_set1_ps(act[t].scales[0]));
            total[t] = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(sum[t]), total[t]);
            colibri_act_advance(&act[t]);
        }
    }
    for (int t = 0; t < n; t++)
        _mm256_storeu_ps(out + t * out_stride, total[t]);
}

#define DEFINE_X16(name, type, bytes, d_at, dmin_at)                                               \
    static void dot_##name##_x16(const uint8_t *rows, int64_t n_rows,                              \
                                 const struct colibri_acts *acts, int32_t first_token,             \
                                 int32_t n_tokens, float *out, int64_t out_stride) {               \
        const int n_blocks = acts->columns / 256;                                                  \
        struct colibri_act_row act[COLIBRI_KERNEL_TOKENS];                                         \
        for (int t = 0; t < n_tokens; t++)                                                         \
            act[t] = colibri_act_row(acts, first_token + t);                                       \
        for (int64_t r = 0; r < n_rows; r += COLIBRI_ROWS / 2) {                                   \
            const uint8_t *group = rows + r / COLIBRI_ROWS * COLIBRI_ROWS * n_blocks * bytes;      \
            const int64_t half = r % COLIBRI_ROWS / 8;                                             \
            int t = 0;                                                                             \
            for (; n_tokens - t >= 4; t += 4)                                                      \
                rows8_tokens(type, bytes, d_at, dmin_at, group, half, n_blocks, act + t, 4,        \
                             out + t * out_stride + r, out_stride);                                \
            if (n_tokens - t >= 2) {                                                               \
                rows8_tokens(type, bytes, d_at, dmin_at, group, half, n_blocks, act + t, 2,        \
                             out + t * out_stride + r, out_stride);                                \
                t += 2;                                                                            \
            }                                                                                      \
            if (n_tokens - t == 1)                                                                 \
                rows8_tokens(type, bytes, d_at, dmin_at, group, half, n_blocks, act + t, 1,        \
                             out + t * out_stride + r, out_stride);                                \
        }                                                                                          \
    }

DEFINE_X16(q2_k, COLIBRI_Q2_K, COLIBRI_Q2_K_BYTES, COLIBRI_Q2_K_D, COLIBRI_Q2_K_DMIN)
DEFINE_X16(q3_k, COLIBRI_Q3_K, COLIBRI_Q3_K_BYTES, COLIBRI_Q3_K_D, -1)
DEFINE_X16(q4_k, COLIBRI_Q4_K, COLIBRI_Q4_K_BYTES, COLIBRI_Q4_K_D, COLIBRI_Q4_K_DMIN)
DEFINE_X16(q5_k, COLIBRI_Q5_K, COLIBRI_Q5_K_BYTES, COLIBRI_Q4_K_D, COLIBRI_Q4_K_DMIN)
DEFINE_X16(q6_k, COLIBRI_Q6_K, COLIBRI_Q6_K_BYTES, COLIBRI_Q6_K_D, -1)

#endif
