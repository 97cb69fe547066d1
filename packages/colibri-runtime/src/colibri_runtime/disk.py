"""Reads of blocks into slots: the protocol of disk engines, and how the file is opened for them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from colibri_format import FormatCode, StorageError

ReadFunction = Callable[[int, list[Any], int], int]
"""`os.preadv`: file descriptor, buffers, offset; gives the bytes read."""


class IoMode(Enum):
    """Whether reads pass the page cache by."""

    DIRECT = "direct"
    BUFFERED = "buffered"


@dataclass(slots=True, eq=False)
class BlockRead:
    """One block to be read, and, once it comes back from `wait` or `poll`, how that went.

    `length` bytes at `offset` of the file go to the start of `buffer`, a slot; `size` of them are
    payload, the rest padding. With a `checksum` (XXH3-64 of the payload, seeded with the block's
    place) the payload is checked before it comes back. The engine owns read and buffer from
    `submit` until it gives the read back or `cancel` says True.
    """

    layer: int
    expert: int
    offset: int
    length: int
    size: int
    checksum: int | None
    slot: int
    buffer: NDArray[np.uint8]
    is_prefetch: bool = False
    error: Exception | None = None
    n_bytes: int = 0
    read_ns: int = 0
    checksum_ns: int = 0
    n_rereads: int = 0


@dataclass(frozen=True, slots=True)
class IoReport:
    """How blocks are read; `reason` says why not directly, empty where they are."""

    engine: str
    mode: IoMode
    reason: str
    n_threads: int
    is_verified: bool


class DiskEngine(Protocol):
    """Reads blocks in the background. One thread calls; none of the calls but `wait` blocks."""

    def submit(self, read: BlockRead) -> None:
        """Queues a read: behind earlier ones of its kind, prefetches behind all demands."""

    def promote(self, read: BlockRead) -> None:
        """Makes a queued prefetch a demand read; one that has begun simply goes on."""

    def cancel(self, read: BlockRead) -> bool:
        """Whether `read` was still queued and now will never be given back."""

    def poll(self) -> list[BlockRead]:
        """The reads that are done, well or badly, and were not given back before."""

    def wait(self) -> list[BlockRead]:
        """The same, at least one; blocks until there is. A read must be outstanding."""

    def report(self) -> IoReport:
        """How blocks are read."""

    def close(self) -> None:
        """Drops what is queued and returns when no read touches a buffer any more."""


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A descriptor that the caller closes, its mode, and why it is not the direct one."""

    path: Path
    fd: int
    mode: IoMode
    reason: str = ""


def describe_block(path: Path, read: BlockRead) -> str:
    """`model.colibri: block L3/E12 at 0x4c0000`, as errors begin."""
    return f"{path}: block L{read.layer}/E{read.expert} at {read.offset:#x}"


def open_blocks(
    path: Path,
    *,
    probe: BlockRead | None,
    direct: bool = True,
    file_size: int | None = None,
    read: ReadFunction = os.preadv,
    open_file: Callable[[str | Path, int], int] = os.open,
) -> OpenFile:
    """`path` opened to read blocks from, with O_DIRECT where a real read proves that it works.

    Flag and open prove nothing: some file systems take the flag and refuse the reads. So `probe`
    is read into its slot; whatever refuses, the file is opened buffered and `reason` says what
    and why. Without a probe nothing is proven, and the file is opened buffered as well.

    Raises:
        StorageError: the file cannot be opened, or (`file-changed`) no longer has `file_size`
            bytes.
    """
    reason = "not asked for"
    if direct and probe is None:
        reason = "there is no block to prove direct reads with"
    elif direct and probe is not None:
        fd, reason = _open_direct(path, probe, read, open_file)
        if fd is not None:
            return _checked(OpenFile(path, fd, IoMode.DIRECT), file_size)
    try:
        fd = open_file(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError.of(error, path, "opening it to read blocks") from error
    if hasattr(os, "posix_fadvise"):
        # Blocks are read whole and in no order: readahead would only fetch neighbours.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return _checked(OpenFile(path, fd, IoMode.BUFFERED, reason), file_size)


def _checked(file: OpenFile, file_size: int | None) -> OpenFile:
    found = os.fstat(file.fd).st_size
    if file_size is not None and found != file_size:
        os.close(file.fd)
        raise StorageError(
            "file-changed",
            file.path,
            f"has {found} bytes",
            f"{file_size} when its index was read",
            "do not replace a file in use",
        )
    return file


def _open_direct(
    path: Path,
    probe: BlockRead,
    read: ReadFunction,
    open_file: Callable[[str | Path, int], int],
) -> tuple[int | None, str]:
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return None, "this platform has no O_DIRECT"
    try:
        fd = open_file(path, os.O_RDONLY | os.O_CLOEXEC | flag)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EACCES, errno.EISDIR):
            return None, ""
        return None, f"open refused O_DIRECT: {_words(error)}"
    try:
        n = read(fd, [probe.buffer[: probe.length]], probe.offset)
    except OSError as error:
        os.close(fd)
        return None, f"direct read of a block refused: {_words(error)}"
    if n < probe.length:
        os.close(fd)
        return None, f"direct read of a block gave {n} of {probe.length} bytes"
    return fd, ""


def _words(error: OSError) -> str:
    name = errno.errorcode.get(error.errno or 0, "?")
    return f"{error.strerror or error} ({name})"


def short_read(path: Path, read: BlockRead, found: int) -> StorageError:
    """The error of a file that ends inside a block."""
    error = StorageError(
        FormatCode.SHORT_READ,
        describe_block(path, read),
        f"the file ends after {found} of {read.length} bytes",
        "the whole block",
        "the file was cut short while in use: restore it or repack",
    )
    error.filename = str(path)
    return error
