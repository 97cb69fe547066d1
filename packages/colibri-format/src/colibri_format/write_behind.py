"""Writing one file from a thread of its own, in large requests and past the page cache."""

from __future__ import annotations

import errno
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
from .page_memory import page_memory
from .threads import start_thread

BUFFER_BYTES: Final = 4 * 2**20
N_BUFFERS: Final = 6
# One request under way leaves a disk idle between two; measured: four are as fast as eight.
N_THREADS: Final = 4
# What a file system answers that has no direct I/O, or none for this request.
_NOT_DIRECT: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})
# Dirty pages of buffered writes are sent to the disk and dropped in stretches of this size.
_WINDOW: Final = 64 * 2**20


@dataclass(frozen=True, slots=True)
class _Filled:
    number: int
    buffer: int
    start: int
    stop: int
    offset: int
    """Where byte `start` of the buffer stands in the file."""


class WriteBehind:
    """Takes bytes for places in a file; threads write them, several requests at a time.

    What follows on what came before is gathered in buffers of `buffer_bytes`, of which `N_BUFFERS`
    exist at most, the first time they are needed. Whole pages go to the disk directly, once a real
    write has shown that the file system does that; the rest, and everything elsewhere, through
    the page cache, which is emptied of it again. `mode` and `reason` say which. One thread may
    call; an error of a writing thread is raised by the next call, and by every one after it.
    """

    def __init__(self, fd: int, path: Path, *, buffer_bytes: int = BUFFER_BYTES) -> None:
        """`fd` is open for writing and stays the caller's; `path` names it in errors."""
        self._fd = fd
        self._path = path
        self._size = max(round_up(buffer_bytes, PAGE), PAGE)
        self._direct_fd: int | None = None
        self._is_direct = False
        self.mode = "buffered"
        self.reason = "nothing is written yet"
        self.accepted_bytes = 0
        self.written_bytes = 0
        self._buffers: list[NDArray[np.uint8]] = []
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._filled: queue.SimpleQueue[_Filled | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._n_submitted = self._n_written = 0
        self._ahead: dict[int, int] = {}
        """Sizes by number of what is written before something that came earlier."""
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
        with self._changed:
            self._changed.wait_for(
                lambda: self._n_written == self._n_submitted or self._error is not None
            )
        self._check()

    def close(self) -> None:
        """Ends the threads; what is not flushed may be lost."""
        for _ in self._threads:
            self._filled.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
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
        if not self._threads:
            self._open_direct()
            for _ in range(N_THREADS):
                self._threads.append(start_thread(self._run, "colibri-write"))
        if len(self._buffers) < N_BUFFERS:
            self._buffers.append(page_memory(self._size))
            self._current = len(self._buffers) - 1
        else:
            self._current = self._free.get()
        # A place and its byte of the buffer are equally far from the page before them.
        self._start = self._stop = offset % PAGE
        self._offset = offset

    def _submit(self) -> None:
        if self._current is not None:
            number, self._n_submitted = self._n_submitted, self._n_submitted + 1
            self._filled.put(_Filled(number, self._current, self._start, self._stop, self._offset))
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
            self._is_direct = True
        except OSError as error:
            self.reason = f"O_DIRECT was refused at opening: {error.strerror}"

    def _run(self) -> None:
        while (item := self._filled.get()) is not None:
            error = self._error
            if error is None:
                try:
                    self._write(item)
                except BaseException as found:  # noqa: BLE001  # the caller would wait for ever
                    error = found
            with self._changed:
                self._error = self._error or error
                if error is None:
                    self._count(item)
                self._changed.notify_all()
            self._free.put(item.buffer)

    def _count(self, item: _Filled) -> None:
        """`written_bytes` tells only of what has nothing unwritten before it."""
        self._ahead[item.number] = item.stop - item.start
        while (size := self._ahead.pop(self._n_written, None)) is not None:
            self._n_written += 1
            self.written_bytes += size

    def _write(self, item: _Filled) -> None:
        data = self._buffers[item.buffer].data
        base = item.offset - item.start
        first = round_up(item.start, PAGE)
        last = item.stop // PAGE * PAGE
        if not self._is_direct or first >= last:
            self._write_cached(data[item.start : item.stop], item.offset)
            return
        self._write_cached(data[item.start : first], item.offset)
        self._write_direct(data[first:last], base + first)
        self._write_cached(data[last : item.stop], base + last)

    def _write_direct(self, view: memoryview, offset: int) -> None:
        while len(view):
            if self._direct_fd is None or not self._is_direct or len(view) % PAGE:
                self._write_cached(view, offset)
                return
            try:
                n = os.pwrite(self._direct_fd, view, offset)
            except OSError as error:
                if error.errno not in _NOT_DIRECT:
                    raise
                self.mode, self.reason = "buffered", f"a direct write failed: {error.strerror}"
                self._is_direct = False
                continue
            self.mode, self.reason = "direct", "a direct write succeeded"
            view = view[n:]
            offset += n

    def _write_cached(self, view: memoryview, offset: int) -> None:
        while len(view):
            n = os.pwrite(self._fd, view, offset)
            view = view[n:]
            offset += n
            with self._changed:
                self._undropped += n
                is_due = self._undropped >= _WINDOW
                self._undropped = 0 if is_due else self._undropped
            if is_due:
                os.fdatasync(self._fd)
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
