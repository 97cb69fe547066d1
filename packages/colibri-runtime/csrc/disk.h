/* Asynchronous reads from files into memory: io_uring and Linux AIO behind one set of structs.
 *
 * Linux only; elsewhere every function gives -ENOSYS. The caller owns all memory: the queue itself
 * (colibri_uring_bytes or colibri_aio_bytes bytes at a multiple of 64), requests, completions, and
 * what is read into, which must stay until the request's completion was taken. One thread at a time
 * may use a queue; different queues are independent. A signal ends a waiting call with -EINTR and
 * nothing lost: call again.
 */
#ifndef COLIBRI_DISK_H
#define COLIBRI_DISK_H

#include <stdint.h>

#include "colibri_runtime.h"

/* One request: `length` bytes at `offset` of the file, to `address`. 32 bytes without padding. */
struct colibri_read {
    uint64_t address;
    uint64_t offset;
    uint32_t length; /* at most 1 GiB, so that results fit their type */
    int32_t fd;
    int32_t file; /* its place among registered files, -1: not among them */
    uint32_t tag; /* comes back with the completion */
};

/* How a request ended: bytes read, fewer at the end of the file, or -errno. */
struct colibri_done {
    int64_t tag;
    int64_t result;
};

/* Bytes of memory for a queue. */
COLIBRI_EXPORT int32_t colibri_uring_bytes(void);

/* Makes the queue in `memory` for `entries` requests in flight, 1 to 4096. 0 or -errno: -ENOSYS
 * (the kernel has none), -EPERM (forbidden: seccomp or kernel.io_uring_disabled), -ENOMEM, ... */
COLIBRI_EXPORT int32_t colibri_uring_open(void *memory, uint32_t entries);

/* Registers `n_bytes` at `address` in buffers of `piece_bytes` (at most 1 GiB, the kernel's limit):
 * reads that lie within one of them spare the kernel from looking their pages up. 0 or -errno, after
 * which reads go on without (-ENOMEM: RLIMIT_MEMLOCK). n_bytes 0 takes the registration back. */
COLIBRI_EXPORT int32_t colibri_uring_register_buffers(void *queue, uint64_t address,
                                                      uint64_t n_bytes, uint64_t piece_bytes);

/* Registers descriptors as files 0 to n - 1; takes an earlier registration back; n 0 does only
 * that. 0 or -errno, after which requests are read through their descriptors. */
COLIBRI_EXPORT int32_t colibri_uring_register_files(void *queue, const int32_t *fds, uint32_t n);

/* Begins the first of `n` requests: as many as the queue and the kernel take, which is returned, or
 * -errno if it is none: -EAGAIN, -EBUSY or -ENOMEM (later), -EINTR, or what is wrong with it. */
COLIBRI_EXPORT int32_t colibri_uring_submit(void *queue, const struct colibri_read *reads,
                                            uint32_t n);

/* Takes up to `room` completions and returns how many; with `wait`, and requests in flight, at least
 * one. -errno: -EINTR, ... */
COLIBRI_EXPORT int32_t colibri_uring_reap(void *queue, struct colibri_done *done, uint32_t room,
                                          int32_t wait);

/* Requests begun whose completions were not taken. */
COLIBRI_EXPORT int32_t colibri_uring_in_flight(void *queue);

/* Waits until nothing is in flight, dropping completions, and gives everything back. 0 (also when
 * it is closed already) or -EINTR: call again. */
COLIBRI_EXPORT int32_t colibri_uring_close(void *queue);

/* The same with io_submit(2). Reads of files that are not open with O_DIRECT are made within
 * colibri_aio_submit. colibri_aio_open: -EAGAIN where fs.aio-max-nr is reached. */
COLIBRI_EXPORT int32_t colibri_aio_bytes(void);
COLIBRI_EXPORT int32_t colibri_aio_open(void *memory, uint32_t entries);
COLIBRI_EXPORT int32_t colibri_aio_submit(void *queue, const struct colibri_read *reads,
                                          uint32_t n);
COLIBRI_EXPORT int32_t colibri_aio_reap(void *queue, struct colibri_done *done, uint32_t room,
                                        int32_t wait);
COLIBRI_EXPORT int32_t colibri_aio_in_flight(void *queue);
COLIBRI_EXPORT int32_t colibri_aio_close(void *queue);

/* What direct reads of an open file must be multiples of, from statx(2) STATX_DIOALIGN: memory[0]
 * for addresses, offset[0] for offsets and lengths; both 0 where the file cannot be read directly.
 * -ENODATA where kernel (before 6.1) or file system do not say. */
COLIBRI_EXPORT int32_t colibri_direct_alignment(int32_t fd, uint32_t *memory, uint32_t *offset);

#endif
