#include "colibri_runtime.h"

#if defined(COLIBRI_ARM) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(COLIBRI_ARM) && defined(__linux__)
#include <sys/auxv.h>
#endif

int32_t colibri_runtime_abi(void) { return COLIBRI_RUNTIME_ABI; }

const char *colibri_runtime_build_id(void) { return COLIBRI_BUILD_ID; }

#if defined(COLIBRI_ARM)
/* Whether there is FEAT_DotProd. User code cannot read the register that says so everywhere. */
static int has_dotprod(void) {
#if defined(__ARM_FEATURE_DOTPROD)
    return 1; /* the compiler was told so for all of the library, as it is by default on macOS */
#elif defined(__APPLE__)
    int32_t has = 0;
    size_t size = sizeof has;
    return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, NULL, 0) == 0 && has;
#elif defined(__linux__)
    return (getauxval(AT_HWCAP) >> 20 & 1) != 0; /* HWCAP_ASIMDDP, which old headers lack */
#else
    return 0;
#endif
}
#endif

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
#if defined(COLIBRI_ARM)
    isas |= COLIBRI_ISA_NEON;
    if (has_dotprod()) isas |= COLIBRI_ISA_DOTPROD;
#endif
    return isas;
}
