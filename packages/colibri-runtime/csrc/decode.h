/* One token's way through all layers: the steps of ops_layer.h and the calls of store.h in the order
 * in which decoder.py makes them, with the same results, in one call.
 *
 * Memory is the caller's and described by one struct (mirrored by native_pass.py); nothing is kept
 * elsewhere, nothing is allocated.
 */
#ifndef COLIBRI_DECODE_H
#define COLIBRI_DECODE_H

#include <stdint.h>

#include "colibri_runtime.h"
#include "ops_layer.h"
#include "store.h"

struct colibri_pass {
    const struct colibri_decoder *decoder;
    const struct colibri_layer *layers;
    struct colibri_store *store;
    const struct colibri_block *blocks;
    const uint8_t *has_experts; /* (n_layers) */
    const int32_t *kinds;       /* by block of the store: which of `blocks` it is laid out as */
    /* (n_experts): scratch. */
    int32_t *experts;
    uint64_t *addresses;
    int32_t *kinds_of;
    int64_t position;    /* where the token stands */
    int32_t n_layers;
    int32_t first_layer; /* the store's number of layer 0 */
    int32_t look_ahead;  /* layers ahead whose experts are predicted */
    int32_t layer;       /* where to begin, or to go on: 0 for a new token; */
    int32_t is_asked;    /* its experts have been asked for: 0 for a new token; */
    int32_t n_left;      /* how many of them are still to come */
    int32_t is_store;    /* whose answer it was that ended the last call */
    int32_t reserved;
};

/* sizeof of colibri_pass, for a check. */
COLIBRI_EXPORT int64_t colibri_pass_bytes(void);

/* Takes the first row of stream through the layers from `layer` on. 0; or with `is_store` what the
 * store answered: upon -EINTR, which also comes between two layers after some 50 ms so that signals
 * are heard, and upon -EIO once that is mended, the call is repeated and goes on. Or -errno of a step;
 * -ENODATA: the store gave fewer experts than were asked for. A fetch may be open then. */
COLIBRI_EXPORT int32_t colibri_pass_run(struct colibri_pass *pass);

#endif
