/* A thread beside a queue of disk.h: it keeps the queue full while its caller computes, and hashes
 * what has been read while the next requests are under way.
 *
 * Linux only; elsewhere every function gives -ENOSYS. The caller owns all memory, the worker's too
 * (colibri_worker_bytes bytes at a multiple of 64). Between open and close the queue is the
 * worker's. One thread at a time calls; a signal ends a waiting call with -EINTR, nothing lost.
 */
#ifndef COLIBRI_DISK_WORKER_H
#define COLIBRI_DISK_WORKER_H

#include <stdint.h>

#include "disk.h"

enum { COLIBRI_WORKER_ORDERS = 256 };

/* A request, and what to hash of it. 56 bytes without padding. */
struct colibri_order {
    struct colibri_read read;
    uint64_t seed;
    uint64_t size;  /* bytes from the first on that are hashed if all were read; 0: none */
    uint64_t ahead; /* 1: a prefetch, which begins when no other is queued and few are in flight */
};

/* How it ended. 48 bytes without padding. */
struct colibri_outcome {
    int64_t tag;
    int64_t result;   /* as struct colibri_done */
    uint64_t hash;    /* of orders with a size whose result is their length */
    int64_t begun_ns; /* CLOCK_MONOTONIC: given to the kernel, and taken from it */
    int64_t ended_ns;
    int64_t hash_ns; /* how long hashing took */
};

/* Queues that a worker drives. */
enum { COLIBRI_QUEUE_URING = 0, COLIBRI_QUEUE_AIO = 1 };

COLIBRI_EXPORT int32_t colibri_worker_bytes(void);

/* Makes a worker in `memory` that keeps at most `depth` requests in flight in `queue`, idle and of
 * that `kind`, and begins prefetches while fewer than `depth_ahead` are. 0 or -errno: -EAGAIN where
 * no thread can be had. */
COLIBRI_EXPORT int32_t colibri_worker_open(void *memory, void *queue, int32_t kind, uint32_t depth,
                                           uint32_t depth_ahead);

/* Takes the first of `n` orders: as many as it has room for, which is returned; -EBUSY: none. What
 * the kernel says to one comes as its result, -EAGAIN and the like among them. */
COLIBRI_EXPORT int32_t colibri_worker_submit(void *worker, const struct colibri_order *orders,
                                             uint32_t n);

/* Takes up to `room` outcomes and returns how many; with `wait`, and orders outstanding, at least
 * one. -errno: -EINTR, or what made the queue useless. */
COLIBRI_EXPORT int32_t colibri_worker_reap(void *worker, struct colibri_outcome *outcomes,
                                           uint32_t room, int32_t wait);

/* Takes the order `tag` back: 1, or 0 if it has begun. */
COLIBRI_EXPORT int32_t colibri_worker_withdraw(void *worker, uint32_t tag);

/* Makes a queued prefetch the last of those that are not: 1, or 0 if it has begun or is none. */
COLIBRI_EXPORT int32_t colibri_worker_promote(void *worker, uint32_t tag);

/* Orders taken whose outcomes were not. */
COLIBRI_EXPORT int32_t colibri_worker_outstanding(void *worker);

/* Drops what is queued, waits for what is in flight, ends the thread. 0, also when it is closed
 * already. The queue remains the caller's to close. */
COLIBRI_EXPORT int32_t colibri_worker_close(void *worker);

#endif
