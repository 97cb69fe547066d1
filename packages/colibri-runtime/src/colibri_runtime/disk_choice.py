"""Which disk engine reads: the one asked for, or the first that is shown to read directly."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from colibri_format import StorageError, UsageError
from colibri_format.layout import round_up

from .disk import DiskEngine, EngineName, Trial
from .disk_files import BlockFile, IoMode, OpenFile, join_modes, open_blocks, prove, words
from .disk_mmap import DEFAULT_MMAP_THREADS, MmapEngine
from .disk_queue import (
    DEFAULT_PREFETCH_DEPTH,
    DEFAULT_SPLIT_BYTES,
    QueueEngine,
    default_depth,
)
from .disk_ring import MAX_DEPTH, AioRing, NativeRing, Ring, UringRing, read_once
from .disk_threads import DEFAULT_IO_THREADS, ThreadsEngine
from .disk_worker import WorkerRing

MAX_IO_THREADS: Final = 64
RING_ENTRIES: Final = 64
"""Requests that a queue has room for at least: a block in flight is several."""
DEFAULT_PIECE_BYTES: Final = 2**20
"""Longest request where a thread makes them; docs/io.md."""
PIECES_AHEAD: Final = 2
"""Requests in flight below which a piece of a prefetch begins; docs/io.md."""
_RINGS: Final[dict[EngineName, type[NativeRing]]] = {
    EngineName.URING: UringRing,
    EngineName.AIO: AioRing,
}


def open_engine(
    name: str,
    files: Sequence[BlockFile],
    *,
    arena: NDArray[np.uint8] | None = None,
    depth: int | None = None,
    n_threads: int | None = None,
    split_bytes: int | None = None,
    direct: bool = True,
    is_verified: bool = True,
) -> DiskEngine:
    """The engine `name`, reading `files` by their order; each is opened, and proven, by it.

    `auto` takes the first of `uring`, `aio` and `threads` that reads the probe of at least one
    file directly, or else `threads` through the page cache; its report says what was refused and
    why. An engine asked for by name reads buffered what it cannot read directly.

    Args:
        arena: the memory that holds all slots, which `uring` registers if the kernel lets it.
        depth: requests in flight, of `uring` and `aio`; None takes the measured default.
        n_threads: threads of `threads` and `mmap`; None takes the measured default.
        split_bytes: longest request of `uring` and `aio`, 0 for whole blocks; None takes the
            measured default.
        direct: whether direct reads are tried.

    Raises:
        UsageError: `bad-option` naming the knob.
        StorageError: `io-unavailable` where the system refuses the engine asked for by name; what
            `open_blocks` raises for a file.
    """
    if name not in list(EngineName):
        raise UsageError("bad-option", "--io (io)", f"is {name}", " or ".join(EngineName))
    for option, value, most in (
        ("--io-depth (io_depth)", depth, MAX_DEPTH),
        ("--io-threads (io_threads)", n_threads, MAX_IO_THREADS),
    ):
        if value is not None and not 1 <= value <= most:
            raise UsageError("bad-option", option, f"is {value}", f"1 to {most}")
    if split_bytes is not None and split_bytes < 0:
        raise UsageError("bad-option", "split_bytes", f"is {split_bytes}", "at least 0")

    def ring_engine(kind: EngineName, tried: Sequence[Trial]) -> QueueEngine:
        return _ring_engine(
            _RINGS[kind],
            files,
            arena,
            depth=depth or default_depth(_largest(files)),
            split_bytes=split_bytes,
            direct=direct,
            is_verified=is_verified,
            tried=tried,
        )

    match kind := EngineName(name):
        case EngineName.URING | EngineName.AIO:
            try:
                return ring_engine(kind, ())
            except _UnavailableError as error:
                raise StorageError(
                    "io-unavailable",
                    f"disk engine {kind}",
                    error.strerror or "",
                    "a system that allows it",
                    "take --io auto, or --io threads",
                    errno=error.errno,
                ) from error
        case EngineName.MMAP:
            return MmapEngine(
                _open_all(files, direct=False),
                n_threads=n_threads or DEFAULT_MMAP_THREADS,
                is_verified=is_verified,
            )
        case _:
            pass
    tried: list[Trial] = []
    if kind is EngineName.AUTO and direct and any(file.probe is not None for file in files):
        for other in _RINGS:
            try:
                engine = ring_engine(other, tried)
            except _UnavailableError as error:
                tried.append(Trial(other, error.strerror or ""))
                continue
            if engine.reads_directly:
                return engine
            tried.append(Trial(other, engine.report().reason))
            engine.close()
    return ThreadsEngine(
        _open_all(files, direct=direct),
        n_threads=n_threads or DEFAULT_IO_THREADS,
        is_verified=is_verified,
        tried=tried,
    )


def _largest(files: Sequence[BlockFile]) -> int:
    """Bytes of the largest block among those that prove the files."""
    return max((file.probe.length for file in files if file.probe is not None), default=0)


class _UnavailableError(OSError):
    """The system has no such queue for us."""


def _ring_engine(
    kind: type[NativeRing],
    files: Sequence[BlockFile],
    arena: NDArray[np.uint8] | None,
    *,
    depth: int,
    split_bytes: int | None,
    direct: bool,
    is_verified: bool,
    tried: Sequence[Trial],
) -> QueueEngine:
    try:
        # Room for all pieces: a ring counts requests.
        ring = kind(max(depth, RING_ENTRIES))
    except OSError as error:
        raise _UnavailableError(error.errno, words(error)) from error
    opened: list[OpenFile] = []
    try:
        opened = _open_all(files, direct=direct, ring=ring)
        notes = _register(ring, files, opened, arena) if isinstance(ring, UringRing) else []
        if isinstance(ring, AioRing) and join_modes(opened)[0] is IoMode.BUFFERED:
            notes.append("buffered reads of aio are made one after another while they are begun")
        driven: Ring = ring
        try:
            pieces = DEFAULT_PIECE_BYTES if split_bytes is None else split_bytes
            ahead = PIECES_AHEAD if pieces else min(DEFAULT_PREFETCH_DEPTH, depth)
            driven = WorkerRing(ring, depth, ahead, _aligned(pieces, opened))
        except OSError as error:
            notes.append(f"no thread that reads on and checks: {words(error)}")
        return QueueEngine(
            driven,
            opened,
            depth=depth,
            split_bytes=_split(split_bytes, driven),
            is_verified=is_verified,
            tried=tried,
            notes=notes,
        )
    except BaseException:
        ring.close()
        for file in opened:
            file.close()
        raise


def _split(asked: int | None, ring: Ring) -> int:
    """The longest request: what was asked for, or the default for such a ring."""
    if asked is not None:
        return asked
    return DEFAULT_PIECE_BYTES if ring.backlog else DEFAULT_SPLIT_BYTES


def _aligned(piece_bytes: int, files: Sequence[OpenFile]) -> int:
    """`piece_bytes`, or a little more, so that all files can be read directly in such pieces."""
    return round_up(piece_bytes, max([1, *(file.alignment.offset for file in files)]))


def _open_all(
    files: Sequence[BlockFile], *, direct: bool, ring: NativeRing | None = None
) -> list[OpenFile]:
    opened: list[OpenFile] = []
    try:
        for file in files:
            options = {} if ring is None else {"read": partial(read_once, ring)}
            opened.append(
                open_blocks(
                    file.path,
                    probe=file.probe,
                    direct=direct,
                    file_size=file.file_size,
                    **options,
                )
            )
    except BaseException:
        for done in opened:
            done.close()
        raise
    return opened


def _register(
    ring: UringRing,
    files: Sequence[BlockFile],
    opened: Sequence[OpenFile],
    arena: NDArray[np.uint8] | None,
) -> list[str]:
    """Registers memory and files, each if the kernel lets us and reads still work; or why not."""
    notes: list[str] = []
    probes = [
        (i, file, block.probe)
        for i, (block, file) in enumerate(zip(files, opened, strict=True))
        if block.probe is not None
    ]

    def failure(*, is_file: bool) -> str:
        for i, file, probe in probes:
            read = partial(read_once, ring, file=i if is_file else -1)
            if reason := prove(file.fd, probe, read):
                return reason
        return ""

    if arena is not None and arena.nbytes:
        try:
            ring.register_buffers(arena)
            if reason := failure(is_file=False):
                ring.register_buffers(None)
                notes.append(f"registered buffers: {reason}")
        except OSError as error:
            notes.append(f"registered buffers: {words(error)}")
    try:
        ring.register_files([file.fd for file in opened])
        if reason := failure(is_file=True):
            ring.register_files([])
            notes.append(f"registered files: {reason}")
    except OSError as error:
        notes.append(f"registered files: {words(error)}")
    return notes
