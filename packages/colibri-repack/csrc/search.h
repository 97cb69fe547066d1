/* Searches for the scale (and minimum) of groups of 16 or 32 weights, LANES groups at a time.
 *
 * The criteria and grids are those of ggml-quants.c: make_qkx2_quants and make_qkx3_quants
 * (`search_range`), make_qx_quants (`search_scale`), make_q3_quants (`search_q3`),
 * make_qp_quants (`fit_positive`). Bit identity with them asks for the same float operations in
 * the same order within a group; groups are independent, so they fill the lanes.
 */
#ifndef COLIBRI_SEARCH_H
#define COLIBRI_SEARCH_H

#include "lanes.h"

#define TINY 1e-15f /* groups below are taken for zero (GROUP_MAX_EPS) */

/* What a group of weights is quantised to before its scales are rounded: level l of weight x is
 * nearest(inverse * (x - base)), clamped. inverse is 0 for a group that is all zero. */
struct fit {
    lanes scale, min, inverse, base, weight_sum;
};

struct range_grid {
    int n_levels; /* the highest level */
    float first, step;
    int n_steps;
    int is_absolute; /* errors weigh by magnitude, else squared */
};

static inline lanes levels_of(lanes x, lanes inverse, lanes base, int low, int high) {
    return to_float(iclamp(nearest(inverse * (x - base)), low, high));
}

static inline lanes error_of(lanes scale, lanes level, lanes min, lanes x, int is_absolute) {
    const lanes difference = scale * level + min - x;
    return is_absolute ? magnitude(difference) : difference * difference;
}

/* x, w: (n) lanes, the weights of each group and their importance. Fits x by scale * l + min with
 * l in 0..n_levels and min <= 0, trying one inverse scale after another; each try that is better
 * moves the minimum which later tries start from. */
static inline __attribute__((always_inline)) struct fit search_range(
    const lanes *x, const lanes *w, int n, struct range_grid grid) {
    const lanes zero = splat(0.0f);
    lanes min = x[0], max = x[0];
    lanes weight_sum = w[0];
    lanes x_sum = w[0] * x[0];
    for (int i = 1; i < n; ++i) {
        min = pick(x[i] < min, x[i], min);
        max = pick(x[i] > max, x[i], max);
        weight_sum += w[i];
        x_sum += w[i] * x[i];
    }
    min = pick(min > zero, zero, min);
    const ilanes is_flat = max == min;
    const lanes flat_min = min;
    const lanes top = splat((float)grid.n_levels);
    struct fit best = {.weight_sum = weight_sum};
    best.inverse = top / (max - min);
    best.base = min;
    best.scale = splat(1.0f) / best.inverse;
    lanes best_error = zero;
    for (int i = 0; i < n; ++i) {
        const lanes level = levels_of(x[i], best.inverse, min, 0, grid.n_levels);
        best_error += w[i] * error_of(best.scale, level, min, x[i], grid.is_absolute);
    }
    for (int step = 0; step <= grid.n_steps; ++step) {
        const lanes inverse =
            splat(grid.first + grid.step * (float)step + (float)grid.n_levels) / (max - min);
        lanes level[32];
        lanes l_sum = zero, l2_sum = zero, xl_sum = zero;
        for (int i = 0; i < n; ++i) {
            level[i] = levels_of(x[i], inverse, min, 0, grid.n_levels);
            const lanes weighted = w[i] * level[i];
            l_sum += weighted;
            l2_sum += weighted * level[i];
            xl_sum += weighted * x[i];
        }
        /* The least squares of scale and min for these levels (a 2 by 2 system). */
        const lanes determinant = weight_sum * l2_sum - l_sum * l_sum;
        lanes scale = (weight_sum * xl_sum - x_sum * l_sum) / determinant;
        lanes fitted = (l2_sum * x_sum - l_sum * xl_sum) / determinant;
        const ilanes is_positive = fitted > zero;
        scale = pick(is_positive, xl_sum / l2_sum, scale);
        fitted = pick(is_positive, zero, fitted);
        lanes error = zero;
        for (int i = 0; i < n; ++i)
            error += w[i] * error_of(scale, level[i], fitted, x[i], grid.is_absolute);
        const ilanes is_better = (determinant > zero) & (error < best_error);
        best_error = pick(is_better, error, best_error);
        best.inverse = pick(is_better, inverse, best.inverse);
        best.base = pick(is_better, min, best.base);
        best.scale = pick(is_better, scale, best.scale);
        min = pick(is_better, fitted, min);
    }
    best.scale = pick(is_flat, zero, best.scale);
    best.inverse = pick(is_flat, zero, best.inverse);
    best.base = pick(is_flat, zero, best.base);
    best.min = -pick(is_flat, flat_min, min);
    return best;
}

/* x, w: (n) lanes. Fits x by scale * l with l in -n_levels..n_levels-1; the weight of the
 * largest magnitude takes the level -n_levels first, and 18 inverse scales around it are tried. */
static inline __attribute__((always_inline)) struct fit search_scale(const lanes *x, const lanes *w,
                                                                     int n, int n_levels) {
    const lanes zero = splat(0.0f);
    lanes largest = zero, most = zero;
    for (int i = 0; i < n; ++i) {
        const lanes size = magnitude(x[i]);
        const ilanes is_larger = size > most;
        most = pick(is_larger, size, most);
        largest = pick(is_larger, x[i], largest);
    }
    const ilanes is_zero = most < splat(TINY);
    struct fit best = {.min = zero, .base = zero, .weight_sum = zero};
    lanes best_gain = zero;
    for (int step = -9; step <= 9; ++step) {
        /* The plain scale first, in the place of step 0. */
        const int shift = step == -9 ? 0 : step <= 0 ? step - 1 : step;
        const lanes inverse = splat(-((float)n_levels + 0.1f * (float)shift)) / largest;
        lanes xl_sum = zero, l2_sum = zero;
        for (int i = 0; i < n; ++i) {
            const lanes level = levels_of(x[i], inverse, zero, -n_levels, n_levels - 1);
            xl_sum += w[i] * x[i] * level;
            l2_sum += w[i] * level * level;
        }
        const lanes scale = xl_sum / l2_sum;
        if (step == -9) {
            best.scale = pick(l2_sum != zero, scale, zero);
            best_gain = best.scale * xl_sum;
            best.inverse = inverse;
            continue;
        }
        const ilanes is_better = (l2_sum > zero) & (xl_sum * xl_sum > best_gain * l2_sum);
        best.scale = pick(is_better, scale, best.scale);
        best_gain = pick(is_better, scale * xl_sum, best_gain);
        best.inverse = pick(is_better, inverse, best.inverse);
    }
    best.scale = pick(is_zero, zero, best.scale);
    best.inverse = pick(is_zero, zero, best.inverse);
    return best;
}

/* x: (16) lanes; level: (16) lanes out, 0..7. Fits x by scale * (l - 4), weights x squared, and
 * then moves one level at a time while that brings the fit nearer; returns the scales. */
static inline __attribute__((always_inline)) lanes search_q3(const lanes *x, lanes *level) {
    const lanes zero = splat(0.0f);
    lanes largest = zero, most = zero;
    for (int i = 0; i < 16; ++i) {
        const lanes size = magnitude(x[i]);
        const ilanes is_larger = size > most;
        most = pick(is_larger, size, most);
        largest = pick(is_larger, x[i], largest);
    }
    const ilanes is_zero = most < splat(TINY);
    const lanes inverse = splat(-4.0f) / largest;
    lanes xl_sum = zero, l2_sum = zero;
    for (int i = 0; i < 16; ++i) {
        level[i] = levels_of(x[i], inverse, zero, -4, 3);
        const lanes w = x[i] * x[i];
        xl_sum += w * x[i] * level[i];
        l2_sum += w * level[i] * level[i];
    }
    for (int round = 0; round < 5; ++round) {
        ilanes is_changed = isplat(0);
        for (int i = 0; i < 16; ++i) {
            const lanes w = x[i] * x[i];
            lanes xl = xl_sum - w * x[i] * level[i];
            lanes l2 = l2_sum - w * level[i] * level[i];
            const lanes moved = to_float(iclamp(nearest(x[i] * l2 / xl), -4, 3));
            ilanes is_better = (xl > zero) & (moved != level[i]) & ~is_zero;
            xl += w * x[i] * moved;
            l2 += w * moved * moved;
            is_better &= (l2 > zero) & (xl * xl * l2_sum > xl_sum * xl_sum * l2);
            level[i] = pick(is_better, moved, level[i]);
            xl_sum = pick(is_better, xl, xl_sum);
            l2_sum = pick(is_better, l2, l2_sum);
            is_changed |= is_better;
        }
        int32_t any = 0;
        for (int k = 0; k < LANES; ++k) any |= is_changed[k];
        /* A group that did not change in a round would not in the next one either. */
        if (!any) break;
    }
    for (int i = 0; i < 16; ++i) level[i] = pick(is_zero, zero, level[i] + splat(4.0f));
    const ilanes has_scale = (l2_sum > zero) & ~is_zero;
    return pick(has_scale, xl_sum / l2_sum, zero);
}

/* x, w: (n); level: (n) out. Fits scales by d * l with l in 0..n_levels; returns d. Used with
 * importances only. Levels wrap at 256 where a scale is negative, as ggml's bytes do. */
static inline float fit_positive(int n, int n_levels, const float *x, const float *w,
                                 uint8_t *level) {
    float max = 0;
    for (int i = 0; i < n; ++i) max = max > x[i] ? max : x[i];
    if (max < TINY) {
        for (int i = 0; i < n; ++i) level[i] = 0;
        return 0.0f;
    }
    float inverse = (float)n_levels / max;
    float best_error = 0;
    for (int i = 0; i < n; ++i) {
        level[i] = (uint8_t)nearest_one(inverse * x[i]);
        const float difference = x[i] - 1 / inverse * (float)level[i];
        best_error += w[i] * difference * difference;
    }
    for (int step = -4; step <= 4; ++step) {
        if (step == 0) continue;
        const float tried = (0.1f * (float)step + (float)n_levels) / max;
        const float scale = 1 / tried;
        float error = 0;
        for (int i = 0; i < n; ++i) {
            const int32_t l = nearest_one(tried * x[i]);
            const float difference = x[i] - scale * (float)(l < n_levels ? l : n_levels);
            error += w[i] * difference * difference;
        }
        if (error < best_error) {
            best_error = error;
            inverse = tried;
        }
    }
    float xl_sum = 0, l2_sum = 0;
    for (int i = 0; i < n; ++i) {
        const int32_t rounded = nearest_one(inverse * x[i]);
        const int32_t l = rounded < n_levels ? rounded : n_levels;
        level[i] = (uint8_t)l;
        xl_sum += w[i] * x[i] * (float)l;
        l2_sum += w[i] * (float)l * (float)l;
    }
    for (int round = 0; round < 5; ++round) {
        int is_changed = 0;
        for (int i = 0; i < n; ++i) {
            float xl = xl_sum - w[i] * x[i] * (float)level[i];
            float l2 = l2_sum - w[i] * (float)level[i] * (float)level[i];
            if (!(xl > 0 && l2 > 0)) continue;
            const int32_t rounded = nearest_one(x[i] * l2 / xl);
            const int32_t l = rounded < n_levels ? rounded : n_levels;
            if (l == level[i]) continue;
            xl += w[i] * x[i] * (float)l;
            l2 += w[i] * (float)l * (float)l;
            if (xl * xl * l2_sum > xl_sum * xl_sum * l2) {
                level[i] = (uint8_t)l;
                xl_sum = xl;
                l2_sum = l2;
                is_changed = 1;
            }
        }
        if (!is_changed) break;
    }
    return l2_sum > 0.0f ? xl_sum / l2_sum : 0.0f;
}

#endif
