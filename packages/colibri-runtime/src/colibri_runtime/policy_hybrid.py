"""Recency and frequency in one figure, with a weight between them; the hottest blocks stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import nlargest
from math import log
from typing import Final

from colibri_format import UsageError

from .policy import Key
from .policy_decayed import DecayedPolicy

LFU_WEIGHT: Final = 0.9
"""Default weight of frequency: a use counts half after ten visits of its layer."""
HOT_SHARE: Final = 0.1
"""Default share of a layer's slots whose blocks stay."""

_HOT_EVERY: Final = 16
_SEED_EVENTS: Final = 32.0
# Above any ratio of counts, so that hot blocks leave after all others.
_HOT: Final = 1e40


class Hybrid(DecayedPolicy):
    """LRFU: a use counts `2 ** -((1 - lfu_weight) * age)`, its age in visits of its layer.

    `lfu_weight` 0 keeps what was used last (by tokens), 1 what was used most. Source: Lee et al.,
    IEEE Trans. Computers 50(12), 2001, section 3, with lambda = 1 - lfu_weight.

    In each layer the `n_hot` blocks with most uses in all, chosen anew every 16 visits, leave only
    while every other block is in use or protected.

    Raises:
        UsageError: `bad-lfu-weight` outside 0 to 1.
    """

    def __init__(
        self,
        n_layers: int,
        quotas: Sequence[int] | None = None,
        *,
        lfu_weight: float = LFU_WEIGHT,
        n_hot: int = 0,
    ) -> None:
        if not 0.0 <= lfu_weight <= 1.0:
            raise UsageError(
                "bad-lfu-weight",
                "policy hybrid",
                f"the weight of frequency is {lfu_weight}",
                "0 (recency alone) to 1 (frequency alone)",
            )
        super().__init__(n_layers, quotas, 2.0 ** (1.0 - lfu_weight))
        self._n_hot = n_hot
        self._uses: list[dict[int, float]] = [{} for _ in range(n_layers)]
        self._hot: list[frozenset[int]] = [frozenset()] * n_layers
        self._n_visits = [0] * n_layers

    def seed(self, shares: Mapping[Key, float]) -> None:
        super().seed(shares)
        for (layer, expert), share in shares.items():
            self._uses[layer][expert] = share * _SEED_EVENTS
        for layer in range(len(self._hot)):
            self._choose_hot(layer)

    def _visit(self, layer: int) -> None:
        unit = self._begin(layer)
        self._n_visits[layer] += 1
        if self._n_visits[layer] % _HOT_EVERY == 0:
            self._choose_hot(layer)
        self._move(layer, -log(unit))

    def _choose_hot(self, layer: int) -> None:
        if not self._n_hot:
            return
        uses, values = self._uses[layer], self._values[layer]
        before = self._hot[layer]
        # Of equals the lower number, so that runs can be repeated.
        hot = frozenset(nlargest(self._n_hot, uses, key=lambda e: (uses[e], -e)))
        self._hot[layer] = hot
        for expert in before ^ hot:
            if expert in values:
                self._set(layer, expert, values[expert] * (_HOT if expert in hot else 1.0 / _HOT))

    def _count(self, layer: int, experts: Sequence[int], weights: Sequence[float] | None) -> None:
        counts, uses, unit = self._counts[layer], self._uses[layer], self._units[layer]
        for expert in experts:
            counts[expert] = counts.get(expert, 0.0) + unit
            uses[expert] = uses.get(expert, 0.0) + 1.0

    def _value(self, layer: int, expert: int) -> float:
        return self._plain(layer, expert) * (_HOT if expert in self._hot[layer] else 1.0)
