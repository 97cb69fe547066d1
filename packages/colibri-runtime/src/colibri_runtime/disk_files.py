"""Files opened to read blocks from, directly where a real read proves that it works."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from colibri_format import StorageError
from colibri_format.layout import round_up

from ._native import native

if TYPE_CHECKING:
    from .disk import BlockRead

ReadFunction = Callable[[int, list[Any], int], int]
"""`os.preadv`: file descriptor, buffers, offset; gives the bytes read."""


class IoMode(StrEnum):
    """Whether reads pass the page cache by."""

    DIRECT = "direct"
    BUFFERED = "buffered"


@dataclass(frozen=True, slots=True)
class Alignment:
    """What direct reads must be multiples of: addresses of `memory`, offsets and lengths of
    `offset` bytes. Not the same thing: many disks want 4 and 512, or 512 and 4096.
    """

    memory: int
    offset: int


UNKNOWN_ALIGNMENT: Final = Alignment(4096, 4096)
"""Where nothing tells: a page suits every disk but those whose sectors are larger."""

MEMORY_FILE_SYSTEMS: Final = ("tmpfs", "ramfs")
"""Newer kernels take O_DIRECT for them and copy all the same."""


@dataclass(frozen=True, slots=True)
class BlockFile:
    """A file that an engine is to read: `probe`, one of its blocks, is read to prove direct mode.

    `file_size` is what it had when its index was read, None where nobody knows.
    """

    path: Path
    probe: BlockRead | None = None
    file_size: int | None = None


@dataclass(frozen=True, slots=True)
class OpenFile:
    """Descriptors that their holder closes, the mode, and why it is not the direct one.

    `buffered_fd` is for what cannot be read directly; the same as `fd` in buffered mode.
    """

    path: Path
    fd: int
    buffered_fd: int
    mode: IoMode
    reason: str = ""
    alignment: Alignment = UNKNOWN_ALIGNMENT

    def close(self) -> None:
        """Closes both descriptors; once only."""
        for fd in {self.fd, self.buffered_fd}:
            os.close(fd)

    def plan_request(self, offset: int, length: int, address: int, room: int) -> tuple[bool, int]:
        """Whether bytes can be read directly into `room` bytes at `address`, and how many to ask.

        A length that does not suit is padded where the buffer has the room.
        """
        if self.mode is not IoMode.DIRECT:
            return False, length
        padded = round_up(length, self.alignment.offset)
        is_direct = (
            not offset % self.alignment.offset
            and not address % self.alignment.memory
            and padded <= room
        )
        return is_direct, padded if is_direct else length


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

    Flag and open prove nothing: some file systems take the flag and refuse the reads, and some
    take the reads and copy from memory. So `probe` is read into its slot with `read`, by which the
    engine that is to read reads; whatever refuses, the file is opened buffered and `reason` says
    what and why. Without a probe nothing is proven, and the file is opened buffered as well.

    Raises:
        StorageError: the file cannot be opened, or (`file-changed`) no longer has `file_size`
            bytes.
    """
    try:
        buffered = open_file(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError.of(error, path, "opening") from error
    try:
        _check_size(path, buffered, file_size)
        if not direct:
            reason = "not asked for"
        elif probe is None:
            reason = "no block to prove it with"
        else:
            found = _open_direct(path, buffered, probe, read, open_file)
            if not isinstance(found, str):
                fd, alignment = found
                return OpenFile(path, fd, buffered, IoMode.DIRECT, "", alignment)
            reason = found
    except BaseException:
        os.close(buffered)
        raise
    return OpenFile(path, buffered, buffered, IoMode.BUFFERED, reason)


def _check_size(path: Path, fd: int, file_size: int | None) -> None:
    found = os.fstat(fd).st_size
    if file_size is not None and found != file_size:
        raise StorageError(
            "file-changed",
            path,
            f"has {found} bytes",
            f"{file_size} when its index was read",
            "do not replace a file in use",
        )


def _open_direct(
    path: Path,
    buffered: int,
    probe: BlockRead,
    read: ReadFunction,
    open_file: Callable[[str | Path, int], int],
) -> tuple[int, Alignment] | str:
    """A descriptor that reads directly and what it wants, or why there is none."""
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return "this platform has no O_DIRECT"
    kind = file_system(os.fstat(buffered).st_dev)
    if kind in MEMORY_FILE_SYSTEMS:
        return f"{kind} keeps its files in memory: there is no disk to read from"
    alignment = direct_alignment(buffered) or UNKNOWN_ALIGNMENT
    if not alignment.offset or not alignment.memory:
        return f"{kind or 'the file system'} reads this file only through the page cache (statx)"
    if misfit := _misfit(probe, alignment):
        return misfit
    try:
        fd = open_file(path, os.O_RDONLY | os.O_CLOEXEC | flag)
    except OSError as error:
        return f"open refused O_DIRECT: {words(error)}"
    reason = prove(fd, probe, read)
    if reason:
        os.close(fd)
        return reason
    return fd, alignment


def prove(fd: int, probe: BlockRead, read: ReadFunction) -> str:
    """Why `probe` cannot be read from `fd` with `read`; empty if it was read."""
    try:
        n = read(fd, [probe.buffer[: probe.length]], probe.offset)
    except OSError as error:
        return f"direct read of a block refused: {words(error)}"
    if n < probe.size:
        return f"direct read of a block gave {n} of {probe.length} bytes"
    return ""


def _misfit(probe: BlockRead, alignment: Alignment) -> str:
    address = buffer_address(probe)
    if address % alignment.memory:
        return f"slots stand at {address:#x}; the disk wants multiples of {alignment.memory}"
    if probe.offset % alignment.offset or probe.length % alignment.offset:
        return (
            f"a block of {probe.length} bytes at {probe.offset:#x}; the disk wants multiples of "
            f"{alignment.offset}: repack with that alignment"
        )
    return ""


def buffer_address(read: BlockRead) -> int:
    """Where the first byte of the read's buffer stands in memory."""
    return read.address or int(read.buffer.__array_interface__["data"][0])


def direct_alignment(fd: int) -> Alignment | None:
    """What the kernel says direct reads of the file want, 0 and 0 if there are none.

    From statx(2), STATX_DIOALIGN, Linux 6.1 and later; None where it does not tell.
    """
    library = native().library
    if library is None:
        return None
    out = np.zeros(2, np.uint32)
    ask = library.function("colibri_direct_alignment", "i32", "i32", "ptr", "ptr")
    if ask(fd, out.ctypes.data, out.ctypes.data + 4) < 0:
        return None
    return Alignment(int(out[0]), int(out[1]))


def file_system(device: int, mountinfo: Path = Path("/proc/self/mountinfo")) -> str | None:
    """The type of the mounted file system with the number `device` (`st_dev`), if that is known.

    Read from proc_pid_mountinfo(5); None elsewhere, and for those that number files otherwise.
    """
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = mountinfo.read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        place, _, kind = line.partition(" - ")
        if place.split()[2:3] == [number]:
            return kind.split()[0]
    return None


def join_modes(files: Sequence[OpenFile]) -> tuple[IoMode, str]:
    """The mode of all files together: direct if each is; the reasons of those that are not."""
    buffered = [file for file in files if file.mode is not IoMode.DIRECT]
    if not buffered:
        return IoMode.DIRECT, ""
    if len(files) == 1:
        return IoMode.BUFFERED, buffered[0].reason
    return IoMode.BUFFERED, "; ".join(f"{file.path.name}: {file.reason}" for file in buffered)


def words(error: OSError) -> str:
    """`Invalid argument (EINVAL)`."""
    name = errno.errorcode.get(error.errno or 0, "?")
    return f"{error.strerror or error} ({name})"
