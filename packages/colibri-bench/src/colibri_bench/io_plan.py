"""What `bench io` reads, how, and in what order; and what the figures come to. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

from colibri_format import ColibriError, UsageError, parse_size

EXPERTS_A_LAYER: Final = 64
"""Blocks of a made-up layer: reads are random within a layer, layer after layer."""

PAGE: Final = 4096
_THROTTLE_SLACK: Final = 1.3
"""The kernel deals out a limit in slices of time; short readings may get a slice more."""

_MOSTLY: Final = 0.5
_CHARGED: Final = 0.95
_DISK_BOUND: Final = 1.2
_QUEUED: Final = ("uring", "aio", "threads")


@dataclass(frozen=True, slots=True)
class Way:
    """A way to read: `engine` as people call it, and what is in flight at once (None: one)."""

    engine: str
    depth: int | None = None

    @property
    def name(self) -> str:
        """`uring 8`."""
        return self.engine if self.depth is None else f"{self.engine} {self.depth}"


@dataclass(frozen=True, slots=True)
class Extent:
    """`size` bytes at `offset`, whole pages, in the file numbered `volume` (0: the file itself)."""

    offset: int
    size: int
    volume: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One way's reading of one share of the blocks, in one round; `charged_bytes` is what the
    kernel charged of it to the group of a throttle."""

    way: Way
    block_bytes: int
    round: int
    phase: str
    seconds: float
    n_bytes: int
    latencies_s: Sequence[float]
    cpu_s: float
    n_major_faults: int
    disk_bytes: int
    mode: str
    reason: str
    charged_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class IoRow:
    """One way, block size and phase: medians over rounds; rates in 10^9 bytes a second.

    `from_disk` is the share of the bytes that the disk delivered, at most 1; `disk_gb_per_s` the
    rate at which it delivered any, what was read ahead and not used as well; `charged` the share of
    what it delivered that the kernel charged to a throttle's group, the least of any round.
    """

    engine: str
    depth: int | None
    block_bytes: int
    phase: str
    mode: str
    gb_per_s: float
    slowest: float
    fastest: float
    iops: float
    p50_ms: float
    p99_ms: float
    cpu_s_per_gb: float
    major_faults: float
    from_disk: float
    disk_gb_per_s: float
    charged: float
    n_rounds: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def parse_sizes(text: str) -> list[int]:
    """`64K,1M,3.5M` as bytes, each made whole pages.

    Raises:
        UsageError: `bad-sizes`.
    """
    try:
        sizes = [_size(part.strip()) for part in text.split(",")]
    except (ValueError, ColibriError) as error:
        raise _bad_sizes(text) from error
    if min(sizes) < 1:
        raise _bad_sizes(text)
    return sorted({-(-size // PAGE) * PAGE for size in sizes})


def _size(text: str) -> int:
    number, unit = text[:-1], text[-1:].upper()
    if unit in ("K", "M") and "." in number:
        return int(float(number) * {"K": 1024, "M": 2**20}[unit])
    return parse_size(text)


def plan_ways(engines: Sequence[str], depths: Sequence[int]) -> list[Way]:
    """Each engine that queues at every depth, the others once."""
    return [
        Way(engine, depth)
        for engine in engines
        for depth in (depths if engine in _QUEUED else (None,))
    ]


def plan_blocks(n_bytes: int, block_bytes: int, start: int = 0) -> list[list[Extent]]:
    """The layers of a made-up model: as many blocks of one size as `n_bytes` from `start` hold."""
    n_blocks = n_bytes // block_bytes
    blocks = [Extent(start + number * block_bytes, block_bytes) for number in range(n_blocks)]
    return [blocks[i : i + EXPERTS_A_LAYER] for i in range(0, n_blocks, EXPERTS_A_LAYER)]


def plan_sizes(file_bytes: int, sizes: Sequence[int]) -> list[tuple[int, list[list[Extent]]]]:
    """For each block size its layers, in a part of the file of its own: what was read in blocks of
    one size is not read for the first time in blocks of another."""
    part = file_bytes // len(sizes) // PAGE * PAGE
    return [(size, plan_blocks(part, size, number * part)) for number, size in enumerate(sizes)]


def share_out(
    layers: Sequence[Sequence[Extent]], n_shares: int, most_bytes: int, seed: int
) -> list[list[Extent]]:
    """`n_shares` lists of different blocks, each of up to `most_bytes`: random within a layer,
    layer after layer, a few of each, as routing asks for them.

    Shares have no block in common, so that what one way has read makes no other one faster.

    Raises:
        UsageError: `too-few-blocks` when there is not one block for each share.
    """
    rng = random.Random(seed)
    shuffled = [rng.sample(list(layer), len(layer)) for layer in layers]
    dealt: list[list[list[Extent]]] = [[[] for _ in layers] for _ in range(n_shares)]
    turn = 0
    for number, layer in enumerate(shuffled):
        for extent in layer:
            dealt[turn % n_shares][number].append(extent)
            turn += 1
    shares = [
        _within([extent for layer in share for extent in layer], most_bytes) for share in dealt
    ]
    if not all(shares):
        total = sum(len(layer) for layer in layers)
        raise UsageError(
            "too-few-blocks",
            "bench io",
            f"{total} blocks",
            f"at least {n_shares}, one for each way to read and round",
            "take fewer engines, depths or rounds, or a larger file",
        )
    return shares


def _within(extents: Sequence[Extent], most_bytes: int) -> list[Extent]:
    """As many from all over as fit, at least one."""
    total = sum(extent.size for extent in extents)
    if total <= most_bytes:
        return list(extents)
    step = max(1, -(-total // most_bytes))
    return list(extents[::step])


def check_shares(shares: Mapping[int, Sequence[Sequence[Extent]]], depth: int) -> list[str]:
    """What readings of too few blocks do not show: `shares` by block size, `depth` the deepest."""
    least = {size: min(map(len, of_size)) for size, of_size in shares.items() if of_size}
    return [
        f"blocks of {size / 2**20:.3g} MiB: a reading has {n} of them, so no more are ever in "
        f"flight, and ends before {depth} in flight show their rate: take a larger file, fewer "
        "depths or rounds"
        for size, n in least.items()
        if n < 2 * depth
    ]


def order_ways(ways: Sequence[Way], round_number: int) -> Iterator[tuple[int, Way]]:
    """The ways with their numbers, each round beginning with another one."""
    n = len(ways)
    for place in range(n):
        number = (place + round_number) % n
        yield number, ways[number]


def summarise(readings: Sequence[Reading]) -> list[IoRow]:
    """A row for each way, size and phase."""
    keys = list(dict.fromkeys((r.way, r.block_bytes, r.phase) for r in readings))
    rows = []
    for way, block_bytes, phase in keys:
        found = [
            r for r in readings if (r.way, r.block_bytes, r.phase) == (way, block_bytes, phase)
        ]
        rates = [r.n_bytes / r.seconds / 1e9 for r in found]
        latencies = sorted(value for r in found for value in r.latencies_s)
        rows.append(
            IoRow(
                engine=way.engine,
                depth=way.depth,
                block_bytes=block_bytes,
                phase=phase,
                mode=found[0].mode,
                gb_per_s=median(rates),
                slowest=min(rates),
                fastest=max(rates),
                iops=median(len(r.latencies_s) / r.seconds for r in found),
                p50_ms=1e3 * _quantile(latencies, 0.5),
                p99_ms=1e3 * _quantile(latencies, 0.99),
                cpu_s_per_gb=median(r.cpu_s / r.n_bytes * 1e9 for r in found),
                major_faults=median(r.n_major_faults for r in found),
                from_disk=median(min(1.0, r.disk_bytes / r.n_bytes) for r in found),
                disk_gb_per_s=median(r.disk_bytes / r.seconds / 1e9 for r in found),
                charged=min(min(1.0, r.charged_bytes / max(1, r.disk_bytes)) for r in found),
                n_rounds=len(found),
            )
        )
    return rows


def check_rows(rows: Sequence[IoRow], throttle: int | None = None) -> list[str]:
    """What is wrong with the figures: reads that no disk made, direct modes that are none, rates
    above the `throttle` in bytes a second."""
    warm = sorted({row.engine for row in rows if row.engine != "tmpfs" and row.from_disk < _MOSTLY})
    notes = []
    if warm:
        notes.append(
            f"NOT COLD: less than half of what {', '.join(warm)} read came from the disk; these "
            "are figures of the page cache. Run as root, or read more than memory holds"
        )
    buffered = sorted({r.engine for r in rows if r.engine in _QUEUED and r.mode != "direct"})
    if buffered:
        notes.append(f"NOT DIRECT: {', '.join(buffered)} read through the page cache")
    if throttle is not None:
        most = _THROTTLE_SLACK * throttle / 1e9
        above = [r for r in rows if r.engine != "tmpfs" and r.disk_gb_per_s > most]
        if above:
            worst = max(above, key=lambda row: row.disk_gb_per_s)
            names = ", ".join(sorted({row.engine for row in above}))
            notes.append(
                f"NOT THROTTLED: {names} got up to {worst.disk_gb_per_s:.2f} GB/s from a disk that "
                f"was to give {throttle / 1e9:.2f}"
            )
        past = sorted({r.engine for r in rows if r.engine != "tmpfs" and r.charged < _CHARGED})
        if past:
            notes.append(
                f"NOT CHARGED: the kernel did not charge what {', '.join(past)} read to the group "
                "that has the limit: it went past it"
            )
    return notes


def verdict(
    rows: Sequence[IoRow],
    *,
    token_bytes: int | None = None,
    throttle: int | None = None,
    alignment: tuple[int, int] | None = None,
) -> list[str]:
    """In words: what is wrong, what to choose, and what bounds a model here.

    `alignment` is what direct reads need: multiples of so much in the file and in memory.
    """
    notes = check_rows(rows, throttle)
    later = [row for row in rows if row.phase == "re-read"] or list(rows)
    # Nothing is to be learnt of a disk from the page cache's figures.
    disk = [row for row in later if row.engine != "tmpfs" and row.from_disk >= _MOSTLY]
    if not disk:
        return notes
    largest = max(row.block_bytes for row in disk)
    of_size = [row for row in disk if row.block_bytes == largest]
    best = max(of_size, key=lambda row: row.gb_per_s)
    # A throttle makes all alike, but for how its slices of time fall.
    share = 0.95 if throttle is None else 0.85
    near = [r for r in of_size if r.gb_per_s >= share * best.gb_per_s and r.engine in _QUEUED]
    cheapest = min(near, key=lambda r: (r.cpu_s_per_gb, r.depth or 0)) if near else best
    depth = "" if cheapest.depth is None else f" with --io-depth {cheapest.depth}"
    if cheapest.engine == "threads":
        depth = f" with --io-threads {cheapest.depth}"
    notes.append(
        f"--io {cheapest.engine}{depth}: {cheapest.gb_per_s:.2f} GB/s at blocks of "
        f"{largest / 2**20:.2f} MiB, {cheapest.cpu_s_per_gb:.3f} CPU s/GB (within "
        f"{1 - share:.0%} of the best, least work)"
    )
    if alignment is not None:
        in_file, in_memory = alignment
        notes.append(
            f"alignment: direct reads need offsets at multiples of {in_file} and addresses at "
            f"{in_memory}; blocks that start at multiples of "
            f"{max(PAGE, in_file)} (colibri repack --block-size) suit this disk"
        )
    smallest = min(row.block_bytes for row in disk)
    if smallest < largest:
        small = max((r for r in disk if r.block_bytes == smallest), key=lambda r: r.gb_per_s)
        share = small.gb_per_s / best.gb_per_s
        notes.append(
            f"blocks of {smallest / 1024:.0f} KiB reach {share:.0%} of that: "
            + ("small experts cost speed here" if share < 0.8 else "block size matters little here")
        )
    memory = [row for row in later if row.engine == "tmpfs" and row.block_bytes == largest]
    if memory:
        ratio = memory[0].gb_per_s / best.gb_per_s
        notes.append(
            f"a copy in memory (tmpfs) is read {ratio:.1f} times as fast as the disk: "
            + (
                "the disk limits reading"
                if ratio > _DISK_BOUND
                else "memory limits reading as well"
            )
        )
    if token_bytes:
        rate = best.gb_per_s * 1e9 / token_bytes
        notes.append(
            f"with no expert kept, a token of this model reads {token_bytes / 2**20:.0f} MiB: this "
            f"disk allows {rate:.1f} tokens/s; hits raise that in proportion"
        )
        if memory:
            most = memory[0].gb_per_s * 1e9 / token_bytes
            notes.append(
                f"from memory it would be {most:.1f} tokens/s: above what the kernels compute, "
                "compute is the bottleneck, below it the disk is"
            )
    return notes


def _quantile(ordered: Sequence[float], share: float) -> float:
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _bad_sizes(text: str) -> UsageError:
    return UsageError("bad-sizes", f"--sizes {text}", "is no list of sizes", "as 64K,1M,3.5M,8M")
