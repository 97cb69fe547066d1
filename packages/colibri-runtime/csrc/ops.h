/* What a decoder layer does beside its products: norms, rotation, attention, gates, sums.
 *
 * One table of these an instruction set. Sums run in sixteen lanes in every one of them, so that
 * AVX2, AVX-512 and NEON give the same bits (the base path differs by its unfused multiply-adds). A
 * row of a result depends on its own inputs alone: not on other rows, on threads or on addresses.
 * Pointers need no alignment beyond that of their type, unless it says so.
 */
#ifndef COLIBRI_OPS_H
#define COLIBRI_OPS_H

#include <stdint.h>

/* Widest head that `attend` takes. */
#define COLIBRI_MAX_HEAD_DIM 512

/* Keys and values of one layer, and the queries that read them. */
struct colibri_attention {
    int32_t n_heads;
    int32_t n_kv_heads;  /* divides n_heads: head h reads key/value head h / (n_heads/n_kv_heads) */
    int32_t head_dim;    /* at most COLIBRI_MAX_HEAD_DIM */
    int32_t is_f16;      /* whether keys and values are half floats, not float */
    int64_t capacity;    /* positions that keys and values have room for */
    int64_t window;      /* last positions that a query sees, itself included; 0: all */
    int64_t first;       /* position of query row 0 */
    const void *keys;    /* (n_kv_heads, capacity, head_dim) */
    const void *values;  /* as keys */
    const float *queries; /* (n_tokens, n_heads, head_dim) */
    float *out;          /* (n_tokens, n_heads, head_dim) */
};

/* Steps between the projections and attention, for one position. */
struct colibri_heads {
    int32_t head_dim;
    int32_t n_dims;         /* leading elements of a head that are turned */
    int32_t is_interleaved; /* pairs 2i, 2i + 1; else i, i + n_dims / 2 */
    int32_t norm_size;      /* elements that a norm runs over: a head, or all heads; 0: no norm */
    float eps;
    float clip;             /* bound on absolute values; 0: none */
};

struct colibri_ops {
    /* out[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i], i < n (arXiv 1910.07467); out may be x. */
    void (*rms_norm)(const float *x, const float *weight, int64_t n, float eps, float *out);

    /* x[i] += y[i]. */
    void (*add)(float *x, const float *y, int64_t n);

    /* x[i] += the sum over r < n_ranks of weights[r] * outputs[r * n + i], in order of r (weights
     * null: all one), plus factor * shared[i] (shared null: not). */
    void (*combine)(float *x, const float *outputs, const float *weights, int32_t n_ranks,
                    const float *shared, float factor, int64_t n);

    /* x = softmax(x), n >= 1. */
    void (*softmax)(float *x, int64_t n);

    /* Sum of x[i] * y[i]. */
    float (*dot)(const float *x, const float *y, int64_t n);

    /* out[i] = x[i] as a half float, to nearest, ties to even. */
    void (*to_half)(const float *x, uint16_t *out, int64_t n);

    /* Norms with `weight` (norm_size; null: not), clips, and turns by cosines and sines, each
     * (n_dims / 2) (null: not), `heads` (n_heads, head_dim) of one position, in place. */
    void (*prepare)(const struct colibri_heads *how, float *heads, int32_t n_heads,
                    const float *weight, const float *cosines, const float *sines);

    /* Means of values weighted by softmax(q . k / sqrt(head_dim)), for rows [row, row + n_rows) of
     * the queries that read key/value head `kv_head`: with g = n_heads / n_kv_heads, row r is head
     * kv_head * g + r % g of token r / g. Keys and values up to the last of these tokens'
     * positions must be there. */
    void (*attend)(const struct colibri_attention *what, int32_t kv_head, int64_t row,
                   int64_t n_rows);
};

const struct colibri_ops *colibri_ops_base(void);
#if defined(COLIBRI_X86)
const struct colibri_ops *colibri_ops_avx2(void);
const struct colibri_ops *colibri_ops_avx512(void);
#endif
#if defined(COLIBRI_ARM)
const struct colibri_ops *colibri_ops_neon(void);
const struct colibri_ops *colibri_ops_dotprod(void);
#endif

/* The table of the best instruction set in `isas`, bits of colibri_isa that run here. */
const struct colibri_ops *colibri_ops_of(uint32_t isas);

#endif
