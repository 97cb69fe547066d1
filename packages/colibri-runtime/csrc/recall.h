/* What followed tokens that were routed like this one. See recall.py for the meaning. */
#ifndef COLIBRI_RECALL_H
#define COLIBRI_RECALL_H

#include <stdint.h>

#include "colibri_runtime.h"

/* Owned by the caller; nothing here is kept between calls. Mirrored by recall.py. */
struct colibri_recall {
    int32_t window;     /* visits of a layer that are remembered, at least 1 */
    int32_t max_picks;  /* experts of one visit, at most */
    int32_t max_likely; /* experts that are given back, at most */
    int32_t n_ahead;    /* visits after the one that is alike, whose experts are likely */
    int32_t n_experts;
    float sharpness;    /* how much more a token counts that was routed alike */
    float fading;       /* how much less each further token counts, at most 1 */
    float least;        /* likelihood from which an expert is given back, above 0 */
    float later;        /* how much less each further one of those visits counts, above 0 */
    int32_t reserved;
    int32_t *picks;     /* (n_layers, window, max_picks): experts of each visit, a ring */
    float *shares;      /* (n_layers, window, max_picks): what each of them counts */
    int32_t *sizes;     /* (n_layers, window): how many there are */
    float *overlaps;    /* (window): by lag less 1, how alike the tokens were so far, 0 to 1 */
    float *likelihoods; /* (n_experts): zero before and after a call */
    uint8_t *is_picked; /* (n_experts): zero before and after a call */
    int32_t *touched;   /* (n_experts): scratch */
    int32_t *likely;    /* (max_likely): experts given back */
    float *likely_by;   /* (max_likely): their likelihoods */
};

/* The experts that `layer` will want at its next visit, as far as earlier tokens tell: how many
 * stand in `likely`. `visit` counts the layer's visits from 0; the caller has written what this
 * one chose into row visit % window of the layer: each expert below n_experts and once. `keep` is
 * how much of the overlaps of the layers before is kept. Not to be called for one state from two
 * threads at once. */
COLIBRI_EXPORT int32_t colibri_recall(struct colibri_recall *state, int32_t layer, int64_t visit,
                                      float keep);

#endif
