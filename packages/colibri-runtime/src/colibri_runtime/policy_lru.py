"""Least recently used first: over all layers together, or within each layer's quota."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from .policy import Key


class LayerLru:
    """Least recently used first, within each layer's own quota.

    The `quotas[layer]` blocks of a layer that were used last are protected. Those beyond are
    surplus: still resident, and hits when asked for, but evicted when a slot is wanted, the one
    that became surplus first leaving first. A single LRU over all layers would evict each block
    just before its layer comes round again once a token's blocks outnumber the slots.
    """

    def __init__(self, quotas: Sequence[int]) -> None:
        self._quotas = tuple(quotas)
        self._protected: tuple[OrderedDict[int, None], ...] = tuple(OrderedDict() for _ in quotas)
        self._surplus: OrderedDict[Key, None] = OrderedDict()
        self._ahead: OrderedDict[Key, None] = OrderedDict()

    def observe(
        self, layer: int, experts: Sequence[int], weights: Sequence[float] | None = None
    ) -> None:
        """Nothing: use alone counts."""

    def seed(self, shares: Mapping[Key, float]) -> None:
        """Nothing: what was used in another run is not recent."""

    def pin(self, key: Key) -> None:
        layer, expert = key
        protected = self._protected[layer]
        if expert in protected:
            del protected[expert]
        elif key in self._surplus:
            del self._surplus[key]
        else:
            del self._ahead[key]

    def release(self, key: Key) -> None:
        layer, expert = key
        protected = self._protected[layer]
        protected[expert] = None
        if len(protected) > self._quotas[layer]:
            oldest, _ = protected.popitem(last=False)
            self._surplus[(layer, oldest)] = None

    def admit(self, key: Key) -> None:
        self._ahead[key] = None

    def touch(self, key: Key) -> None:
        if key in self._surplus:
            self._surplus.move_to_end(key)

    def expire(self, key: Key) -> None:
        if key in self._ahead:
            del self._ahead[key]
            # Never used: less is known for it than for any block that was.
            self._surplus[key] = None
            self._surplus.move_to_end(key, last=False)

    def victim(self, *, is_prefetch: bool) -> Key | None:
        if self._surplus:
            return self._surplus.popitem(last=False)[0]
        if not is_prefetch and self._ahead:
            # The one read ahead last is needed last.
            return self._ahead.popitem()[0]
        return None


class GlobalLru(LayerLru):
    """Least recently used first, whatever its layer: `LayerLru` that protects nothing."""

    def __init__(self, n_layers: int) -> None:
        super().__init__((0,) * n_layers)

    def pin(self, key: Key) -> None:
        if key in self._surplus:
            del self._surplus[key]
        else:
            del self._ahead[key]

    def release(self, key: Key) -> None:
        self._surplus[key] = None
