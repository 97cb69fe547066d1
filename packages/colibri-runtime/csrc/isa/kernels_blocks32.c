/* Products with weights in quant blocks of 32, and with floats. */
#include "../kernels.h"
#include "kernels_isa.h"

const struct colibri_kernel *COLIBRI_ISA(colibri_kernels_blocks32)(int32_t *n) {
    *n = 0;
    return 0;
}
