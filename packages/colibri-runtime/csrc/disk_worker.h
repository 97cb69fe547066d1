/* A thread beside a queue of disk.h: it keeps the queue full while its caller computes, and hashes
 * what has been read while the next requests are under way. An order may be read in pieces: then it
 * is hashed while its later pieces come, a demand waits for the pieces in flight alone and not for
 * the order they belong to, and the rest of one that is no longer wanted is not read.
 *
 * Linux only; elsewhere every function gives -ENOSYS. The caller owns all memory, the worker's too
 * (colibri_worker_bytes bytes at a multiple of 64). Between open and close the queue is the
 * worker's. One thread at a time calls; a signal ends a waiting call with -EINTR, nothing lost. In a
 * forked child nothing is read: submit and reap give -ECHILD, the others 0.
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
    uint64_t hash;    /* of orders with a size whose result is their length; else bytes that came */
    int64_t begun_ns; /* CLOCK_MONOTONIC: given to the kernel, and taken from it */
    int64_t ended_ns;
    int64_t hash_ns; /* how long hashing took */
};

/* Queues that a worker drives. */
enum { COLIBRI_QUEUE_URING = 0, COLIBRI_QUEUE_AIO = 1 };

COLIBRI_EXPORT int32_t colibri_worker_bytes(void);

/* How a worker reads. */
struct colibri_worker_plan {
    uint32_t depth;       /* orders in flight, counted in requests as long as theirs */
    uint32_t depth_ahead; /* requests in flight below which one of a prefetch begins */
    uint32_t piece_bytes; /* longest request, more for orders of over 64; 0: orders are whole */
};

/* Makes a worker in `memory` that drives `queue`, idle and of that `kind`. 0 or -errno: -EAGAIN where
 * no thread can be had. */
COLIBRI_EXPORT int32_t colibri_worker_open(void *memory, void *queue, int32_t kind,
                                           const struct colibri_worker_plan *plan);

/* Takes the first of `n` orders: as many as it has room for, which is returned; -EBUSY: none. What
 * the kernel says to one comes as its result, -EAGAIN and the like among them. */
COLIBRI_EXPORT int32_t colibri_worker_submit(void *worker, const struct colibri_order *orders,
                                             uint32_t n);

/* Takes up to `room` outcomes and returns how many; with `wait`, and orders outstanding, at least
 * one. -errno: -EINTR, or what made the queue useless. */
COLIBRI_EXPORT int32_t colibri_worker_reap(void *worker, struct colibri_outcome *outcomes,
                                           uint32_t room, int32_t wait);

/* Takes the order `tag` back: 1, or 0 if it has begun. The pieces of one that has begun which have
 * not are not read: if there are any it ends with -ECANCELED. */
COLIBRI_EXPORT int32_t colibri_worker_withdraw(void *worker, uint32_t tag);

/* Makes a queued prefetch the last of those that are not, the first if it has begun in part: 1, or 0
 * if all of it has begun or it is none. */
COLIBRI_EXPORT int32_t colibri_worker_promote(void *worker, uint32_t tag);

/* Orders taken whose outcomes were not. */
COLIBRI_EXPORT int32_t colibri_worker_outstanding(void *worker);

/* Drops what is queued, waits for what is in flight, ends the thread. 0, also when it is closed
 * already. The queue remains the caller's to close. */
COLIBRI_EXPORT int32_t colibri_worker_close(void *worker);

#endif
