/* What the AVX-512 kernels for 16 interleaved rows of quant blocks of 256 share. */
#ifndef COLIBRI_BLOCKS256_AVX512_X16_PARTS_H
#define COLIBRI_BLOCKS256_AVX512_X16_PARTS_H

#include <immintrin.h>
#include <string.h>

#include "blocks256.h"
#include "x16_streams.h"

/* How far ahead of its use a line is asked for: blocks, where several groups of rows are read at
 * once, and bytes, into the second cache, where it is one. */
#define X16_AHEAD 2
#define X16_ALONE 8192

/* In a register: where a compiler sees two uses it would read memory twice. */
COLIBRI_INLINE __m512i load16(const uint8_t *p) {
    __m512i bytes = _mm512_loadu_si512(p);
    __asm__("" : "+v"(bytes));
    return bytes;
}

COLIBRI_INLINE void ask16(const uint8_t *p, int64_t ahead, const int m) {
    const void *line = (const void *)((uintptr_t)p + (uintptr_t)ahead);
    if (m == 1)
        __builtin_prefetch(line, 0, 2);
    else
        __builtin_prefetch(line, 0, 3);
}

/* load16, and asks for the line `ahead` bytes on; m groups of rows are read. */
COLIBRI_INLINE __m512i load16_ahead(const uint8_t *p, int64_t ahead, const int m) {
    ask16(p, ahead, m);
    return load16(p);
}

COLIBRI_INLINE __m512 load16_halves(const uint8_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

/* The 4 bytes at p in every lane. */
COLIBRI_INLINE __m512i spread(const void *p) {
    int32_t bytes;
    memcpy(&bytes, p, 4);
    return _mm512_set1_epi32(bytes);
}

/* sum += products of the 4 weights of each lane with the 4 activations at x, and of 2 with 2 sums.
 * The broadcast is part of the instruction: as one of its own, which compilers make of
 * _mm512_set1_epi32, it costs a third of the speed. */
COLIBRI_INLINE void add_products(__m512i *sum, __m512i weights, const int8_t *x) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0"
            : "+v"(*sum)
            : "v"(weights), "m"(*(const int8_t(*)[4])x));
}

COLIBRI_INLINE void add_pairs(__m512i *sum, __m512i weights, const int16_t *sums16) {
    __asm__("vpdpwssd %2%{1to16%}, %1, %0"
            : "+v"(*sum)
            : "v"(weights), "m"(*(const int16_t(*)[2])sums16));
}

/* Bytes a to d of every lane; 128 gives zero. */
COLIBRI_INLINE __m512i pick(__m512i lanes, const int a, const int b, const int c, const int d) {
    uint32_t bytes = (uint32_t)(a | b << 8 | c << 16) | (uint32_t)d << 24;
    uint32_t step = 0x04040404 & ~(bytes >> 5); /* to the next lane; none from 128 */
    __m128i index = _mm_setr_epi32((int)bytes, (int)(bytes + step), (int)(bytes + 2 * step),
                                   (int)(bytes + 3 * step));
    return _mm512_shuffle_epi8(lanes, _mm512_broadcast_i32x4(index));
}

/* Byte k of every lane, an unsigned number. */
COLIBRI_INLINE __m512i pick_byte(__m512i lanes, int k) { return pick(lanes, k, 128, 128, 128); }

/* (a & mask) | b */
COLIBRI_INLINE __m512i masked_or(__m512i a, __m512i mask, __m512i b) {
    return _mm512_ternarylogic_epi32(b, a, mask, 0xf8);
}

/* The bits of 16-bit numbers moved left, or right by -n. */
COLIBRI_INLINE __m512i move_left(__m512i a, const int n) {
    return n > 0   ? _mm512_slli_epi16(a, (unsigned)n)
           : n < 0 ? _mm512_srli_epi16(a, (unsigned)-n)
                   : a;
}

COLIBRI_INLINE void add_scaled(__m512 *sum, __m512 scale, __m512i products) {
    *sum = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(products), *sum);
}

/* -zero * sum for each 16 activations: products with q begin there, to be those with q - zero. */
COLIBRI_INLINE void zero_sums(const int16_t *sums16, int log2_zero, int32_t *starts) {
    __m512i sums = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)sums16));
    sums = _mm512_slli_epi32(sums, (unsigned)log2_zero);
    _mm512_store_si512(starts, _mm512_sub_epi32(_mm512_setzero_si512(), sums));
}

/* Sums of token t and group s stand at s * n + t. */
COLIBRI_INLINE void store16(const __m512 *total, const int n, const int m, float *out,
                            int64_t out_stride) {
    for (int s = 0; s < m; s++)
        for (int t = 0; t < n; t++)
            _mm512_storeu_ps(out + t * out_stride + COLIBRI_ROWS * s, total[s * n + t]);
}

#endif
