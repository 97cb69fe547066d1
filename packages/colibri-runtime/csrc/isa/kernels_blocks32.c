/* Products with weights in quant blocks of 32, and with floats. */
#include "../kernels.h"
#include "blocks32_scalar.h"
#include "kernels_isa.h"

#define FLOATS(type, rounding, bytes, dot) {type, 0, rounding, 1, bytes, dot}
#define BLOCKS(type, interleave, rounding, bytes, dot) {type, interleave, rounding, 32, bytes, dot}

const struct colibri_kernel *COLIBRI_ISA(colibri_kernels_blocks32)(int32_t *n) {
    static const struct colibri_kernel kernels[] = {
        FLOATS(COLIBRI_F32, COLIBRI_ROUND_NONE, 4, scalar_f32),
        FLOATS(COLIBRI_F16, COLIBRI_ROUND_F16, 2, scalar_f16),
        FLOATS(COLIBRI_BF16, COLIBRI_ROUND_BF16, 2, scalar_bf16),
        BLOCKS(COLIBRI_Q8_0, 0, COLIBRI_ROUND_Q8_0, 34, scalar_q8_0),
        BLOCKS(COLIBRI_Q4_0, 0, COLIBRI_ROUND_Q8_0, 18, scalar_q4_0),
        BLOCKS(COLIBRI_Q4_1, 0, COLIBRI_ROUND_Q8_1, 20, scalar_q4_1),
        BLOCKS(COLIBRI_Q5_0, 0, COLIBRI_ROUND_Q8_0, 22, scalar_q5_0),
        BLOCKS(COLIBRI_Q5_1, 0, COLIBRI_ROUND_Q8_1, 24, scalar_q5_1),
        BLOCKS(COLIBRI_MXFP4, 0, COLIBRI_ROUND_Q8_0, 17, scalar_mxfp4),
        BLOCKS(COLIBRI_Q8_0, 16, COLIBRI_ROUND_Q8_0, 34, scalar_q8_0_x16),
        BLOCKS(COLIBRI_Q4_0, 16, COLIBRI_ROUND_Q8_0, 18, scalar_q4_0_x16),
        BLOCKS(COLIBRI_Q4_1, 16, COLIBRI_ROUND_Q8_1, 20, scalar_q4_1_x16),
        BLOCKS(COLIBRI_Q5_0, 16, COLIBRI_ROUND_Q8_0, 22, scalar_q5_0_x16),
        BLOCKS(COLIBRI_Q5_1, 16, COLIBRI_ROUND_Q8_1, 24, scalar_q5_1_x16),
        BLOCKS(COLIBRI_MXFP4, 16, COLIBRI_ROUND_Q8_0, 17, scalar_mxfp4_x16),
    };
    *n = sizeof(kernels) / sizeof(kernels[0]);
    return kernels;
}
