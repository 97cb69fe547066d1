"""Reads blocks in one way and takes time: engines of the runtime, and mappings to compare with."""

from __future__ import annotations

import mmap
import os
import resource
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from colibri_format import StorageError
from colibri_runtime.disk import BlockRead, DiskEngine
from colibri_runtime.disk_choice import open_engine
from colibri_runtime.disk_files import BlockFile

from .io_plan import Extent, Way
from .io_slots import SlotRotation
from .work import count_work

_MAPPED: Final = ("mmap", "mmap willneed", "mmap random")
_AHEAD: Final = 4
_PROBE_BYTES: Final = 64 * 2**10
MAX_DEPTH: Final = 64


@dataclass(frozen=True, slots=True)
class Timed:
    """What one way took for its blocks."""

    seconds: float
    n_bytes: int
    latencies_s: list[float]
    cpu_s: float
    n_major_faults: int
    disk_bytes: int
    mode: str
    reason: str


def read_extents(
    way: Way,
    paths: Sequence[Path],
    extents: Sequence[Extent],
    slots: SlotRotation,
    most_s: float = float("inf"),
) -> Timed:
    """Reads every extent once into `slots`, at least one large enough for each that is in flight;
    `way.depth` are. `paths[n]` is the file of volume n. After `most_s` seconds no other is begun:
    slow ways read less rather than longer.

    Mappings have no slots. Their bytes are read once where the page cache holds them, as if
    computed with, into a buffer of one block.

    Raises:
        StorageError: `io-unavailable` where the system refuses the engine; what reading raises.
    """
    if way.engine in _MAPPED:
        return _read_mapped(way.engine, paths, extents, most_s)
    with ExitStack() as stack:
        files = [
            BlockFile(path, _probe(extents, number, slots)) for number, path in enumerate(paths)
        ]
        is_plain = way.engine in ("buffered", "tmpfs")
        engine = open_engine(
            "threads" if is_plain else way.engine,
            files,
            arena=slots.pool.arena,
            depth=None if is_plain or way.engine == "threads" else way.depth,
            n_threads=1 if is_plain else way.depth if way.engine == "threads" else None,
            direct=not is_plain,
            is_verified=False,
        )
        stack.callback(engine.close)
        before, cpu, started = count_work(), _cpu_s(), time.perf_counter()
        latencies = _drive(engine, slots, extents, way.depth or 1, started + most_s)
        seconds = time.perf_counter() - started
        after = count_work()
        report = engine.report()
        mode, reason = str(report.mode.value), report.reason
        if report.n_buffered_reads and not is_plain:
            mode, reason = "partly direct", f"{report.n_buffered_reads} reads were not direct"
        return Timed(
            seconds, sum(e.size for e in extents[: len(latencies)]), latencies, _cpu_s() - cpu,
            after.n_major - before.n_major, after.read_bytes - before.read_bytes, mode, reason,
        )  # fmt: skip


def _drive(
    engine: DiskEngine, slots: SlotRotation, extents: Sequence[Extent], depth: int, deadline: float
) -> list[float]:
    """Keeps `depth` reads in flight until all are done, or those that had begun by `deadline`;
    how long each took."""
    begun: dict[int, float] = {}
    latencies: list[float] = []
    waiting = iter(extents)
    try:
        while True:
            while len(begun) < depth and (not latencies or time.perf_counter() < deadline):
                extent = next(waiting, None)
                if extent is None:
                    break
                slot = slots.take()
                begun[slot] = time.perf_counter()
                engine.submit(_read(extent, slot, slots))
            if not begun:
                return latencies
            engine.flush()
            for read in engine.wait():
                if read.error is not None:
                    raise read.error
                latencies.append(time.perf_counter() - begun.pop(read.slot))
                slots.give(read.slot)
    finally:
        # After a failure; the engine is closed before anyone takes them.
        for slot in begun:
            slots.give(slot)


def _read(extent: Extent, slot: int, slots: SlotRotation) -> BlockRead:
    return BlockRead(
        layer=0, expert=0, offset=extent.offset, length=extent.size, size=extent.size,
        checksum=None, slot=slot, buffer=slots.pool.slot(slot), file=extent.volume,
    )  # fmt: skip


def _probe(extents: Sequence[Extent], volume: int, slots: SlotRotation) -> BlockRead | None:
    """The beginning of a block: all of it would no longer be read for the first time."""
    first = next((extent for extent in extents if extent.volume == volume), None)
    if first is None:
        return None
    return _read(Extent(first.offset, min(first.size, _PROBE_BYTES), volume), 0, slots)


def _read_mapped(
    engine: str, paths: Sequence[Path], extents: Sequence[Extent], most_s: float
) -> Timed:
    """Copies each extent out of a mapping, as page faults bring it."""
    target = np.empty(max(extent.size for extent in extents), np.uint8)
    target[:: mmap.PAGESIZE] = 0
    with ExitStack() as stack:
        maps = [_map(path, stack) for path in paths]
        views: list[NDArray[np.uint8]] = [np.frombuffer(m, np.uint8) for m in maps]
        if engine == "mmap random":
            for mapping in maps:
                mapping.madvise(mmap.MADV_RANDOM)
        before, cpu, started = count_work(), _cpu_s(), time.perf_counter()
        latencies = []
        for number, extent in enumerate(extents):
            begun = time.perf_counter()
            if engine == "mmap willneed":
                for later in (
                    extents[number : number + _AHEAD]
                    if number == 0
                    else extents[number + _AHEAD - 1 : number + _AHEAD]
                ):
                    maps[later.volume].madvise(mmap.MADV_WILLNEED, later.offset, later.size)
            source = views[extent.volume][extent.offset : extent.offset + extent.size]
            np.copyto(target[: extent.size], source)
            latencies.append(time.perf_counter() - begun)
            if time.perf_counter() - started > most_s:
                break
        seconds = time.perf_counter() - started
        after = count_work()
        del views, source
        return Timed(
            seconds, sum(e.size for e in extents[: len(latencies)]), latencies, _cpu_s() - cpu,
            after.n_major - before.n_major, after.read_bytes - before.read_bytes, "mapped", "",
        )  # fmt: skip


def _map(path: Path, stack: ExitStack) -> mmap.mmap:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, fd)
        mapping = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    except OSError as error:
        raise StorageError.of(error, path, "mapping it") from error
    stack.callback(mapping.close)
    return mapping


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
