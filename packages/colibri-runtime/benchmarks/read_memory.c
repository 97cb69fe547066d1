/* Reads memory as fast as one thread can be made to: `n` sequences of addresses, 1 or 4, in turn, 32 KiB
 * long each, 64 bytes at a time. What is read is combined, so that no compiler leaves it out. */
#include <stdint.h>

typedef uint64_t line __attribute__((vector_size(64), aligned(64), may_alias));

enum { LENGTH = 32768, LINES = LENGTH / sizeof(line) };

static inline __attribute__((always_inline)) uint64_t read_in_turn(const line *data, int64_t size,
                                                                   const int n)
{
    line found = {0};
    for (int64_t at = 0; at + n * LINES <= size / (int64_t)sizeof(line); at += n * LINES)
        for (int64_t i = 0; i < LINES; i++)
            for (int sequence = 0; sequence < n; sequence++)
                found ^= data[at + sequence * LINES + i];
    return found[0] ^ found[1] ^ found[2] ^ found[3] ^ found[4] ^ found[5] ^ found[6] ^ found[7];
}

uint64_t read_memory(const void *data, int64_t size, int32_t n)
{
    return n == 4 ? read_in_turn(data, size, 4) : read_in_turn(data, size, 1);
}
