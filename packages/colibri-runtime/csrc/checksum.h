/* The checksum of blocks: XXH3-64, as the file format has it. */
#ifndef COLIBRI_CHECKSUM_H
#define COLIBRI_CHECKSUM_H

#include <stdint.h>

/* XXH3-64 of `n_bytes` at `data`. */
uint64_t colibri_block_hash(const void *data, uint64_t n_bytes, uint64_t seed);

#endif
