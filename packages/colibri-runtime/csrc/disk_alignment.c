/* What direct reads of a file must be multiples of, as statx(2) tells since Linux 6.1. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* syscall */
#endif
#include <errno.h>
#include <string.h>

#include "disk.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

int32_t colibri_direct_alignment(int32_t fd, uint32_t *memory, uint32_t *offset)
{
#if defined(__linux__) && defined(SYS_statx)
    enum { EMPTY_PATH = 0x1000, DIOALIGN = 0x2000 };
    enum { MASK_AT = 0, MEMORY_AT = 0x98, OFFSET_AT = 0x9c }; /* struct statx, <linux/stat.h> */
    uint8_t stat[256];
    uint32_t mask;

    memset(stat, 0, sizeof stat);
    if (syscall(SYS_statx, fd, "", EMPTY_PATH, DIOALIGN, stat) < 0)
        return errno == ENOSYS ? -ENODATA : -errno;
    memcpy(&mask, stat + MASK_AT, 4);
    if (!(mask & DIOALIGN))
        return -ENODATA;
    memcpy(memory, stat + MEMORY_AT, 4);
    memcpy(offset, stat + OFFSET_AT, 4);
    return 0;
#else
    (void)fd;
    (void)memory;
    (void)offset;
    return -ENODATA;
#endif
}
