/* Facts of the library; what it does is declared beside each part: disk_*.h, kernels.h, ... */
#ifndef COLIBRI_RUNTIME_H
#define COLIBRI_RUNTIME_H

#include <stdint.h>

/* Raised whenever a signature or a struct that _native.py passes changes. */
#define COLIBRI_RUNTIME_ABI 1

#if defined(_WIN32)
#define COLIBRI_EXPORT __declspec(dllexport)
#else
#define COLIBRI_EXPORT __attribute__((visibility("default")))
#endif

/* Instruction sets, as bits. AVX512 means F, BW, DQ, VL and VNNI; DOTPROD is NEON with SDOT. */
enum colibri_isa {
    COLIBRI_ISA_BASE = 1,
    COLIBRI_ISA_AVX2 = 2,
    COLIBRI_ISA_AVX512 = 4,
    COLIBRI_ISA_NEON = 8,
    COLIBRI_ISA_DOTPROD = 16
};

COLIBRI_EXPORT int32_t colibri_runtime_abi(void);

/* Hash of the sources this library was built from; a static string. */
COLIBRI_EXPORT const char *colibri_runtime_build_id(void);

/* What is compiled in and runs on this processor and under this system, as bits of colibri_isa. */
COLIBRI_EXPORT uint32_t colibri_runtime_isas(void);

#endif
