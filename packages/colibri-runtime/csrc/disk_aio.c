/* Reads through Linux AIO over its raw system calls: io_setup(2), io_submit(2), io_getevents(2),
 * io_destroy(2). */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* syscall */
#endif
#include <errno.h>
#include <string.h>

#include "disk.h"
#include "disk_internal.h"

#if defined(__linux__)
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MAX_ENTRIES = 4096, BATCH = 64 };

struct aio {
    aio_context_t context; /* 0: closed */
    uint32_t entries;
    uint32_t in_flight;
};

int32_t colibri_aio_bytes(void)
{
    return (int32_t)sizeof(struct aio);
}

int32_t colibri_aio_open(void *memory, uint32_t entries)
{
    struct aio *a = memory;

    memset(a, 0, sizeof *a);
    if (entries < 1 || entries > MAX_ENTRIES)
        return -EINVAL;
    if (syscall(SYS_io_setup, entries, &a->context) < 0) {
        a->context = 0;
        return -errno;
    }
    /* A sandbox may allow the set-up alone. */
    if (syscall(SYS_io_submit, a->context, 0L, NULL) < 0) {
        const int32_t error = -errno;
        syscall(SYS_io_destroy, a->context);
        a->context = 0;
        return error;
    }
    a->entries = entries;
    return 0;
}

int32_t colibri_aio_submit(void *queue, const struct colibri_read *reads, uint32_t n)
{
    struct aio *a = queue;
    const uint32_t room = a->entries - a->in_flight;
    uint32_t n_taken = 0;

    if (n > room)
        n = room;
    if (n == 0)
        return -EBUSY;
    while (n_taken < n) {
        struct iocb blocks[BATCH]; /* the kernel copies them within the call */
        struct iocb *list[BATCH];
        const uint32_t left = n - n_taken;
        const uint32_t batch = left < BATCH ? left : BATCH;
        uint32_t i;
        long got;

        memset(blocks, 0, sizeof blocks);
        for (i = 0; i < batch; i++) {
            const struct colibri_read *read = &reads[n_taken + i];
            blocks[i].aio_data = read->tag;
            blocks[i].aio_lio_opcode = IOCB_CMD_PREAD;
            blocks[i].aio_fildes = (uint32_t)read->fd;
            blocks[i].aio_buf = read->address;
            blocks[i].aio_nbytes = read->length;
            blocks[i].aio_offset = (int64_t)read->offset;
            list[i] = &blocks[i];
        }
        got = syscall(SYS_io_submit, a->context, (long)batch, list);
        if (got <= 0) {
            const int32_t error = got < 0 ? -errno : -EAGAIN;
            return n_taken ? (int32_t)n_taken : error;
        }
        n_taken += (uint32_t)got;
        a->in_flight += (uint32_t)got;
    }
    return (int32_t)n_taken;
}

static int32_t get_events(struct aio *a, struct colibri_done *done, uint32_t room, int32_t wait)
{
    struct io_event events[BATCH];
    struct timespec none = {0, 0};
    long got, i;

    if (room > BATCH)
        room = BATCH;
    got = syscall(SYS_io_getevents, a->context, (long)(wait ? 1 : 0), (long)room, events,
                  wait ? NULL : &none);
    if (got < 0)
        return -errno;
    for (i = 0; i < got && done; i++) {
        done[i].tag = (int64_t)events[i].data;
        done[i].result = events[i].res;
    }
    return (int32_t)got;
}

int32_t colibri_aio_await(void *queue, struct colibri_done *done, uint32_t room)
{
    return get_events(queue, done, room, 1);
}

void colibri_aio_retire(void *queue, uint32_t n)
{
    ((struct aio *)queue)->in_flight -= n;
}

int32_t colibri_aio_reap(void *queue, struct colibri_done *done, uint32_t room, int32_t wait)
{
    struct aio *a = queue;
    int32_t n;

    if (a->in_flight == 0 || room == 0)
        return 0;
    n = get_events(a, done, room, wait);
    if (n > 0)
        a->in_flight -= (uint32_t)n;
    return n;
}

int32_t colibri_aio_in_flight(void *queue)
{
    return (int32_t)((const struct aio *)queue)->in_flight;
}

int32_t colibri_aio_close(void *queue)
{
    struct aio *a = queue;

    if (a->context == 0)
        return 0;
    while (a->in_flight) {
        const int32_t got = colibri_aio_reap(a, NULL, BATCH, 1);
        if (got < 0)
            return got;
    }
    syscall(SYS_io_destroy, a->context);
    a->context = 0;
    return 0;
}

#else /* not Linux */

int32_t colibri_aio_bytes(void) { return 64; }

int32_t colibri_aio_open(void *memory, uint32_t entries)
{
    (void)memory;
    (void)entries;
    return -ENOSYS;
}

int32_t colibri_aio_submit(void *queue, const struct colibri_read *reads, uint32_t n)
{
    (void)queue;
    (void)reads;
    (void)n;
    return -ENOSYS;
}

int32_t colibri_aio_reap(void *queue, struct colibri_done *done, uint32_t room, int32_t wait)
{
    (void)queue;
    (void)done;
    (void)room;
    (void)wait;
    return -ENOSYS;
}

int32_t colibri_aio_in_flight(void *queue)
{
    (void)queue;
    return 0;
}

int32_t colibri_aio_close(void *queue)
{
    (void)queue;
    return 0;
}

#endif
