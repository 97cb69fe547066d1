"""What a store did: asks and how they were answered, bytes, and where the time went."""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import add, attrgetter, sub


@dataclass(slots=True)
class LayerStats:
    """Counts of one layer, or of all together; times in nanoseconds, sizes in bytes.

    An ask is a hit when the block was resident, late when it was being read or queued to be, and
    a miss when neither. `stall_ns` is the time the caller waited for blocks, `compute_ns` the
    time it took between one block and the next, `read_ns` and `checksum_ns` the time of the I/O
    threads, which overlaps both. When the caller waited, `n_waits` times, `queue_depth / n_waits`
    reads were under way on average. `n_predicted` experts were predicted for asks of which
    `n_foretold` had a prediction at all and `n_recalled` were in it.
    """

    n_fetches: int = 0
    n_hits: int = 0
    n_lates: int = 0
    n_misses: int = 0
    demand_bytes: int = 0
    prefetch_bytes: int = 0
    n_prefetched: int = 0
    n_prefetch_used: int = 0
    n_prefetch_wasted: int = 0
    wasted_bytes: int = 0
    n_prefetch_dropped: int = 0
    n_prefetch_cancelled: int = 0
    n_prefetch_failed: int = 0
    n_predicted: int = 0
    n_foretold: int = 0
    n_recalled: int = 0
    n_rereads: int = 0
    n_waits: int = 0
    queue_depth: int = 0
    stall_ns: int = 0
    compute_ns: int = 0
    read_ns: int = 0
    checksum_ns: int = 0

    @property
    def n_asks(self) -> int:
        """Blocks asked for."""
        return self.n_hits + self.n_lates + self.n_misses

    @property
    def hit_rate(self) -> float:
        """Hits among asks; a late one is no hit. 0 without asks."""
        return self.n_hits / self.n_asks if self.n_asks else 0.0

    @property
    def read_bytes(self) -> int:
        """Bytes read from disk, padding included, for demands and prefetches."""
        return self.demand_bytes + self.prefetch_bytes

    @property
    def needed_bytes(self) -> int:
        """What of `read_bytes` was for blocks that were then asked for; of prefetches the share
        that was used. The rest was read in vain."""
        if not self.n_prefetched:
            return self.demand_bytes
        used = min(1.0, self.n_prefetch_used / self.n_prefetched)
        return self.demand_bytes + round(used * self.prefetch_bytes)

    @property
    def recall(self) -> float | None:
        """Share of asks that had been predicted, None where nothing was predicted."""
        return self.n_recalled / self.n_foretold if self.n_foretold else None

    def plus(self, other: LayerStats) -> LayerStats:
        """The sum of both, name by name."""
        return LayerStats(*map(add, _values(self), _values(other)))

    def minus(self, other: LayerStats) -> LayerStats:
        """What came since `other` was taken, name by name."""
        return LayerStats(*map(sub, _values(self), _values(other)))

    def as_dict(self) -> dict[str, int]:
        """The counts by name, for JSON."""
        return {name: getattr(self, name) for name in _NAMES}


_NAMES = tuple(field.name for field in fields(LayerStats))
_values = attrgetter(*_NAMES)


class Stats:
    """Counts of every layer of a store since it was opened."""

    def __init__(self, n_layers: int) -> None:
        self.layers: tuple[LayerStats, ...] = tuple(LayerStats() for _ in range(n_layers))

    def total(self) -> LayerStats:
        """All layers together; a new value, which later asks do not change."""
        return LayerStats(*map(sum, zip(*map(_values, self.layers), strict=True)))
