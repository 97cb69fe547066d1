#include <errno.h>
#include <stddef.h>
#include <string.h>

#include "colibri_repack.h"

/* Units of one width that follow each other in a quant block. */
struct run {
    int32_t width, count, start;
};

#define MAX_RUNS 4
#define ROWS COLIBRI_INTERLEAVE

/* In a plain matrix unit i of row r stands at plain + row_bytes * r + width * i; interleaved at
 * packed + width * (ROWS * i + r). The width is a constant at every call, so that each memcpy is
 * one load and one store. */
static inline void spread(const uint8_t *plain, ptrdiff_t row_bytes, uint8_t *packed, int32_t count,
                          size_t width) {
    for (int32_t i = 0; i < count; ++i, plain += width, packed += ROWS * width)
        for (int r = 0; r < ROWS; ++r)
            memcpy(packed + width * (size_t)r, plain + r * row_bytes, width);
}

static inline void gather(const uint8_t *packed, uint8_t *plain, ptrdiff_t row_bytes, int32_t count,
                          size_t width) {
    for (int32_t i = 0; i < count; ++i, plain += width, packed += ROWS * width)
        for (int r = 0; r < ROWS; ++r)
            memcpy(plain + r * row_bytes, packed + width * (size_t)r, width);
}

#if defined(__GNUC__)
/* 4 units of 4 rows at a time: a transpose of 4 x 4 words, registers of any processor. */
typedef uint32_t words __attribute__((vector_size(16)));

static inline words load(const uint8_t *from) {
    words x;
    memcpy(&x, from, sizeof x);
    return x;
}

static inline void turn(const uint8_t *from, ptrdiff_t from_step, uint8_t *to, ptrdiff_t to_step) {
    const words a = load(from), b = load(from + from_step);
    const words c = load(from + 2 * from_step), d = load(from + 3 * from_step);
    const words ac_low = {a[0], c[0], a[1], c[1]}, ac_high = {a[2], c[2], a[3], c[3]};
    const words bd_low = {b[0], d[0], b[1], d[1]}, bd_high = {b[2], d[2], b[3], d[3]};
    const words out[4] = {
        {ac_low[0], bd_low[0], ac_low[1], bd_low[1]},
        {ac_low[2], bd_low[2], ac_low[3], bd_low[3]},
        {ac_high[0], bd_high[0], ac_high[1], bd_high[1]},
        {ac_high[2], bd_high[2], ac_high[3], bd_high[3]},
    };
    for (int k = 0; k < 4; ++k) memcpy(to + k * to_step, &out[k], sizeof out[k]);
}

static void spread_words(const uint8_t *plain, ptrdiff_t row_bytes, uint8_t *packed,
                         int32_t count) {
    int32_t i = 0;
    for (; i + 4 <= count; i += 4, plain += 16, packed += 4 * 4 * ROWS)
        for (int r = 0; r < ROWS; r += 4)
            turn(plain + r * row_bytes, row_bytes, packed + 4 * r, 4 * ROWS);
    spread(plain, row_bytes, packed, count - i, 4);
}

static void gather_words(const uint8_t *packed, uint8_t *plain, ptrdiff_t row_bytes,
                         int32_t count) {
    int32_t i = 0;
    for (; i + 4 <= count; i += 4, plain += 16, packed += 4 * 4 * ROWS)
        for (int r = 0; r < ROWS; r += 4)
            turn(packed + 4 * r, 4 * ROWS, plain + r * row_bytes, row_bytes);
    gather(packed, plain, row_bytes, count - i, 4);
}
#else
#define spread_words(plain, row_bytes, packed, count) spread(plain, row_bytes, packed, count, 4)
#define gather_words(packed, plain, row_bytes, count) gather(packed, plain, row_bytes, count, 4)
#endif

static void spread_block(const uint8_t *plain, ptrdiff_t row_bytes, uint8_t *packed,
                         const struct run *runs, int n_runs) {
    for (int k = 0; k < n_runs; ++k) {
        const uint8_t *from = plain + runs[k].start;
        uint8_t *to = packed + ROWS * runs[k].start;
        if (runs[k].width == 4) spread_words(from, row_bytes, to, runs[k].count);
        else if (runs[k].width == 2) spread(from, row_bytes, to, runs[k].count, 2);
        else spread(from, row_bytes, to, runs[k].count, 1);
    }
}

static void gather_block(const uint8_t *packed, uint8_t *plain, ptrdiff_t row_bytes,
                         const struct run *runs, int n_runs) {
    for (int k = 0; k < n_runs; ++k) {
        const uint8_t *from = packed + ROWS * runs[k].start;
        uint8_t *to = plain + runs[k].start;
        if (runs[k].width == 4) gather_words(from, to, row_bytes, runs[k].count);
        else if (runs[k].width == 2) gather(from, to, row_bytes, runs[k].count, 2);
        else gather(from, to, row_bytes, runs[k].count, 1);
    }
}

int32_t colibri_repack_interleave(const uint8_t *src, uint8_t *dst, int64_t n_groups,
                                  int64_t n_blocks, const uint8_t *units, int32_t n_units,
                                  int32_t is_back) {
    struct run runs[MAX_RUNS];
    int n_runs = 0;
    int32_t bytes = 0;
    if (n_groups < 0 || n_blocks <= 0 || n_units <= 0) return -EINVAL;
    for (int32_t i = 0; i < n_units; ++i) {
        if (units[i] != 1 && units[i] != 2 && units[i] != 4) return -EINVAL;
        if (n_runs && runs[n_runs - 1].width == units[i]) {
            ++runs[n_runs - 1].count;
        } else {
            if (n_runs == MAX_RUNS) return -EINVAL;
            runs[n_runs++] = (struct run){units[i], 1, bytes};
        }
        bytes += units[i];
    }
    const int64_t row_bytes = n_blocks * bytes, group_bytes = ROWS * row_bytes;
    for (int64_t group = 0; group < n_groups; ++group, src += group_bytes, dst += group_bytes) {
        for (int64_t block = 0; block < n_blocks; ++block) {
            const int64_t plain = block * bytes, packed = block * ROWS * bytes;
            if (is_back) gather_block(src + packed, dst + plain, row_bytes, runs, n_runs);
            else spread_block(src + plain, row_bytes, dst + packed, runs, n_runs);
        }
    }
    return 0;
}
