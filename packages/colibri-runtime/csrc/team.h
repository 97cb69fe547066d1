/* A team of threads that share the chunks of one piece of work at a time. */
#ifndef COLIBRI_TEAM_H
#define COLIBRI_TEAM_H

#include <stdint.h>

#include "colibri_runtime.h"

struct colibri_team;

#define COLIBRI_TEAM_THREADS 256

/* Computes chunk `chunk` of the work that `ctx` describes; `thread` is the caller's number, from 0
 * to n_threads - 1, for scratch memory of its own. Runs on any thread of the team, in any order. */
typedef void colibri_chunk(void *ctx, int64_t chunk, int32_t thread);

/* Makes a team of `n_threads` in all: the thread that calls colibri_team_run and n_threads - 1 of
 * the team's own. With 1 there is no other thread. After a run the others look for more work for
 * `spin_ns` and then sleep; negative means the default, which was measured (team.c).
 *
 * Returns 0; -EINVAL (n_threads not in 1..COLIBRI_TEAM_THREADS, team NULL); -ENOMEM; -EAGAIN (the
 * system refuses a thread). *team is NULL unless 0 is returned. */
COLIBRI_EXPORT int32_t colibri_team_create(int32_t n_threads, int64_t spin_ns,
                                           struct colibri_team **team);

/* Ends the threads and frees the team; no run may be under way. NULL is ignored. In a process that
 * was forked after the team was made (its threads are not there) only the memory is freed. */
COLIBRI_EXPORT void colibri_team_destroy(struct colibri_team *team);

/* Computes the chunks 0..n_chunks-1 and returns when all are done; what they wrote can be read.
 *
 * Chunks are handed out one by one to whoever is free, the caller included: a thread that the
 * system does not run delays no chunk but the one it holds. In a forked process, and where `team`
 * is NULL, the caller computes all of them. Chunks must not call colibri_team_run of this team.
 *
 * Returns 0; -EINVAL (n_chunks negative or above 2^31 - 1, fn NULL); -EBUSY (another thread is in
 * this function with the same team). Nothing was computed then. */
int32_t colibri_team_run(struct colibri_team *team, colibri_chunk *fn, void *ctx,
                         int64_t n_chunks);

/* Threads of the team, the caller counted; 1 for NULL. */
COLIBRI_EXPORT int32_t colibri_team_threads(const struct colibri_team *team);

#endif
