"""The block of lowest value leaves first: the queue under every policy that counts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from math import inf, log
from typing import Final

from .policy import Key

_SLACK: Final = 32
"""Outdated entries that a heap may hold beyond as many as there are blocks."""


class RankedPolicy(ABC):
    """Evicts the block whose `log(value) + offset of its layer` is lowest.

    Values, above 0, of one layer's blocks compare among themselves for as long as they are not set
    anew, so they must not drift apart with time: a subclass counts in units that grow instead of
    decaying what it counted. The offset brings all values of a layer to a common unit; changing
    it costs the same however many blocks the layer has.

    A heap of values for each layer, with entries that are outdated left in until they surface,
    and a heap of lower bounds of the layers. Values are taken into their heap only when a victim
    is wanted, so a store that evicts nothing pays for none of it. Amortised, O(log n) for each
    value set and each victim, `n` the blocks of a layer or the layers.

    With `quotas`, the `quotas[layer]` blocks of highest value are protected in each layer, and the
    layer that went beyond its quota first gives first. Without, nothing is protected.

    A block that is touched is kept as one that was read ahead: until its layer's next event, when
    it gets back its place if it was not asked for.
    """

    def __init__(self, n_layers: int, quotas: Sequence[int] | None = None) -> None:
        self._values: list[dict[int, float]] = [{} for _ in range(n_layers)]
        self._heaps: list[list[tuple[float, int]]] = [[] for _ in range(n_layers)]
        self._changed: list[set[int]] = [set() for _ in range(n_layers)]
        self._dirty: list[int] = []
        self._offsets = [0.0] * n_layers
        self._bounds = [inf] * n_layers
        self._queue: list[tuple[float, int]] = []
        self._quotas = None if quotas is None else tuple(quotas)
        self._surplus: OrderedDict[int, None] = OrderedDict()
        self._ahead: OrderedDict[Key, None] = OrderedDict()
        self._touched: dict[int, list[int]] = {}
        self._latest = -1
        self._is_observed = False

    @abstractmethod
    def seed(self, shares: Mapping[Key, float]) -> None: ...

    @abstractmethod
    def _visit(self, layer: int) -> None:
        """A new event of the layer begins."""

    @abstractmethod
    def _count(self, layer: int, experts: Sequence[int], weights: Sequence[float] | None) -> None:
        """The event asks for `experts`."""

    def _reprice(self, layer: int) -> None:  # noqa: B027  (nothing to do for most policies)
        """Blocks that are not in use get the values that the event gave them."""

    @abstractmethod
    def _value(self, layer: int, expert: int) -> float:
        """The value of a block, in or out of the policy."""

    def observe(
        self, layer: int, experts: Sequence[int], weights: Sequence[float] | None = None
    ) -> None:
        self._is_observed = True
        if layer in self._touched:
            self._settle(layer, experts)
        self._latest = layer
        self._visit(layer)
        self._count(layer, experts, weights)
        self._reprice(layer)

    def pin(self, key: Key) -> None:
        layer, expert = key
        values = self._values[layer]
        if expert in values:
            del values[expert]
            if self._quotas is not None:
                self._shrunk(layer)
        else:
            del self._ahead[key]

    def release(self, key: Key) -> None:
        layer, expert = key
        if not self._is_observed:
            # Its driver does not tell of events: a layer other than the one before begins one.
            if layer in self._touched:
                self._settle(layer, ())
            if layer != self._latest:
                self._latest = layer
                self._visit(layer)
            self._count(layer, (expert,), None)
            self._reprice(layer)
        self._set(layer, expert, self._value(layer, expert))

    def admit(self, key: Key) -> None:
        self._ahead[key] = None

    def expire(self, key: Key) -> None:
        if key in self._ahead:
            del self._ahead[key]
            layer, expert = key
            self._set(layer, expert, self._value(layer, expert))

    def touch(self, key: Key) -> None:
        layer, expert = key
        values = self._values[layer]
        if expert in values:
            del values[expert]
            self._ahead[key] = None
            self._touched.setdefault(layer, []).append(expert)
            if self._quotas is not None:
                self._shrunk(layer)

    def _settle(self, layer: int, experts: Sequence[int]) -> None:
        """Gives those that were touched and are not among `experts` their places back."""
        for expert in self._touched.pop(layer):
            if expert not in experts and (layer, expert) in self._ahead:
                del self._ahead[layer, expert]
                self._set(layer, expert, self._value(layer, expert))

    def victim(self, *, is_prefetch: bool) -> Key | None:
        if self._dirty:
            self._take_in()
        key = self._lowest() if self._quotas is None else self._lowest_surplus()
        if key is None and not is_prefetch and self._ahead:
            # The one read ahead last is needed last.
            return self._ahead.popitem()[0]
        return key

    def _set(self, layer: int, expert: int, value: float) -> None:
        """Gives a block that is not in use its value; it may have had another."""
        values, changed = self._values[layer], self._changed[layer]
        values[expert] = value
        if not changed:
            self._dirty.append(layer)
        changed.add(expert)
        if self._quotas is not None and len(values) > self._quotas[layer]:
            self._surplus[layer] = None

    def _set_all(self, layer: int, fresh: dict[int, float]) -> None:
        """As `_set` for blocks of a layer that all have a value already."""
        if fresh:
            changed = self._changed[layer]
            if not changed:
                self._dirty.append(layer)
            changed.update(fresh)
            self._values[layer].update(fresh)

    def _take_in(self) -> None:
        """Brings heaps and bounds to the values that were set."""
        for layer in self._dirty:
            values, heap, changed = self._values[layer], self._heaps[layer], self._changed[layer]
            n = len(values)
            if 4 * len(changed) < n and len(heap) + len(changed) <= 2 * n + _SLACK:
                for expert in changed:
                    if expert in values:
                        heappush(heap, (values[expert], expert))
            else:
                heap[:] = [(value, expert) for expert, value in values.items()]
                heapify(heap)
            changed.clear()
            entry = self._first(layer)
            if entry is not None:
                bound = log(entry[0]) + self._offsets[layer]
                if bound < self._bounds[layer]:
                    self._bounds[layer] = bound
                    heappush(self._queue, (bound, layer))
        self._dirty.clear()

    def _move(self, layer: int, offset: float) -> None:
        """Sets what all values of a layer are compared by beside themselves."""
        bound = self._bounds[layer]
        if bound < inf:
            bound += offset - self._offsets[layer]
            # Rounding must not lift the bound above the value it stands for.
            bound -= abs(bound) * 1e-12
            self._bounds[layer] = bound
            queue = self._queue
            heappush(queue, (bound, layer))
            if len(queue) > 4 * len(self._bounds) + _SLACK:
                queue[:] = [(b, i) for i, b in enumerate(self._bounds) if b < inf]
                heapify(queue)
        self._offsets[layer] = offset

    def _lowest(self) -> Key | None:
        queue, bounds = self._queue, self._bounds
        while queue:
            bound, layer = queue[0]
            if bound != bounds[layer]:
                heappop(queue)
                continue
            entry = self._first(layer)
            if entry is None:
                bounds[layer] = inf
                heappop(queue)
                continue
            actual = log(entry[0]) + self._offsets[layer]
            if actual > bound:
                bounds[layer] = actual
                heapreplace(queue, (actual, layer))
                continue
            return self._take(layer)
        return None

    def _lowest_surplus(self) -> Key | None:
        if not self._surplus:
            return None
        layer = next(iter(self._surplus))
        self._first(layer)
        key = self._take(layer)
        self._shrunk(layer)
        return key

    def _first(self, layer: int) -> tuple[float, int] | None:
        """The layer's lowest entry, after those that no longer hold."""
        heap, values = self._heaps[layer], self._values[layer]
        while heap:
            entry = heap[0]
            if values.get(entry[1]) == entry[0]:
                return entry
            heappop(heap)
        return None

    def _take(self, layer: int) -> Key:
        _, expert = heappop(self._heaps[layer])
        del self._values[layer][expert]
        return layer, expert

    def _shrunk(self, layer: int) -> None:
        if self._quotas is not None and len(self._values[layer]) <= self._quotas[layer]:
            self._surplus.pop(layer, None)
