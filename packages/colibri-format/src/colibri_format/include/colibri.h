/* colibri.h: a reader of `.colibri` files, version 1, in one header.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Opens, validates, looks up and reads what `spec/colibri-1.md` describes; section numbers below are
 * those of that document. C11 or C++11 and later, POSIX, no dependency. In ONE source file write
 *
 *     #define COLIBRI_IMPLEMENTATION
 *     #include "colibri.h"          // before the system's headers: it asks them for O_DIRECT
 *
 * and include it plainly elsewhere. `#define COLIBRI_API static` keeps everything in one file.
 * `COLIBRI_USE_SYSTEM_XXHASH` takes the system's <xxhash.h> (link with -lxxhash, or define
 * XXH_INLINE_ALL) for long inputs instead of the code below; `COLIBRI_PORTABLE` leaves out vector
 * instructions and 128-bit integers.
 *
 * Results: 0, or a negative code: minus the number of section 12 (COLIBRI_E_BAD_MAGIC is -2), or
 * one of the reader's own from -201 on. `colibri_strerror` names both.
 *
 * Memory: the caller owns the `colibri_file` and every buffer. `colibri_open` allocates what it
 * keeps (the bytes of index, checksums, tables and metadata, and two sorted lists of names) through
 * the caller's allocator or malloc; sizes are checked against the size of the file first.
 * `colibri_close` releases it. Nothing else allocates, and pointers that the functions hand out
 * stay valid until then.
 *
 * Threads: `colibri_open` and `colibri_close` need the handle alone; every other function takes it
 * as const and may be called from any number of threads. There are no mutable globals.
 */
#ifndef COLIBRI_H
#define COLIBRI_H

#if defined(COLIBRI_IMPLEMENTATION) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* O_DIRECT, pread */
#endif
#if defined(COLIBRI_IMPLEMENTATION) && !defined(_FILE_OFFSET_BITS)
#define _FILE_OFFSET_BITS 64
#endif

#include <stddef.h>
#include <stdint.h>

#ifndef COLIBRI_API
#define COLIBRI_API extern
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Numbers and names of section 12. */
#define COLIBRI_CODES(X)          \
    X(FILE_TOO_SMALL, 1)          \
    X(BAD_MAGIC, 2)               \
    X(UNSUPPORTED_VERSION, 3)     \
    X(SUPERBLOCK_CHECKSUM, 4)     \
    X(UNSUPPORTED_FEATURE, 5)     \
    X(TRUNCATED, 6)               \
    X(TRAILING_BYTES, 7)          \
    X(SUPERBLOCK_CONFLICT, 8)     \
    X(RESERVED_NOT_ZERO, 9)       \
    X(BAD_ALIGNMENT, 10)          \
    X(BAD_GEOMETRY, 11)           \
    X(REGION_LENGTH, 12)          \
    X(REGION_PLACEMENT, 13)       \
    X(REGION_CHECKSUM, 14)        \
    X(TABLE_COUNT, 20)            \
    X(TABLE_LENGTH, 21)           \
    X(BAD_STRING, 22)             \
    X(DUPLICATE_NAME, 23)         \
    X(BAD_DTYPE, 24)              \
    X(BAD_LAYOUT, 25)             \
    X(BAD_SEGMENT, 26)            \
    X(BAD_SHAPE, 27)              \
    X(SIZE_MISMATCH, 28)          \
    X(BAD_INTERLEAVE, 29)         \
    X(BAD_LAYER, 30)              \
    X(BAD_PACK, 31)               \
    X(BAD_TENSOR, 32)             \
    X(BAD_FILE_ENTRY, 33)         \
    X(BLOCK_MISALIGNED, 40)       \
    X(BLOCK_OUT_OF_BOUNDS, 41)    \
    X(BLOCK_SIZE, 42)             \
    X(ABSENT_NOT_ZERO, 43)        \
    X(EXTENT_OVERLAP, 44)         \
    X(BAD_EXPERT_LAYOUT, 45)      \
    X(BAD_VOLUME, 46)             \
    X(VOLUME_DIGEST, 47)          \
    X(VOLUME_MISSING, 48)         \
    X(VOLUME_MISMATCH, 49)        \
    X(METADATA_INVALID, 50)       \
    X(METADATA_NOT_CANONICAL, 51) \
    X(BLOCK_CHECKSUM, 60)         \
    X(TENSOR_CHECKSUM, 61)        \
    X(FILE_CHECKSUM, 62)          \
    X(PADDING_NOT_ZERO, 63)       \
    X(SHORT_READ, 64)             \
    X(BAD_MODEL, 70)

/* This reader's own: OS_ERROR is the kernel's, its errno is in `os_errno`. */
#define COLIBRI_READER_CODES(X) \
    X(OS_ERROR, 201)            \
    X(NO_MEMORY, 202)           \
    X(NOT_A_FILE, 203)          \
    X(NO_SUCH_LAYER, 204)       \
    X(NO_SUCH_EXPERT, 205)      \
    X(NO_SUCH_TENSOR, 206)      \
    X(NO_SUCH_FILE, 207)        \
    X(NO_SUCH_VOLUME, 208)      \
    X(NO_SUCH_RECORD, 209)      \
    X(MIXED_LAYER, 210)         \
    X(BAD_BUFFER, 211)

#define COLIBRI_I_ENUMERATOR(name, number) COLIBRI_E_##name = -(number),
enum colibri_code {
    COLIBRI_OK = 0,
    COLIBRI_CODES(COLIBRI_I_ENUMERATOR) COLIBRI_READER_CODES(COLIBRI_I_ENUMERATOR)
        COLIBRI_I_LAST_CODE = -255
};
#undef COLIBRI_I_ENUMERATOR

#define COLIBRI_PAGE 4096u
#define COLIBRI_NONE 0xFFFFFFFFu         /* no layout; no layer; not found */
#define COLIBRI_MIXED 0xFFFFFFFEu        /* the layer's experts differ in layout */
#define COLIBRI_DIRECT_ALIGNMENT 4096u   /* of a buffer that is to be read into directly */
#define COLIBRI_MIXED_LAYOUTS UINT64_C(1) /* incompat features, section 15 */
#define COLIBRI_STRIPED UINT64_C(2)

enum { /* roles of segments: 16 x matrix + part, section 7.3 */
    COLIBRI_GATE = 0x10,
    COLIBRI_GATE_BIAS = 0x11,
    COLIBRI_GATE_SCALE = 0x12,
    COLIBRI_UP = 0x20,
    COLIBRI_UP_BIAS = 0x21,
    COLIBRI_UP_SCALE = 0x22,
    COLIBRI_DOWN = 0x30,
    COLIBRI_DOWN_BIAS = 0x31,
    COLIBRI_DOWN_SCALE = 0x32
};

enum { /* regions, section 4 */
    COLIBRI_REGION_INDEX = 0,
    COLIBRI_REGION_CHECKSUMS = 1,
    COLIBRI_REGION_EXPERT_LAYOUTS = 2,
    COLIBRI_REGION_VOLUME_MAP = 3,
    COLIBRI_REGION_TABLES = 4,
    COLIBRI_REGION_METADATA = 5,
    COLIBRI_REGION_EXTENSION = 6,
    COLIBRI_REGION_DATA = 7
};

enum { /* flags of colibri_options */
    COLIBRI_WITHOUT_VOLUMES = 1, /* leave out step 10: look at a striped file without them */
    COLIBRI_WITHOUT_DIRECT = 2   /* open no second descriptor for direct reads */
};

enum { /* flags of reading functions */
    COLIBRI_UNCHECKED = 1, /* leave out the checksum */
    COLIBRI_BUFFERED = 2   /* through the page cache, however the buffer is aligned */
};

typedef struct colibri_options {
    const char *const *volume_folders; /* n_volume_folders paths; searched after the file's own folder */
    size_t n_volume_folders;
    uint32_t flags; /* COLIBRI_WITHOUT_... */
    /* Both or neither (malloc, free). allocate: `size` bytes (never 0), aligned for any type, or
     * NULL. release: the same pointer and size, never NULL. */
    void *(*allocate)(void *context, size_t size);
    void (*release)(void *context, void *pointer, size_t size);
    void *context; /* handed to both as it is */
} colibri_options;

/* One expert's block: read `size` bytes (or `padded`, a multiple of the alignment) at `offset` of
 * file `volume` (0: the .colibri file itself). */
typedef struct colibri_block {
    uint64_t offset;
    uint64_t size;
    uint64_t padded;
    uint64_t checksum; /* XXH3-64 of the `size` bytes, seed layer x 2^32 + expert */
    uint32_t layout;   /* number for colibri_get_layout */
    uint32_t volume;
} colibri_block;

typedef struct colibri_dtype {
    const char *name; /* name_length bytes of UTF-8, not terminated */
    uint32_t name_length;
    int32_t ggml_id; /* -1: ggml has no such type */
    uint32_t block_elements;
    uint32_t block_bytes;
} colibri_dtype;

typedef struct colibri_layout {
    uint32_t first_segment; /* number for colibri_get_segment */
    uint32_t n_segments;    /* 1 to 64 */
    uint64_t block_size;
} colibri_layout;

typedef struct colibri_segment {
    uint64_t offset; /* from the start of the block, a multiple of 64 */
    uint64_t size;
    uint64_t shape[4]; /* `rank` lengths in C order (rows, columns), the rest 0 */
    uint16_t role;
    uint16_t dtype; /* number for colibri_get_dtype */
    uint16_t row_interleave;
    uint16_t rank; /* 1 to 4 */
} colibri_segment;

typedef struct colibri_tensor {
    const char *name; /* name_length bytes of UTF-8, not terminated */
    uint32_t name_length;
    uint32_t layer; /* COLIBRI_NONE: of no layer */
    uint64_t offset;
    uint64_t size;
    uint64_t shape[4]; /* `rank` lengths in C order, the rest 0 */
    uint64_t checksum;
    uint16_t dtype;
    uint16_t row_interleave;
    uint16_t rank;
} colibri_tensor;

/* An embedded file. */
typedef struct colibri_embedded {
    const char *name; /* name_length bytes of UTF-8, not terminated; a plain file name */
    uint32_t name_length;
    uint64_t offset;
    uint64_t size;
    uint64_t checksum;
} colibri_embedded;

typedef struct colibri_volume {
    const char *label; /* label_length bytes of UTF-8, not terminated */
    uint32_t label_length;
    uint8_t digest[16];
    uint64_t file_size;
    uint64_t data_offset;
    uint64_t data_length;
    const char *path; /* terminated; where it was found, NULL if opened without volumes */
} colibri_volume;

typedef struct colibri_extent {
    uint64_t offset;
    uint64_t size;
} colibri_extent;

enum colibri_place {
    COLIBRI_SUPERBLOCK_START = 1,
    COLIBRI_SUPERBLOCK_END = 2,
    COLIBRI_REGION_START = 3, /* number: the region */
    COLIBRI_REGION_END = 6,   /* number: the region */
    COLIBRI_VOLUME_START = 4, /* number: the volume, from 1 */
    COLIBRI_VOLUME_END = 5
};

/* Damage that was made good from the other copy: repair the file. */
typedef struct colibri_warning {
    uint32_t place; /* colibri_place */
    uint32_t number;
} colibri_warning;

/* How bytes came: nothing falls back in silence. */
enum colibri_io_mode {
    COLIBRI_IO_DIRECT = 1,    /* past the page cache */
    COLIBRI_IO_ASKED = 2,     /* buffered, as the flags demand, or because nothing but blocks is read directly */
    COLIBRI_IO_UNALIGNED = 3, /* buffered: the buffer is not aligned or holds less than `padded` bytes */
    COLIBRI_IO_REFUSED = 4    /* buffered: the kernel refuses direct reads of this file, see direct_errno */
};

typedef struct colibri_io {
    uint32_t mode;        /* colibri_io_mode */
    int32_t direct_errno; /* why the kernel refused direct reads; 0: it did not */
    int32_t os_errno;     /* with COLIBRI_E_OS_ERROR: the kernel's */
} colibri_io;

/* Fields of the implementation: of no use outside. */
typedef struct colibri_i_handle {
    int fd;        /* -1: none */
    int direct_fd; /* -1: none */
    int32_t direct_errno;
    char *path; /* NULL for the file itself */
} colibri_i_handle;

typedef struct colibri_i_name {
    const char *text;
    uint32_t length;
    uint32_t number; /* of its record */
} colibri_i_name;

/* An open file. Read the first group, leave the second alone. */
typedef struct colibri_file {
    uint64_t file_size;
    uint64_t alignment; /* bytes, 2^12 to 2^21 */
    uint64_t incompat, ro_compat, compat;
    uint32_t n_layers, n_experts;
    uint32_t n_dtypes, n_layouts, n_segments, n_tensors, n_files, n_volumes;
    uint8_t uuid[16];
    colibri_extent data;      /* the data region */
    const uint8_t *index;     /* [n_layers][n_experts] of {u64 offset, u64 size}, little-endian, 8-aligned */
    const uint8_t *checksums; /* [n_layers][n_experts] of u64, little-endian, 8-aligned */
    const char *metadata;     /* metadata_length bytes of canonical JSON, not terminated */
    uint64_t metadata_length;
    int32_t code;      /* what colibri_open returned */
    int32_t os_errno;  /* with COLIBRI_E_OS_ERROR */
    char message[256]; /* terminated: where, what was found, what is required; empty after success */

    const uint8_t *i_expert_layouts, *i_volume_map; /* [n_layers][n_experts] of u16, or NULL */
    const uint8_t *i_dtypes, *i_layouts, *i_segments, *i_layers, *i_packs, *i_tensors, *i_files, *i_volumes;
    const char *i_strings;
    uint64_t i_regions[8][4]; /* offset, copy_offset, length, checksum */
    uint8_t *i_bytes[7];      /* each region's bytes */
    size_t i_sizes[7];        /* what was allocated for them */
    colibri_i_name *i_tensor_names, *i_file_names; /* n_tensors, n_files, sorted */
    colibri_i_handle *i_handles;                   /* i_n_handles: the file, then its volumes */
    colibri_warning *i_warnings;                   /* room for i_room_warnings */
    uint32_t i_n_handles, i_n_warnings, i_room_warnings;
    uint32_t i_align_log2;
    void *(*i_allocate)(void *context, size_t size);
    void (*i_release)(void *context, void *pointer, size_t size);
    void *i_context;
} colibri_file;

/* Opens and validates `path` (terminated); `options` NULL: all zero. Whatever comes back, `file` may
 * be closed; after a failure it holds nothing but code, os_errno and message. */
COLIBRI_API int colibri_open(colibri_file *file, const char *path, const colibri_options *options);

/* Closes descriptors and releases memory; a second call does nothing. */
COLIBRI_API void colibri_close(colibri_file *file);

/* The name of a code (of either sign) as in section 12: "BAD_MAGIC"; "OK", "UNKNOWN". Static text. */
COLIBRI_API const char *colibri_strerror(int code);

/* Below, whatever a function should have handed out is all zero (numbers: COLIBRI_NONE) after a
 * failure. */

/* Damage met while opening, `*n` records in order of finding; may be NULL if there are none. */
COLIBRI_API const colibri_warning *colibri_warnings(const colibri_file *file, uint32_t *n);

/* Writes the warning in words, terminated, into `text` of `size` bytes. */
COLIBRI_API void colibri_warning_text(const colibri_warning *warning, char *text, size_t size);

/* The block of (layer, expert). NO_SUCH_EXPERT if out of range or absent. One multiplication. */
COLIBRI_API int colibri_expert(const colibri_file *file, uint32_t layer, uint32_t expert, colibri_block *out);

/* The layout's number of all blocks of `layer`; COLIBRI_NONE if it has no experts. MIXED_LAYER where
 * they differ: ask colibri_expert. NO_SUCH_LAYER. */
COLIBRI_API int colibri_layer_layout(const colibri_file *file, uint32_t layer, uint32_t *layout);

/* Records by number, below the count in `file`; NO_SUCH_RECORD past it. Volumes count from 1. */
COLIBRI_API int colibri_get_dtype(const colibri_file *file, uint32_t number, colibri_dtype *out);
COLIBRI_API int colibri_get_layout(const colibri_file *file, uint32_t number, colibri_layout *out);
COLIBRI_API int colibri_get_segment(const colibri_file *file, uint32_t number, colibri_segment *out);
COLIBRI_API int colibri_get_tensor(const colibri_file *file, uint32_t number, colibri_tensor *out);
COLIBRI_API int colibri_get_file(const colibri_file *file, uint32_t number, colibri_embedded *out);
COLIBRI_API int colibri_get_volume(const colibri_file *file, uint32_t number, colibri_volume *out);

/* The segment of `layout` with `role`. NO_SUCH_RECORD if the blocks have none. */
COLIBRI_API int colibri_find_segment(const colibri_file *file, uint32_t layout, uint32_t role, colibri_segment *out);

/* The number of the tensor or embedded file `name` (terminated), by binary search. NO_SUCH_TENSOR,
 * NO_SUCH_FILE. */
COLIBRI_API int colibri_find_tensor(const colibri_file *file, const char *name, uint32_t *number);
COLIBRI_API int colibri_find_file(const colibri_file *file, const char *name, uint32_t *number);

/* The extent that holds the tensors of `layer` (COLIBRI_NONE: of no layer), {0, 0} if there are
 * none: one read loads them all. NO_SUCH_LAYER. */
COLIBRI_API int colibri_get_pack(const colibri_file *file, uint32_t layer, colibri_extent *out);

/* Reads a block of (layer, expert) and checks it. `buffer` has `buffer_size` bytes, at least the
 * block's `size`; if it is aligned to COLIBRI_DIRECT_ALIGNMENT and has at least `padded` bytes,
 * the read is direct and brings the padding too. `io` (may be NULL) tells how it went.
 * NO_SUCH_EXPERT, NO_SUCH_VOLUME (opened without), BAD_BUFFER, OS_ERROR, SHORT_READ, BLOCK_CHECKSUM. */
COLIBRI_API int colibri_read_block(const colibri_file *file, uint32_t layer, uint32_t expert, void *buffer,
                                   uint64_t buffer_size, uint32_t flags, colibri_io *io);

/* Reads tensor or embedded file `number` as stored and checks it; `buffer` has at least its size.
 * NO_SUCH_RECORD, BAD_BUFFER, OS_ERROR, SHORT_READ, TENSOR_CHECKSUM or FILE_CHECKSUM. */
COLIBRI_API int colibri_read_tensor(const colibri_file *file, uint32_t number, void *buffer, uint64_t buffer_size,
                                    uint32_t flags, colibri_io *io);
COLIBRI_API int colibri_read_file(const colibri_file *file, uint32_t number, void *buffer, uint64_t buffer_size,
                                  uint32_t flags, colibri_io *io);

/* For engines that read by themselves: the descriptor of the file (volume 0) or of a volume, for
 * direct reads if `is_direct`; -1 if there is none. Whether bytes in memory (a block's `size`, a
 * tensor's) match their checksum: NO_SUCH_..., BLOCK_CHECKSUM, TENSOR_CHECKSUM. */
COLIBRI_API int colibri_descriptor(const colibri_file *file, uint32_t volume, int is_direct);
COLIBRI_API int colibri_check_block(const colibri_file *file, uint32_t layer, uint32_t expert, const void *bytes);
COLIBRI_API int colibri_check_tensor(const colibri_file *file, uint32_t number, const void *bytes);

/* Copies `size` bytes of a segment or tensor, `stored` with `row_interleave`, to `plain` with the
 * rows as ggml has them (section 9). Buffers of any alignment that do not overlap; shape as in the
 * record. NO_SUCH_RECORD for an unknown dtype, BAD_INTERLEAVE where section 9 defines nothing. */
COLIBRI_API int colibri_plain(const colibri_file *file, uint32_t dtype, uint32_t row_interleave,
                              const uint64_t shape[4], uint64_t size, const void *stored, void *plain);

/* XXH3-64 of `size` bytes of any alignment. */
COLIBRI_API uint64_t colibri_xxh3_64(const void *data, size_t size, uint64_t seed);

/* XXH3-128 as 16 bytes in big-endian order. */
COLIBRI_API void colibri_xxh3_128(const void *data, size_t size, uint64_t seed, uint8_t digest[16]);

#ifdef __cplusplus
}
#endif

#endif /* COLIBRI_H */

#if defined(COLIBRI_IMPLEMENTATION) && !defined(COLIBRI_IMPLEMENTED)
#define COLIBRI_IMPLEMENTED

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>
#ifdef COLIBRI_USE_SYSTEM_XXHASH
#include <xxhash.h>
#endif
#if defined(__linux__) && !defined(O_DIRECT)
#error "include colibri.h before the system's headers, or compile with -D_GNU_SOURCE"
#endif
#if !defined(COLIBRI_PORTABLE) && defined(__x86_64__) && defined(__GNUC__)
#define COLIBRI_I_X86 1
#include <immintrin.h>
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef char colibri_i_off_t_has_64_bits[sizeof(off_t) >= 8 ? 1 : -1];

#define COLIBRI_I_LIMIT (UINT64_C(1) << 62) /* every size and offset is below, section 16 */

/* Little-endian fields. */

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define COLIBRI_I_FIELD(type, name)                    \
    static inline type colibri_i_##name(const void *p) \
    {                                                  \
        type value;                                    \
        memcpy(&value, p, sizeof value);               \
        return value;                                  \
    }
#else
#define COLIBRI_I_FIELD(type, name)                                      \
    static inline type colibri_i_##name(const void *p)                   \
    {                                                                    \
        type value = 0;                                                  \
        for (size_t i = sizeof value; i-- > 0;)                          \
            value = (type)((uint64_t)value << 8 | ((const uint8_t *)p)[i]); \
        return value;                                                    \
    }
#endif
COLIBRI_I_FIELD(uint16_t, u16)
COLIBRI_I_FIELD(uint32_t, u32)
COLIBRI_I_FIELD(uint64_t, u64)
#undef COLIBRI_I_FIELD

static inline void colibri_i_put32(uint8_t *p, uint32_t value)
{
    for (int i = 0; i < 4; i++)
        p[i] = (uint8_t)(value >> 8 * i);
}

static inline void colibri_i_put64(uint8_t *p, uint64_t value)
{
    for (int i = 0; i < 8; i++)
        p[i] = (uint8_t)(value >> 8 * i);
}

/* The least multiple of `multiple`, a power of two, that is not below `value` < 2^63. */
static inline uint64_t colibri_i_pad(uint64_t value, uint64_t multiple)
{
    return (value + multiple - 1) & ~(multiple - 1);
}

static int colibri_i_is_zero(const uint8_t *p, uint64_t size)
{
    for (uint64_t i = 0; i < size; i++)
        if (p[i])
            return 0;
    return 1;
}

/* XXH3, after the algorithm's description, xxHash's doc/xxhash_spec.md 0.2.0; its names of steps. */

#define COLIBRI_I_P32_1 UINT64_C(0x9E3779B1)
#define COLIBRI_I_P32_2 UINT64_C(0x85EBCA77)
#define COLIBRI_I_P32_3 UINT64_C(0xC2B2AE3D)
#define COLIBRI_I_P64_1 UINT64_C(0x9E3779B185EBCA87)
#define COLIBRI_I_P64_2 UINT64_C(0xC2B2AE3D27D4EB4F)
#define COLIBRI_I_P64_3 UINT64_C(0x165667B19E3779F9)
#define COLIBRI_I_P64_4 UINT64_C(0x85EBCA77C2B2AE63)
#define COLIBRI_I_P64_5 UINT64_C(0x27D4EB2F165667C5)
#define COLIBRI_I_MX1 UINT64_C(0x165667919E3779F9)
#define COLIBRI_I_MX2 UINT64_C(0x9FB21C651E98DF25)

static const uint8_t colibri_i_secret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

typedef struct colibri_i_u128 {
    uint64_t low;
    uint64_t high;
} colibri_i_u128;

static inline colibri_i_u128 colibri_i_multiply(uint64_t a, uint64_t b)
{
    colibri_i_u128 result;
#if defined(__SIZEOF_INT128__) && !defined(COLIBRI_PORTABLE)
    __extension__ unsigned __int128 product = (unsigned __int128)a * b;
    result.low = (uint64_t)product;
    result.high = (uint64_t)(product >> 64);
#else
    uint64_t a0 = a & 0xFFFFFFFF, a1 = a >> 32, b0 = b & 0xFFFFFFFF, b1 = b >> 32;
    uint64_t middle = a1 * b0 + (a0 * b0 >> 32);
    uint64_t other = a0 * b1 + (middle & 0xFFFFFFFF);
    result.low = a * b;
    result.high = a1 * b1 + (middle >> 32) + (other >> 32);
#endif
    return result;
}

static inline uint64_t colibri_i_fold(uint64_t a, uint64_t b)
{
    colibri_i_u128 product = colibri_i_multiply(a, b);
    return product.low ^ product.high;
}

static inline uint32_t colibri_i_swap32(uint32_t x)
{
    return x >> 24 | (x >> 8 & 0xFF00) | (x << 8 & 0xFF0000) | x << 24;
}

static inline uint64_t colibri_i_swap64(uint64_t x)
{
    return (uint64_t)colibri_i_swap32((uint32_t)x) << 32 | colibri_i_swap32((uint32_t)(x >> 32));
}

static inline uint64_t colibri_i_rotate(uint64_t x, int n)
{
    return x << n | x >> (64 - n);
}

static inline uint64_t colibri_i_avalanche(uint64_t x)
{
    x = (x ^ x >> 37) * COLIBRI_I_MX1;
    return x ^ x >> 32;
}

static inline uint64_t colibri_i_avalanche64(uint64_t x)
{
    x = (x ^ x >> 33) * COLIBRI_I_P64_2;
    x = (x ^ x >> 29) * COLIBRI_I_P64_3;
    return x ^ x >> 32;
}

/* The xor of the secret's words at `offset` and `offset` + 8. */
static inline uint64_t colibri_i_key(size_t offset)
{
    return colibri_i_u64(colibri_i_secret + offset) ^ colibri_i_u64(colibri_i_secret + offset + 8);
}

static inline uint64_t colibri_i_mix(const uint8_t *p, size_t offset, uint64_t seed)
{
    return colibri_i_fold(colibri_i_u64(p) ^ (colibri_i_u64(colibri_i_secret + offset) + seed),
                          colibri_i_u64(p + 8) ^ (colibri_i_u64(colibri_i_secret + offset + 8) - seed));
}

static inline uint32_t colibri_i_combine3(const uint8_t *p, size_t size)
{
    return (uint32_t)p[size - 1] | (uint32_t)size << 8 | (uint32_t)p[0] << 16 | (uint32_t)p[size >> 1] << 24;
}

static uint64_t colibri_i_small64(const uint8_t *p, size_t size, uint64_t seed)
{
    if (size > 8) {
        uint64_t low = (colibri_i_key(24) + seed) ^ colibri_i_u64(p);
        uint64_t high = (colibri_i_key(40) - seed) ^ colibri_i_u64(p + size - 8);
        return colibri_i_avalanche(size + colibri_i_swap64(low) + high + colibri_i_fold(low, high));
    }
    if (size > 3) {
        uint64_t combined = colibri_i_u32(p + size - 4) | (uint64_t)colibri_i_u32(p) << 32;
        uint64_t x = (colibri_i_key(8) - (seed ^ (uint64_t)colibri_i_swap32((uint32_t)seed) << 32)) ^ combined;
        x ^= colibri_i_rotate(x, 49) ^ colibri_i_rotate(x, 24);
        x *= COLIBRI_I_MX2;
        x ^= (x >> 35) + size;
        x *= COLIBRI_I_MX2;
        return x ^ x >> 28;
    }
    if (size > 0) {
        uint64_t key = colibri_i_u32(colibri_i_secret) ^ colibri_i_u32(colibri_i_secret + 4);
        return colibri_i_avalanche64((key + seed) ^ colibri_i_combine3(p, size));
    }
    return colibri_i_avalanche64(seed ^ colibri_i_key(56));
}

static colibri_i_u128 colibri_i_small128(const uint8_t *p, size_t size, uint64_t seed)
{
    colibri_i_u128 out;
    if (size > 8) {
        uint64_t last = colibri_i_u64(p + size - 8);
        uint64_t a = (colibri_i_key(32) - seed) ^ colibri_i_u64(p) ^ last;
        uint64_t b = (colibri_i_key(48) + seed) ^ last;
        colibri_i_u128 product = colibri_i_multiply(a, COLIBRI_I_P64_1);
        uint64_t low = product.low + ((uint64_t)(size - 1) << 54);
        uint64_t high = product.high + b + (b & 0xFFFFFFFF) * (COLIBRI_I_P32_2 - 1);
        low ^= colibri_i_swap64(high);
        product = colibri_i_multiply(low, COLIBRI_I_P64_2);
        out.low = colibri_i_avalanche(product.low);
        out.high = colibri_i_avalanche(product.high + high * COLIBRI_I_P64_2);
    } else if (size > 3) {
        uint64_t combined = colibri_i_u32(p) | (uint64_t)colibri_i_u32(p + size - 4) << 32;
        uint64_t x = (colibri_i_key(16) + (seed ^ (uint64_t)colibri_i_swap32((uint32_t)seed) << 32)) ^ combined;
        colibri_i_u128 product = colibri_i_multiply(x, COLIBRI_I_P64_1 + ((uint64_t)size << 2));
        uint64_t high = product.high + (product.low << 1);
        uint64_t low = product.low ^ high >> 3;
        low = (low ^ low >> 35) * COLIBRI_I_MX2;
        out.low = low ^ low >> 28;
        out.high = colibri_i_avalanche(high);
    } else if (size > 0) {
        uint32_t combined = colibri_i_combine3(p, size);
        uint32_t swapped = colibri_i_swap32(combined);
        uint64_t low_key = colibri_i_u32(colibri_i_secret) ^ colibri_i_u32(colibri_i_secret + 4);
        uint64_t high_key = colibri_i_u32(colibri_i_secret + 8) ^ colibri_i_u32(colibri_i_secret + 12);
        out.low = colibri_i_avalanche64((low_key + seed) ^ combined);
        out.high = colibri_i_avalanche64((high_key - seed) ^ (uint32_t)(swapped << 13 | swapped >> 19));
    } else {
        out.low = colibri_i_avalanche64(seed ^ colibri_i_key(64));
        out.high = colibri_i_avalanche64(seed ^ colibri_i_key(80));
    }
    return out;
}

static uint64_t colibri_i_medium64(const uint8_t *p, size_t size, uint64_t seed)
{
    uint64_t sum = size * COLIBRI_I_P64_1;
    if (size <= 128) {
        for (size_t i = (size - 1) / 32 + 1; i-- > 0;) {
            sum += colibri_i_mix(p + 16 * i, 32 * i, seed);
            sum += colibri_i_mix(p + size - 16 * i - 16, 32 * i + 16, seed);
        }
        return colibri_i_avalanche(sum);
    }
    for (size_t i = 0; i < 8; i++)
        sum += colibri_i_mix(p + 16 * i, 16 * i, seed);
    sum = colibri_i_avalanche(sum);
    for (size_t i = 8; i < size / 16; i++)
        sum += colibri_i_mix(p + 16 * i, 16 * (i - 8) + 3, seed);
    return colibri_i_avalanche(sum + colibri_i_mix(p + size - 16, 119, seed));
}

static inline void colibri_i_mix_two(colibri_i_u128 *sum, const uint8_t *a, const uint8_t *b, size_t offset,
                                     uint64_t seed)
{
    sum->low += colibri_i_mix(a, offset, seed);
    sum->high += colibri_i_mix(b, offset + 16, seed);
    sum->low ^= colibri_i_u64(b) + colibri_i_u64(b + 8);
    sum->high ^= colibri_i_u64(a) + colibri_i_u64(a + 8);
}

static colibri_i_u128 colibri_i_medium128(const uint8_t *p, size_t size, uint64_t seed)
{
    colibri_i_u128 sum, out;
    sum.low = size * COLIBRI_I_P64_1;
    sum.high = 0;
    if (size <= 128) {
        for (size_t i = (size - 1) / 32 + 1; i-- > 0;)
            colibri_i_mix_two(&sum, p + 16 * i, p + size - 16 * i - 16, 32 * i, seed);
    } else {
        for (size_t i = 0; i < 4; i++)
            colibri_i_mix_two(&sum, p + 32 * i, p + 32 * i + 16, 32 * i, seed);
        sum.low = colibri_i_avalanche(sum.low);
        sum.high = colibri_i_avalanche(sum.high);
        for (size_t i = 4; i < size / 32; i++)
            colibri_i_mix_two(&sum, p + 32 * i, p + 32 * i + 16, 32 * (i - 4) + 3, seed);
        colibri_i_mix_two(&sum, p + size - 16, p + size - 32, 103, 0 - seed);
    }
    out.low = colibri_i_avalanche(sum.low + sum.high);
    out.high = 0 - colibri_i_avalanche(sum.low * COLIBRI_I_P64_1 + sum.high * COLIBRI_I_P64_4 +
                                       (size - seed) * COLIBRI_I_P64_2);
    return out;
}

typedef struct colibri_i_long {
    uint64_t acc[8];
    uint8_t secret[192];
} colibri_i_long;

static void colibri_i_long_begin(colibri_i_long *state, uint64_t seed)
{
    static const uint64_t start[8] = {COLIBRI_I_P32_3, COLIBRI_I_P64_1, COLIBRI_I_P64_2, COLIBRI_I_P64_3,
                                      COLIBRI_I_P64_4, COLIBRI_I_P32_2, COLIBRI_I_P64_5, COLIBRI_I_P32_1};
    memcpy(state->acc, start, sizeof start);
    for (size_t i = 0; i < 192; i += 16) {
        colibri_i_put64(state->secret + i, colibri_i_u64(colibri_i_secret + i) + seed);
        colibri_i_put64(state->secret + i + 8, colibri_i_u64(colibri_i_secret + i + 8) - seed);
    }
}

/* Accumulates `n` <= 16 stripes of 64 bytes, the secret moving on by 8 bytes each. */
static void colibri_i_stripes_scalar(uint64_t acc[8], const uint8_t *p, const uint8_t *secret, uint64_t n)
{
    for (; n > 0; n--, p += 64, secret += 8)
        for (size_t i = 0; i < 8; i += 2) {
            uint64_t a = colibri_i_u64(p + 8 * i), b = colibri_i_u64(p + 8 * i + 8);
            uint64_t x = a ^ colibri_i_u64(secret + 8 * i), y = b ^ colibri_i_u64(secret + 8 * i + 8);
            acc[i] += b + (x & 0xFFFFFFFF) * (x >> 32);
            acc[i + 1] += a + (y & 0xFFFFFFFF) * (y >> 32);
        }
}

/* `n` blocks of 16 stripes, each followed by a scramble. */
static void colibri_i_blocks_scalar(uint64_t acc[8], const uint8_t *p, const uint8_t *secret, uint64_t n)
{
    for (; n > 0; n--, p += 1024) {
        colibri_i_stripes_scalar(acc, p, secret, 16);
        for (size_t i = 0; i < 8; i++)
            acc[i] = (acc[i] ^ acc[i] >> 47 ^ colibri_i_u64(secret + 128 + 8 * i)) * COLIBRI_I_P32_1;
    }
}

#ifdef COLIBRI_I_X86
#define COLIBRI_I_AVX2 __attribute__((target("avx2"))) static inline

COLIBRI_I_AVX2 __m256i colibri_i_load(const void *at)
{
    return _mm256_loadu_si256((const __m256i *)at);
}

COLIBRI_I_AVX2 __m256i colibri_i_accumulate(__m256i sum, const uint8_t *p, const uint8_t *secret)
{
    __m256i word = colibri_i_load(p);
    __m256i value = _mm256_xor_si256(word, colibri_i_load(secret));
    __m256i product = _mm256_mul_epu32(value, _mm256_srli_epi64(value, 32));
    return _mm256_add_epi64(sum, _mm256_add_epi64(product, _mm256_shuffle_epi32(word, 0x4E)));
}

COLIBRI_I_AVX2 __m256i colibri_i_scramble(__m256i x, const uint8_t *secret)
{
    const __m256i prime = _mm256_set1_epi64x((long long)COLIBRI_I_P32_1);
    x = _mm256_xor_si256(_mm256_xor_si256(x, _mm256_srli_epi64(x, 47)), colibri_i_load(secret));
    return _mm256_add_epi64(_mm256_mul_epu32(x, prime),
                            _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(x, 32), prime), 32));
}

/* Fetches 4 KiB ahead: long inputs come from memory, and a shorter way left a third of its rate unused. */
__attribute__((target("avx2"))) static void colibri_i_blocks_avx2(uint64_t acc[8], const uint8_t *p,
                                                                  const uint8_t *secret, uint64_t n)
{
    __m256i a = colibri_i_load(acc), b = colibri_i_load(acc + 4);
    for (; n > 0; n--, p += 1024) {
        for (size_t i = 0; i < 16; i++) {
            _mm_prefetch((const char *)((uintptr_t)p + 64 * i + 4096), _MM_HINT_T0);
            a = colibri_i_accumulate(a, p + 64 * i, secret + 8 * i);
            b = colibri_i_accumulate(b, p + 64 * i + 32, secret + 8 * i + 32);
        }
        a = colibri_i_scramble(a, secret + 128);
        b = colibri_i_scramble(b, secret + 160);
    }
    _mm256_storeu_si256((__m256i *)(void *)acc, a);
    _mm256_storeu_si256((__m256i *)(void *)(acc + 4), b);
}
#endif

/* `n` whole blocks of 1,024 bytes, none of which is the input's last one. */
static void colibri_i_long_blocks(colibri_i_long *state, const uint8_t *p, uint64_t n)
{
#ifdef COLIBRI_I_X86
    if (__builtin_cpu_supports("avx2")) {
        colibri_i_blocks_avx2(state->acc, p, state->secret, n);
        return;
    }
#endif
    colibri_i_blocks_scalar(state->acc, p, state->secret, n);
}

static uint64_t colibri_i_merge(const colibri_i_long *state, uint64_t start, size_t offset)
{
    const uint8_t *secret = state->secret + offset;
    for (size_t i = 0; i < 8; i += 2)
        start += colibri_i_fold(state->acc[i] ^ colibri_i_u64(secret + 8 * i),
                                state->acc[i + 1] ^ colibri_i_u64(secret + 8 * i + 8));
    return colibri_i_avalanche(start);
}

/* The last block, 1 to 1,024 bytes ending at `end`; 64 bytes before `end` are readable. */
static colibri_i_u128 colibri_i_long_end(colibri_i_long *state, const uint8_t *end, size_t last_block, uint64_t size)
{
    colibri_i_u128 out;
    colibri_i_stripes_scalar(state->acc, end - last_block, state->secret, (last_block - 1) / 64);
    colibri_i_stripes_scalar(state->acc, end - 64, state->secret + 121, 1);
    out.low = colibri_i_merge(state, size * COLIBRI_I_P64_1, 11);
    out.high = colibri_i_merge(state, ~(size * COLIBRI_I_P64_2), 117);
    return out;
}

static colibri_i_u128 colibri_i_long_hash(const uint8_t *p, size_t size, uint64_t seed)
{
    colibri_i_long state;
    size_t n_blocks = (size - 1) / 1024;
    colibri_i_long_begin(&state, seed);
    colibri_i_long_blocks(&state, p, n_blocks);
    return colibri_i_long_end(&state, p + size, size - 1024 * n_blocks, size);
}

COLIBRI_API uint64_t colibri_xxh3_64(const void *data, size_t size, uint64_t seed)
{
    const uint8_t *p = (const uint8_t *)data;
    if (size <= 16)
        return colibri_i_small64(p, size, seed);
    if (size <= 240)
        return colibri_i_medium64(p, size, seed);
#ifdef COLIBRI_USE_SYSTEM_XXHASH
    return XXH3_64bits_withSeed(data, size, seed);
#else
    return colibri_i_long_hash(p, size, seed).low;
#endif
}

COLIBRI_API void colibri_xxh3_128(const void *data, size_t size, uint64_t seed, uint8_t digest[16])
{
    const uint8_t *p = (const uint8_t *)data;
    colibri_i_u128 hash = size <= 16    ? colibri_i_small128(p, size, seed)
                          : size <= 240 ? colibri_i_medium128(p, size, seed)
                                        : colibri_i_long_hash(p, size, seed);
    colibri_i_put64(digest, colibri_i_swap64(hash.high));
    colibri_i_put64(digest + 8, colibri_i_swap64(hash.low));
}

/* Codes, memory, files. */

COLIBRI_API const char *colibri_strerror(int code)
{
    switch (code < 0 ? code : -code) {
    case 0:
        return "OK";
#define COLIBRI_I_NAME(name, number) \
    case -(number):                  \
        return #name;
        COLIBRI_CODES(COLIBRI_I_NAME)
        COLIBRI_READER_CODES(COLIBRI_I_NAME)
#undef COLIBRI_I_NAME
    default:
        return "UNKNOWN";
    }
}

/* Keeps what was found, and gives `code` back. */
#ifdef __GNUC__
__attribute__((format(printf, 3, 4)))
#endif
static int colibri_i_fail(colibri_file *f, int code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(f->message, sizeof f->message, format, arguments);
    va_end(arguments);
    f->code = code;
    return code;
}

static int colibri_i_fail_os(colibri_file *f, const char *doing, const char *path)
{
    f->os_errno = errno;
    return colibri_i_fail(f, COLIBRI_E_OS_ERROR, "%s failed: %s: %.160s", doing, strerror(f->os_errno), path);
}

static void *colibri_i_malloc(void *context, size_t size)
{
    (void)context;
    return malloc(size);
}

static void colibri_i_free(void *context, void *pointer, size_t size)
{
    (void)context;
    (void)size;
    free(pointer);
}

/* `size` bytes for at least one; NULL with the failure kept in `f`. */
static void *colibri_i_new(colibri_file *f, uint64_t size)
{
    void *pointer = size < SIZE_MAX ? f->i_allocate(f->i_context, size ? (size_t)size : 1) : NULL;
    if (!pointer)
        colibri_i_fail(f, COLIBRI_E_NO_MEMORY, "allocating %" PRIu64 " bytes failed", size);
    return pointer;
}

static void colibri_i_delete(colibri_file *f, void *pointer, uint64_t size)
{
    if (pointer)
        f->i_release(f->i_context, pointer, size ? (size_t)size : 1);
}

/* Exactly `size` bytes from `offset`: 0, SHORT_READ, or OS_ERROR with errno set. */
static int colibri_i_pread(int fd, void *buffer, uint64_t size, uint64_t offset)
{
    uint8_t *p = (uint8_t *)buffer;
    while (size > 0) {
        size_t part = size < 0x40000000 ? (size_t)size : 0x40000000;
        ssize_t n = pread(fd, p, part, (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return COLIBRI_E_OS_ERROR;
        if (n == 0)
            return COLIBRI_E_SHORT_READ;
        p += n;
        size -= (uint64_t)n;
        offset += (uint64_t)n;
    }
    return 0;
}

static int colibri_i_read(colibri_file *f, void *buffer, uint64_t size, uint64_t offset)
{
    int code = colibri_i_pread(f->i_handles[0].fd, buffer, size, offset);
    if (code == COLIBRI_E_OS_ERROR)
        return colibri_i_fail_os(f, "reading", "the file");
    if (code)
        return colibri_i_fail(f, code, "the file ended in a read of %" PRIu64 " bytes at %" PRIu64, size, offset);
    return 0;
}

/* Opens a regular file to read, never waiting for a pipe: the descriptor, or -1 with errno set (0 if
 * it is no regular file). */
static int colibri_i_open_file(const char *path, struct stat *status)
{
    int fd, saved;
    do
        fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    while (fd < 0 && errno == EINTR);
    if (fd < 0)
        return -1;
    saved = fstat(fd, status) == 0 ? 0 : errno;
    if (saved == 0 && S_ISREG(status->st_mode))
        return fd;
    close(fd);
    errno = saved;
    return -1;
}

/* Gives `handle` a descriptor for direct reads, proved by one: opening alone proves nothing. */
static void colibri_i_open_direct(colibri_i_handle *handle, const char *path)
{
#ifdef O_DIRECT
    uint8_t room[2 * COLIBRI_DIRECT_ALIGNMENT];
    uint8_t *page = room + (COLIBRI_DIRECT_ALIGNMENT - (uintptr_t)room % COLIBRI_DIRECT_ALIGNMENT);
    struct stat mine, other;
    ssize_t n = 0;
    int fd;
    do
        fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_DIRECT);
    while (fd < 0 && errno == EINTR);
    if (fd < 0) {
        handle->direct_errno = errno;
        return;
    }
    if (fstat(fd, &other) != 0 || fstat(handle->fd, &mine) != 0)
        handle->direct_errno = errno;
    else if (other.st_dev != mine.st_dev || other.st_ino != mine.st_ino)
        handle->direct_errno = ESTALE;
    else {
        do
            n = pread(fd, page, COLIBRI_PAGE, 0);
        while (n < 0 && errno == EINTR);
        if (n != (ssize_t)COLIBRI_PAGE)
            handle->direct_errno = n < 0 ? errno : EIO;
    }
    if (handle->direct_errno)
        close(fd);
    else
        handle->direct_fd = fd;
#else
    (void)path;
    handle->direct_errno = ENOTSUP;
#endif
}

static void colibri_i_warn(colibri_file *f, uint32_t place, uint32_t number)
{
    if (f->i_n_warnings < f->i_room_warnings) {
        f->i_warnings[f->i_n_warnings].place = place;
        f->i_warnings[f->i_n_warnings].number = number;
        f->i_n_warnings++;
    }
}

/* Superblock and regions: sections 3 and 4. */

#define COLIBRI_I_MAGIC "\x89" "CLB\r\n\x1a\n"
#define COLIBRI_I_VOLUME_MAGIC "\x89" "CLV\r\n\x1a\n"

static const char *const colibri_i_region_names[8] = {"index",  "checksums", "expert layouts", "volume map",
                                                      "tables", "metadata",  "extension",      "data"};

/* Section 11, step 2: 0 if `page` is sound. */
static int colibri_i_check_page(const uint8_t page[4096], const char *magic)
{
    if (memcmp(page, magic, 8) != 0)
        return COLIBRI_E_BAD_MAGIC;
    if (colibri_i_u16(page + 8) != 1)
        return COLIBRI_E_UNSUPPORTED_VERSION;
    if (colibri_i_u64(page + 4088) != colibri_xxh3_64(page, 4088, 0))
        return COLIBRI_E_SUPERBLOCK_CHECKSUM;
    return 0;
}

/* Steps 1 to 3: the page to go by, in `page`. */
static int colibri_i_read_superblock(colibri_file *f, uint8_t page[4096])
{
    uint8_t tail[4096];
    uint64_t required;
    int fault, tail_fault, code;
    if (f->file_size < 4 * COLIBRI_PAGE)
        return colibri_i_fail(f, COLIBRI_E_FILE_TOO_SMALL, "the file has %" PRIu64 " bytes; 16384 at least",
                              f->file_size);
    if ((code = colibri_i_read(f, page, COLIBRI_PAGE, 0)) != 0)
        return code;
    fault = colibri_i_check_page(page, COLIBRI_I_MAGIC);
    required = colibri_i_u64(page + 56);
    if (!fault && f->file_size != required)
        return colibri_i_fail(f, f->file_size < required ? COLIBRI_E_TRUNCATED : COLIBRI_E_TRAILING_BYTES,
                              "the file has %" PRIu64 " bytes; its superblock says %" PRIu64, f->file_size,
                              required);
    if ((code = colibri_i_read(f, tail, COLIBRI_PAGE, f->file_size - COLIBRI_PAGE)) != 0)
        return code;
    tail_fault = colibri_i_check_page(tail, COLIBRI_I_MAGIC);
    if (!fault) {
        if (tail_fault)
            colibri_i_warn(f, COLIBRI_SUPERBLOCK_END, 0);
        else if (memcmp(page, tail, COLIBRI_PAGE) != 0)
            return colibri_i_fail(f, COLIBRI_E_SUPERBLOCK_CONFLICT,
                                  "the superblocks at both ends are sound but differ");
        return 0;
    }
    if (tail_fault || colibri_i_u64(tail + 56) != f->file_size)
        return colibri_i_fail(f, fault, "the superblock at the start is damaged, and none at the end replaces it");
    colibri_i_warn(f, COLIBRI_SUPERBLOCK_START, 0);
    memcpy(page, tail, COLIBRI_PAGE);
    return 0;
}

/* Step 5, lengths: what is required of region `k`, or NULL. */
static const char *colibri_i_check_length(const colibri_file *f, unsigned k, uint64_t length)
{
    uint64_t entries = (uint64_t)f->n_layers * f->n_experts;
    if (length >= COLIBRI_I_LIMIT)
        return "less than 2^62";
    switch (k) {
    case COLIBRI_REGION_INDEX:
        return length == 16 * entries ? NULL : "16 bytes an expert";
    case COLIBRI_REGION_CHECKSUMS:
        return length == 8 * entries ? NULL : "8 bytes an expert";
    case COLIBRI_REGION_EXPERT_LAYOUTS:
        return length == (f->incompat & COLIBRI_MIXED_LAYOUTS ? 2 * entries : 0)
                   ? NULL
                   : "2 bytes an expert with MIXED_LAYOUTS, else 0";
    case COLIBRI_REGION_VOLUME_MAP:
        return length == (f->incompat & COLIBRI_STRIPED ? 2 * entries : 0) ? NULL
                                                                           : "2 bytes an expert with STRIPED, else 0";
    case COLIBRI_REGION_TABLES:
        return length >= 64 && length <= (1u << 29) ? NULL : "64 to 536870912";
    case COLIBRI_REGION_METADATA:
        return length >= 2 && length <= (1u << 24) ? NULL : "2 to 16777216";
    case COLIBRI_REGION_EXTENSION:
        return length == 0 || (length <= (1u << 29) && (f->compat | f->ro_compat))
                   ? NULL
                   : "0 without a compat or ro_compat feature, 536870912 at most with one";
    default:
        return length % f->alignment == 0 ? NULL : "a multiple of the alignment";
    }
}

/* Step 5: lengths, then the only placement there is. Lengths are below 2^62: `position` stays below
 * 2^63 if it is held to the limit after each step. */
static int colibri_i_check_regions(colibri_file *f)
{
    uint64_t places[8][2], position = COLIBRI_PAGE;
    for (unsigned k = 0; k < 8; k++) {
        const char *required = colibri_i_check_length(f, k, f->i_regions[k][2]);
        if (required)
            return colibri_i_fail(f, COLIBRI_E_REGION_LENGTH, "region %s: %" PRIu64 " bytes; %s",
                                  colibri_i_region_names[k], f->i_regions[k][2], required);
    }
    for (unsigned step = 0; step < 15; step++) {
        unsigned k = step < 8 ? step : 14 - step;
        uint64_t length = f->i_regions[k][2];
        if (k == COLIBRI_REGION_DATA)
            position = colibri_i_pad(position, f->alignment);
        places[k][step >= 8] = length || k == COLIBRI_REGION_DATA ? position : 0;
        position = colibri_i_pad(position + length, COLIBRI_PAGE);
        if (position > COLIBRI_I_LIMIT)
            return colibri_i_fail(f, COLIBRI_E_REGION_PLACEMENT, "region %s: ends past 2^62",
                                  colibri_i_region_names[k]);
    }
    places[COLIBRI_REGION_DATA][1] = 0;
    for (unsigned k = 0; k < 8; k++) {
        const uint64_t *region = f->i_regions[k];
        if (region[0] != places[k][0] || region[1] != places[k][1] ||
            ((region[2] == 0 || k == COLIBRI_REGION_DATA) && region[3] != 0))
            return colibri_i_fail(f, COLIBRI_E_REGION_PLACEMENT,
                                  "region %s: at %" PRIu64 " and %" PRIu64 "; %" PRIu64 " and %" PRIu64
                                  " are required, and no checksum if it has none",
                                  colibri_i_region_names[k], region[0], region[1], places[k][0], places[k][1]);
    }
    if (position + COLIBRI_PAGE != f->file_size)
        return colibri_i_fail(f, COLIBRI_E_REGION_PLACEMENT, "file_size is %" PRIu64 "; the regions end at %" PRIu64,
                              f->file_size, position + COLIBRI_PAGE);
    return 0;
}

/* Steps 4 and 5. */
static int colibri_i_parse_superblock(colibri_file *f, const uint8_t page[4096])
{
    f->incompat = colibri_i_u64(page + 16);
    f->ro_compat = colibri_i_u64(page + 24);
    f->compat = colibri_i_u64(page + 32);
    if (f->incompat & ~(COLIBRI_MIXED_LAYOUTS | COLIBRI_STRIPED))
        return colibri_i_fail(f, COLIBRI_E_UNSUPPORTED_FEATURE, "superblock: incompat is 0x%" PRIx64 "; 0x3 is known",
                              f->incompat);
    if (colibri_i_u32(page + 12) || !colibri_i_is_zero(page + 76, 52) || !colibri_i_is_zero(page + 384, 3704))
        return colibri_i_fail(f, COLIBRI_E_RESERVED_NOT_ZERO, "superblock: reserved bytes are not zero");
    memcpy(f->uuid, page + 40, 16);
    f->n_layers = colibri_i_u32(page + 64);
    f->n_experts = colibri_i_u32(page + 68);
    f->i_align_log2 = colibri_i_u32(page + 72);
    if (f->i_align_log2 < 12 || f->i_align_log2 > 21)
        return colibri_i_fail(f, COLIBRI_E_BAD_ALIGNMENT, "superblock: align_log2 is %" PRIu32 "; 12 to 21",
                              f->i_align_log2);
    f->alignment = UINT64_C(1) << f->i_align_log2;
    if (f->n_layers < 1 || f->n_layers > 65535 || f->n_experts < 1 || f->n_experts > 1048576 ||
        (uint64_t)f->n_layers * f->n_experts > (1u << 24))
        return colibri_i_fail(f, COLIBRI_E_BAD_GEOMETRY, "superblock: %" PRIu32 " layers of %" PRIu32 " experts",
                              f->n_layers, f->n_experts);
    for (unsigned k = 0; k < 8; k++)
        for (unsigned field = 0; field < 4; field++)
            f->i_regions[k][field] = colibri_i_u64(page + 128 + 32 * k + 8 * field);
    f->data.offset = f->i_regions[COLIBRI_REGION_DATA][0];
    f->data.size = f->i_regions[COLIBRI_REGION_DATA][2];
    return colibri_i_check_regions(f);
}

/* The checksum of `length` > 240 bytes at `offset` that are not kept. */
static int colibri_i_hash_range(colibri_file *f, uint64_t offset, uint64_t length, uint64_t *hash)
{
    enum { CHUNK = 1 << 18 };
    uint64_t n_blocks = (length - 1) / 1024, done = 0;
    uint64_t rest = length - 1024 * n_blocks, tail = n_blocks ? rest + 64 : rest;
    colibri_i_long state;
    int code = 0;
    uint8_t *chunk = (uint8_t *)colibri_i_new(f, CHUNK);
    if (!chunk)
        return COLIBRI_E_NO_MEMORY;
    colibri_i_long_begin(&state, 0);
    while (done < n_blocks && !code) {
        uint64_t n = n_blocks - done < CHUNK / 1024 ? n_blocks - done : CHUNK / 1024;
        code = colibri_i_read(f, chunk, 1024 * n, offset + 1024 * done);
        if (!code)
            colibri_i_long_blocks(&state, chunk, n);
        done += n;
    }
    if (!code)
        code = colibri_i_read(f, chunk, tail, offset + length - tail);
    if (!code)
        *hash = colibri_i_long_end(&state, chunk + tail, (size_t)rest, length).low;
    colibri_i_delete(f, chunk, CHUNK);
    return code;
}

/* One copy of region `k`: whether it is sound; its bytes are kept in f->i_bytes[k] if there is room. */
static int colibri_i_load_copy(colibri_file *f, unsigned k, uint64_t offset, int *is_sound)
{
    uint64_t length = f->i_regions[k][2], padded = colibri_i_pad(length, COLIBRI_PAGE), hash = 0;
    uint8_t end[4096];
    int code;
    *is_sound = 0;
    if (f->i_sizes[k] == padded) {
        if ((code = colibri_i_read(f, f->i_bytes[k], padded, offset)) != 0)
            return code;
        *is_sound = colibri_xxh3_64(f->i_bytes[k], (size_t)length, 0) == f->i_regions[k][3] &&
                    colibri_i_is_zero(f->i_bytes[k] + length, padded - length);
        return 0;
    }
    if ((code = colibri_i_read(f, end, COLIBRI_PAGE, offset + padded - COLIBRI_PAGE)) != 0)
        return code;
    if (length <= 240)
        hash = colibri_xxh3_64(end, (size_t)length, 0);
    else if ((code = colibri_i_hash_range(f, offset, length, &hash)) != 0)
        return code;
    *is_sound = hash == f->i_regions[k][3] &&
                colibri_i_is_zero(end + (COLIBRI_PAGE - (padded - length)), padded - length);
    return *is_sound && f->i_sizes[k] ? colibri_i_read(f, f->i_bytes[k], f->i_sizes[k], offset) : 0;
}

/* Whether a copy is sound, without keeping it: the other one was. */
static int colibri_i_check_copy(colibri_file *f, unsigned k, uint64_t offset, int *is_sound)
{
    size_t kept = f->i_sizes[k];
    int code;
    f->i_sizes[k] = 0;
    code = colibri_i_load_copy(f, k, offset, is_sound);
    f->i_sizes[k] = kept;
    return code;
}

/* The most that counts within their limits can demand of the tables, section 7.1. */
#define COLIBRI_I_MAX_TABLES                                                                                  \
    (UINT64_C(64) + 32 * 256 + 16 * 65535 + 64 * 1048576 + 8 * 65535 + 16 * 65537 + 96 * 1048576 + 48 * 4096 + \
     48 * 1024 + (UINT64_C(1) << 28))

/* Step 6: the bytes of every region, from the first sound copy. The extension is checked and not
 * kept; of tables that no counts can fill only the header is, which is then refused. */
static int colibri_i_load_regions(colibri_file *f)
{
    for (unsigned k = 0; k < 7; k++) {
        uint64_t length = f->i_regions[k][2];
        int code, is_sound;
        if (length == 0)
            continue;
        if (k != COLIBRI_REGION_EXTENSION) {
            uint64_t size = length > COLIBRI_I_MAX_TABLES && k == COLIBRI_REGION_TABLES
                                ? 64
                                : colibri_i_pad(length, COLIBRI_PAGE);
            if ((f->i_bytes[k] = (uint8_t *)colibri_i_new(f, size)) == NULL)
                return COLIBRI_E_NO_MEMORY;
            f->i_sizes[k] = (size_t)size;
        }
        if ((code = colibri_i_load_copy(f, k, f->i_regions[k][0], &is_sound)) != 0)
            return code;
        if (is_sound) {
            if ((code = colibri_i_check_copy(f, k, f->i_regions[k][1], &is_sound)) != 0)
                return code;
            if (!is_sound)
                colibri_i_warn(f, COLIBRI_REGION_END, k);
            continue;
        }
        if ((code = colibri_i_load_copy(f, k, f->i_regions[k][1], &is_sound)) != 0)
            return code;
        if (!is_sound)
            return colibri_i_fail(f, COLIBRI_E_REGION_CHECKSUM, "region %s: both copies are damaged",
                                  colibri_i_region_names[k]);
        colibri_i_warn(f, COLIBRI_REGION_START, k);
    }
    f->index = f->i_bytes[COLIBRI_REGION_INDEX];
    f->checksums = f->i_bytes[COLIBRI_REGION_CHECKSUMS];
    f->i_expert_layouts = f->i_bytes[COLIBRI_REGION_EXPERT_LAYOUTS];
    f->i_volume_map = f->i_bytes[COLIBRI_REGION_VOLUME_MAP];
    f->metadata = (const char *)f->i_bytes[COLIBRI_REGION_METADATA];
    f->metadata_length = f->i_regions[COLIBRI_REGION_METADATA][2];
    return 0;
}

/* Tables: section 7. */

typedef struct colibri_i_known_dtype {
    const char *name;
    int32_t ggml_id;
    uint16_t elements, bytes;
    uint8_t units[3][2]; /* runs of (count, width); count 0 ends them */
} colibri_i_known_dtype;

/* Section 8. */
static const colibri_i_known_dtype colibri_i_known_dtypes[] = {
    {"f32", 0, 1, 4, {{0, 0}}},
    {"f16", 1, 1, 2, {{0, 0}}},
    {"bf16", 30, 1, 2, {{0, 0}}},
    {"f64", 28, 1, 8, {{0, 0}}},
    {"i8", 24, 1, 1, {{0, 0}}},
    {"i16", 25, 1, 2, {{0, 0}}},
    {"i32", 26, 1, 4, {{0, 0}}},
    {"i64", 27, 1, 8, {{0, 0}}},
    {"u8", -1, 1, 1, {{0, 0}}},
    {"f8_e4m3", -1, 1, 1, {{0, 0}}},
    {"f8_e5m2", -1, 1, 1, {{0, 0}}},
    {"e8m0", -1, 1, 1, {{0, 0}}},
    {"q4_0", 2, 32, 18, {{1, 2}, {4, 4}, {0, 0}}},
    {"q4_1", 3, 32, 20, {{2, 2}, {4, 4}, {0, 0}}},
    {"q5_0", 6, 32, 22, {{1, 2}, {5, 4}, {0, 0}}},
    {"q5_1", 7, 32, 24, {{2, 2}, {5, 4}, {0, 0}}},
    {"q8_0", 8, 32, 34, {{1, 2}, {8, 4}, {0, 0}}},
    {"q2_k", 10, 256, 84, {{20, 4}, {2, 2}, {0, 0}}},
    {"q3_k", 11, 256, 110, {{27, 4}, {1, 2}, {0, 0}}},
    {"q4_k", 12, 256, 144, {{2, 2}, {35, 4}, {0, 0}}},
    {"q5_k", 13, 256, 176, {{2, 2}, {43, 4}, {0, 0}}},
    {"q6_k", 14, 256, 210, {{52, 4}, {1, 2}, {0, 0}}},
    {"iq2_xxs", 16, 256, 66, {{0, 0}}},
    {"iq2_xs", 17, 256, 74, {{0, 0}}},
    {"iq3_xxs", 18, 256, 98, {{0, 0}}},
    {"iq1_s", 19, 256, 50, {{0, 0}}},
    {"iq4_nl", 20, 32, 18, {{1, 2}, {4, 4}, {0, 0}}},
    {"iq3_s", 21, 256, 110, {{0, 0}}},
    {"iq2_s", 22, 256, 82, {{0, 0}}},
    {"iq4_xs", 23, 256, 136, {{0, 0}}},
    {"iq1_m", 29, 256, 56, {{0, 0}}},
    {"tq1_0", 34, 256, 54, {{0, 0}}},
    {"tq2_0", 35, 256, 66, {{0, 0}}},
    {"mxfp4", 39, 32, 17, {{1, 1}, {4, 4}, {0, 0}}},
    {"nvfp4", 40, 64, 36, {{0, 0}}},
    {"q1_0", 41, 128, 18, {{0, 0}}},
};

static const colibri_i_known_dtype *colibri_i_know_dtype(const char *name, uint32_t length)
{
    for (size_t i = 0; i < sizeof colibri_i_known_dtypes / sizeof colibri_i_known_dtypes[0]; i++) {
        const colibri_i_known_dtype *known = &colibri_i_known_dtypes[i];
        if (strlen(known->name) == length && memcmp(known->name, name, length) == 0)
            return known;
    }
    return NULL;
}

/* Bytes of the UTF-8 sequence at `p` < `end` (RFC 3629: no surrogates, no overlong forms); 0: none. */
static unsigned colibri_i_utf8(const uint8_t *p, const uint8_t *end)
{
    unsigned n = p[0] < 0x80 ? 1 : p[0] < 0xC2 ? 0 : p[0] < 0xE0 ? 2 : p[0] < 0xF0 ? 3 : p[0] < 0xF5 ? 4 : 0;
    if (n == 0 || (size_t)(end - p) < n)
        return 0;
    for (unsigned i = 1; i < n; i++)
        if ((p[i] & 0xC0) != 0x80)
            return 0;
    if ((p[0] == 0xE0 && p[1] < 0xA0) || (p[0] == 0xED && p[1] > 0x9F) || (p[0] == 0xF0 && p[1] < 0x90) ||
        (p[0] == 0xF4 && p[1] > 0x8F))
        return 0;
    return n;
}

typedef struct colibri_i_walk { /* records that fill their packs in order, section 7.5 */
    const uint8_t *packs;
    uint32_t n_packs, pack;
    uint64_t position;
    int has_records; /* in this pack */
    int code;
} colibri_i_walk;

typedef struct colibri_i_parser {
    colibri_file *f;
    uint32_t string_bytes;
    uint32_t string_end; /* of the last name */
    const char *table;   /* whose records are walked, for messages */
    colibri_i_name *names;
    uint32_t n_names;
} colibri_i_parser;

#define COLIBRI_I_REFUSE(what, text) \
    return colibri_i_fail(parser->f, COLIBRI_E_##what, "%s %" PRIu32 ": %s", parser->table, number, text)

/* The record's string reference at `p`; the name is remembered for the search for duplicates. */
static int colibri_i_parse_name(colibri_i_parser *parser, uint32_t number, const uint8_t *p)
{
    uint32_t offset = colibri_i_u32(p), length = colibri_i_u32(p + 4);
    const uint8_t *text, *end;
    if (offset != parser->string_end || length < 1 || length > 255 || length > parser->string_bytes - offset)
        COLIBRI_I_REFUSE(BAD_STRING, "the name does not continue the strings with 1 to 255 bytes inside them");
    text = (const uint8_t *)parser->f->i_strings + offset;
    end = text + length;
    for (const uint8_t *at = text; at < end;) {
        unsigned n = colibri_i_utf8(at, end);
        if (n == 0)
            COLIBRI_I_REFUSE(BAD_STRING, "the name is not UTF-8");
        if (*at < 0x20 || *at == 0x7F)
            COLIBRI_I_REFUSE(BAD_STRING, "the name has a control character");
        at += n;
    }
    parser->string_end += length;
    parser->names[parser->n_names].text = (const char *)text;
    parser->names[parser->n_names].length = length;
    parser->names[parser->n_names].number = number;
    parser->n_names++;
    return 0;
}

static int colibri_i_compare_text(const char *a, uint32_t a_length, const char *b, uint32_t b_length)
{
    int order = memcmp(a, b, a_length < b_length ? a_length : b_length);
    return order ? order : (a_length > b_length) - (a_length < b_length);
}

static int colibri_i_compare_names(const void *a, const void *b)
{
    const colibri_i_name *x = (const colibri_i_name *)a, *y = (const colibri_i_name *)b;
    int order = colibri_i_compare_text(x->text, x->length, y->text, y->length);
    return order ? order : (x->number > y->number) - (x->number < y->number);
}

/* Sorts the names that were parsed; DUPLICATE_NAME for the first record whose name stood before,
 * else `code`: a record's name is checked before the rest of it, so that a duplicate among the
 * records up to the one that failed comes first. Sorting, unlike hashing, has no bad case. */
static int colibri_i_check_names(colibri_i_parser *parser, int code)
{
    uint32_t number = COLIBRI_NONE;
    qsort(parser->names, parser->n_names, sizeof *parser->names, colibri_i_compare_names);
    for (uint32_t i = 1; i < parser->n_names; i++) {
        const colibri_i_name *a = &parser->names[i - 1], *b = &parser->names[i];
        if (b->number < number && a->length == b->length && memcmp(a->text, b->text, a->length) == 0)
            number = b->number;
    }
    if (number != COLIBRI_NONE)
        COLIBRI_I_REFUSE(DUPLICATE_NAME, "its name stands twice");
    return code;
}

static int colibri_i_check_plain_name(const colibri_i_name *name)
{
    for (uint32_t i = 0; i < name->length; i++)
        if (name->text[i] == '/' || name->text[i] == '\\' || name->text[i] == ':')
            return 0;
    return !(name->text[0] == '.' && (name->length == 1 || (name->length == 2 && name->text[1] == '.')));
}

static int colibri_i_parse_dtype(colibri_i_parser *parser, uint32_t number, const uint8_t *p, colibri_i_walk *walk)
{
    const colibri_i_known_dtype *known;
    const colibri_i_name *name;
    int32_t ggml_id = (int32_t)colibri_i_u32(p + 8);
    uint32_t elements = colibri_i_u32(p + 12), bytes = colibri_i_u32(p + 16);
    int code = colibri_i_parse_name(parser, number, p);
    (void)walk;
    if (code)
        return code;
    if (!colibri_i_is_zero(p + 20, 12))
        COLIBRI_I_REFUSE(RESERVED_NOT_ZERO, "reserved bytes are not zero");
    name = &parser->names[parser->n_names - 1];
    known = colibri_i_know_dtype(name->text, name->length);
    if (known && (ggml_id != known->ggml_id || elements != known->elements || bytes != known->bytes))
        COLIBRI_I_REFUSE(BAD_DTYPE, "its numbers are not those of its name");
    if (ggml_id < -1 || elements < 1 || elements > 65536 || bytes < 1 || bytes > 65536)
        COLIBRI_I_REFUSE(BAD_DTYPE, "an id of -1 at least, 1 to 65536 elements and bytes are required");
    return 0;
}

/* Bytes that the shape takes; COLIBRI_I_LIMIT if they are not below it. */
static uint64_t colibri_i_array_size(const uint64_t *shape, unsigned rank, uint32_t elements, uint32_t bytes)
{
    uint64_t size = bytes;
    for (unsigned i = 0; i < rank; i++)
        if (shape[i] == 0)
            return 0;
    for (unsigned i = 0; i < rank; i++) {
        uint64_t factor = i == rank - 1 ? shape[i] / elements : shape[i];
        if (size > (COLIBRI_I_LIMIT - 1) / factor)
            return COLIBRI_I_LIMIT;
        size *= factor;
    }
    return size;
}

/* Dtype, row interleave, shape and size of a segment or tensor; `code` is for a dtype that is not
 * there, `least` the least length of an axis. `p` points to dtype, row_interleave and rank. */
static int colibri_i_check_array(colibri_i_parser *parser, uint32_t number, int code, const uint8_t *p,
                                 const uint8_t *lengths, uint64_t size, uint64_t least)
{
    uint32_t dtype = colibri_i_u16(p), row_interleave = colibri_i_u16(p + 2), rank = colibri_i_u16(p + 4);
    const colibri_i_known_dtype *known;
    const uint8_t *record;
    uint64_t shape[4];
    uint32_t elements;
    if (dtype >= parser->f->n_dtypes)
        return colibri_i_fail(parser->f, code, "%s %" PRIu32 ": dtype number %" PRIu32 " of %" PRIu32, parser->table,
                              number, dtype, parser->f->n_dtypes);
    if (row_interleave != 0 && row_interleave != 16)
        COLIBRI_I_REFUSE(BAD_INTERLEAVE, "row_interleave is neither 0 nor 16");
    if (rank < 1 || rank > 4)
        COLIBRI_I_REFUSE(BAD_SHAPE, "the rank is not 1 to 4");
    record = parser->f->i_dtypes + 32 * (size_t)dtype;
    elements = colibri_i_u32(record + 12);
    for (unsigned i = 0; i < 4; i++) {
        shape[i] = colibri_i_u64(lengths + 8 * i);
        if (i < rank ? shape[i] < least || shape[i] >= COLIBRI_I_LIMIT : shape[i] != 0)
            COLIBRI_I_REFUSE(BAD_SHAPE, "a length is out of range");
    }
    if (shape[rank - 1] % elements)
        COLIBRI_I_REFUSE(BAD_SHAPE, "a row is no whole number of quant blocks");
    if (row_interleave) {
        known = colibri_i_know_dtype(parser->f->i_strings + colibri_i_u32(record), colibri_i_u32(record + 4));
        if (rank != 2 || shape[0] % 16 || !known || known->units[0][0] == 0)
            COLIBRI_I_REFUSE(BAD_INTERLEAVE, "rank 2, rows a multiple of 16 and a dtype with units are required");
    }
    if (colibri_i_array_size(shape, rank, elements, colibri_i_u32(record + 16)) != size || size >= COLIBRI_I_LIMIT)
        COLIBRI_I_REFUSE(SIZE_MISMATCH, "the size is not what shape and dtype demand");
    return 0;
}

static int colibri_i_parse_segment(colibri_i_parser *parser, uint32_t number, const uint8_t *p, uint32_t *last_role,
                                   uint64_t *end)
{
    uint32_t role = colibri_i_u16(p);
    uint64_t offset = colibri_i_u64(p + 8), size = colibri_i_u64(p + 16);
    int code;
    if (!colibri_i_is_zero(p + 56, 8))
        COLIBRI_I_REFUSE(RESERVED_NOT_ZERO, "reserved bytes are not zero");
    if (role >> 4 < 1 || role >> 4 > 3 || (role & 15) > 2 || role <= *last_role)
        COLIBRI_I_REFUSE(BAD_SEGMENT, "the role is unknown or does not ascend");
    *last_role = role;
    code = colibri_i_check_array(parser, number, COLIBRI_E_BAD_SEGMENT, p + 2, p + 24, size, 1);
    if (code)
        return code;
    if (offset != colibri_i_pad(*end, 64) || offset + size >= COLIBRI_I_LIMIT)
        COLIBRI_I_REFUSE(BAD_SEGMENT, "the offset is not the next multiple of 64");
    *end = offset + size;
    return 0;
}

/* Layouts, each followed by its segments. */
static int colibri_i_parse_layouts(colibri_i_parser *parser)
{
    colibri_file *f = parser->f;
    uint32_t start = 0;
    for (uint32_t number = 0; number < f->n_layouts; number++) {
        const uint8_t *p = f->i_layouts + 16 * (size_t)number;
        uint32_t count = colibri_i_u32(p + 4), last_role = 0;
        uint64_t end = 0;
        parser->table = "layout";
        if (colibri_i_u32(p) != start || count < 1 || count > 64 || count > f->n_segments - start)
            COLIBRI_I_REFUSE(BAD_LAYOUT, "its segments are not the next 1 to 64");
        parser->table = "segment";
        for (uint32_t i = start; i < start + count; i++) {
            int code = colibri_i_parse_segment(parser, i, f->i_segments + 64 * (size_t)i, &last_role, &end);
            if (code)
                return code;
        }
        start += count;
        parser->table = "layout";
        if (colibri_i_u64(p + 8) != end)
            COLIBRI_I_REFUSE(BAD_LAYOUT, "block_size is not the end of its last segment");
    }
    if (start != f->n_segments)
        return colibri_i_fail(f, COLIBRI_E_BAD_LAYOUT, "layouts have %" PRIu32 " segments; n_segments is %" PRIu32,
                              start, f->n_segments);
    return 0;
}

static int colibri_i_parse_layers(colibri_i_parser *parser)
{
    colibri_file *f = parser->f;
    parser->table = "layer";
    for (uint32_t number = 0; number < f->n_layers; number++) {
        const uint8_t *p = f->i_layers + 8 * (size_t)number;
        uint32_t layout = colibri_i_u32(p);
        if (colibri_i_u32(p + 4))
            COLIBRI_I_REFUSE(RESERVED_NOT_ZERO, "reserved bytes are not zero");
        if (layout != COLIBRI_NONE && !(layout == COLIBRI_MIXED && f->incompat & COLIBRI_MIXED_LAYOUTS) &&
            layout >= f->n_layouts)
            COLIBRI_I_REFUSE(BAD_LAYER, "the file has no such layout");
    }
    return 0;
}

static int colibri_i_parse_packs(colibri_i_parser *parser)
{
    colibri_file *f = parser->f;
    uint64_t end = f->data.offset + f->data.size;
    parser->table = "pack";
    for (uint32_t number = 0; number < f->n_layers + 2; number++) {
        const uint8_t *p = f->i_packs + 16 * (size_t)number;
        uint64_t offset = colibri_i_u64(p), size = colibri_i_u64(p + 8);
        if (offset == 0 && size == 0)
            continue;
        if (size == 0 || size >= COLIBRI_I_LIMIT || offset % f->alignment || offset < f->data.offset || offset > end ||
            colibri_i_pad(size, f->alignment) > end - offset)
            COLIBRI_I_REFUSE(BAD_PACK, "it is misaligned or not inside the data region");
    }
    return 0;
}

static colibri_extent colibri_i_extent(const uint8_t *p)
{
    colibri_extent extent;
    extent.offset = colibri_i_u64(p);
    extent.size = colibri_i_u64(p + 8);
    return extent;
}

/* Leaves the walk's pack for pack `next`: this one is full, those between are {0, 0}. */
static int colibri_i_walk_on(colibri_i_parser *parser, colibri_i_walk *walk, uint32_t next)
{
    for (; walk->pack < next; walk->pack++) {
        colibri_extent pack = colibri_i_extent(walk->packs + 16 * (size_t)walk->pack);
        if (walk->has_records ? walk->position != pack.offset + pack.size : pack.offset || pack.size)
            return colibri_i_fail(parser->f, walk->code,
                                  "%s: pack %" PRIu32 " ends past its last record, or has none and is not {0, 0}",
                                  parser->table, walk->pack);
        walk->has_records = 0;
    }
    return 0;
}

static int colibri_i_walk_step(colibri_i_parser *parser, colibri_i_walk *walk, uint32_t number, uint32_t in,
                               uint64_t offset, uint64_t size)
{
    colibri_extent pack = colibri_i_extent(walk->packs + 16 * (size_t)in);
    uint64_t due, end = pack.offset + pack.size;
    int code;
    if (in < walk->pack)
        return colibri_i_fail(parser->f, walk->code, "%s %" PRIu32 ": records are not ordered by layer",
                              parser->table, number);
    if ((code = colibri_i_walk_on(parser, walk, in)) != 0)
        return code;
    due = walk->has_records ? colibri_i_pad(walk->position, 64) : pack.offset;
    if (offset != due || offset > end || size > end - offset)
        return colibri_i_fail(parser->f, walk->code,
                              "%s %" PRIu32 ": %" PRIu64 " bytes at %" PRIu64 "; at %" PRIu64
                              ", inside the pack that ends at %" PRIu64,
                              parser->table, number, size, offset, due, end);
    walk->position = offset + size;
    walk->has_records = 1;
    return 0;
}

static int colibri_i_parse_tensor(colibri_i_parser *parser, uint32_t number, const uint8_t *p, colibri_i_walk *walk)
{
    uint32_t layer = colibri_i_u32(p + 8);
    uint64_t offset = colibri_i_u64(p + 56), size = colibri_i_u64(p + 64);
    int code = colibri_i_parse_name(parser, number, p);
    if (code)
        return code;
    if (!colibri_i_is_zero(p + 18, 6) || !colibri_i_is_zero(p + 80, 16))
        COLIBRI_I_REFUSE(RESERVED_NOT_ZERO, "reserved bytes are not zero");
    if (layer != COLIBRI_NONE && layer >= parser->f->n_layers)
        COLIBRI_I_REFUSE(BAD_TENSOR, "the file has no such layer");
    code = colibri_i_check_array(parser, number, COLIBRI_E_BAD_TENSOR, p + 12, p + 24, size, 0);
    if (code)
        return code;
    return colibri_i_walk_step(parser, walk, number, layer == COLIBRI_NONE ? parser->f->n_layers : layer, offset, size);
}

static int colibri_i_parse_file(colibri_i_parser *parser, uint32_t number, const uint8_t *p, colibri_i_walk *walk)
{
    int code = colibri_i_parse_name(parser, number, p);
    if (code)
        return code;
    if (!colibri_i_is_zero(p + 32, 16))
        COLIBRI_I_REFUSE(RESERVED_NOT_ZERO, "reserved bytes are not zero");
    if (!colibri_i_check_plain_name(&parser->names[parser->n_names - 1]))
        COLIBRI_I_REFUSE(BAD_FILE_ENTRY, "the name is no plain file name");
    return colibri_i_walk_step(parser, walk, number, 0, colibri_i_u64(p + 8), colibri_i_u64(p + 16));
}

static int colibri_i_parse_volume(colibri_i_parser *parser, uint32_t number, const uint8_t *p, colibri_i_walk *walk)
{
    uint64_t file_size = colibri_i_u64(p + 8), offset = colibri_i_u64(p + 32), length = colibri_i_u64(p + 40);
    int code = colibri_i_parse_name(parser, number, p);
    (void)walk;
    if (code)
        return code;
    if (!colibri_i_check_plain_name(&parser->names[parser->n_names - 1]))
        COLIBRI_I_REFUSE(BAD_VOLUME, "the label is no plain name");
    if (offset != parser->f->alignment || length % parser->f->alignment || length >= COLIBRI_I_LIMIT ||
        file_size != offset + length + COLIBRI_PAGE)
        COLIBRI_I_REFUSE(BAD_VOLUME, "its extents are not as section 7.7 demands");
    return 0;
}

typedef int colibri_i_parse_record(colibri_i_parser *parser, uint32_t number, const uint8_t *p, colibri_i_walk *walk);

/* A table of `n` named records of `size` bytes; its sorted names go to `keep`, or away. */
static int colibri_i_parse_named(colibri_i_parser *parser, const char *table, const uint8_t *records, uint32_t n,
                                 size_t size, colibri_i_parse_record *parse, colibri_i_walk *walk,
                                 colibri_i_name **keep)
{
    uint64_t room = (uint64_t)n * sizeof(colibri_i_name);
    int code = 0;
    parser->table = table;
    parser->n_names = 0;
    parser->names = (colibri_i_name *)colibri_i_new(parser->f, room);
    if (!parser->names)
        return COLIBRI_E_NO_MEMORY;
    for (uint32_t number = 0; number < n && !code; number++)
        code = parse(parser, number, records + size * number, walk);
    code = colibri_i_check_names(parser, code);
    if (!code && walk)
        code = colibri_i_walk_on(parser, walk, walk->n_packs);
    if (keep)
        *keep = parser->names;
    else
        colibri_i_delete(parser->f, parser->names, room);
    return code;
}

static int colibri_i_walk_table(colibri_i_parser *parser, const char *table, const uint8_t *records, uint32_t n,
                                size_t size, colibri_i_parse_record *parse, const uint8_t *packs, uint32_t n_packs,
                                int code, colibri_i_name **keep)
{
    colibri_i_walk walk;
    memset(&walk, 0, sizeof walk);
    walk.packs = packs;
    walk.n_packs = n_packs;
    walk.code = code;
    return colibri_i_parse_named(parser, table, records, n, size, parse, &walk, keep);
}

/* Header of the tables: counts, length, reserved bytes; then where each array stands. */
static int colibri_i_parse_header(colibri_file *f, uint64_t *string_bytes)
{
    static const char *const names[7] = {"n_dtypes", "n_layouts", "n_segments", "n_tensors",
                                         "n_files",  "n_volumes", "string_bytes"};
    static const uint64_t limits[7] = {256, 65535, 1048576, 1048576, 4096, 1024, 1u << 28};
    const uint8_t *p = f->i_bytes[COLIBRI_REGION_TABLES];
    uint64_t counts[7], sizes[8], position = 64;
    const uint8_t *places[9];
    for (unsigned i = 0; i < 7; i++) {
        counts[i] = i < 6 ? colibri_i_u32(p + 4 * i) : colibri_i_u64(p + 24);
        if (counts[i] > limits[i])
            return colibri_i_fail(f, COLIBRI_E_TABLE_COUNT, "tables: %s is %" PRIu64 "; %" PRIu64 " at most", names[i],
                                  counts[i], limits[i]);
    }
    if ((counts[5] != 0) != ((f->incompat & COLIBRI_STRIPED) != 0))
        return colibri_i_fail(f, COLIBRI_E_TABLE_COUNT,
                              "tables: n_volumes is %" PRIu64 "; volumes exactly when STRIPED is set", counts[5]);
    sizes[0] = 32 * counts[0];
    sizes[1] = 16 * counts[1];
    sizes[2] = 64 * counts[2];
    sizes[3] = 8 * (uint64_t)f->n_layers;
    sizes[4] = 16 * ((uint64_t)f->n_layers + 2);
    sizes[5] = 96 * counts[3];
    sizes[6] = 48 * counts[4];
    sizes[7] = 48 * counts[5];
    for (unsigned i = 0; i < 8; i++)
        position += sizes[i];
    if (position + counts[6] != f->i_regions[COLIBRI_REGION_TABLES][2])
        return colibri_i_fail(f, COLIBRI_E_TABLE_LENGTH, "tables: %" PRIu64 " bytes; the counts demand %" PRIu64,
                              f->i_regions[COLIBRI_REGION_TABLES][2], position + counts[6]);
    if (!colibri_i_is_zero(p + 32, 32))
        return colibri_i_fail(f, COLIBRI_E_RESERVED_NOT_ZERO, "tables: reserved bytes of the header are not zero");
    places[0] = p + 64;
    for (unsigned i = 0; i < 8; i++)
        places[i + 1] = places[i] + sizes[i];
    f->i_dtypes = places[0];
    f->i_layouts = places[1];
    f->i_segments = places[2];
    f->i_layers = places[3];
    f->i_packs = places[4];
    f->i_tensors = places[5];
    f->i_files = places[6];
    f->i_volumes = places[7];
    f->i_strings = (const char *)places[8];
    f->n_dtypes = (uint32_t)counts[0];
    f->n_layouts = (uint32_t)counts[1];
    f->n_segments = (uint32_t)counts[2];
    f->n_tensors = (uint32_t)counts[3];
    f->n_files = (uint32_t)counts[4];
    f->n_volumes = (uint32_t)counts[5];
    *string_bytes = counts[6];
    return 0;
}

/* Step 7. */
static int colibri_i_parse_tables(colibri_file *f)
{
    colibri_i_parser state, *parser = &state;
    uint64_t string_bytes = 0;
    int code = colibri_i_parse_header(f, &string_bytes);
    if (code)
        return code;
    memset(parser, 0, sizeof *parser);
    parser->f = f;
    parser->string_bytes = (uint32_t)string_bytes;
    code = colibri_i_parse_named(parser, "dtype", f->i_dtypes, f->n_dtypes, 32, colibri_i_parse_dtype, NULL, NULL);
    if (!code)
        code = colibri_i_parse_layouts(parser);
    if (!code)
        code = colibri_i_parse_layers(parser);
    if (!code)
        code = colibri_i_parse_packs(parser);
    if (!code)
        code = colibri_i_walk_table(parser, "tensor", f->i_tensors, f->n_tensors, 96, colibri_i_parse_tensor,
                                    f->i_packs, f->n_layers + 1, COLIBRI_E_BAD_TENSOR, &f->i_tensor_names);
    if (!code)
        code = colibri_i_walk_table(parser, "file", f->i_files, f->n_files, 48, colibri_i_parse_file,
                                    f->i_packs + 16 * ((size_t)f->n_layers + 1), 1, COLIBRI_E_BAD_FILE_ENTRY,
                                    &f->i_file_names);
    if (!code)
        code = colibri_i_parse_named(parser, "volume", f->i_volumes, f->n_volumes, 48, colibri_i_parse_volume,
                                     NULL, NULL);
    if (!code && parser->string_end != parser->string_bytes)
        code = colibri_i_fail(f, COLIBRI_E_BAD_STRING, "tables: names end at %" PRIu32 "; string_bytes is %" PRIu32,
                              parser->string_end, parser->string_bytes);
    return code;
}

/* Index: sections 5, 6 and 11.8. */

static inline uint64_t colibri_i_entry_offset(const colibri_file *f, uint64_t entry)
{
    return colibri_i_u64(f->index + 16 * entry);
}

static inline uint64_t colibri_i_entry_size(const colibri_file *f, uint64_t entry)
{
    return colibri_i_u64(f->index + 16 * entry + 8);
}

static inline uint32_t colibri_i_layer(const colibri_file *f, uint64_t layer)
{
    return colibri_i_u32(f->i_layers + 8 * layer);
}

/* The layout's number of a present expert. */
static inline uint32_t colibri_i_entry_layout(const colibri_file *f, uint64_t entry)
{
    return f->i_expert_layouts ? colibri_i_u16(f->i_expert_layouts + 2 * entry)
                               : colibri_i_layer(f, entry / f->n_experts);
}

static inline uint32_t colibri_i_entry_volume(const colibri_file *f, uint64_t entry)
{
    return f->i_volume_map ? colibri_i_u16(f->i_volume_map + 2 * entry) : 0;
}

static inline uint64_t colibri_i_block_size(const colibri_file *f, uint32_t layout)
{
    return colibri_i_u64(f->i_layouts + 16 * (uint64_t)layout + 8);
}

static int colibri_i_refuse_block(colibri_file *f, int code, uint64_t entry, const char *required)
{
    return colibri_i_fail(f, code, "block L%" PRIu64 "/E%" PRIu64 ": %" PRIu64 " bytes at %" PRIu64 "; %s",
                          entry / f->n_experts, entry % f->n_experts, colibri_i_entry_size(f, entry),
                          colibri_i_entry_offset(f, entry), required);
}

static int colibri_i_check_presence(colibri_file *f, uint64_t n)
{
    for (uint64_t entry = 0; entry < n; entry++) {
        int is_present = colibri_i_entry_size(f, entry) != 0;
        if ((colibri_i_entry_offset(f, entry) != 0) != is_present ||
            (!is_present && colibri_i_u64(f->checksums + 8 * entry) != 0))
            return colibri_i_refuse_block(f, COLIBRI_E_ABSENT_NOT_ZERO, entry,
                                          "an absent expert has offset, size and checksum 0");
    }
    for (uint64_t layer = 0; layer < f->n_layers; layer++) {
        int has_layout = colibri_i_layer(f, layer) != COLIBRI_NONE, has_experts = 0;
        for (uint64_t expert = 0; expert < f->n_experts && !has_experts; expert++)
            has_experts = colibri_i_entry_size(f, layer * f->n_experts + expert) != 0;
        if (has_layout != has_experts)
            return colibri_i_fail(f, COLIBRI_E_BAD_LAYER, "layer %" PRIu64 ": has %s", layer,
                                  has_experts ? "experts but no layout" : "a layout but no expert");
    }
    return 0;
}

static int colibri_i_check_layouts(colibri_file *f, uint64_t n)
{
    uint8_t *is_used;
    uint32_t unused = 0;
    for (uint64_t entry = 0; entry < n && f->i_expert_layouts; entry++) {
        uint32_t number = colibri_i_u16(f->i_expert_layouts + 2 * entry);
        uint32_t layer = colibri_i_layer(f, entry / f->n_experts);
        int is_right = colibri_i_entry_size(f, entry) == 0 ? number == 0xFFFF
                       : layer == COLIBRI_MIXED            ? number < f->n_layouts
                                                           : number == layer;
        if (!is_right)
            return colibri_i_refuse_block(f, COLIBRI_E_BAD_EXPERT_LAYOUT, entry,
                                          "the number of its layout is its layer's, or 65535 for an absent expert");
    }
    is_used = (uint8_t *)colibri_i_new(f, f->n_layouts);
    if (!is_used)
        return COLIBRI_E_NO_MEMORY;
    memset(is_used, 0, f->n_layouts);
    for (uint64_t entry = 0; entry < n; entry++)
        if (colibri_i_entry_size(f, entry))
            is_used[colibri_i_entry_layout(f, entry)] = 1;
    while (unused < f->n_layouts && is_used[unused])
        unused++;
    colibri_i_delete(f, is_used, f->n_layouts);
    if (unused < f->n_layouts)
        return colibri_i_fail(f, COLIBRI_E_BAD_LAYOUT, "layout %" PRIu32 ": no layer and no expert uses it", unused);
    return 0;
}

/* The data region of a volume; of the file itself for 0. */
static colibri_extent colibri_i_data_region(const colibri_file *f, uint32_t volume)
{
    return volume == 0 ? f->data : colibri_i_extent(f->i_volumes + 48 * (uint64_t)(volume - 1) + 32);
}

static int colibri_i_check_blocks(colibri_file *f, uint64_t n)
{
    for (uint64_t entry = 0; entry < n; entry++) {
        uint32_t volume = colibri_i_entry_volume(f, entry);
        if (colibri_i_entry_size(f, entry) ? volume > f->n_volumes : volume != 0)
            return colibri_i_refuse_block(f, COLIBRI_E_BAD_VOLUME, entry, "the file has no such volume");
    }
    for (uint64_t entry = 0; entry < n; entry++)
        if (colibri_i_entry_offset(f, entry) & (f->alignment - 1))
            return colibri_i_refuse_block(f, COLIBRI_E_BLOCK_MISALIGNED, entry, "a multiple of the alignment");
    for (uint64_t entry = 0; entry < n; entry++) {
        uint64_t size = colibri_i_entry_size(f, entry);
        if (size && size != colibri_i_block_size(f, colibri_i_entry_layout(f, entry)))
            return colibri_i_refuse_block(f, COLIBRI_E_BLOCK_SIZE, entry, "the block_size of its layout");
    }
    for (uint64_t entry = 0; entry < n; entry++) {
        uint64_t offset = colibri_i_entry_offset(f, entry), size = colibri_i_entry_size(f, entry);
        colibri_extent region = colibri_i_data_region(f, colibri_i_entry_volume(f, entry));
        uint64_t end = region.offset + region.size;
        if (size && (offset < region.offset || offset > end || colibri_i_pad(size, f->alignment) > end - offset))
            return colibri_i_refuse_block(f, COLIBRI_E_BLOCK_OUT_OF_BOUNDS, entry,
                                          "padded, inside the data region of the file that holds it");
    }
    return 0;
}

typedef struct colibri_i_place {
    uint64_t start, end;
    uint32_t entry; /* COLIBRI_NONE: a pack */
    uint32_t volume;
} colibri_i_place;

static int colibri_i_compare_places(const void *a, const void *b)
{
    const colibri_i_place *x = (const colibri_i_place *)a, *y = (const colibri_i_place *)b;
    if (x->volume != y->volume)
        return x->volume < y->volume ? -1 : 1;
    return (x->start > y->start) - (x->start < y->start);
}

/* The digest of a volume's blocks, `places` in order of offset (section 7.7). */
static int colibri_i_check_digest(colibri_file *f, uint32_t volume, const colibri_i_place *places, uint64_t n)
{
    const uint8_t *record = f->i_volumes + 48 * (uint64_t)(volume - 1);
    uint8_t digest[16], *bytes = (uint8_t *)colibri_i_new(f, 32 * n);
    if (!bytes)
        return COLIBRI_E_NO_MEMORY;
    for (uint64_t i = 0; i < n; i++) {
        uint64_t entry = places[i].entry;
        colibri_i_put32(bytes + 32 * i, (uint32_t)(entry / f->n_experts));
        colibri_i_put32(bytes + 32 * i + 4, (uint32_t)(entry % f->n_experts));
        memcpy(bytes + 32 * i + 8, f->index + 16 * entry, 16);
        memcpy(bytes + 32 * i + 24, f->checksums + 8 * entry, 8);
    }
    colibri_xxh3_128(bytes, (size_t)(32 * n), 0, digest);
    colibri_i_delete(f, bytes, 32 * n);
    if (memcmp(digest, record + 16, 16) != 0)
        return colibri_i_fail(f, COLIBRI_E_VOLUME_DIGEST, "volume %" PRIu32 ": its digest is not that of the index",
                              volume);
    return 0;
}

/* Overlaps of padded blocks and packs, file by file, then digests, volume by volume. */
static int colibri_i_check_places(colibri_file *f, colibri_i_place *places, uint64_t n)
{
    uint64_t first = 0;
    int is_sorted = 1, code = 0;
    for (uint64_t i = 1; i < n && is_sorted; i++)
        is_sorted = colibri_i_compare_places(&places[i - 1], &places[i]) <= 0;
    if (!is_sorted)
        qsort(places, (size_t)n, sizeof *places, colibri_i_compare_places);
    for (uint64_t i = 1; i < n; i++)
        if (places[i].volume == places[i - 1].volume && places[i - 1].end > places[i].start)
            return colibri_i_fail(f, COLIBRI_E_EXTENT_OVERLAP,
                                  "file %" PRIu32 ": the extent at %" PRIu64 " ends at %" PRIu64
                                  ", the next begins at %" PRIu64,
                                  places[i].volume, places[i - 1].start, places[i - 1].end, places[i].start);
    while (first < n && places[first].volume == 0)
        first++;
    for (uint32_t volume = 1; volume <= f->n_volumes && !code; volume++) {
        uint64_t last = first;
        while (last < n && places[last].volume == volume)
            last++;
        code = colibri_i_check_digest(f, volume, places + first, last - first);
        first = last;
    }
    return code;
}

static void colibri_i_add_place(colibri_file *f, colibri_i_place *place, colibri_extent extent, uint32_t entry,
                                uint32_t volume)
{
    place->start = extent.offset;
    place->end = extent.offset + colibri_i_pad(extent.size, f->alignment);
    place->entry = entry;
    place->volume = volume;
}

/* Step 8. */
static int colibri_i_check_index(colibri_file *f)
{
    uint64_t n = (uint64_t)f->n_layers * f->n_experts, room, used = 0;
    colibri_i_place *places;
    int code = colibri_i_check_presence(f, n);
    if (!code)
        code = colibri_i_check_layouts(f, n);
    if (!code)
        code = colibri_i_check_blocks(f, n);
    if (code)
        return code;
    room = (n + f->n_layers + 2) * sizeof *places;
    places = (colibri_i_place *)colibri_i_new(f, room);
    if (!places)
        return COLIBRI_E_NO_MEMORY;
    for (uint64_t pack = 0; pack < (uint64_t)f->n_layers + 2; pack++) {
        colibri_extent extent = colibri_i_extent(f->i_packs + 16 * pack);
        if (extent.size)
            colibri_i_add_place(f, &places[used++], extent, COLIBRI_NONE, 0);
    }
    /* Packs in front and in order: what is left to sort is in order already in most files. */
    qsort(places, (size_t)used, sizeof *places, colibri_i_compare_places);
    for (uint64_t entry = 0; entry < n; entry++) {
        colibri_extent extent = colibri_i_extent(f->index + 16 * entry);
        if (extent.size)
            colibri_i_add_place(f, &places[used++], extent, (uint32_t)entry, colibri_i_entry_volume(f, entry));
    }
    code = colibri_i_check_places(f, places, used);
    colibri_i_delete(f, places, room);
    return code;
}

/* Metadata: section 10. */

typedef struct colibri_i_json {
    const uint8_t *at, *end;
    int is_canonical;
} colibri_i_json;

static void colibri_i_skip_space(colibri_i_json *json)
{
    while (json->at < json->end && (*json->at == ' ' || *json->at == '\t' || *json->at == '\n' || *json->at == '\r')) {
        json->is_canonical = 0;
        json->at++;
    }
}

static int colibri_i_take(colibri_i_json *json, char c)
{
    if (json->at == json->end || *json->at != (uint8_t)c)
        return 0;
    json->at++;
    return 1;
}

/* Four hexadecimal digits at `p`; -1: they are not there. */
static int32_t colibri_i_hex4(const colibri_i_json *json, const uint8_t *p, int *is_lower)
{
    int32_t value = 0;
    if (json->end - p < 4)
        return -1;
    for (int i = 0; i < 4; i++) {
        int digit = p[i] >= '0' && p[i] <= '9'   ? p[i] - '0'
                    : p[i] >= 'a' && p[i] <= 'f' ? p[i] - 'a' + 10
                    : p[i] >= 'A' && p[i] <= 'F' ? p[i] - 'A' + 10
                                                 : -1;
        if (digit < 0)
            return -1;
        if (p[i] >= 'A' && p[i] <= 'F')
            *is_lower = 0;
        value = value * 16 + digit;
    }
    return value;
}

/* What stands after a backslash; 0: no escape, or half of a surrogate pair. */
static int colibri_i_json_escape(colibri_i_json *json)
{
    int is_lower = 1, c = json->at < json->end ? *json->at++ : 0;
    int32_t code, low;
    switch (c) {
    case '"':
    case '\\':
    case 'b':
    case 'f':
    case 'n':
    case 'r':
    case 't':
        return 1;
    case '/':
        json->is_canonical = 0;
        return 1;
    case 'u':
        break;
    default:
        return 0;
    }
    code = colibri_i_hex4(json, json->at, &is_lower);
    if (code < 0 || (code >= 0xDC00 && code <= 0xDFFF))
        return 0;
    json->at += 4;
    if (code >= 0xD800 && code <= 0xDBFF) {
        if (json->end - json->at < 6 || json->at[0] != '\\' || json->at[1] != 'u')
            return 0;
        low = colibri_i_hex4(json, json->at + 2, &is_lower);
        if (low < 0xDC00 || low > 0xDFFF)
            return 0;
        json->at += 6;
    }
    if (code >= 0x20 || code == '\b' || code == '\t' || code == '\n' || code == '\f' || code == '\r' || !is_lower)
        json->is_canonical = 0;
    return 1;
}

static int colibri_i_json_string(colibri_i_json *json)
{
    if (!colibri_i_take(json, '"'))
        return 0;
    while (json->at < json->end && *json->at != '"') {
        unsigned n;
        if (colibri_i_take(json, '\\')) {
            if (!colibri_i_json_escape(json))
                return 0;
            continue;
        }
        n = *json->at < 0x20 ? 0 : colibri_i_utf8(json->at, json->end);
        if (n == 0)
            return 0;
        json->at += n;
    }
    return colibri_i_take(json, '"');
}

/* Whole numbers of up to 2^53 - 1; a fraction or an exponent is not taken, so that what follows is
 * refused. */
static int colibri_i_json_number(colibri_i_json *json)
{
    int is_negative = colibri_i_take(json, '-');
    const uint8_t *start = json->at;
    uint64_t value = 0;
    while (json->at < json->end && *json->at >= '0' && *json->at <= '9') {
        if (json->at - start >= 16)
            return 0;
        value = 10 * value + (uint64_t)(*json->at++ - '0');
    }
    if (json->at == start || (*start == '0' && json->at - start > 1) || value > (UINT64_C(1) << 53) - 1)
        return 0;
    if (is_negative && value == 0)
        json->is_canonical = 0;
    return 1;
}

static int colibri_i_json_word(colibri_i_json *json, const char *word)
{
    size_t n = strlen(word);
    if ((size_t)(json->end - json->at) < n || memcmp(json->at, word, n) != 0)
        return 0;
    json->at += n;
    return 1;
}

/* The next byte of the UTF-8 of a string in canonical form; -1 at its closing quote. */
static int colibri_i_json_byte(const uint8_t **at)
{
    static const char escapes[] = "b\bf\fn\nr\rt\t";
    const uint8_t *p = *at;
    if (*p == '"')
        return -1;
    if (*p != '\\') {
        *at = p + 1;
        return *p;
    }
    *at = p + 2;
    for (size_t i = 0; escapes[i]; i += 2)
        if (p[1] == (uint8_t)escapes[i])
            return escapes[i + 1];
    if (p[1] != 'u')
        return p[1];
    *at = p + 6;
    return (p[4] - '0') * 16 + (p[5] <= '9' ? p[5] - '0' : p[5] - 'a' + 10);
}

/* Whether the string after `a`'s quote comes before that after `b`'s: by code points, which is the
 * order of their UTF-8. Both are canonical. */
static int colibri_i_json_ascends(const uint8_t *a, const uint8_t *b)
{
    int x, y;
    do {
        x = colibri_i_json_byte(&a);
        y = colibri_i_json_byte(&b);
    } while (x == y && x >= 0);
    return x < y;
}

/* One value; `depth` containers stand around it. Recursion is bounded by the depth allowed. */
static int colibri_i_json_value(colibri_i_json *json, int depth)
{
    const uint8_t *name = NULL;
    char open = json->at < json->end ? (char)*json->at : 0;
    if (open == '"')
        return colibri_i_json_string(json);
    if (open == 't' || open == 'f' || open == 'n')
        return colibri_i_json_word(json, open == 't' ? "true" : open == 'f' ? "false" : "null");
    if (open != '{' && open != '[')
        return colibri_i_json_number(json);
    if (depth == 32)
        return 0;
    json->at++;
    colibri_i_skip_space(json);
    if (colibri_i_take(json, open == '{' ? '}' : ']'))
        return 1;
    do {
        colibri_i_skip_space(json);
        if (open == '{') {
            const uint8_t *start = json->at + 1;
            if (!colibri_i_json_string(json))
                return 0;
            if (name && json->is_canonical && !colibri_i_json_ascends(name, start))
                json->is_canonical = 0;
            name = start;
            colibri_i_skip_space(json);
            if (!colibri_i_take(json, ':'))
                return 0;
            colibri_i_skip_space(json);
        }
        if (!colibri_i_json_value(json, depth + 1))
            return 0;
        colibri_i_skip_space(json);
    } while (colibri_i_take(json, ','));
    return colibri_i_take(json, open == '{' ? '}' : ']');
}

/* Step 9. */
static int colibri_i_check_metadata(colibri_file *f)
{
    colibri_i_json json;
    int is_object;
    json.at = (const uint8_t *)f->metadata;
    json.end = json.at + f->metadata_length;
    json.is_canonical = 1;
    colibri_i_skip_space(&json);
    is_object = json.at < json.end && *json.at == '{' && colibri_i_json_value(&json, 0);
    colibri_i_skip_space(&json);
    if (!is_object || json.at != json.end)
        return colibri_i_fail(f, COLIBRI_E_METADATA_INVALID,
                              "metadata: byte %" PRIu64 " ends what is a JSON object as section 10 defines",
                              (uint64_t)(json.at - (const uint8_t *)f->metadata));
    if (!json.is_canonical)
        return colibri_i_fail(f, COLIBRI_E_METADATA_NOT_CANONICAL,
                              "metadata: not the canonical text: sorted members, no white space, minimal escapes");
    return 0;
}

/* Volumes: sections 6 and 11.10. */

typedef struct colibri_i_page {
    uint64_t file_size, data_offset, data_length;
    uint32_t number, align_log2, label_length;
    uint8_t digest[16], label[255];
    uint8_t is_sound;
} colibri_i_page;

typedef struct colibri_i_candidate {
    char *path;
    uint64_t file_size;
    colibri_i_page pages[2]; /* at its start and at its end */
} colibri_i_candidate;

typedef struct colibri_i_candidates {
    colibri_i_candidate *items;
    size_t n, room;
} colibri_i_candidates;

static void colibri_i_parse_page(colibri_i_page *page, const uint8_t bytes[4096])
{
    uint64_t end;
    page->is_sound = 0;
    page->number = colibri_i_u32(bytes + 12);
    page->file_size = colibri_i_u64(bytes + 16);
    memcpy(page->digest, bytes + 24, 16);
    page->data_offset = colibri_i_u64(bytes + 40);
    page->data_length = colibri_i_u64(bytes + 48);
    page->align_log2 = colibri_i_u32(bytes + 56);
    page->label_length = colibri_i_u32(bytes + 60);
    memcpy(page->label, bytes + 64, 255);
    if (colibri_i_check_page(bytes, COLIBRI_I_VOLUME_MAGIC) != 0 || page->label_length > 255 ||
        !colibri_i_is_zero(bytes + 64 + page->label_length, 4088 - 64 - (uint64_t)page->label_length) ||
        page->file_size < COLIBRI_PAGE)
        return;
    end = page->file_size - COLIBRI_PAGE;
    page->is_sound = page->data_offset <= end && page->data_length == end - page->data_offset;
}

/* `folder`/`name`, or a copy of `name` if `folder` is empty, for colibri_i_delete_path. */
static char *colibri_i_join(colibri_file *f, const char *folder, const char *name)
{
    size_t length = strlen(folder);
    const char *separator = length == 0 || folder[length - 1] == '/' ? "" : "/";
    size_t room = length + strlen(separator) + strlen(name) + 1;
    char *path = (char *)colibri_i_new(f, room);
    if (path)
        snprintf(path, room, "%s%s%s", folder, separator, name);
    return path;
}

static void colibri_i_delete_path(colibri_file *f, char *path)
{
    if (path)
        colibri_i_delete(f, path, strlen(path) + 1);
}

/* One more candidate; the list grows by half. */
static int colibri_i_add_candidate(colibri_file *f, colibri_i_candidates *list, char *path)
{
    if (list->n == list->room) {
        size_t room = list->room + list->room / 2 + 8;
        colibri_i_candidate *items = (colibri_i_candidate *)colibri_i_new(f, room * sizeof *items);
        if (!items)
            return COLIBRI_E_NO_MEMORY;
        if (list->n)
            memcpy(items, list->items, list->n * sizeof *items);
        colibri_i_delete(f, list->items, list->room * sizeof *items);
        list->items = items;
        list->room = room;
    }
    memset(&list->items[list->n], 0, sizeof *list->items);
    list->items[list->n].path = path;
    list->n++;
    return 0;
}

static int colibri_i_compare_candidates(const void *a, const void *b)
{
    return strcmp(((const colibri_i_candidate *)a)->path, ((const colibri_i_candidate *)b)->path);
}

/* Reads the pages of a candidate. One that cannot be read is not the volume; if none is found, that
 * is said. */
static void colibri_i_read_pages(colibri_i_candidate *candidate)
{
    uint8_t bytes[4096];
    struct stat status;
    int fd = colibri_i_open_file(candidate->path, &status);
    if (fd < 0)
        return;
    candidate->file_size = (uint64_t)status.st_size;
    if (candidate->file_size >= COLIBRI_PAGE) {
        if (colibri_i_pread(fd, bytes, COLIBRI_PAGE, 0) == 0)
            colibri_i_parse_page(&candidate->pages[0], bytes);
        if (colibri_i_pread(fd, bytes, COLIBRI_PAGE, candidate->file_size - COLIBRI_PAGE) == 0)
            colibri_i_parse_page(&candidate->pages[1], bytes);
    }
    close(fd);
}

/* The files of `folder` whose names end in .colibri-volume, in order of names, after those in `list`. */
static int colibri_i_list_folder(colibri_file *f, const char *folder, colibri_i_candidates *list)
{
    static const char suffix[] = ".colibri-volume";
    size_t first = list->n;
    int code = 0;
    DIR *stream = opendir(folder);
    if (!stream)
        return colibri_i_fail_os(f, "listing the folder of volumes", folder);
    for (;;) {
        struct dirent *entry;
        size_t length;
        char *path;
        errno = 0;
        entry = readdir(stream);
        if (!entry) {
            if (errno)
                code = colibri_i_fail_os(f, "listing the folder of volumes", folder);
            break;
        }
        length = strlen(entry->d_name);
        if (length < sizeof suffix - 1 || strcmp(entry->d_name + length - (sizeof suffix - 1), suffix) != 0)
            continue;
        path = colibri_i_join(f, folder, entry->d_name);
        code = path ? colibri_i_add_candidate(f, list, path) : COLIBRI_E_NO_MEMORY;
        if (code) {
            colibri_i_delete_path(f, path);
            break;
        }
    }
    closedir(stream);
    if (code || list->n == first)
        return code;
    qsort(list->items + first, list->n - first, sizeof *list->items, colibri_i_compare_candidates);
    for (size_t i = first; i < list->n; i++)
        colibri_i_read_pages(&list->items[i]);
    return 0;
}

static int colibri_i_is_named(const colibri_i_page *page, uint32_t number, const colibri_volume *volume)
{
    return page->is_sound && page->number == number && page->label_length == volume->label_length &&
           memcmp(page->label, volume->label, volume->label_length) == 0;
}

/* Opens `candidate`, whose page `match` has the digest, number and label of volume `number`. */
static int colibri_i_take_volume(colibri_file *f, uint32_t number, const colibri_volume *volume,
                                 colibri_i_candidate *candidate, const colibri_i_page *match)
{
    colibri_i_handle *handle = &f->i_handles[number];
    struct stat status;
    if (match->data_offset != volume->data_offset || match->data_length != volume->data_length ||
        match->align_log2 != f->i_align_log2)
        return colibri_i_fail(f, COLIBRI_E_VOLUME_MISMATCH,
                              "volume %" PRIu32 ": the page of %.160s is not as its record", number, candidate->path);
    handle->fd = colibri_i_open_file(candidate->path, &status);
    if (handle->fd < 0)
        return colibri_i_fail_os(f, "opening a volume", candidate->path);
    if ((uint64_t)status.st_size != volume->file_size)
        return colibri_i_fail(f,
                              (uint64_t)status.st_size < volume->file_size ? COLIBRI_E_TRUNCATED
                                                                           : COLIBRI_E_TRAILING_BYTES,
                              "volume %" PRIu32 ": %.120s has %" PRIu64 " bytes; %" PRIu64 " are recorded", number,
                              candidate->path, (uint64_t)status.st_size, volume->file_size);
    for (unsigned end = 0; end < 2; end++)
        if (memcmp(&candidate->pages[end], match, sizeof *match) != 0)
            colibri_i_warn(f, end ? COLIBRI_VOLUME_END : COLIBRI_VOLUME_START, number);
    handle->path = colibri_i_join(f, "", candidate->path);
    return handle->path ? 0 : COLIBRI_E_NO_MEMORY;
}

/* The first file that matches and is whole, or else the first that matches. */
static int colibri_i_find_volume(colibri_file *f, uint32_t number, colibri_i_candidates *list)
{
    colibri_i_candidate *best = NULL, *impostor = NULL;
    const colibri_i_page *match = NULL;
    colibri_volume volume;
    colibri_get_volume(f, number, &volume);
    for (size_t i = 0; i < list->n; i++) {
        colibri_i_candidate *candidate = &list->items[i];
        const colibri_i_page *same = NULL;
        int is_named = 0;
        for (unsigned end = 0; end < 2; end++) {
            const colibri_i_page *page = &candidate->pages[end];
            if (!colibri_i_is_named(page, number, &volume))
                continue;
            is_named = 1;
            if (!same && memcmp(page->digest, volume.digest, 16) == 0)
                same = page;
        }
        if (same && (!best || (best->file_size != volume.file_size && candidate->file_size == volume.file_size))) {
            best = candidate;
            match = same;
        }
        if (is_named && !same && !impostor)
            impostor = candidate;
    }
    if (best)
        return colibri_i_take_volume(f, number, &volume, best, match);
    if (impostor)
        return colibri_i_fail(f, COLIBRI_E_VOLUME_MISMATCH,
                              "volume %" PRIu32 ": %.160s has its label and number, but other content", number,
                              impostor->path);
    return colibri_i_fail(f, COLIBRI_E_VOLUME_MISSING, "volume %" PRIu32 " (%.*s): in none of the folders", number,
                          (int)(volume.label_length < 100 ? volume.label_length : 100), volume.label);
}

/* Step 10. The file's own folder is searched first. */
static int colibri_i_open_volumes(colibri_file *f, const char *path, const colibri_options *options)
{
    colibri_i_candidates list;
    const char *slash = strrchr(path, '/');
    size_t length = slash ? (size_t)(slash - path) + (slash == path) : 1;
    char *folder = (char *)colibri_i_new(f, length + 1);
    int code;
    if (!folder)
        return COLIBRI_E_NO_MEMORY;
    memset(&list, 0, sizeof list);
    memcpy(folder, slash ? path : ".", length);
    folder[length] = 0;
    code = colibri_i_list_folder(f, folder, &list);
    colibri_i_delete(f, folder, length + 1);
    for (size_t i = 0; i < options->n_volume_folders && !code; i++)
        code = colibri_i_list_folder(f, options->volume_folders[i], &list);
    for (uint32_t number = 1; number <= f->n_volumes && !code; number++)
        code = colibri_i_find_volume(f, number, &list);
    for (size_t i = 0; i < list.n; i++)
        colibri_i_delete_path(f, list.items[i].path);
    colibri_i_delete(f, list.items, list.room * sizeof *list.items);
    return code;
}

/* Opening and closing. */

/* Room for `n_volumes` more handles and for every warning there can be. */
static int colibri_i_make_room(colibri_file *f, uint32_t n_handles)
{
    uint32_t room = 8 + n_handles;
    colibri_i_handle *handles = (colibri_i_handle *)colibri_i_new(f, n_handles * sizeof *handles);
    colibri_warning *warnings;
    if (!handles)
        return COLIBRI_E_NO_MEMORY;
    for (uint32_t i = 0; i < n_handles; i++) {
        memset(&handles[i], 0, sizeof handles[i]);
        handles[i].fd = handles[i].direct_fd = -1;
    }
    if (f->i_n_handles)
        memcpy(handles, f->i_handles, f->i_n_handles * sizeof *handles);
    colibri_i_delete(f, f->i_handles, f->i_n_handles * sizeof *handles);
    f->i_handles = handles;
    f->i_n_handles = n_handles;
    warnings = (colibri_warning *)colibri_i_new(f, room * sizeof *warnings);
    if (!warnings)
        return COLIBRI_E_NO_MEMORY;
    if (f->i_n_warnings)
        memcpy(warnings, f->i_warnings, f->i_n_warnings * sizeof *warnings);
    colibri_i_delete(f, f->i_warnings, f->i_room_warnings * sizeof *warnings);
    f->i_warnings = warnings;
    f->i_room_warnings = room;
    return 0;
}

static int colibri_i_open(colibri_file *f, const char *path, const colibri_options *options)
{
    uint8_t page[4096];
    struct stat status;
    int code = colibri_i_make_room(f, 1);
    if (code)
        return code;
    f->i_handles[0].fd = colibri_i_open_file(path, &status);
    if (f->i_handles[0].fd < 0)
        return errno ? colibri_i_fail_os(f, "opening", path)
                     : colibri_i_fail(f, COLIBRI_E_NOT_A_FILE, "%.200s: no regular file", path);
    f->file_size = (uint64_t)status.st_size;
    if ((code = colibri_i_read_superblock(f, page)) != 0 || (code = colibri_i_parse_superblock(f, page)) != 0 ||
        (code = colibri_i_load_regions(f)) != 0 || (code = colibri_i_parse_tables(f)) != 0 ||
        (code = colibri_i_check_index(f)) != 0 || (code = colibri_i_check_metadata(f)) != 0)
        return code;
    if (f->n_volumes && !(options->flags & COLIBRI_WITHOUT_VOLUMES)) {
        if ((code = colibri_i_make_room(f, 1 + f->n_volumes)) != 0 ||
            (code = colibri_i_open_volumes(f, path, options)) != 0)
            return code;
    }
    for (uint32_t i = 0; i < f->i_n_handles && !(options->flags & COLIBRI_WITHOUT_DIRECT); i++)
        colibri_i_open_direct(&f->i_handles[i], i ? f->i_handles[i].path : path);
    return 0;
}

COLIBRI_API int colibri_open(colibri_file *file, const char *path, const colibri_options *options)
{
    colibri_options defaults;
    int code;
    memset(file, 0, sizeof *file);
    if (!options) {
        memset(&defaults, 0, sizeof defaults);
        options = &defaults;
    }
    file->i_allocate = options->allocate ? options->allocate : colibri_i_malloc;
    file->i_release = options->allocate ? options->release : colibri_i_free;
    file->i_context = options->context;
    code = colibri_i_open(file, path, options);
    if (code) {
        char message[sizeof file->message];
        int32_t os_errno = file->os_errno;
        memcpy(message, file->message, sizeof message);
        colibri_close(file);
        memcpy(file->message, message, sizeof message);
        file->code = code;
        file->os_errno = os_errno;
        errno = os_errno;
    }
    return code;
}

COLIBRI_API void colibri_close(colibri_file *file)
{
    if (!file->i_release)
        return;
    for (uint32_t i = 0; i < file->i_n_handles; i++) {
        colibri_i_handle *handle = &file->i_handles[i];
        if (handle->fd >= 0)
            close(handle->fd);
        if (handle->direct_fd >= 0)
            close(handle->direct_fd);
        colibri_i_delete_path(file, handle->path);
    }
    colibri_i_delete(file, file->i_handles, file->i_n_handles * sizeof *file->i_handles);
    colibri_i_delete(file, file->i_warnings, file->i_room_warnings * sizeof *file->i_warnings);
    colibri_i_delete(file, file->i_tensor_names, (uint64_t)file->n_tensors * sizeof(colibri_i_name));
    colibri_i_delete(file, file->i_file_names, (uint64_t)file->n_files * sizeof(colibri_i_name));
    for (unsigned k = 0; k < 7; k++)
        colibri_i_delete(file, file->i_bytes[k], file->i_sizes[k]);
    memset(file, 0, sizeof *file);
}

/* Looking up. */

COLIBRI_API const colibri_warning *colibri_warnings(const colibri_file *file, uint32_t *n)
{
    *n = file->i_n_warnings;
    return file->i_warnings;
}

COLIBRI_API void colibri_warning_text(const colibri_warning *warning, char *text, size_t size)
{
    int is_end = warning->place == COLIBRI_SUPERBLOCK_END || warning->place == COLIBRI_VOLUME_END ||
                 warning->place == COLIBRI_REGION_END;
    const char *end = is_end ? "end" : "start";
    if (warning->place <= COLIBRI_SUPERBLOCK_END)
        snprintf(text, size, "the superblock at the %s is damaged", end);
    else if (warning->place == COLIBRI_REGION_START || warning->place == COLIBRI_REGION_END)
        snprintf(text, size, "the %s region at the %s is damaged", colibri_i_region_names[warning->number & 7], end);
    else
        snprintf(text, size, "the page at the %s of volume %" PRIu32 " is damaged", end, warning->number);
}

COLIBRI_API int colibri_expert(const colibri_file *file, uint32_t layer, uint32_t expert, colibri_block *out)
{
    uint64_t entry = (uint64_t)layer * file->n_experts + expert;
    memset(out, 0, sizeof *out);
    if (layer >= file->n_layers || expert >= file->n_experts)
        return COLIBRI_E_NO_SUCH_EXPERT;
    out->size = colibri_i_entry_size(file, entry);
    if (!out->size)
        return COLIBRI_E_NO_SUCH_EXPERT;
    out->offset = colibri_i_entry_offset(file, entry);
    out->padded = colibri_i_pad(out->size, file->alignment);
    out->checksum = colibri_i_u64(file->checksums + 8 * entry);
    out->layout = file->i_expert_layouts ? colibri_i_u16(file->i_expert_layouts + 2 * entry)
                                         : colibri_i_layer(file, layer);
    out->volume = colibri_i_entry_volume(file, entry);
    return 0;
}

COLIBRI_API int colibri_layer_layout(const colibri_file *file, uint32_t layer, uint32_t *layout)
{
    *layout = COLIBRI_NONE;
    if (layer >= file->n_layers)
        return COLIBRI_E_NO_SUCH_LAYER;
    *layout = colibri_i_layer(file, layer);
    return *layout == COLIBRI_MIXED ? COLIBRI_E_MIXED_LAYER : 0;
}

COLIBRI_API int colibri_get_dtype(const colibri_file *file, uint32_t number, colibri_dtype *out)
{
    const uint8_t *p;
    memset(out, 0, sizeof *out);
    if (number >= file->n_dtypes)
        return COLIBRI_E_NO_SUCH_RECORD;
    p = file->i_dtypes + 32 * (size_t)number;
    out->name = file->i_strings + colibri_i_u32(p);
    out->name_length = colibri_i_u32(p + 4);
    out->ggml_id = (int32_t)colibri_i_u32(p + 8);
    out->block_elements = colibri_i_u32(p + 12);
    out->block_bytes = colibri_i_u32(p + 16);
    return 0;
}

COLIBRI_API int colibri_get_layout(const colibri_file *file, uint32_t number, colibri_layout *out)
{
    const uint8_t *p;
    memset(out, 0, sizeof *out);
    if (number >= file->n_layouts)
        return COLIBRI_E_NO_SUCH_RECORD;
    p = file->i_layouts + 16 * (size_t)number;
    out->first_segment = colibri_i_u32(p);
    out->n_segments = colibri_i_u32(p + 4);
    out->block_size = colibri_i_u64(p + 8);
    return 0;
}

COLIBRI_API int colibri_get_segment(const colibri_file *file, uint32_t number, colibri_segment *out)
{
    const uint8_t *p;
    memset(out, 0, sizeof *out);
    if (number >= file->n_segments)
        return COLIBRI_E_NO_SUCH_RECORD;
    p = file->i_segments + 64 * (size_t)number;
    out->role = colibri_i_u16(p);
    out->dtype = colibri_i_u16(p + 2);
    out->row_interleave = colibri_i_u16(p + 4);
    out->rank = colibri_i_u16(p + 6);
    out->offset = colibri_i_u64(p + 8);
    out->size = colibri_i_u64(p + 16);
    for (unsigned i = 0; i < 4; i++)
        out->shape[i] = colibri_i_u64(p + 24 + 8 * i);
    return 0;
}

COLIBRI_API int colibri_find_segment(const colibri_file *file, uint32_t layout, uint32_t role, colibri_segment *out)
{
    colibri_layout found;
    int code = colibri_get_layout(file, layout, &found);
    for (uint32_t i = 0; !code && i < found.n_segments; i++) {
        colibri_get_segment(file, found.first_segment + i, out);
        if (out->role == role)
            return 0;
    }
    memset(out, 0, sizeof *out);
    return COLIBRI_E_NO_SUCH_RECORD;
}

COLIBRI_API int colibri_get_tensor(const colibri_file *file, uint32_t number, colibri_tensor *out)
{
    const uint8_t *p;
    memset(out, 0, sizeof *out);
    if (number >= file->n_tensors)
        return COLIBRI_E_NO_SUCH_RECORD;
    p = file->i_tensors + 96 * (size_t)number;
    out->name = file->i_strings + colibri_i_u32(p);
    out->name_length = colibri_i_u32(p + 4);
    out->layer = colibri_i_u32(p + 8);
    out->dtype = colibri_i_u16(p + 12);
    out->row_interleave = colibri_i_u16(p + 14);
    out->rank = colibri_i_u16(p + 16);
    for (unsigned i = 0; i < 4; i++)
        out->shape[i] = colibri_i_u64(p + 24 + 8 * i);
    out->offset = colibri_i_u64(p + 56);
    out->size = colibri_i_u64(p + 64);
    out->checksum = colibri_i_u64(p + 72);
    return 0;
}

COLIBRI_API int colibri_get_file(const colibri_file *file, uint32_t number, colibri_embedded *out)
{
    const uint8_t *p;
    memset(out, 0, sizeof *out);
    if (number >= file->n_files)
        return COLIBRI_E_NO_SUCH_RECORD;
    p = file->i_files + 48 * (size_t)number;
    out->name = file->i_strings + colibri_i_u32(p);
    out->name_length = colibri_i_u32(p + 4);
    out->offset = colibri_i_u64(p + 8);
    out->size = colibri_i_u64(p + 16);
    out->checksum = colibri_i_u64(p + 24);
    return 0;
}

COLIBRI_API int colibri_get_volume(const colibri_file *file, uint32_t number, colibri_volume *out)
{
    const uint8_t *p;
    memset(out, 0, sizeof *out);
    if (number < 1 || number > file->n_volumes)
        return COLIBRI_E_NO_SUCH_RECORD;
    p = file->i_volumes + 48 * (size_t)(number - 1);
    out->label = file->i_strings + colibri_i_u32(p);
    out->label_length = colibri_i_u32(p + 4);
    out->file_size = colibri_i_u64(p + 8);
    memcpy(out->digest, p + 16, 16);
    out->data_offset = colibri_i_u64(p + 32);
    out->data_length = colibri_i_u64(p + 40);
    out->path = number < file->i_n_handles ? file->i_handles[number].path : NULL;
    return 0;
}

static int colibri_i_find_name(const colibri_i_name *names, uint32_t n, const char *name, uint32_t *number)
{
    size_t length = strlen(name);
    uint32_t low = 0, high = n;
    *number = COLIBRI_NONE;
    while (low < high && length <= 255) {
        uint32_t middle = low + (high - low) / 2;
        int order = colibri_i_compare_text(names[middle].text, names[middle].length, name, (uint32_t)length);
        if (order == 0) {
            *number = names[middle].number;
            return 1;
        }
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return 0;
}

COLIBRI_API int colibri_find_tensor(const colibri_file *file, const char *name, uint32_t *number)
{
    return colibri_i_find_name(file->i_tensor_names, file->n_tensors, name, number) ? 0 : COLIBRI_E_NO_SUCH_TENSOR;
}

COLIBRI_API int colibri_find_file(const colibri_file *file, const char *name, uint32_t *number)
{
    return colibri_i_find_name(file->i_file_names, file->n_files, name, number) ? 0 : COLIBRI_E_NO_SUCH_FILE;
}

COLIBRI_API int colibri_get_pack(const colibri_file *file, uint32_t layer, colibri_extent *out)
{
    memset(out, 0, sizeof *out);
    if (layer != COLIBRI_NONE && layer >= file->n_layers)
        return COLIBRI_E_NO_SUCH_LAYER;
    *out = colibri_i_extent(file->i_packs + 16 * (size_t)(layer == COLIBRI_NONE ? file->n_layers : layer));
    return 0;
}

/* Reading. */

COLIBRI_API int colibri_descriptor(const colibri_file *file, uint32_t volume, int is_direct)
{
    if (volume >= file->i_n_handles)
        return -1;
    return is_direct ? file->i_handles[volume].direct_fd : file->i_handles[volume].fd;
}

/* Direct reads of whole pages; gives the bytes that came before the kernel stopped in `done`. A read
 * that ends off a page, or that the kernel refuses, is finished through the page cache. */
static int colibri_i_read_direct(const colibri_i_handle *handle, uint8_t *p, uint64_t size, uint64_t offset,
                                 uint64_t *done, colibri_io *io)
{
    while (*done < size) {
        size_t part = size - *done < 0x40000000 ? (size_t)(size - *done) : 0x40000000;
        ssize_t n = pread(handle->direct_fd, p + *done, part, (off_t)(offset + *done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EINVAL || errno == EOPNOTSUPP)) {
            io->mode = COLIBRI_IO_REFUSED;
            io->direct_errno = errno;
            return 0;
        }
        if (n < 0)
            return COLIBRI_E_OS_ERROR;
        if (n == 0)
            return COLIBRI_E_SHORT_READ;
        *done += (uint64_t)n;
        if (n % (ssize_t)COLIBRI_DIRECT_ALIGNMENT) {
            io->mode = COLIBRI_IO_REFUSED;
            return 0;
        }
    }
    return 0;
}

COLIBRI_API int colibri_check_block(const colibri_file *file, uint32_t layer, uint32_t expert, const void *bytes)
{
    colibri_block block;
    int code = colibri_expert(file, layer, expert, &block);
    if (code)
        return code;
    return colibri_xxh3_64(bytes, (size_t)block.size, (uint64_t)layer << 32 | expert) == block.checksum
               ? 0
               : COLIBRI_E_BLOCK_CHECKSUM;
}

COLIBRI_API int colibri_check_tensor(const colibri_file *file, uint32_t number, const void *bytes)
{
    colibri_tensor tensor;
    int code = colibri_get_tensor(file, number, &tensor);
    if (code)
        return code;
    return colibri_xxh3_64(bytes, (size_t)tensor.size, UINT64_C(0xFFFFFFFF) << 32 | number) == tensor.checksum
               ? 0
               : COLIBRI_E_TENSOR_CHECKSUM;
}

static void colibri_i_begin_io(colibri_io *io, uint32_t mode)
{
    io->mode = mode;
    io->direct_errno = 0;
    io->os_errno = 0;
}

COLIBRI_API int colibri_read_block(const colibri_file *file, uint32_t layer, uint32_t expert, void *buffer,
                                   uint64_t buffer_size, uint32_t flags, colibri_io *io)
{
    const colibri_i_handle *handle;
    colibri_block block;
    colibri_io unused;
    uint64_t done = 0;
    int code = colibri_expert(file, layer, expert, &block);
    if (!io)
        io = &unused;
    colibri_i_begin_io(io, flags & COLIBRI_BUFFERED ? COLIBRI_IO_ASKED : COLIBRI_IO_DIRECT);
    if (code)
        return code;
    if (block.volume >= file->i_n_handles)
        return COLIBRI_E_NO_SUCH_VOLUME;
    if (buffer_size < block.size)
        return COLIBRI_E_BAD_BUFFER;
    handle = &file->i_handles[block.volume];
    if (io->mode == COLIBRI_IO_DIRECT && handle->direct_fd < 0) {
        io->mode = handle->direct_errno ? COLIBRI_IO_REFUSED : COLIBRI_IO_ASKED;
        io->direct_errno = handle->direct_errno;
    } else if (io->mode == COLIBRI_IO_DIRECT &&
               ((uintptr_t)buffer % COLIBRI_DIRECT_ALIGNMENT || buffer_size < block.padded)) {
        io->mode = COLIBRI_IO_UNALIGNED;
    } else if (io->mode == COLIBRI_IO_DIRECT) {
        code = colibri_i_read_direct(handle, (uint8_t *)buffer, block.padded, block.offset, &done, io);
    }
    if (!code && done < block.size)
        code = colibri_i_pread(handle->fd, (uint8_t *)buffer + done, block.size - done, block.offset + done);
    if (code == COLIBRI_E_OS_ERROR)
        io->os_errno = errno;
    if (code || flags & COLIBRI_UNCHECKED)
        return code;
    return colibri_check_block(file, layer, expert, buffer);
}

static int colibri_i_read_part(const colibri_file *file, uint64_t offset, uint64_t size, void *buffer,
                               uint64_t buffer_size, colibri_io *io)
{
    int code;
    if (buffer_size < size)
        return COLIBRI_E_BAD_BUFFER;
    code = colibri_i_pread(file->i_handles[0].fd, buffer, size, offset);
    if (code == COLIBRI_E_OS_ERROR)
        io->os_errno = errno;
    return code;
}

COLIBRI_API int colibri_read_tensor(const colibri_file *file, uint32_t number, void *buffer, uint64_t buffer_size,
                                    uint32_t flags, colibri_io *io)
{
    colibri_tensor tensor;
    colibri_io unused;
    int code = colibri_get_tensor(file, number, &tensor);
    if (!io)
        io = &unused;
    colibri_i_begin_io(io, COLIBRI_IO_ASKED);
    if (!code)
        code = colibri_i_read_part(file, tensor.offset, tensor.size, buffer, buffer_size, io);
    return code || flags & COLIBRI_UNCHECKED ? code : colibri_check_tensor(file, number, buffer);
}

COLIBRI_API int colibri_read_file(const colibri_file *file, uint32_t number, void *buffer, uint64_t buffer_size,
                                  uint32_t flags, colibri_io *io)
{
    colibri_embedded entry;
    colibri_io unused;
    int code = colibri_get_file(file, number, &entry);
    if (!io)
        io = &unused;
    colibri_i_begin_io(io, COLIBRI_IO_ASKED);
    if (!code)
        code = colibri_i_read_part(file, entry.offset, entry.size, buffer, buffer_size, io);
    if (code || flags & COLIBRI_UNCHECKED)
        return code;
    return colibri_xxh3_64(buffer, (size_t)entry.size, UINT64_C(0xFFFFFFFE) << 32 | number) == entry.checksum
               ? 0
               : COLIBRI_E_FILE_CHECKSUM;
}

COLIBRI_API int colibri_plain(const colibri_file *file, uint32_t dtype, uint32_t row_interleave,
                              const uint64_t shape[4], uint64_t size, const void *stored, void *plain)
{
    const uint8_t *from = (const uint8_t *)stored;
    uint8_t *to = (uint8_t *)plain;
    const colibri_i_known_dtype *known;
    colibri_dtype kind;
    uint64_t n_blocks;
    if (colibri_get_dtype(file, dtype, &kind) != 0)
        return COLIBRI_E_NO_SUCH_RECORD;
    if (row_interleave == 0) {
        if (size)
            memcpy(plain, stored, (size_t)size);
        return 0;
    }
    known = colibri_i_know_dtype(kind.name, kind.name_length);
    if (!known || known->units[0][0] == 0 || row_interleave != 16 || shape[2] || shape[0] % 16 ||
        shape[1] % known->elements || colibri_i_array_size(shape, 2, known->elements, known->bytes) != size)
        return COLIBRI_E_BAD_INTERLEAVE;
    n_blocks = shape[1] / known->elements;
    for (uint64_t group = 0; group < shape[0] && size; group += 16)
        for (uint64_t block = 0; block < n_blocks; block++) {
            size_t start = 0;
            for (unsigned run = 0; run < 3 && known->units[run][0]; run++)
                for (unsigned unit = 0; unit < known->units[run][0]; unit++) {
                    size_t width = known->units[run][1];
                    for (uint64_t row = group; row < group + 16; row++, from += width)
                        memcpy(to + (row * n_blocks + block) * known->bytes + start, from, width);
                    start += width;
                }
        }
    return 0;
}

#undef COLIBRI_I_REFUSE
#undef COLIBRI_I_LIMIT
#undef COLIBRI_I_MAX_TABLES

#ifdef __cplusplus
}
#endif

#endif /* COLIBRI_IMPLEMENTATION */
