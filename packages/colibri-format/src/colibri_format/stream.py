"""Reading long stretches of a file in order, at the disk's speed and past the page cache."""

from __future__ import annotations

import mmap
import os
import queue
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .errors import FormatCode, StorageError
from .layout import PAGE, round_up
from .threads import start_thread

CHUNK: Final = 8 * 2**20
_DEPTH: Final = 2


@dataclass(frozen=True, slots=True)
class _Chunk:
    offset: int
    data: memoryview
    buffer: int


def stream_extent(fd: int, path: Path, offset: int, size: int) -> Iterator[tuple[int, memoryview]]:
    """`(offset, bytes)` of consecutive pieces that make up `size` bytes from `offset` of `fd`.

    One thread reads ahead with direct I/O, buffered where the file system refuses that, while the
    caller uses a piece; a piece is valid until the next one is asked for. `path` names the file in
    errors; `fd` stays the caller's and must stay open. Two reads of 8 MiB under
    way are enough: verifying from disk ran at the speed of `dd iflag=direct bs=8M`, and directly
    read pages push nothing out of the page cache.

    Raises:
        StorageError: `short-read` if the file ends before, or the kernel's error.
    """
    if not size:
        return
    reader = _Ahead(fd, path, offset, size)
    try:
        yield from reader.pieces()
    finally:
        reader.close()


class _Ahead:
    def __init__(self, fd: int, path: Path, offset: int, size: int) -> None:
        self.path = path
        self.start = offset // PAGE * PAGE
        self.first, self.end = offset, offset + size
        self.fd = fd
        self.direct_fd = self._open_direct()
        # Anonymous mappings start at a page, as direct I/O requires.
        self.buffers = [mmap.mmap(-1, CHUNK) for _ in range(_DEPTH + 1)]
        self.free: queue.Queue[int | None] = queue.Queue()
        self.done: queue.Queue[_Chunk | BaseException] = queue.Queue()
        for n in range(len(self.buffers)):
            self.free.put(n)
        self.thread = start_thread(self._run, "colibri-stream")

    def _open_direct(self) -> int | None:
        flag = getattr(os, "O_DIRECT", 0)
        if not flag:
            return None
        try:
            # The very file that is open, even if its name now leads to another one (proc(5)).
            return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC | flag)
        except OSError:
            return None

    def pieces(self) -> Iterator[tuple[int, memoryview]]:
        position = self.first
        while position < self.end:
            item = self.done.get()
            if isinstance(item, BaseException):
                raise item
            skipped = position - item.offset
            stop = min(self.end - item.offset, len(item.data))
            yield position, item.data[skipped:stop]
            position = item.offset + stop
            self.free.put(item.buffer)

    def _run(self) -> None:
        try:
            for offset in range(self.start, self.end, CHUNK):
                number = self.free.get()
                if number is None:
                    return
                wanted = min(round_up(self.end, PAGE) - offset, CHUNK)
                view = memoryview(self.buffers[number])[:wanted]
                got = self._fill(offset, view)
                if offset + got < min(self.end, offset + wanted):
                    raise StorageError(
                        FormatCode.SHORT_READ,
                        self.path,
                        f"ended at {offset + got:#x}",
                        f"bytes up to {self.end:#x}",
                        "the file was cut short while in use",
                    )
                self.done.put(_Chunk(offset, view[:got], number))
        except OSError as error:
            known = isinstance(error, StorageError)
            self.done.put(error if known else StorageError.of(error, self.path, "reading"))

    def _fill(self, offset: int, view: memoryview) -> int:
        """Bytes read at `offset` into `view`: all of it, or fewer at the end of the file."""
        done = 0
        while done < len(view):
            n = self._read(offset + done, view[done:])
            if n == 0:
                break
            done += n
        return done

    def _read(self, offset: int, view: memoryview) -> int:
        is_aligned = offset % PAGE == 0 and len(view) % PAGE == 0
        if self.direct_fd is not None and is_aligned:
            try:
                return os.preadv(self.direct_fd, [view], offset)
            except OSError:
                # Refused by the file system, or a real fault that a buffered read meets again.
                os.close(self.direct_fd)
                self.direct_fd = None
        return os.preadv(self.fd, [view], offset)

    def close(self) -> None:
        """Ends the thread and gives the files back."""
        self.free.put(None)
        self.thread.join()
        if self.direct_fd is not None:
            os.close(self.direct_fd)
