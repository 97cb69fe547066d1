#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* syscall */
#endif
#include "disk_worker.h"

#include <errno.h>
#include <string.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "checksum.h"
#include "disk_internal.h"

enum { N_ORDERS = COLIBRI_WORKER_ORDERS, NONE = -1, BATCH = 8 };

/* First in, first out, by number, through worker.next. */
struct list {
    int32_t first, last;
};

struct worker {
    pthread_mutex_t lock; /* of all that follows but the atomic words */
    struct list demands, aheads, ended, unused;
    int32_t next[N_ORDERS];
    struct colibri_order orders[N_ORDERS];
    struct colibri_outcome outcomes[N_ORDERS];
    void *queue;
    int32_t kind;
    uint32_t depth, depth_ahead;
    uint32_t n_begun; /* in the kernel's queue */
    uint32_t n_outstanding;
    int32_t failure; /* what made the queue useless, or 0 */
    int32_t is_stopping;
    int32_t is_idle;   /* the thread waits for `calls` to change */
    int32_t is_waited; /* a caller waits for `ends` to change */
    atomic_uint calls, ends;
    int32_t is_open;
    pid_t pid;
    pthread_t thread;
};

static int64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static int wait_change(atomic_uint *word, unsigned seen)
{
    return syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0) < 0 ? -errno : 0;
}

static void wake(atomic_uint *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

/* ---- lists ---- */

static void append(struct worker *w, struct list *list, int32_t i)
{
    w->next[i] = NONE;
    if (list->first == NONE)
        list->first = i;
    else
        w->next[list->last] = i;
    list->last = i;
}

static void put_first(struct worker *w, struct list *list, int32_t i)
{
    w->next[i] = list->first;
    if (list->first == NONE)
        list->last = i;
    list->first = i;
}

static int32_t take_first(struct worker *w, struct list *list)
{
    const int32_t i = list->first;
    if (i != NONE)
        list->first = w->next[i];
    return i;
}

/* Takes the order `tag` out of the list: its number, or NONE. */
static int32_t take_tag(struct worker *w, struct list *list, uint32_t tag)
{
    int32_t before = NONE, i;
    for (i = list->first; i != NONE && w->orders[i].read.tag != tag; i = w->next[i])
        before = i;
    if (i == NONE)
        return NONE;
    if (before == NONE)
        list->first = w->next[i];
    else
        w->next[before] = w->next[i];
    if (list->last == i)
        list->last = before;
    return i;
}

/* ---- requests; the lock is held ---- */

static int32_t submit_one(struct worker *w, int32_t i)
{
    struct colibri_read read = w->orders[i].read;
    read.tag = (uint32_t)i;
    w->outcomes[i].begun_ns = now_ns();
    return w->kind == COLIBRI_QUEUE_URING ? colibri_uring_submit(w->queue, &read, 1)
                                          : colibri_aio_submit(w->queue, &read, 1);
}

static void end(struct worker *w, int32_t i)
{
    append(w, &w->ended, i);
    atomic_fetch_add(&w->ends, 1);
    if (w->is_waited)
        wake(&w->ends);
}

/* Fills the kernel's queue. */
static void begin(struct worker *w)
{
    while (!w->is_stopping && !w->failure && w->n_begun < w->depth) {
        struct list *list = &w->demands;
        int32_t i = take_first(w, list), got;

        if (i == NONE && w->n_begun < w->depth_ahead) {
            list = &w->aheads;
            i = take_first(w, list);
        }
        if (i == NONE)
            return;
        got = submit_one(w, i);
        if (got == 1) {
            w->n_begun++;
            continue;
        }
        if (got == -EINTR) {
            put_first(w, list, i);
            continue;
        }
        if (w->n_begun && (got == -EAGAIN || got == -EBUSY || got == -ENOMEM)) {
            put_first(w, list, i); /* what is in flight makes room */
            return;
        }
        w->outcomes[i].result = got;
        w->outcomes[i].ended_ns = w->outcomes[i].begun_ns;
        end(w, i);
    }
}

/* ---- the thread ---- */

/* Takes in what has ended, and begins what follows before it hashes. */
static void take_in(struct worker *w, const struct colibri_done *done, int32_t n)
{
    const int64_t now = now_ns();
    int32_t k;

    if (w->kind == COLIBRI_QUEUE_URING)
        colibri_uring_retire(w->queue, (uint32_t)n);
    else
        colibri_aio_retire(w->queue, (uint32_t)n);
    w->n_begun -= (uint32_t)n;
    begin(w);
    for (k = 0; k < n; k++) {
        const int32_t i = (int32_t)done[k].tag;
        const struct colibri_order *order = &w->orders[i];
        struct colibri_outcome *outcome = &w->outcomes[i];

        outcome->result = done[k].result;
        outcome->ended_ns = now;
        if (order->size && done[k].result == (int64_t)order->read.length) {
            /* Nobody else touches an order that is in no list. */
            int64_t started;
            pthread_mutex_unlock(&w->lock);
            started = now_ns();
            outcome->hash = colibri_block_hash((const void *)(uintptr_t)order->read.address,
                                               order->size, order->seed);
            outcome->hash_ns = now_ns() - started;
            pthread_mutex_lock(&w->lock);
        }
        end(w, i);
    }
}

static void *worker_main(void *argument)
{
    struct worker *w = argument;

    pthread_mutex_lock(&w->lock);
    while (!w->failure) {
        struct colibri_done done[BATCH];
        int32_t n;

        begin(w);
        if (w->n_begun == 0) {
            const unsigned seen = atomic_load(&w->calls);
            if (w->is_stopping)
                break;
            w->is_idle = 1;
            pthread_mutex_unlock(&w->lock);
            wait_change(&w->calls, seen);
            pthread_mutex_lock(&w->lock);
            w->is_idle = 0;
            continue;
        }
        pthread_mutex_unlock(&w->lock);
        n = w->kind == COLIBRI_QUEUE_URING ? colibri_uring_await(w->queue, done, BATCH)
                                           : colibri_aio_await(w->queue, done, BATCH);
        pthread_mutex_lock(&w->lock);
        if (n > 0) {
            take_in(w, done, n);
        } else if (n < 0 && n != -EINTR && n != -EAGAIN && n != -EBUSY) {
            w->failure = n;
            atomic_fetch_add(&w->ends, 1);
            wake(&w->ends);
        }
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

/* ---- calls ---- */

int32_t colibri_worker_bytes(void) { return (int32_t)sizeof(struct worker); }

int32_t colibri_worker_open(void *memory, void *queue, int32_t kind, uint32_t depth,
                            uint32_t depth_ahead)
{
    struct worker *w = memory;
    sigset_t all, before;
    int error;

    memset(w, 0, sizeof *w);
    if (depth < 1 || (kind != COLIBRI_QUEUE_URING && kind != COLIBRI_QUEUE_AIO))
        return -EINVAL;
    w->queue = queue;
    w->kind = kind;
    w->depth = depth;
    w->depth_ahead = depth_ahead;
    w->pid = getpid();
    w->demands.first = w->aheads.first = w->ended.first = w->unused.first = NONE;
    for (int32_t i = 0; i < N_ORDERS; i++)
        append(w, &w->unused, i);
    error = pthread_mutex_init(&w->lock, NULL);
    if (error)
        return -error;
    /* Signals are the program's own threads' to handle. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(&w->thread, NULL, worker_main, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) {
        pthread_mutex_destroy(&w->lock);
        return -error;
    }
    w->is_open = 1;
    return 0;
}

int32_t colibri_worker_submit(void *worker, const struct colibri_order *orders, uint32_t n)
{
    struct worker *w = worker;
    uint32_t n_taken = 0;

    pthread_mutex_lock(&w->lock);
    while (n_taken < n) {
        const int32_t i = take_first(w, &w->unused);
        if (i == NONE)
            break;
        w->orders[i] = orders[n_taken++];
        memset(&w->outcomes[i], 0, sizeof w->outcomes[i]);
        w->outcomes[i].tag = w->orders[i].read.tag;
        append(w, w->orders[i].ahead ? &w->aheads : &w->demands, i);
    }
    w->n_outstanding += n_taken;
    begin(w);
    atomic_fetch_add(&w->calls, 1);
    if (w->is_idle && w->n_begun)
        wake(&w->calls);
    pthread_mutex_unlock(&w->lock);
    return n_taken || n == 0 ? (int32_t)n_taken : -EBUSY;
}

int32_t colibri_worker_reap(void *worker, struct colibri_outcome *outcomes, uint32_t room,
                            int32_t wait)
{
    struct worker *w = worker;
    uint32_t n = 0;
    int32_t error = 0, i;

    pthread_mutex_lock(&w->lock);
    while (wait && room && w->ended.first == NONE && w->n_outstanding && !w->failure && !error) {
        const unsigned seen = atomic_load(&w->ends);
        w->is_waited = 1;
        pthread_mutex_unlock(&w->lock);
        error = wait_change(&w->ends, seen) == -EINTR ? -EINTR : 0;
        pthread_mutex_lock(&w->lock);
        w->is_waited = 0;
    }
    while (n < room && (i = take_first(w, &w->ended)) != NONE) {
        outcomes[n++] = w->outcomes[i];
        append(w, &w->unused, i);
    }
    w->n_outstanding -= n;
    if (n == 0 && w->n_outstanding && w->failure)
        error = w->failure;
    pthread_mutex_unlock(&w->lock);
    return n ? (int32_t)n : error;
}

int32_t colibri_worker_withdraw(void *worker, uint32_t tag)
{
    struct worker *w = worker;
    int32_t i;

    pthread_mutex_lock(&w->lock);
    i = take_tag(w, &w->demands, tag);
    if (i == NONE)
        i = take_tag(w, &w->aheads, tag);
    if (i != NONE) {
        append(w, &w->unused, i);
        w->n_outstanding--;
    }
    pthread_mutex_unlock(&w->lock);
    return i != NONE;
}

int32_t colibri_worker_promote(void *worker, uint32_t tag)
{
    struct worker *w = worker;
    int32_t i;

    pthread_mutex_lock(&w->lock);
    i = take_tag(w, &w->aheads, tag);
    if (i != NONE) {
        append(w, &w->demands, i);
        begin(w);
        atomic_fetch_add(&w->calls, 1);
        if (w->is_idle && w->n_begun)
            wake(&w->calls);
    }
    pthread_mutex_unlock(&w->lock);
    return i != NONE;
}

int32_t colibri_worker_outstanding(void *worker)
{
    struct worker *w = worker;
    int32_t n;

    pthread_mutex_lock(&w->lock);
    n = (int32_t)w->n_outstanding;
    pthread_mutex_unlock(&w->lock);
    return n;
}

int32_t colibri_worker_close(void *worker)
{
    struct worker *w = worker;

    /* A forked child has the memory without the thread. */
    if (!w->is_open || w->pid != getpid())
        return 0;
    pthread_mutex_lock(&w->lock);
    w->is_stopping = 1;
    atomic_fetch_add(&w->calls, 1);
    wake(&w->calls);
    pthread_mutex_unlock(&w->lock);
    pthread_join(w->thread, NULL);
    pthread_mutex_destroy(&w->lock);
    w->is_open = 0;
    return 0;
}

#else /* not Linux */

int32_t colibri_worker_bytes(void) { return 64; }

int32_t colibri_worker_open(void *memory, void *queue, int32_t kind, uint32_t depth,
                            uint32_t depth_ahead)
{
    (void)memory;
    (void)queue;
    (void)kind;
    (void)depth;
    (void)depth_ahead;
    return -ENOSYS;
}

int32_t colibri_worker_submit(void *worker, const struct colibri_order *orders, uint32_t n)
{
    (void)worker;
    (void)orders;
    (void)n;
    return -ENOSYS;
}

int32_t colibri_worker_reap(void *worker, struct colibri_outcome *outcomes, uint32_t room,
                            int32_t wait)
{
    (void)worker;
    (void)outcomes;
    (void)room;
    (void)wait;
    return -ENOSYS;
}

int32_t colibri_worker_withdraw(void *worker, uint32_t tag)
{
    (void)worker;
    (void)tag;
    return 0;
}

int32_t colibri_worker_promote(void *worker, uint32_t tag)
{
    (void)worker;
    (void)tag;
    return 0;
}

int32_t colibri_worker_outstanding(void *worker)
{
    (void)worker;
    return 0;
}

int32_t colibri_worker_close(void *worker)
{
    (void)worker;
    return 0;
}

#endif
