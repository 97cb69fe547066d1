/* Serves the memory and the functions of colibri-runtime's C library to arm_emulator.py.
 *
 * It is linked with the library's objects for aarch64 and runs under qemu-user. Requests come on
 * stdin, little-endian: one struct request each, behind WRITE `size` bytes, behind FIND a name of
 * `size` bytes. Answers on stdout: READ gives `size` bytes, FIND an address (0: unknown), a call 8
 * bytes, of CALL_FLOAT the first 4 are the float. It ends with stdin.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "colibri_runtime.h"
#include "matmul.h"
#include "ops.h"
#include "rounding.h"

enum { FIND, WRITE, READ, CALL, CALL_FLOAT };

struct request {
    uint64_t what;
    uint64_t address;
    uint64_t size;
    int64_t ints[10]; /* arguments that are integers or addresses, in order */
    float floats[2];  /* those that are floats; AAPCS64 passes both kinds in registers of their own */
};

typedef int64_t whole_function(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                               int64_t, int64_t, int64_t, float, float);
typedef float float_function(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                             int64_t, int64_t, float, float);

#define ARENA_BYTES (64 << 20)

static uint8_t *arena;

/* Memory for requests to use, and behind it a page that nothing may touch. */
static int64_t arena_begin(void) { return (int64_t)(uintptr_t)arena; }
static int64_t arena_end(void) { return arena_begin() + ARENA_BYTES; }

#define NAMED(function) {#function, (uintptr_t)(function)}

static const struct {
    const char *name;
    uintptr_t address;
} functions[] = {
    NAMED(arena_begin),
    NAMED(arena_end),
    NAMED(colibri_runtime_isas),
    NAMED(colibri_has_kernel),
    NAMED(colibri_matmul_workspace),
    NAMED(colibri_matmul),
    NAMED(colibri_round_row),
    NAMED(colibri_vector_code),
    NAMED(colibri_ops_of),
    NAMED(colibri_team_create),
    NAMED(colibri_team_destroy),
};

static void read_all(void *to, size_t size) {
    if (size > 0 && fread(to, 1, size, stdin) != size) exit(1);
}

static void answer(const void *from, size_t size) {
    if (fwrite(from, 1, size, stdout) != size || fflush(stdout) != 0) exit(1);
}

static void find(size_t size) {
    char name[64] = {0};
    uint64_t address = 0;
    if (size >= sizeof name) exit(1);
    read_all(name, size);
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (strcmp(name, functions[i].name) == 0) address = functions[i].address;
    answer(&address, 8);
}

int main(void) {
    struct request r;
    arena = mmap(NULL, ARENA_BYTES + 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                 -1, 0);
    if (arena == MAP_FAILED || mprotect(arena + ARENA_BYTES, 65536, PROT_NONE) != 0) return 1;
    while (fread(&r, sizeof r, 1, stdin) == 1) {
        void *at = (void *)(uintptr_t)r.address;
        const int64_t *n = r.ints;
        uint64_t whole = 0;
        float value;
        switch (r.what) {
        case FIND:
            find(r.size);
            break;
        case WRITE:
            read_all(at, r.size);
            break;
        case READ:
            answer(at, r.size);
            break;
        case CALL:
            whole = (uint64_t)((whole_function *)(uintptr_t)at)(n[0], n[1], n[2], n[3], n[4], n[5],
                                                                n[6], n[7], n[8], n[9],
                                                                r.floats[0], r.floats[1]);
            answer(&whole, 8);
            break;
        case CALL_FLOAT:
            value = ((float_function *)(uintptr_t)at)(n[0], n[1], n[2], n[3], n[4], n[5], n[6],
                                                      n[7], n[8], n[9], r.floats[0], r.floats[1]);
            memcpy(&whole, &value, 4);
            answer(&whole, 8);
            break;
        default:
            return 1;
        }
    }
    return 0;
}
