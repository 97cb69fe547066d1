"""The input files of one source: opened on demand, read by position, watched for changes."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from colibri_format import FormatCode, StorageError

MAX_OPEN: Final = 16
PAGE: Final = 4096
# Below, the page cache serves better: neighbours are read along and not again.
_LEAST_DIRECT: Final = 128 * 2**10
# What a file system answers that has no direct I/O, or none for this request.
_NOT_DIRECT: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})
# Large buffered reads are dropped from the page cache in stretches: each by itself costs more.
_WINDOW: Final = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What tells whether a file is still the one that was opened.

    A file rewritten in place whose old time of modification was put back has another `ctime_ns`;
    so has one whose permissions, owner or number of links changed.
    """

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


@dataclass
class _Open:
    """Descriptors of a file that is open, and how many threads are using them."""

    fd: int
    direct_fd: int | None = None
    n_users: int = 0
    undropped: int = 0


class InputFiles:
    """Position reads over any number of files, at most `MAX_OPEN` of them open at once.

    A checkpoint may have more shards than the process may have descriptors. Any thread may read.
    Large reads go past the page cache once a real read has shown that the file system does that;
    `mode` and `reason` say which.
    """

    def __init__(self) -> None:
        self._seen: dict[Path, Fingerprint] = {}
        self._open: OrderedDict[Path, _Open] = OrderedDict()
        self._lock = threading.Lock()
        self._may_be_direct = bool(getattr(os, "O_DIRECT", 0))
        self.mode = "buffered"
        self.reason = "no large read was needed"
        if not self._may_be_direct:
            self.reason = "this system has no O_DIRECT"

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every file that was added, in that order."""
        return tuple(self._seen)

    @property
    def fingerprints(self) -> dict[Path, Fingerprint]:
        """Every file as it was when it was added."""
        return dict(self._seen)

    def add(self, path: Path) -> int:
        """The size in bytes of `path`, which is watched from now on.

        Raises:
            StorageError: it cannot be looked at, or `not-a-file` when it is no regular file.
        """
        try:
            found = path.stat()
        except OSError as error:
            raise StorageError.of(error, path, "looking at the file") from error
        if not stat.S_ISREG(found.st_mode):
            raise StorageError(
                "not-a-file", path, "is no regular file", "a checkpoint's file is required"
            )
        self._seen.setdefault(path, _fingerprint(found))
        return found.st_size

    def read_into(self, path: Path, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `offset` of `path` on.

        A direct read goes straight into `buffer` where `offset` and the buffer's address are
        equally far from the page before them (`page_aligned` makes such); else it is copied.

        Raises:
            StorageError: the kernel refused; `short-read` when the file ends before.
        """
        try:
            with self._used(path) as file:
                is_large = len(buffer) >= _LEAST_DIRECT
                if (
                    is_large
                    and self._may_be_direct
                    and self._read_direct(file, path, offset, buffer)
                ):
                    return
                _read_cached(file.fd, path, offset, buffer)
                if is_large:
                    self._drop(file, len(buffer))
        except StorageError:
            raise
        except OSError as error:
            raise StorageError.of(error, path, f"reading at offset {offset}") from error

    def read(self, path: Path, offset: int, size: int) -> bytearray:
        """`size` bytes at `offset` of `path`; the caller has bounded `size`."""
        data = bytearray(size)
        self.read_into(path, offset, memoryview(data))
        return data

    def changed(self) -> tuple[Path, str] | None:
        """The first file that is no longer what it was when it was added, and what is other."""
        for path, then in self._seen.items():
            try:
                now = _fingerprint(path.stat())
            except OSError as error:
                return path, f"cannot be looked at any more ({error.strerror})"
            if now == then:
                continue
            if (now.device, now.inode) != (then.device, then.inode):
                return path, "was replaced"
            if (now.size, now.mtime_ns) != (then.size, then.mtime_ns):
                return path, "changed"
            return path, (
                "was touched (ctime): rewritten with its old time put back, or only its "
                "permissions, owner or links changed"
            )
        return None

    def close(self) -> None:
        """Close every open descriptor; the next read opens its file again."""
        with self._lock:
            while self._open:
                _close(self._open.popitem()[1])

    @contextmanager
    def _used(self, path: Path) -> Iterator[_Open]:
        """The open file, which is not closed meanwhile."""
        with self._lock:
            file = self._acquire(path)
            file.n_users += 1
        try:
            yield file
        finally:
            with self._lock:
                file.n_users -= 1

    def _acquire(self, path: Path) -> _Open:
        if (file := self._open.get(path)) is not None:
            self._open.move_to_end(path)
            return file
        idle = [other for other, used in self._open.items() if not used.n_users]
        for other in idle[: max(len(self._open) - MAX_OPEN + 1, 0)]:
            _close(self._open.pop(other))
        try:
            file = _Open(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            raise StorageError.of(error, path, "opening the file") from error
        self._open[path] = file
        return file

    def _read_direct(self, file: _Open, path: Path, offset: int, buffer: memoryview) -> bool:
        """Whether the file system took a direct read, which has then filled `buffer`."""
        fd = self._direct_fd(file)
        if fd is None:
            return False
        try:
            if (_address(buffer) - offset) % PAGE:
                _read_copied(fd, path, offset, buffer)
            else:
                _read_whole_pages(fd, path, offset, buffer)
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                raise
            self._may_be_direct = False
            self.mode, self.reason = "buffered", f"a direct read failed: {error.strerror}"
            return False
        self.mode, self.reason = "direct", "a direct read succeeded"
        return True

    def _direct_fd(self, file: _Open) -> int | None:
        with self._lock:
            if file.direct_fd is None:
                try:
                    # The very file that is open, even if its name leads to another one (proc(5)).
                    name = f"/proc/self/fd/{file.fd}"
                    file.direct_fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
                except OSError as error:
                    self._may_be_direct = False
                    self.reason = f"O_DIRECT was refused at opening: {error.strerror}"
            return file.direct_fd

    def _drop(self, file: _Open, n_bytes: int) -> None:
        with self._lock:
            file.undropped += n_bytes
            if file.undropped < _WINDOW:
                return
            file.undropped = 0
        with contextlib.suppress(OSError):
            os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)


def page_aligned(size: int, offset: int) -> NDArray[np.uint8]:
    """`size` bytes for a direct read from `offset`; not filled with anything."""
    memory = np.empty(size + PAGE, np.uint8)
    start = (offset - memory.ctypes.data) % PAGE
    return memory[start : start + size]


def _address(buffer: memoryview) -> int:
    return np.frombuffer(buffer, np.uint8).ctypes.data


def _read_cached(fd: int, path: Path, offset: int, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        n = os.preadv(fd, [buffer[done:]], offset + done)
        if n == 0:
            raise _short(path, offset, done, len(buffer))
        done += n


def _read_whole_pages(fd: int, path: Path, offset: int, buffer: memoryview) -> None:
    """Direct: pages in the middle into their place, those at the ends by way of others."""
    done = 0
    while done < len(buffer):
        skip = (offset + done) % PAGE
        rest = len(buffer) - done
        first = min((PAGE - skip) % PAGE, rest)
        middle = (rest - first) // PAGE * PAGE
        head = page_aligned(PAGE, 0) if first else None
        tail = page_aligned(PAGE, 0) if first + middle < rest else None
        views = [head.data] if head is not None else []
        if middle:
            views.append(buffer[done + first : done + first + middle])
        if tail is not None:
            views.append(tail.data)
        got = os.preadv(fd, views, offset + done - skip) - skip
        if got <= 0:
            raise _short(path, offset, done, len(buffer))
        if head is not None:
            buffer[done : done + first] = head.data[skip : skip + first]
        if tail is not None and got > first + middle:
            end = min(got, rest) - first - middle
            buffer[done + first + middle : done + first + middle + end] = tail.data[:end]
        done += min(got, rest)


def _read_copied(fd: int, path: Path, offset: int, buffer: memoryview) -> None:
    """Direct: a stretch at a time into pages of their own, and from there into `buffer`."""
    stretch = page_aligned(min(len(buffer) + 2 * PAGE, 2**20), 0)
    stretch = stretch[: len(stretch) // PAGE * PAGE]
    done = 0
    while done < len(buffer):
        skip = (offset + done) % PAGE
        wanted = min(len(stretch), -(-(skip + len(buffer) - done) // PAGE) * PAGE)
        got = os.preadv(fd, [stretch[:wanted].data], offset + done - skip) - skip
        if got <= 0:
            raise _short(path, offset, done, len(buffer))
        n = min(got, len(buffer) - done)
        buffer[done : done + n] = stretch[skip : skip + n].data
        done += n


def _short(path: Path, offset: int, done: int, wanted: int) -> StorageError:
    return StorageError(
        FormatCode.SHORT_READ,
        path,
        f"ends at byte {offset + done}",
        f"{wanted} bytes at offset {offset} are needed",
        "the file is cut short or changed: fetch it again",
    )


def _close(file: _Open) -> None:
    os.close(file.fd)
    if file.direct_fd is not None:
        os.close(file.direct_fd)


def _fingerprint(found: os.stat_result) -> Fingerprint:
    return Fingerprint(
        found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
    )
