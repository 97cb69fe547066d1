/* Element-wise work on activations. No FMA, so that every instruction set gives the same bits. */
#include "../half.h"
#include "../rounding.h"
#include "kernels_isa.h"

/* Adding 1.5 * 2^23 rounds to the nearest integer, ties to even, and leaves it in the low bits. */
#define ROUNDER 12582912.0f

/* Bits of the largest |x|. As integers, so that a NaN is larger than everything. */
static uint32_t largest_bits(const float *x, int32_t n) {
    uint32_t largest = 0;
    for (int32_t i = 0; i < n; i++) {
        const uint32_t bits = colibri_bits_of_float(x[i]) & 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

/* quantize_row_q8_0 and quantize_row_q8_1 of ggml's arch/x86/quants.c. They differ from ggml's
 * quantize_row_q8_0_ref and q8_1_ref, which multiply with 1 / (largest / 127) in place of
 * 127 / largest and round ties away from zero; this is what ggml computes on x86. */
static void round_q8_0(const float *x, int32_t n, const struct colibri_round_target *target,
                       int with_sums) {
    for (int32_t group = 0; group < n / 32; group++, x += 32) {
        int8_t *values = (int8_t *)target->values + group * 32;
        const float largest = colibri_float_of_bits(largest_bits(x, 32));
        const float scale = largest / 127.0f;
        const float inverse = largest != 0.0f ? 127.0f / largest : 0.0f;
        int32_t sum = 0;
        for (int32_t i = 0; i < 32; i++) {
            const float rounded = x[i] * inverse + ROUNDER;
            const int8_t value = (int8_t)(colibri_bits_of_float(rounded) & 0xff);
            values[i] = value;
            sum += value;
        }
        target->scales[group] = colibri_float_of_half(colibri_half_of_float(scale));
        target->sums32[group] = sum;
        if (with_sums)
            target->sums[group] = colibri_float_of_half(colibri_half_of_float(scale * (float)sum));
    }
}

/* quantize_row_q8_K_ref of ggml-quants.c, which ggml uses on x86 too. */
static void round_q8_k(const float *x, int32_t n, const struct colibri_round_target *target) {
    for (int32_t group = 0; group < n / 256; group++, x += 256) {
        int8_t *values = (int8_t *)target->values + group * 256;
        int16_t *sums = target->sums16 + group * 16;
        const uint32_t largest = largest_bits(x, 256);
        if (largest == 0) {
            memset(values, 0, 256);
            memset(sums, 0, 32);
            target->scales[group] = 0.0f;
            continue;
        }
        int32_t at = 0;
        while ((colibri_bits_of_float(x[at]) & 0x7fffffff) != largest) at++;
        const float inverse = -127.0f / x[at];
        for (int32_t i = 0; i < 256; i++) {
            const float rounded = inverse * x[i] + ROUNDER;
            const int32_t value = (int32_t)(colibri_bits_of_float(rounded) & 0x7fffff) - 0x400000;
            values[i] = (int8_t)((value < 127 ? value : 127) & 0xff);
        }
        for (int32_t part = 0; part < 16; part++) {
            int32_t sum = 0;
            for (int32_t i = 0; i < 16; i++) sum += values[part * 16 + i];
            sums[part] = (int16_t)sum;
        }
        target->scales[group] = 1.0f / inverse;
    }
}

static void round_values(int32_t rounding, const float *x, int32_t n,
                         const struct colibri_round_target *target) {
    uint16_t *halves = target->values;
    switch (rounding) {
    case COLIBRI_ROUND_NONE:
        memcpy(target->values, x, (size_t)n * 4);
        break;
    case COLIBRI_ROUND_F16:
        for (int32_t i = 0; i < n; i++) halves[i] = colibri_half_of_float(x[i]);
        break;
    case COLIBRI_ROUND_BF16:
        for (int32_t i = 0; i < n; i++) halves[i] = colibri_bfloat_of_float(x[i]);
        break;
    case COLIBRI_ROUND_Q8_0:
        round_q8_0(x, n, target, 0);
        break;
    case COLIBRI_ROUND_Q8_1:
        round_q8_0(x, n, target, 1);
        break;
    case COLIBRI_ROUND_Q8_K:
        round_q8_k(x, n, target);
        break;
    }
}

/* exp(x) for x in [-88, 88], clamped; 2^k times the Taylor series of the rest, |rest| <= ln(2) / 2,
 * whose first missing term is below 6e-9. ln(2) is split as in Cody and Waite 1980. */
static inline float exp_of(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -88.0f ? -88.0f : x;
    const float shifted = x * 1.44269504f + ROUNDER;
    const float k = shifted - ROUNDER;
    const float rest = (x - k * 0.693359375f) + k * 2.12194440e-4f;
    float sum = 1.0f / 5040.0f;
    sum = sum * rest + 1.0f / 720.0f;
    sum = sum * rest + 1.0f / 120.0f;
    sum = sum * rest + 1.0f / 24.0f;
    sum = sum * rest + 1.0f / 6.0f;
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1.0f;
    sum = sum * rest + 1.0f;
    return sum * colibri_float_of_bits((colibri_bits_of_float(shifted) << 23) + 0x3f800000u);
}

static void swiglu(const float *gate, const float *up, float *h, int32_t n) {
    for (int32_t i = 0; i < n; i++) h[i] = gate[i] / (1.0f + exp_of(-gate[i])) * up[i];
}

const struct colibri_vector_code *COLIBRI_ISA(colibri_vector_code)(void) {
    static const struct colibri_vector_code code = {round_values, swiglu};
    return &code;
}
