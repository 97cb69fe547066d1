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
#include <stddef.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "checksum.h"
#include "disk_internal.h"

enum { N_ORDERS = COLIBRI_WORKER_ORDERS, NONE = -1, BATCH = 8, MAX_PIECES = 64, ORDER_BITS = 8 };

/* How far an order has come. Its pieces have numbers, `step` bytes apart. */
struct progress {
    uint64_t landed;   /* pieces that came whole, bits */
    int64_t failure;   /* result of the first piece that did not, */
    int32_t failed;    /* and its number; -1: none did */
    uint32_t begun;    /* bytes asked of the kernel */
    uint32_t step;
    int32_t n_landed;  /* pieces without a gap, from the first on */
    uint32_t n_begun;  /* pieces in flight */
    int32_t is_held;   /* by the thread, which has yet to see to it: no other is to end it */
    struct colibri_hasher hasher;
};

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
    struct progress progress[N_ORDERS];
    void *queue;
    int32_t kind;
    struct colibri_worker_plan plan;
    uint32_t n_begun; /* requests in the kernel's queue */
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

/* The order `tag` of which not everything has begun: its number, or NONE. */
static int32_t find_tag(const struct worker *w, uint32_t tag)
{
    const int32_t firsts[] = {w->demands.first, w->aheads.first};

    for (int k = 0; k < 2; k++)
        for (int32_t i = firsts[k]; i != NONE; i = w->next[i])
            if (w->orders[i].read.tag == tag)
                return i;
    return NONE;
}

/* ---- requests; the lock is held ---- */

static uint32_t piece_length(const struct worker *w, int32_t i, uint32_t begin)
{
    const uint32_t rest = w->orders[i].read.length - begin, step = w->progress[i].step;
    return rest < step ? rest : step;
}

static int is_all_begun(const struct worker *w, int32_t i)
{
    return w->progress[i].begun == w->orders[i].read.length;
}

static void end(struct worker *w, int32_t i)
{
    append(w, &w->ended, i);
    atomic_fetch_add(&w->ends, 1);
    if (w->is_waited)
        wake(&w->ends);
}

static struct list *list_of(struct worker *w, int32_t i)
{
    return w->orders[i].ahead ? &w->aheads : &w->demands;
}

static uint64_t n_bytes_landed(const struct progress *progress)
{
    uint64_t landed = progress->landed, n = 0;

    for (; landed; landed &= landed - 1)
        n++;
    return n * progress->step;
}

/* Ends the order if nothing more is to come of it. */
static void end_if_done(struct worker *w, int32_t i)
{
    const struct progress *progress = &w->progress[i];
    int64_t result = w->orders[i].read.length;

    if (progress->n_begun || progress->is_held || (progress->failed == NONE && !is_all_begun(w, i)))
        return;
    if (progress->failed != NONE) {
        w->outcomes[i].hash = n_bytes_landed(progress);
        result = progress->failure;
        if (result >= 0)
            result += (int64_t)progress->failed * progress->step;
    }
    w->outcomes[i].result = result;
    end(w, i);
}

/* Nothing of the order is to begin any more. */
static void stop(struct worker *w, int32_t i, int32_t piece, int64_t result)
{
    struct progress *progress = &w->progress[i];

    if (progress->failed == NONE || piece < progress->failed) {
        progress->failed = piece;
        progress->failure = result;
    }
    if (!is_all_begun(w, i)) {
        take_tag(w, list_of(w, i), w->orders[i].read.tag);
        w->orders[i].read.length = progress->begun;
    }
}

/* The order of which a piece is to begin next, or NONE. */
static int32_t next_order(const struct worker *w)
{
    int32_t i = w->demands.first;

    if (i != NONE) {
        const uint32_t length = w->orders[i].read.length, step = w->progress[i].step;
        const uint64_t n_pieces = length ? (length - 1) / step + 1 : 1;
        return w->n_begun < w->plan.depth * n_pieces ? i : NONE;
    }
    return w->n_begun < w->plan.depth_ahead ? w->aheads.first : NONE;
}

/* Notes that the order's next piece begins, or with a `sign` of -1 that its last one did not. */
static void count_piece(struct worker *w, int32_t i, uint32_t length, int sign)
{
    struct progress *progress = &w->progress[i];

    if (sign < 0 && is_all_begun(w, i))
        put_first(w, list_of(w, i), i);
    progress->begun += (uint32_t)sign * length;
    progress->n_begun += (uint32_t)sign;
    w->n_begun += (uint32_t)sign;
    if (sign > 0 && is_all_begun(w, i))
        take_first(w, list_of(w, i));
}

/* Fills the kernel's queue. */
static void begin(struct worker *w)
{
    while (!w->is_stopping && !w->failure) {
        struct colibri_read reads[BATCH];
        int32_t of[BATCH], n = 0, k, i, got;

        while (n < BATCH && (i = next_order(w)) != NONE) {
            const uint32_t at = w->progress[i].begun;
            reads[n] = w->orders[i].read;
            reads[n].address += at;
            reads[n].offset += at;
            reads[n].length = piece_length(w, i, at);
            reads[n].tag = (uint32_t)i | at / w->progress[i].step << ORDER_BITS;
            if (at == 0)
                w->outcomes[i].begun_ns = now_ns();
            count_piece(w, i, reads[n].length, 1);
            of[n++] = i;
        }
        if (n == 0)
            return;
        got = w->kind == COLIBRI_QUEUE_URING ? colibri_uring_submit(w->queue, reads, (uint32_t)n)
                                             : colibri_aio_submit(w->queue, reads, (uint32_t)n);
        for (k = n; k > 0 && k > got; k--)
            count_piece(w, of[k - 1], reads[k - 1].length, -1);
        if (got > 0 || got == -EINTR)
            continue;
        if (w->n_begun && (got == -EAGAIN || got == -EBUSY || got == -ENOMEM))
            return; /* what is in flight makes room */
        w->outcomes[of[0]].ended_ns = w->outcomes[of[0]].begun_ns;
        stop(w, of[0], (int32_t)(reads[0].tag >> ORDER_BITS), got);
        end_if_done(w, of[0]);
    }
}

/* ---- the thread ---- */

/* Hashes what has come of an order, without the lock: its memory is nobody else's. */
static void hash(struct worker *w, int32_t i)
{
    const struct colibri_order *order = &w->orders[i];
    struct progress *progress = &w->progress[i];
    const void *data = (const void *)(uintptr_t)order->read.address;
    const uint64_t n_there = (uint64_t)progress->n_landed * progress->step;
    const int is_last = progress->n_begun == 0 && is_all_begun(w, i);
    int64_t started;

    if (!order->size || progress->failed != NONE)
        return;
    pthread_mutex_unlock(&w->lock);
    started = now_ns();
    if (is_last)
        w->outcomes[i].hash = colibri_hasher_end(&progress->hasher, data, order->size, order->seed);
    else
        colibri_hasher_add(&progress->hasher, data, n_there, order->size);
    w->outcomes[i].hash_ns += now_ns() - started;
    pthread_mutex_lock(&w->lock);
}

/* Takes in what has ended, and begins what follows before it hashes. While it hashes one order, the
 * others that something has come of are held as well: one that is withdrawn meanwhile would be ended
 * by its caller, given back, perhaps used anew, and ended once more here. */
static void take_in(struct worker *w, const struct colibri_done *done, int32_t n)
{
    const int64_t now = now_ns();
    int32_t k;

    if (w->kind == COLIBRI_QUEUE_URING)
        colibri_uring_retire(w->queue, (uint32_t)n);
    else
        colibri_aio_retire(w->queue, (uint32_t)n);
    for (k = 0; k < n; k++) {
        const int32_t i = (int32_t)(done[k].tag & (N_ORDERS - 1));
        const int32_t piece = (int32_t)(done[k].tag >> ORDER_BITS);
        struct progress *progress = &w->progress[i];
        const uint32_t length = piece_length(w, i, (uint32_t)piece * progress->step);

        w->n_begun--;
        progress->n_begun--;
        progress->is_held = 1;
        w->outcomes[i].ended_ns = now;
        if (done[k].result == (int64_t)length)
            progress->landed |= UINT64_C(1) << piece;
        else
            stop(w, i, piece, done[k].result);
        while (progress->n_landed < MAX_PIECES && progress->landed >> progress->n_landed & 1)
            progress->n_landed++;
    }
    begin(w);
    for (k = 0; k < n; k++) {
        const int32_t i = (int32_t)(done[k].tag & (N_ORDERS - 1));
        int32_t later = k + 1;

        while (later < n && (done[later].tag & (N_ORDERS - 1)) != i)
            later++;
        if (later < n)
            continue; /* its other piece is at hand too */
        hash(w, i);
        w->progress[i].is_held = 0;
        end_if_done(w, i);
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

int32_t colibri_worker_open(void *memory, void *queue, int32_t kind,
                            const struct colibri_worker_plan *plan)
{
    struct worker *w = memory;
    sigset_t all, before;
    int error;

    memset(w, 0, sizeof *w);
    if (plan->depth < 1 || (kind != COLIBRI_QUEUE_URING && kind != COLIBRI_QUEUE_AIO))
        return -EINVAL;
    w->queue = queue;
    w->kind = kind;
    w->plan = *plan;
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

/* A forked child has the memory without the thread, and the lock perhaps as the thread held it. */
static int is_forked(const struct worker *w) { return w->pid != getpid(); }

static void prepare(struct worker *w, int32_t i)
{
    const struct colibri_order *order = &w->orders[i];
    struct progress *progress = &w->progress[i];

    memset(progress, 0, offsetof(struct progress, hasher));
    progress->failed = NONE;
    progress->step = w->plan.piece_bytes ? w->plan.piece_bytes : order->read.length;
    while ((uint64_t)progress->step * MAX_PIECES < order->read.length)
        progress->step *= 2;
    if (progress->step == 0)
        progress->step = 1;
    if (order->size)
        colibri_hasher_begin(&progress->hasher, order->seed);
}

int32_t colibri_worker_submit(void *worker, const struct colibri_order *orders, uint32_t n)
{
    struct worker *w = worker;
    uint32_t n_taken = 0;

    if (is_forked(w))
        return -ECHILD;
    pthread_mutex_lock(&w->lock);
    while (n_taken < n) {
        const int32_t i = take_first(w, &w->unused);
        if (i == NONE)
            break;
        w->orders[i] = orders[n_taken++];
        memset(&w->outcomes[i], 0, sizeof w->outcomes[i]);
        w->outcomes[i].tag = w->orders[i].read.tag;
        prepare(w, i);
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

    if (is_forked(w))
        return -ECHILD;
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

    if (is_forked(w))
        return 0;
    pthread_mutex_lock(&w->lock);
    i = find_tag(w, tag);
    if (i != NONE && w->progress[i].begun) {
        stop(w, i, (int32_t)(w->progress[i].begun / w->progress[i].step), -ECANCELED);
        end_if_done(w, i);
        i = NONE;
    } else if (i != NONE) {
        take_tag(w, list_of(w, i), tag);
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

    if (is_forked(w))
        return 0;
    pthread_mutex_lock(&w->lock);
    i = take_tag(w, &w->aheads, tag);
    if (i != NONE) {
        w->orders[i].ahead = 0;
        if (w->progress[i].begun)
            put_first(w, &w->demands, i);
        else
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

    if (is_forked(w))
        return 0;
    pthread_mutex_lock(&w->lock);
    n = (int32_t)w->n_outstanding;
    pthread_mutex_unlock(&w->lock);
    return n;
}

int32_t colibri_worker_close(void *worker)
{
    struct worker *w = worker;

    if (!w->is_open || is_forked(w))
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

int32_t colibri_worker_open(void *memory, void *queue, int32_t kind,
                            const struct colibri_worker_plan *plan)
{
    (void)memory;
    (void)queue;
    (void)kind;
    (void)plan;
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
