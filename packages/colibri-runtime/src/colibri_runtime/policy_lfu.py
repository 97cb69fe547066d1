"""Least frequently used first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor
from typing import Final

from .policy import Key
from .policy_ranked import RankedPolicy

_SEED_EVENTS: Final = 32
"""Events of this run that what was learned before weighs as much as."""
_STEP: Final = 2.0**-40
"""What one event later adds to a count, so that of equals the one used last stays longest."""


class Lfu(RankedPolicy):
    """The block with the fewest uses leaves first; of equals the one used longest ago."""

    def __init__(self, n_layers: int, quotas: Sequence[int] | None = None) -> None:
        super().__init__(n_layers, quotas)
        self._counts: list[dict[int, float]] = [{} for _ in range(n_layers)]
        self._n_events = 0

    def seed(self, shares: Mapping[Key, float]) -> None:
        for (layer, expert), share in shares.items():
            self._counts[layer][expert] = float(round(share * _SEED_EVENTS))

    def _visit(self, layer: int) -> None:
        pass

    def _count(self, layer: int, experts: Sequence[int], weights: Sequence[float] | None) -> None:
        counts = self._counts[layer]
        self._n_events += 1
        step = self._n_events * _STEP
        for expert in experts:
            # Whole uses, and when the last one was.
            counts[expert] = floor(counts.get(expert, 0.0)) + 1.0 + step

    def _value(self, layer: int, expert: int) -> float:
        return self._counts[layer].get(expert, _STEP / 2)
