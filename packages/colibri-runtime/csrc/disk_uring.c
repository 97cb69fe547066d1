/* Reads through io_uring over its raw system calls: io_uring(7), io_uring_setup(2),
 * io_uring_enter(2), io_uring_register(2). Structs and numbers are those of the kernel's interface
 * <linux/io_uring.h>, which toolchains with old headers lack. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* syscall */
#endif
#include <errno.h>
#include <string.h>

#include "disk.h"
#include "disk_internal.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* The same on every architecture but alpha. */
enum { SETUP = 425, ENTER = 426, REGISTER = 427 };

enum { MAX_ENTRIES = 4096, MAX_BUFFERS = 1024, MAX_FILES = 1024 };

enum { OP_READ_FIXED = 4, OP_READ = 22 };
enum { SQE_FIXED_FILE = 1 };
enum { ENTER_GETEVENTS = 1 };
enum { FEAT_SINGLE_MMAP = 1, FEAT_NODROP = 2 };
enum {
    REGISTER_BUFFERS = 0,
    UNREGISTER_BUFFERS = 1,
    REGISTER_FILES = 2,
    UNREGISTER_FILES = 3
};
#define OFF_RINGS 0
#define OFF_SQES 0x10000000

struct sqe {
    uint8_t opcode;
    uint8_t flags;
    uint16_t ioprio;
    int32_t fd;
    uint64_t offset;
    uint64_t address;
    uint32_t length;
    uint32_t rw_flags;
    uint64_t user_data;
    uint16_t buffer;
    uint16_t personality;
    uint32_t splice_fd;
    uint64_t unused[2];
};

struct cqe {
    uint64_t user_data;
    int32_t result;
    uint32_t flags;
};

struct params {
    uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd;
    uint32_t reserved[3];
    struct {
        uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, reserved;
        uint64_t user_address;
    } sq;
    struct {
        uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, reserved;
        uint64_t user_address;
    } cq;
};

_Static_assert(sizeof(struct sqe) == 64, "the kernel's struct io_uring_sqe");
_Static_assert(sizeof(struct cqe) == 16, "the kernel's struct io_uring_cqe");
_Static_assert(sizeof(struct params) == 120, "the kernel's struct io_uring_params");

struct uring {
    int32_t fd;         /* -1: closed */
    uint32_t in_flight; /* begun, completion not taken */
    uint32_t entries;   /* most in flight: a power of two, of which the completions' ring has two */
    uint32_t sq_mask, cq_mask;
    uint32_t *sq_head, *sq_tail, *sq_array, *cq_head, *cq_tail;
    struct sqe *sqes;
    struct cqe *cqes;
    uint8_t *rings;
    size_t rings_bytes, sqes_bytes;
    uint64_t buffers, buffers_bytes, piece_bytes; /* registered memory; 0 bytes: none */
    uint32_t n_files;                             /* registered; 0: none */
};

static int enter(const struct uring *u, uint32_t n_submit, uint32_t n_wait, uint32_t flags)
{
    const long got = syscall(ENTER, u->fd, n_submit, n_wait, flags, NULL, (size_t)0);
    return got < 0 ? -errno : (int)got;
}

static int registered(const struct uring *u, uint32_t what, const void *arg, uint32_t n)
{
    return syscall(REGISTER, u->fd, what, arg, n) < 0 ? -errno : 0;
}

static void unmap(struct uring *u)
{
    if (u->rings)
        munmap(u->rings, u->rings_bytes);
    if (u->sqes)
        munmap(u->sqes, u->sqes_bytes);
    close(u->fd);
    memset(u, 0, sizeof *u);
    u->fd = -1;
}

int32_t colibri_uring_bytes(void)
{
    return (int32_t)sizeof(struct uring);
}

int32_t colibri_uring_open(void *memory, uint32_t entries)
{
    struct uring *u = memory;
    struct params p;
    size_t sq_bytes, cq_bytes;
    void *map;

    memset(u, 0, sizeof *u);
    u->fd = -1;
    if (entries < 1 || entries > MAX_ENTRIES)
        return -EINVAL;
    memset(&p, 0, sizeof p);
    u->fd = (int32_t)syscall(SETUP, entries, &p);
    if (u->fd < 0)
        return -errno;
    /* Linux 5.5 and later; before, completions could be lost, and there is no OP_READ either. */
    if (!(p.features & FEAT_SINGLE_MMAP) || !(p.features & FEAT_NODROP)) {
        unmap(u);
        return -ENOSYS;
    }
    sq_bytes = p.sq.array + p.sq_entries * sizeof(uint32_t);
    cq_bytes = p.cq.cqes + p.cq_entries * sizeof(struct cqe);
    u->rings_bytes = sq_bytes > cq_bytes ? sq_bytes : cq_bytes;
    u->sqes_bytes = p.sq_entries * sizeof(struct sqe);
    map = mmap(NULL, u->rings_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, u->fd,
               OFF_RINGS);
    if (map != MAP_FAILED) {
        u->rings = map;
        map = mmap(NULL, u->sqes_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, u->fd,
                   OFF_SQES);
    }
    if (map == MAP_FAILED) {
        const int32_t error = -errno;
        unmap(u);
        return error;
    }
    u->sqes = map;
    /* A sandbox may allow the set-up alone. */
    if (enter(u, 0, 0, 0) < 0) {
        const int32_t error = -errno;
        unmap(u);
        return error;
    }
    u->entries = p.sq_entries;
    u->sq_head = (uint32_t *)(void *)(u->rings + p.sq.head);
    u->sq_tail = (uint32_t *)(void *)(u->rings + p.sq.tail);
    u->sq_array = (uint32_t *)(void *)(u->rings + p.sq.array);
    u->sq_mask = *(uint32_t *)(void *)(u->rings + p.sq.ring_mask);
    u->cq_head = (uint32_t *)(void *)(u->rings + p.cq.head);
    u->cq_tail = (uint32_t *)(void *)(u->rings + p.cq.tail);
    u->cq_mask = *(uint32_t *)(void *)(u->rings + p.cq.ring_mask);
    u->cqes = (struct cqe *)(void *)(u->rings + p.cq.cqes);
    return 0;
}

int32_t colibri_uring_register_buffers(void *queue, uint64_t address, uint64_t n_bytes,
                                       uint64_t piece_bytes)
{
    struct uring *u = queue;
    struct iovec pieces[MAX_BUFFERS];
    uint64_t done;
    uint32_t n = 0;
    int result = 0;

    if (u->buffers_bytes)
        result = registered(u, UNREGISTER_BUFFERS, NULL, 0);
    u->buffers_bytes = 0;
    if (result < 0 || n_bytes == 0)
        return result;
    if (piece_bytes == 0 || (n_bytes - 1) / piece_bytes >= MAX_BUFFERS)
        return -EINVAL;
    for (done = 0; done < n_bytes; done += piece_bytes, n++) {
        const uint64_t left = n_bytes - done;
        pieces[n].iov_base = (void *)(uintptr_t)(address + done);
        pieces[n].iov_len = (size_t)(left < piece_bytes ? left : piece_bytes);
    }
    result = registered(u, REGISTER_BUFFERS, pieces, n);
    if (result == 0) {
        u->buffers = address;
        u->buffers_bytes = n_bytes;
        u->piece_bytes = piece_bytes;
    }
    return result;
}

int32_t colibri_uring_register_files(void *queue, const int32_t *fds, uint32_t n)
{
    struct uring *u = queue;
    int result = 0;

    if (n > MAX_FILES)
        return -EMFILE;
    if (u->n_files)
        result = registered(u, UNREGISTER_FILES, NULL, 0);
    u->n_files = 0;
    if (result == 0 && n)
        result = registered(u, REGISTER_FILES, fds, n);
    if (result == 0)
        u->n_files = n;
    return result;
}

static void fill(const struct uring *u, struct sqe *sqe, const struct colibri_read *read)
{
    const uint64_t first = read->address - u->buffers; /* wraps below the buffers: too large */

    memset(sqe, 0, sizeof *sqe);
    sqe->opcode = OP_READ;
    sqe->fd = read->fd;
    sqe->offset = read->offset;
    sqe->address = read->address;
    sqe->length = read->length;
    sqe->user_data = read->tag;
    if (read->file >= 0 && (uint32_t)read->file < u->n_files) {
        sqe->fd = read->file;
        sqe->flags = SQE_FIXED_FILE;
    }
    if (read->length && first < u->buffers_bytes && read->length <= u->buffers_bytes - first &&
        first / u->piece_bytes == (first + read->length - 1) / u->piece_bytes) {
        sqe->opcode = OP_READ_FIXED;
        sqe->buffer = (uint16_t)(first / u->piece_bytes);
    }
}

int32_t colibri_uring_submit(void *queue, const struct colibri_read *reads, uint32_t n)
{
    struct uring *u = queue;
    const uint32_t room = u->entries - u->in_flight;
    /* The tail is ours; the kernel, having no thread of its own here, reads it within enter. */
    const uint32_t start = *u->sq_tail;
    uint32_t i, n_taken = 0;
    int got = 0;

    if (n > room)
        n = room;
    if (n == 0)
        return -EBUSY;
    for (i = 0; i < n; i++) {
        const uint32_t slot = (start + i) & u->sq_mask;
        fill(u, &u->sqes[slot], &reads[i]);
        u->sq_array[slot] = slot;
    }
    __atomic_store_n(u->sq_tail, start + n, __ATOMIC_RELEASE);
    while (n_taken < n) {
        got = enter(u, n - n_taken, 0, 0);
        /* What was taken the head says, also when the call then failed. */
        n_taken = __atomic_load_n(u->sq_head, __ATOMIC_ACQUIRE) - start;
        if (got <= 0)
            break;
    }
    /* The rest is the caller's again. */
    __atomic_store_n(u->sq_tail, start + n_taken, __ATOMIC_RELEASE);
    u->in_flight += n_taken;
    if (n_taken)
        return (int32_t)n_taken;
    return got < 0 ? got : -EAGAIN;
}

static uint32_t take(struct uring *u, struct colibri_done *done, uint32_t room)
{
    uint32_t head = *u->cq_head;
    const uint32_t tail = __atomic_load_n(u->cq_tail, __ATOMIC_ACQUIRE);
    uint32_t n = 0;

    while (n < room && head != tail) {
        const struct cqe *cqe = &u->cqes[head++ & u->cq_mask];
        if (done) {
            done[n].tag = (int64_t)cqe->user_data;
            done[n].result = cqe->result;
        }
        n++;
    }
    __atomic_store_n(u->cq_head, head, __ATOMIC_RELEASE);
    return n;
}

int32_t colibri_uring_await(void *queue, struct colibri_done *done, uint32_t room)
{
    struct uring *u = queue;
    uint32_t n = take(u, done, room);

    if (n == 0) {
        const int got = enter(u, 0, 1, ENTER_GETEVENTS);
        n = take(u, done, room);
        if (got < 0 && n == 0)
            return got;
    }
    return (int32_t)n;
}

void colibri_uring_retire(void *queue, uint32_t n)
{
    ((struct uring *)queue)->in_flight -= n;
}

int32_t colibri_uring_reap(void *queue, struct colibri_done *done, uint32_t room, int32_t wait)
{
    struct uring *u = queue;
    int32_t n = (int32_t)take(u, done, room);

    while (n == 0 && wait && room && u->in_flight)
        n = colibri_uring_await(u, done, room);
    if (n > 0)
        u->in_flight -= (uint32_t)n;
    return n;
}

int32_t colibri_uring_in_flight(void *queue)
{
    return (int32_t)((const struct uring *)queue)->in_flight;
}

int32_t colibri_uring_close(void *queue)
{
    struct uring *u = queue;

    if (u->fd < 0)
        return 0;
    while (u->in_flight) {
        const int got = enter(u, 0, 1, ENTER_GETEVENTS);
        const uint32_t n = take(u, NULL, u->in_flight);
        u->in_flight -= n;
        if (n == 0 && got < 0 && got != -EAGAIN && got != -EBUSY)
            return got;
    }
    unmap(u);
    return 0;
}

#else /* not Linux */

int32_t colibri_uring_bytes(void) { return 64; }

int32_t colibri_uring_open(void *memory, uint32_t entries)
{
    (void)memory;
    (void)entries;
    return -ENOSYS;
}

int32_t colibri_uring_register_buffers(void *queue, uint64_t address, uint64_t n_bytes,
                                       uint64_t piece_bytes)
{
    (void)queue;
    (void)address;
    (void)n_bytes;
    (void)piece_bytes;
    return -ENOSYS;
}

int32_t colibri_uring_register_files(void *queue, const int32_t *fds, uint32_t n)
{
    (void)queue;
    (void)fds;
    (void)n;
    return -ENOSYS;
}

int32_t colibri_uring_submit(void *queue, const struct colibri_read *reads, uint32_t n)
{
    (void)queue;
    (void)reads;
    (void)n;
    return -ENOSYS;
}

int32_t colibri_uring_reap(void *queue, struct colibri_done *done, uint32_t room, int32_t wait)
{
    (void)queue;
    (void)done;
    (void)room;
    (void)wait;
    return -ENOSYS;
}

int32_t colibri_uring_in_flight(void *queue)
{
    (void)queue;
    return 0;
}

int32_t colibri_uring_close(void *queue)
{
    (void)queue;
    return 0;
}

#endif
