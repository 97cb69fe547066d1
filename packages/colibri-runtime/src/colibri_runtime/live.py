"""A line a second on what the store does, as iostat(1) prints for disks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from .stats import LayerStats

COLUMNS: Final = (
    ("tokens/s", 8),
    ("MB/s", 8),
    ("hit%", 6),
    ("late%", 6),
    ("stall%", 7),
    ("queue", 6),
    ("ahead MB/s", 11),
    ("wasted MB/s", 12),
)
HEADER_EVERY: Final = 20


class LiveLines:
    """Lines of figures since the line before, each at least `period_s` after it.

    `total` gives all counts so far, `clock` seconds.
    """

    def __init__(
        self,
        total: Callable[[], LayerStats],
        *,
        period_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._period_s = period_s
        self._clock = clock
        self._since = clock()
        self._before = total()
        self._n_tokens = 0
        self._n_lines = 0

    def token(self) -> list[str]:
        """One token more; the lines that are due, none most of the time."""
        self._n_tokens += 1
        now = self._clock()
        seconds = now - self._since
        if seconds < self._period_s:
            return []
        total = self._total()
        line = format_line(total.minus(self._before), self._n_tokens, seconds)
        lines = [line] if self._n_lines % HEADER_EVERY else [header(), line]
        self._since, self._before, self._n_tokens = now, total, 0
        self._n_lines += 1
        return lines


def header() -> str:
    """The names of the columns."""
    return "".join(f"{name:>{width}}" for name, width in COLUMNS)


def format_line(stats: LayerStats, n_tokens: int, seconds: float) -> str:
    """What happened in `seconds`, in the columns' order; megabytes are 10^6 bytes."""
    asks = stats.n_asks or 1
    values = (
        f"{n_tokens / seconds:.1f}",
        f"{stats.read_bytes / seconds / 1e6:.1f}",
        f"{100 * stats.n_hits / asks:.0f}",
        f"{100 * stats.n_lates / asks:.0f}",
        f"{stats.stall_ns / seconds / 1e7:.0f}",
        f"{stats.queue_depth / stats.n_waits:.1f}" if stats.n_waits else "-",
        f"{stats.prefetch_bytes / seconds / 1e6:.1f}",
        f"{stats.wasted_bytes / seconds / 1e6:.1f}",
    )
    return "".join(f"{value:>{width}}" for value, (_, width) in zip(values, COLUMNS, strict=True))
