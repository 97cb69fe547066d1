#include <errno.h>
#include <stddef.h>

#include "colibri_repack.h"
#include "halves.h"
#include "kernels.h"

#ifndef COLIBRI_BUILD_ID
#error "COLIBRI_BUILD_ID is not given: build through setup.py"
#endif

struct codec {
    int32_t type;
    int16_t elements, bytes; /* of a quant block */
    int16_t halves[2];       /* where its float16 scales are; -1: none */
};

static const struct codec codecs[] = {
    {COLIBRI_F32, 1, 4, {-1, -1}},      {COLIBRI_F16, 1, 2, {-1, -1}},
    {COLIBRI_BF16, 1, 2, {-1, -1}},     {COLIBRI_Q4_0, 32, 18, {0, -1}},
    {COLIBRI_Q4_1, 32, 20, {0, 2}},     {COLIBRI_Q5_0, 32, 22, {0, -1}},
    {COLIBRI_Q5_1, 32, 24, {0, 2}},     {COLIBRI_Q8_0, 32, 34, {0, -1}},
    {COLIBRI_MXFP4, 32, 17, {-1, -1}},  {COLIBRI_Q2_K, 256, 84, {80, 82}},
    {COLIBRI_Q3_K, 256, 110, {108, -1}}, {COLIBRI_Q4_K, 256, 144, {0, 2}},
    {COLIBRI_Q5_K, 256, 176, {0, 2}},   {COLIBRI_Q6_K, 256, 210, {208, -1}},
};

static const struct codec *find_codec(int32_t type) {
    for (size_t i = 0; i < sizeof codecs / sizeof codecs[0]; ++i)
        if (codecs[i].type == type) return codecs + i;
    return NULL;
}

static colibri_encoder *find_encoder(uint32_t isa) {
    if (!(isa & colibri_repack_isas())) return NULL;
    switch (isa) {
    case COLIBRI_ISA_BASE: return colibri_encode_base;
#if defined(__x86_64__)
    case COLIBRI_ISA_AVX2: return colibri_encode_avx2;
    case COLIBRI_ISA_AVX512: return colibri_encode_avx512;
#endif
    default: return NULL;
    }
}

/* The index of the first element that is NaN or infinite, n when there is none. */
static int first_not_finite(const float *x, int n) {
    uint32_t worst = 0;
    for (int i = 0; i < n; ++i) {
        const uint32_t size = float_bits(x[i]) & 0x7fffffffu;
        worst = size > worst ? size : worst;
    }
    if (worst < 0x7f800000u) return n;
    int i = 0;
    while ((float_bits(x[i]) & 0x7f800000u) != 0x7f800000u) ++i;
    return i;
}

static int is_beyond_half(uint16_t half) { return (half & 0x7c00) == 0x7c00; }

/* As encode, for float types; returns the index of the first element beyond the type, else n. */
static int encode_floats(int32_t type, const float *x, int n, uint8_t *out) {
    int bad = n;
    if (type == COLIBRI_F32) {
        memcpy(out, x, (size_t)n * 4);
    } else if (type == COLIBRI_F16) {
        for (int i = n - 1; i >= 0; --i) {
            const uint16_t half = to_half(x[i]);
            store_half(out + 2 * i, half);
            if (is_beyond_half(half)) bad = i;
        }
    } else {
        for (int i = n - 1; i >= 0; --i) {
            const uint16_t half = to_bfloat(x[i]);
            store_half(out + 2 * i, half);
            if ((half & 0x7f80) == 0x7f80) bad = i;
        }
    }
    return bad;
}

/* No type with float16 scales holds 2.8e8. From about 1e13 on the searches' sums overflow, and a
 * group whose scale is NaN would pass for one of zeros. */
#define FAR_TOO_LARGE 1e12f

/* The first element of the first quant block that x does not fit into, n when all do. */
static int first_beyond(const struct codec *codec, const float *x, const uint8_t *out, int n) {
    if (codec->halves[0] < 0) return n;
    for (int i = 0; i < n; i += codec->elements, out += codec->bytes) {
        int is_beyond = 0;
        for (int k = 0; k < 2; ++k)
            is_beyond |= codec->halves[k] >= 0 && is_beyond_half(load_half(out + codec->halves[k]));
        for (int k = 0; k < codec->elements; ++k)
            is_beyond |= x[i + k] > FAR_TOO_LARGE || x[i + k] < -FAR_TOO_LARGE;
        if (is_beyond) return i;
    }
    return n;
}

int32_t colibri_repack_convert(const uint8_t *src, int32_t src_type, uint8_t *dst, int32_t dst_type,
                               int64_t n, int64_t columns, const float *weights, uint32_t isa,
                               int64_t *bad) {
    const struct codec *from = find_codec(src_type), *to = find_codec(dst_type);
    if (!from || !to) return -ENOTSUP;
    colibri_encoder *encode = find_encoder(isa);
    if (!encode || n < 0 || n % from->elements || n % to->elements) return -EINVAL;
    if (weights && (columns <= 0 || n % columns || columns % from->elements ||
                    columns % to->elements))
        return -EINVAL;
    const int64_t row = weights ? columns : n;
    const int needs_sigma = weights && to->elements == 32;
    _Alignas(64) float x[PANEL];
    for (int64_t start = 0; start < n; start += row) {
        float sigma2 = 0;
        for (int pass = !needs_sigma; pass < 2; ++pass) {
            for (int64_t at = 0; at < row; at += PANEL) {
                const int size = (int)(row - at < PANEL ? row - at : PANEL);
                const int64_t first = start + at;
                colibri_decode(src_type, src + first / from->elements * from->bytes, size, x);
                int good = first_not_finite(x, size);
                if (good < size) {
                    *bad = first + good;
                    return -EDOM;
                }
                if (pass == 0) {
                    for (int i = 0; i < size; ++i) sigma2 += x[i] * x[i];
                    continue;
                }
                uint8_t *out = dst + first / to->elements * to->bytes;
                if (to->elements == 1) {
                    good = encode_floats(dst_type, x, size, out);
                } else {
                    encode(dst_type, x, weights ? weights + at : NULL, sigma2, size, out);
                    good = first_beyond(to, x, out, size);
                }
                if (good < size) {
                    *bad = first + good;
                    return -ERANGE;
                }
            }
            if (pass == 0) sigma2 /= (float)row;
        }
    }
    return 0;
}

int32_t colibri_repack_abi(void) { return COLIBRI_REPACK_ABI; }

const char *colibri_repack_build_id(void) { return COLIBRI_BUILD_ID; }

uint32_t colibri_repack_isas(void) {
    uint32_t isas = COLIBRI_ISA_BASE;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) isas |= COLIBRI_ISA_AVX2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq"))
        isas |= COLIBRI_ISA_AVX512;
#endif
    return isas;
}
