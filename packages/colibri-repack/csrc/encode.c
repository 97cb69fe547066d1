/* Compiled once for each instruction set, under another name: see setup.py. */
#include "blocks256.h"
#include "blocks32.h"
#include "kernels.h"

#ifndef COLIBRI_ENCODE
#define COLIBRI_ENCODE colibri_encode_base
#endif

void COLIBRI_ENCODE(int32_t type, const float *x, const float *w, float sigma2, int n,
                    uint8_t *out) {
    switch (type) {
    case COLIBRI_Q2_K: encode_q2_k(x, w, n, out); return;
    case COLIBRI_Q3_K: encode_q3_k(x, w, n, out); return;
    case COLIBRI_Q4_K: encode_q45_k(x, w, n, 0, out); return;
    case COLIBRI_Q5_K: encode_q45_k(x, w, n, 1, out); return;
    case COLIBRI_Q6_K: encode_q6_k(x, w, n, out); return;
    case COLIBRI_Q8_0:
        for (int i = 0; i < n; i += 32, out += 34) encode_q8_0(x + i, out);
        return;
    case COLIBRI_MXFP4:
        for (int i = 0; i < n; i += 32, out += 17) encode_mxfp4(x + i, out);
        return;
    default: break;
    }
    if (w) {
        encode_weighted(type, x, w, sigma2, n, out);
        return;
    }
    const int has_fifth = type == COLIBRI_Q5_0 || type == COLIBRI_Q5_1;
    if (type == COLIBRI_Q4_0 || type == COLIBRI_Q5_0)
        for (int i = 0; i < n; i += 32, out += 18 + 4 * has_fifth)
            encode_symmetric(x + i, has_fifth, out);
    else
        for (int i = 0; i < n; i += 32, out += 20 + 4 * has_fifth)
            encode_range(x + i, has_fifth, out);
}
