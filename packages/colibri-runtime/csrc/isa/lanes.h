/* Sixteen floats at once, in one register, in two, in four, or one by one. */
#ifndef COLIBRI_LANES_H
#define COLIBRI_LANES_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(COLIBRI_NEON)
#include <arm_neon.h>
#endif

#include "../half.h"

#if defined(__AVX512F__)

typedef __m512 lanes;

static inline lanes lanes_all(float x) { return _mm512_set1_ps(x); }
static inline lanes lanes_load(const float *x) { return _mm512_loadu_ps(x); }
static inline lanes lanes_load_half(const uint16_t *x) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x));
}
static inline void lanes_store(float *x, lanes a) { _mm512_storeu_ps(x, a); }
static inline void lanes_store_half(uint16_t *x, lanes a) {
    _mm256_storeu_si256((__m256i *)x, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
static inline lanes lanes_add(lanes a, lanes b) { return _mm512_add_ps(a, b); }
static inline lanes lanes_sub(lanes a, lanes b) { return _mm512_sub_ps(a, b); }
static inline lanes lanes_mul(lanes a, lanes b) { return _mm512_mul_ps(a, b); }
static inline lanes lanes_div(lanes a, lanes b) { return _mm512_div_ps(a, b); }
/* a > b ? a : b, so b where either is NaN. */
static inline lanes lanes_max(lanes a, lanes b) { return _mm512_max_ps(a, b); }
static inline lanes lanes_min(lanes a, lanes b) { return _mm512_min_ps(a, b); }
/* a * b + c */
static inline lanes lanes_fma(lanes a, lanes b, lanes c) { return _mm512_fmadd_ps(a, b, c); }
/* 2^n, n the integer that 1.5 * 2^23 + n holds in its low bits; n > -127. */
static inline lanes lanes_power(lanes a) {
    __m512i n = _mm512_slli_epi32(_mm512_castps_si512(a), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(n, _mm512_set1_epi32(127 << 23)));
}
static inline __m256 lanes_fold(lanes a) {
    return _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
}

#elif defined(__AVX2__)

typedef struct {
    __m256 low, high;
} lanes;

static inline lanes lanes_all(float x) {
    return (lanes){_mm256_set1_ps(x), _mm256_set1_ps(x)};
}
static inline lanes lanes_load(const float *x) {
    return (lanes){_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)};
}
static inline lanes lanes_load_half(const uint16_t *x) {
    return (lanes){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x)),
                   _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(x + 8)))};
}
static inline void lanes_store(float *x, lanes a) {
    _mm256_storeu_ps(x, a.low);
    _mm256_storeu_ps(x + 8, a.high);
}
static inline void lanes_store_half(uint16_t *x, lanes a) {
    _mm_storeu_si128((__m128i *)x, _mm256_cvtps_ph(a.low, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i *)(x + 8), _mm256_cvtps_ph(a.high, _MM_FROUND_TO_NEAREST_INT));
}
static inline lanes lanes_add(lanes a, lanes b) {
    return (lanes){_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
static inline lanes lanes_sub(lanes a, lanes b) {
    return (lanes){_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
static inline lanes lanes_mul(lanes a, lanes b) {
    return (lanes){_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
static inline lanes lanes_div(lanes a, lanes b) {
    return (lanes){_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
static inline lanes lanes_max(lanes a, lanes b) {
    return (lanes){_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
static inline lanes lanes_min(lanes a, lanes b) {
    return (lanes){_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
static inline lanes lanes_fma(lanes a, lanes b, lanes c) {
    return (lanes){_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
static inline lanes lanes_power(lanes a) {
    __m256i one = _mm256_set1_epi32(127 << 23);
    __m256i low = _mm256_slli_epi32(_mm256_castps_si256(a.low), 23);
    __m256i high = _mm256_slli_epi32(_mm256_castps_si256(a.high), 23);
    return (lanes){_mm256_castsi256_ps(_mm256_add_epi32(low, one)),
                   _mm256_castsi256_ps(_mm256_add_epi32(high, one))};
}
static inline __m256 lanes_fold(lanes a) { return _mm256_add_ps(a.low, a.high); }

#elif defined(COLIBRI_NEON)

typedef struct {
    float32x4_t at[4];
} lanes;

#define LANES_EACH(expression)                                                                     \
    lanes r;                                                                                       \
    for (int i = 0; i < 4; i++)                                                                    \
        r.at[i] = (expression);                                                                    \
    return r

static inline lanes lanes_all(float x) { LANES_EACH(vdupq_n_f32(x)); }
static inline lanes lanes_load(const float *x) { LANES_EACH(vld1q_f32(x + 4 * i)); }
static inline lanes lanes_load_half(const uint16_t *x) {
    LANES_EACH(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x + 4 * i))));
}
static inline void lanes_store(float *x, lanes a) {
    for (int i = 0; i < 4; i++)
        vst1q_f32(x + 4 * i, a.at[i]);
}
static inline void lanes_store_half(uint16_t *x, lanes a) {
    for (int i = 0; i < 4; i++)
        vst1_u16(x + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.at[i])));
}
static inline lanes lanes_add(lanes a, lanes b) { LANES_EACH(vaddq_f32(a.at[i], b.at[i])); }
static inline lanes lanes_sub(lanes a, lanes b) { LANES_EACH(vsubq_f32(a.at[i], b.at[i])); }
static inline lanes lanes_mul(lanes a, lanes b) { LANES_EACH(vmulq_f32(a.at[i], b.at[i])); }
static inline lanes lanes_div(lanes a, lanes b) { LANES_EACH(vdivq_f32(a.at[i], b.at[i])); }
/* Not FMAX and FMIN, which give NaN where either is. */
static inline lanes lanes_max(lanes a, lanes b) {
    LANES_EACH(vbslq_f32(vcgtq_f32(a.at[i], b.at[i]), a.at[i], b.at[i]));
}
static inline lanes lanes_min(lanes a, lanes b) {
    LANES_EACH(vbslq_f32(vcltq_f32(a.at[i], b.at[i]), a.at[i], b.at[i]));
}
static inline lanes lanes_fma(lanes a, lanes b, lanes c) {
    LANES_EACH(vfmaq_f32(c.at[i], a.at[i], b.at[i]));
}
static inline lanes lanes_power(lanes a) {
    const uint32x4_t one = vdupq_n_u32(127u << 23);
    LANES_EACH(vreinterpretq_f32_u32(
        vaddq_u32(vshlq_n_u32(vreinterpretq_u32_f32(a.at[i]), 23), one)));
}

#else

typedef struct {
    float at[16];
} lanes;

#define LANES_EACH(expression)                                                                     \
    lanes r;                                                                                       \
    for (int i = 0; i < 16; i++)                                                                   \
        r.at[i] = (expression);                                                                    \
    return r

static inline lanes lanes_all(float x) { LANES_EACH(x); }
static inline lanes lanes_load(const float *x) { LANES_EACH(x[i]); }
static inline lanes lanes_load_half(const uint16_t *x) { LANES_EACH(colibri_float_of_half(x[i])); }
static inline void lanes_store(float *x, lanes a) { memcpy(x, a.at, sizeof a.at); }
static inline void lanes_store_half(uint16_t *x, lanes a) {
    for (int i = 0; i < 16; i++)
        x[i] = colibri_half_of_float(a.at[i]);
}
static inline lanes lanes_add(lanes a, lanes b) { LANES_EACH(a.at[i] + b.at[i]); }
static inline lanes lanes_sub(lanes a, lanes b) { LANES_EACH(a.at[i] - b.at[i]); }
static inline lanes lanes_mul(lanes a, lanes b) { LANES_EACH(a.at[i] * b.at[i]); }
static inline lanes lanes_div(lanes a, lanes b) { LANES_EACH(a.at[i] / b.at[i]); }
static inline lanes lanes_max(lanes a, lanes b) {
    LANES_EACH(a.at[i] > b.at[i] ? a.at[i] : b.at[i]);
}
static inline lanes lanes_min(lanes a, lanes b) {
    LANES_EACH(a.at[i] < b.at[i] ? a.at[i] : b.at[i]);
}
static inline lanes lanes_fma(lanes a, lanes b, lanes c) {
    LANES_EACH(a.at[i] * b.at[i] + c.at[i]);
}
static inline lanes lanes_power(lanes a) {
    lanes r;
    for (int i = 0; i < 16; i++) {
        uint32_t bits;
        memcpy(&bits, &a.at[i], 4);
        bits = (bits << 23) + (127u << 23);
        memcpy(&r.at[i], &bits, 4);
    }
    return r;
}

#endif

/* Sums and maxima go lane i with i + 8, then i + 4, i + 2, i + 1, in every instruction set. */
#if defined(__AVX2__)
static inline float lanes_sum(lanes a) {
    __m256 eight = lanes_fold(a);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
#elif defined(COLIBRI_NEON)
static inline float lanes_sum(lanes a) {
    float32x4_t four = vaddq_f32(vaddq_f32(a.at[0], a.at[2]), vaddq_f32(a.at[1], a.at[3]));
    float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
#else
static inline float lanes_sum(lanes a) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++)
            a.at[i] += a.at[i + half];
    return a.at[0];
}
#endif

static inline float lanes_greatest(lanes a) {
    float at[16];
    lanes_store(at, a);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++)
            at[i] = at[i] > at[i + half] ? at[i] : at[i + half];
    return at[0];
}

/* The first n < 16 of x, the rest zero. */
static inline lanes lanes_load_part(const float *x, int64_t n) {
    float at[16] = {0};
    memcpy(at, x, (size_t)n * sizeof *x);
    return lanes_load(at);
}
static inline lanes lanes_load_half_part(const uint16_t *x, int64_t n) {
    uint16_t at[16] = {0};
    memcpy(at, x, (size_t)n * sizeof *x);
    return lanes_load_half(at);
}
static inline void lanes_store_part(float *x, int64_t n, lanes a) {
    float at[16];
    lanes_store(at, a);
    memcpy(x, at, (size_t)n * sizeof *x);
}

/* exp(x) to 2 units in the last place, for x up to 88.3; below -87.3 as for -87.3.
 *
 * exp(x) = 2^n exp(r), n the integer nearest to x / ln 2, so |r| <= ln 2 / 2; adding 1.5 * 2^23
 * leaves n in the low bits. ln 2 is taken off in two parts, the first with 9 zero bits at its
 * end, so that n times it is exact. exp(r) is its Taylor sum to r^7 / 7!, 5e-9 off at most.
 */
static inline lanes lanes_exp(lanes x) {
    x = lanes_max(lanes_all(-87.3f), lanes_min(lanes_all(88.3f), x));
    lanes shifter = lanes_all(0x1.8p23f);
    lanes shifted = lanes_fma(x, lanes_all(0x1.715476p0f), shifter);
    lanes n = lanes_sub(shifted, shifter);
    lanes r = lanes_fma(n, lanes_all(-0x1.62e4p-1f), x);
    r = lanes_fma(n, lanes_all(-0x1.7f7d1cp-20f), r);
    lanes sum = lanes_all(1.0f / 5040);
    sum = lanes_fma(sum, r, lanes_all(1.0f / 720));
    sum = lanes_fma(sum, r, lanes_all(1.0f / 120));
    sum = lanes_fma(sum, r, lanes_all(1.0f / 24));
    sum = lanes_fma(sum, r, lanes_all(1.0f / 6));
    sum = lanes_fma(sum, r, lanes_all(0.5f));
    sum = lanes_fma(sum, r, lanes_all(1.0f));
    sum = lanes_fma(sum, r, lanes_all(1.0f));
    return lanes_mul(sum, lanes_power(shifted));
}

#endif
