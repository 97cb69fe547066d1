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
static inline void put_nibbles(const uint8_t *level, int has_fifth, uint8_t *out) {
    if (has_fifth) {
        uint32_t fifth = 0;
        for (int i = 0; i < 32; ++i) fifth |= (uint32_t)(level[i] >> 4 & 1) << i;
        for (int k = 0; k < 4; ++k) out[k] = (uint8_t)(fifth >> 8 * k);
        out += 4;
    }
    for (int i = 0; i < 16; ++i) out[i] = (uint8_t)((level[i] & 15) | (level[i + 16] & 15) << 4);
}

/* The first element of the largest magnitude among 32, by bits: integer maxima vectorise. */
static inline float largest_of(const float *x) {
    int32_t positive = 0, negative = 0;
    for (int i = 0; i < 32; ++i) {
        const int32_t bits = (int32_t)float_bits(x[i]);
        const int32_t size = bits & 0x7fffffff;
        positive = bits >= 0 && size > positive ? size : positive;
        negative = bits < 0 && size > negative ? size : negative;
    }
    if (positive > negative) return bits_float((uint32_t)positive);
    if (positive < negative) return -bits_float((uint32_t)negative);
    int i = 0;
    while (i < 31 && (int32_t)(float_bits(x[i]) & 0x7fffffffu) != positive) ++i;
    return positive ? x[i] : 0.0f;
}

static inline void encode_symmetric(const float *x, int has_fifth, uint8_t *out) {
    const float half = has_fifth ? 16.0f : 8.0f;
    const float d = largest_of(x) / -half;
    const float inverse = inverse_of(d);
    const int8_t top = has_fifth ? 31 : 15;
    uint8_t level[32];
    for (int i = 0; i < 32; ++i) {
        const int8_t l = (int8_t)truncated(x[i] * inverse + (half + 0.5f));
        level[i] = (uint8_t)(l < top ? l : top);
    }
    store_half(out, to_half(d));
    put_nibbles(level, has_fifth, out + 2);
}

static inline void encode_range(const float *x, int has_fifth, uint8_t *out) {
    float min = x[0], max = x[0];
    for (int i = 1; i < 32; ++i) {
        min = x[i] < min ? x[i] : min;
        max = x[i] > max ? x[i] : max;
    }
    const float d = (max - min) / (has_fifth ? 31.0f : 15.0f);
    const float inverse = inverse_of(d);
    uint8_t level[32];
    for (int i = 0; i < 32; ++i) {
        const int8_t l = (int8_t)truncated((x[i] - min) * inverse + 0.5f);
        level[i] = has_fifth ? (uint8_t)l : (uint8_t)(l < 15 ? l : 15);
    }
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
            uint8_t level[32];
            for (int i = 0; i < 32; ++i) {
                const int32_t l =
                    nearest_one(fit.inverse[k] * (x[(first + k) * 32 + i] - fit.base[k]));
                level[i] = (uint8_t)(fit.inverse[k] != 0 ? clamp_one(l, low, high) - low : 0);
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
