#include "experts.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>

#include "rounding.h"

/* Rows of gate and up in a chunk: a multiple of every group that `down` may want rounded. */
#define HIDDEN_ROWS 256
/* Rows of down in a chunk: many where all experts of a layer come at once, as reading gains speed
 * after its start; few where one comes alone and is to be shared out. */
#define OUT_ROWS_LEAST 128
#define OUT_ROWS 512
#define CHUNKS_A_THREAD 8
/* Values above which rounding is shared out too. */
#define ROUND_ALONE 65536

struct plan {
    const struct colibri_expert *expert;
    const struct colibri_kernel *gate, *up, *down;
    struct colibri_acts gate_acts, up_acts, hidden;
    int64_t gate_row_bytes, up_row_bytes, down_row_bytes;
    int64_t first_hidden, first_out; /* chunk numbers */
    int32_t is_gathered; /* whether its rows of x are copied together */
    int32_t gate_rounding, up_rounding;
};

_Static_assert(sizeof(struct plan) <= COLIBRI_PLAN_BYTES, "a plan fits in its share");

struct call {
    struct plan *plans;
    const struct colibri_expert_io *io;
    const struct colibri_vector_code *code;
    int32_t n;
    uint32_t isas;
    int64_t hidden_size;
    int64_t out_rows; /* of a chunk */
    int32_t wants[COLIBRI_N_ROUNDINGS];
    struct colibri_acts x[COLIBRI_N_ROUNDINGS];
};

/* ---- checks and sizes ---- */

static int32_t rounding_of(uint32_t isas, const struct colibri_matrix *matrix) {
    return colibri_matmul_rounding(isas, matrix->type, matrix->row_interleave);
}

static int32_t check_matrices(uint32_t isas, const struct colibri_expert *expert) {
    int32_t error = colibri_matrix_check(isas, &expert->gate);
    if (!error) error = colibri_matrix_check(isas, &expert->up);
    if (!error) error = colibri_matrix_check(isas, &expert->down);
    if (error) return error;
    if (expert->gate.rows != expert->up.rows || expert->gate.columns != expert->up.columns ||
        expert->down.columns != expert->gate.rows || expert->down.rows != expert->gate.columns)
        return -EINVAL;
    return 0;
}

static int32_t check_tokens(const struct colibri_expert *expert,
                            const struct colibri_expert_io *io) {
    if (expert->n_tokens < 0 || expert->n_tokens > io->n_places) return -EINVAL;
    for (int64_t i = 0; i < expert->n_tokens; i++) {
        const int64_t token = expert->tokens != NULL ? expert->tokens[i] : i;
        const int64_t place = expert->places != NULL ? expert->places[i] : token;
        if (token < 0 || token >= io->n_tokens || place < 0 || place >= io->n_places)
            return -EINVAL;
    }
    return 0;
}

static int32_t check(uint32_t isas, const struct colibri_expert *experts, int32_t n_experts,
                     const struct colibri_expert_io *io) {
    if (n_experts < 0 || (n_experts > 0 && experts == NULL) || io == NULL) return -EINVAL;
    if (io->n_tokens < 0 || io->n_places < 0 || (io->n_tokens > 0 && io->x == NULL) ||
        (io->n_places > 0 && io->out == NULL))
        return -EINVAL;
    for (int32_t i = 0; i < n_experts; i++) {
        int32_t error = check_matrices(isas, &experts[i]);
        if (!error) error = check_tokens(&experts[i], io);
        if (error) return error;
        const int64_t hidden = experts[i].gate.columns;
        if (hidden != experts[0].gate.columns || io->x_stride < hidden || io->out_stride < hidden)
            return -EINVAL;
    }
    return 0;
}

/* Whether the expert's tokens are rows of x one after the other, so that none need be copied. */
static int is_range(const struct colibri_expert *expert) {
    if (expert->tokens == NULL) return 1;
    for (int64_t i = 1; i < expert->n_tokens; i++)
        if (expert->tokens[i] != expert->tokens[0] + i) return 0;
    return 1;
}

int64_t colibri_experts_workspace(uint32_t isas, const struct colibri_expert *experts,
                                  int32_t n_experts, const struct colibri_expert_io *io) {
    const int32_t error = check(isas, experts, n_experts, io);
    if (error) return error;
    int32_t wants[COLIBRI_N_ROUNDINGS] = {0};
    int64_t size = (int64_t)n_experts * COLIBRI_PLAN_BYTES;
    for (int32_t i = 0; i < n_experts; i++) {
        const struct colibri_expert *expert = &experts[i];
        const int32_t gate = rounding_of(isas, &expert->gate), up = rounding_of(isas, &expert->up);
        wants[gate] = wants[up] = 1;
        int64_t bytes = colibri_acts_bytes(rounding_of(isas, &expert->down), expert->n_tokens,
                                           expert->down.columns);
        if (bytes < 0) return bytes;
        size += bytes;
        bytes = colibri_acts_bytes(gate, expert->n_tokens, expert->gate.columns);
        if (bytes < 0) return bytes;
        size += bytes;
        if (up == gate) continue;
        bytes = colibri_acts_bytes(up, expert->n_tokens, expert->up.columns);
        if (bytes < 0) return bytes;
        size += bytes;
    }
    for (int32_t rounding = 0; rounding < COLIBRI_N_ROUNDINGS; rounding++)
        if (wants[rounding])
            size += colibri_acts_bytes(rounding, io->n_tokens, experts[0].gate.columns);
    return size;
}

/* ---- rounding and gathering ---- */

static void round_chunk(void *ctx, int64_t token, int32_t thread) {
    (void)thread;
    const struct call *call = ctx;
    for (int32_t rounding = 0; rounding < COLIBRI_N_ROUNDINGS; rounding++)
        if (call->wants[rounding])
            colibri_acts_round(call->isas, &call->x[rounding], (int32_t)token, 0,
                               (int32_t)call->hidden_size,
                               call->io->x + token * call->io->x_stride);
}

static void gather_chunk(void *ctx, int64_t number, int32_t thread) {
    (void)thread;
    const struct call *call = ctx;
    const struct plan *plan = &call->plans[number];
    const struct colibri_expert *expert = plan->expert;
    if (!plan->is_gathered) return;
    for (int32_t i = 0; i < expert->n_tokens; i++) {
        colibri_acts_copy_row(&plan->gate_acts, i, &call->x[plan->gate_rounding],
                              expert->tokens[i]);
        if (plan->up_rounding != plan->gate_rounding)
            colibri_acts_copy_row(&plan->up_acts, i, &call->x[plan->up_rounding],
                                  expert->tokens[i]);
    }
}

/* ---- products ---- */

static void add_bias(float *rows, int64_t n_rows, const float *bias) {
    if (bias == NULL) return;
    for (int64_t r = 0; r < n_rows; r++) rows[r] += bias[r];
}

static int32_t tokens_from(const struct colibri_expert *expert, int64_t first) {
    const int64_t n = expert->n_tokens - first;
    return (int32_t)(n < COLIBRI_KERNEL_TOKENS ? n : COLIBRI_KERNEL_TOKENS);
}

static void hidden_chunk(void *ctx, int64_t chunk, int32_t thread) {
    (void)thread;
    const struct call *call = ctx;
    const struct plan *plan = call->plans;
    const struct plan *last = plan + call->n - 1;
    while (plan < last && chunk >= plan[1].first_hidden) plan++;
    const struct colibri_expert *expert = plan->expert;
    _Alignas(64) float gate[COLIBRI_KERNEL_TOKENS * HIDDEN_ROWS];
    _Alignas(64) float up[COLIBRI_KERNEL_TOKENS * HIDDEN_ROWS];
    const int64_t first = (chunk - plan->first_hidden) * HIDDEN_ROWS;
    int64_t n = expert->gate.rows - first;
    if (n > HIDDEN_ROWS) n = HIDDEN_ROWS;
    const uint8_t *gate_rows = expert->gate.data + first * plan->gate_row_bytes;
    const uint8_t *up_rows = expert->up.data + first * plan->up_row_bytes;
    const int32_t base = plan->is_gathered || expert->tokens == NULL ? 0 : expert->tokens[0];
    for (int64_t token = 0; token < expert->n_tokens; token += COLIBRI_KERNEL_TOKENS) {
        const int32_t n_tokens = tokens_from(expert, token);
        plan->gate->dot(gate_rows, n, &plan->gate_acts, base + (int32_t)token, n_tokens, gate,
                        HIDDEN_ROWS);
        plan->up->dot(up_rows, n, &plan->up_acts, base + (int32_t)token, n_tokens, up,
                      HIDDEN_ROWS);
        for (int32_t t = 0; t < n_tokens; t++) {
            float *g = gate + t * HIDDEN_ROWS, *u = up + t * HIDDEN_ROWS;
            add_bias(g, n, expert->gate_bias != NULL ? expert->gate_bias + first : NULL);
            add_bias(u, n, expert->up_bias != NULL ? expert->up_bias + first : NULL);
            call->code->swiglu(g, u, g, (int32_t)n);
            colibri_acts_round(call->isas, &plan->hidden, (int32_t)token + t, (int32_t)first,
                               (int32_t)n, g);
        }
    }
}

static void out_chunk(void *ctx, int64_t chunk, int32_t thread) {
    (void)thread;
    const struct call *call = ctx;
    const struct plan *plan = call->plans;
    const struct plan *last = plan + call->n - 1;
    while (plan < last && chunk >= plan[1].first_out) plan++;
    const struct colibri_expert *expert = plan->expert;
    _Alignas(64) float rows_out[COLIBRI_KERNEL_TOKENS * OUT_ROWS];
    const int64_t first = (chunk - plan->first_out) * call->out_rows;
    int64_t n = expert->down.rows - first;
    if (n > call->out_rows) n = call->out_rows;
    const uint8_t *rows = expert->down.data + first * plan->down_row_bytes;
    for (int64_t token = 0; token < expert->n_tokens; token += COLIBRI_KERNEL_TOKENS) {
        const int32_t n_tokens = tokens_from(expert, token);
        plan->down->dot(rows, n, &plan->hidden, (int32_t)token, n_tokens, rows_out, OUT_ROWS);
        for (int32_t t = 0; t < n_tokens; t++) {
            const int64_t row = expert->tokens != NULL ? expert->tokens[token + t] : token + t;
            const int64_t place = expert->places != NULL ? expert->places[token + t] : row;
            float *out = call->io->out + place * call->io->out_stride + first;
            add_bias(rows_out + t * OUT_ROWS, n,
                     expert->down_bias != NULL ? expert->down_bias + first : NULL);
            memcpy(out, rows_out + t * OUT_ROWS, (size_t)n * sizeof(float));
        }
    }
}

/* ---- the call ---- */

static int64_t rows_an_out_chunk(int64_t n_rows, int32_t n_threads) {
    const int64_t n = n_rows / (n_threads * CHUNKS_A_THREAD) / OUT_ROWS_LEAST * OUT_ROWS_LEAST;
    return n < OUT_ROWS_LEAST ? OUT_ROWS_LEAST : n > OUT_ROWS ? OUT_ROWS : n;
}

static int64_t row_bytes(const struct colibri_kernel *kernel, const struct colibri_matrix *matrix) {
    return matrix->columns / kernel->block_elements * kernel->block_bytes;
}

static char *place(struct colibri_acts *acts, int32_t rounding, int64_t n_tokens, int64_t columns,
                   char *next) {
    colibri_acts_place(acts, rounding, n_tokens, columns, next);
    return next + colibri_acts_bytes(rounding, n_tokens, columns);
}

static void make_plan(struct call *call, struct plan *plan, const struct colibri_expert *expert,
                      char **next) {
    const uint32_t isas = call->isas;
    plan->expert = expert;
    plan->gate = colibri_kernel_find(isas, expert->gate.type, expert->gate.row_interleave);
    plan->up = colibri_kernel_find(isas, expert->up.type, expert->up.row_interleave);
    plan->down = colibri_kernel_find(isas, expert->down.type, expert->down.row_interleave);
    plan->gate_row_bytes = row_bytes(plan->gate, &expert->gate);
    plan->up_row_bytes = row_bytes(plan->up, &expert->up);
    plan->down_row_bytes = row_bytes(plan->down, &expert->down);
    plan->gate_rounding = plan->gate->rounding;
    plan->up_rounding = plan->up->rounding;
    plan->is_gathered = !is_range(expert);
    plan->gate_acts = call->x[plan->gate_rounding];
    if (plan->is_gathered)
        *next = place(&plan->gate_acts, plan->gate_rounding, expert->n_tokens, call->hidden_size,
                      *next);
    plan->up_acts = plan->up_rounding == plan->gate_rounding ? plan->gate_acts
                                                             : call->x[plan->up_rounding];
    if (plan->is_gathered && plan->up_rounding != plan->gate_rounding)
        *next = place(&plan->up_acts, plan->up_rounding, expert->n_tokens, call->hidden_size,
                      *next);
    *next = place(&plan->hidden, plan->down->rounding, expert->n_tokens, expert->down.columns,
                  *next);
}

int32_t colibri_experts(struct colibri_team *team, uint32_t isas,
                        const struct colibri_expert *experts, int32_t n_experts,
                        const struct colibri_expert_io *io, void *workspace,
                        int64_t workspace_bytes) {
    const int64_t needed = colibri_experts_workspace(isas, experts, n_experts, io);
    if (needed < 0) return (int32_t)needed;
    if (n_experts == 0) return 0;
    if (workspace == NULL || (uintptr_t)workspace % 64 != 0) return -EINVAL;
    if (workspace_bytes < needed) return -ENOSPC;
    struct call call = {.plans = workspace, .io = io, .code = colibri_vector_code(isas)};
    call.n = n_experts;
    call.isas = isas;
    call.hidden_size = experts[0].gate.columns;
    char *next = (char *)workspace + (int64_t)n_experts * COLIBRI_PLAN_BYTES;
    int64_t n_wanted = 0, n_pairs = 0, n_hidden = 0, n_out = 0, out_rows = 0;
    for (int32_t i = 0; i < n_experts; i++)
        if (experts[i].n_tokens > 0) out_rows += experts[i].down.rows;
    call.out_rows = rows_an_out_chunk(out_rows, colibri_team_threads(team));
    for (int32_t i = 0; i < n_experts; i++)
        call.wants[rounding_of(isas, &experts[i].gate)] =
            call.wants[rounding_of(isas, &experts[i].up)] = 1;
    for (int32_t rounding = 0; rounding < COLIBRI_N_ROUNDINGS; rounding++) {
        if (!call.wants[rounding]) continue;
        next = place(&call.x[rounding], rounding, io->n_tokens, call.hidden_size, next);
        n_wanted++;
    }
    int gathers = 0;
    for (int32_t i = 0; i < n_experts; i++) {
        struct plan *plan = &call.plans[i];
        make_plan(&call, plan, &experts[i], &next);
        gathers |= plan->is_gathered;
        plan->first_hidden = n_hidden;
        plan->first_out = n_out;
        n_pairs += experts[i].n_tokens;
        if (experts[i].n_tokens == 0) continue;
        n_hidden += (experts[i].gate.rows + HIDDEN_ROWS - 1) / HIDDEN_ROWS;
        n_out += (experts[i].down.rows + call.out_rows - 1) / call.out_rows;
    }
    const int64_t values = n_wanted * io->n_tokens * call.hidden_size;
    int32_t error = colibri_team_run(values > ROUND_ALONE ? team : NULL, round_chunk, &call,
                                     io->n_tokens);
    const int64_t copied = n_pairs * call.hidden_size;
    if (!error && gathers)
        error = colibri_team_run(copied > ROUND_ALONE ? team : NULL, gather_chunk, &call,
                                 n_experts);
    if (!error) error = colibri_team_run(team, hidden_chunk, &call, n_hidden);
    if (!error) error = colibri_team_run(team, out_chunk, &call, n_out);
    return error;
}

void colibri_mix(const float *outputs, int64_t outputs_stride, const float *weights,
                 int64_t n_tokens, int32_t top_k, int64_t hidden, float *mixed,
                 int64_t mixed_stride, int32_t add) {
    enum { PART = 256 };
    float sum[PART];
    for (int64_t token = 0; token < n_tokens; token++) {
        for (int64_t first = 0; first < hidden; first += PART) {
            const int64_t n = hidden - first < PART ? hidden - first : PART;
            float *to = mixed + token * mixed_stride + first;
            for (int32_t rank = 0; rank < top_k; rank++) {
                const float *from = outputs + (token * top_k + rank) * outputs_stride + first;
                const float weight = weights != NULL ? weights[token * top_k + rank] : 1.0f;
                if (rank == 0)
                    for (int64_t i = 0; i < n; i++) sum[i] = from[i] * weight;
                else
                    for (int64_t i = 0; i < n; i++) sum[i] += from[i] * weight;
            }
            if (top_k <= 0) continue;
            if (add)
                for (int64_t i = 0; i < n; i++) to[i] += sum[i];
            else
                memcpy(to, sum, (size_t)n * sizeof(float));
        }
    }
}
