/* Opens mutants of valid files with colibri.h, and looks up and reads whatever opens.
 *
 *   mutate [-n EXECUTIONS] [-s SEED] [-w FOLDER] [-k EVERY -o FOLDER] FILE...
 *
 * FILE are .colibri files up to 4 MiB; the .colibri-volume files beside one go with it. The same
 * seed makes the same mutants. Most have their checksums put right, so that the rules behind them
 * are reached; some are raw. -w names a folder for the mutant at hand (best on tmpfs), -k keeps
 * every EVERYth one below -o, for other readers to be compared with. Built with sanitizers it
 * stops at the first fault; it stops too if opening allocates more than the file warrants. At the
 * end it prints how often each code was met.
 *
 *   cc -std=c11 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all \
 *      -I../src/colibri_format/include mutate.c -o mutate
 */
#define COLIBRI_IMPLEMENTATION
#include "colibri.h"

#define PAGE ((uint64_t)COLIBRI_PAGE)
#define MAX_SIZE (4u << 20)
#define MAX_FILES 512
#define MAX_PARTS 8

typedef struct part { /* one file of a model: the .colibri file itself, or a volume */
    char path[512];
    int fd;
    uint8_t *base, *work; /* `size` bytes, room for one more page */
    uint64_t size, length;
    uint64_t low, high; /* what differs from `base` */
} part;

typedef struct model {
    part parts[MAX_PARTS];
    unsigned n_parts;
} model;

static uint64_t state;

static uint64_t next_random(void)
{
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * UINT64_C(0x2545F4914F6CDD1D);
}

static uint64_t below(uint64_t n)
{
    return n ? next_random() % n : 0;
}

static void die(const char *what, const char *path)
{
    fprintf(stderr, "mutate: %s: %s: %s\n", path, what, strerror(errno));
    exit(2);
}

static void touch(part *p, uint64_t at, uint64_t n)
{
    p->low = at < p->low ? at : p->low;
    p->high = at + n > p->high ? at + n : p->high;
}

/* Reading from memory that may be cut off is the mutant's affair; writing stays inside. */
static void put(part *p, uint64_t at, const void *bytes, uint64_t n)
{
    if (at > p->size || n > p->size - at)
        return;
    memmove(p->work + at, bytes, n);
    touch(p, at, n);
}

static uint64_t region(const part *p, unsigned k, unsigned field)
{
    return colibri_i_u64(p->base + 128 + 32 * k + 8 * field);
}

/* Both pages get their checksum, and the second one is made like the first unless `is_one_sided`. */
static void fix_pages(part *p, int is_one_sided)
{
    uint8_t sum[8];
    colibri_i_put64(sum, colibri_xxh3_64(p->work, 4088, 0));
    put(p, 4088, sum, 8);
    if (!is_one_sided)
        put(p, p->size - PAGE, p->work, PAGE);
}

/* Region `k` was changed in the head: its checksum, its copy and the superblocks follow. */
static void fix_region(part *p, unsigned k, uint64_t length)
{
    uint64_t offset = region(p, k, 0), room = colibri_i_pad(region(p, k, 2), PAGE);
    uint8_t field[8];
    memset(p->work + offset + length, 0, room - length);
    touch(p, offset, room);
    put(p, region(p, k, 1), p->work + offset, room);
    colibri_i_put64(field, length);
    put(p, 128 + 32 * k + 16, field, 8);
    colibri_i_put64(field, colibri_xxh3_64(p->work + offset, length, 0));
    put(p, 128 + 32 * k + 24, field, 8);
    fix_pages(p, 0);
}

static uint64_t interesting(const part *p)
{
    static const uint64_t values[] = {0,          1,          2,          3,          16,         17,
                                      32,         63,         64,         255,        256,        4095,
                                      4096,       4097,       65534,      65535,      65536,      0x7FFFFFFF,
                                      0x80000000, 0xFFFFFFFD, 0xFFFFFFFE, 0xFFFFFFFF, 1048576,    1048577};
    switch (below(8)) {
    case 0:
        return UINT64_C(1) << below(64);
    case 1:
        return (UINT64_C(1) << below(64)) - 1;
    case 2:
        return 0 - (UINT64_C(1) << below(64));
    case 3:
        return PAGE * below(p->size / PAGE + 2);
    case 4:
        return next_random();
    default:
        return values[below(sizeof values / sizeof values[0])];
    }
}

/* One change to the `n` bytes at `at`, mostly of a whole field. */
static void change(part *p, uint64_t at, uint64_t n)
{
    static const uint64_t widths[] = {1, 2, 4, 4, 8, 8, 8};
    uint64_t width = widths[below(7)], place, other, value;
    uint8_t bytes[64];
    if (n < 8)
        return;
    place = at + below(n / width) * width;
    memset(bytes, 0, 8);
    memcpy(bytes, p->work + place, width);
    value = colibri_i_u64(bytes);
    switch (below(8)) {
    case 0: /* a piece of the same kind from elsewhere */
        width = UINT64_C(1) << (3 + below(4));
        if (n < width)
            return;
        other = at + below(n / width) * width;
        place = at + below(n / width) * width;
        memcpy(bytes, p->work + other, width);
        put(p, place, bytes, width);
        return;
    case 1:
        value ^= UINT64_C(1) << below(8 * width);
        break;
    case 2:
        value += below(2) ? 1 : 0 - UINT64_C(1);
        break;
    case 3:
        value += below(2) ? PAGE : 0 - PAGE;
        break;
    case 4:
        value += below(2) ? 64 : 0 - UINT64_C(64);
        break;
    default:
        value = interesting(p);
    }
    colibri_i_put64(bytes, value);
    put(p, place, bytes, width);
}

static void change_superblock(part *p)
{
    static const uint64_t fields[][2] = {{0, 8},  {8, 2},  {10, 2}, {12, 4}, {16, 8}, {24, 8}, {32, 8},
                                         {40, 8}, {56, 8}, {64, 4}, {68, 4}, {72, 4}, {76, 4}};
    uint64_t at, width;
    uint8_t bytes[8];
    if (below(2)) {
        at = 128 + 8 * below(32);
        width = 8;
    } else if (below(12) == 0) {
        at = 80 + below(48);
        width = 1;
    } else {
        uint64_t field = below(13);
        at = fields[field][0];
        width = fields[field][1];
    }
    if (below(3) == 0) {
        change(p, at & ~UINT64_C(7), 8);
    } else {
        colibri_i_put64(bytes, interesting(p));
        put(p, at, bytes, width);
    }
    fix_pages(p, below(8) == 0);
}

static unsigned some_region(const part *p)
{
    static const unsigned often[] = {0, 0, 1, 2, 2, 3, 3, 4, 4, 4, 4, 4, 5, 6};
    unsigned k;
    do
        k = often[below(14)];
    while (region(p, k, 2) == 0);
    return k;
}

static void change_region(part *p)
{
    unsigned k = some_region(p);
    for (uint64_t n = 1 + below(3); n > 0; n--)
        change(p, region(p, k, 0), region(p, k, 2));
    fix_region(p, k, region(p, k, 2));
}

/* A record of the tables goes, or comes a second time; counts and length follow. */
static void change_count(part *p)
{
    static const uint64_t sizes[] = {32, 16, 64, 96, 48, 48, 1};
    uint64_t offset = region(p, 4, 0), length = region(p, 4, 2), room = colibri_i_pad(length, PAGE);
    uint8_t *tables = p->work + offset;
    uint64_t n_layers = colibri_i_u32(p->base + 64), kind = below(7), start = 64, count, at;
    uint64_t counts[7];
    for (unsigned i = 0; i < 7; i++)
        counts[i] = i < 6 ? colibri_i_u32(tables + 4 * i) : colibri_i_u64(tables + 24);
    for (unsigned i = 0; i < kind; i++)
        start += sizes[i] * counts[i] + (i == 2 ? 24 * n_layers + 32 : 0);
    count = counts[kind];
    at = start + sizes[kind] * below(count);
    if (start + sizes[kind] * count > length || count == 0)
        return;
    if (below(2)) {
        memmove(tables + at, tables + at + sizes[kind], length - at - sizes[kind]);
        length -= sizes[kind];
        count--;
    } else if (length + sizes[kind] <= room) {
        memmove(tables + at + sizes[kind], tables + at, length - at);
        length += sizes[kind];
        count++;
    }
    if (kind < 6)
        colibri_i_put32(tables + 4 * kind, (uint32_t)count);
    else
        colibri_i_put64(tables + 24, count);
    fix_region(p, 4, length);
}

static void change_metadata(part *p)
{
    static const char *const pieces[] = {
        "{",      "}",      "[",      "]",     ",",       ":",        "\"",       "\\",     "\\u00e9", "\\ud83d\\ude00",
        "\\ud800", "\\n",   "\\u001f", "\\u001F", "\\/",  " ",        "\n",       "\t",     "-0",      "0",
        "-1",     "1.5",    "1e3",    "01",    "9007199254740991", "9007199254740992", "true", "false", "null", "NaN",
        "\xc3\xa9", "\xed\xa0\x80", "\xff", "\xef\xbb\xbf", "\"a\":1", "\"b\":{}", ",\"a\":[]", "[[[[[[[[", "]]]]]]]]",
        "{\"\":{\"\":{\"\":", "}}}", "\x7f", "\x01", "\"\\\"\":2,\"]\":3", "\\u0000", "\\b"};
    uint64_t offset = region(p, 5, 0), length = region(p, 5, 2), room = colibri_i_pad(length, PAGE);
    uint8_t *text = p->work + offset;
    for (uint64_t n = 1 + below(3); n > 0; n--) {
        const char *piece = pieces[below(sizeof pieces / sizeof pieces[0])];
        uint64_t at = below(length + 1), size = strlen(piece);
        if (below(4) == 0) { /* where a token may stand */
            while (at > 0 && !strchr("{}[],:", text[at - 1]))
                at--;
            piece = below(2) ? " " : "\"a\":-0,";
            size = strlen(piece);
        }
        switch (below(4)) {
        case 0:
            if (at < length && length > 2) {
                memmove(text + at, text + at + 1, length - at - 1);
                length--;
            }
            break;
        case 1: { /* a part of it again, elsewhere */
            uint64_t from = below(length), part_size = 1 + below(length - from < 40 ? length - from : 40);
            uint8_t copy[64];
            memcpy(copy, text + from, part_size);
            if (length + part_size <= room) {
                memmove(text + at + part_size, text + at, length - at);
                memcpy(text + at, copy, part_size);
                length += part_size;
            }
            break;
        }
        default:
            if (length + size <= room) {
                memmove(text + at + size, text + at, length - at);
                memcpy(text + at, piece, size);
                length += size;
            }
        }
    }
    fix_region(p, 5, length);
}

static void change_raw(part *p)
{
    for (uint64_t n = 1 + below(6); n > 0; n--) {
        uint64_t at = below(3) == 0 ? below(p->size) : below(3) ? below(6 * PAGE) : p->size - 1 - below(6 * PAGE);
        uint8_t byte;
        if (at >= p->size)
            continue;
        byte = (uint8_t)(below(2) ? next_random() : p->work[at] ^ 1u << below(8));
        put(p, at, &byte, 1);
    }
}

static void change_volume(part *p)
{
    static const uint64_t places[] = {8, 12, 16, 24, 32, 40, 48, 56, 60, 64, 318, 319, 4000};
    uint64_t at = places[below(13)], end = p->size - PAGE;
    uint8_t bytes[8];
    if (below(4) == 0) {
        change_raw(p);
        return;
    }
    colibri_i_put64(bytes, below(2) ? interesting(p) : colibri_i_u64(p->work + at) ^ UINT64_C(1) << below(64));
    put(p, at, bytes, at < 60 ? 4 : 1);
    colibri_i_put64(bytes, colibri_xxh3_64(p->work, 4088, 0));
    put(p, 4088, bytes, 8);
    if (below(2))
        put(p, end, p->work, PAGE);
}

static void mutate(model *m)
{
    part *p = &m->parts[0];
    uint64_t kind = below(100);
    if (kind < 8) {
        change_raw(p);
    } else if (kind < 11) {
        p->length = below(2) ? below(p->size) : p->size + 1 + below(PAGE);
    } else if (kind < 27) {
        change_superblock(p);
    } else if (kind < 65) {
        change_region(p);
    } else if (kind < 80) {
        change_metadata(p);
    } else if (kind < 92 || m->n_parts == 1) {
        change_count(p);
    } else {
        part *volume = &m->parts[1 + below(m->n_parts - 1)];
        if (below(6) == 0)
            volume->length = below(2) ? below(volume->size) : volume->size + 1;
        else
            change_volume(volume);
    }
    if (below(5) == 0)
        change_region(p);
    if (below(8) == 0) /* damage to one half: the other is used, whatever it says */
        change(p, below(2) ? 0 : region(p, some_region(p), 0), PAGE);
}

static void write_range(const part *p, const uint8_t *bytes, uint64_t low, uint64_t high)
{
    while (low < high) {
        ssize_t n = pwrite(p->fd, bytes + low, high - low, (off_t)low);
        if (n <= 0)
            die("writing", p->path);
        low += (uint64_t)n;
    }
}

static void write_mutant(model *m)
{
    for (unsigned i = 0; i < m->n_parts; i++) {
        part *p = &m->parts[i];
        write_range(p, p->work, p->low, p->high < p->length ? p->high : p->length);
        if (p->length != p->size && ftruncate(p->fd, (off_t)p->length) != 0)
            die("cutting", p->path);
    }
}

static void restore(model *m)
{
    for (unsigned i = 0; i < m->n_parts; i++) {
        part *p = &m->parts[i];
        if (p->length != p->size) {
            if (ftruncate(p->fd, (off_t)p->size) != 0)
                die("restoring", p->path);
            if (p->length < p->size)
                write_range(p, p->base, p->length, p->size);
        }
        if (p->low < p->high) {
            memcpy(p->work + p->low, p->base + p->low, p->high - p->low);
            write_range(p, p->base, p->low, p->high);
        }
        p->low = p->size;
        p->high = 0;
        p->length = p->size;
    }
}

static uint64_t allocated, most_allocated;

static void *allocate(void *context, size_t size)
{
    (void)context;
    allocated += size;
    most_allocated = allocated > most_allocated ? allocated : most_allocated;
    return malloc(size);
}

static void release(void *context, void *pointer, size_t size)
{
    (void)context;
    allocated -= size;
    free(pointer);
}

static volatile uint64_t sink; /* keeps look-ups from being optimised away */

static void look_up(const colibri_file *file)
{
    uint64_t n = (uint64_t)file->n_layers * file->n_experts, reads = 0, sum = 0;
    for (uint64_t i = 0; i < n; i++) {
        uint32_t layer = (uint32_t)(i / file->n_experts), expert = (uint32_t)(i % file->n_experts);
        colibri_block block;
        colibri_layout layout;
        uint8_t *buffer, *plain;
        if (colibri_expert(file, layer, expert, &block) != 0)
            continue;
        if (colibri_get_layout(file, block.layout, &layout) != 0 || layout.block_size != block.size)
            abort();
        sum += block.offset ^ block.checksum;
        if (reads++ >= 4)
            continue;
        buffer = (uint8_t *)malloc(block.size);
        plain = (uint8_t *)malloc(block.size);
        if (!buffer || !plain)
            abort();
        sum += (uint64_t)colibri_read_block(file, layer, expert, buffer, block.size, 0, NULL);
        for (uint32_t s = 0; s < layout.n_segments; s++) {
            colibri_segment segment;
            if (colibri_get_segment(file, layout.first_segment + s, &segment) != 0 ||
                segment.offset + segment.size > block.size ||
                colibri_plain(file, segment.dtype, segment.row_interleave, segment.shape, segment.size,
                              buffer + segment.offset, plain) != 0)
                abort();
            sum += plain[segment.size - 1];
        }
        free(buffer);
        free(plain);
    }
    for (uint32_t i = 0; i < file->n_tensors; i++) {
        colibri_tensor tensor;
        char name[256];
        uint32_t found;
        uint8_t *buffer;
        colibri_get_tensor(file, i, &tensor);
        memcpy(name, tensor.name, tensor.name_length);
        name[tensor.name_length] = 0;
        if (colibri_find_tensor(file, name, &found) != 0 || found != i)
            abort();
        buffer = (uint8_t *)malloc(tensor.size ? tensor.size : 1);
        sum += (uint64_t)colibri_read_tensor(file, i, buffer, tensor.size, 0, NULL);
        free(buffer);
    }
    for (uint32_t i = 0; i < file->n_files; i++) {
        colibri_embedded entry;
        uint8_t *buffer;
        colibri_get_file(file, i, &entry);
        buffer = (uint8_t *)malloc(entry.size ? entry.size : 1);
        sum += (uint64_t)colibri_read_file(file, i, buffer, entry.size, 0, NULL);
        free(buffer);
    }
    sink += sum;
}

static void copy_out(const model *m, const char *folder, uint64_t number)
{
    char path[1024];
    for (unsigned i = 0; i < m->n_parts; i++) {
        const part *p = &m->parts[i];
        FILE *stream;
        snprintf(path, sizeof path, "%s/%06" PRIu64, folder, number);
        if (mkdir(path, 0777) != 0 && errno != EEXIST)
            die("keeping", path);
        snprintf(path, sizeof path, "%s/%06" PRIu64 "/%s", folder, number, strrchr(p->path, '/') + 1);
        stream = fopen(path, "wb");
        if (!stream || fwrite(p->work, 1, p->length, stream) != p->length || fclose(stream) != 0)
            die("keeping", path);
    }
}

static void drop_part(part *p)
{
    if (p->fd >= 0) {
        close(p->fd);
        unlink(p->path);
    }
    free(p->base);
    free(p->work);
}

static int load_part(part *p, const char *source, const char *target)
{
    FILE *stream = fopen(source, "rb");
    size_t room = MAX_SIZE + PAGE;
    if (!stream)
        die("opening", source);
    memset(p, 0, sizeof *p);
    p->fd = -1;
    p->base = (uint8_t *)calloc(room, 1);
    p->work = (uint8_t *)calloc(room, 1);
    if (!p->base || !p->work)
        die("allocating", source);
    p->size = fread(p->base, 1, room, stream);
    fclose(stream);
    if (p->size > MAX_SIZE || p->size < PAGE) {
        drop_part(p);
        return 0;
    }
    memcpy(p->work, p->base, p->size);
    p->length = p->low = p->size;
    snprintf(p->path, sizeof p->path, "%s", target);
    p->fd = open(target, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (p->fd < 0)
        die("creating", target);
    write_range(p, p->base, 0, p->size);
    return 1;
}

/* 1 if the model is there: the file fits, opens, and its head is whole. */
static int load_model(model *m, const char *source, const char *folder)
{
    char target[1024], directory[512];
    const char *slash = strrchr(source, '/');
    colibri_file file;
    uint32_t n_warnings;
    int code;
    if (mkdir(folder, 0777) != 0 && errno != EEXIST)
        die("making", folder);
    snprintf(target, sizeof target, "%s/mutant.colibri", folder);
    m->n_parts = 1;
    if (!load_part(&m->parts[0], source, target))
        return 0;
    code = colibri_open(&file, source, NULL);
    colibri_warnings(&file, &n_warnings);
    snprintf(directory, sizeof directory, "%.*s", (int)(slash ? slash - source : 1), slash ? source : ".");
    for (uint32_t i = 1; !code && i <= file.n_volumes && i < MAX_PARTS; i++) {
        colibri_volume volume;
        colibri_get_volume(&file, i, &volume);
        snprintf(target, sizeof target, "%s/%u.colibri-volume", folder, i);
        m->n_parts += (unsigned)load_part(&m->parts[m->n_parts], volume.path, target);
    }
    colibri_close(&file);
    if (code == 0 && n_warnings == 0)
        return 1;
    for (unsigned i = 0; i < m->n_parts; i++)
        drop_part(&m->parts[i]);
    return 0;
}

int main(int argc, char **argv)
{
    static model models[MAX_FILES];
    static uint64_t met[512];
    uint64_t executions = 100000, seed = 1, every = 0;
    const char *folder = "/dev/shm/colibri-mutate", *keep = NULL;
    unsigned n = 0;
    int option;
    while ((option = getopt(argc, argv, "n:s:w:k:o:")) != -1) {
        if (option == 'n')
            executions = strtoull(optarg, NULL, 0);
        else if (option == 's')
            seed = strtoull(optarg, NULL, 0);
        else if (option == 'w')
            folder = optarg;
        else if (option == 'k')
            every = strtoull(optarg, NULL, 0);
        else if (option == 'o')
            keep = optarg;
        else
            return 2;
    }
    if (mkdir(folder, 0777) != 0 && errno != EEXIST)
        die("making", folder);
    for (int i = optind; i < argc && n < MAX_FILES; i++) {
        char own[512];
        snprintf(own, sizeof own, "%s/%u", folder, n);
        n += (unsigned)load_model(&models[n], argv[i], own);
    }
    if (n == 0) {
        fprintf(stderr, "mutate: no valid file of up to 4 MiB is named\n");
        return 2;
    }
    for (uint64_t i = 0; i < executions; i++) {
        model *m;
        colibri_options options;
        colibri_file file;
        int code;
        state = (seed << 32 ^ i) * UINT64_C(0x9E3779B97F4A7C15) + 1;
        next_random();
        m = &models[below(n)];
        memset(&options, 0, sizeof options);
        options.allocate = allocate;
        options.release = release;
        options.flags = below(64) ? COLIBRI_WITHOUT_DIRECT : 0;
        mutate(m);
        write_mutant(m);
        if (every && keep && i % every == 0)
            copy_out(m, keep, i);
        most_allocated = 0;
        code = colibri_open(&file, m->parts[0].path, &options);
        met[-code]++;
        if (code == 0)
            look_up(&file);
        else if (code < -300 || !file.message[0])
            abort();
        colibri_close(&file);
        if (allocated != 0 || most_allocated > 3 * m->parts[0].length + (1u << 20)) {
            fprintf(stderr, "mutate: execution %" PRIu64 " allocated %" PRIu64 " bytes\n", i, most_allocated);
            abort();
        }
        restore(m);
    }
    printf("%" PRIu64 " executions over %u files, seed %" PRIu64 "\n", executions, n, seed);
    for (int code = 0; code < 512; code++)
        if (met[code])
            printf("%10" PRIu64 " %s\n", met[code], colibri_strerror(code));
    for (unsigned i = 0; i < n; i++) {
        char own[512];
        for (unsigned k = 0; k < models[i].n_parts; k++)
            drop_part(&models[i].parts[k]);
        snprintf(own, sizeof own, "%s/%u", folder, i);
        rmdir(own);
    }
    rmdir(folder);
    return 0;
}
