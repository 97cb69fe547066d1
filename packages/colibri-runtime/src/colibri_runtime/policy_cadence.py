"""Decayed frequency, an echo of the last token, and how soon a layer comes round again."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Final

from .policy_decayed import NEVER_USED, DecayedPolicy

HALF_LIFE: Final = 20.0
"""Visits of its layer after which a use counts half, at least."""
HALF_LIFE_OF_ALL: Final = 80.0
"""The same where all blocks but a few have slots."""
ECHO: Final = 7.0
"""Uses that having been chosen at the layer's latest visit is worth."""
APPROACH: Final = 0.8
"""Natural logarithm of what a block gains in value while its layer's next visit draws near."""

COUNT: Final = (0.3, 0.7)
_RECENT: Final = (0.5, 0.7)


def half_life_of(n_slots: int, n_blocks: int | None) -> float:
    """Visits after which a use counts half, for a pool of `n_slots` that `n_blocks` share.

    The larger the pool, the more seldom those blocks are asked for between which it has to choose,
    and the longer one must look back to tell them apart (docs/cache.md).
    """
    if not n_blocks:
        return HALF_LIFE
    return max(HALF_LIFE, HALF_LIFE_OF_ALL * min(1.0, n_slots / n_blocks))


class Cadence(DecayedPolicy):
    """Evicts the block that is least likely to be asked for at its layer's next visit.

    A token visits the layers in a fixed cycle, so a block's next use is at its layer's next visit
    or a whole cycle later. What matters is how likely it is then, and how long that is away.

    - *How likely*: a use counts `0.3 + 0.7 w` (`w` the router's weight over the mean weight of its
      event) and decays with a half-life of so many visits. As long as a block was chosen at its
      layer's latest visit it counts `echo * (0.5 + 0.7 w)` more: a token repeats the choice of the
      token before far more often than frequency alone says.
    - *How long*: slots are wanted evenly over the cycle, so of two blocks that are equally likely
      the one whose layer was visited last goes first. A value grows by `exp(approach)` from one
      visit to the next and falls back at the visit.

    The constants were found on the first half of one trace; results are flat around them, and hold
    for other models (docs/cache.md).
    """

    def __init__(
        self,
        n_layers: int,
        quotas: Sequence[int] | None = None,
        *,
        half_life: float = HALF_LIFE,
        echo: float = ECHO,
        approach: float = APPROACH,
    ) -> None:
        super().__init__(n_layers, quotas, 2.0 ** (1.0 / half_life))
        self._echo = echo
        self._approach = approach
        self._clock = 0.0
        self._seen: set[int] = set()
        self._stale: dict[int, float] = {}
        # What blocks count, and will not any more from the layer's next visit on.
        self._recent: list[dict[int, float]] = [{} for _ in range(n_layers)]

    def _visit(self, layer: int) -> None:
        unit = self._begin(layer)
        seen = self._seen
        if layer not in seen:
            seen.add(layer)
        self._clock += self._approach / len(seen)
        # What the visit before chose is no longer recent.
        self._stale = self._recent[layer]
        self._recent[layer] = {}
        self._move(layer, -log(unit) - self._clock)

    def _count(self, layer: int, experts: Sequence[int], weights: Sequence[float] | None) -> None:
        if weights is None:
            weights = (1.0,) * len(experts)
        unit = self._units[layer]
        counts, recent = self._counts[layer], self._recent[layer]
        get = counts.get
        total = sum(weights)
        scale = len(experts) / total * unit if total > 0.0 else 0.0
        base, slope = COUNT[0] * unit, COUNT[1] * scale
        recent_base, recent_slope = self._echo * _RECENT[0] * unit, self._echo * _RECENT[1] * scale
        for expert, weight in zip(experts, weights, strict=True):
            counts[expert] = count = get(expert, 0.0) + base + slope * weight
            recent[expert] = count + recent_base + recent_slope * weight

    def _reprice(self, layer: int) -> None:
        stale = self._stale
        if stale:
            values, recent, get = self._values[layer], self._recent[layer], self._counts[layer].get
            floor = NEVER_USED * self._units[layer]
            self._set_all(
                layer,
                {
                    expert: recent[expert] if expert in recent else get(expert, 0.0) + floor
                    for expert in stale
                    if expert in values
                },
            )
            self._stale = {}

    def _value(self, layer: int, expert: int) -> float:
        strength = self._recent[layer].get(expert)
        return self._plain(layer, expert) if strength is None else strength
