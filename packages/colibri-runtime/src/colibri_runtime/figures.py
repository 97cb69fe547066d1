"""The figures of a run: speed, hits, bytes, stall, memory; and what to change when it stalls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from colibri_format import format_size

from .budget import MemoryPlan
from .config import RunConfig
from .disk import IoReport
from .disk_files import IoMode
from .stats import LayerStats

STALL_SHARE: Final = 0.1
"""Share of time stalled above which it is explained."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One part of a run: tokens that passed, time, and what the store did meanwhile."""

    n_tokens: int
    seconds: float
    stats: LayerStats

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second; None without tokens."""
        return self.n_tokens / self.seconds if self.n_tokens and self.seconds > 0 else None

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes read from disk for each token, prefetches included; None without tokens."""
        return self.stats.read_bytes / self.n_tokens if self.n_tokens else None

    @property
    def stall_share(self) -> float | None:
        """Share of the time in which compute waited for blocks; None without time."""
        return self.stats.stall_ns / 1e9 / self.seconds if self.seconds > 0 else None

    def as_dict(self) -> dict[str, Any]:
        """The figures by name, for JSON."""
        return {
            "tokens": self.n_tokens,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "hit_rate": self.stats.hit_rate if self.stats.n_asks else None,
            "bytes_per_token": self.bytes_per_token,
            "stall_share": self.stall_share,
            "prefetch_recall": self.stats.recall,
            "stats": self.stats.as_dict(),
        }


def explain_stall(
    phase: Phase, plan: MemoryPlan, config: RunConfig, io: IoReport
) -> tuple[str, ...]:
    """Sentences on what to change when compute waited long; none below 10 % of the time.

    The cause that costs most comes first.
    """
    share = phase.stall_share
    if share is None or share <= STALL_SHARE or not phase.stats.n_asks:
        return ()
    stats = phase.stats
    reasons = []
    if plan.n_slots < plan.n_blocks:
        reasons.append(
            f"{1 - stats.hit_rate:.0%} of the experts asked for had to be read: the pool holds "
            f"{plan.n_slots} of {plan.n_blocks}. More memory is the surest cure; with "
            f"--memory {-(-plan.largest_bytes // 2**20)}M or above nothing is read twice."
        )
    elif stats.n_misses + stats.n_lates:
        reasons.append(
            "Every expert has a slot, so these were first reads: a longer run stalls less."
        )
    if io.mode is IoMode.BUFFERED:
        reasons.append(
            f"Reads pass through the page cache ({io.reason}), which takes time from computing: "
            "put the file on a disk that takes direct reads."
        )
    if config.prefetch_depth == 0:
        reasons.append("Nothing is read ahead: try --prefetch-depth 1.")
    elif (
        config.prefetch_depth
        and stats.n_prefetched
        and stats.n_prefetch_used < stats.n_prefetched / 2
    ):
        reasons.append(
            f"Of {stats.n_prefetched} blocks read ahead only {stats.n_prefetch_used} were used: "
            "try --prefetch-depth 0."
        )
    if stats.checksum_ns > 0.3 * (stats.read_ns + stats.checksum_ns):
        reasons.append(
            "A good part of reading is checking checksums: --no-verify leaves that out once "
            "`colibri verify` has passed the file."
        )
    busy_s = stats.read_ns / 1e9 / io.n_threads if io.n_threads else 0.0
    if busy_s > 0:
        reasons.append(
            f"The disk gave {format_size(int(stats.read_bytes / busy_s))}/s to {io.n_threads} "
            "threads while it was read; if it can do more, try more --io-threads."
        )
    return tuple(reasons)


def profile_rows(layers: Sequence[LayerStats]) -> list[tuple[str, ...]]:
    """A table of what each layer did: header first, one row a layer that was asked."""
    rows: list[tuple[str, ...]] = [
        (
            "layer",
            "asks",
            "hits",
            "lates",
            "misses",
            "read",
            "recall",
            "wasted",
            "stall ms",
            "compute ms",
            "read ms",
            "check ms",
        )
    ]
    for layer, stats in enumerate(layers):
        if not stats.n_asks:
            continue
        rows.append(
            (
                str(layer),
                str(stats.n_asks),
                str(stats.n_hits),
                str(stats.n_lates),
                str(stats.n_misses),
                format_size(stats.read_bytes),
                "-" if stats.recall is None else f"{stats.recall:.0%}",
                str(stats.n_prefetch_wasted),
                *(
                    f"{ns / 1e6:.1f}"
                    for ns in (stats.stall_ns, stats.compute_ns, stats.read_ns, stats.checksum_ns)
                ),
            )
        )
    return rows
