"""Counts of use that halve with every so many visits of a layer, without touching what is idle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from typing import Final

from .policy import Key
from .policy_ranked import RankedPolicy

_LARGEST_UNIT: Final = 1e60
"""Far from overflow, and with a half-life of 20 visits reached once in 4000."""
NEVER_USED: Final = 1e-9
_LONGEST: Final = 64.0
"""Visits that what was learned before weighs as much as, at most."""
_LEAST_VALUE: Final = 1e-300
"""What a value does not fall below: a logarithm is taken of it."""


def seed_count(share: float, growth: float) -> float:
    """What a count comes to, in its layer's unit, when its block is asked for by `share` of the
    layer's visits for ever; at most of `_LONGEST` visits."""
    always = _LONGEST
    if growth > 1.0:
        always = min(always, growth / (growth - 1.0))
    return share * always


class DecayedPolicy(RankedPolicy):
    """Base of policies whose values are decayed counts, and what is added to them.

    Instead of every count decaying with each visit of its layer, the unit of that layer grows by
    `growth`; the layer's offset brings it back. So the counts of blocks that were not used need
    no update, and their order stays (LRFU, Lee et al., IEEE Trans. Computers 50(12), 2001,
    section 3.2).
    """

    def __init__(self, n_layers: int, quotas: Sequence[int] | None, growth: float) -> None:
        super().__init__(n_layers, quotas)
        self._growth = growth
        self._counts: list[dict[int, float]] = [{} for _ in range(n_layers)]
        self._units = [1.0] * n_layers

    def seed(self, shares: Mapping[Key, float]) -> None:
        for (layer, expert), share in shares.items():
            self._counts[layer][expert] = seed_count(share, self._growth) * self._units[layer]

    def _begin(self, layer: int) -> float:
        """The layer's unit from its new visit on."""
        unit = self._units[layer] * self._growth
        if unit > _LARGEST_UNIT:
            unit = self._shrink(layer, unit)
        self._units[layer] = unit
        return unit

    def _plain(self, layer: int, expert: int) -> float:
        """The count alone."""
        return self._counts[layer].get(expert, 0.0) + NEVER_USED * self._units[layer]

    def _shrink(self, layer: int, unit: float) -> float:
        """Goes over to a unit of 1 from `unit`, which all counts of the layer are in."""
        counts, values = self._counts[layer], self._values[layer]
        for expert in counts:
            counts[expert] /= unit
        fresh = {expert: max(value / unit, _LEAST_VALUE) for expert, value in values.items()}
        self._set_all(layer, fresh)
        # The layer's bound stays: what its values lose its offset gains.
        self._offsets[layer] += log(unit)
        return 1.0
