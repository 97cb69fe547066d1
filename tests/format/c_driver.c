/* Drives colibri.h for tests: one JSON line for each question.
 *
 *   c_driver open [--without-volumes] [FOLDER...]   paths on stdin; what each file holds, or its code
 *   c_driver hash FILE SEED...                      both hashes of the first n bytes, for many n
 *   c_driver read PATH LAYER EXPERT                 how reads into several buffers went
 *   c_driver plain PATH ROLE                        plain bytes of the segment of block L0/E0, in hex
 *   c_driver memory PATH                            opening while each allocation fails in turn
 *   c_driver codes                                  number and name of each code
 */
#define COLIBRI_IMPLEMENTATION
#include "colibri.h"

static void put_text(const char *text, uint32_t length)
{
    putchar('"');
    for (uint32_t i = 0; i < length; i++) {
        if (text[i] == '"' || text[i] == '\\')
            putchar('\\');
        putchar(text[i]);
    }
    putchar('"');
}

static void put_hex(const uint8_t *bytes, uint64_t size)
{
    putchar('"');
    for (uint64_t i = 0; i < size; i++)
        printf("%02x", bytes[i]);
    putchar('"');
}

static void put_shape(const uint64_t shape[4], unsigned rank)
{
    for (unsigned i = 0; i < rank; i++)
        printf("%s%" PRIu64, i ? "," : "[", shape[i]);
    printf("],");
}

static const char *comma(uint32_t i)
{
    return i ? "," : "";
}

static void put_layouts(const colibri_file *file)
{
    printf(",\"layouts\":[");
    for (uint32_t n = 0; n < file->n_layouts; n++) {
        colibri_layout layout;
        colibri_get_layout(file, n, &layout);
        printf("%s[%" PRIu64 ",[", comma(n), layout.block_size);
        for (uint32_t i = 0; i < layout.n_segments; i++) {
            colibri_segment s;
            colibri_get_segment(file, layout.first_segment + i, &s);
            printf("%s[%u,%u,%u,", comma(i), s.role, s.dtype, s.row_interleave);
            put_shape(s.shape, s.rank);
            printf("%" PRIu64 ",%" PRIu64 "]", s.offset, s.size);
        }
        printf("]]");
    }
    printf("]");
}

static void put_tables(const colibri_file *file)
{
    printf(",\"dtypes\":[");
    for (uint32_t n = 0; n < file->n_dtypes; n++) {
        colibri_dtype d;
        colibri_get_dtype(file, n, &d);
        printf("%s[", comma(n));
        put_text(d.name, d.name_length);
        printf(",%" PRId32 ",%" PRIu32 ",%" PRIu32 "]", d.ggml_id, d.block_elements, d.block_bytes);
    }
    printf("]");
    put_layouts(file);
    printf(",\"layers\":[");
    for (uint32_t n = 0; n < file->n_layers; n++) {
        uint32_t layout;
        colibri_layer_layout(file, n, &layout);
        printf("%s%" PRId32, comma(n), (int32_t)layout);
    }
    printf("],\"packs\":[");
    for (uint32_t n = 0; n <= file->n_layers; n++) {
        colibri_extent pack;
        colibri_get_pack(file, n < file->n_layers ? n : COLIBRI_NONE, &pack);
        printf("%s[%" PRIu64 ",%" PRIu64 "]", comma(n), pack.offset, pack.size);
    }
    printf("],\"tensors\":[");
    for (uint32_t n = 0; n < file->n_tensors; n++) {
        colibri_tensor t;
        colibri_get_tensor(file, n, &t);
        printf("%s[", comma(n));
        put_text(t.name, t.name_length);
        printf(",%" PRId32 ",%u,%u,", (int32_t)t.layer, t.dtype, t.row_interleave);
        put_shape(t.shape, t.rank);
        printf("%" PRIu64 ",%" PRIu64 ",%" PRIu64 "]", t.offset, t.size, t.checksum);
    }
    printf("],\"files\":[");
    for (uint32_t n = 0; n < file->n_files; n++) {
        colibri_embedded e;
        colibri_get_file(file, n, &e);
        printf("%s[", comma(n));
        put_text(e.name, e.name_length);
        printf(",%" PRIu64 ",%" PRIu64 ",%" PRIu64 "]", e.offset, e.size, e.checksum);
    }
    printf("],\"volumes\":[");
    for (uint32_t n = 1; n <= file->n_volumes; n++) {
        colibri_volume v;
        colibri_get_volume(file, n, &v);
        printf("%s[", comma(n - 1));
        put_text(v.label, v.label_length);
        printf(",%" PRIu64 ",", v.file_size);
        put_hex(v.digest, 16);
        printf(",%" PRIu64 ",%" PRIu64 "]", v.data_offset, v.data_length);
    }
    printf("]");
}

/* Every expert's facts, hashed: one number says whether two readers found the same. */
static void put_experts(const colibri_file *file)
{
    uint64_t n = (uint64_t)file->n_layers * file->n_experts, used = 0;
    uint8_t *bytes = (uint8_t *)calloc(n ? n : 1, 48);
    if (!bytes)
        exit(2);
    for (uint64_t i = 0; i < n; i++) {
        colibri_block block;
        uint64_t facts[6];
        if (colibri_expert(file, (uint32_t)(i / file->n_experts), (uint32_t)(i % file->n_experts), &block) != 0)
            continue;
        facts[0] = block.offset;
        facts[1] = block.size;
        facts[2] = block.padded;
        facts[3] = block.checksum;
        facts[4] = block.layout;
        facts[5] = block.volume;
        memcpy(bytes + 48 * used++, facts, 48);
    }
    printf(",\"n_present\":%" PRIu64 ",\"experts\":%" PRIu64, used, colibri_xxh3_64(bytes, 48 * used, 0));
    free(bytes);
}

static int n_damages;

static void put_damage(const char *kind, uint32_t a, uint32_t b, int code)
{
    if (code && code != COLIBRI_E_NO_SUCH_EXPERT)
        printf("%s[\"%s\",%" PRIu32 ",%" PRIu32 ",\"%s\"]", n_damages++ ? "," : "", kind, a, b, colibri_strerror(code));
}

static void put_damages(const colibri_file *file)
{
    printf(",\"damage\":[");
    n_damages = 0;
    for (uint32_t layer = 0; layer < file->n_layers; layer++)
        for (uint32_t expert = 0; expert < file->n_experts; expert++) {
            colibri_block block;
            void *buffer;
            if (colibri_expert(file, layer, expert, &block) != 0)
                continue;
            buffer = malloc(block.size);
            put_damage("block", layer, expert, colibri_read_block(file, layer, expert, buffer, block.size, 0, NULL));
            free(buffer);
        }
    for (uint32_t n = 0; n < file->n_tensors; n++) {
        colibri_tensor t;
        void *buffer;
        colibri_get_tensor(file, n, &t);
        buffer = malloc(t.size ? t.size : 1);
        put_damage("tensor", n, 0, colibri_read_tensor(file, n, buffer, t.size, 0, NULL));
        free(buffer);
    }
    for (uint32_t n = 0; n < file->n_files; n++) {
        colibri_embedded e;
        void *buffer;
        colibri_get_file(file, n, &e);
        buffer = malloc(e.size ? e.size : 1);
        put_damage("file", n, 0, colibri_read_file(file, n, buffer, e.size, 0, NULL));
        free(buffer);
    }
    printf("]");
}

static void put_file(const colibri_file *file)
{
    uint32_t n_warnings;
    const colibri_warning *warnings = colibri_warnings(file, &n_warnings);
    printf("{\"code\":\"OK\",\"uuid\":");
    put_hex(file->uuid, 16);
    printf(",\"file_size\":%" PRIu64 ",\"n_layers\":%" PRIu32 ",\"n_experts\":%" PRIu32 ",\"alignment\":%" PRIu64,
           file->file_size, file->n_layers, file->n_experts, file->alignment);
    printf(",\"features\":[%" PRIu64 ",%" PRIu64 ",%" PRIu64 "]", file->incompat, file->ro_compat, file->compat);
    put_tables(file);
    put_experts(file);
    printf(",\"metadata\":%" PRIu64, colibri_xxh3_64(file->metadata, file->metadata_length, 0));
    if (file->file_size < (64u << 20) && (!file->n_volumes || colibri_descriptor(file, 1, 0) >= 0))
        put_damages(file);
    printf(",\"warnings\":[");
    for (uint32_t i = 0; i < n_warnings; i++) {
        char text[100];
        colibri_warning_text(&warnings[i], text, sizeof text);
        printf("%s\"%s\"", comma(i), text);
    }
    printf("]}\n");
}

static int run_open(int argc, char **argv)
{
    colibri_options options;
    char line[8192];
    memset(&options, 0, sizeof options);
    if (argc > 0 && strcmp(argv[0], "--without-volumes") == 0) {
        options.flags |= COLIBRI_WITHOUT_VOLUMES;
        argc--, argv++;
    }
    options.volume_folders = (const char *const *)argv;
    options.n_volume_folders = (size_t)argc;
    while (fgets(line, sizeof line, stdin)) {
        colibri_file file;
        line[strcspn(line, "\n")] = 0;
        if (colibri_open(&file, line, &options) == 0) {
            put_file(&file);
        } else {
            if (!file.message[0] || strlen(file.message) >= sizeof file.message)
                return 3;
            printf("{\"code\":\"%s\",\"errno\":%d}\n", colibri_strerror(file.code), file.os_errno);
        }
        colibri_close(&file);
        colibri_close(&file);
    }
    return 0;
}

static int run_hash(int argc, char **argv)
{
    FILE *stream = fopen(argv[0], "rb");
    uint8_t *bytes = (uint8_t *)malloc(1 << 20);
    size_t size;
    if (!stream || !bytes)
        return 2;
    size = fread(bytes, 1, 1 << 20, stream);
    fclose(stream);
    for (int i = 1; i < argc; i++) {
        uint64_t seed = strtoull(argv[i], NULL, 0);
        for (size_t n = 0; n <= size; n += n < 2048 ? 1 : n < 20000 ? 997 : 77777) {
            uint8_t digest[16], *copy = (uint8_t *)malloc(n ? n : 1); /* so that reading past it is caught */
            if (!copy)
                return 2;
            memcpy(copy, bytes, n);
            colibri_xxh3_128(copy, n, seed, digest);
            printf("[%" PRIu64 ",%zu,%" PRIu64 ",", seed, n, colibri_xxh3_64(copy, n, seed));
            put_hex(digest, 16);
            printf("]\n");
            free(copy);
        }
    }
    free(bytes);
    return 0;
}

static void put_io(const char *name, int code, const colibri_io *io)
{
    printf("[\"%s\",\"%s\",%" PRIu32 ",%" PRId32 "]\n", name, colibri_strerror(code), io->mode, io->direct_errno);
}

static int run_read(char **argv)
{
    colibri_file file;
    colibri_block block;
    colibri_io io;
    uint32_t layer = (uint32_t)atoi(argv[1]), expert = (uint32_t)atoi(argv[2]);
    uint8_t *buffer;
    if (colibri_open(&file, argv[0], NULL) != 0 || colibri_expert(&file, layer, expert, &block) != 0)
        return 2;
    buffer = (uint8_t *)aligned_alloc(4096, block.padded + 4096);
    if (!buffer)
        return 2;
    put_io("aligned", colibri_read_block(&file, layer, expert, buffer, block.padded, 0, &io), &io);
    put_io("unaligned", colibri_read_block(&file, layer, expert, buffer + 1, block.padded, 0, &io), &io);
    put_io("tight", colibri_read_block(&file, layer, expert, buffer, block.size, 0, &io), &io);
    put_io("buffered", colibri_read_block(&file, layer, expert, buffer, block.padded, COLIBRI_BUFFERED, &io), &io);
    put_io("small", colibri_read_block(&file, layer, expert, buffer, block.size - 1, 0, &io), &io);
    buffer[0] ^= 1;
    put_io("checked", colibri_check_block(&file, layer, expert, buffer), &io);
    put_io("absent", colibri_read_block(&file, layer, file.n_experts, buffer, block.padded, 0, &io), &io);
    if (argv[3] && truncate(argv[0], (off_t)(block.offset + 10)) == 0)
        put_io("cut", colibri_read_block(&file, layer, expert, buffer, block.padded, 0, &io), &io);
    free(buffer);
    colibri_close(&file);
    return 0;
}

static int run_plain(char **argv)
{
    colibri_file file;
    colibri_block block;
    colibri_segment segment;
    uint8_t *stored, *plain;
    int code;
    if (colibri_open(&file, argv[0], NULL) != 0 || colibri_expert(&file, 0, 0, &block) != 0 ||
        colibri_find_segment(&file, block.layout, (uint32_t)atoi(argv[1]), &segment) != 0)
        return 2;
    stored = (uint8_t *)malloc(block.size);
    plain = (uint8_t *)malloc(segment.size);
    if (!stored || !plain)
        return 2;
    code = colibri_read_block(&file, 0, 0, stored, block.size, 0, NULL);
    if (!code)
        code = colibri_plain(&file, segment.dtype, segment.row_interleave, segment.shape, segment.size,
                             stored + segment.offset, plain);
    if (!code) {
        put_hex(plain, segment.size);
        printf("\n");
    }
    free(stored);
    free(plain);
    colibri_close(&file);
    return code ? 3 : 0;
}

static uint64_t n_left; /* allocations before the one that fails */

static void *allocate_some(void *context, size_t size)
{
    (void)context;
    return n_left-- == 0 ? NULL : malloc(size);
}

static void release_some(void *context, void *pointer, size_t size)
{
    (void)context;
    memset(pointer, 0xA5, size); /* a size that is too large is caught here */
    free(pointer);
}

static int run_memory(const char *path)
{
    colibri_options options;
    memset(&options, 0, sizeof options);
    options.allocate = allocate_some;
    options.release = release_some;
    for (uint64_t n = 0; n < 1000; n++) {
        colibri_file file;
        int code;
        n_left = n;
        code = colibri_open(&file, path, &options);
        colibri_close(&file);
        if (code != COLIBRI_E_NO_MEMORY) {
            printf("[%" PRIu64 ",\"%s\"]\n", n, colibri_strerror(code));
            return 0;
        }
    }
    return 3;
}

int main(int argc, char **argv)
{
    const char *command = argc > 1 ? argv[1] : "";
    if (strcmp(command, "open") == 0)
        return run_open(argc - 2, argv + 2);
    if (strcmp(command, "hash") == 0 && argc > 2)
        return run_hash(argc - 2, argv + 2);
    if (strcmp(command, "read") == 0 && argc > 4)
        return run_read(argv + 2);
    if (strcmp(command, "plain") == 0 && argc > 3)
        return run_plain(argv + 2);
    if (strcmp(command, "memory") == 0 && argc > 2)
        return run_memory(argv[2]);
    if (strcmp(command, "codes") == 0) {
        for (int code = -300; code <= 300; code++)
            if (code < 0 && strcmp(colibri_strerror(code), "UNKNOWN") != 0)
                printf("[%d,\"%s\"]\n", -code, colibri_strerror(code));
        return 0;
    }
    return 2;
}
