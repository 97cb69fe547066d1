/* float16 and bfloat16 (IEEE 754-2008 binary16; Intel, BFLOAT16 numerics definition, 2018). */
#ifndef COLIBRI_HALVES_H
#define COLIBRI_HALVES_H

#include <stdint.h>
#include <string.h>

static inline uint32_t float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float bits_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Exact. Scaling by 2^112 rebases the exponent and normalises subnormals in one step. */
static inline float from_half(uint16_t half) {
    const uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13;
    uint32_t bits = float_bits(bits_float(magnitude) * 0x1p112f);
    bits |= magnitude >= 0x0f800000u ? 0x7f800000u : 0u;
    return bits_float(bits | (uint32_t)(half & 0x8000) << 16);
}

/* To nearest, ties to even; beyond 65520 infinity; NaN stays NaN. */
static inline uint16_t to_half(float value) {
    const uint32_t bits = float_bits(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t sign = bits >> 16 & 0x8000u;
    if (magnitude >= 0x7f800000u)
        return (uint16_t)(sign | 0x7c00u | (magnitude > 0x7f800000u ? 0x200u : 0u));
    if (magnitude >= 0x477ff000u) /* 65520 */
        return (uint16_t)(sign | 0x7c00u);
    if (magnitude < 0x38800000u) /* below 2^-14: the unit is 2^-24, which 0.5's last bit is */
        return (uint16_t)(sign | (float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u));
    const uint32_t odd = magnitude >> 13 & 1u;
    return (uint16_t)(sign | (magnitude + 0xfffu + odd - 0x38000000u) >> 13);
}

static inline float from_bfloat(uint16_t half) { return bits_float((uint32_t)half << 16); }

/* To nearest, ties to even; of a finite value, infinity when it is beyond the type. */
static inline uint16_t to_bfloat(float value) {
    const uint32_t bits = float_bits(value);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the formats are little-endian, and so must be the machine"
#endif

static inline uint16_t load_half(const uint8_t *at) {
    uint16_t half;
    memcpy(&half, at, sizeof half);
    return half;
}

static inline void store_half(uint8_t *at, uint16_t half) { memcpy(at, &half, sizeof half); }

#endif
