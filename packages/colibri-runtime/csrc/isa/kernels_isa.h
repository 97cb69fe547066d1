/* For sources in csrc/isa/, which are compiled once for each instruction set. */
#ifndef COLIBRI_KERNELS_ISA_H
#define COLIBRI_KERNELS_ISA_H

/* setup.py defines COLIBRI_ISA_NAME as base, avx2, avx512, neon or dotprod, and COLIBRI_NEON for the
 * last two (compilers for aarch64 always have NEON). COLIBRI_ISA(f) is f_base and so on. */
#define COLIBRI_JOIN_(name, isa) name##_##isa
#define COLIBRI_JOIN(name, isa) COLIBRI_JOIN_(name, isa)
#define COLIBRI_ISA(name) COLIBRI_JOIN(name, COLIBRI_ISA_NAME)

#endif
