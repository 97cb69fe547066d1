/* What the disk gives to a loop around io_uring that does nothing else: the yardstick of the
 * benchmarks, independent of the library's own code. Also `spin`, the stand-in for computing of
 * store_replay.py, which loads this as a library.
 *
 *     bare_uring FILE BLOCK_BYTES DEPTH GROUP N_SLOTS < OFFSETS (u64, native order)
 *
 * reads blocks directly into huge pages, GROUP at a time with at most DEPTH in flight, waiting for
 * each group before the next, into N_SLOTS slots in turn (as many as the other side has: memory that
 * is in no cache is slower to fill). Prints wall seconds, CPU seconds and bytes. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* Keeps a core busy for `ns` nanoseconds. */
void spin(int64_t ns)
{
    const double end = now() + 1e-9 * (double)ns;
    while (now() < end) {
    }
}

static double cpu(void)
{
    struct rusage r;
    getrusage(RUSAGE_SELF, &r);
    return (double)(r.ru_utime.tv_sec + r.ru_stime.tv_sec) +
           (double)(r.ru_utime.tv_usec + r.ru_stime.tv_usec) / 1e6;
}

static void die(const char *what)
{
    perror(what);
    exit(1);
}

int main(int argc, char **argv)
{
    if (argc != 6)
        return 2;
    const size_t block = strtoull(argv[2], NULL, 10);
    const unsigned depth = (unsigned)atoi(argv[3]), group = (unsigned)atoi(argv[4]);
    const size_t n_slots = strtoull(argv[5], NULL, 10);
    const int file = open(argv[1], O_RDONLY | O_DIRECT);
    if (file < 0)
        die(argv[1]);
    size_t n = 0, room = 1 << 20;
    uint64_t *offsets = malloc(room * sizeof *offsets);
    if (!offsets)
        die("malloc");
    n = fread(offsets, sizeof *offsets, room, stdin);

    const size_t huge = 2 << 20, bytes = block * n_slots;
    uint8_t *map = mmap(NULL, bytes + huge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                        -1, 0);
    if (map == MAP_FAILED)
        die("mmap");
    uint8_t *slots = map + (huge - (uintptr_t)map % huge) % huge;
    madvise(slots, bytes, MADV_HUGEPAGE);
    memset(slots, 0, bytes);

    struct io_uring_params p;
    memset(&p, 0, sizeof p);
    const int ring = (int)syscall(__NR_io_uring_setup, depth, &p);
    if (ring < 0)
        die("io_uring_setup");
    const size_t sq_bytes = p.sq_off.array + p.sq_entries * 4;
    const size_t cq_bytes = p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe);
    uint8_t *rings = mmap(NULL, sq_bytes > cq_bytes ? sq_bytes : cq_bytes, PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_SQ_RING);
    struct io_uring_sqe *sqes = mmap(NULL, p.sq_entries * sizeof *sqes, PROT_READ | PROT_WRITE,
                                     MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_SQES);
    if (rings == MAP_FAILED || sqes == MAP_FAILED)
        die("mmap of the rings");
    unsigned *sq_tail = (unsigned *)(rings + p.sq_off.tail);
    unsigned *sq_array = (unsigned *)(rings + p.sq_off.array);
    unsigned *cq_head = (unsigned *)(rings + p.cq_off.head);
    unsigned *cq_tail = (unsigned *)(rings + p.cq_off.tail);
    const unsigned sq_mask = p.sq_entries - 1, cq_mask = p.cq_entries - 1;
    const struct io_uring_cqe *cqes = (struct io_uring_cqe *)(rings + p.cq_off.cqes);

    const double wall = now(), used = cpu();
    for (size_t first = 0; first < n; first += group) {
        const unsigned here = (unsigned)(n - first < group ? n - first : group);
        unsigned begun = 0, ended = 0;
        while (ended < here) {
            unsigned new = 0;
            while (begun < here && begun - ended < depth) {
                const unsigned tail = *sq_tail, at = tail & sq_mask;
                memset(&sqes[at], 0, sizeof sqes[at]);
                sqes[at].opcode = IORING_OP_READ;
                sqes[at].fd = file;
                sqes[at].off = offsets[first + begun];
                sqes[at].addr = (uintptr_t)(slots + (first + begun) % n_slots * block);
                sqes[at].len = (unsigned)block;
                sq_array[at] = at;
                __atomic_store_n(sq_tail, tail + 1, __ATOMIC_RELEASE);
                begun++;
                new++;
            }
            if (syscall(__NR_io_uring_enter, ring, new, 1, IORING_ENTER_GETEVENTS, NULL, 0) < 0)
                die("io_uring_enter");
            unsigned head = *cq_head;
            for (; head != __atomic_load_n(cq_tail, __ATOMIC_ACQUIRE); head++, ended++)
                if (cqes[head & cq_mask].res != (int)block) {
                    fprintf(stderr, "read gave %d\n", cqes[head & cq_mask].res);
                    return 1;
                }
            __atomic_store_n(cq_head, head, __ATOMIC_RELEASE);
        }
    }
    printf("%.9f %.9f %zu\n", now() - wall, cpu() - used, n * block);
    return 0;
}
