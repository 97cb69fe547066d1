"""Reads a file's blocks in every way, round after round, and keeps the readings."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console

from colibri_format import StorageError, UsageError

from .io_plan import Extent, Reading, Way, order_ways
from .io_run import read_extents
from .page_cache import drop_caches
from .picture import size_label

THROTTLED_S: Final = 1.2
"""Seconds that a reading takes behind a throttle."""

_MOST_S: Final = 5.0
_CREDIT_S: Final = 0.2  # what a throttle is read for beforehand
_FIRST, _AGAIN = "first", "re-read"


@dataclass(slots=True)
class IoBench:
    """What is read, how much of it, and what came of it.

    `shares` are for each block size what each way reads in each round; `paths` the files by volume,
    `memory` their copies.
    """

    ways: list[Way]
    n_rounds: int
    console: Console
    throttle: int | None = None
    group: str = ""
    shares: dict[int, list[list[Extent]]] = field(default_factory=dict)
    paths: list[Path] = field(default_factory=list)
    memory: list[Path] = field(default_factory=list)
    token_bytes: int | None = None
    alignment: tuple[int, int] | None = None
    readings: list[Reading] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    states: set[str] = field(default_factory=set)


def measure(bench: IoBench, save: Callable[[], object]) -> bool:
    """Whether all was read. Rounds are outermost, so that each size has some when this is
    interrupted, and so that the spread over rounds is one over the whole time."""
    n_all = len(bench.shares) * bench.n_rounds * len(bench.ways)
    started = time.monotonic()
    n_done = 0
    try:
        for number in range(bench.n_rounds):
            for size, shares in bench.shares.items():
                for place, way in order_ways(bench.ways, number):
                    share = shares[number * len(bench.ways) + place]
                    for reading in _read_twice(bench, number, size, way, share):
                        bench.readings.append(reading)
                    n_done += 1
                    left = (time.monotonic() - started) / n_done * (n_all - n_done)
                    bench.console.print(
                        f"{n_done}/{n_all}: round {number + 1}, {size_label(size)}, {way.name}: "
                        f"{_told(bench, way)}; {left:.0f} s left"
                    )
                # Whatever ends this, what was measured is there.
                save()
    except KeyboardInterrupt:
        if not bench.readings:
            raise
        bench.console.print(f"interrupted after {n_done} of {n_all}: what there is")
        return False
    return True


def _read_twice(
    bench: IoBench, number: int, size: int, way: Way, share: list[Extent]
) -> Iterator[Reading]:
    """The first reading ever of a share, and the same again; both after the cache was emptied.

    Behind a throttle, which hides the difference, all ways read the same share, and once.
    """
    is_memory = way.engine == "tmpfs"
    most_s = _MOST_S if bench.throttle is None else THROTTLED_S
    for phase in (_FIRST, _AGAIN) if bench.throttle is None else (_AGAIN,):
        if not is_memory:
            _spend_credit(bench, share)
            bench.states.add(drop_caches(*bench.paths).how)
        try:
            timed = read_extents(way, bench.memory if is_memory else bench.paths, share, most_s)
        except (StorageError, UsageError) as error:
            bench.refused[way.engine] = str(error)
            return
        yield Reading(
            way=way, block_bytes=size, round=number, phase=phase, seconds=timed.seconds,
            n_bytes=timed.n_bytes, latencies_s=timed.latencies_s, cpu_s=timed.cpu_s,
            n_major_faults=timed.n_major_faults, disk_bytes=timed.disk_bytes, mode=timed.mode,
            reason=timed.reason,
        )  # fmt: skip


def _spend_credit(bench: IoBench, share: Sequence[Extent]) -> None:
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
        read_extents(Way("threads", 2), bench.paths, share)


def _told(bench: IoBench, way: Way) -> str:
    if not bench.readings or bench.readings[-1].way != way:
        return bench.refused.get(way.engine, "nothing")
    last = bench.readings[-1]
    return f"{last.n_bytes / last.seconds / 1e9:.2f} GB/s, {last.mode}"
