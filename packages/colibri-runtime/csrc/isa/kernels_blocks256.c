/* Products with weights in quant blocks of 256. */
#include "blocks256.h"

#if defined(__AVX512VNNI__)
#include "blocks256_avx512_rows.h"
#include "blocks256_avx512_x16.h"
#elif defined(__AVX2__)
#include "blocks256_avx2_rows.h"
#include "blocks256_avx2_x16.h"
#elif defined(COLIBRI_NEON)
#include "blocks256_neon.h"
#else
#include "blocks256_scalar.h"
#endif

#define KERNELS(type, name)                                                                        \
    {type, 0, COLIBRI_ROUND_Q8_K, 256, type##_BYTES, dot_##name},                                  \
        {type, COLIBRI_ROWS, COLIBRI_ROUND_Q8_K, 256, type##_BYTES, dot_##name##_x16}

static const struct colibri_kernel KERNELS256[] = {
    KERNELS(COLIBRI_Q2_K, q2_k), KERNELS(COLIBRI_Q3_K, q3_k), KERNELS(COLIBRI_Q4_K, q4_k),
    KERNELS(COLIBRI_Q5_K, q5_k), KERNELS(COLIBRI_Q6_K, q6_k),
};

const struct colibri_kernel *COLIBRI_ISA(colibri_kernels_blocks256)(int32_t *n) {
    *n = (int32_t)(sizeof KERNELS256 / sizeof *KERNELS256);
    return KERNELS256;
}
