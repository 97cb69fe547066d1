"""What the figures of `bench io` say: what is wrong with them, what to choose. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .io_plan import PAGE, QUEUED, IoRow

_THROTTLE_SLACK: Final = 1.3
"""The kernel deals out a limit in slices of time; short readings may get a slice more."""

_MOSTLY: Final = 0.5

_CHARGED: Final = 0.95

_DISK_BOUND: Final = 1.2


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
    buffered = sorted({r.engine for r in rows if r.engine in QUEUED and r.mode != "direct"})
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
        told = [(row.engine, row.charged) for row in rows if row.charged is not None]
        past = sorted({name for name, share in told if name != "tmpfs" and share < _CHARGED})
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
    compute_s: float | None = None,
    throttle: int | None = None,
    alignment: tuple[int, int] | None = None,
) -> list[str]:
    """In words: what is wrong, what to choose, and what bounds a model here.

    `token_bytes` is what a token of the model reads when no expert is kept, `compute_s` the least
    that computing it takes; `alignment` is what direct reads need: multiples of so much in the file
    and in memory.
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
    near = [r for r in of_size if r.gb_per_s >= share * best.gb_per_s and r.engine in QUEUED]
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
        if compute_s:
            notes.append(_bottleneck(token_bytes, compute_s, best, memory))
    return notes


def _bottleneck(token_bytes: int, compute_s: float, best: IoRow, memory: Sequence[IoRow]) -> str:
    """Whether disk or compute bounds a model: a token's reads beside the least its weights take."""
    reading_s = token_bytes / (best.gb_per_s * 1e9)
    copied = ""
    if memory:
        copied = f" ({1e3 * token_bytes / (memory[0].gb_per_s * 1e9):.0f} from a copy in memory)"
    return (
        f"computing a token takes at least {1e3 * compute_s:.0f} ms, in which memory gives its "
        f"weights; reading its experts takes {1e3 * reading_s:.0f} ms{copied}: "
        + (
            f"the disk is the bottleneck until {1 - compute_s / reading_s:.0%} of the experts are "
            "hits"
            if reading_s > compute_s
            else "compute is the bottleneck, the disk keeps up"
        )
    )
