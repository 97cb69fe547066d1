"""Reads a file's blocks in every way, round after round, and keeps the readings."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from colibri_format import StorageError, UsageError
from colibri_format.command import EXIT_OK, interrupt_status

from .io_plan import Extent, Reading, Way, order_ways
from .io_run import read_extents
from .io_slots import SlotRotation
from .page_cache import drop_caches
from .picture import size_label
from .throttle import Throttle

THROTTLED_S: Final = 1.2
"""Seconds that a reading takes behind a throttle."""

_MOST_S: Final = 5.0
_CREDIT_S: Final = 0.2  # what a throttle is read for beforehand
_FIRST, _AGAIN = "first", "re-read"


@dataclass(slots=True)
class IoBench:
    """What is read, how much of it, and what came of it.

    `shares` are for each block size what each way reads in each round; `paths` the files by volume,
    `memory` their copies; `throttle` the bytes a second that were asked for, `limit` what holds the
    disk to them; `pools` for each block size what was read into (`SlotRotation.report`).
    """

    ways: list[Way]
    n_rounds: int
    console: Console
    throttle: int | None = None
    limit: Throttle | None = None
    shares: dict[int, list[list[Extent]]] = field(default_factory=dict)
    paths: list[Path] = field(default_factory=list)
    memory: list[Path] = field(default_factory=list)
    token_bytes: int | None = None
    compute_s: float | None = None
    alignment: tuple[int, int] | None = None
    readings: list[Reading] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    states: set[str] = field(default_factory=set)
    pools: dict[int, dict[str, Any]] = field(default_factory=dict)


def measure(bench: IoBench, save: Callable[[], object]) -> int:
    """0 when all was read, else the status to exit with.

    Rounds are outermost, so that each size has some when this is interrupted, and so that the
    spread over rounds is one over the whole time.
    """
    n_all = len(bench.shares) * bench.n_rounds * len(bench.ways)
    started = time.monotonic()
    n_done = 0
    try:
        for number in range(bench.n_rounds):
            for size, shares in bench.shares.items():
                with _slots(bench, size) as slots:
                    for place, way in order_ways(bench.ways, number):
                        share = shares[number * len(bench.ways) + place]
                        for reading in _read_twice(bench, number, size, way, share, slots):
                            bench.readings.append(reading)
                        n_done += 1
                        left = (time.monotonic() - started) / n_done * (n_all - n_done)
                        bench.console.print(
                            f"{n_done}/{n_all}: round {number + 1}, {size_label(size)}, "
                            f"{way.name}: {_told(bench, way)}; {left:.0f} s left"
                        )
                # Whatever ends this, what was measured is there.
                save()
    except KeyboardInterrupt as error:
        if not bench.readings:
            raise
        bench.console.print(f"interrupted after {n_done} of {n_all}: what there is")
        return interrupt_status(error)
    return EXIT_OK


@contextlib.contextmanager
def _slots(bench: IoBench, size: int) -> Iterator[SlotRotation]:
    slots = SlotRotation(size, max(way.depth or 1 for way in bench.ways))
    bench.pools[size] = slots.report()
    try:
        yield slots
    finally:
        slots.close()


def _read_twice(
    bench: IoBench, number: int, size: int, way: Way, share: list[Extent], slots: SlotRotation
) -> Iterator[Reading]:
    """The first reading ever of a share, and the same again; both after the cache was emptied.

    Behind a throttle, which hides the difference, all ways read the same share, and once.
    """
    is_memory = way.engine == "tmpfs"
    most_s = _MOST_S if bench.throttle is None else THROTTLED_S
    for phase in (_FIRST, _AGAIN) if bench.throttle is None else (_AGAIN,):
        if not is_memory:
            _spend_credit(bench, share, slots)
            bench.states.add(drop_caches(*bench.paths).how)
        charged = _charged(bench)
        paths = bench.memory if is_memory else bench.paths
        try:
            timed = read_extents(way, paths, share, slots, most_s)
        except (StorageError, UsageError) as error:
            bench.refused[way.engine] = str(error)
            return
        after = _charged(bench)
        yield Reading(
            way=way, block_bytes=size, round=number, phase=phase, seconds=timed.seconds,
            n_bytes=timed.n_bytes, latencies_s=timed.latencies_s, cpu_s=timed.cpu_s,
            n_major_faults=timed.n_major_faults, disk_bytes=timed.disk_bytes, mode=timed.mode,
            reason=timed.reason,
            charged_bytes=None if charged is None or after is None else after - charged,
        )  # fmt: skip


def _charged(bench: IoBench) -> int | None:
    return None if bench.limit is None else bench.limit.charged_bytes()


def _spend_credit(bench: IoBench, share: Sequence[Extent], slots: SlotRotation) -> None:
    """Reads, untimed, what a throttle lets through at once after a pause."""
    if bench.throttle is None:
        return
    n_bytes = 0
    for number, extent in enumerate(share):
        n_bytes += extent.size
        if n_bytes > _CREDIT_S * bench.throttle:
            share = share[: number + 1]
            break
    # What this leaves in the page cache, if anything, is dropped before time is taken.
    with contextlib.suppress(StorageError):
        read_extents(Way("threads", 1), bench.paths, share, slots)


def _told(bench: IoBench, way: Way) -> str:
    if not bench.readings or bench.readings[-1].way != way:
        return bench.refused.get(way.engine, "nothing")
    last = bench.readings[-1]
    return f"{last.n_bytes / last.seconds / 1e9:.2f} GB/s, {last.mode}"
