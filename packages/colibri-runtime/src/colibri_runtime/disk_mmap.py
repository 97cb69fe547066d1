"""The disk engine `mmap`: copies blocks out of a mapping; a baseline to measure others against."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from .disk import EngineName
from .disk_files import OpenFile
from .disk_threads import ThreadsEngine

DEFAULT_MMAP_THREADS: Final = 1


class MmapEngine(ThreadsEngine):
    """Page faults instead of reads, in `n_threads` threads; buffered by nature.

    A file that was cut short is met as a short read when the copy begins. One that is cut, or
    whose disk fails, during the copy ends the process with SIGBUS, as it does every program that
    uses a mapping: this engine is for measuring.
    """

    name: ClassVar[str] = EngineName.MMAP

    def __init__(
        self,
        files: Sequence[OpenFile],
        *,
        n_threads: int = DEFAULT_MMAP_THREADS,
        is_verified: bool = True,
    ) -> None:
        self._maps = {file.buffered_fd: _map(file.buffered_fd) for file in files}
        super().__init__(files, n_threads=n_threads, read=self._copy, is_verified=is_verified)

    def add_file(self, file: OpenFile) -> int:
        self._maps[file.buffered_fd] = _map(file.buffered_fd)
        return super().add_file(file)

    def close(self) -> None:
        super().close()
        self._maps.clear()

    def _copy(self, fd: int, buffers: list[Any], offset: int) -> int:
        buffer = np.frombuffer(buffers[0], np.uint8)
        source = self._maps[fd]
        # Past the file's end a mapping gives no short read but a signal.
        end = min(len(source), os.fstat(fd).st_size)
        n = max(0, min(buffer.nbytes, end - offset))
        buffer[:n] = source[offset : offset + n]
        return n


def _map(fd: int) -> NDArray[np.uint8]:
    if not os.fstat(fd).st_size:
        return np.empty(0, np.uint8)
    return np.frombuffer(mmap.mmap(fd, 0, prot=mmap.PROT_READ), np.uint8)
