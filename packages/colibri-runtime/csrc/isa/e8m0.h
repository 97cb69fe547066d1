/* Scales of MXFP4: E8M0 of OCP Microscaling Formats 1.0. */
#ifndef COLIBRI_E8M0_H
#define COLIBRI_E8M0_H

#include "../half.h"

/* Half of 2^(e - 127), as the values are doubled; e 0 and 1 give subnormal numbers. ggml gives
 * e = 255, a NaN in E8M0, the value 2^127; so is this. */
static inline float half_of_e8m0(uint8_t e) {
    return colibri_float_of_bits(e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23);
}

#endif
