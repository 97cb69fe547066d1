/* The experts of a layer: gated feed-forward networks, each for the tokens that chose it. */
#ifndef COLIBRI_EXPERTS_H
#define COLIBRI_EXPERTS_H

#include <stdint.h>

#include "matmul.h"

/* One expert and its tokens: out row places[i] = down(silu(gate(x)) * up(x)) of x row tokens[i]
 * (Shazeer 2020, arXiv 2002.05202). gate and up are (intermediate, hidden), down is (hidden,
 * intermediate); biases are float32 or NULL. A dense feed-forward network is one expert. */
struct colibri_expert {
    struct colibri_matrix gate, up, down;
    const float *gate_bias;
    const float *up_bias;
    const float *down_bias;
    const int32_t *tokens; /* (n_tokens), rows of x; NULL: 0, 1, 2, ... */
    const int32_t *places; /* (n_tokens), rows of out; NULL: the same as tokens */
    int64_t n_tokens;
};

/* Where all experts of a call read and write. Strides count floats from row to row. */
struct colibri_expert_io {
    const float *x;   /* (n_tokens, hidden) */
    int64_t x_stride; /* >= hidden */
    int64_t n_tokens;
    float *out;       /* (n_places, hidden); must not overlap x */
    int64_t out_stride; /* >= hidden */
    int64_t n_places;
};

/* Bytes of workspace that colibri_experts needs, or the error it would return. It grows with every
 * expert and token: a call with fewer of either and no larger shapes needs no more. It holds, each
 * of colibri_acts_bytes: all rows of x in each rounding that a gate or up wants, for each expert
 * its rows of x gathered in those, and its hidden values rounded for `down`; and
 * COLIBRI_PLAN_BYTES an expert. */
COLIBRI_EXPORT int64_t colibri_experts_workspace(uint32_t isas,
                                                 const struct colibri_expert *experts,
                                                 int32_t n_experts,
                                                 const struct colibri_expert_io *io);

/* Computes all of `experts` in two hand-overs to the team: gate, up and activation, then down.
 *
 * Every (expert, token) writes a row of its own, so that whoever sums them by rank
 * (colibri_mix) gets the same bits for every order of arrival: a call may hold all experts of a
 * layer, or those that have arrived. Rows of out that no expert names are left as they are; two
 * experts must not name the same. Otherwise as colibri_matmul, errors included; and -EINVAL for a
 * token or place out of range. */
COLIBRI_EXPORT int32_t colibri_experts(struct colibri_team *team, uint32_t isas,
                                       const struct colibri_expert *experts, int32_t n_experts,
                                       const struct colibri_expert_io *io, void *workspace,
                                       int64_t workspace_bytes);

/* mixed[t] = sum over rank of weights[t, rank] * outputs[t * top_k + rank], the products rounded
 * and summed in order of rank; weights NULL: all one. outputs is (n_tokens * top_k, hidden) with
 * `outputs_stride`, mixed (n_tokens, hidden) with `mixed_stride`, weights (n_tokens, top_k)
 * contiguous; add: mixed[t] += that sum. No errors: sizes of 0 compute nothing. */
COLIBRI_EXPORT void colibri_mix(const float *outputs, int64_t outputs_stride,
                                const float *weights, int64_t n_tokens, int32_t top_k,
                                int64_t hidden, float *mixed, int64_t mixed_stride, int32_t add);

#endif
