/* Which block leaves the pool first: policy_cadence.py and policy_recall.py in C, see there for the
 * meaning. All numbers are the same as theirs, operation by operation.
 *
 * Memory is the caller's and described by one struct (mirrored by policy_native.py); nothing is
 * kept elsewhere, nothing is allocated. One thread at a time uses a policy. Layers are below
 * n_layers and experts below width: the caller sees to that.
 */
#ifndef COLIBRI_POLICY_H
#define COLIBRI_POLICY_H

#include <stdint.h>

#include "colibri_runtime.h"
#include "recall.h"

/* Arrays by layer have n_layers items, those by block (n_layers, width) in rows. */
struct colibri_policy {
    int32_t n_layers;
    int32_t width;
    int32_t has_quotas;
    int32_t is_observed; /* its driver tells of events */
    int32_t is_pressed;  /* a victim was asked for */
    int32_t latest;      /* layer of the latest event, -1 */
    int32_t n_seen;      /* layers that had an event */
    int32_t n_recalled;  /* layers that had an event which was told */
    int32_t n_stale;
    int32_t first_ahead, last_ahead;     /* blocks read ahead, a list in order; -1: none */
    int32_t first_surplus, last_surplus; /* layers beyond their quota, likewise */
    int32_t reserved;
    double growth;   /* of a layer's unit with each of its events */
    double echo;     /* uses that a choice of the latest event is worth */
    double approach; /* ln of what a block gains as its layer comes round */
    double recall_weight;
    double clock;
    struct colibri_recall *recall; /* NULL: nothing is recalled */
    /* By layer. */
    double *units;
    double *offsets;     /* bring a layer's values to a common unit, as ln */
    double *ranks;       /* ln of the lowest value, and the offset */
    int32_t *lowest;     /* its expert; -1: no value; -2: not known */
    int32_t *n_values;
    int32_t *n_recent;
    int32_t *n_touched;
    int32_t *quotas;
    int32_t *next_surplus, *previous_surplus; /* -2 in next: not in the list */
    int64_t *n_visits;   /* events that were told */
    uint8_t *is_seen;
    /* By block. */
    double *values;      /* of those that may leave; infinity: it is none of them */
    double *counts;
    double *recents;     /* what it is worth until its layer's next event; 0: what it counts */
    int32_t *recent;     /* n_recent experts of each layer that have one */
    int32_t *touched;    /* n_touched experts of each layer */
    int32_t *next_ahead, *previous_ahead; /* -2 in next: not in the list */
    uint8_t *is_touched;
    /* Scratch. */
    int32_t *stale;      /* (width + 64): experts to price again */
    uint8_t *is_asked;   /* (width): zero between calls */
};

/* The calls of class Policy in policy.py. A pin of what is not there gives -ENOENT. `victim` gives
 * layer << 32 | expert, or -1. `weights` may be NULL. */
COLIBRI_EXPORT int32_t colibri_policy_observe(struct colibri_policy *policy, int32_t layer,
                                              int32_t n, const int32_t *experts,
                                              const double *weights);
COLIBRI_EXPORT int32_t colibri_policy_pin(struct colibri_policy *policy, int32_t layer,
                                          int32_t expert);
COLIBRI_EXPORT int32_t colibri_policy_release(struct colibri_policy *policy, int32_t layer,
                                              int32_t expert);
/* The same for several experts of a layer, in order; a pin ends at the first that is not there. */
COLIBRI_EXPORT int32_t colibri_policy_pin_all(struct colibri_policy *policy, int32_t layer,
                                              int32_t n, const int32_t *experts);
COLIBRI_EXPORT int32_t colibri_policy_release_all(struct colibri_policy *policy, int32_t layer,
                                                  int32_t n, const int32_t *experts);
COLIBRI_EXPORT int32_t colibri_policy_touch_all(struct colibri_policy *policy, int32_t layer,
                                                int32_t n, const int32_t *experts);
COLIBRI_EXPORT int32_t colibri_policy_admit(struct colibri_policy *policy, int32_t layer,
                                            int32_t expert);
COLIBRI_EXPORT int32_t colibri_policy_touch(struct colibri_policy *policy, int32_t layer,
                                            int32_t expert);
COLIBRI_EXPORT int32_t colibri_policy_expire(struct colibri_policy *policy, int32_t layer,
                                             int32_t expert);
COLIBRI_EXPORT int64_t colibri_policy_victim(struct colibri_policy *policy, int32_t is_prefetch);

#endif
