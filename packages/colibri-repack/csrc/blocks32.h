/* Encodings of 32 elements a quant block: layouts are ggml-common.h's block_q4_0 to block_mxfp4,
 * roundings those of quantize_row_*_ref in ggml-quants.c, and with importances of
 * quantize_row_q{4,5}_{0,1}_impl. */
#ifndef COLIBRI_BLOCKS32_H
#define COLIBRI_BLOCKS32_H

#include <math.h>

#include "colibri_repack.h"
#include "halves.h"
#include "search.h"

/* C leaves conversions out of range undefined; this is what x86 makes of them. */
static inline int32_t truncated(float value) {
    return value >= -0x1p31f && value < 0x1p31f ? (int32_t)value : INT32_MIN;
}

static inline float inverse_of(float value) { return value != 0 ? 1.0f / value : 0.0f; }

/* level: (32), below 16 << has_fifth. Writes 16 bytes of nibbles, after 4 of fifth bits. */
static inline void put_nibbles(const int32_t *level, int has_fifth, uint8_t *out) {
    if (has_fifth) {
        uint32_t fifth = 0;
        for (int i = 0; i < 32; ++i) fifth |= (uint32_t)(level[i] >> 4 & 1) << i;
        for (int k = 0; k < 4; ++k) out[k] = (uint8_t)(fifth >> 8 * k);
        out += 4;
    }
    uint8_t nibbles[16];
    for (int i = 0; i < 16; ++i)
        nibbles[i] = (uint8_t)((level[i] & 15) | (level[i + 16] & 15) << 4);
    memcpy(out, nibbles, 16);
}

/* The first element of the largest magnitude among 32; of zeros only, +0. */
static inline float largest_of(const float *x) {
    ilanes positives = isplat(0), negatives = isplat(0);
    for (int i = 0; i < 32; i += LANES) {
        ilanes bits;
        memcpy(&bits, x + i, sizeof bits);
        const ilanes size = bits & 0x7fffffff, is_negative = bits < 0;
        positives = imax(positives, size & ~is_negative);
        negatives = imax(negatives, size & is_negative);
    }
    int32_t positive = 0, negative = 0;
    for (int k = 0; k < LANES; ++k) {
        positive = positives[k] > positive ? positives[k] : positive;
        negative = negatives[k] > negative ? negatives[k] : negative;
    }
    if (positive > negative) return bits_float((uint32_t)positive);
    if (positive < negative) return -bits_float((uint32_t)negative);
    int i = 0;
    while (i < 31 && (int32_t)(float_bits(x[i]) & 0x7fffffffu) != positive) ++i;
    return positive ? x[i] : 0.0f;
}

/* Levels trunc((x - base) * inverse + half), at most `top`; 0 where that is out of range, as the
 * low byte is of what x86 makes of it. */
static inline void truncated_levels(const float *x, float base, float inverse, float half,
                                    int32_t top, int32_t *level) {
    for (int i = 0; i < 32; i += LANES) {
        lanes value;
        memcpy(&value, x + i, sizeof value);
        value = (value - splat(base)) * splat(inverse) + splat(half);
        const ilanes fits = (value >= splat(-0x1p31f)) & (value < splat(0x1p31f));
        const ilanes truncated = __builtin_convertvector(pick(fits, value, splat(0.0f)), ilanes);
        const ilanes low = iclamp(truncated, INT32_MIN, top);
        memcpy(level + i, &low, sizeof low);
    }
}

static inline void encode_symmetric(const float *x, int has_fifth, uint8_t *out) {
    const float half = has_fifth ? 16.0f : 8.0f;
    const float d = largest_of(x) / -half;
    int32_t level[32];
    truncated_levels(x, 0.0f, inverse_of(d), half + 0.5f, has_fifth ? 31 : 15, level);
    store_half(out, to_half(d));
    put_nibbles(level, has_fifth, out + 2);
}

static inline void encode_range(const float *x, int has_fifth, uint8_t *out) {
    lanes mins, maxs;
    memcpy(&mins, x, sizeof mins);
    maxs = mins;
    for (int i = LANES; i < 32; i += LANES) {
        lanes value;
        memcpy(&value, x + i, sizeof value);
        mins = pick(value < mins, value, mins);
        maxs = pick(value > maxs, value, maxs);
    }
    float min = mins[0], max = maxs[0];
    for (int k = 1; k < LANES; ++k) {
        min = mins[k] < min ? mins[k] : min;
        max = maxs[k] > max ? maxs[k] : max;
    }
    if (min == 0) { /* of zeros of both signs the first counts */
        int i = 0;
        while (x[i] != 0) ++i;
        min = x[i];
    }
    const float d = (max - min) / (has_fifth ? 31.0f : 15.0f);
    int32_t level[32];
    truncated_levels(x, min, inverse_of(d), 0.5f, has_fifth ? 31 : 15, level);
    store_half(out, to_half(d));
    store_half(out + 2, to_half(min));
    put_nibbles(level, has_fifth, out + 4);
}

static inline void encode_q8_0(const float *x, uint8_t *out) {
    float most = 0.0f;
    for (int i = 0; i < 32; ++i) most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
    const float d = most / 127.0f;
    const float inverse = inverse_of(d);
    store_half(out, to_half(d));
    for (int i = 0; i < 32; ++i) {
        const float scaled = x[i] * inverse;
        /* Halves away from zero. With 0.5 itself 0.49999997 would become 1. */
        out[2 + i] = (uint8_t)truncated(scaled + copysignf(0x1.fffffep-2f, scaled));
    }
}

/* OCP Microscaling Formats 1.0, section 5.3.2: E2M1 elements under an E8M0 scale. The shared
 * exponent comes from a logarithm that is rounded to float32, as ggml's does: just below a power
 * of two it is one higher than the exponent field. Below 2^-125 ggml's conversion to a byte is
 * undefined; here the scale is the smallest. */
static inline void encode_mxfp4(const float *x, uint8_t *out) {
    static const float values[8] = {0, 1, 2, 3, 4, 6, 8, 12};
    float most = 0.0f;
    for (int i = 0; i < 32; ++i) most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
    int exponent = 0;
    if (most > 0.0f) {
        exponent = (int)floorf((float)log2((double)most)) + 125;
        if (exponent < 0) exponent = 0;
    }
    const float unit = bits_float(exponent < 2 ? 0x00200000u << exponent
                                               : (uint32_t)(exponent - 1) << 23);
    uint8_t level[32];
    for (int i = 0; i < 32; ++i) {
        const float size = fabsf(x[i]);
        float best = size;
        int l = 0;
        for (int v = 1; v < 8; ++v) {
            const float error = fabsf(values[v] * unit - size);
            l = error < best ? v : l;
            best = error < best ? error : best;
        }
        level[i] = (uint8_t)(l && x[i] < 0 ? l + 8 : l);
    }
    out[0] = (uint8_t)exponent;
    for (int i = 0; i < 16; ++i) out[1 + i] = (uint8_t)(level[i] | level[i + 16] << 4);
}

/* x, w: (n); importances weigh with sqrt(sigma2 + x^2). */
static void encode_weighted(int32_t type, const float *x, const float *w, float sigma2, int n,
                            uint8_t *out) {
    const int is_range = type == COLIBRI_Q4_1 || type == COLIBRI_Q5_1;
    const int has_fifth = type == COLIBRI_Q5_0 || type == COLIBRI_Q5_1;
    const int n_blocks = n / 32;
    for (int first = 0; first < n_blocks; first += LANES) {
        lanes xs[32], ws[32];
        for (int i = 0; i < 32; ++i)
            for (int k = 0; k < LANES; ++k) {
                const int at = (first + k) * 32 + i;
                xs[i][k] = first + k < n_blocks ? x[at] : 0.0f;
                ws[i][k] = first + k < n_blocks ? w[at] : 0.0f;
            }
        for (int i = 0; i < 32; ++i) ws[i] *= root(splat(sigma2) + xs[i] * xs[i]);
        struct fit fit;
        if (is_range) {
            const struct range_grid grid = {has_fifth ? 31 : 15, -0.9f, 0.05f, 36, 0};
            fit = search_range(xs, ws, 32, grid);
        } else {
            fit = search_scale(xs, ws, 32, has_fifth ? 16 : 8);
        }
        for (int k = 0; k < LANES && first + k < n_blocks; ++k) {
            const int half = has_fifth ? 16 : 8;
            const int low = is_range ? 0 : -half, high = is_range ? 2 * half - 1 : half - 1;
            int32_t level[32];
            for (int i = 0; i < 32; ++i) {
                const int32_t l =
                    nearest_one(fit.inverse[k] * (x[(first + k) * 32 + i] - fit.base[k]));
                level[i] = fit.inverse[k] != 0 ? clamp_one(l, low, high) - low : 0;
            }
            store_half(out, to_half(fit.scale[k]));
            out += 2;
            if (is_range) {
                store_half(out, to_half(-fit.min[k]));
                out += 2;
            }
            put_nibbles(level, has_fifth, out);
            out += has_fifth ? 20 : 16;
        }
    }
}

#endif
