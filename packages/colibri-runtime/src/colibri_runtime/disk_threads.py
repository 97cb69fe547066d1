"""The disk engine `threads`: `preadv` in a few threads, on any POSIX system."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import ClassVar, Final

from .disk import BlockRead, EngineName, IoReport, Trial, check_submit
from .disk_files import OpenFile, ReadFunction, join_modes
from .disk_fill import read_block

DEFAULT_IO_THREADS: Final = 2


class ThreadsEngine:
    """Reads blocks with `n_threads` threads of its own, demands before prefetches.

    Owns `files` and closes them. Checks checksums in the same threads: XXH3 runs without the
    interpreter lock. A block whose checksum fails is read once more, then given back with the
    error; so is every other failure: `read.error` says what, nothing is raised in the background.

    `read` and `sleep` stand in for `os.preadv` and `time.sleep` in tests.
    """

    name: ClassVar[str] = EngineName.THREADS

    def __init__(
        self,
        files: Sequence[OpenFile],
        *,
        n_threads: int = DEFAULT_IO_THREADS,
        read: ReadFunction = os.preadv,
        sleep: Callable[[float], None] = time.sleep,
        is_verified: bool = True,
        tried: Sequence[Trial] = (),
    ) -> None:
        self._files = list(files)
        self._read = read
        self._sleep = sleep
        self._is_verified = is_verified
        self._tried = tuple(tried)
        self._demands: OrderedDict[int, BlockRead] = OrderedDict()
        self._prefetches: OrderedDict[int, BlockRead] = OrderedDict()
        self._queued = threading.Condition()
        self._done: SimpleQueue[BlockRead] = SimpleQueue()
        self._n_buffered = 0
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"colibri-io-{i}", daemon=True)
            for i in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, read: BlockRead) -> None:
        check_submit(read, len(self._files), is_closed=self._is_closed)
        with self._queued:
            (self._prefetches if read.is_prefetch else self._demands)[id(read)] = read
            self._queued.notify()

    def flush(self) -> None:
        pass

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

    def add_file(self, file: OpenFile) -> int:
        self._files.append(file)
        return len(self._files) - 1

    def report(self) -> IoReport:
        mode, reason = join_modes(self._files)
        n_threads = len(self._threads)
        return IoReport(
            engine=self.name,
            mode=mode,
            reason=reason,
            n_threads=n_threads,
            is_verified=self._is_verified,
            depth=n_threads,
            tried=self._tried,
            n_buffered_reads=self._n_buffered,
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
        for file in self._files:
            file.close()

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
        read_block(
            self._files[read.file],
            read,
            is_verified=self._is_verified,
            preadv=self._read,
            sleep=self._sleep,
            on_buffered=self._count_buffered,
        )

    def _count_buffered(self) -> None:
        with self._queued:
            self._n_buffered += 1
