/* The operations of ops.h in sixteen lanes. */
#include "../ops.h"

#include <math.h>

#include "kernels_isa.h"
#include "lanes.h"

#define INLINE static inline __attribute__((always_inline))

static float dot(const float *x, const float *y, int64_t n) {
    lanes sum = lanes_all(0), other = lanes_all(0);
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        sum = lanes_fma(lanes_load(x + i), lanes_load(y + i), sum);
        other = lanes_fma(lanes_load(x + i + 16), lanes_load(y + i + 16), other);
    }
    for (; i + 16 <= n; i += 16)
        sum = lanes_fma(lanes_load(x + i), lanes_load(y + i), sum);
    if (i < n)
        sum = lanes_fma(lanes_load_part(x + i, n - i), lanes_load_part(y + i, n - i), sum);
    return lanes_sum(lanes_add(sum, other));
}

static void rms_norm(const float *x, const float *weight, int64_t n, float eps, float *out) {
    float factor = 1.0f / sqrtf(dot(x, x, n) / (float)n + eps);
    for (int64_t i = 0; i < n; i++)
        out[i] = x[i] * factor * weight[i];
}

static void add(float *x, const float *y, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        x[i] += y[i];
}

static void combine(float *restrict x, const float *restrict outputs,
                    const float *restrict weights, int32_t n_ranks, const float *restrict shared,
                    float factor, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        lanes sum = lanes_all(0);
        for (int32_t r = 0; r < n_ranks; r++) {
            lanes weight = lanes_all(weights ? weights[r] : 1);
            sum = lanes_fma(weight, lanes_load(outputs + r * n + i), sum);
        }
        if (shared)
            sum = lanes_fma(lanes_all(factor), lanes_load(shared + i), sum);
        lanes_store(x + i, lanes_add(lanes_load(x + i), sum));
    }
    for (; i < n; i++) {
        float sum = 0;
        for (int32_t r = 0; r < n_ranks; r++)
            sum += (weights ? weights[r] : 1) * outputs[r * n + i];
        if (shared)
            sum += factor * shared[i];
        x[i] += sum;
    }
}

static void softmax(float *x, int64_t n) {
    float greatest = x[0], sum = 0;
    for (int64_t i = 1; i < n; i++)
        greatest = x[i] > greatest ? x[i] : greatest;
    for (int64_t i = 0; i < n; i += 16) {
        int64_t part = n - i < 16 ? n - i : 16;
        lanes power = lanes_exp(lanes_sub(lanes_load_part(x + i, part), lanes_all(greatest)));
        lanes_store_part(x + i, part, power);
    }
    for (int64_t i = 0; i < n; i++)
        sum += x[i];
    for (int64_t i = 0; i < n; i++)
        x[i] /= sum;
}

static void to_half(const float *x, uint16_t *out, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        lanes_store_half(out + i, lanes_load(x + i));
    for (; i < n; i++)
        out[i] = colibri_half_of_float(x[i]);
}

static void turn(const struct colibri_heads *how, float *head, const float *cosines,
                 const float *sines) {
    int32_t n = how->n_dims / 2;
    if (how->is_interleaved) {
        for (int32_t i = 0; i < n; i++) {
            float first = head[2 * i], second = head[2 * i + 1];
            head[2 * i] = first * cosines[i] - second * sines[i];
            head[2 * i + 1] = second * cosines[i] + first * sines[i];
        }
        return;
    }
    float *restrict firsts = head, *restrict seconds = head + n;
    for (int32_t i = 0; i < n; i++) {
        float first = firsts[i], second = seconds[i];
        firsts[i] = first * cosines[i] - second * sines[i];
        seconds[i] = second * cosines[i] + first * sines[i];
    }
}

static void prepare(const struct colibri_heads *how, float *heads, int32_t n_heads,
                    const float *weight, const float *cosines, const float *sines) {
    int64_t n = (int64_t)n_heads * how->head_dim;
    if (weight)
        for (int64_t i = 0; i < n; i += how->norm_size)
            rms_norm(heads + i, weight, how->norm_size, how->eps, heads + i);
    if (how->clip > 0)
        for (int64_t i = 0; i < n; i++) {
            /* Written so that NaN stays NaN. */
            float low = heads[i] < -how->clip ? -how->clip : heads[i];
            heads[i] = low > how->clip ? how->clip : low;
        }
    if (cosines)
        for (int64_t i = 0; i < n; i += how->head_dim)
            turn(how, heads + i, cosines, sines);
}

/* Positions whose scores are held at once. Their bounds are multiples of this number, whatever
 * the query, so that a query's sums run alike in every batch. */
enum { SPAN = 64 };

/* Sixteens of mixtures that are held at once, of one query at most 4; results are the same for
 * any number. */
#if defined(__AVX2__)
enum { MOST_MIXED = 8 };
#else
enum { MOST_MIXED = 4 };
#endif

/* Queries that read the same keys and values, at most 4, and what is known of them so far. */
struct rows {
    float queries[4][COLIBRI_MAX_HEAD_DIM]; /* over sqrt(head_dim), zero behind head_dim */
    float mixed[4][COLIBRI_MAX_HEAD_DIM];
    float shares[4][SPAN];
    float greatest[4];
    lanes sums[4];
    int64_t from[4], to[4]; /* first position seen, and the one behind the last */
};

INLINE lanes load_row(const void *row, int64_t at, int is_f16, int64_t n) {
    if (is_f16) {
        const uint16_t *x = (const uint16_t *)row + at;
        return n < 16 ? lanes_load_half_part(x, n) : lanes_load_half(x);
    }
    const float *x = (const float *)row + at;
    return n < 16 ? lanes_load_part(x, n) : lanes_load(x);
}

/* shares[r][j] = queries[r] . keys[j] */
INLINE void score(struct rows *rows, const uint8_t *keys, int64_t n_keys, int64_t head_dim,
                  int is_f16, const int n_rows) {
    const int64_t stride = head_dim * (is_f16 ? 2 : 4), whole = head_dim / 16 * 16;
    for (int64_t j = 0; j < n_keys; j++) {
        const uint8_t *key = keys + j * stride;
        lanes sums[4];
#pragma GCC unroll 4
        for (int r = 0; r < n_rows; r++)
            sums[r] = lanes_all(0);
        for (int64_t at = 0; at < whole; at += 16) {
            lanes k = load_row(key, at, is_f16, 16);
#pragma GCC unroll 4
            for (int r = 0; r < n_rows; r++)
                sums[r] = lanes_fma(lanes_load(rows->queries[r] + at), k, sums[r]);
        }
        if (whole < head_dim) {
            lanes k = load_row(key, whole, is_f16, head_dim - whole);
#pragma GCC unroll 4
            for (int r = 0; r < n_rows; r++)
                sums[r] = lanes_fma(lanes_load(rows->queries[r] + whole), k, sums[r]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < n_rows; r++)
            rows->shares[r][j] = lanes_sum(sums[r]);
    }
}

/* Scores of positions [first, first + SPAN) to unnormalised shares, against the greatest score
 * met so far; sums and mixtures are scaled to it (Milakov & Gimelshein 2018, arXiv 1805.02867). */
INLINE void share(struct rows *rows, int r, int64_t first, int64_t head_dim) {
    float *shares = rows->shares[r];
    int64_t from = rows->from[r] > first ? rows->from[r] - first : 0;
    int64_t to = rows->to[r] - first < SPAN ? rows->to[r] - first : SPAN;
    if (from >= to) {
        memset(shares, 0, sizeof rows->shares[r]);
        return;
    }
    for (int64_t j = 0; j < from; j++)
        shares[j] = -INFINITY;
    for (int64_t j = to; j < SPAN; j++)
        shares[j] = -INFINITY;
    lanes most = lanes_max(lanes_max(lanes_load(shares), lanes_load(shares + 16)),
                           lanes_max(lanes_load(shares + 32), lanes_load(shares + 48)));
    float greatest = lanes_greatest(most);
    if (greatest > rows->greatest[r]) {
        float at[16];
        lanes_store(at, lanes_exp(lanes_all(rows->greatest[r] - greatest)));
        lanes factor = lanes_all(at[0]);
        rows->sums[r] = lanes_mul(rows->sums[r], factor);
        for (int64_t i = 0; i < head_dim; i += 16) {
            float *mixed = rows->mixed[r] + i;
            lanes_store(mixed, lanes_mul(lanes_load(mixed), factor));
        }
        rows->greatest[r] = greatest;
    }
    lanes least = lanes_all(rows->greatest[r]);
    for (int64_t j = 0; j < SPAN; j += 16)
        lanes_store(shares + j, lanes_exp(lanes_sub(lanes_load(shares + j), least)));
    for (int64_t j = 0; j < from; j++)
        shares[j] = 0;
    for (int64_t j = to; j < SPAN; j++)
        shares[j] = 0;
    for (int64_t j = 0; j < SPAN; j += 16)
        rows->sums[r] = lanes_add(rows->sums[r], lanes_load(shares + j));
}

/* mixed[r][at + 16 c + i] += sum over j of shares[r][j] * values[j][...], c < n_chunks. */
INLINE void mix_chunks(struct rows *rows, const uint8_t *values, int64_t n_values, int64_t stride,
                       int64_t at, int64_t n_last, int is_f16, const int n_rows,
                       const int n_chunks) {
    lanes mixed[4][4];
#pragma GCC unroll 4
    for (int r = 0; r < n_rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < n_chunks; c++)
            mixed[r][c] = lanes_load(rows->mixed[r] + at + 16 * c);
    for (int64_t j = 0; j < n_values; j++) {
#pragma GCC unroll 4
        for (int c = 0; c < n_chunks; c++) {
            lanes v = load_row(values + j * stride, at + 16 * c, is_f16, n_last);
#pragma GCC unroll 4
            for (int r = 0; r < n_rows; r++)
                mixed[r][c] = lanes_fma(lanes_all(rows->shares[r][j]), v, mixed[r][c]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < n_rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < n_chunks; c++)
            lanes_store(rows->mixed[r] + at + 16 * c, mixed[r][c]);
}

INLINE void mix(struct rows *rows, const uint8_t *values, int64_t n_values, int64_t head_dim,
                int is_f16, const int n_rows) {
    const int64_t stride = head_dim * (is_f16 ? 2 : 4);
    const int n_chunks = MOST_MIXED / n_rows < 4 ? MOST_MIXED / n_rows : 4;
    int64_t at = 0;
    for (; at + 16 * n_chunks <= head_dim; at += 16 * n_chunks)
        mix_chunks(rows, values, n_values, stride, at, 16, is_f16, n_rows, n_chunks);
    for (; at + 16 <= head_dim; at += 16)
        mix_chunks(rows, values, n_values, stride, at, 16, is_f16, n_rows, 1);
    if (at < head_dim)
        mix_chunks(rows, values, n_values, stride, at, head_dim - at, is_f16, n_rows, 1);
}

/* Rows [row, row + n_rows) of those that read kv_head: token by token, its heads in order. */
INLINE void attend_rows(const struct colibri_attention *what, int32_t kv_head, int64_t row,
                        int is_f16, const int n_rows) {
    const int64_t head_dim = what->head_dim, n_group = what->n_heads / what->n_kv_heads;
    const int64_t item = is_f16 ? 2 : 4;
    const float factor = 1.0f / sqrtf((float)head_dim);
    struct rows rows;
    float *out[4];
    int64_t from = INT64_MAX, to = 0;
    for (int r = 0; r < n_rows; r++) {
        int64_t token = (row + r) / n_group, head = kv_head * n_group + (row + r) % n_group;
        int64_t place = (token * what->n_heads + head) * head_dim;
        for (int64_t i = 0; i < head_dim; i++)
            rows.queries[r][i] = what->queries[place + i] * factor;
        for (int64_t i = head_dim; i % 16; i++)
            rows.queries[r][i] = 0;
        memset(rows.mixed[r], 0, (size_t)(head_dim + 15) / 16 * 16 * sizeof(float));
        out[r] = what->out + place;
        rows.greatest[r] = -INFINITY;
        rows.sums[r] = lanes_all(0);
        rows.to[r] = what->first + token + 1;
        rows.from[r] = what->window && rows.to[r] > what->window ? rows.to[r] - what->window : 0;
        from = rows.from[r] < from ? rows.from[r] : from;
        to = rows.to[r] > to ? rows.to[r] : to;
    }
    for (int64_t first = from / SPAN * SPAN; first < to; first += SPAN) {
        int64_t n = to - first < SPAN ? to - first : SPAN;
        int64_t place = (kv_head * what->capacity + first) * head_dim * item;
        score(&rows, (const uint8_t *)what->keys + place, n, head_dim, is_f16, n_rows);
        for (int r = 0; r < n_rows; r++)
            share(&rows, r, first, head_dim);
        mix(&rows, (const uint8_t *)what->values + place, n, head_dim, is_f16, n_rows);
    }
    for (int r = 0; r < n_rows; r++) {
        float sum = lanes_sum(rows.sums[r]);
        for (int64_t i = 0; i < head_dim; i++)
            out[r][i] = rows.mixed[r][i] / sum;
    }
}

INLINE void attend_as(const struct colibri_attention *what, int32_t kv_head, int64_t row,
                      int64_t n_rows, int is_f16) {
    int64_t end = row + n_rows;
    /* Several rows at once, as far as registers hold them: plain C has none. */
#if defined(__AVX2__)
    for (; row + 4 <= end; row += 4)
        attend_rows(what, kv_head, row, is_f16, 4);
#endif
#if defined(__AVX2__) || defined(COLIBRI_NEON)
    for (; row + 2 <= end; row += 2)
        attend_rows(what, kv_head, row, is_f16, 2);
#endif
    for (; row < end; row++)
        attend_rows(what, kv_head, row, is_f16, 1);
}

static void attend(const struct colibri_attention *what, int32_t kv_head, int64_t row,
                   int64_t n_rows) {
    if (what->is_f16)
        attend_as(what, kv_head, row, n_rows, 1);
    else
        attend_as(what, kv_head, row, n_rows, 0);
}

const struct colibri_ops *COLIBRI_ISA(colibri_ops)(void) {
    static const struct colibri_ops ops = {
        .rms_norm = rms_norm,
        .add = add,
        .combine = combine,
        .softmax = softmax,
        .dot = dot,
        .to_half = to_half,
        .prepare = prepare,
        .attend = attend,
    };
    return &ops;
}
