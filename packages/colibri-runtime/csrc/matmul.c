#include "matmul.h"

#include <errno.h>
#include <stddef.h>

#include "rounding.h"

#define MOST ((int64_t)1 << 30)
/* Weights of a chunk: small enough to share out evenly and to stay in a second-level cache while
 * groups of tokens pass over them, large enough that taking one costs nothing. */
#define CHUNK_BYTES_LEAST (32 * 1024)
#define CHUNK_BYTES_MOST (256 * 1024)
#define CHUNKS_A_THREAD 8
/* Rows of a chunk are a multiple of this where there are as many: the most that kernels read at
 * once, several groups of 16 in turn. */
#define CHUNK_ROWS 64
/* Values above which rounding is shared out too. */
#define ROUND_ALONE 65536

/* ---- kernels ---- */

typedef const struct colibri_kernel *table(int32_t *n);

static const struct colibri_kernel *find_in(table *const *tables, int32_t n_tables, int32_t type,
                                            int32_t row_interleave) {
    for (int32_t t = 0; t < n_tables; t++) {
        int32_t n;
        const struct colibri_kernel *kernels = tables[t](&n);
        for (int32_t i = 0; i < n; i++)
            if (kernels[i].type == type && kernels[i].row_interleave == row_interleave)
                return &kernels[i];
    }
    return NULL;
}

const struct colibri_kernel *colibri_kernel_find(uint32_t isas, int32_t type,
                                                 int32_t row_interleave) {
    static table *const base[] = {colibri_kernels_blocks32_base, colibri_kernels_blocks256_base};
    const struct colibri_kernel *kernel = NULL;
#if defined(COLIBRI_X86)
    static table *const avx2[] = {colibri_kernels_blocks32_avx2, colibri_kernels_blocks256_avx2};
    static table *const avx512[] = {colibri_kernels_blocks32_avx512,
                                    colibri_kernels_blocks256_avx512};
    if (isas & COLIBRI_ISA_AVX512) kernel = find_in(avx512, 2, type, row_interleave);
    if (kernel == NULL && isas & COLIBRI_ISA_AVX2) kernel = find_in(avx2, 2, type, row_interleave);
#endif
#if defined(COLIBRI_ARM)
    static table *const neon[] = {colibri_kernels_blocks32_neon, colibri_kernels_blocks256_neon};
    static table *const dotprod[] = {colibri_kernels_blocks32_dotprod,
                                     colibri_kernels_blocks256_dotprod};
    if (isas & COLIBRI_ISA_DOTPROD) kernel = find_in(dotprod, 2, type, row_interleave);
    if (kernel == NULL && isas & COLIBRI_ISA_NEON) kernel = find_in(neon, 2, type, row_interleave);
#endif
    (void)isas;
    return kernel != NULL ? kernel : find_in(base, 2, type, row_interleave);
}

int32_t colibri_has_kernel(uint32_t isas, int32_t type, int32_t row_interleave) {
    return colibri_kernel_find(isas, type, row_interleave) != NULL;
}

int32_t colibri_matmul_rounding(uint32_t isas, int32_t type, int32_t row_interleave) {
    const struct colibri_kernel *kernel = colibri_kernel_find(isas, type, row_interleave);
    return kernel != NULL ? kernel->rounding : -ENOTSUP;
}

int32_t colibri_matrix_check(uint32_t isas, const struct colibri_matrix *matrix) {
    const struct colibri_kernel *kernel =
        colibri_kernel_find(isas, matrix->type, matrix->row_interleave);
    if (kernel == NULL) return -ENOTSUP;
    if (matrix->data == NULL || matrix->rows < 1 || matrix->rows > MOST || matrix->columns < 1 ||
        matrix->columns > MOST || matrix->columns % kernel->block_elements != 0)
        return -EINVAL;
    if (matrix->row_interleave > 0 && matrix->rows % matrix->row_interleave != 0) return -EINVAL;
    return 0;
}

/* ---- one call ---- */

struct plan {
    const struct colibri_product *product;
    const struct colibri_kernel *kernel;
    struct colibri_acts acts;
    int64_t row_bytes;
    int64_t chunk_rows;
    int64_t first_chunk;
    int64_t n_chunks;
    int32_t rounds; /* whether it is the first product that wants these activations */
};

_Static_assert(sizeof(struct plan) <= COLIBRI_PLAN_BYTES, "a plan fits in its share");

struct call {
    struct plan *plans;
    int32_t n;
    uint32_t isas;
};

static int32_t check(uint32_t isas, const struct colibri_product *product) {
    const int32_t error = colibri_matrix_check(isas, &product->matrix);
    if (error) return error;
    if (product->n_tokens < 0 || product->n_tokens > MOST) return -EINVAL;
    if (product->n_tokens > 0 && (product->x == NULL || product->out == NULL)) return -EINVAL;
    if (product->x_stride < product->matrix.columns || product->out_stride < product->matrix.rows)
        return -EINVAL;
    return 0;
}

static int32_t rounding_of(uint32_t isas, const struct colibri_product *product) {
    return colibri_matmul_rounding(isas, product->matrix.type, product->matrix.row_interleave);
}

/* The first product that shares rounded activations with products[i]; i where it is the first. */
static int32_t sharer(uint32_t isas, const struct colibri_product *products, int32_t i) {
    const struct colibri_product *b = &products[i];
    for (int32_t j = 0; j < i; j++) {
        const struct colibri_product *a = &products[j];
        if (a->x == b->x && a->n_tokens == b->n_tokens && a->x_stride == b->x_stride &&
            a->matrix.columns == b->matrix.columns && rounding_of(isas, a) == rounding_of(isas, b))
            return j;
    }
    return i;
}

int64_t colibri_matmul_workspace(uint32_t isas, const struct colibri_product *products,
                                 int32_t n_products) {
    if (n_products < 0 || (n_products > 0 && products == NULL)) return -EINVAL;
    int64_t size = (int64_t)n_products * COLIBRI_PLAN_BYTES;
    for (int32_t i = 0; i < n_products; i++) {
        const int32_t error = check(isas, &products[i]);
        if (error) return error;
        if (sharer(isas, products, i) != i) continue;
        const int64_t bytes = colibri_acts_bytes(rounding_of(isas, &products[i]),
                                                 products[i].n_tokens, products[i].matrix.columns);
        if (bytes < 0) return bytes;
        size += bytes;
    }
    return size;
}

static int64_t rows_a_chunk(int64_t rows, int64_t row_bytes, int64_t total, int32_t n_threads) {
    int64_t bytes = CHUNK_BYTES_MOST;
    if (n_threads > 1) {
        bytes = total / ((int64_t)n_threads * CHUNKS_A_THREAD);
        if (bytes < CHUNK_BYTES_LEAST) bytes = CHUNK_BYTES_LEAST;
        if (bytes > CHUNK_BYTES_MOST) bytes = CHUNK_BYTES_MOST;
    }
    int64_t n = bytes / row_bytes;
    n = n < CHUNK_ROWS / 2 ? n / 16 * 16 : (n + CHUNK_ROWS / 2) / CHUNK_ROWS * CHUNK_ROWS;
    if (n < 16) n = 16;
    return n < rows ? n : rows;
}

static void round_chunk(void *ctx, int64_t chunk, int32_t thread) {
    (void)thread;
    const struct call *call = ctx;
    for (int32_t i = 0; i < call->n; i++) {
        const struct plan *plan = &call->plans[i];
        if (!plan->rounds) continue;
        if (chunk < plan->product->n_tokens) {
            colibri_acts_round(call->isas, &plan->acts, (int32_t)chunk, 0, plan->acts.columns,
                               plan->product->x + chunk * plan->product->x_stride);
            return;
        }
        chunk -= plan->product->n_tokens;
    }
}

static void product_chunk(void *ctx, int64_t chunk, int32_t thread) {
    (void)thread;
    const struct call *call = ctx;
    const struct plan *plan = call->plans;
    while (chunk >= plan->first_chunk + plan->n_chunks) plan++;
    const struct colibri_product *product = plan->product;
    const int64_t first = (chunk - plan->first_chunk) * plan->chunk_rows;
    int64_t n_rows = product->matrix.rows - first;
    if (n_rows > plan->chunk_rows) n_rows = plan->chunk_rows;
    const uint8_t *rows = product->matrix.data + first * plan->row_bytes;
    for (int64_t token = 0; token < product->n_tokens; token += COLIBRI_KERNEL_TOKENS) {
        int64_t n_tokens = product->n_tokens - token;
        if (n_tokens > COLIBRI_KERNEL_TOKENS) n_tokens = COLIBRI_KERNEL_TOKENS;
        float *out = product->out + token * product->out_stride + first;
        plan->kernel->dot(rows, n_rows, &plan->acts, (int32_t)token, (int32_t)n_tokens, out,
                          product->out_stride);
        if (product->bias == NULL) continue;
        for (int64_t t = 0; t < n_tokens; t++)
            for (int64_t r = 0; r < n_rows; r++)
                out[t * product->out_stride + r] += product->bias[first + r];
    }
}

int32_t colibri_matmul(struct colibri_team *team, uint32_t isas,
                       const struct colibri_product *products, int32_t n_products,
                       void *workspace, int64_t workspace_bytes) {
    const int64_t needed = colibri_matmul_workspace(isas, products, n_products);
    if (needed < 0) return (int32_t)needed;
    if (n_products == 0) return 0;
    if (workspace == NULL || (uintptr_t)workspace % 64 != 0) return -EINVAL;
    if (workspace_bytes < needed) return -ENOSPC;
    struct call call = {workspace, n_products, isas};
    char *next = (char *)workspace + (int64_t)n_products * COLIBRI_PLAN_BYTES;
    int64_t total = 0, to_round = 0, rows_to_round = 0, n_chunks = 0;
    for (int32_t i = 0; i < n_products; i++) {
        const struct colibri_product *product = &products[i];
        const struct colibri_matrix *matrix = &product->matrix;
        struct plan *plan = &call.plans[i];
        plan->product = product;
        plan->kernel = colibri_kernel_find(isas, matrix->type, matrix->row_interleave);
        plan->row_bytes = matrix->columns / plan->kernel->block_elements *
                          plan->kernel->block_bytes;
        total += matrix->rows * plan->row_bytes;
        const int32_t first = sharer(isas, products, i);
        plan->rounds = first == i;
        if (!plan->rounds) {
            plan->acts = call.plans[first].acts;
            continue;
        }
        colibri_acts_place(&plan->acts, plan->kernel->rounding, product->n_tokens, matrix->columns,
                           next);
        next += colibri_acts_bytes(plan->kernel->rounding, product->n_tokens, matrix->columns);
        to_round += product->n_tokens * matrix->columns;
        rows_to_round += product->n_tokens;
    }
    for (int32_t i = 0; i < n_products; i++) {
        struct plan *plan = &call.plans[i];
        const int64_t rows = products[i].matrix.rows;
        plan->chunk_rows = rows_a_chunk(rows, plan->row_bytes, total, colibri_team_threads(team));
        plan->first_chunk = n_chunks;
        plan->n_chunks = (rows + plan->chunk_rows - 1) / plan->chunk_rows;
        n_chunks += plan->n_chunks;
    }
    struct colibri_team *rounders = to_round > ROUND_ALONE ? team : NULL;
    const int32_t error = colibri_team_run(rounders, round_chunk, &call, rows_to_round);
    return error ? error : colibri_team_run(team, product_chunk, &call, n_chunks);
}
