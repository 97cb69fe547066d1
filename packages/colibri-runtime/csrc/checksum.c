/* The format's own C header brings the hash; the rest of it is not used here. */
#define COLIBRI_API static
#define COLIBRI_IMPLEMENTATION
#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wunused-function"
#endif
#include "colibri.h"

#include "checksum.h"

#include <string.h>

uint64_t colibri_block_hash(const void *data, uint64_t n_bytes, uint64_t seed)
{
    return colibri_xxh3_64(data, (size_t)n_bytes, seed);
}

/* XXH3's long form takes blocks of 1,024 bytes, the last 1 to 1,024 bytes apart; its short forms,
 * up to 240 bytes, everything at once. */
enum { BLOCK = 1024, SHORT = 240 };

void colibri_hasher_begin(struct colibri_hasher *hasher, uint64_t seed)
{
    colibri_i_long state;
    colibri_i_long_begin(&state, seed);
    memcpy(hasher->acc, state.acc, sizeof state.acc);
    memcpy(hasher->secret, state.secret, sizeof state.secret);
    hasher->n_added = 0;
}

void colibri_hasher_add(struct colibri_hasher *hasher, const void *data, uint64_t n_there,
                        uint64_t size)
{
    const uint64_t n_whole = size > SHORT ? (size - 1) / BLOCK * BLOCK : 0;
    const uint64_t end = n_there / BLOCK * BLOCK < n_whole ? n_there / BLOCK * BLOCK : n_whole;
    colibri_i_long state;

    if (end <= hasher->n_added)
        return;
    memcpy(state.acc, hasher->acc, sizeof state.acc);
    memcpy(state.secret, hasher->secret, sizeof state.secret);
    colibri_i_long_blocks(&state, (const uint8_t *)data + hasher->n_added,
                          (end - hasher->n_added) / BLOCK);
    memcpy(hasher->acc, state.acc, sizeof state.acc);
    hasher->n_added = end;
}

uint64_t colibri_hasher_end(struct colibri_hasher *hasher, const void *data, uint64_t size,
                            uint64_t seed)
{
    colibri_i_long state;

    if (size <= SHORT)
        return colibri_xxh3_64(data, (size_t)size, seed);
    colibri_hasher_add(hasher, data, size, size);
    memcpy(state.acc, hasher->acc, sizeof state.acc);
    memcpy(state.secret, hasher->secret, sizeof state.secret);
    return colibri_i_long_end(&state, (const uint8_t *)data + size,
                              (size_t)(size - hasher->n_added), size)
        .low;
}
