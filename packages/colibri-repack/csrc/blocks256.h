/* Encodings of 256 elements a quant block: layouts are ggml-common.h's block_q2_K to block_q6_K,
 * steps those of quantize_row_q*_K_ref in ggml-quants.c, and with importances of
 * quantize_row_q*_K_impl. First the groups' scales are searched, then the scales are rounded, then
 * the weights are rounded again to the scales that are stored. */
#ifndef COLIBRI_BLOCKS256_H
#define COLIBRI_BLOCKS256_H

#include <math.h>
#include <string.h>

#include "colibri_repack.h"
#include "halves.h"
#include "kernels.h"
#include "search.h"

/* Results of the search, one entry a group; at most PANEL / 16 groups, and lanes beyond. */
struct groups {
    float scale[PANEL / 16 + LANES], min[PANEL / 16 + LANES];
    float inverse[PANEL / 16 + LANES], base[PANEL / 16 + LANES];
    float weight_sum[PANEL / 16 + LANES];
    uint8_t level[PANEL]; /* of the search, q3_k without importances only */
};

static inline void gather(const float *x, int size, int first, int n_groups, lanes *out) {
    for (int i = 0; i < size; ++i)
        for (int k = 0; k < LANES; ++k)
            out[i][k] = first + k < n_groups ? x[(first + k) * size + i] : 0.0f;
}

static inline float square_sum(const float *x, int n) {
    float sum = 0;
    for (int i = 0; i < n; ++i) sum += x[i] * x[i];
    return sum;
}

/* w: (256) importances become weights w * sqrt(sigma2 + x^2), sigma2 = factor * mean(x^2). */
static inline void spread_weights(const float *x, const float *w, float factor, int n, float *out) {
    for (int block = 0; block < n; block += 256) {
        const float sigma2 = factor * square_sum(x + block, 256) / 256;
        for (int i = block; i < block + 256; ++i)
            out[i] = w[i] * sqrtf(sigma2 + x[i] * x[i]);
    }
}

static inline void keep(struct groups *groups, int first, const struct fit *fit) {
    memcpy(groups->scale + first, &fit->scale, sizeof fit->scale);
    memcpy(groups->min + first, &fit->min, sizeof fit->min);
    memcpy(groups->inverse + first, &fit->inverse, sizeof fit->inverse);
    memcpy(groups->base + first, &fit->base, sizeof fit->base);
    memcpy(groups->weight_sum + first, &fit->weight_sum, sizeof fit->weight_sum);
}

/* Groups of 32 under scale and minimum, for q4_k and q5_k. */
static void search_groups32(const float *x, const float *w, int n, struct range_grid grid,
                            struct groups *groups) {
    const int n_groups = n / 32;
    for (int first = 0; first < n_groups; first += LANES) {
        lanes xs[32], ws[32];
        gather(x, 32, first, n_groups, xs);
        if (w) {
            gather(w, 32, first, n_groups, ws);
        } else {
            lanes sum = splat(0.0f);
            for (int i = 0; i < 32; ++i) sum += xs[i] * xs[i];
            const lanes mean = root(sum / splat(32.0f));
            for (int i = 0; i < 32; ++i) ws[i] = mean + magnitude(xs[i]);
        }
        const struct fit fit = search_range(xs, ws, 32, grid);
        keep(groups, first, &fit);
    }
}

static void search_groups16_range(const float *x, const float *w, int n, struct range_grid grid,
                                  struct groups *groups) {
    const int n_groups = n / 16;
    for (int first = 0; first < n_groups; first += LANES) {
        lanes xs[16], ws[16];
        gather(x, 16, first, n_groups, xs);
        if (w)
            gather(w, 16, first, n_groups, ws);
        else
            for (int i = 0; i < 16; ++i) ws[i] = magnitude(xs[i]);
        const struct fit fit = search_range(xs, ws, 16, grid);
        keep(groups, first, &fit);
    }
}

static void search_groups16_scale(const float *x, const float *w, int n, int n_levels,
                                  struct groups *groups) {
    const int n_groups = n / 16;
    for (int first = 0; first < n_groups; first += LANES) {
        lanes xs[16], ws[16];
        gather(x, 16, first, n_groups, xs);
        if (w)
            gather(w, 16, first, n_groups, ws);
        else
            for (int i = 0; i < 16; ++i) ws[i] = xs[i] * xs[i];
        struct fit fit = search_scale(xs, ws, 16, n_levels);
        for (int i = 0; i < 16; ++i) fit.weight_sum += ws[i];
        keep(groups, first, &fit);
    }
}

static void search_groups16_q3(const float *x, int n, struct groups *groups) {
    const int n_groups = n / 16;
    for (int first = 0; first < n_groups; first += LANES) {
        lanes xs[16], level[16];
        gather(x, 16, first, n_groups, xs);
        const lanes scale = search_q3(xs, level);
        memcpy(groups->scale + first, &scale, sizeof scale);
        for (int k = 0; k < LANES && first + k < n_groups; ++k)
            for (int i = 0; i < 16; ++i)
                groups->level[(first + k) * 16 + i] = (uint8_t)level[i][k];
    }
}

/* Levels of one group under the stored scale d and minimum m. Where d is 0 the levels of the
 * search stay: nobody will see them, but they are part of the bytes. */
static inline void put_levels(const float *x, int size, float d, float m, float inverse, float base,
                              int low, int high, uint8_t *level) {
    if (d != 0) {
        for (int i = 0; i < size; ++i)
            level[i] = (uint8_t)(clamp_one(nearest_one((x[i] + m) / d), low, high) - low);
    } else if (inverse != 0) {
        for (int i = 0; i < size; ++i)
            level[i] = (uint8_t)(clamp_one(nearest_one(inverse * (x[i] - base)), low, high) - low);
    } else {
        memset(level, 0, (size_t)size);
    }
}

/* 256 levels below 4: 64 bytes, each holding those of 4 elements that are 32 apart. */
static inline void put_pairs(const uint8_t *level, uint8_t *out) {
    for (int half = 0; half < 2; ++half)
        for (int i = 0; i < 32; ++i) {
            const uint8_t *l = level + 128 * half + i;
            out[32 * half + i] = (uint8_t)(l[0] | l[32] << 2 | l[64] << 4 | l[96] << 6);
        }
}

static void encode_q2_k(const float *x, const float *w, int n, uint8_t *out) {
    struct groups groups;
    float spread[PANEL];
    if (w) spread_weights(x, w, 1.0f, n, spread);
    const struct range_grid plain = {3, -0.5f, 0.1f, 15, 1}, weighted = {3, -0.9f, 0.05f, 36, 0};
    if (w)
        search_groups16_range(x, spread, n, weighted, &groups);
    else
        search_groups16_range(x, NULL, n, plain, &groups);
    for (int block = 0; block < n / 256; ++block, x += 256, out += 84) {
        const float *scale = groups.scale + 16 * block, *min = groups.min + 16 * block;
        uint8_t *scales = out, level[256];
        float d, dmin;
        memset(scales, 0, 16);
        if (w) {
            uint8_t ls[16], lm[16];
            d = fit_positive(16, 15, scale, groups.weight_sum + 16 * block, ls);
            dmin = fit_positive(16, 15, min, groups.weight_sum + 16 * block, lm);
            for (int j = 0; j < 16; ++j) scales[j] = (uint8_t)(ls[j] | lm[j] << 4);
        } else {
            float max_scale = 0, max_min = 0;
            for (int j = 0; j < 16; ++j) {
                max_scale = scale[j] > max_scale ? scale[j] : max_scale;
                max_min = min[j] > max_min ? min[j] : max_min;
            }
            d = max_scale > 0 ? max_scale / 15.0f : 0.0f;
            dmin = max_min > 0 ? max_min / 15.0f : 0.0f;
            if (max_scale > 0)
                for (int j = 0; j < 16; ++j)
                    scales[j] = (uint8_t)nearest_one(15.0f / max_scale * scale[j]);
            if (max_min > 0)
                for (int j = 0; j < 16; ++j)
                    scales[j] |= (uint8_t)(nearest_one(15.0f / max_min * min[j]) * 16);
        }
        store_half(out + 80, to_half(d));
        store_half(out + 82, to_half(dmin));
        d = from_half(to_half(d));
        dmin = from_half(to_half(dmin));
        for (int j = 0; j < 16; ++j) {
            const int g = 16 * block + j;
            put_levels(x + 16 * j, 16, d * (float)(scales[j] & 15), dmin * (float)(scales[j] >> 4),
                       groups.inverse[g], groups.base[g], 0, 3, level + 16 * j);
        }
        put_pairs(level, out + 16);
    }
}

static void encode_q3_k(const float *x, const float *w, int n, uint8_t *out) {
    struct groups groups;
    float spread[PANEL];
    if (w) {
        spread_weights(x, w, 2.0f, n, spread);
        search_groups16_scale(x, spread, n, 4, &groups);
    } else {
        search_groups16_q3(x, n, &groups);
    }
    for (int block = 0; block < n / 256; ++block, x += 256, out += 110) {
        const float *scale = groups.scale + 16 * block;
        uint8_t *hmask = out, *scales = out + 96, level[256];
        int rounded[16]; /* scales of 6 bits, 0..63, of which 32 stands for 0 */
        float d = 0;
        if (w) {
            lanes xs[16], ws[16];
            for (int j = 0; j < 16; ++j) {
                xs[j] = splat(scale[j]);
                ws[j] = splat(groups.weight_sum[16 * block + j]);
            }
            const struct fit fit = search_scale(xs, ws, 16, 32);
            d = fit.scale[0];
            for (int j = 0; j < 16; ++j) {
                const int32_t l = nearest_one(fit.inverse[0] * scale[j]);
                rounded[j] = fit.inverse[0] != 0 ? clamp_one(l, -32, 31) + 32 : 0;
            }
        } else {
            float max_scale = 0, most = 0;
            for (int j = 0; j < 16; ++j) {
                max_scale = fabsf(scale[j]) > most ? scale[j] : max_scale;
                most = fabsf(scale[j]) > most ? fabsf(scale[j]) : most;
            }
            const float inverse = -32.0f / max_scale;
            d = max_scale != 0 ? 1.0f / inverse : 0.0f;
            for (int j = 0; j < 16; ++j) {
                const int8_t l = (int8_t)nearest_one(inverse * scale[j]);
                rounded[j] = max_scale != 0 ? clamp_one(l, -32, 31) + 32 : 0;
            }
        }
        memset(scales, 0, 12);
        for (int j = 0; j < 16; ++j) {
            scales[j % 8] |= (uint8_t)((rounded[j] & 15) << (j < 8 ? 0 : 4));
            scales[8 + j % 4] |= (uint8_t)(rounded[j] >> 4 << 2 * (j / 4));
        }
        store_half(out + 108, to_half(d));
        d = from_half(to_half(d));
        for (int j = 0; j < 16; ++j) {
            const int g = 16 * block + j;
            const float dl = d * (float)(rounded[j] - 32);
            if (dl == 0 && !w)
                memcpy(level + 16 * j, groups.level + 16 * g, 16);
            else
                put_levels(x + 16 * j, 16, dl, 0.0f, w ? groups.inverse[g] : 0.0f, 0.0f, -4, 3,
                           level + 16 * j);
        }
        memset(hmask, 0, 32);
        for (int i = 0; i < 256; ++i) {
            hmask[i % 32] |= (uint8_t)((level[i] >> 2) << i / 32);
            level[i] &= 3;
        }
        put_pairs(level, out + 32);
    }
}

/* q4_k and q5_k: 8 groups, scales and minima of 6 bits packed into 12 bytes. */
static void encode_q45_k(const float *x, const float *w, int n, int has_fifth, uint8_t *out) {
    struct groups groups;
    float spread[PANEL];
    const int top = has_fifth ? 31 : 15;
    struct range_grid grid = {top, has_fifth ? -0.5f : -1.0f, 0.1f, has_fifth ? 15 : 20, 0};
    if (w) {
        spread_weights(x, w, 2.0f, n, spread);
        grid = (struct range_grid){top, -0.9f, 0.05f, 36, 0};
        w = spread;
    }
    search_groups32(x, w, n, grid, &groups);
    for (int block = 0; block < n / 256; ++block, x += 256) {
        const float *scale = groups.scale + 8 * block, *min = groups.min + 8 * block;
        uint8_t ls[8], lm[8], level[256];
        float d, dmin;
        if (w) {
            d = fit_positive(8, 63, scale, groups.weight_sum + 8 * block, ls);
            dmin = fit_positive(8, 63, min, groups.weight_sum + 8 * block, lm);
        } else {
            float max_scale = 0, max_min = 0;
            for (int j = 0; j < 8; ++j) {
                max_scale = scale[j] > max_scale ? scale[j] : max_scale;
                max_min = min[j] > max_min ? min[j] : max_min;
            }
            const float inverse_scale = max_scale > 0 ? 63.0f / max_scale : 0.0f;
            const float inverse_min = max_min > 0 ? 63.0f / max_min : 0.0f;
            for (int j = 0; j < 8; ++j) {
                ls[j] = (uint8_t)nearest_one(inverse_scale * scale[j]);
                lm[j] = (uint8_t)nearest_one(inverse_min * min[j]);
            }
            d = max_scale / 63.0f;
            dmin = max_min / 63.0f;
        }
        uint8_t *scales = out + 4;
        for (int j = 0; j < 8; ++j) {
            if (!w || has_fifth) {
                ls[j] = ls[j] < 63 ? ls[j] : 63;
                lm[j] = lm[j] < 63 ? lm[j] : 63;
            }
            if (j < 4) {
                scales[j] = ls[j];
                scales[j + 4] = lm[j];
            } else {
                scales[j + 4] = (uint8_t)((ls[j] & 15) | (lm[j] & 15) << 4);
                scales[j - 4] |= (uint8_t)(ls[j] >> 4 << 6);
                scales[j] |= (uint8_t)(lm[j] >> 4 << 6);
            }
        }
        store_half(out, to_half(d));
        store_half(out + 2, to_half(dmin));
        d = from_half(to_half(d));
        dmin = from_half(to_half(dmin));
        for (int j = 0; j < 8; ++j) {
            const int g = 8 * block + j;
            const int s = j < 4 ? scales[j] & 63 : (scales[j + 4] & 15) | scales[j - 4] >> 6 << 4;
            const int m = j < 4 ? scales[j + 4] & 63 : scales[j + 4] >> 4 | scales[j] >> 6 << 4;
            put_levels(x + 32 * j, 32, d * (float)s, dmin * (float)m, groups.inverse[g],
                       groups.base[g], 0, top, level + 32 * j);
        }
        out += 16;
        if (has_fifth) {
            memset(out, 0, 32);
            for (int i = 0; i < 256; ++i) out[i % 32] |= (uint8_t)((level[i] >> 4) << i / 32);
            out += 32;
        }
        for (int pair = 0; pair < 4; ++pair, out += 32)
            for (int i = 0; i < 32; ++i) {
                const uint8_t *l = level + 64 * pair + i;
                out[i] = (uint8_t)((l[0] & 15) | (l[32] & 15) << 4);
            }
    }
}

static void encode_q6_k(const float *x, const float *w, int n, uint8_t *out) {
    struct groups groups;
    search_groups16_scale(x, w, n, 32, &groups);
    for (int block = 0; block < n / 256; ++block, x += 256, out += 210) {
        const float *scale = groups.scale + 16 * block;
        float max_scale = 0, most = 0;
        for (int j = 0; j < 16; ++j) {
            max_scale = fabsf(scale[j]) > most ? scale[j] : max_scale;
            most = fabsf(scale[j]) > most ? fabsf(scale[j]) : most;
        }
        if (most < TINY) {
            memset(out, 0, 210);
            continue;
        }
        const float inverse = -128.0f / max_scale;
        const uint16_t half = to_half(1.0f / inverse);
        uint8_t level[256];
        for (int j = 0; j < 16; ++j) {
            const int g = 16 * block + j;
            const int32_t l = nearest_one(inverse * scale[j]);
            const int8_t rounded = (int8_t)(l < 127 ? l : 127);
            out[192 + j] = (uint8_t)rounded;
            put_levels(x + 16 * j, 16, from_half(half) * (float)rounded, 0.0f, groups.inverse[g],
                       0.0f, -32, 31, level + 16 * j);
        }
        for (int side = 0; side < 2; ++side)
            for (int i = 0; i < 32; ++i) {
                const uint8_t *l = level + 128 * side + i;
                uint8_t *low = out + 64 * side + i;
                low[0] = (uint8_t)((l[0] & 15) | (l[64] & 15) << 4);
                low[32] = (uint8_t)((l[32] & 15) | (l[96] & 15) << 4);
                out[128 + 32 * side + i] = (uint8_t)(l[0] >> 4 | l[32] >> 4 << 2 |
                                                     l[64] >> 4 << 4 | l[96] >> 4 << 6);
            }
        store_half(out + 208, half);
    }
}

#endif
