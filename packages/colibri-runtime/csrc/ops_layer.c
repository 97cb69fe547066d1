#include "ops_layer.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "ops.h"

/* Tokens a chunk takes of what goes token by token, and rows of queries of what attends. */
enum { TOKENS = 4, ROWS = 16 };
/* Below this many scores attention takes less time than waking a thread. */
enum { SCORES_ALONE = 256 };

struct step {
    const struct colibri_decoder *decoder;
    const struct colibri_layer *layer;
    const struct colibri_ops *ops;
    const float *norm;
    int64_t n_tokens;
    int64_t first;
    struct colibri_attention attention;
    int64_t n_row_chunks;
};

static struct step step_of(const struct colibri_decoder *decoder,
                           const struct colibri_layer *layer, int64_t n_tokens) {
    return (struct step){.decoder = decoder,
                         .layer = layer,
                         .ops = colibri_ops_of(decoder->isas),
                         .n_tokens = n_tokens};
}

typedef void token_work(const struct step *step, int64_t token);

struct token_call {
    const struct step *step;
    token_work *work;
};

static void token_chunk(void *ctx, int64_t chunk, int32_t thread) {
    (void)thread;
    const struct token_call *call = ctx;
    int64_t end = (chunk + 1) * TOKENS;
    if (end > call->step->n_tokens)
        end = call->step->n_tokens;
    for (int64_t token = chunk * TOKENS; token < end; token++)
        call->work(call->step, token);
}

static int32_t each_token(const struct step *step, token_work *work) {
    struct token_call call = {step, work};
    struct colibri_team *team = step->n_tokens > 2 * TOKENS ? step->decoder->team : NULL;
    return colibri_team_run(team, token_chunk, &call, (step->n_tokens + TOKENS - 1) / TOKENS);
}

static void norm_token(const struct step *step, int64_t token) {
    const struct colibri_decoder *d = step->decoder;
    step->ops->rms_norm(d->stream + token * d->hidden, step->norm, d->hidden, d->eps,
                        d->normed + token * d->hidden);
}

static int32_t norm(struct step *step, const float *weight) {
    step->norm = weight;
    return each_token(step, norm_token);
}

static struct colibri_product product(const struct colibri_matrix *matrix, const float *x,
                                      float *out, const float *bias, int64_t n_tokens) {
    return (struct colibri_product){.matrix = *matrix,
                                    .x = x,
                                    .x_stride = matrix->columns,
                                    .out = out,
                                    .out_stride = matrix->rows,
                                    .bias = bias,
                                    .n_tokens = n_tokens};
}

static int32_t multiply(const struct colibri_decoder *d, const struct colibri_product *products,
                        int32_t n) {
    return colibri_matmul(d->team, d->isas, products, n, d->workspace, d->workspace_bytes);
}

/* ---- attention ---- */

/* Norms, clips and turns a token's queries and keys, and puts keys and values into the cache. */
static void prepare_token(const struct step *step, int64_t token) {
    const struct colibri_decoder *d = step->decoder;
    const struct colibri_layer *layer = step->layer;
    const int64_t n_query = (int64_t)d->n_heads * d->head_dim;
    const int64_t n_key = (int64_t)d->n_kv_heads * d->head_dim;
    const float *cosines = d->cosines + token * (d->n_dims / 2);
    const float *sines = d->sines + token * (d->n_dims / 2);
    float *keys = d->keys + token * n_key, *values = d->values + token * n_key;
    struct colibri_heads how = {.head_dim = d->head_dim,
                                .n_dims = d->n_dims,
                                .is_interleaved = d->is_interleaved,
                                .norm_size = d->is_norm_full ? (int32_t)n_query : d->head_dim,
                                .eps = d->eps,
                                .clip = d->clip};
    step->ops->prepare(&how, d->queries + token * n_query, d->n_heads, layer->query_norm, cosines,
                       sines);
    how.norm_size = d->is_norm_full ? (int32_t)n_key : d->head_dim;
    step->ops->prepare(&how, keys, d->n_kv_heads, layer->key_norm, cosines, sines);
    step->ops->prepare(&how, values, d->n_kv_heads, NULL, NULL, NULL);
    for (int32_t head = 0; head < d->n_kv_heads; head++) {
        const int64_t to = (head * d->capacity + step->first + token) * d->head_dim;
        const int64_t from = (int64_t)head * d->head_dim;
        if (d->is_f16) {
            step->ops->to_half(keys + from, (uint16_t *)layer->keys + to, d->head_dim);
            step->ops->to_half(values + from, (uint16_t *)layer->values + to, d->head_dim);
        } else {
            const size_t size = (size_t)d->head_dim * sizeof(float);
            memcpy((float *)layer->keys + to, keys + from, size);
            memcpy((float *)layer->values + to, values + from, size);
        }
    }
}

static void attend_chunk(void *ctx, int64_t chunk, int32_t thread) {
    (void)thread;
    const struct step *step = ctx;
    const struct colibri_decoder *d = step->decoder;
    const int64_t n_rows = step->n_tokens * (d->n_heads / d->n_kv_heads);
    const int64_t row = chunk % step->n_row_chunks * ROWS;
    step->ops->attend(&step->attention, (int32_t)(chunk / step->n_row_chunks), row,
                      n_rows - row < ROWS ? n_rows - row : ROWS);
}

static void add_shared(const struct step *step, int64_t token) {
    const struct colibri_decoder *d = step->decoder;
    step->ops->add(d->stream + token * d->hidden, d->shared + token * d->hidden, d->hidden);
}

int32_t colibri_layer_attention(const struct colibri_decoder *d, const struct colibri_layer *layer,
                                int64_t n_tokens, int64_t first) {
    struct step step = step_of(d, layer, n_tokens);
    step.first = first;
    int32_t error = norm(&step, layer->attn_norm);
    if (error)
        return error;
    const struct colibri_product inputs[] = {
        product(&layer->query, d->normed, d->queries, layer->query_bias, n_tokens),
        product(&layer->key, d->normed, d->keys, layer->key_bias, n_tokens),
        product(&layer->value, d->normed, d->values, layer->value_bias, n_tokens),
    };
    error = multiply(d, inputs, 3);
    if (!error)
        error = each_token(&step, prepare_token);
    if (error)
        return error;
    step.attention = (struct colibri_attention){.n_heads = d->n_heads,
                                                .n_kv_heads = d->n_kv_heads,
                                                .head_dim = d->head_dim,
                                                .is_f16 = d->is_f16,
                                                .capacity = d->capacity,
                                                .window = d->window,
                                                .first = first,
                                                .keys = layer->keys,
                                                .values = layer->values,
                                                .queries = d->queries,
                                                .out = d->mixed};
    const int64_t n_rows = n_tokens * (d->n_heads / d->n_kv_heads);
    step.n_row_chunks = (n_rows + ROWS - 1) / ROWS;
    const int is_small = (first + n_tokens) * n_tokens * d->n_heads < SCORES_ALONE;
    error = colibri_team_run(is_small ? NULL : d->team, attend_chunk, &step,
                             step.n_row_chunks * d->n_kv_heads);
    if (error)
        return error;
    const struct colibri_product output =
        product(&layer->output, d->mixed, d->shared, layer->output_bias, n_tokens);
    error = multiply(d, &output, 1);
    return error ? error : each_token(&step, add_shared);
}

/* ---- routing ---- */

/* Whether `a` goes before `b` where b stands first: NaN goes last, of equals the first stays. */
static int is_better(float a, float b) { return a > b || (isnan(b) && !isnan(a)); }

/* The numbers of the k greatest of n values, best first; k <= n. */
static void choose(const float *values, int32_t n, int32_t k, int32_t *chosen) {
    /* Sorted insertion: a new value moves before those that it beats, behind its equals. */
    for (int32_t i = 0; i < n; i++) {
        int32_t place = i < k ? i : k;
        while (place > 0 && is_better(values[i], values[chosen[place - 1]])) {
            if (place < k)
                chosen[place] = chosen[place - 1];
            place--;
        }
        if (place < k)
            chosen[place] = i;
    }
}

static void route_token(const struct step *step, int64_t token) {
    const struct colibri_decoder *d = step->decoder;
    float *shares = d->logits + token * d->n_experts;
    int32_t *experts = d->experts + token * d->top_k;
    float *weights = d->weights + token * d->top_k, sum = 0;
    step->ops->softmax(shares, d->n_experts);
    choose(shares, d->n_experts, d->top_k, experts);
    for (int32_t rank = 0; rank < d->top_k; rank++) {
        weights[rank] = shares[experts[rank]];
        sum += weights[rank];
    }
    if (d->is_norm_top_k)
        for (int32_t rank = 0; rank < d->top_k; rank++)
            weights[rank] /= sum;
}

/* Sorts (token, rank) by expert; returns how many experts have any. */
static int32_t group(const struct colibri_decoder *d, int64_t n_tokens) {
    const int32_t n = (int32_t)n_tokens * d->top_k;
    int32_t n_wanted = 0;
    memset(d->starts, 0, ((size_t)d->n_experts + 1) * sizeof *d->starts);
    for (int32_t i = 0; i < n; i++)
        d->starts[d->experts[i] + 1]++;
    for (int32_t expert = 0; expert < d->n_experts; expert++) {
        if (d->starts[expert + 1])
            d->wanted[n_wanted++] = expert;
        d->starts[expert + 1] += d->starts[expert];
    }
    for (int32_t i = 0; i < n; i++) {
        const int32_t at = d->starts[d->experts[i]]++;
        d->tokens[at] = i / d->top_k;
        d->places[at] = i;
    }
    /* Each start has moved to the next one's. */
    memmove(d->starts + 1, d->starts, (size_t)d->n_experts * sizeof *d->starts);
    d->starts[0] = 0;
    return n_wanted;
}

int32_t colibri_layer_route(const struct colibri_decoder *d, const struct colibri_layer *layer,
                            int64_t n_tokens) {
    struct step step = step_of(d, layer, n_tokens);
    int32_t error = norm(&step, layer->ffn_norm);
    if (error)
        return error;
    if (layer->router.data) {
        const struct colibri_product router =
            product(&layer->router, d->normed, d->logits, NULL, n_tokens);
        error = multiply(d, &router, 1);
        if (!error)
            error = each_token(&step, route_token);
        if (error)
            return error;
    } else {
        for (int64_t i = 0; i < n_tokens * d->top_k; i++) {
            d->experts[i] = 0;
            d->weights[i] = 1;
        }
    }
    return group(d, n_tokens);
}

static void guess_token(const struct step *step, int64_t token) {
    const struct colibri_decoder *d = step->decoder;
    choose(d->logits + token * d->n_experts, d->n_experts, d->top_k,
           d->guesses + token * d->top_k);
}

int32_t colibri_layer_predict(const struct colibri_decoder *d, const struct colibri_layer *layer,
                              int64_t n_tokens) {
    /* `normed` belongs to the present layer's experts; `shared` is not in use yet. */
    struct colibri_decoder apart = *d;
    apart.normed = d->shared;
    struct step step = step_of(&apart, layer, n_tokens);
    int32_t error = norm(&step, layer->ffn_norm);
    if (error)
        return error;
    const struct colibri_product router =
        product(&layer->router, apart.normed, d->logits, NULL, n_tokens);
    error = multiply(d, &router, 1);
    return error ? error : each_token(&step, guess_token);
}

/* ---- feed-forward networks ---- */

static struct colibri_expert_io io_of(const struct colibri_decoder *d, int64_t n_tokens,
                                      float *out, int64_t n_places) {
    return (struct colibri_expert_io){.x = d->normed,
                                      .x_stride = d->hidden,
                                      .n_tokens = n_tokens,
                                      .out = out,
                                      .out_stride = d->hidden,
                                      .n_places = n_places};
}

int32_t colibri_layer_shared(const struct colibri_decoder *d, const struct colibri_layer *layer,
                             int64_t n_tokens) {
    struct colibri_expert dense = layer->dense;
    const struct colibri_expert_io io = io_of(d, n_tokens, d->shared, n_tokens);
    dense.n_tokens = n_tokens;
    return colibri_experts(d->team, d->isas, &dense, 1, &io, d->workspace, d->workspace_bytes);
}

int32_t colibri_layer_dense(const struct colibri_decoder *d, const struct colibri_layer *layer,
                            int64_t n_tokens) {
    struct step step = step_of(d, layer, n_tokens);
    int32_t error = norm(&step, layer->ffn_norm);
    if (!error)
        error = colibri_layer_shared(d, layer, n_tokens);
    return error ? error : each_token(&step, add_shared);
}

static const void *inside(uint64_t address, const void *offset) {
    return (const void *)(uintptr_t)(address + (uintptr_t)offset);
}

int32_t colibri_layer_experts(const struct colibri_decoder *d, int64_t n_tokens, int32_t n,
                              const int32_t *experts, const uint64_t *addresses,
                              const int32_t *kinds, const struct colibri_block *blocks) {
    for (int32_t i = 0; i < n; i++) {
        struct colibri_expert *expert = &d->gathered[i];
        const int32_t start = d->starts[experts[i]];
        *expert = blocks[kinds[i]].at;
        expert->gate.data = inside(addresses[i], expert->gate.data);
        expert->up.data = inside(addresses[i], expert->up.data);
        expert->down.data = inside(addresses[i], expert->down.data);
        if (expert->gate_bias)
            expert->gate_bias = inside(addresses[i], expert->gate_bias);
        if (expert->up_bias)
            expert->up_bias = inside(addresses[i], expert->up_bias);
        if (expert->down_bias)
            expert->down_bias = inside(addresses[i], expert->down_bias);
        expert->tokens = d->tokens + start;
        expert->places = d->places + start;
        expert->n_tokens = d->starts[experts[i] + 1] - start;
    }
    const struct colibri_expert_io io = io_of(d, n_tokens, d->outputs, n_tokens * d->top_k);
    return colibri_experts(d->team, d->isas, d->gathered, n, &io, d->workspace,
                           d->workspace_bytes);
}

static void finish_token(const struct step *step, int64_t token) {
    const struct colibri_decoder *d = step->decoder;
    const struct colibri_layer *layer = step->layer;
    const float *x = d->normed + token * d->hidden;
    const float *shared = layer->dense.gate.data ? d->shared + token * d->hidden : NULL;
    float factor = 1;
    if (shared && layer->shared_gate)
        factor = 1 / (1 + expf(-step->ops->dot(x, layer->shared_gate, d->hidden)));
    step->ops->combine(d->stream + token * d->hidden, d->outputs + token * d->top_k * d->hidden,
                       d->weights + token * d->top_k, d->top_k, shared, factor, d->hidden);
}

int32_t colibri_layer_finish(const struct colibri_decoder *d, const struct colibri_layer *layer,
                             int64_t n_tokens) {
    struct step step = step_of(d, layer, n_tokens);
    return each_token(&step, finish_token);
}

int32_t colibri_decoder_logits(const struct colibri_decoder *d, const float *weight,
                               const struct colibri_matrix *head, int64_t token, int64_t n_tokens,
                               float *out) {
    struct colibri_decoder part = *d;
    part.stream = d->stream + token * d->hidden;
    struct step step = step_of(&part, NULL, n_tokens);
    int32_t error = norm(&step, weight);
    if (error)
        return error;
    const struct colibri_product logits = product(head, d->normed, out, NULL, n_tokens);
    return multiply(d, &logits, 1);
}

int64_t colibri_layer_struct_bytes(int32_t which) {
    switch (which) {
    case 0: return sizeof(struct colibri_decoder);
    case 1: return sizeof(struct colibri_layer);
    case 2: return sizeof(struct colibri_block);
    default: return 0;
    }
}
