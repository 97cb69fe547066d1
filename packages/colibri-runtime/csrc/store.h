/* The bookkeeping of a store in one call a step: which block stands in which slot, what is being
 * read, what the open fetch wants, ready and leased blocks, predictions, counts. plain_core.py in C,
 * see there and in store.py for the meaning; slots are given up as the policies of policy.h say, and
 * a worker of disk_worker.h reads.
 *
 * A read that comes whole and right is taken in here. One that was given up frees its slot, and so
 * does a prefetch that failed; a demand that failed is left to the caller: it stands in `failed`,
 * with its slot, until colibri_store_mend is told what became of it.
 *
 * Memory is the caller's and described by one struct (mirrored by native_core.py); nothing is kept
 * elsewhere, nothing is allocated. One thread at a time uses a store. Blocks are numbered
 * layer * width + expert.
 */
#ifndef COLIBRI_STORE_H
#define COLIBRI_STORE_H

#include <stdint.h>

#include "colibri_runtime.h"
#include "disk_worker.h"
#include "policy.h"

enum { COLIBRI_STORE_CLASSES = 4 };

/* Of a slot as fetches give it: a block was read into it, and the caller has not taken this bit from
 * its state since. */
#define COLIBRI_STORE_FRESH 0x40000000
enum { COLIBRI_STORE_STATE_FRESH = 8 };

/* Tags of the store's orders begin here. */
#define COLIBRI_STORE_TAG 0x80000000u

/* Where a block stands on disk, as struct colibri_order wants it. 56 bytes without padding. */
struct colibri_store_block {
    uint64_t offset;
    uint64_t seed;
    uint64_t size;   /* bytes that are hashed; 0: none */
    uint64_t checksum;
    uint32_t length; /* bytes that are read; 0: there is no such block */
    int32_t fd;
    int32_t file;
    int32_t number;  /* its class */
    int32_t slot;    /* it is resident in; -1: it is not */
    int32_t loading; /* slot it is read into; -1: it is not */
};

/* Slots of one size. */
struct colibri_store_class {
    struct colibri_policy *policy; /* NULL: there is a slot for every block */
    int32_t first, n_slots;        /* slots are numbered through */
    int32_t n_open;                /* the first of them, which are used */
    int32_t n_free;                /* of `free` from `first` on */
    int32_t n_prefetch;            /* blocks read ahead and not asked for that it takes at most */
    int32_t n_ahead;               /* prefetches under way */
    int32_t n_waiting;             /* landed, and their layer not asked for since */
    int32_t reserved;
};

/* A read that came back, or with a block of -1 a wait. 56 bytes without padding. */
struct colibri_store_event {
    int64_t block, layer, submit_ns, begun_ns, ended_ns, n_bytes, is_prefetch;
};

/* LayerStats of stats.py, in its order. */
struct colibri_store_counts {
    int64_t n_fetches, n_hits, n_lates, n_misses, demand_bytes, prefetch_bytes, n_prefetched,
        n_prefetch_used, n_prefetch_wasted, wasted_bytes, n_prefetch_dropped, n_prefetch_cancelled,
        n_prefetch_failed, n_predicted, n_foretold, n_recalled, n_rereads, n_waits, queue_depth,
        stall_ns, compute_ns, read_ns, checksum_ns;
};

struct colibri_store {
    int32_t n_layers, width, n_slots, n_classes;
    int32_t is_open;  /* a fetch is, */
    int32_t layer;    /* of this layer */
    int32_t observed; /* layer that policies were told of and that was not fetched since; -1 */
    int32_t n_reads;  /* blocks that are being read, failed demands among them */
    int32_t n_resident, n_pinned, n_evicted;
    int32_t n_pending, n_wanted, n_ready, n_leased, n_failed, n_ahead, n_unused;
    int32_t n_events, event_room; /* what is beyond is not written down */
    int64_t given_ns, ended_ns; /* the last leases were given, and ended */
    void *worker;
    struct colibri_store_class classes[COLIBRI_STORE_CLASSES];
    struct colibri_store_event *events; /* NULL: nothing is written down */
    int64_t *submitted;                 /* by block, when its read was given to the worker; or NULL */
    /* By layer. */
    struct colibri_store_counts *counts;
    int32_t *n_predicted;
    uint8_t *has_classes; /* bits */
    /* By block. */
    struct colibri_store_block *blocks;
    int32_t *predicted; /* n_predicted experts of each layer */
    uint8_t *marks;
    /* By slot. */
    uint64_t *addresses;
    int32_t *owners; /* block that is or will be in it; -1 */
    int32_t *free;
    int32_t *ahead;  /* n_ahead blocks, the newest last */
    uint8_t *states;
    /* (width): of the open fetch, blocks; of `leased` slots. */
    int32_t *pending, *wanted, *ready, *leased, *failed, *late;
    int64_t *failures; /* what the kernel said of each that failed; its length: the checksum */
    /* (width): arguments, and scratch that is zero between calls. */
    int32_t *experts;
    double *weights;
    uint8_t *is_named;
};

/* Bytes of the structs, for a check: 0 the store, 1 a block, 2 a class, 3 counts, 4 an event. */
COLIBRI_EXPORT int64_t colibri_store_struct_bytes(int32_t which);

/* All slots free, nothing read, nothing open; the rest of the struct is filled. */
COLIBRI_EXPORT int32_t colibri_store_begin(struct colibri_store *store);

/* Tells policies how `layer` was routed: the first `n` of `experts`, each named once, and with
 * `is_weighed` of `weights`. -ENOENT where there is no such layer or expert. */
COLIBRI_EXPORT int32_t colibri_store_observe(struct colibri_store *store, int32_t layer, int32_t n,
                                             int32_t is_weighed);

/* Opens a fetch of the first `n` of `experts`, of which each counts once: their number. -ENOENT
 * where there is no such block, nothing has happened; -EBUSY while another is open; or what made the
 * queue useless, which has closed the fetch. */
COLIBRI_EXPORT int32_t colibri_store_fetch(struct colibri_store *store, int32_t layer, int32_t n);

/* Ends the leases, and leases up to `most` of the blocks that are ready, for one of which it waits:
 * their number, and the slots in `leased`, with COLIBRI_STORE_FRESH. 0: every block was given, the
 * fetch is closed. -EINTR: a signal came, nothing is lost; -EIO: `failed` must be mended before
 * anything else can come; -ENOSPC: a policy gives no slot; or what made the queue useless. */
COLIBRI_EXPORT int32_t colibri_store_take(struct colibri_store *store, int32_t most);

/* What became of the last block in `failed`: it is ready, with `is_right`, or not to be had. */
COLIBRI_EXPORT int32_t colibri_store_mend(struct colibri_store *store, int32_t is_right);

/* Closes the fetch: ends leases, and reads that have not begun. */
COLIBRI_EXPORT int32_t colibri_store_close(struct colibri_store *store);

/* The first `n` of `experts` are what `layer` is likely to ask for: begins to read them, if that
 * costs no demand. -ENOENT as colibri_store_fetch. */
COLIBRI_EXPORT int32_t colibri_store_prefetch(struct colibri_store *store, int32_t layer,
                                              int32_t n);

/* Reads a block into a free slot, as a prefetch: 1, or 0 if it is here or has no slot. */
COLIBRI_EXPORT int32_t colibri_store_preload(struct colibri_store *store, int32_t layer,
                                             int32_t expert);

/* Uses the first `n_open` slots from now on, of which the last class has the last. Blocks beyond are
 * given up, reads into slots beyond called off or waited for. 0; -EBUSY while a fetch is open; -EINVAL
 * for a number that the last class cannot have; -EINTR: a signal came, call again; or what made the
 * queue useless. */
COLIBRI_EXPORT int32_t colibri_store_resize(struct colibri_store *store, int32_t n_open);

#endif
