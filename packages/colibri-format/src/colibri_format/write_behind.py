"""Writing one file from a thread of its own, in large requests and past the page cache."""

from __future__ import annotations

import errno
import mmap
import os
import queue
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .checksum import Buffer, view_bytes
from .errors import StorageError
from .layout import PAGE, round_up

BUFFER_BYTES: Final = 4 * 2**20
N_BUFFERS: Final = 3
# What a file system answers that has no direct I/O, or none for this request.
_NOT_DIRECT: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})
# Dirty pages of buffered writes are sent to the disk and dropped in stretches of this size.
_WINDOW: Final = 64 * 2**20


@dataclass(frozen=True, slots=True)
class _Filled:
    buffer: int
    start: int
    stop: int
    offset: int
    """Where byte `start` of the buffer stands in the file."""


class WriteBehind:
    """Takes bytes for places in a file; another thread writes them in the order of their coming.

    What follows on what came before is gathered in buffers of `buffer_bytes`, of which `N_BUFFERS`
    exist at most, the first time they are needed. Whole pages go to the disk directly, once a real
    write has shown that the file system does that; the rest, and everything elsewhere, through
    the page cache, which is emptied of it again. `mode` and `reason` say which. One thread may
    call; an error of the writing thread is raised by the next call, and by every one after it.
    """

    def __init__(self, fd: int, path: Path, *, buffer_bytes: int = BUFFER_BYTES) -> None:
        """`fd` is open for writing and stays the caller's; `path` names it in errors."""
        self._fd = fd
        self._path = path
        self._size = max(round_up(buffer_bytes, PAGE), PAGE)
        self._direct_fd: int | None = None
        self.mode = "buffered"
        self.reason = "nothing is written yet"
        self.accepted_bytes = 0
        self.written_bytes = 0
        self._buffers: list[NDArray[np.uint8]] = []
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._filled: queue.SimpleQueue[_Filled | threading.Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._undropped = 0
        self._current: int | None = None
        self._offset = self._start = self._stop = 0

    def put(self, offset: int, data: Buffer) -> None:
        """Takes all of `data` for the place `offset`; returns when it is copied.

        Raises:
            StorageError: an earlier write failed.
        """
        view = np.frombuffer(view_bytes(data), np.uint8)
        self._check()
        self.accepted_bytes += len(view)
        while len(view):
            if self._current is not None and offset != self._offset + self._stop - self._start:
                self._submit()
            if self._current is None:
                self._begin(offset)
            n = min(len(view), self._size - self._stop)
            assert self._current is not None
            self._buffers[self._current][self._stop : self._stop + n] = view[:n]
            self._stop += n
            offset += n
            view = view[n:]
            if self._stop == self._size:
                self._submit()

    def flush(self) -> None:
        """Returns when everything that was taken is written.

        Raises:
            StorageError: a write failed.
        """
        self._submit()
        if self._thread is not None:
            reached = threading.Event()
            self._filled.put(reached)
            reached.wait()
        self._check()

    def close(self) -> None:
        """Ends the thread; what is not flushed may be lost."""
        if self._thread is not None:
            self._filled.put(None)
            self._thread.join()
            self._thread = None
        if self._direct_fd is not None:
            os.close(self._direct_fd)
            self._direct_fd = None
        self._buffers.clear()

    def _check(self) -> None:
        if isinstance(self._error, OSError):
            raise StorageError.of(self._error, self._path, "writing")
        if self._error is not None:
            raise self._error

    def _begin(self, offset: int) -> None:
        if self._thread is None:
            self._open_direct()
            self._thread = threading.Thread(target=self._run, name="colibri-write", daemon=True)
            self._thread.start()
        if len(self._buffers) < N_BUFFERS:
            # Anonymous mappings start at a page, as direct I/O requires.
            memory = mmap.mmap(-1, self._size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._buffers.append(np.frombuffer(memory, np.uint8))
            self._current = len(self._buffers) - 1
        else:
            self._current = self._free.get()
        # A place and its byte of the buffer are equally far from the page before them.
        self._start = self._stop = offset % PAGE
        self._offset = offset

    def _submit(self) -> None:
        if self._current is not None:
            self._filled.put(_Filled(self._current, self._start, self._stop, self._offset))
            self._current = None

    def _open_direct(self) -> None:
        flag = getattr(os, "O_DIRECT", 0)
        if not flag:
            self.reason = "this system has no O_DIRECT"
            return
        try:
            # The very file that is open, even if its name leads to another one (proc(5)).
            self._direct_fd = os.open(
                f"/proc/self/fd/{self._fd}", os.O_WRONLY | os.O_CLOEXEC | flag
            )
        except OSError as error:
            self.reason = f"O_DIRECT was refused at opening: {error.strerror}"

    def _run(self) -> None:
        while (item := self._filled.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            if self._error is None:
                try:
                    self._write(item)
                    self.written_bytes += item.stop - item.start
                except BaseException as error:  # noqa: BLE001  # for the caller, who would wait for ever
                    self._error = error
            self._free.put(item.buffer)

    def _write(self, item: _Filled) -> None:
        data = self._buffers[item.buffer].data
        base = item.offset - item.start
        first = round_up(item.start, PAGE)
        last = item.stop // PAGE * PAGE
        if self._direct_fd is None or first >= last:
            self._write_cached(data[item.start : item.stop], item.offset)
            return
        self._write_cached(data[item.start : first], item.offset)
        self._write_direct(data[first:last], base + first)
        self._write_cached(data[last : item.stop], base + last)

    def _write_direct(self, view: memoryview, offset: int) -> None:
        while len(view):
            if self._direct_fd is None or len(view) % PAGE:
                self._write_cached(view, offset)
                return
            try:
                n = os.pwrite(self._direct_fd, view, offset)
            except OSError as error:
                if error.errno not in _NOT_DIRECT:
                    raise
                self.mode, self.reason = "buffered", f"a direct write failed: {error.strerror}"
                os.close(self._direct_fd)
                self._direct_fd = None
                continue
            self.mode, self.reason = "direct", "a direct write succeeded"
            view = view[n:]
            offset += n

    def _write_cached(self, view: memoryview, offset: int) -> None:
        while len(view):
            n = os.pwrite(self._fd, view, offset)
            view = view[n:]
            offset += n
            self._undropped += n
        if self._undropped >= _WINDOW:
            os.fdatasync(self._fd)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
            self._undropped = 0
