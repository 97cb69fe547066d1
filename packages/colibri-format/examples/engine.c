/* The loop of an engine around colibri.h: route, look up, read what is not resident, compute.
 * Tokens pass the expert layers of a file with one layout, experts and routers in f32; attention,
 * kernels for quantised dtypes and reading ahead are left out.
 *   cc -O2 -I"$(python -c 'import colibri_format; print(colibri_format.get_include())')" engine.c -lm
 */
#define COLIBRI_IMPLEMENTATION
#include "colibri.h"
#include <math.h>

enum { N_SLOTS = 6, TOP_K = 2, ROOM = 1 << 21, MAX_EXPERTS = 256, MAX_SIZE = 4096 };
static struct slot { /* holds one block; the one unused for longest makes room */
    _Alignas(COLIBRI_DIRECT_ALIGNMENT) uint8_t block[ROOM]; /* aligned, so that reads are direct */
    uint64_t used;                                          /* 0: empty */
    uint32_t layer, expert;
} slots[N_SLOTS];
static colibri_segment gate, up, down;
static uint64_t now, n_hits, n_misses, n_direct, hidden, width;
static float x[MAX_SIZE], sum[MAX_SIZE], a[MAX_SIZE], b[MAX_SIZE], router[MAX_EXPERTS * MAX_SIZE];

static const uint8_t *lease(const colibri_file *file, uint32_t layer, uint32_t expert)
{
    struct slot *victim = slots;
    colibri_io io;
    for (struct slot *s = slots; s < slots + N_SLOTS; s++) {
        if (s->used && s->layer == layer && s->expert == expert)
            return n_hits++, s->used = ++now, s->block;
        victim = s->used < victim->used ? s : victim;
    }
    victim->used = 0;
    if (colibri_read_block(file, layer, expert, victim->block, ROOM, 0, &io) != 0)
        return NULL;
    n_misses++, n_direct += io.mode == COLIBRI_IO_DIRECT;
    victim->layer = layer, victim->expert = expert, victim->used = ++now;
    return victim->block;
}

static float dot(const void *row, const float *v, uint64_t n)
{
    float total = 0;
    for (uint64_t i = 0; i < n; i++)
        total += ((const float *)row)[i] * v[i];
    return total;
}

/* x += the TOP_K experts of highest softmax probability, weighted by it; 0 if all went well */
static int run_layer(const colibri_file *file, uint32_t layer)
{
    float p[MAX_EXPERTS], total = 0;
    char name[64];
    uint32_t number, best;
    snprintf(name, sizeof name, "blk.%u.ffn_gate_inp.weight", (unsigned)layer);
    if (colibri_find_tensor(file, name, &number) ||
        colibri_read_tensor(file, number, router, sizeof router, 0, NULL))
        return 1;
    for (uint32_t e = 0; e < file->n_experts; e++)
        total += p[e] = expf(dot(router + e * hidden, x, hidden));
    memcpy(sum, x, hidden * sizeof *x);
    for (int k = 0; k < TOP_K; k++, p[best] = 0) {
        for (uint32_t e = best = 0; e < file->n_experts; e++)
            best = p[e] > p[best] ? e : best;
        const uint8_t *block = lease(file, layer, best);
        if (!block)
            return 1;
        for (uint64_t i = 0; i < width; i++) {
            a[i] = dot(block + gate.offset + 4 * hidden * i, x, hidden);
            b[i] = a[i] / (1 + expf(-a[i])) * dot(block + up.offset + 4 * hidden * i, x, hidden);
        }
        for (uint64_t i = 0; i < hidden; i++)
            sum[i] += p[best] / total * dot(block + down.offset + 4 * width * i, b, width);
    }
    memcpy(x, sum, hidden * sizeof *x);
    return 0;
}

int main(int argc, char **argv)
{
    colibri_file file;
    colibri_dtype dtype;
    if (argc < 3 || colibri_open(&file, argv[1], NULL) != 0)
        return fprintf(stderr, "engine FILE N_TOKENS: %s\n", argc < 3 ? "usage" : file.message), 1;
    if (file.n_layouts != 1 || file.n_dtypes != 1 || file.n_experts > MAX_EXPERTS ||
        colibri_get_dtype(&file, 0, &dtype) || dtype.ggml_id != 0 ||
        colibri_find_segment(&file, 0, COLIBRI_GATE, &gate) || gate.rank != 2 ||
        colibri_find_segment(&file, 0, COLIBRI_UP, &up) || up.size != gate.size ||
        colibri_find_segment(&file, 0, COLIBRI_DOWN, &down) || down.size != gate.size ||
        (width = gate.shape[0]) > MAX_SIZE || (hidden = gate.shape[1]) > MAX_SIZE)
        return fprintf(stderr, "%s: not one layout of f32 gate, up and down\n", argv[1]), 1;
    for (long token = 0; token < atol(argv[2]); token++) {
        for (uint64_t i = 0; i < hidden; i++)
            x[i] = (float)((i * 7 + (uint64_t)token * 13) % 11) / 11 - 0.5f; /* stands for an embedding */
        for (uint32_t layer = 0; layer < file.n_layers; layer++)
            if (run_layer(&file, layer) != 0)
                return fprintf(stderr, "layer %u cannot be run\n", (unsigned)layer), 1;
        for (uint64_t i = 0; i < hidden; i++)
            printf("%.6g%c", x[i], i + 1 < hidden ? ' ' : '\n');
    }
    fprintf(stderr, "%d hits, %d misses, %d direct\n", (int)n_hits, (int)n_misses, (int)n_direct);
    return colibri_close(&file), 0;
}
