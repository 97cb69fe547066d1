/* Quant blocks back to float32, as ggml-quants.c's dequantize_row_* do: layouts from
 * ggml-common.h, d * level and then the offset, each rounded to float32. */
#include "colibri_repack.h"
#include "halves.h"
#include "kernels.h"

static void decode32(int32_t type, const uint8_t *src, float *x) {
    const int is_range = type == COLIBRI_Q4_1 || type == COLIBRI_Q5_1;
    const int has_fifth = type == COLIBRI_Q5_0 || type == COLIBRI_Q5_1;
    const float d = from_half(load_half(src));
    src += 2;
    float min = 0;
    if (is_range) {
        min = from_half(load_half(src));
        src += 2;
    }
    uint32_t fifth = 0;
    if (has_fifth) {
        for (int k = 0; k < 4; ++k) fifth |= (uint32_t)src[k] << 8 * k;
        src += 4;
    }
    for (int i = 0; i < 32; ++i) {
        int l = (i < 16 ? src[i] & 15 : src[i - 16] >> 4) | (int)(fifth >> i & 1) << 4;
        if (is_range)
            x[i] = (float)l * d + min;
        else
            x[i] = (float)(l - (has_fifth ? 16 : 8)) * d;
    }
}

static void decode_mxfp4(const uint8_t *src, float *x) {
    static const int8_t values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const uint32_t e = src[0];
    const float unit = bits_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    for (int i = 0; i < 32; ++i)
        x[i] = (float)values[i < 16 ? src[1 + i] & 15 : src[1 + i - 16] >> 4] * unit;
}

static void decode_q2_k(const uint8_t *src, float *x) {
    const float d = from_half(load_half(src + 80)), dmin = from_half(load_half(src + 82));
    for (int i = 0; i < 256; ++i) {
        const int s = src[i / 16];
        const int l = src[16 + 32 * (i / 128) + i % 32] >> 2 * (i % 128 / 32) & 3;
        x[i] = d * (float)(s & 15) * (float)l - dmin * (float)(s >> 4);
    }
}

static void decode_q3_k(const uint8_t *src, float *x) {
    const float d = from_half(load_half(src + 108));
    const uint8_t *scales = src + 96;
    for (int i = 0; i < 256; ++i) {
        const int j = i / 16;
        const int low = j < 8 ? scales[j] & 15 : scales[j - 8] >> 4;
        const int s = (low | (scales[8 + j % 4] >> 2 * (j / 4) & 3) << 4) - 32;
        const int pair = src[32 + 32 * (i / 128) + i % 32] >> 2 * (i % 128 / 32) & 3;
        const int high = src[i % 32] >> i / 32 & 1;
        x[i] = d * (float)s * (float)(pair - (high ? 0 : 4));
    }
}

static void decode_q45_k(const uint8_t *src, int has_fifth, float *x) {
    const float d = from_half(load_half(src)), dmin = from_half(load_half(src + 2));
    const uint8_t *q = src + 4;
    const uint8_t *fifth = src + 16, *nibbles = src + (has_fifth ? 48 : 16);
    for (int i = 0; i < 256; ++i) {
        const int j = i / 32;
        const int s = j < 4 ? q[j] & 63 : (q[j + 4] & 15) | q[j - 4] >> 6 << 4;
        const int m = j < 4 ? q[j + 4] & 63 : q[j + 4] >> 4 | q[j] >> 6 << 4;
        int l = nibbles[32 * (i / 64) + i % 32] >> (j % 2 ? 4 : 0) & 15;
        if (has_fifth) l += (fifth[i % 32] >> j & 1) << 4;
        x[i] = d * (float)s * (float)l - dmin * (float)m;
    }
}

static void decode_q6_k(const uint8_t *src, float *x) {
    const float d = from_half(load_half(src + 208));
    for (int i = 0; i < 256; ++i) {
        const int side = i / 128, quarter = i % 128 / 32;
        const int low = src[64 * side + 32 * (quarter % 2) + i % 32] >> (quarter < 2 ? 0 : 4) & 15;
        const int high = src[128 + 32 * side + i % 32] >> 2 * quarter & 3;
        x[i] = d * (float)(int8_t)src[192 + i / 16] * (float)((low | high << 4) - 32);
    }
}

void colibri_decode(int32_t type, const uint8_t *src, int64_t n, float *x) {
    switch (type) {
    case COLIBRI_F32: memcpy(x, src, (size_t)n * 4); return;
    case COLIBRI_F16:
        for (int64_t i = 0; i < n; ++i) x[i] = from_half(load_half(src + 2 * i));
        return;
    case COLIBRI_BF16:
        for (int64_t i = 0; i < n; ++i) x[i] = from_bfloat(load_half(src + 2 * i));
        return;
    case COLIBRI_Q8_0:
        for (int64_t i = 0; i < n; ++i)
            x[i] = (float)(int8_t)src[i / 32 * 34 + 2 + i % 32] *
                   from_half(load_half(src + i / 32 * 34));
        return;
    case COLIBRI_MXFP4:
        for (int64_t i = 0; i < n; i += 32) decode_mxfp4(src + i / 32 * 17, x + i);
        return;
    case COLIBRI_Q2_K:
        for (int64_t i = 0; i < n; i += 256) decode_q2_k(src + i / 256 * 84, x + i);
        return;
    case COLIBRI_Q3_K:
        for (int64_t i = 0; i < n; i += 256) decode_q3_k(src + i / 256 * 110, x + i);
        return;
    case COLIBRI_Q4_K:
        for (int64_t i = 0; i < n; i += 256) decode_q45_k(src + i / 256 * 144, 0, x + i);
        return;
    case COLIBRI_Q5_K:
        for (int64_t i = 0; i < n; i += 256) decode_q45_k(src + i / 256 * 176, 1, x + i);
        return;
    case COLIBRI_Q6_K:
        for (int64_t i = 0; i < n; i += 256) decode_q6_k(src + i / 256 * 210, x + i);
        return;
    default: break;
    }
    const int range = type == COLIBRI_Q4_1 || type == COLIBRI_Q5_1 ? 2 : 0;
    const int fifth = type == COLIBRI_Q5_0 || type == COLIBRI_Q5_1 ? 4 : 0;
    for (int64_t i = 0; i < n; i += 32) decode32(type, src + i / 32 * (18 + range + fifth), x + i);
}
