/* One transformer layer, step by step; between the steps the caller asks for experts. */
#ifndef COLIBRI_OPS_LAYER_H
#define COLIBRI_OPS_LAYER_H

#include <stdint.h>

#include "colibri_runtime.h"
#include "experts.h"
#include "matmul.h"
#include "team.h"

/* What all layers of a model share. All memory is the caller's; arrays begin at multiples of 64
 * bytes and hold `batch` rows. Native byte order and alignment; Python fills the same struct. */
struct colibri_decoder {
    struct colibri_team *team; /* NULL: the caller alone */
    uint32_t isas;
    int32_t hidden;
    int32_t n_heads;
    int32_t n_kv_heads;     /* divides n_heads */
    int32_t head_dim;       /* at most COLIBRI_MAX_HEAD_DIM */
    int32_t n_dims;         /* of each head that positions turn */
    int32_t is_interleaved; /* see struct colibri_heads */
    int32_t is_norm_full;   /* query_norm and key_norm run over all heads, not over each */
    int32_t is_f16;         /* keys and values are half floats */
    int32_t n_experts;      /* at least 1 */
    int32_t top_k;          /* at least 1 */
    int32_t is_norm_top_k;
    float eps;
    float clip;       /* 0: none */
    int64_t window;   /* 0: none */
    int64_t capacity; /* positions of the KV cache */
    int64_t batch;    /* most tokens a step takes */

    float *stream;   /* (batch, hidden): in and out of every step */
    float *normed;   /* (batch, hidden): what route leaves for the experts */
    float *queries;  /* (batch, n_heads * head_dim) */
    float *keys;     /* (batch, n_kv_heads * head_dim) */
    float *values;   /* as keys */
    float *mixed;    /* as queries */
    float *shared;   /* (batch, hidden): projections and the shared expert's output */
    float *outputs;  /* (batch * top_k, hidden): of experts, by token and rank */
    float *cosines;  /* (batch, n_dims / 2): of the pass's positions; the caller fills it */
    float *sines;    /* as cosines */
    float *logits;   /* (batch, n_experts): of routers */
    int32_t *experts; /* (batch, top_k): best first */
    float *weights;   /* as experts */
    int32_t *guesses; /* as experts: what predict finds */
    int32_t *wanted;  /* (n_experts): the experts that any token chose, ascending */
    int32_t *starts;  /* (n_experts + 1): where each expert's tokens begin in the next two */
    int32_t *tokens;  /* (batch * top_k): tokens by expert, ascending */
    int32_t *places;  /* (batch * top_k): token * top_k + rank of each */
    struct colibri_expert *gathered; /* (n_experts): for one call of colibri_experts */
    void *workspace;
    int64_t workspace_bytes; /* enough for every call that the steps make */
};

/* One layer's dense weights and its part of the KV cache. A matrix with data NULL is not there. */
struct colibri_layer {
    const float *attn_norm; /* (hidden) */
    const float *ffn_norm;  /* (hidden) */
    struct colibri_matrix query, key, value, output;
    const float *query_bias, *key_bias, *value_bias, *output_bias; /* NULL: none */
    const float *query_norm, *key_norm; /* (head_dim) or (heads * head_dim); NULL: none */
    void *keys;   /* (n_kv_heads, capacity, head_dim) */
    void *values; /* as keys */
    struct colibri_matrix router;   /* (n_experts, hidden) */
    struct colibri_expert dense;    /* the shared expert, or a dense layer's network */
    const float *shared_gate;       /* (hidden); NULL: the shared expert is not gated */
};

/* Where an expert's segments lie in its block; `data` of the matrices and the biases are offsets
 * as pointers (biases NULL: none). */
struct colibri_block {
    struct colibri_expert at;
};

/* sizeof of colibri_decoder, colibri_layer, colibri_block for 0, 1, 2; else 0. */
COLIBRI_EXPORT int64_t colibri_layer_struct_bytes(int32_t which);

/* All steps: `n_tokens` in 1..batch rows of stream; not with the same decoder or team at once.
 * They return 0, or -errno of colibri_matmul and colibri_experts, which is a caller's mistake. The
 * bits of a token's row depend on its own history alone: not on n_tokens, threads or addresses. */

/* stream += output(attention(norm(stream))); stores keys and values of positions first...
 * first + n_tokens - 1, which must be below capacity. */
COLIBRI_EXPORT int32_t colibri_layer_attention(const struct colibri_decoder *decoder,
                                               const struct colibri_layer *layer, int64_t n_tokens,
                                               int64_t first);

/* normed = norm(stream); experts and weights by softmax of the router over it (of equals the
 * lowest number first, NaN last); their tokens grouped. Without a router every token goes to
 * expert 0, with weight 1. Returns how many are wanted, or -errno. */
COLIBRI_EXPORT int32_t colibri_layer_route(const struct colibri_decoder *decoder,
                                           const struct colibri_layer *layer, int64_t n_tokens);

/* guesses = the experts that the layer's router would choose for the stream as it is now. */
COLIBRI_EXPORT int32_t colibri_layer_predict(const struct colibri_decoder *decoder,
                                             const struct colibri_layer *layer, int64_t n_tokens);

/* shared = dense(normed), the shared expert; not gated yet. */
COLIBRI_EXPORT int32_t colibri_layer_shared(const struct colibri_decoder *decoder,
                                            const struct colibri_layer *layer, int64_t n_tokens);

/* Outputs of `n` of the wanted experts, whose blocks lie at `addresses`, each laid out as
 * blocks[kinds[i]] says. */
COLIBRI_EXPORT int32_t colibri_layer_experts(const struct colibri_decoder *decoder,
                                             int64_t n_tokens, int32_t n, const int32_t *experts,
                                             const uint64_t *addresses, const int32_t *kinds,
                                             const struct colibri_block *blocks);

/* stream += the weighted sum of outputs, in order of rank, and the gated shared expert. */
COLIBRI_EXPORT int32_t colibri_layer_finish(const struct colibri_decoder *decoder,
                                            const struct colibri_layer *layer, int64_t n_tokens);

/* stream += dense(norm(stream)): the feed-forward network of a layer without experts. */
COLIBRI_EXPORT int32_t colibri_layer_dense(const struct colibri_decoder *decoder,
                                           const struct colibri_layer *layer, int64_t n_tokens);

/* out (n_tokens, head->rows) = head(norm(stream)) of rows from `token` on. */
COLIBRI_EXPORT int32_t colibri_decoder_logits(const struct colibri_decoder *decoder,
                                              const float *norm, const struct colibri_matrix *head,
                                              int64_t token, int64_t n_tokens, float *out);

#endif
