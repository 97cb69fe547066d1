// What a disk gives to a loop that does nothing else: random blocks through io_uring, by raw
// system calls, a fixed number in flight, into one buffer each. Built and run by store_read.py;
// also `spin`, the stand-in for computing of store_replay.py, which loads it as a library.
//
//     bare_reads FILE BLOCK_BYTES DEPTH MODE < OFFSETS    MODE: direct or buffered
//
// reads offsets in decimal, one a line, and prints `seconds cpu_seconds bytes`.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static double now(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Keeps a core busy for `ns` nanoseconds.
void spin(int64_t ns)
{
    double end = now(CLOCK_MONOTONIC) + 1e-9 * (double)ns;
    while (now(CLOCK_MONOTONIC) < end) {
    }
}

static void die(const char *what)
{
    perror(what);
    exit(1);
}

static void *map_ring(int fd, size_t size, off_t offset)
{
    void *ring = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset);
    if (ring == MAP_FAILED)
        die("mmap of the ring");
    return ring;
}

int main(int argc, char **argv)
{
    if (argc != 5)
        return 2;
    size_t block = strtoull(argv[2], NULL, 10);
    unsigned depth = (unsigned)atoi(argv[3]);
    int flags = O_RDONLY | (strcmp(argv[4], "direct") == 0 ? O_DIRECT : 0);
    int file = open(argv[1], flags);
    if (file < 0)
        die(argv[1]);
    size_t n = 0, room = 0;
    uint64_t *offsets = NULL, offset;
    while (scanf("%lu", &offset) == 1) {
        if (n == room) {
            room = room ? 2 * room : 1024;
            offsets = realloc(offsets, room * sizeof *offsets);
        }
        offsets[n++] = offset;
    }
    size_t stride = (block + 4095) / 4096 * 4096;
    size_t size = (stride * depth + (2u << 20) - 1) >> 21 << 21;
    char *raw = mmap(NULL, size + (2u << 20), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED)
        die("mmap");
    char *slots = (char *)(((uintptr_t)raw + (2u << 20) - 1) >> 21 << 21);
    madvise(slots, size, MADV_HUGEPAGE);
    memset(slots, 0, size);

    struct io_uring_params p = {0};
    int ring = (int)syscall(__NR_io_uring_setup, depth, &p);
    if (ring < 0)
        die("io_uring_setup");
    char *sq = map_ring(ring, p.sq_off.array + p.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING);
    char *cq = map_ring(ring, p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe),
                        IORING_OFF_CQ_RING);
    struct io_uring_sqe *sqes =
        map_ring(ring, p.sq_entries * sizeof(struct io_uring_sqe), IORING_OFF_SQES);
    unsigned *array = (unsigned *)(sq + p.sq_off.array);
    _Atomic unsigned *tail = (_Atomic unsigned *)(sq + p.sq_off.tail);
    unsigned sq_mask = *(unsigned *)(sq + p.sq_off.ring_mask);
    _Atomic unsigned *head = (_Atomic unsigned *)(cq + p.cq_off.head);
    _Atomic unsigned *done = (_Atomic unsigned *)(cq + p.cq_off.tail);
    unsigned cq_mask = *(unsigned *)(cq + p.cq_off.ring_mask);
    struct io_uring_cqe *cqes = (struct io_uring_cqe *)(cq + p.cq_off.cqes);

    double started = now(CLOCK_MONOTONIC), cpu = now(CLOCK_PROCESS_CPUTIME_ID);
    size_t next = 0, ended = 0;
    uint64_t bytes = 0;
    unsigned free_slots[4096], n_free = depth, queued = 0;
    for (unsigned i = 0; i < depth; i++)
        free_slots[i] = i;
    while (ended < n) {
        while (n_free && next < n) {
            unsigned slot = free_slots[--n_free], at = atomic_load(tail), index = at & sq_mask;
            struct io_uring_sqe *sqe = &sqes[index];
            memset(sqe, 0, sizeof *sqe);
            sqe->opcode = IORING_OP_READ;
            sqe->fd = file;
            sqe->addr = (uint64_t)(uintptr_t)(slots + slot * stride);
            sqe->len = (uint32_t)block;
            sqe->off = offsets[next++];
            sqe->user_data = slot;
            array[index] = index;
            atomic_store(tail, at + 1);
            queued++;
        }
        long entered = syscall(__NR_io_uring_enter, ring, queued, 1, IORING_ENTER_GETEVENTS,
                               NULL, 0);
        if (entered < 0 && errno != EINTR)
            die("io_uring_enter");
        if (entered > 0)
            queued -= (unsigned)entered;
        unsigned at = atomic_load(head);
        for (; at != atomic_load(done); at++) {
            struct io_uring_cqe *cqe = &cqes[at & cq_mask];
            if (cqe->res != (int32_t)block) {
                fprintf(stderr, "a read gave %d of %zu bytes\n", cqe->res, block);
                return 1;
            }
            bytes += block;
            free_slots[n_free++] = (unsigned)cqe->user_data;
            ended++;
        }
        atomic_store(head, at);
    }
    printf("%.6f %.6f %lu\n", now(CLOCK_MONOTONIC) - started,
           now(CLOCK_PROCESS_CPUTIME_ID) - cpu, bytes);
    return 0;
}
