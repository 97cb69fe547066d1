/* Products with weights in quant blocks of 32, and with floats. */
#include "../kernels.h"
#if defined(__AVX512VNNI__)
#include "blocks32_avx512.h"
#include "blocks32_avx512_plain.h"
#elif defined(__AVX2__)
#include "blocks32_avx2.h"
#elif defined(COLIBRI_NEON)
#include "blocks32_neon.h"
#else
#include "blocks32_scalar.h"
#endif
#include "kernels_isa.h"

#define FLOATS(type, rounding, bytes, dot) {type, 0, rounding, 1, bytes, dot}
#define BLOCKS(type, interleave, rounding, bytes, dot) {type, interleave, rounding, 32, bytes, dot}

#if defined(__AVX512VNNI__)
#define FLOAT_DOT(type) avx512_##type
#define PLAIN_DOT(type) avx512_##type
#define X16_DOT(type) avx512_##type##_x16
#elif defined(__AVX2__)
#define FLOAT_DOT(type) avx2_##type
#define PLAIN_DOT(type) avx2_##type
#define X16_DOT(type) avx2_##type##_x16
#elif defined(COLIBRI_NEON)
#define FLOAT_DOT(type) neon_##type
#define PLAIN_DOT(type) neon_##type
#define X16_DOT(type) neon_##type##_x16
#else
#define FLOAT_DOT(type) scalar_##type
#define PLAIN_DOT(type) scalar_##type
#define X16_DOT(type) scalar_##type##_x16
#endif

const struct colibri_kernel *COLIBRI_ISA(colibri_kernels_blocks32)(int32_t *n) {
    static const struct colibri_kernel kernels[] = {
        FLOATS(COLIBRI_F32, COLIBRI_ROUND_NONE, 4, FLOAT_DOT(f32)),
        FLOATS(COLIBRI_F16, COLIBRI_ROUND_F16, 2, FLOAT_DOT(f16)),
        FLOATS(COLIBRI_BF16, COLIBRI_ROUND_BF16, 2, FLOAT_DOT(bf16)),
        BLOCKS(COLIBRI_Q8_0, 0, COLIBRI_ROUND_Q8_0, 34, PLAIN_DOT(q8_0)),
        BLOCKS(COLIBRI_Q4_0, 0, COLIBRI_ROUND_Q8_0, 18, PLAIN_DOT(q4_0)),
        BLOCKS(COLIBRI_Q4_1, 0, COLIBRI_ROUND_Q8_1, 20, PLAIN_DOT(q4_1)),
        BLOCKS(COLIBRI_Q5_0, 0, COLIBRI_ROUND_Q8_0, 22, PLAIN_DOT(q5_0)),
        BLOCKS(COLIBRI_Q5_1, 0, COLIBRI_ROUND_Q8_1, 24, PLAIN_DOT(q5_1)),
        BLOCKS(COLIBRI_MXFP4, 0, COLIBRI_ROUND_Q8_0, 17, PLAIN_DOT(mxfp4)),
        BLOCKS(COLIBRI_Q8_0, 16, COLIBRI_ROUND_Q8_0, 34, X16_DOT(q8_0)),
        BLOCKS(COLIBRI_Q4_0, 16, COLIBRI_ROUND_Q8_0, 18, X16_DOT(q4_0)),
        BLOCKS(COLIBRI_Q4_1, 16, COLIBRI_ROUND_Q8_1, 20, X16_DOT(q4_1)),
        BLOCKS(COLIBRI_Q5_0, 16, COLIBRI_ROUND_Q8_0, 22, X16_DOT(q5_0)),
        BLOCKS(COLIBRI_Q5_1, 16, COLIBRI_ROUND_Q8_1, 24, X16_DOT(q5_1)),
        BLOCKS(COLIBRI_MXFP4, 16, COLIBRI_ROUND_Q8_0, 17, X16_DOT(mxfp4)),
    };
    *n = sizeof(kernels) / sizeof(kernels[0]);
    return kernels;
}
