/* Reads block L0/E0 of a file (named, and on stdin) through colibri.h while open and pread fail; prints
 * for each fault the codes of opening and reading, the mode and both errnos, as JSON. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum fault { NONE, DIRECT_OPEN, DIRECT_PROBE, DIRECT_LATER, DIRECT_SHORT, SHORT, INTERRUPTED, FAILED, CUT };
static enum fault injected;
static int is_reading; /* the block, not the file's head */
static unsigned n_calls;

static int fake_open(const char *path, int flags)
{
    if (injected == DIRECT_OPEN && flags & O_DIRECT) {
        errno = EINVAL;
        return -1;
    }
    return open(path, flags);
}

static ssize_t fake_pread(int fd, void *buffer, size_t size, off_t offset)
{
    int is_direct = (fcntl(fd, F_GETFL) & O_DIRECT) != 0;
    errno = 0;
    if (is_direct && (injected == DIRECT_PROBE || (injected == DIRECT_LATER && is_reading))) {
        errno = EINVAL;
        return -1;
    }
    if (injected == INTERRUPTED && n_calls++ % 2 == 0) {
        errno = EINTR;
        return -1;
    }
    if (injected == FAILED && is_reading) {
        errno = EIO;
        return -1;
    }
    if (injected == CUT && is_reading)
        return 0;
    if (injected == DIRECT_SHORT && is_direct && is_reading)
        return pread(0, buffer, 5000, offset); /* stdin is the file: a direct read has no odd size */
    if (injected == SHORT && !is_direct)
        size = 100 < size ? 100 : size;
    return pread(fd, buffer, size, offset);
}

#define open fake_open
#define pread fake_pread
#define COLIBRI_IMPLEMENTATION
#include "colibri.h"

int main(int argc, char **argv)
{
    static const char *const names[] = {"none",  "direct-open", "direct-probe", "direct-later", "direct-short",
                                        "short", "interrupted", "failed",       "cut"};
    static _Alignas(4096) uint8_t buffer[1 << 20];
    for (int i = 0; i <= CUT && argc > 1; i++) {
        colibri_file file;
        colibri_io io;
        int opened, code;
        injected = (enum fault)i;
        is_reading = 0;
        opened = colibri_open(&file, argv[1], NULL);
        is_reading = 1;
        memset(buffer, 0, sizeof buffer);
        memset(&io, 0, sizeof io);
        code = opened ? 0 : colibri_read_block(&file, 0, 0, buffer, sizeof buffer, 0, &io);
        printf("[\"%s\",\"%s\",\"%s\",%" PRIu32 ",%" PRId32 ",%" PRId32 "]\n", names[i], colibri_strerror(opened),
               colibri_strerror(code), io.mode, io.direct_errno, io.os_errno);
        colibri_close(&file);
    }
    return 0;
}
