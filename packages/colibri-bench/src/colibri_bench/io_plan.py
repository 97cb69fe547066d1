"""What `bench io` reads, how, and in what order; and the figures by way. Pure."""

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

QUEUED: Final = ("uring", "aio", "threads")


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
    kernel charged of it to the group of a throttle; None where it tells none."""

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
    charged_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IoRow:
    """One way, block size and phase: medians over rounds; rates in 10^9 bytes a second.

    `from_disk` is the share of the bytes that the disk delivered, at most 1; `disk_gb_per_s` the
    rate at which it delivered any, what was read ahead and not used as well; `charged` the share of
    what it delivered that the kernel charged to a throttle's group, the least of any round that the
    kernel told of.
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
    charged: float | None
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
        for depth in (depths if engine in QUEUED else (None,))
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
        f"blocks of {size / 2**20:.3g} MiB: a reading has {n} of them, too few to show the rate of "
        f"{depth} in flight: take more --bytes and a larger file, or fewer depths or rounds"
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
                mode=next((r.mode for r in found if r.mode != "direct"), "direct"),
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
                charged=min(
                    (share for r in found if (share := _charged(r)) is not None), default=None
                ),
                n_rounds=len(found),
            )
        )
    return rows


def _charged(reading: Reading) -> float | None:
    """The share of what the disk delivered that was charged; None where that is nothing."""
    if reading.charged_bytes is None or not reading.disk_bytes:
        return None
    return min(1.0, reading.charged_bytes / reading.disk_bytes)


def _quantile(ordered: Sequence[float], share: float) -> float:
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _bad_sizes(text: str) -> UsageError:
    return UsageError("bad-sizes", f"--sizes {text}", "is no list of sizes", "as 64K,1M,3.5M,8M")
