#include "policy.h"

#include <errno.h>
#include <math.h>
#include <stddef.h>

enum { NONE = -1, UNKNOWN = -2, OUT = -2 };

/* As in policy_decayed.py, policy_cadence.py and recall.py. */
static const double LARGEST_UNIT = 1e60, NEVER_USED = 1e-9, LEAST_VALUE = 1e-300;
static const double COUNT_BASE = 0.3, COUNT_SLOPE = 0.7, RECENT_BASE = 0.5, RECENT_SLOPE = 0.7;
static const double KEPT_A_TOKEN = 0.1;

static size_t block_of(const struct colibri_policy *p, int32_t layer, int32_t expert) {
    return (size_t)layer * (size_t)p->width + (size_t)expert;
}

/* ---- two lists: blocks read ahead, and layers beyond their quota ---- */

static void append(int32_t *next, int32_t *previous, int32_t *first, int32_t *last, int32_t i) {
    if (next[i] != OUT) return;
    next[i] = NONE;
    previous[i] = *last;
    if (*last == NONE)
        *first = i;
    else
        next[*last] = i;
    *last = i;
}

static void drop(int32_t *next, int32_t *previous, int32_t *first, int32_t *last, int32_t i) {
    if (next[i] == OUT) return;
    if (previous[i] == NONE)
        *first = next[i];
    else
        next[previous[i]] = next[i];
    if (next[i] == NONE)
        *last = previous[i];
    else
        previous[next[i]] = previous[i];
    next[i] = OUT;
}

static void add_ahead(struct colibri_policy *p, size_t block) {
    append(p->next_ahead, p->previous_ahead, &p->first_ahead, &p->last_ahead, (int32_t)block);
}

static void drop_ahead(struct colibri_policy *p, size_t block) {
    drop(p->next_ahead, p->previous_ahead, &p->first_ahead, &p->last_ahead, (int32_t)block);
}

static int is_ahead(const struct colibri_policy *p, size_t block) {
    return p->next_ahead[block] != OUT;
}

/* Whether the layer is beyond its quota may have changed. */
static void check_surplus(struct colibri_policy *p, int32_t layer) {
    if (!p->has_quotas) return;
    if (p->n_values[layer] > p->quotas[layer])
        append(p->next_surplus, p->previous_surplus, &p->first_surplus, &p->last_surplus, layer);
    else
        drop(p->next_surplus, p->previous_surplus, &p->first_surplus, &p->last_surplus, layer);
}

/* ---- values ---- */

static int has_value(const struct colibri_policy *p, size_t block) {
    return p->values[block] < INFINITY;
}

static void rank(struct colibri_policy *p, int32_t layer) {
    const int32_t expert = p->lowest[layer];
    if (expert >= 0)
        p->ranks[layer] = log(p->values[block_of(p, layer, expert)]) + p->offsets[layer];
}

static void set_value(struct colibri_policy *p, int32_t layer, int32_t expert, double value) {
    const size_t block = block_of(p, layer, expert);
    const double before = p->values[block];
    const int32_t lowest = p->lowest[layer];
    p->values[block] = value;
    if (before == INFINITY) {
        p->n_values[layer]++;
        check_surplus(p, layer);
    }
    if (lowest == UNKNOWN) return;
    if (lowest == expert && value > before) {
        p->lowest[layer] = UNKNOWN;
        return;
    }
    if (lowest >= 0) {
        const double least = lowest == expert ? before : p->values[block_of(p, layer, lowest)];
        if (value > least || (value == least && expert > lowest)) return;
    }
    p->lowest[layer] = expert;
    rank(p, layer);
}

static void take_value(struct colibri_policy *p, int32_t layer, int32_t expert) {
    p->values[block_of(p, layer, expert)] = INFINITY;
    p->n_values[layer]--;
    if (p->n_values[layer] == 0)
        p->lowest[layer] = NONE;
    else if (p->lowest[layer] == expert)
        p->lowest[layer] = UNKNOWN;
    check_surplus(p, layer);
}

static double plain(const struct colibri_policy *p, int32_t layer, int32_t expert) {
    return p->counts[block_of(p, layer, expert)] + NEVER_USED * p->units[layer];
}

static double price(const struct colibri_policy *p, int32_t layer, int32_t expert) {
    const double recent = p->recents[block_of(p, layer, expert)];
    return recent > 0.0 ? recent : plain(p, layer, expert);
}

/* The layer's block of lowest value, of equals the first; it has one. */
static int32_t find_lowest(struct colibri_policy *p, int32_t layer) {
    if (p->lowest[layer] == UNKNOWN) {
        const double *values = p->values + block_of(p, layer, 0);
        double least = INFINITY;
        for (int32_t expert = 0; expert < p->width; expert++)
            if (values[expert] < least) {
                least = values[expert];
                p->lowest[layer] = expert;
            }
        rank(p, layer);
    }
    return p->lowest[layer];
}

/* ---- events ---- */

/* Those that were touched and are not asked for get their places back. */
static void settle(struct colibri_policy *p, int32_t layer) {
    const int32_t n = p->n_touched[layer];
    const int32_t *touched = p->touched + block_of(p, layer, 0);
    p->n_touched[layer] = 0;
    for (int32_t i = 0; i < n; i++) {
        const size_t block = block_of(p, layer, touched[i]);
        p->is_touched[block] = 0;
        if (!p->is_asked[touched[i]] && is_ahead(p, block)) {
            drop_ahead(p, block);
            set_value(p, layer, touched[i], price(p, layer, touched[i]));
        }
    }
}

/* Goes over to a unit of 1. */
static void shrink(struct colibri_policy *p, int32_t layer, double unit) {
    const size_t first = block_of(p, layer, 0);
    for (size_t block = first; block < first + (size_t)p->width; block++) {
        p->counts[block] /= unit;
        if (has_value(p, block)) {
            const double value = p->values[block] / unit;
            p->values[block] = value > LEAST_VALUE ? value : LEAST_VALUE;
        }
    }
    if (p->n_values[layer]) p->lowest[layer] = UNKNOWN;
}

static void visit(struct colibri_policy *p, int32_t layer) {
    double unit = p->units[layer] * p->growth;
    if (unit > LARGEST_UNIT) {
        shrink(p, layer, unit);
        unit = 1.0;
    }
    p->units[layer] = unit;
    if (!p->is_seen[layer]) {
        p->is_seen[layer] = 1;
        p->n_seen++;
    }
    p->clock += p->approach / p->n_seen;
    const int32_t *recent = p->recent + block_of(p, layer, 0);
    p->n_stale = p->n_recent[layer];
    p->n_recent[layer] = 0;
    for (int32_t i = 0; i < p->n_stale; i++) {
        p->stale[i] = recent[i];
        p->recents[block_of(p, layer, recent[i])] = 0.0;
    }
    p->offsets[layer] = -log(unit) - p->clock;
    rank(p, layer);
}

static void set_recent(struct colibri_policy *p, int32_t layer, int32_t expert, double value) {
    double *recent = &p->recents[block_of(p, layer, expert)];
    if (*recent == 0.0)
        p->recent[block_of(p, layer, p->n_recent[layer]++)] = expert;
    *recent = value;
}

static double sum(const double *weights, int32_t n) {
    double total = 0.0;
    if (weights == NULL) return n;
    for (int32_t i = 0; i < n; i++) total += weights[i];
    return total;
}

static void count(struct colibri_policy *p, int32_t layer, int32_t n, const int32_t *experts,
                  const double *weights) {
    const double unit = p->units[layer], total = sum(weights, n);
    const double scale = total > 0.0 ? n / total * unit : 0.0;
    const double base = COUNT_BASE * unit, slope = COUNT_SLOPE * scale;
    const double recent_base = p->echo * RECENT_BASE * unit;
    const double recent_slope = p->echo * RECENT_SLOPE * scale;
    for (int32_t i = 0; i < n; i++) {
        const double weight = weights == NULL ? 1.0 : weights[i];
        double *held = &p->counts[block_of(p, layer, experts[i])];
        *held = *held + base + slope * weight;
        set_recent(p, layer, experts[i], *held + recent_base + recent_slope * weight);
    }
}

/* Notes what the event chose; whether it was a token, which may be compared. */
static int note(struct colibri_policy *p, int32_t layer, int64_t visit, int32_t n,
                const int32_t *experts, const double *weights) {
    const struct colibri_recall *r = p->recall;
    const size_t row = (size_t)layer * (size_t)r->window + (size_t)(visit % r->window);
    const double total = weights == NULL ? 0.0 : sum(weights, n);
    const double scale = total > 0.0 ? COUNT_SLOPE * n / total : 0.0;
    if (n > r->max_picks) {
        r->sizes[row] = 0;
        return 0;
    }
    r->sizes[row] = n;
    for (int32_t i = 0; i < n; i++) {
        const double share =
            total > 0.0 ? COUNT_BASE + scale * weights[i] : COUNT_BASE + COUNT_SLOPE;
        r->picks[row * (size_t)r->max_picks + (size_t)i] = experts[i];
        r->shares[row * (size_t)r->max_picks + (size_t)i] = (float)share;
    }
    return 1;
}

/* What followed tokens that were alike counts more. */
static void recall(struct colibri_policy *p, int32_t layer, int32_t n, const int32_t *experts,
                   const double *weights) {
    const struct colibri_recall *r = p->recall;
    const int64_t visit = p->n_visits[layer]++;
    const int is_token = note(p, layer, visit, n, experts, weights);
    const double unit = p->recall_weight * p->units[layer];
    if (visit == 0) p->n_recalled++;
    if (!is_token || !p->is_pressed) return;
    const double keep = pow(KEPT_A_TOKEN, 1.0 / p->n_recalled);
    const int32_t n_likely = colibri_recall(p->recall, layer, visit, (float)keep);
    for (int32_t i = 0; i < n_likely; i++) {
        const int32_t expert = r->likely[i];
        const size_t block = block_of(p, layer, expert);
        const double more = unit * (double)r->likely_by[i];
        if (p->recents[block] > 0.0) {
            p->recents[block] += more;
        } else if (has_value(p, block)) {
            set_recent(p, layer, expert, p->counts[block] + more);
            p->stale[p->n_stale++] = expert;
        }
    }
}

static void reprice(struct colibri_policy *p, int32_t layer) {
    for (int32_t i = 0; i < p->n_stale; i++)
        if (has_value(p, block_of(p, layer, p->stale[i])))
            set_value(p, layer, p->stale[i], price(p, layer, p->stale[i]));
    p->n_stale = 0;
}

/* ---- calls ---- */

int32_t colibri_policy_observe(struct colibri_policy *p, int32_t layer, int32_t n,
                               const int32_t *experts, const double *weights) {
    p->is_observed = 1;
    if (p->n_touched[layer]) {
        for (int32_t i = 0; i < n; i++) p->is_asked[experts[i]] = 1;
        settle(p, layer);
        for (int32_t i = 0; i < n; i++) p->is_asked[experts[i]] = 0;
    }
    p->latest = layer;
    visit(p, layer);
    count(p, layer, n, experts, weights);
    if (p->recall != NULL) recall(p, layer, n, experts, weights);
    reprice(p, layer);
    return 0;
}

int32_t colibri_policy_pin(struct colibri_policy *p, int32_t layer, int32_t expert) {
    const size_t block = block_of(p, layer, expert);
    if (has_value(p, block))
        take_value(p, layer, expert);
    else if (is_ahead(p, block))
        drop_ahead(p, block);
    else
        return -ENOENT;
    return 0;
}

int32_t colibri_policy_release(struct colibri_policy *p, int32_t layer, int32_t expert) {
    if (!p->is_observed) {
        if (p->n_touched[layer]) settle(p, layer);
        if (layer != p->latest) {
            p->latest = layer;
            visit(p, layer);
        }
        count(p, layer, 1, &expert, NULL);
        reprice(p, layer);
    }
    set_value(p, layer, expert, price(p, layer, expert));
    return 0;
}

int32_t colibri_policy_admit(struct colibri_policy *p, int32_t layer, int32_t expert) {
    add_ahead(p, block_of(p, layer, expert));
    return 0;
}

int32_t colibri_policy_expire(struct colibri_policy *p, int32_t layer, int32_t expert) {
    const size_t block = block_of(p, layer, expert);
    if (is_ahead(p, block)) {
        drop_ahead(p, block);
        set_value(p, layer, expert, price(p, layer, expert));
    }
    return 0;
}

int32_t colibri_policy_touch(struct colibri_policy *p, int32_t layer, int32_t expert) {
    const size_t block = block_of(p, layer, expert);
    if (has_value(p, block)) {
        take_value(p, layer, expert);
        add_ahead(p, block);
        if (!p->is_touched[block]) {
            p->is_touched[block] = 1;
            p->touched[block_of(p, layer, p->n_touched[layer]++)] = expert;
        }
    }
    return 0;
}

int32_t colibri_policy_pin_all(struct colibri_policy *p, int32_t layer, int32_t n,
                               const int32_t *experts) {
    int32_t code = 0;
    for (int32_t i = 0; i < n && code == 0; i++) code = colibri_policy_pin(p, layer, experts[i]);
    return code;
}

int32_t colibri_policy_release_all(struct colibri_policy *p, int32_t layer, int32_t n,
                                   const int32_t *experts) {
    for (int32_t i = 0; i < n; i++) colibri_policy_release(p, layer, experts[i]);
    return 0;
}

int32_t colibri_policy_touch_all(struct colibri_policy *p, int32_t layer, int32_t n,
                                 const int32_t *experts) {
    for (int32_t i = 0; i < n; i++) colibri_policy_touch(p, layer, experts[i]);
    return 0;
}

int64_t colibri_policy_victim(struct colibri_policy *p, int32_t is_prefetch) {
    int32_t layer = NONE, expert;
    p->is_pressed = 1;
    if (p->has_quotas) {
        layer = p->first_surplus;
    } else {
        double least = INFINITY;
        for (int32_t i = 0; i < p->n_layers; i++) {
            if (p->n_values[i] == 0) continue;
            find_lowest(p, i);
            if (p->ranks[i] < least) {
                least = p->ranks[i];
                layer = i;
            }
        }
    }
    if (layer != NONE) {
        expert = find_lowest(p, layer);
        take_value(p, layer, expert);
    } else if (!is_prefetch && p->last_ahead != NONE) {
        /* The one read ahead last is needed last. */
        const int32_t block = p->last_ahead;
        drop_ahead(p, (size_t)block);
        layer = block / p->width;
        expert = block % p->width;
    } else {
        return -1;
    }
    return (int64_t)layer << 32 | (int64_t)expert;
}
