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
        self._touched: dict[int, list[int]] = {}

    def observe(
        self, layer: int, experts: Sequence[int], weights: Sequence[float] | None = None
    ) -> None:
        if layer in self._touched:
            self._settle(layer, experts)

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
        if layer in self._touched:
            self._settle(layer, ())
        protected = self._protected[layer]
        protected[expert] = None
        if len(protected) > self._quotas[layer]:
            oldest, _ = protected.popitem(last=False)
            self._surplus[(layer, oldest)] = None

    def admit(self, key: Key) -> None:
        self._ahead[key] = None

    def touch(self, key: Key) -> None:
        # What is protected stays, and what waits does already.
        if key in self._surplus:
            del self._surplus[key]
            self._ahead[key] = None
            self._touched.setdefault(key[0], []).append(key[1])

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

    def _settle(self, layer: int, experts: Sequence[int]) -> None:
        """Those that were touched and are not among `experts` are surplus again, used last."""
        for expert in self._touched.pop(layer):
            key = (layer, expert)
            if expert not in experts and key in self._ahead:
                del self._ahead[key]
                self._surplus[key] = None


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
        if key[0] in self._touched:
            self._settle(key[0], ())
        self._surplus[key] = None
