/* How fast colibri.h opens a file, looks experts up and hashes; open_time.py builds and runs it.
 *
 *     c_reader FILE N_LAYERS N_EXPERTS
 *
 * Prints medians of 15: milliseconds to open and validate, nanoseconds of a look-up of an expert by
 * random numbers, GB/s of XXH3-64 over 256 KiB that a cache holds. */
#define COLIBRI_IMPLEMENTATION
#include "colibri.h"
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { ROUNDS = 15, LOOK_UPS = 1 << 20, HASHED = 1 << 18, HASHES = 400 };

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void tell(const char *what, double *values)
{
    qsort(values, ROUNDS, sizeof *values, compare);
    printf("%-24s %.1f (%.1f to %.1f)\n", what, values[ROUNDS / 2], values[0], values[ROUNDS - 1]);
}

int main(int argc, char **argv)
{
    static uint8_t bytes[HASHED];
    double opened[ROUNDS], looked[ROUNDS], hashed[ROUNDS];
    uint64_t sum = 0;
    if (argc != 4)
        return 2;
    const uint32_t n_layers = (uint32_t)atoi(argv[2]), n_experts = (uint32_t)atoi(argv[3]);
    for (int round = 0; round < ROUNDS; round++) {
        colibri_file file;
        colibri_block block;
        double start = now();
        const int code = colibri_open(&file, argv[1], NULL);
        opened[round] = 1e3 * (now() - start);
        if (code != 0) {
            fprintf(stderr, "%s: %s\n", argv[1], colibri_strerror(code));
            return 1;
        }
        uint32_t random = 1;
        start = now();
        for (int i = 0; i < LOOK_UPS; i++) {
            random = random * 1664525u + 1013904223u;
            if (colibri_expert(&file, (random >> 8) % n_layers, (random >> 16) % n_experts, &block) != 0)
                return 1;
            sum += block.offset;
        }
        looked[round] = 1e9 * (now() - start) / LOOK_UPS;
        start = now();
        for (int i = 0; i < HASHES; i++)
            sum += colibri_xxh3_64(bytes, HASHED, (uint64_t)i);
        hashed[round] = (double)HASHED * HASHES / 1e9 / (now() - start);
        colibri_close(&file);
    }
    tell("C: open, ms", opened);
    tell("C: look-up, ns", looked);
    tell("C: XXH3-64, GB/s", hashed);
    return sum == 1; /* never, but the compiler does not know */
}
