#include "recall.h"

#include <math.h>
#include <stddef.h>

int32_t colibri_recall(struct colibri_recall *state, int32_t layer, int64_t visit, float keep) {
    const int32_t window = state->window;
    const size_t row0 = (size_t)layer * (size_t)window;
    const int32_t *sizes = state->sizes + row0;
    const int32_t *picks = state->picks + row0 * (size_t)state->max_picks;
    const float *shares = state->shares + row0 * (size_t)state->max_picks;
    const int32_t n_past = visit < window ? (int32_t)visit : window - 1;
    int32_t row = (int32_t)(visit % window);
    const int32_t n_now = sizes[row];
    const int32_t *now = picks + (size_t)row * (size_t)state->max_picks;
    for (int32_t i = 0; i < n_now; i++) state->is_picked[now[i]] = 1;

    float total = 1.0f, age = 1.0f;
    int32_t n_touched = 0;
    for (int32_t lag = 1; lag <= n_past; lag++) {
        /* `row` is that of the visit that followed the one at this lag. */
        int32_t next = row;
        row = row ? row - 1 : window - 1;
        const int32_t *past = picks + (size_t)row * (size_t)state->max_picks;
        int32_t n_same = 0;
        for (int32_t i = 0; i < sizes[row]; i++) n_same += state->is_picked[past[i]];
        const float alike = n_now ? (float)n_same / (float)n_now : 0.0f;
        const float overlap = keep * state->overlaps[lag - 1] + (1.0f - keep) * alike;
        state->overlaps[lag - 1] = overlap;
        age *= state->fading;
        const float weight = age * expf(state->sharpness * overlap);
        total += weight;
        float vote = weight;
        for (int32_t ahead = 1; ahead <= state->n_ahead && ahead <= lag; ahead++) {
            const int32_t *followers = picks + (size_t)next * (size_t)state->max_picks;
            const float *counts = shares + (size_t)next * (size_t)state->max_picks;
            for (int32_t i = 0; i < sizes[next]; i++) {
                const int32_t expert = followers[i];
                if (state->likelihoods[expert] == 0.0f) state->touched[n_touched++] = expert;
                state->likelihoods[expert] += vote * counts[i];
            }
            vote *= state->later;
            next = next + 1 < window ? next + 1 : 0;
        }
    }
    int32_t n_likely = 0;
    for (int32_t i = 0; i < n_touched; i++) {
        const int32_t expert = state->touched[i];
        const float likelihood = state->likelihoods[expert] / total;
        state->likelihoods[expert] = 0.0f;
        if (likelihood < state->least || n_likely == state->max_likely) continue;
        state->likely[n_likely] = expert;
        state->likely_by[n_likely++] = likelihood;
    }
    for (int32_t i = 0; i < n_now; i++) state->is_picked[now[i]] = 0;
    return n_likely;
}
