/* LANES floats side by side, each doing on its own what scalar code would: same operations, same
 * order, so the same bits whatever the width. Compiled once for each instruction set. */
#ifndef COLIBRI_LANES_H
#define COLIBRI_LANES_H

#include <stdint.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
#elif defined(__AVX2__)
#include <immintrin.h>
#define LANES 8
#else
#define LANES 4
#endif

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t ilanes __attribute__((vector_size(4 * LANES)));

static inline lanes splat(float value) {
    lanes all;
    for (int k = 0; k < LANES; ++k) all[k] = value;
    return all;
}

static inline ilanes isplat(int32_t value) {
    ilanes all;
    for (int k = 0; k < LANES; ++k) all[k] = value;
    return all;
}

/* mask: all bits or none, as a comparison gives. */
static inline lanes pick(ilanes mask, lanes yes, lanes no) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    return (lanes)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)mask);
#else
    return (lanes)(((ilanes)yes & mask) | ((ilanes)no & ~mask));
#endif
}

static inline ilanes iclamp(ilanes value, int32_t low, int32_t high) {
#if defined(__AVX512F__)
    const __m512i raised = _mm512_max_epi32((__m512i)value, _mm512_set1_epi32(low));
    return (ilanes)_mm512_min_epi32(raised, _mm512_set1_epi32(high));
#elif defined(__AVX2__)
    const __m256i raised = _mm256_max_epi32((__m256i)value, _mm256_set1_epi32(low));
    return (ilanes)_mm256_min_epi32(raised, _mm256_set1_epi32(high));
#else
    const ilanes lows = isplat(low), highs = isplat(high);
    const ilanes below = value < lows;
    value = (value & ~below) | (lows & below);
    const ilanes above = value > highs;
    return (value & ~above) | (highs & above);
#endif
}

static inline ilanes imax(ilanes a, ilanes b) {
#if defined(__AVX512F__)
    return (ilanes)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (ilanes)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    const ilanes is_larger = a > b;
    return (a & is_larger) | (b & ~is_larger);
#endif
}

static inline lanes magnitude(lanes value) { return (lanes)((ilanes)value & 0x7fffffff); }

static inline lanes to_float(ilanes value) { return __builtin_convertvector(value, lanes); }

static inline lanes root(lanes value) {
    lanes result;
    for (int k = 0; k < LANES; ++k) result[k] = __builtin_sqrtf(value[k]);
    return result;
}

/* The nearest integer, ties to even, from the mantissa of value + 3 * 2^22, as ggml takes it:
 * right up to 2^22, and beyond (or for NaN) the same arbitrary number as ggml's. */
static inline ilanes nearest(lanes value) {
    const lanes shifted = value + splat(12582912.0f);
    return ((ilanes)shifted & 0x007fffff) - 0x00400000;
}

static inline int32_t nearest_one(float value) {
    const float shifted = value + 12582912.0f;
    int32_t bits;
    __builtin_memcpy(&bits, &shifted, sizeof bits);
    return (bits & 0x007fffff) - 0x00400000;
}

static inline int32_t clamp_one(int32_t value, int32_t low, int32_t high) {
    return value < low ? low : value > high ? high : value;
}

#endif
