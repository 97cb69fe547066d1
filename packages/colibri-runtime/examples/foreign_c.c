// A kernel as another engine may bring it: one expert, Q8_0, out of a leased block.

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { ELEMENTS = 32, BYTES = 34 };

static float half_to_float(uint16_t half)
{
    int exponent = half >> 10 & 31;
    float mantissa = (float)(half & 1023);
    float value = exponent ? ldexpf(mantissa + 1024, exponent - 25) : ldexpf(mantissa, -24);
    return half & 0x8000 ? -value : value;
}

// Row `row` of a Q8_0 matrix with `columns` columns, times x.
static float dot(const uint8_t *matrix, int64_t row, int64_t columns, const float *x)
{
    const uint8_t *block = matrix + row * (columns / ELEMENTS) * BYTES;
    float sum = 0;
    for (int64_t i = 0; i < columns; i += ELEMENTS, block += BYTES) {
        uint16_t scale;
        float part = 0;
        memcpy(&scale, block, sizeof scale);
        for (int j = 0; j < ELEMENTS; j++)
            part += (float)(int8_t)block[2 + j] * x[i + j];
        sum += part * half_to_float(scale);
    }
    return sum;
}

// Adds share * down(silu(gate(x)) * up(x)) to out.
//   block                       the first byte of the block, valid until the lease ends
//   gate, up, down              offsets of the segments in it
//   x, out                      `hidden` floats; h: `width` floats of scratch
void expert_q8_0(const uint8_t *block, int64_t gate, int64_t up, int64_t down, int64_t hidden,
                 int64_t width, float share, const float *x, float *h, float *out)
{
    for (int64_t i = 0; i < width; i++) {
        float g = dot(block + gate, i, hidden, x);
        h[i] = g / (1 + expf(-g)) * dot(block + up, i, hidden, x);
    }
    for (int64_t i = 0; i < hidden; i++)
        out[i] += share * dot(block + down, i, width, h);
}
