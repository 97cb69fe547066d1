/* Products of stored matrices with activations. */
#ifndef COLIBRI_MATMUL_H
#define COLIBRI_MATMUL_H

#include <stdint.h>

#include "kernels.h"
#include "team.h"

/* A weight matrix as stored: a row makes one output.
 *
 * data: the bytes, (rows, columns) in quant blocks of `type`, plain or with `row_interleave` rows
 * interleaved (0 or 16; `rows` is then a multiple of it); any address, fastest at multiples of 64.
 */
struct colibri_matrix {
    const uint8_t *data;
    int64_t rows;
    int64_t columns;
    int32_t type; /* colibri_type */
    int32_t row_interleave;
};

/* out = x @ matrix.T + bias. Strides count floats from row to row. */
struct colibri_product {
    struct colibri_matrix matrix;
    const float *x;    /* (n_tokens, columns) */
    int64_t x_stride;  /* >= columns */
    float *out;        /* (n_tokens, rows); must not overlap any x of the same call */
    int64_t out_stride; /* >= rows */
    const float *bias; /* (rows), or NULL */
    int64_t n_tokens;
};

/* The kernel that products with such a matrix use: of the best instruction set in `isas` (bits of
 * colibri_isa, as colibri_runtime_isas gives them or fewer) that has one. NULL: there is none. */
const struct colibri_kernel *colibri_kernel_find(uint32_t isas, int32_t type,
                                                 int32_t row_interleave);

/* Whether there is one: 1 or 0. */
COLIBRI_EXPORT int32_t colibri_has_kernel(uint32_t isas, int32_t type, int32_t row_interleave);

/* colibri_rounding that products with `type` apply to activations; -ENOTSUP without a kernel. */
COLIBRI_EXPORT int32_t colibri_matmul_rounding(uint32_t isas, int32_t type,
                                               int32_t row_interleave);

/* 0; -EINVAL: no whole number of quant blocks or interleaved groups, or a size below 1 or above
 * 2^30; -ENOTSUP: there is no kernel. */
int32_t colibri_matrix_check(uint32_t isas, const struct colibri_matrix *matrix);

/* Workspace that a product or an expert takes beside its rounded activations. */
#define COLIBRI_PLAN_BYTES 512

/* Bytes of workspace that colibri_matmul needs for these products, or the error that it would
 * return. Depends on types, columns, x and n_tokens alone, and is never more than the sum of
 * colibri_acts_bytes(colibri_matmul_rounding(...), n_tokens, columns) + COLIBRI_PLAN_BYTES over the
 * products. */
COLIBRI_EXPORT int64_t colibri_matmul_workspace(uint32_t isas,
                                                const struct colibri_product *products,
                                                int32_t n_products);

/* Computes all products with one hand-over to the team (two where very many tokens have to be
 * rounded); activations are rounded once where products share x, n_tokens, columns and rounding.
 *
 * workspace: 64-byte aligned, owned by the caller, free again on return. One call at a time for a
 * team and for a workspace. team NULL: the caller computes alone. A result is the same bits for
 * any number of threads, tokens and products in the call, and for any addresses; it may differ in
 * the last bits between instruction sets.
 *
 * Returns 0; -EINVAL (an impossible matrix, stride, pointer or count); -ENOTSUP (no kernel for a
 * type); -ENOSPC (workspace_bytes too small); -EBUSY (see colibri_team_run). Nothing was written
 * then. */
COLIBRI_EXPORT int32_t colibri_matmul(struct colibri_team *team, uint32_t isas,
                                      const struct colibri_product *products, int32_t n_products,
                                      void *workspace, int64_t workspace_bytes);

#endif
