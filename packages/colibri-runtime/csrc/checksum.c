/* The format's own C header brings the hash; the rest of it is not used here. */
#define COLIBRI_API static
#define COLIBRI_IMPLEMENTATION
#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wunused-function"
#endif
#include "colibri.h"

#include "checksum.h"

uint64_t colibri_block_hash(const void *data, uint64_t n_bytes, uint64_t seed)
{
    return colibri_xxh3_64(data, (size_t)n_bytes, seed);
}
