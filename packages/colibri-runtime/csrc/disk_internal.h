/* Halves of colibri_*_reap, for a thread that waits while another begins requests. */
#ifndef COLIBRI_DISK_INTERNAL_H
#define COLIBRI_DISK_INTERNAL_H

#include "disk.h"

/* Blocks until a request has ended, and takes up to `room` completions, but does not count them as
 * taken: one thread at a time, which need not be the one that begins requests. How many or -errno;
 * 0 is possible. */
int32_t colibri_uring_await(void *queue, struct colibri_done *done, uint32_t room);
int32_t colibri_aio_await(void *queue, struct colibri_done *done, uint32_t room);

/* Counts `n` completions as taken; not beside colibri_*_submit. */
void colibri_uring_retire(void *queue, uint32_t n);
void colibri_aio_retire(void *queue, uint32_t n);

#endif
