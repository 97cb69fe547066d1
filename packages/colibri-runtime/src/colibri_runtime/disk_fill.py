"""A block read by the thread that asks, from the first byte to its check."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable

from .disk import BlockRead
from .disk_faults import (
    MAX_AGAIN,
    PASSING,
    again_ns,
    checksum_error,
    is_end,
    kernel_error,
    matches,
    short_read,
)
from .disk_files import OpenFile, ReadFunction, buffer_address


def read_block(
    file: OpenFile,
    read: BlockRead,
    *,
    is_verified: bool = True,
    preadv: ReadFunction = os.preadv,
    sleep: Callable[[float], None] = time.sleep,
    on_buffered: Callable[[], None] = lambda: None,
) -> None:
    """Reads and, with `is_verified`, checks a block; one that is wrong is read once more.

    A `read` with `n_rereads` of 1 was read and found wrong before. `on_buffered` is told of each
    request that goes through the page cache of a file open for direct reads.

    Raises:
        StorageError: `short-read`, or what the kernel said.
        FormatError: `block-checksum`.
    """
    _fill(file, read, preadv, sleep, on_buffered)
    if read.checksum is None or not is_verified or matches(read):
        return
    # Once more: a bit that flipped on its way, unlike one on the disk, is not there again.
    if not read.n_rereads:
        read.n_rereads = 1
        _fill(file, read, preadv, sleep, on_buffered)
        if matches(read):
            return
    raise checksum_error(file.path, read)


def _fill(
    file: OpenFile,
    read: BlockRead,
    preadv: ReadFunction,
    sleep: Callable[[float], None],
    on_buffered: Callable[[], None],
) -> None:
    """Reads until the whole block is there; the kernel may give less than it was asked for."""
    started = time.perf_counter_ns()
    room = len(read.buffer)
    is_direct, length = file.plan_request(read.offset, read.length, buffer_address(read), room)
    buffer = memoryview(read.buffer)[:length]  # type: ignore[arg-type]
    done = 0
    n_again = 0
    while done < length:
        fd = file.fd if is_direct else file.buffered_fd
        if fd != file.fd:
            on_buffered()
        step = file.alignment.offset if is_direct else 1
        try:
            n = preadv(fd, [buffer[done:]], read.offset + done)
        except OSError as error:
            if error.errno == errno.EINTR:
                continue
            if error.errno == errno.EINVAL and is_direct:
                is_direct = False
                continue
            if error.errno in PASSING and n_again < MAX_AGAIN:
                sleep(again_ns(n_again) / 1e9)
                n_again += 1
                continue
            raise kernel_error(file.path, read, error) from error
        read.n_bytes += n
        if done + n >= length:
            break
        if n >= step:
            # A direct read goes on at a boundary only.
            done += n // step * step
            continue
        at_end = is_end(file.buffered_fd, read.offset + done + n)
        if not at_end and n_again < MAX_AGAIN:
            sleep(again_ns(n_again) / 1e9)
            n_again += 1
            continue
        if not at_end or done + n < read.size:
            raise short_read(file.path, read, done + n, is_end=at_end)
        read.buffer[done + n : read.length] = 0
        break
    read.ended_ns = time.perf_counter_ns()
    read.read_ns += read.ended_ns - started
