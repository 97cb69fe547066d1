/* Activations rounded as ggml rounds them before a product with weights of some type. */
#ifndef COLIBRI_ROUNDING_H
#define COLIBRI_ROUNDING_H

#include <stdint.h>

#include "kernels.h"

/* Elements that share a scale: 32 (Q8_0, Q8_1), 256 (Q8_K), 1; 0 where `rounding` is unknown. */
int32_t colibri_rounding_group(int32_t rounding);

/* Bytes that colibri_acts_place needs, a multiple of 64. -EINVAL: an unknown rounding, columns not
 * a positive multiple of its group or above 2^30, n_tokens negative or above 2^30. */
COLIBRI_EXPORT int64_t colibri_acts_bytes(int32_t rounding, int64_t n_tokens, int64_t columns);

/* Lays the arrays of `acts` out in `memory` (64-byte aligned, colibri_acts_bytes long; arguments
 * that function accepts). Their contents are undefined until colibri_acts_round has filled them. */
void colibri_acts_place(struct colibri_acts *acts, int32_t rounding, int64_t n_tokens,
                        int64_t columns, void *memory);

/* Rounds `n` values from x into row `token` of `acts` from column `first` on; both are multiples
 * of the group. Different ranges may be rounded by different threads at once. Every instruction
 * set gives the same bits. A group that holds a NaN gets the scale NaN, so that products with it
 * are NaN; with an infinity its products are infinite or NaN. */
void colibri_acts_round(uint32_t isas, const struct colibri_acts *acts, int32_t token,
                        int32_t first, int32_t n, const float *x);

/* The same for one row in arrays of the caller's, those that struct colibri_acts says `rounding` has
 * (others may be NULL), so that it can be compared. 0, or -EINVAL as colibri_acts_bytes. */
COLIBRI_EXPORT int32_t colibri_round_row(uint32_t isas, int32_t rounding, const float *x, int32_t n,
                                         void *values, float *scales, float *sums,
                                         int16_t *sums16, int32_t *sums32);

/* Copies row `from` of one to row `to` of another of the same rounding and columns. */
void colibri_acts_copy_row(const struct colibri_acts *to_acts, int32_t to,
                           const struct colibri_acts *from_acts, int32_t from);

/* The arrays of a range of a row, for the code of one instruction set (isa/rounding_isa.c). */
struct colibri_round_target {
    void *values;
    float *scales;
    float *sums;
    int16_t *sums16;
    int32_t *sums32;
};

struct colibri_vector_code {
    /* Rounds n values (whole groups) to target. */
    void (*round)(int32_t rounding, const float *x, int32_t n,
                  const struct colibri_round_target *target);
    /* h[i] = silu(gate[i]) * up[i]; h may be either. */
    void (*swiglu)(const float *gate, const float *up, float *h, int32_t n);
};

const struct colibri_vector_code *colibri_vector_code_base(void);
#if defined(COLIBRI_X86)
const struct colibri_vector_code *colibri_vector_code_avx2(void);
const struct colibri_vector_code *colibri_vector_code_avx512(void);
#endif
#if defined(COLIBRI_ARM)
const struct colibri_vector_code *colibri_vector_code_neon(void);
const struct colibri_vector_code *colibri_vector_code_dotprod(void);
#endif

/* The code of the best set in `isas`. */
const struct colibri_vector_code *colibri_vector_code(uint32_t isas);

#endif
