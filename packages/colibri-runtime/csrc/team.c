#define _GNU_SOURCE
#include "team.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#define DEFAULT_SPIN_NS 50000
/* Looks between two readings of the clock. */
#define LOOKS 32

/* `remaining` counts the chunks that nobody has taken; a thread takes one by counting it down. What
 * `fn`, `ctx` and `n_chunks` are is read only after that: they cannot change while a chunk is
 * unfinished, so a thread that is late for one run and takes a chunk of the next is right too. */
struct colibri_team {
    _Alignas(64) atomic_llong remaining;
    _Alignas(64) atomic_llong unfinished;
    _Alignas(64) colibri_chunk *fn;
    void *ctx;
    int64_t n_chunks;
    _Alignas(64) atomic_uint runs; /* counts runs; what sleepers wait to change */
    atomic_uint sleepers;
    atomic_uint caller_sleeps;
    atomic_uint finishes; /* what a sleeping caller waits to change */
    atomic_uint stop;
    atomic_flag busy;
    int64_t spin_ns;
    pid_t pid;
    int32_t n_threads;
    int32_t n_started;
    void *memory;
    struct member {
        struct colibri_team *team;
        pthread_t thread;
        int32_t number;
    } members[];
};

/* ---- waiting: futexes, which a fork cannot leave locked; polling where there are none ---- */

static void wait_change(atomic_uint *word, unsigned seen) {
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
#else
    if (atomic_load(word) == seen) {
        const struct timespec pause = {0, 50000};
        nanosleep(&pause, NULL);
    }
#endif
}

static void wake_all(atomic_uint *word) {
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 0x7fffffff, NULL, NULL, 0);
#else
    (void)word;
#endif
}

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* ---- work ---- */

/* Computes chunks until none is left to take. */
static void work(struct colibri_team *team, int32_t thread) {
    long long remaining = atomic_load_explicit(&team->remaining, memory_order_acquire);
    while (remaining > 0) {
        if (!atomic_compare_exchange_weak_explicit(&team->remaining, &remaining, remaining - 1,
                                                   memory_order_acq_rel, memory_order_acquire))
            continue;
        team->fn(team->ctx, team->n_chunks - remaining, thread);
        if (atomic_fetch_sub(&team->unfinished, 1) == 1 && atomic_load(&team->caller_sleeps)) {
            atomic_fetch_add(&team->finishes, 1);
            wake_all(&team->finishes);
        }
        remaining = atomic_load_explicit(&team->remaining, memory_order_acquire);
    }
}

static void sleep_until_run(struct colibri_team *team) {
    unsigned runs = atomic_load(&team->runs);
    atomic_fetch_add(&team->sleepers, 1);
    /* A caller adds to `remaining` and `runs` before it looks for sleepers. */
    if (atomic_load(&team->remaining) == 0 && !atomic_load(&team->stop))
        wait_change(&team->runs, runs);
    atomic_fetch_sub(&team->sleepers, 1);
}

static void *member_main(void *argument) {
    const struct member *member = argument;
    struct colibri_team *team = member->team;
    while (!atomic_load_explicit(&team->stop, memory_order_acquire)) {
        work(team, member->number);
        const int64_t end = now_ns() + team->spin_ns;
        do {
            for (int look = 0; look < LOOKS; look++) {
                if (atomic_load_explicit(&team->remaining, memory_order_relaxed) > 0) break;
                relax();
            }
        } while (atomic_load_explicit(&team->remaining, memory_order_relaxed) == 0 &&
                 !atomic_load_explicit(&team->stop, memory_order_relaxed) && now_ns() < end);
        if (atomic_load(&team->remaining) == 0) sleep_until_run(team);
    }
    return NULL;
}

/* Waits for chunks that others have taken. */
static void wait_finished(struct colibri_team *team) {
    const int64_t end = now_ns() + team->spin_ns;
    while (atomic_load_explicit(&team->unfinished, memory_order_acquire) > 0) {
        for (int look = 0; look < LOOKS; look++) {
            if (atomic_load_explicit(&team->unfinished, memory_order_acquire) == 0) return;
            relax();
        }
        if (now_ns() < end) continue;
        unsigned finishes = atomic_load(&team->finishes);
        atomic_store(&team->caller_sleeps, 1);
        if (atomic_load(&team->unfinished) > 0) wait_change(&team->finishes, finishes);
        atomic_store(&team->caller_sleeps, 0);
    }
}

static void work_alone(colibri_chunk *fn, void *ctx, int64_t n_chunks) {
    for (int64_t chunk = 0; chunk < n_chunks; chunk++) fn(ctx, chunk, 0);
}

int32_t colibri_team_run(struct colibri_team *team, colibri_chunk *fn, void *ctx,
                         int64_t n_chunks) {
    if (fn == NULL || n_chunks < 0 || n_chunks > INT32_MAX) return -EINVAL;
    if (team == NULL) {
        work_alone(fn, ctx, n_chunks);
        return 0;
    }
    if (atomic_flag_test_and_set(&team->busy)) return -EBUSY;
    if (team->n_threads == 1 || n_chunks <= 1) {
        work_alone(fn, ctx, n_chunks);
    } else {
        team->fn = fn;
        team->ctx = ctx;
        team->n_chunks = n_chunks;
        atomic_store(&team->unfinished, n_chunks);
        atomic_store(&team->remaining, n_chunks);
        atomic_fetch_add(&team->runs, 1);
        if (atomic_load(&team->sleepers) > 0) wake_all(&team->runs);
        work(team, 0);
        wait_finished(team);
    }
    atomic_flag_clear(&team->busy);
    return 0;
}

/* ---- life ---- */

int32_t colibri_team_create(int32_t n_threads, int64_t spin_ns, struct colibri_team **out) {
    if (out == NULL) return -EINVAL;
    *out = NULL;
    if (n_threads < 1 || n_threads > COLIBRI_TEAM_THREADS) return -EINVAL;
    const size_t size = sizeof(struct colibri_team) + (size_t)n_threads * sizeof(struct member);
    void *memory = calloc(1, size + 64);
    if (memory == NULL) return -ENOMEM;
    struct colibri_team *team = (void *)(((uintptr_t)memory + 63) / 64 * 64);
    team->memory = memory;
    atomic_flag_clear(&team->busy);
    team->spin_ns = spin_ns < 0 ? DEFAULT_SPIN_NS : spin_ns;
    team->pid = getpid();
    team->n_threads = n_threads;
    for (int32_t number = 1; number < n_threads; number++) {
        struct member *member = &team->members[number];
        member->team = team;
        member->number = number;
        if (pthread_create(&member->thread, NULL, member_main, member) != 0) {
            colibri_team_destroy(team);
            return -EAGAIN;
        }
        team->n_started++;
    }
    *out = team;
    return 0;
}

void colibri_team_destroy(struct colibri_team *team) {
    if (team == NULL) return;
    if (team->pid == getpid()) {
        atomic_store(&team->stop, 1);
        atomic_fetch_add(&team->runs, 1);
        wake_all(&team->runs);
        for (int32_t number = 1; number <= team->n_started; number++)
            pthread_join(team->members[number].thread, NULL);
    }
    free(team->memory);
}

int32_t colibri_team_threads(const struct colibri_team *team) {
    return team == NULL ? 1 : team->n_threads;
}
