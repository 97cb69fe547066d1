#include "ops.h"

#include "colibri_runtime.h"

const struct colibri_ops *colibri_ops_of(uint32_t isas) {
#if defined(COLIBRI_X86)
    if (isas & COLIBRI_ISA_AVX512)
        return colibri_ops_avx512();
    if (isas & COLIBRI_ISA_AVX2)
        return colibri_ops_avx2();
#endif
#if defined(COLIBRI_ARM)
    if (isas & COLIBRI_ISA_DOTPROD)
        return colibri_ops_dotprod();
    if (isas & COLIBRI_ISA_NEON)
        return colibri_ops_neon();
#endif
    (void)isas;
    return colibri_ops_base();
}
