"""Decayed frequency, an echo of the last token, and what followed tokens that were alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .policy import Key
from .policy_cadence import APPROACH, COUNT, ECHO, HALF_LIFE, Cadence
from .recall import Recall

RECALL: Final = 25.0
"""Uses that a block counts more that is sure to be asked for at its layer's next visit, as far as
earlier tokens tell."""


class RecallPolicy(Cadence):
    """`Cadence` that also remembers what followed tokens that were routed like the present one.

    Text repeats itself: the same word in the same phrase goes the same way through the experts,
    and what came after it then is likely to come again. `Recall` finds earlier tokens by how their
    experts agree with those of the token that is running, and gives for the layer just visited
    the experts likely at its next visit. Each counts `recall * likelihood` more until then.

    Nothing is computed before a block is evicted for the first time.
    """

    def __init__(
        self,
        n_layers: int,
        quotas: Sequence[int] | None = None,
        *,
        half_life: float = HALF_LIFE,
        echo: float = ECHO,
        approach: float = APPROACH,
        recall: float = RECALL,
        is_native: bool | None = None,
    ) -> None:
        super().__init__(n_layers, quotas, half_life=half_life, echo=echo, approach=approach)
        self._recall = Recall(n_layers, is_native=is_native)
        self._recall_weight = recall
        self._is_pressed = False

    def victim(self, *, is_prefetch: bool) -> Key | None:
        self._is_pressed = True
        return super().victim(is_prefetch=is_prefetch)

    def _count(self, layer: int, experts: Sequence[int], weights: Sequence[float] | None) -> None:
        super()._count(layer, experts, weights)
        if not self._is_observed:
            # Without events there are no tokens to compare.
            return
        n = len(experts)
        total = sum(weights) if weights is not None else 0.0
        if weights is None or total <= 0.0:
            shares = [COUNT[0] + COUNT[1]] * n
        else:
            scale = COUNT[1] * n / total
            shares = [COUNT[0] + scale * weight for weight in weights]
        likely, by = self._recall.observe(layer, experts, shares, is_asked=self._is_pressed)
        if likely:
            unit = self._recall_weight * self._units[layer]
            recent, get = self._recent[layer], self._counts[layer].get
            values, stale = self._values[layer], self._stale
            for expert, likelihood in zip(likely, by, strict=True):
                # Blocks that are neither here nor asked for now are read when they are asked for.
                if expert in recent:
                    recent[expert] += unit * likelihood
                elif expert in values:
                    recent[expert] = get(expert, 0.0) + unit * likelihood
                    stale[expert] = 0.0
