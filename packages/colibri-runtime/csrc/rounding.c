#include "rounding.h"

#include <errno.h>
#include <string.h>

#define MOST ((int64_t)1 << 30)

static int64_t align64(int64_t size) { return (size + 63) / 64 * 64; }

int32_t colibri_rounding_group(int32_t rounding) {
    switch (rounding) {
    case COLIBRI_ROUND_NONE:
    case COLIBRI_ROUND_F16:
    case COLIBRI_ROUND_BF16:
        return 1;
    case COLIBRI_ROUND_Q8_0:
    case COLIBRI_ROUND_Q8_1:
        return 32;
    case COLIBRI_ROUND_Q8_K:
        return 256;
    default:
        return 0;
    }
}

static int64_t value_bytes(int32_t rounding) {
    if (rounding == COLIBRI_ROUND_NONE) return 4;
    return rounding == COLIBRI_ROUND_F16 || rounding == COLIBRI_ROUND_BF16 ? 2 : 1;
}

/* Bytes of a row of each array, in the order in which they lie: values, scales, sums, sums16,
 * sums32; 0 for those that `rounding` has not. */
static void row_bytes(int32_t rounding, int64_t columns, int64_t bytes[5]) {
    const int64_t groups = columns / colibri_rounding_group(rounding);
    const int is_q8_0 = rounding == COLIBRI_ROUND_Q8_0, is_q8_1 = rounding == COLIBRI_ROUND_Q8_1;
    const int is_q8_k = rounding == COLIBRI_ROUND_Q8_K;
    bytes[0] = columns * value_bytes(rounding);
    bytes[1] = is_q8_0 || is_q8_1 || is_q8_k ? groups * 4 : 0;
    bytes[2] = is_q8_1 ? groups * 4 : 0;
    bytes[3] = is_q8_k ? columns / 16 * 2 : 0;
    bytes[4] = is_q8_0 || is_q8_1 ? groups * 4 : 0;
}

int64_t colibri_acts_bytes(int32_t rounding, int64_t n_tokens, int64_t columns) {
    const int32_t group = colibri_rounding_group(rounding);
    if (group == 0 || columns < 1 || columns > MOST || columns % group != 0 || n_tokens < 0 ||
        n_tokens > MOST)
        return -EINVAL;
    int64_t bytes[5], size = 0;
    row_bytes(rounding, columns, bytes);
    for (int array = 0; array < 5; array++) size += align64(bytes[array] * n_tokens);
    return size;
}

void colibri_acts_place(struct colibri_acts *acts, int32_t rounding, int64_t n_tokens,
                        int64_t columns, void *memory) {
    int64_t bytes[5];
    void *arrays[5];
    char *next = memory;
    row_bytes(rounding, columns, bytes);
    for (int array = 0; array < 5; array++) {
        arrays[array] = bytes[array] > 0 ? next : NULL;
        next += align64(bytes[array] * n_tokens);
    }
    acts->rounding = rounding;
    acts->n_tokens = (int32_t)n_tokens;
    acts->columns = (int32_t)columns;
    acts->values = arrays[0];
    acts->scales = arrays[1];
    acts->sums = arrays[2];
    acts->sums16 = arrays[3];
    acts->sums32 = arrays[4];
}

/* The arrays from column `first` of row `token` on. The memory is the caller's to write, and const
 * only for kernels. */
static struct colibri_round_target target_of(const struct colibri_acts *acts, int64_t token,
                                             int64_t first) {
    const int64_t group = colibri_rounding_group(acts->rounding);
    const int64_t value = token * acts->columns + first;
    struct colibri_round_target target = {0};
    target.values = (char *)acts->values + value * value_bytes(acts->rounding);
    if (acts->scales != NULL) target.scales = (float *)acts->scales + value / group;
    if (acts->sums != NULL) target.sums = (float *)acts->sums + value / group;
    if (acts->sums16 != NULL) target.sums16 = (int16_t *)acts->sums16 + value / 16;
    if (acts->sums32 != NULL) target.sums32 = (int32_t *)acts->sums32 + value / group;
    return target;
}

void colibri_acts_round(uint32_t isas, const struct colibri_acts *acts, int32_t token,
                        int32_t first, int32_t n, const float *x) {
    const struct colibri_round_target target = target_of(acts, token, first);
    colibri_vector_code(isas)->round(acts->rounding, x, n, &target);
}

int32_t colibri_round_row(uint32_t isas, int32_t rounding, const float *x, int32_t n, void *values,
                          float *scales, float *sums, int16_t *sums16, int32_t *sums32) {
    if (colibri_acts_bytes(rounding, 1, n) < 0) return -EINVAL;
    const struct colibri_round_target target = {values, scales, sums, sums16, sums32};
    colibri_vector_code(isas)->round(rounding, x, n, &target);
    return 0;
}

void colibri_acts_copy_row(const struct colibri_acts *to_acts, int32_t to,
                           const struct colibri_acts *from_acts, int32_t from) {
    int64_t bytes[5];
    row_bytes(to_acts->rounding, to_acts->columns, bytes);
    const struct colibri_round_target out = target_of(to_acts, to, 0);
    const struct colibri_round_target in = target_of(from_acts, from, 0);
    memcpy(out.values, in.values, (size_t)bytes[0]);
    if (bytes[1] > 0) memcpy(out.scales, in.scales, (size_t)bytes[1]);
    if (bytes[2] > 0) memcpy(out.sums, in.sums, (size_t)bytes[2]);
    if (bytes[3] > 0) memcpy(out.sums16, in.sums16, (size_t)bytes[3]);
    if (bytes[4] > 0) memcpy(out.sums32, in.sums32, (size_t)bytes[4]);
}

const struct colibri_vector_code *colibri_vector_code(uint32_t isas) {
#if defined(COLIBRI_X86)
    if (isas & COLIBRI_ISA_AVX512) return colibri_vector_code_avx512();
    if (isas & COLIBRI_ISA_AVX2) return colibri_vector_code_avx2();
#endif
#if defined(COLIBRI_ARM)
    if (isas & COLIBRI_ISA_DOTPROD) return colibri_vector_code_dotprod();
    if (isas & COLIBRI_ISA_NEON) return colibri_vector_code_neon();
#endif
    (void)isas;
    return colibri_vector_code_base();
}
