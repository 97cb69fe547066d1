/* Products of stored weights with activations: what a kernel is, and the tables of them. */
#ifndef COLIBRI_KERNELS_H
#define COLIBRI_KERNELS_H

#include <stdint.h>

#include "colibri_runtime.h"

/* ggml's numbers (enum ggml_type in ggml.h). */
enum colibri_type {
    COLIBRI_F32 = 0,
    COLIBRI_F16 = 1,
    COLIBRI_Q4_0 = 2,
    COLIBRI_Q4_1 = 3,
    COLIBRI_Q5_0 = 6,
    COLIBRI_Q5_1 = 7,
    COLIBRI_Q8_0 = 8,
    COLIBRI_Q2_K = 10,
    COLIBRI_Q3_K = 11,
    COLIBRI_Q4_K = 12,
    COLIBRI_Q5_K = 13,
    COLIBRI_Q6_K = 14,
    COLIBRI_BF16 = 30,
    COLIBRI_MXFP4 = 39
};

/* How activations are rounded before a product, as ggml does for each weight type
 * (vec_dot_type of type_traits_cpu in ggml-cpu.c). */
enum colibri_rounding {
    COLIBRI_ROUND_NONE = 0, /* float32 as they are */
    COLIBRI_ROUND_F16 = 1,
    COLIBRI_ROUND_BF16 = 2,
    COLIBRI_ROUND_Q8_0 = 3, /* groups of 32: int8, scale rounded to float16 */
    COLIBRI_ROUND_Q8_1 = 4, /* the same and scale * sum of the group, rounded to float16 */
    COLIBRI_ROUND_Q8_K = 5, /* groups of 256: int8, float32 scale, sums of 16 */
    COLIBRI_N_ROUNDINGS = 6
};

/* Rows of activations, rounded once for all products that want them so.
 *
 * `columns` is a multiple of the group. Row t of each array starts at t * its row length; every
 * array starts at a multiple of 64 bytes. Which arrays there are depends on `rounding`.
 */
struct colibri_acts {
    int32_t rounding;
    int32_t n_tokens;
    int32_t columns;
    const void *values;  /* (n_tokens, columns): float, uint16_t (f16, bf16) or int8_t */
    const float *scales; /* (n_tokens, columns / group) */
    const float *sums;   /* Q8_1: (n_tokens, columns / 32), scale * sum */
    const int16_t *sums16; /* Q8_K: (n_tokens, columns / 16), sums of values */
    const int32_t *sums32; /* Q8_0, Q8_1: (n_tokens, columns / 32), sums of values */
};

/* Tokens that one call of a kernel takes at most; more come in several calls. */
#define COLIBRI_KERNEL_TOKENS 8

/* out[t * out_stride + r] = dot(row r, acts row first_token + t), r < n_rows, t < n_tokens.
 *
 * rows: the first of n_rows stored rows, of a whole number of groups of `row_interleave` rows;
 * starts at a multiple of 64 bytes when the matrix does and rows allow, else anywhere. A result
 * depends on its row and its token alone: not on n_rows, n_tokens, threads or addresses.
 */
typedef void colibri_dot(const uint8_t *rows, int64_t n_rows, const struct colibri_acts *acts,
                         int32_t first_token, int32_t n_tokens, float *out, int64_t out_stride);

struct colibri_kernel {
    int32_t type;           /* colibri_type of the weights */
    int32_t row_interleave; /* 0 or 16 */
    int32_t rounding;       /* colibri_rounding that `dot` takes */
    int32_t block_elements;
    int32_t block_bytes;
    colibri_dot *dot;
};

/* The kernels of one instruction set, in csrc/isa/; *n is how many there are. */
const struct colibri_kernel *colibri_kernels_blocks32_base(int32_t *n);
const struct colibri_kernel *colibri_kernels_blocks256_base(int32_t *n);
#if defined(COLIBRI_X86)
const struct colibri_kernel *colibri_kernels_blocks32_avx2(int32_t *n);
const struct colibri_kernel *colibri_kernels_blocks256_avx2(int32_t *n);
const struct colibri_kernel *colibri_kernels_blocks32_avx512(int32_t *n);
const struct colibri_kernel *colibri_kernels_blocks256_avx512(int32_t *n);
#endif
#if defined(COLIBRI_ARM)
const struct colibri_kernel *colibri_kernels_blocks32_neon(int32_t *n);
const struct colibri_kernel *colibri_kernels_blocks256_neon(int32_t *n);
const struct colibri_kernel *colibri_kernels_blocks32_dotprod(int32_t *n);
const struct colibri_kernel *colibri_kernels_blocks256_dotprod(int32_t *n);
#endif

#endif
