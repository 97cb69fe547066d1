"""Reads of blocks into slots: what a read is, and the protocol of the engines that make them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from colibri_format import UsageError

from .disk_files import IoMode, OpenFile


class EngineName(StrEnum):
    """Disk engines by name; `auto` is the first that reads a block directly, or `threads`."""

    AUTO = "auto"
    URING = "uring"
    AIO = "aio"
    THREADS = "threads"
    MMAP = "mmap"


ENGINE_NAMES: Final = tuple(str(name) for name in EngineName)


@dataclass(slots=True, eq=False)
class BlockRead:
    """One block to be read, and, once it comes back from `wait` or `poll`, how that went.

    `length` bytes at `offset` of file number `file` go to the start of `buffer`, a slot; `size` of
    them are payload, the rest padding, zeroed where the file ends inside it. With a `checksum`
    (XXH3-64 of the payload, seeded with the block's place) the payload is checked before it comes
    back. The engine owns read and buffer from `submit` until it gives the read back or `cancel`
    says True. `address` is that of the buffer's first byte, 0 where the engine is to find it out;
    `tag` is the submitter's own, `ticket` the engine's. `read_ns` runs from the first request to
    the kernel to the end of the last, so reads in flight together each count all of it; that end
    was noticed at `ended_ns`. One that was cancelled too late may come back with `is_cut`: it was
    given up on the way, and its slot holds nothing.
    """

    layer: int
    expert: int
    offset: int
    length: int
    size: int
    checksum: int | None
    slot: int
    buffer: NDArray[np.uint8]
    is_prefetch: bool = False
    error: Exception | None = None
    n_bytes: int = 0
    read_ns: int = 0
    checksum_ns: int = 0
    n_rereads: int = 0
    file: int = 0
    tag: int = 0
    ended_ns: int = 0
    address: int = 0
    ticket: int = 0
    is_cancelled: bool = False
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class Trial:
    """An engine that `auto` tried, and why it was not taken."""

    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class IoReport:
    """How blocks are read; `reason` says why not directly, empty where they are.

    `mode` is direct only if a block of every file was read so through this very engine.
    `n_threads` is 0 for engines without threads of their own; `depth` is how many requests may be
    in flight, `split_bytes` how long each at most (0: whole blocks). `tried` is what `auto`
    refused, `notes` what the engine does without. `n_buffered_reads` counts requests to files open
    for direct reads that went through the page cache because they do not suit the disk.
    """

    engine: str
    mode: IoMode
    reason: str
    n_threads: int
    is_verified: bool
    depth: int = 0
    split_bytes: int = 0
    tried: tuple[Trial, ...] = ()
    notes: tuple[str, ...] = ()
    n_buffered_reads: int = 0


class DiskEngine(Protocol):
    """Reads blocks of several files in the background.

    One thread calls; none of the calls but `wait` and `close` blocks. Engines without threads read
    and check checksums only within these calls: `poll` now and then while reads are outstanding.
    """

    def submit(self, read: BlockRead) -> None:
        """Queues a read: behind earlier ones of its kind, prefetches behind all demands.

        Raises:
            UsageError: `engine-closed`, or `no-such-file` if `read.file` is none of the files.
        """

    def flush(self) -> None:
        """Begins what is queued and may begin; `poll` and `wait` do so too."""

    def promote(self, read: BlockRead) -> None:
        """Makes a queued prefetch a demand read; one that has begun simply goes on."""

    def cancel(self, read: BlockRead) -> bool:
        """Whether `read` was still queued and now will never be given back. One that has begun is
        given back, whole or `is_cut`."""

    def poll(self) -> list[BlockRead]:
        """The reads that are done, well or badly, and were not given back before."""

    def wait(self) -> list[BlockRead]:
        """The same, at least one; blocks until there is. A read must be outstanding."""

    def add_file(self, file: OpenFile) -> int:
        """The number under which blocks of `file`, now the engine's to close, are read."""

    def report(self) -> IoReport:
        """How blocks are read."""

    def close(self) -> None:
        """Drops what is queued and returns when no read touches a buffer any more."""


def check_submit(read: BlockRead, n_files: int, *, is_closed: bool) -> None:
    """Refuses what an engine cannot read.

    Raises:
        UsageError: `engine-closed` or `no-such-file`.
    """
    if is_closed:
        raise UsageError("engine-closed", "disk engine", "is closed", "an open engine")
    if not 0 <= read.file < n_files:
        raise UsageError(
            "no-such-file",
            f"block L{read.layer}/E{read.expert}",
            f"is of file {read.file}",
            f"one of the engine's {n_files} files",
        )
