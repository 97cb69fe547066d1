/* One entry point for each instruction set; what colibri_repack_convert is made of. */
#ifndef COLIBRI_KERNELS_H
#define COLIBRI_KERNELS_H

#include <stdint.h>

#define PANEL 512 /* most elements encoded in one call: two quant blocks of 256 */

/* x: (n) float, all finite; n: whole quant blocks, at most PANEL. w: NULL or (n), the importances
 * of the same columns; sigma2: then, for types of 32 elements, the mean square of the whole row.
 * Writes the n elements' quant blocks to out. */
typedef void colibri_encoder(int32_t type, const float *x, const float *w, float sigma2, int n,
                             uint8_t *out);

colibri_encoder colibri_encode_base;
#if defined(__x86_64__)
colibri_encoder colibri_encode_avx2;
colibri_encoder colibri_encode_avx512;
#endif

/* src: n / block quant blocks of `type`; x: (n) out. */
void colibri_decode(int32_t type, const uint8_t *src, int64_t n, float *x);

#endif
