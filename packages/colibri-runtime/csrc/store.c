#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* clock_gettime */
#endif
#include "store.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <time.h>

enum { NONE = -1, ORDERS_AT_ONCE = 32, OUTCOMES_AT_ONCE = 64 };
/* Orders that the worker is not asked to take: its own room, less than all. */
enum { MOST_READS = COLIBRI_WORKER_ORDERS - 8 };

/* Marks of a block. */
enum { AHEAD = 1, PROMOTED = 2, WANTED = 4, PREDICTED = 8 };
/* States of a slot. */
enum { PINNED = 1, UNUSED = 2, WAITING = 4, FRESH = COLIBRI_STORE_STATE_FRESH };

static int64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static int32_t block_of(const struct colibri_store *s, int32_t layer, int32_t expert)
{
    return layer * s->width + expert;
}

static int32_t layer_of(const struct colibri_store *s, int32_t block) { return block / s->width; }

static int32_t expert_of(const struct colibri_store *s, int32_t block) { return block % s->width; }

static struct colibri_store_class *class_of(struct colibri_store *s, int32_t block)
{
    return &s->classes[s->blocks[block].number];
}

static struct colibri_store_counts *counts_of(struct colibri_store *s, int32_t block)
{
    return &s->counts[layer_of(s, block)];
}

static int has_all(const struct colibri_store *s, int32_t layer, int32_t n)
{
    if (layer < 0 || layer >= s->n_layers || n < 0 || n > s->width)
        return 0;
    for (int32_t i = 0; i < n; i++)
        if (s->experts[i] < 0 || s->experts[i] >= s->width ||
            s->blocks[block_of(s, layer, s->experts[i])].length == 0)
            return 0;
    return 1;
}

/* Drops what is named more than once of the first `n` experts: how many are left. */
static int32_t name_once(struct colibri_store *s, int32_t n)
{
    int32_t n_left = 0;

    for (int32_t i = 0; i < n; i++) {
        const int32_t expert = s->experts[i];
        if (!s->is_named[expert])
            s->experts[n_left++] = expert;
        s->is_named[expert] = 1;
    }
    return n_left;
}

static void forget_names(struct colibri_store *s, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        s->is_named[s->experts[i]] = 0;
}

static void write_down(struct colibri_store *s, struct colibri_store_event event)
{
    if (s->events && s->n_events < s->event_room)
        s->events[s->n_events++] = event;
}

/* ---- lists of blocks, short ones ---- */

static void put_first(int32_t *list, int32_t *n, int32_t block)
{
    memmove(list + 1, list, (size_t)*n * sizeof *list);
    list[0] = block;
    ++*n;
}

static void take_out(int32_t *list, int32_t *n, int32_t block)
{
    int32_t i = *n - 1;

    while (i >= 0 && list[i] != block)
        i--;
    if (i < 0)
        return;
    --*n;
    memmove(list + i, list + i + 1, (size_t)(*n - i) * sizeof *list);
}

/* ---- slots ---- */

static void pin(struct colibri_store *s, int32_t slot)
{
    const int32_t block = s->owners[slot];
    struct colibri_store_class *of = class_of(s, block);

    if (of->policy)
        colibri_policy_pin(of->policy, layer_of(s, block), expert_of(s, block));
    if (s->states[slot] & WAITING)
        of->n_waiting--;
    s->states[slot] = (uint8_t)((s->states[slot] & ~WAITING) | PINNED);
    s->n_pinned++;
}

static void release(struct colibri_store *s, int32_t slot)
{
    const int32_t block = s->owners[slot];
    struct colibri_store_class *of = class_of(s, block);

    s->states[slot] &= (uint8_t)~PINNED;
    s->n_pinned--;
    if (of->policy)
        colibri_policy_release(of->policy, layer_of(s, block), expert_of(s, block));
}

/* It was read ahead in vain. */
static void expire(struct colibri_store *s, int32_t block)
{
    const int32_t slot = s->blocks[block].slot;
    struct colibri_store_class *of = class_of(s, block);

    if (slot < 0 || !(s->states[slot] & WAITING))
        return;
    s->states[slot] &= (uint8_t)~WAITING;
    of->n_waiting--;
    if (of->policy)
        colibri_policy_expire(of->policy, layer_of(s, block), expert_of(s, block));
}

/* The block is resident no more, and no policy knows it: the slot it leaves. */
static int32_t leave(struct colibri_store *s, int32_t block)
{
    const int32_t slot = s->blocks[block].slot;
    struct colibri_store_class *of = class_of(s, block);

    s->blocks[block].slot = NONE;
    s->n_resident--;
    s->n_evicted++;
    if (s->states[slot] & WAITING)
        of->n_waiting--;
    if (s->states[slot] & UNUSED) {
        struct colibri_store_counts *counts = counts_of(s, block);
        s->n_unused--;
        counts->n_prefetch_wasted++;
        counts->wasted_bytes += s->blocks[block].length;
    }
    return slot;
}

/* Takes a slot from the block that the policy gives up: the slot, or NONE. */
static int32_t evict(struct colibri_store *s, struct colibri_store_class *of, int32_t is_prefetch)
{
    const int64_t victim = of->policy ? colibri_policy_victim(of->policy, is_prefetch) : NONE;

    if (victim < 0)
        return NONE;
    return leave(s, block_of(s, (int32_t)(victim >> 32), (int32_t)(victim & 0xffffffff)));
}

/* A slot to read the block into, free or made free: whether there is one. */
static int claim(struct colibri_store *s, int32_t block, int32_t is_prefetch)
{
    struct colibri_store_class *of = class_of(s, block);
    int32_t slot;

    if (of->n_free)
        slot = s->free[of->first + --of->n_free];
    else
        slot = evict(s, of, is_prefetch);
    if (slot == NONE)
        return 0;
    s->blocks[block].loading = slot;
    s->owners[slot] = block;
    s->states[slot] = 0;
    return 1;
}

/* The read of the block failed or was called off: its slot is free. */
static void abandon(struct colibri_store *s, int32_t block)
{
    struct colibri_store_class *of = class_of(s, block);
    const int32_t slot = s->blocks[block].loading;

    s->blocks[block].loading = NONE;
    s->owners[slot] = NONE;
    s->free[of->first + of->n_free++] = slot;
}

static int32_t arrive(struct colibri_store *s, int32_t block)
{
    const int32_t slot = s->blocks[block].loading;

    s->blocks[block].loading = NONE;
    s->blocks[block].slot = slot;
    s->states[slot] = FRESH;
    s->n_resident++;
    return slot;
}

static void make_ready(struct colibri_store *s, int32_t slot) { s->ready[s->n_ready++] = slot; }

static void land(struct colibri_store *s, int32_t block, int is_wanted)
{
    const int32_t slot = arrive(s, block);

    s->states[slot] |= PINNED;
    s->n_pinned++;
    if (is_wanted)
        make_ready(s, slot);
    else
        release(s, slot);
}

static void land_ahead(struct colibri_store *s, int32_t block)
{
    const int32_t slot = arrive(s, block);
    struct colibri_store_class *of = class_of(s, block);

    s->states[slot] |= UNUSED | WAITING;
    s->n_unused++;
    of->n_waiting++;
    if (of->policy)
        colibri_policy_admit(of->policy, layer_of(s, block), expert_of(s, block));
}

/* ---- reads ---- */

/* Orders that the worker is about to be given. */
struct batch {
    int32_t n;
    struct colibri_order orders[ORDERS_AT_ONCE];
};

/* Gives the worker what was gathered. It has the room: MOST_READS. */
static void flush(struct colibri_store *s, struct batch *batch)
{
    if (batch->n)
        colibri_worker_submit(s->worker, batch->orders, (uint32_t)batch->n);
    batch->n = 0;
}

/* Begins to read a block into the slot that was claimed for it. */
static void submit(struct colibri_store *s, struct batch *batch, int32_t block, int is_ahead)
{
    const struct colibri_store_block *from = &s->blocks[block];
    struct colibri_order *order;

    if (batch->n == ORDERS_AT_ONCE)
        flush(s, batch);
    order = &batch->orders[batch->n++];
    *order = (struct colibri_order){.read = {.address = s->addresses[from->loading],
                                             .offset = from->offset,
                                             .length = from->length,
                                             .fd = from->fd,
                                             .file = from->file,
                                             .tag = COLIBRI_STORE_TAG | (uint32_t)block},
                                    .seed = from->seed,
                                    .size = from->size,
                                    .ahead = (uint64_t)is_ahead};
    s->n_reads++;
    if (s->submitted)
        s->submitted[block] = now_ns();
    if (is_ahead) {
        s->marks[block] |= AHEAD;
        s->ahead[s->n_ahead++] = block;
        class_of(s, block)->n_ahead++;
    }
}

static void drop_ahead(struct colibri_store *s, int32_t block)
{
    if (!(s->marks[block] & AHEAD))
        return;
    s->marks[block] &= (uint8_t)~AHEAD;
    take_out(s->ahead, &s->n_ahead, block);
    class_of(s, block)->n_ahead--;
}

/* The block is not being read any more. */
static void forget(struct colibri_store *s, int32_t block)
{
    drop_ahead(s, block);
    s->marks[block] &= (uint8_t)~PROMOTED;
    s->n_reads--;
}

/* Whether the read of the block had not begun, and is none any more. */
static int cancel(struct colibri_store *s, int32_t block)
{
    if (!colibri_worker_withdraw(s->worker, COLIBRI_STORE_TAG | (uint32_t)block))
        return 0;
    forget(s, block);
    abandon(s, block);
    return 1;
}

static int cancel_ahead(struct colibri_store *s, int32_t block)
{
    if (!(s->marks[block] & AHEAD) || !cancel(s, block))
        return 0;
    counts_of(s, block)->n_prefetch_cancelled++;
    return 1;
}

static void promote(struct colibri_store *s, int32_t block)
{
    if (!(s->marks[block] & AHEAD))
        return;
    drop_ahead(s, block);
    s->marks[block] |= PROMOTED;
    colibri_worker_promote(s->worker, COLIBRI_STORE_TAG | (uint32_t)block);
}

static void want(struct colibri_store *s, int32_t block)
{
    s->marks[block] |= WANTED;
    s->wanted[s->n_wanted++] = block;
}

static void unwant(struct colibri_store *s, int32_t block)
{
    s->marks[block] &= (uint8_t)~WANTED;
    take_out(s->wanted, &s->n_wanted, block);
}

/* A slot for a demand, a queued prefetch's if need be. */
static int claim_demand(struct colibri_store *s, int32_t block)
{
    if (claim(s, block, 0))
        return 1;
    /* Newest first: it is needed last. A prefetch that has begun cannot be called off. */
    for (int32_t i = s->n_ahead - 1; i >= 0; i--)
        if (s->blocks[s->ahead[i]].number == s->blocks[block].number &&
            cancel_ahead(s, s->ahead[i]))
            return claim(s, block, 0);
    return 0;
}

/* Asks the disk for what there are slots for, in order. */
static void submit_pending(struct colibri_store *s)
{
    struct batch batch = {.n = 0};
    uint32_t is_lacking = 0;
    int32_t n_left = 0;

    for (int32_t i = 0; i < s->n_pending; i++) {
        const int32_t block = s->pending[i];
        const uint32_t bit = 1u << s->blocks[block].number;
        if (is_lacking & bit || s->n_reads >= MOST_READS || !claim_demand(s, block)) {
            is_lacking |= bit;
            s->pending[n_left++] = block;
            continue;
        }
        want(s, block);
        submit(s, &batch, block, 0);
    }
    s->n_pending = n_left;
    flush(s, &batch);
}

/* A demand of the open fetch has failed. */
static void fail(struct colibri_store *s, int32_t block, int64_t result)
{
    s->failures[s->n_failed] = result;
    s->failed[s->n_failed++] = block;
    s->n_reads++;
}

static void take_in(struct colibri_store *s, const struct colibri_outcome *outcome)
{
    const int32_t block = (int32_t)((uint32_t)outcome->tag & ~COLIBRI_STORE_TAG);
    const struct colibri_store_block *from = &s->blocks[block];
    struct colibri_store_counts *counts = counts_of(s, block);
    const int is_whole = outcome->result == (int64_t)from->length;
    const int is_right = is_whole && (!from->size || outcome->hash == from->checksum);
    const int is_ahead = s->marks[block] & AHEAD, is_wanted = s->marks[block] & WANTED;
    const int is_prefetch = s->marks[block] & (AHEAD | PROMOTED);
    const int64_t n_bytes = is_whole ? (int64_t)from->length : (int64_t)outcome->hash;

    counts->read_ns += outcome->ended_ns - outcome->begun_ns;
    counts->checksum_ns += outcome->hash_ns;
    if (is_prefetch)
        counts->prefetch_bytes += n_bytes;
    else
        counts->demand_bytes += n_bytes;
    if (s->submitted)
        write_down(s, (struct colibri_store_event){.block = block,
                                                   .layer = layer_of(s, block),
                                                   .submit_ns = s->submitted[block],
                                                   .begun_ns = outcome->begun_ns,
                                                   .ended_ns = outcome->ended_ns,
                                                   .n_bytes = n_bytes,
                                                   .is_prefetch = is_prefetch != 0});
    forget(s, block);
    if (is_wanted)
        unwant(s, block);
    if (is_right) {
        counts->n_prefetched += is_prefetch != 0;
        if (is_ahead && !is_wanted) {
            land_ahead(s, block);
            if (!(s->marks[block] & PREDICTED))
                expire(s, block);
        } else {
            counts->n_prefetch_used += is_wanted && is_prefetch;
            land(s, block, is_wanted);
        }
    } else if (is_wanted && !is_prefetch && outcome->result != -ECANCELED) {
        fail(s, block, outcome->result);
    } else {
        abandon(s, block);
        if (is_prefetch && outcome->result == -ECANCELED)
            counts->n_prefetch_cancelled++;
        else if (is_prefetch)
            counts->n_prefetch_failed++;
        /* It began as a guess, or for a fetch that was closed: only a read made on this demand may
         * end the run. */
        if (is_wanted)
            put_first(s->pending, &s->n_pending, block);
    }
}

/* Takes in the reads that are done; with `wait`, at least one. 0 or -errno. */
static int32_t harvest(struct colibri_store *s, int32_t wait)
{
    struct colibri_outcome outcomes[OUTCOMES_AT_ONCE];
    int32_t n;

    do {
        n = colibri_worker_reap(s->worker, outcomes, OUTCOMES_AT_ONCE, wait);
        for (int32_t i = 0; i < n; i++)
            if ((uint32_t)outcomes[i].tag & COLIBRI_STORE_TAG)
                take_in(s, &outcomes[i]);
        wait = 0;
    } while (n == OUTCOMES_AT_ONCE);
    return n < 0 ? n : 0;
}

/* ---- predictions ---- */

/* Compares what was predicted for the layer with the first `n` experts, which are named. */
static void settle(struct colibri_store *s, int32_t layer, int32_t n)
{
    struct colibri_store_counts *counts = &s->counts[layer];
    const int32_t *predicted = s->predicted + block_of(s, layer, 0);

    counts->n_predicted += s->n_predicted[layer];
    counts->n_foretold += n;
    for (int32_t i = 0; i < s->n_predicted[layer]; i++) {
        const int32_t block = block_of(s, layer, predicted[i]);
        s->marks[block] &= (uint8_t)~PREDICTED;
        if (s->is_named[predicted[i]])
            counts->n_recalled++;
        else if (!cancel_ahead(s, block))
            expire(s, block);
    }
    s->n_predicted[layer] = 0;
}

static int submit_ahead(struct colibri_store *s, struct batch *batch, int32_t block)
{
    const struct colibri_store_class *of = class_of(s, block);

    if (of->n_ahead + of->n_waiting >= of->n_prefetch || s->n_pending ||
        s->n_reads >= MOST_READS || !claim(s, block, 1))
        return 0;
    submit(s, batch, block, 1);
    return 1;
}

/* ---- steps of a fetch ---- */

static void give_back(struct colibri_store *s)
{
    if (!s->n_leased)
        return;
    s->ended_ns = now_ns();
    s->counts[s->layer].compute_ns += s->ended_ns - s->given_ns;
    for (int32_t i = 0; i < s->n_leased; i++)
        release(s, s->leased[i] & ~COLIBRI_STORE_FRESH);
    s->n_leased = 0;
}

/* Waits until a read comes back, any read: it may free the slot that is lacking. 0 or -errno. */
static int32_t wait_read(struct colibri_store *s)
{
    struct colibri_store_counts *counts = &s->counts[s->layer];
    int64_t started, ended;
    int32_t error;

    if (!s->n_reads)
        return -ENOSPC;
    counts->n_waits++;
    counts->queue_depth += s->n_reads;
    started = now_ns();
    error = harvest(s, 1);
    ended = now_ns();
    counts->stall_ns += ended - started;
    write_down(s, (struct colibri_store_event){
                      .block = NONE, .layer = s->layer, .begun_ns = started, .ended_ns = ended});
    return error;
}

static void observe(struct colibri_store *s, int32_t layer, int32_t n, const double *weights)
{
    for (int32_t i = 0; i < s->n_classes; i++)
        if (s->classes[i].policy && s->has_classes[layer] >> i & 1)
            colibri_policy_observe(s->classes[i].policy, layer, n, s->experts, weights);
}

/* ---- slots that come and go ---- */

static void open_slot(struct colibri_store *s, struct colibri_store_class *of)
{
    int32_t *free = s->free + of->first;

    put_first(free, &of->n_free, of->first + of->n_open++); /* taken last */
    s->owners[free[0]] = NONE;
}

/* Closes the last slot that is open, which holds no pinned block. 0 or -errno. */
static int32_t close_slot(struct colibri_store *s, struct colibri_store_class *of)
{
    const int32_t slot = of->first + of->n_open - 1;
    int32_t block;

    while ((block = s->owners[slot]) != NONE && s->blocks[block].loading == slot) {
        int32_t error;
        if (cancel_ahead(s, block) || cancel(s, block))
            continue;
        error = harvest(s, 1);
        if (error)
            return error;
    }
    if (block != NONE && s->blocks[block].slot == slot) {
        if (of->policy)
            colibri_policy_pin(of->policy, layer_of(s, block), expert_of(s, block));
        leave(s, block);
    } else {
        take_out(s->free + of->first, &of->n_free, slot);
    }
    s->owners[slot] = NONE;
    of->n_open--;
    return 0;
}

/* ---- calls ---- */

int64_t colibri_store_struct_bytes(int32_t which)
{
    switch (which) {
    case 0: return sizeof(struct colibri_store);
    case 1: return sizeof(struct colibri_store_block);
    case 2: return sizeof(struct colibri_store_class);
    case 3: return sizeof(struct colibri_store_counts);
    default: return sizeof(struct colibri_store_event);
    }
}

int32_t colibri_store_begin(struct colibri_store *s)
{
    s->observed = s->layer = NONE;
    for (int32_t i = 0; i < s->n_classes; i++) {
        struct colibri_store_class *of = &s->classes[i];
        of->n_free = of->n_open;
        /* The lowest is taken first. */
        for (int32_t k = 0; k < of->n_open; k++)
            s->free[of->first + k] = of->first + of->n_open - 1 - k;
    }
    for (int32_t slot = 0; slot < s->n_slots; slot++)
        s->owners[slot] = NONE;
    for (int32_t block = 0; block < s->n_layers * s->width; block++)
        s->blocks[block].slot = s->blocks[block].loading = NONE;
    return 0;
}

int32_t colibri_store_observe(struct colibri_store *s, int32_t layer, int32_t n,
                              int32_t is_weighed)
{
    if (!has_all(s, layer, n))
        return -ENOENT;
    observe(s, layer, n, is_weighed ? s->weights : NULL);
    s->observed = layer;
    return 0;
}

int32_t colibri_store_fetch(struct colibri_store *s, int32_t layer, int32_t n)
{
    struct colibri_store_counts *counts;
    int32_t n_late = 0, n_hits = 0, n_lates = 0, n_missing = 0, error = 0;

    if (!has_all(s, layer, n))
        return -ENOENT;
    if (s->is_open)
        return -EBUSY;
    counts = &s->counts[layer];
    n = name_once(s, n);
    if (layer != s->observed)
        observe(s, layer, n, NULL);
    s->observed = NONE;
    if (s->n_predicted[layer])
        settle(s, layer, n);
    forget_names(s, n);
    s->is_open = 1;
    s->layer = layer;
    counts->n_fetches++;
    for (int32_t i = 0; i < n; i++) {
        const int32_t block = block_of(s, layer, s->experts[i]);
        const int32_t slot = s->blocks[block].slot;
        if (slot < 0) {
            n_missing++;
            continue;
        }
        if (s->states[slot] & UNUSED) {
            s->states[slot] &= (uint8_t)~UNUSED;
            s->n_unused--;
            counts->n_prefetch_used++;
        }
        pin(s, slot);
        make_ready(s, slot);
        counts->n_hits++;
    }
    if (!n_missing && !s->n_reads)
        return n;
    for (int32_t i = 0; i < n && n_missing; i++) {
        const int32_t block = block_of(s, layer, s->experts[i]);
        if (s->blocks[block].slot >= 0)
            continue;
        if (s->blocks[block].loading >= 0) {
            s->late[n_late++] = block;
            want(s, block);
            promote(s, block);
        } else {
            s->pending[s->n_pending++] = block;
        }
    }
    if (s->n_pending)
        submit_pending(s);
    if (s->n_reads)
        error = harvest(s, 0);
    for (int32_t i = 0; i < n_late; i++) {
        n_hits += s->blocks[s->late[i]].slot >= 0;
        n_lates += s->blocks[s->late[i]].loading >= 0;
    }
    counts->n_hits += n_hits;
    counts->n_lates += n_lates;
    counts->n_misses += n_missing - n_hits - n_lates;
    if (s->n_pending)
        submit_pending(s);
    if (error && error != -EINTR) {
        colibri_store_close(s);
        return error;
    }
    return n;
}

int32_t colibri_store_take(struct colibri_store *s, int32_t most)
{
    int32_t n, error;

    if (!s->is_open)
        return 0;
    give_back(s);
    if (s->n_pending)
        submit_pending(s);
    if (s->n_reads) {
        error = harvest(s, 0);
        if (error && !s->n_ready)
            return error;
    }
    while (!s->n_ready) {
        if (s->n_failed)
            return -EIO;
        if (!s->n_wanted && !s->n_pending) {
            colibri_store_close(s);
            return 0;
        }
        if (s->n_pending)
            submit_pending(s);
        error = wait_read(s);
        if (error)
            return error;
        if (s->n_pending)
            submit_pending(s);
    }
    n = s->n_ready < most ? s->n_ready : most;
    for (int32_t i = 0; i < n; i++) {
        const int32_t slot = s->ready[i];
        s->leased[i] = slot | (s->states[slot] & FRESH ? COLIBRI_STORE_FRESH : 0);
    }
    s->n_ready -= n;
    memmove(s->ready, s->ready + n, (size_t)s->n_ready * sizeof *s->ready);
    s->n_leased = n;
    s->given_ns = now_ns();
    return n;
}

int32_t colibri_store_mend(struct colibri_store *s, int32_t is_right)
{
    int32_t block;

    if (!s->n_failed)
        return -ENOENT;
    block = s->failed[--s->n_failed];
    s->n_reads--;
    if (is_right)
        land(s, block, 1);
    else
        abandon(s, block);
    return 0;
}

int32_t colibri_store_close(struct colibri_store *s)
{
    if (!s->is_open)
        return 0;
    give_back(s);
    s->is_open = 0;
    while (s->n_failed)
        colibri_store_mend(s, 0);
    for (int32_t i = 0; i < s->n_ready; i++)
        release(s, s->ready[i]);
    s->n_ready = 0;
    s->n_pending = 0;
    for (int32_t i = 0; i < s->n_wanted; i++) {
        s->marks[s->wanted[i]] &= (uint8_t)~WANTED;
        cancel(s, s->wanted[i]);
    }
    s->n_wanted = 0;
    return 0;
}

int32_t colibri_store_prefetch(struct colibri_store *s, int32_t layer, int32_t n)
{
    struct batch batch = {.n = 0};
    int32_t *predicted, n_before;

    if (!has_all(s, layer, n))
        return -ENOENT;
    predicted = s->predicted + block_of(s, layer, 0);
    n_before = s->n_predicted[layer];
    n = name_once(s, n);
    for (int32_t i = 0; i < n_before; i++) {
        const int32_t block = block_of(s, layer, predicted[i]);
        s->marks[block] &= (uint8_t)~PREDICTED;
        if (!s->is_named[predicted[i]])
            cancel_ahead(s, block);
    }
    forget_names(s, n);
    s->n_predicted[layer] = n;
    /* Before anything is evicted for the others. */
    for (int32_t i = 0; i < n; i++) {
        const int32_t block = block_of(s, layer, s->experts[i]);
        const int32_t slot = s->blocks[block].slot;
        const struct colibri_store_class *of = class_of(s, block);
        predicted[i] = s->experts[i];
        s->marks[block] |= PREDICTED;
        if (slot >= 0 && of->policy && !(s->states[slot] & PINNED))
            colibri_policy_touch(of->policy, layer, s->experts[i]);
    }
    for (int32_t i = 0; i < n; i++) {
        const int32_t block = block_of(s, layer, s->experts[i]);
        if (s->blocks[block].slot < 0 && s->blocks[block].loading < 0 &&
            !submit_ahead(s, &batch, block))
            s->counts[layer].n_prefetch_dropped++;
    }
    flush(s, &batch);
    return 0;
}

int32_t colibri_store_preload(struct colibri_store *s, int32_t layer, int32_t expert)
{
    struct batch batch = {.n = 0};
    const int32_t block = block_of(s, layer, expert);

    if (s->blocks[block].slot >= 0 || s->blocks[block].loading >= 0 || !class_of(s, block)->n_free)
        return 0;
    claim(s, block, 1);
    submit(s, &batch, block, 1);
    flush(s, &batch);
    return 1;
}

int32_t colibri_store_resize(struct colibri_store *s, int32_t n_open)
{
    struct colibri_store_class *of = &s->classes[s->n_classes - 1];
    const int32_t n = n_open - of->first;

    if (n < 0 || n > of->n_slots)
        return -EINVAL;
    if (s->is_open)
        return -EBUSY;
    while (of->n_open < n)
        open_slot(s, of);
    while (of->n_open > n) {
        const int32_t error = close_slot(s, of);
        if (error)
            return error;
    }
    return 0;
}
