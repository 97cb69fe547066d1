"""Passes: one visit of the layers each, which in decoding is one token."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from .prefetch import PrefetchGate
from .stats import LayerStats

KEPT_PASSES: Final = 1024


@dataclass(frozen=True, slots=True)
class PassStats:
    """What one pass did: `total_ns` from its first fetch, or where C drives it from its beginning,
    to the end of its last, and counts of all layers together. `n_asks_most` is the most that any
    of its fetches asked for."""

    total_ns: int
    n_asks_most: int
    counts: LayerStats

    def as_dict(self) -> dict[str, int]:
        """The figures by name, for JSON."""
        return {
            "total_ns": self.total_ns,
            "n_asks_most": self.n_asks_most,
            **self.counts.as_dict(),
        }


class Passes:
    """Tells passes apart, keeps what the last `KEPT_PASSES` did, and lets `gate` judge by them.

    A pass begins with a fetch of a layer that is not above the one fetched before. Passes that
    ask more of a layer than `top_k` are of several tokens and say nothing of one.
    """

    def __init__(
        self, total: Callable[[], LayerStats], top_k: int, gate: PrefetchGate | None
    ) -> None:
        self.recent: deque[PassStats] = deque(maxlen=KEPT_PASSES)
        self.n_ended = 0
        self.gate = gate
        self.last_layer = -1
        self.n_asks_most = 0
        self._total = total
        self._top_k = top_k
        self._before = total()
        self._began_ns = 0

    def turn(self, began_ns: int, ended_ns: int) -> None:
        """The last pass ended at `ended_ns`, if there was one; another begins at `began_ns`."""
        if self.last_layer >= 0:
            total = self._total()
            counts = total.minus(self._before)
            self._before = total
            # One that failed before any lease has no end of its own.
            is_whole = ended_ns >= self._began_ns
            total_ns = max(0, ended_ns - self._began_ns)
            passed = PassStats(total_ns, self.n_asks_most, counts)
            self.recent.append(passed)
            self.n_ended += 1
            if self.gate is not None and is_whole and self.n_asks_most <= self._top_k:
                self.gate.tell(passed.total_ns)
        self._began_ns = began_ns
        self.last_layer = -1
        self.n_asks_most = 0
