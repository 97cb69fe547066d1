/* The checksum of blocks: XXH3-64, as the file format has it. */
#ifndef COLIBRI_CHECKSUM_H
#define COLIBRI_CHECKSUM_H

#include <stdint.h>

/* XXH3-64 of `n_bytes` at `data`. */
uint64_t colibri_block_hash(const void *data, uint64_t n_bytes, uint64_t seed);

/* The same of a block that comes in pieces: begin; add whenever more of its bytes from the first on
 * are there; end when all `size` are. What was added is not read again. */
struct colibri_hasher {
    uint64_t acc[8];
    uint8_t secret[192];
    uint64_t n_added; /* bytes */
};

void colibri_hasher_begin(struct colibri_hasher *hasher, uint64_t seed);
void colibri_hasher_add(struct colibri_hasher *hasher, const void *data, uint64_t n_there,
                        uint64_t size);
uint64_t colibri_hasher_end(struct colibri_hasher *hasher, const void *data, uint64_t size,
                            uint64_t seed);

#endif
