"""A file that gets its name only when it is complete."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from .checksum import Buffer
from .errors import StorageError
from .layout import PAGE
from .stream import stream_extent
from .write_behind import BUFFER_BYTES, WriteBehind


class OutputFile:
    """`NAME.part` of a known size, locked while it is written; then `NAME`, or nothing.

    Made, it is open and locked and nothing else; `start` or `go_on` comes next. With `may_exist`
    a file under the name is looked at only by `start`.

    Raises (when made):
        StorageError: `file-exists` unless `overwrite`, `is-a-directory`, `not-a-file`,
            `output-busy`, or the kernel's error.
    """

    def __init__(
        self,
        path: Path,
        size: int,
        *,
        overwrite: bool,
        may_exist: bool = False,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self.path = path
        self.part = part_path(path)
        self.size = size
        self._overwrite = overwrite
        self._buffer_bytes = buffer_bytes
        _check_target(path)
        if not may_exist:
            self._check_absent()
        self._fd = self._lock_part()
        self._behind = WriteBehind(self._fd, self.part, buffer_bytes=buffer_bytes)

    @property
    def is_empty(self) -> bool:
        """Whether there was no unfinished file, or nothing in it."""
        return os.fstat(self._fd).st_size == 0

    @property
    def is_whole(self) -> bool:
        """Whether an unfinished file of the size that it is to have was there."""
        return os.fstat(self._fd).st_size == self.size

    @property
    def allocated_bytes(self) -> int:
        """What the unfinished file takes on the disk."""
        return os.fstat(self._fd).st_blocks * 512

    @property
    def accepted_bytes(self) -> int:
        """Bytes taken so far, written or not."""
        return self._behind.accepted_bytes

    @property
    def written_bytes(self) -> int:
        """How many of the bytes taken, in the order of their coming, are written."""
        return self._behind.written_bytes

    @property
    def io_mode(self) -> tuple[str, str]:
        """`direct` or `buffered`, and what showed it."""
        return self._behind.mode, self._behind.reason

    def start(self, *, is_ours: bool = False) -> None:
        """Begins anew: whatever the unfinished file held is gone.

        What is in it shows whether a writer left it, unless that is known (`is_ours`).

        Raises:
            StorageError: `file-exists`, `part-exists` or `not-a-file` when the unfinished file is
                none that a writer left, or the kernel's error.
        """
        self._check_absent()
        if self.is_published_link:
            # A crash between the two halves of publishing: the name is the finished file's now.
            self._behind.close()
            os.close(self._fd)
            self.part.unlink()
            self._fd = self._lock_part()
            self._behind = WriteBehind(self._fd, self.part, buffer_bytes=self._buffer_bytes)
        self._check_part(is_ours)
        try:
            os.ftruncate(self._fd, 0)
            os.ftruncate(self._fd, self.size)
        except OSError as error:
            raise StorageError.of(error, self.part, "setting the size of") from error

    @property
    def is_published_link(self) -> bool:
        """Whether the final name is another name of the unfinished file."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.lstat(self.path))
        except OSError:
            return False

    def _lock_part(self) -> int:
        """The unfinished file, open and locked; it is the one that its name leads to."""
        while True:
            fd = self._open_part()
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise _not_a_file(self.part, "is a device, a pipe or a socket")
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    raise StorageError(
                        "output-busy",
                        self.part,
                        "another process is writing it",
                        "one writer at a time",
                        errno=error.errno,
                    ) from error
                # Between open and lock another writer may have finished and given the very file
                # its name: a lock is on the file, and only its name makes it the unfinished one.
                if self._is_named(fd):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _open_part(self) -> int:
        # O_NOFOLLOW: a link in the place of the unfinished file may lead anywhere.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            return os.open(self.part, flags, 0o666)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise _not_a_file(self.part, "is a link") from error
            raise StorageError.of(error, self.part, "creating") from error

    def _check_part(self, is_ours: bool) -> None:
        """Raises unless the file is new, or what an earlier writer left unfinished."""
        if os.fstat(self._fd).st_nlink > 1:
            raise _not_a_file(self.part, "has another name as well")
        # A writer fills the first page last of all, so in what it leaves behind it is zero.
        if not is_ours and any(self.read_at(0, PAGE)):
            raise StorageError(
                "part-exists",
                self.part,
                "exists and is no unfinished output",
                "its name free, while the output is written under it",
                "move it away",
            )

    def _is_named(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.lstat(self.part))
        except OSError:
            return False

    def read_at(self, offset: int, size: int) -> bytes:
        """`size` bytes of the unfinished file, fewer at its end."""
        try:
            return os.pread(self._fd, size, offset)
        except OSError as error:
            raise StorageError.of(error, self.part, f"reading at {offset:#x}") from error

    def stream(self, offset: int, size: int) -> Iterator[memoryview]:
        """`size` bytes at `offset` of the unfinished file, from the disk, piece by piece."""
        for _, piece in stream_extent(self._fd, self.part, offset, size):
            yield piece

    def write_at(self, offset: int, data: Buffer) -> None:
        """Takes all of `data` for `offset`; `flush` writes what is not written yet."""
        self._behind.put(offset, data)

    def flush(self) -> None:
        """Returns when everything taken is written, though perhaps not yet on the disk."""
        self._behind.flush()

    def sync(self) -> None:
        """Returns when what was written so far is on the disk."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise StorageError.of(error, self.part, "writing back") from error

    def publish(self) -> None:
        """Gives the file its name, durably; it is not written to any more."""
        try:
            self._behind.close()
            self._rename()
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(self._fd)
            self._fd = -1
            sync_folder(self.path.parent)
        except StorageError:
            raise
        except OSError as error:
            raise StorageError.of(error, self.part, "giving its name to") from error

    def _rename(self) -> None:
        if not self._is_named(self._fd):
            raise StorageError(
                "output-replaced",
                self.part,
                "was removed or replaced while it was written",
                "the unfinished file stays in place",
                "repeat the command",
            )
        if self.is_published_link:
            self.part.unlink()
            return
        if self._overwrite:
            self.part.replace(self.path)
            return
        # link refuses an existing name, where rename would silently replace a file that appeared
        # while this one was written.
        try:
            os.link(self.part, self.path)
        except FileExistsError:
            self._check_absent()
            raise
        except OSError:
            # A file system without hard links.
            self._check_absent()
            self.part.replace(self.path)
        else:
            self.part.unlink()

    def discard(self) -> None:
        """Removes the unfinished file; does nothing once it has its name."""
        if self._fd >= 0:
            self._behind.close()
            if self._is_named(self._fd):
                # What cannot be removed stays, as after a kill: the error that led here matters.
                with contextlib.suppress(OSError):
                    self.part.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1

    def release(self) -> None:
        """Lets go of the unfinished file as it is; one without a byte is removed."""
        if self._fd >= 0 and self.is_empty:
            self.discard()
        elif self._fd >= 0:
            self._behind.close()
            os.close(self._fd)
            self._fd = -1

    def _check_absent(self) -> None:
        if not self._overwrite and os.path.lexists(self.path):
            raise StorageError(
                "file-exists",
                self.path,
                "exists already",
                "a new name is required",
                "choose another name, or overwrite it (--force)",
            )


def _check_target(path: Path) -> None:
    """Raises unless `path` is free or a regular file: devices and folders are never replaced."""
    if path.name in ("", ".."):
        raise StorageError("is-a-directory", path, "is a folder", "a file name")
    try:
        mode = path.stat().st_mode
    except OSError:
        # Free, or a link to nowhere, or not to be looked at, which creating will tell.
        return
    if stat.S_ISDIR(mode):
        raise StorageError("is-a-directory", path, "is a folder", "a file name")
    if not stat.S_ISREG(mode):
        raise _not_a_file(path, "is a device, a pipe or a socket")


def _not_a_file(path: Path, found: str) -> StorageError:
    return StorageError(
        "not-a-file", path, found, "a regular file or a free name", "choose another name"
    )


def part_path(path: Path) -> Path:
    """Where the file `path` stands until it is complete."""
    return path.parent / f"{path.name}.part"


def sync_folder(folder: Path) -> None:
    """Returns when the names in `folder` are on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
