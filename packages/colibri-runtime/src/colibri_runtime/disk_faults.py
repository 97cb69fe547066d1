"""What goes wrong with reads: which errors pass, what the others say, and the check of a block."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Final

from colibri_format import FormatCode, FormatError, StorageError
from colibri_format.checksum import checksum
from colibri_format.layout import block_seed

from .disk import BlockRead

MAX_AGAIN: Final = 8
"""Times that a passing error is answered by another try, 1, 2, 4, ... milliseconds later."""

PASSING: Final = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EBUSY, errno.ECANCELED})
"""Errors that another try may not meet: a full queue, memory short for a moment, and, from
io_uring, a request given up because the thread that submitted it has ended."""


def again_ns(n_again: int) -> int:
    """How long to wait before try number `n_again` + 2, in nanoseconds."""
    return 1_000_000 << n_again


def describe_block(path: Path, read: BlockRead) -> str:
    """`model.colibri: block L3/E12 at 0x4c0000`, as errors begin."""
    return f"{path}: block L{read.layer}/E{read.expert} at {read.offset:#x}"


def kernel_error(path: Path, read: BlockRead, error: OSError) -> StorageError:
    """The error of a read that the kernel refused; keeps errno and file name."""
    failure = StorageError.of(error, describe_block(path, read), f"reading {read.length} bytes")
    failure.filename = str(path)
    return failure


def is_end(fd: int, position: int) -> bool:
    """Whether the file has no byte at `position`: the kernel may also just give fewer."""
    return os.lseek(fd, 0, os.SEEK_END) <= position


def short_read(path: Path, read: BlockRead, found: int, *, is_end: bool) -> StorageError:
    """The error of a block of which only `found` bytes could be read."""
    what = "the file ends" if is_end else "reads stop again and again"
    remedy = "the file was cut short while in use: restore it or repack"
    error = StorageError(
        FormatCode.SHORT_READ,
        describe_block(path, read),
        f"{what} after {found} of {read.length} bytes",
        "the whole block",
        remedy if is_end else "look into the kernel's log for what ails the disk",
    )
    error.filename = str(path)
    return error


def checksum_error(path: Path, read: BlockRead) -> FormatError:
    """The error of a block that two reads found damaged."""
    return FormatError(
        FormatCode.BLOCK_CHECKSUM,
        describe_block(path, read),
        f"its {read.size} bytes do not have the checksum {read.checksum or 0:016x} of the index",
        "the bytes that were written; two reads agreed that they are not there",
        "the file is damaged: restore it or repack; `colibri verify` lists all such blocks",
    )


def matches(read: BlockRead) -> bool:
    """Whether the payload read has its checksum; adds the time to `checksum_ns`."""
    started = time.perf_counter_ns()
    found = checksum(read.buffer[: read.size], block_seed(read.layer, read.expert))
    read.checksum_ns += time.perf_counter_ns() - started
    return found == read.checksum
