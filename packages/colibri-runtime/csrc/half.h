/* Half floats (IEEE binary16) and bfloat16, to float32 and back; the same bits on every machine. */
#ifndef COLIBRI_HALF_H
#define COLIBRI_HALF_H

#include <stdint.h>
#include <string.h>

#if defined(__F16C__)
#include <immintrin.h>
#endif

static inline float colibri_float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t colibri_bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline uint16_t colibri_load_u16(const void *p) {
    uint16_t value;
    memcpy(&value, p, 2);
    return value;
}

/* Exact; a signalling NaN becomes quiet. */
static inline float colibri_float_of_half(uint16_t half) {
#if defined(__F16C__)
    return _cvtsh_ss(half);
#elif defined(COLIBRI_NEON)
    __fp16 value;
    memcpy(&value, &half, 2);
    return (float)value;
#else
    /* 2^112 moves the exponent's bias from 15 to 127, and makes a subnormal a normal number. */
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    const float scaled = colibri_float_of_bits((uint32_t)(half & 0x7fff) << 13) * 0x1p112f;
    uint32_t bits = colibri_bits_of_float(scaled);
    if (scaled >= 65536.0f) bits |= 0x7f800000;
    if ((half & 0x7fff) > 0x7c00) bits |= 0x00400000;
    return colibri_float_of_bits(sign | bits);
#endif
}

/* To nearest, ties to even; too large becomes infinite. */
static inline uint16_t colibri_half_of_float(float value) {
#if defined(__F16C__)
    return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
#elif defined(COLIBRI_NEON)
    const __fp16 rounded = (__fp16)value;
    uint16_t half;
    memcpy(&half, &rounded, 2);
    return half;
#else
    const uint32_t bits = colibri_bits_of_float(value);
    const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (size >> 13 & 0x3ff));
    if (size >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (size < 0x38800000) {
        /* Subnormal: adding 0.5 leaves, in the lowest bits, the value in units of 2^-24. */
        const float sum = colibri_float_of_bits(size) + 0.5f;
        return (uint16_t)(sign | (colibri_bits_of_float(sum) - 0x3f000000));
    }
    return (uint16_t)(sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
#endif
}

static inline float colibri_float_of_bfloat(uint16_t value) {
    return colibri_float_of_bits((uint32_t)value << 16);
}

/* To nearest, ties to even; a NaN stays one. */
static inline uint16_t colibri_bfloat_of_float(float value) {
    const uint32_t bits = colibri_bits_of_float(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#endif
