#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* clock_gettime */
#endif
#include "decode.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <time.h>

enum { ONE = 1 };
static const int64_t DEAF_NS = 50000000;

static int64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static int32_t store_layer(const struct colibri_pass *p, int32_t layer)
{
    return p->first_layer + layer;
}

/* The store's answer; a bad one ends the call. */
static int32_t answered(struct colibri_pass *p, int32_t code)
{
    p->is_store = code < 0;
    return code;
}

/* Chooses the layer's experts, asks for them: how many, or an error. */
static int32_t ask(struct colibri_pass *p, int32_t layer)
{
    const struct colibri_decoder *d = p->decoder;
    struct colibri_store *s = p->store;
    const int32_t is_weighed = p->layers[layer].router.data != NULL;
    const int32_t n = colibri_layer_route(d, &p->layers[layer], ONE);
    int32_t error;

    if (n < 0)
        return n;
    for (int32_t rank = 0; rank < d->top_k; rank++) {
        s->experts[rank] = d->experts[rank];
        s->weights[rank] = d->weights[rank];
    }
    error = answered(p, colibri_store_observe(s, store_layer(p, layer), d->top_k, is_weighed));
    if (error < 0)
        return error;
    /* Ascending, because neighbours in the file read faster. */
    memcpy(s->experts, d->wanted, (size_t)n * sizeof *s->experts);
    return answered(p, colibri_store_fetch(s, store_layer(p, layer), n));
}

/* Has the store read what later layers' routers make of the stream as it is now. */
static int32_t foresee(struct colibri_pass *p, int32_t layer)
{
    const struct colibri_decoder *d = p->decoder;
    int32_t end = layer + 1 + p->look_ahead, error;

    if (end > p->n_layers)
        end = p->n_layers;
    for (int32_t ahead = layer + 1; ahead < end; ahead++) {
        if (!p->has_experts[ahead])
            continue;
        if (p->layers[ahead].router.data) {
            error = colibri_layer_predict(d, &p->layers[ahead], ONE);
            if (error < 0)
                return error;
        } else {
            memset(d->guesses, 0, (size_t)d->top_k * sizeof *d->guesses);
        }
        memcpy(p->store->experts, d->guesses, (size_t)d->top_k * sizeof *d->guesses);
        error = answered(p, colibri_store_prefetch(p->store, store_layer(p, ahead), d->top_k));
        if (error < 0)
            return error;
    }
    return 0;
}

/* Computes the experts as they come. */
static int32_t mix(struct colibri_pass *p)
{
    struct colibri_store *s = p->store;
    int32_t n, error;

    while ((n = answered(p, colibri_store_take(s, s->width))) > 0) {
        for (int32_t i = 0; i < n; i++) {
            const int32_t slot = s->leased[i] & ~COLIBRI_STORE_FRESH, block = s->owners[slot];
            p->experts[i] = block % s->width;
            p->addresses[i] = s->addresses[slot];
            p->kinds_of[i] = p->kinds[block];
        }
        error = colibri_layer_experts(p->decoder, ONE, n, p->experts, p->addresses, p->kinds_of,
                                      p->blocks);
        if (error < 0)
            return error;
        p->n_left -= n;
    }
    return n;
}

int64_t colibri_pass_bytes(void) { return sizeof(struct colibri_pass); }

int32_t colibri_pass_run(struct colibri_pass *p)
{
    const struct colibri_decoder *d = p->decoder;
    const int64_t end = now_ns() + DEAF_NS;
    int32_t error, n_done = 0;

    p->is_store = 0;
    for (; p->layer < p->n_layers; p->layer++, n_done++) {
        const struct colibri_layer *layer = &p->layers[p->layer];
        if (n_done && now_ns() > end)
            return answered(p, -EINTR);
        if (!p->is_asked) {
            error = colibri_layer_attention(d, layer, ONE, p->position);
            if (error < 0)
                return error;
            if (!p->has_experts[p->layer]) {
                error = colibri_layer_dense(d, layer, ONE);
                if (error < 0)
                    return error;
                continue;
            }
            p->n_left = ask(p, p->layer);
            if (p->n_left < 0)
                return p->n_left;
            p->is_asked = 1;
            error = foresee(p, p->layer);
            if (error >= 0 && layer->dense.gate.data)
                error = colibri_layer_shared(d, layer, ONE);
            if (error < 0)
                return error;
        }
        error = mix(p);
        if (error < 0)
            return error;
        p->is_asked = 0;
        if (p->n_left != 0)
            return -ENODATA;
        error = colibri_layer_finish(d, layer, ONE);
        if (error < 0)
            return error;
    }
    return 0;
}
