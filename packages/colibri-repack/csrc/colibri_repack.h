/* Conversion of weights between ggml's encodings: the interface that _native.py loads.
 *
 * No function allocates, keeps state or touches errno; any thread may call any of them at any
 * time on memory of its own. Types are ggml's numbers (enum ggml_type in ggml.h).
 */
#ifndef COLIBRI_REPACK_H
#define COLIBRI_REPACK_H

#include <stdint.h>

#define COLIBRI_REPACK_ABI 1

enum colibri_type {
    COLIBRI_F32 = 0,
    COLIBRI_F16 = 1,
    COLIBRI_Q4_0 = 2,
    COLIBRI_Q4_1 = 3,
    COLIBRI_Q5_0 = 6,
    COLIBRI_Q5_1 = 7,
    COLIBRI_Q8_0 = 8,
    COLIBRI_Q2_K = 10,
    COLIBRI_Q3_K = 11,
    COLIBRI_Q4_K = 12,
    COLIBRI_Q5_K = 13,
    COLIBRI_Q6_K = 14,
    COLIBRI_BF16 = 30,
    COLIBRI_MXFP4 = 39
};

/* Kernels, as bits; every one gives the same bytes. */
enum colibri_isa { COLIBRI_ISA_BASE = 1, COLIBRI_ISA_AVX2 = 2, COLIBRI_ISA_AVX512 = 4 };

#if defined(_WIN32)
#define COLIBRI_EXPORT __declspec(dllexport)
#else
#define COLIBRI_EXPORT __attribute__((visibility("default")))
#endif

COLIBRI_EXPORT int32_t colibri_repack_abi(void);

/* Hash of the sources this library was built from; a static string. */
COLIBRI_EXPORT const char *colibri_repack_build_id(void);

/* The kernels that are compiled in and that this processor runs, as bits of colibri_isa. */
COLIBRI_EXPORT uint32_t colibri_repack_isas(void);

/* Writes `n` elements of `src`, encoded as `src_type`, to `dst` as `dst_type`.
 *
 * src, dst: any alignment, no overlap. n: whole quant blocks of both types. weights: NULL, or
 * `columns` floats, the importance of each column, every one finite and not negative; n is then
 * whole rows of `columns` elements. isa: one bit of colibri_repack_isas().
 *
 * Returns 0; -EINVAL for sizes or kernels that cannot be; -ENOTSUP for a type without codec;
 * -EDOM when an element is NaN or infinite; -ERANGE when a number does not fit dst_type (a scale
 * beyond float16, an element beyond float16 or bfloat16). After the last two *bad is the index of
 * the element, or of the first one of the quant block, and dst is undefined.
 */
COLIBRI_EXPORT int32_t colibri_repack_convert(const uint8_t *src, int32_t src_type, uint8_t *dst,
                                              int32_t dst_type, int64_t n, int64_t columns,
                                              const float *weights, uint32_t isa, int64_t *bad);

/* Rows whose quant blocks stand interleaved (colibri-1.md, section 9). */
#define COLIBRI_INTERLEAVE 16

/* Writes a matrix of `n_groups` times 16 rows, `n_blocks` quant blocks each, interleaved; or, with
 * `is_back`, an interleaved one plain.
 *
 * src, dst: n_groups * 16 * n_blocks * (sum of units) bytes each, any alignment, no overlap.
 * units: (n_units) widths into which a quant block is cut, each 1, 2 or 4.
 *
 * Returns 0, or -EINVAL for sizes or widths that cannot be.
 */
COLIBRI_EXPORT int32_t colibri_repack_interleave(const uint8_t *src, uint8_t *dst,
                                                 int64_t n_groups, int64_t n_blocks,
                                                 const uint8_t *units, int32_t n_units,
                                                 int32_t is_back);

#endif
