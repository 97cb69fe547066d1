"""The disk engine `threads`: `preadv` in a few threads, on any POSIX system."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final

from colibri_format import FormatCode, FormatError, StorageError
from colibri_format.checksum import checksum
from colibri_format.layout import block_seed

from .disk import BlockRead, IoMode, IoReport, OpenFile, ReadFunction, describe_block, short_read

DEFAULT_IO_THREADS: Final = 2
MAX_AGAIN: Final = 8
"""Times that EAGAIN is answered by another try, 1, 2, 4, ... milliseconds later."""
DIRECT_STEP: Final = 4096
"""A direct read goes on at a multiple of this: O_DIRECT wants aligned offsets (open(2))."""


class ThreadsEngine:
    """Reads blocks with `n_threads` threads of its own, demands before prefetches.

    Owns `file.fd` and closes it. Checks checksums in the same threads: XXH3 runs without the
    interpreter lock. A block whose checksum fails is read once more, then given back with the
    error; so is every other failure: `read.error` says what, nothing is raised in the background.

    `read` and `sleep` stand in for `os.preadv` and `time.sleep` in tests.
    """

    name: Final = "threads"

    def __init__(
        self,
        file: OpenFile,
        *,
        n_threads: int = DEFAULT_IO_THREADS,
        read: ReadFunction = os.preadv,
        sleep: Callable[[float], None] = time.sleep,
        is_verified: bool = True,
    ) -> None:
        self._file = file
        self._read = read
        self._sleep = sleep
        self._is_verified = is_verified
        self._demands: OrderedDict[int, BlockRead] = OrderedDict()
        self._prefetches: OrderedDict[int, BlockRead] = OrderedDict()
        self._queued = threading.Condition()
        self._done: SimpleQueue[BlockRead] = SimpleQueue()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"colibri-io-{i}", daemon=True)
            for i in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, read: BlockRead) -> None:
        with self._queued:
            (self._prefetches if read.is_prefetch else self._demands)[id(read)] = read
            self._queued.notify()

    def promote(self, read: BlockRead) -> None:
        with self._queued:
            read.is_prefetch = False
            if self._prefetches.pop(id(read), None) is not None:
                self._demands[id(read)] = read

    def cancel(self, read: BlockRead) -> bool:
        with self._queued:
            return (
                self._prefetches.pop(id(read), None) is not None
                or self._demands.pop(id(read), None) is not None
            )

    def poll(self) -> list[BlockRead]:
        done = []
        while True:
            try:
                done.append(self._done.get_nowait())
            except Empty:
                return done

    def wait(self) -> list[BlockRead]:
        return [self._done.get(), *self.poll()]

    def report(self) -> IoReport:
        return IoReport(
            self.name, self._file.mode, self._file.reason, len(self._threads), self._is_verified
        )

    def close(self) -> None:
        if self._is_closed:
            return
        with self._queued:
            self._is_closed = True
            self._demands.clear()
            self._prefetches.clear()
            self._queued.notify_all()
        for thread in self._threads:
            thread.join()
        os.close(self._file.fd)

    def _run(self) -> None:
        while (read := self._next()) is not None:
            try:
                self._fetch(read)
            except Exception as error:  # noqa: BLE001 - a read that never came back would hang
                read.error = error
            self._done.put(read)

    def _next(self) -> BlockRead | None:
        with self._queued:
            while not self._is_closed:
                if self._demands:
                    return self._demands.popitem(last=False)[1]
                if self._prefetches:
                    return self._prefetches.popitem(last=False)[1]
                self._queued.wait()
        return None

    def _fetch(self, read: BlockRead) -> None:
        self._fill(read)
        if read.checksum is None or not self._is_verified:
            return
        if self._matches(read):
            return
        # Once more: a bit that flipped on its way, unlike one on the disk, is not there again.
        read.n_rereads += 1
        self._fill(read)
        if not self._matches(read):
            raise FormatError(
                FormatCode.BLOCK_CHECKSUM,
                describe_block(self._file.path, read),
                f"its {read.size} bytes do not have the checksum {read.checksum:016x} of the index",
                "the bytes that were written; two reads agreed that they are not there",
                "the file is damaged: restore it or repack; `colibri verify` lists all such blocks",
            )

    def _matches(self, read: BlockRead) -> bool:
        started = time.perf_counter_ns()
        found = checksum(read.buffer[: read.size], block_seed(read.layer, read.expert))
        read.checksum_ns += time.perf_counter_ns() - started
        return found == read.checksum

    def _fill(self, read: BlockRead) -> None:
        """Reads until the whole block is there; the kernel may give less than it was asked for."""
        started = time.perf_counter_ns()
        buffer = memoryview(read.buffer)[: read.length]  # type: ignore[arg-type]
        step = DIRECT_STEP if self._file.mode is IoMode.DIRECT else 1
        done = 0
        n_again = 0
        while done < read.length:
            try:
                n = self._read(self._file.fd, [buffer[done:]], read.offset + done)
            except OSError as error:
                if error.errno == errno.EINTR:
                    continue
                if error.errno == errno.EAGAIN and n_again < MAX_AGAIN:
                    self._sleep(0.001 * 2**n_again)
                    n_again += 1
                    continue
                failure = StorageError.of(
                    error, describe_block(self._file.path, read), f"reading {read.length} bytes"
                )
                failure.filename = str(self._file.path)
                raise failure from error
            read.n_bytes += n
            if done + n >= read.length:
                break
            # A direct read that stops off a boundary stopped at the end of the file.
            if n // step == 0:
                raise short_read(self._file.path, read, done + n)
            done += n // step * step
        read.read_ns += time.perf_counter_ns() - started
