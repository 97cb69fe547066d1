"""A file that gets its name only when it is complete."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

from .checksum import Buffer, view_bytes
from .errors import StorageError
from .layout import PAGE


class OutputFile:
    """`NAME.part` of a known size, locked while it is written; then `NAME`, or nothing.

    Raises (when made):
        StorageError: `file-exists` unless `overwrite`, `is-a-directory`, `output-busy`,
            `disk-full`, or the kernel's error.
    """

    def __init__(self, path: Path, size: int, *, overwrite: bool) -> None:
        self.path = path
        self._overwrite = overwrite
        self._part = path.parent / f"{path.name}.part"
        _check_target(path)
        self._check_absent()
        self._fd = self._lock_part()
        try:
            os.ftruncate(self._fd, 0)
            os.ftruncate(self._fd, size)
        except OSError as error:
            self.discard()
            raise StorageError.of(error, self._part, "setting the size of") from error

    def _lock_part(self) -> int:
        """The unfinished file, open and locked; it is the one that its name leads to."""
        while True:
            fd = self._open_part()
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise _not_a_file(self._part, "is a device, a pipe or a socket")
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    raise StorageError(
                        "output-busy",
                        self._part,
                        "another process is writing it",
                        "one writer at a time",
                        errno=error.errno,
                    ) from error
                # Between open and lock another writer may have finished and given the very file
                # its name: a lock is on the file, and only its name makes it the unfinished one.
                if self._is_named(fd):
                    self._check_part(fd)
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _open_part(self) -> int:
        # O_NOFOLLOW: a link in the place of the unfinished file may lead anywhere.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            return os.open(self._part, flags, 0o666)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise _not_a_file(self._part, "is a link") from error
            raise StorageError.of(error, self._part, "creating") from error

    def _check_part(self, fd: int) -> None:
        """Raises unless the file is new, or what an earlier writer left unfinished."""
        if os.fstat(fd).st_nlink > 1:
            raise _not_a_file(self._part, "has another name as well")
        # A writer fills the first page last of all, so in what it leaves behind it is zero.
        if any(os.pread(fd, PAGE, 0)):
            raise StorageError(
                "part-exists",
                self._part,
                "exists and is no unfinished output",
                "its name free, while the output is written under it",
                "move it away",
            )

    def _is_named(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.lstat(self._part))
        except OSError:
            return False

    def write_at(self, offset: int, data: Buffer) -> None:
        """Writes all of `data` at `offset`."""
        view = view_bytes(data)
        while len(view):
            try:
                n = os.pwrite(self._fd, view, offset)
            except OSError as error:
                raise StorageError.of(
                    error, self._part, f"writing at {offset:#x}", "the unfinished file is removed"
                ) from error
            view = view[n:]
            offset += n

    def sync(self) -> None:
        """Returns when what was written so far is on the disk."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise StorageError.of(error, self._part, "writing back") from error

    def publish(self) -> None:
        """Gives the file its name, durably; it is not written to any more."""
        try:
            self._rename()
            os.close(self._fd)
            self._fd = -1
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except StorageError:
            raise
        except OSError as error:
            raise StorageError.of(error, self._part, "giving its name to") from error

    def _rename(self) -> None:
        if not self._is_named(self._fd):
            raise StorageError(
                "output-replaced",
                self._part,
                "was removed or replaced while it was written",
                "the unfinished file stays in place",
                "repeat the command",
            )
        if self._overwrite:
            self._part.replace(self.path)
            return
        # link refuses an existing name, where rename would silently replace a file that appeared
        # while this one was written.
        try:
            os.link(self._part, self.path)
        except FileExistsError:
            self._check_absent()
            raise
        except OSError:
            # A file system without hard links.
            self._check_absent()
            self._part.replace(self.path)
        else:
            self._part.unlink()

    def discard(self) -> None:
        """Removes the unfinished file; does nothing once it has its name."""
        if self._fd >= 0:
            if self._is_named(self._fd):
                self._part.unlink(missing_ok=True)
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
