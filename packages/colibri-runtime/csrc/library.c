#include "colibri_runtime.h"

int32_t colibri_runtime_abi(void) { return COLIBRI_RUNTIME_ABI; }

const char *colibri_runtime_build_id(void) { return COLIBRI_BUILD_ID; }

uint32_t colibri_runtime_isas(void) {
    uint32_t isas = COLIBRI_ISA_BASE;
#if defined(COLIBRI_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c")) {
        isas |= COLIBRI_ISA_AVX2;
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("avx512vnni"))
            isas |= COLIBRI_ISA_AVX512;
    }
#endif
    return isas;
}
