"""Experts on demand: blocks of files, leased out of a pool of fixed size."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from colibri_format import UsageError

from .blocks import BlockSource, BlockTable
from .cache import Cache
from .disk import DiskEngine, IoReport
from .fetch import CurrentFetch, Fetch, ReadyCallback, closed_error
from .policy import Key, Policy, fuse_tokens
from .policy_lru import LayerLru
from .pool import Pool
from .pool_plan import PoolPlan, SlotClass
from .stats import Stats
from .traffic import Traffic


class Store:
    """Gives out leases of expert blocks, reading those that are not resident.

    Owns `pool` and `engine` and closes them; the sources stay the caller's. One thread uses a
    store, and one fetch is open at a time. Several sources share its pool and engine: their
    layers are numbered through, and `part` gives a view with a source's own numbers.

    Nothing waits for ever. A fetch that lacks a slot of some class finds one because the plan
    keeps at least one slot of each class out of every layer's quota (`SlotPlan`), and a slot out
    of quota is free or surplus (taken at once), read ahead (taken likewise), queued as prefetch
    (cancelled and taken), being read (comes back from the engine, which gives back every read it
    began), or leased or about to be leased to this same fetch, whose next step releases it. The
    last is why a second fetch beside an open one is refused.

    Args:
        source: what is read, or several.
        pool: cut as `plan` says.
        engine: reads from the sources' files, in the order of `block_files`.
        plan: which slots there are, and how they are shared out.
        make_policy: the policy of one class of slots; default `LayerLru`.
        clock: nanoseconds.

    Raises:
        UsageError: `bad-slots` when pool and plan differ, or the plan holds not every block;
            `no-source`, `no-such-volume`.
    """

    def __init__(
        self,
        source: BlockSource | Sequence[BlockSource],
        pool: Pool,
        engine: DiskEngine,
        plan: PoolPlan,
        *,
        make_policy: Callable[[SlotClass], Policy] | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        sources = source if isinstance(source, Sequence) else (source,)
        self._table = table = BlockTable(sources)
        _check_slots(table, pool, plan)
        self.slots = plan
        self.pool = pool
        self.stats = Stats(table.n_layers)
        self._engine = engine
        make = make_policy or (lambda slots: LayerLru(slots.plan.quotas))
        policies = [make(slots) for slots in plan.classes]
        self._policies = policies
        class_of = self._class_of if len(plan.classes) > 1 else _only_class
        sizes = [slots.plan.n_slots for slots in plan.classes]
        self._cache = Cache(
            sizes[0],
            policies[0],
            self._count_waste,
            further=list(zip(sizes[1:], policies[1:], strict=True)),
            class_of=class_of,
        )
        self._traffic = Traffic(table, pool, self._cache, engine, self.stats.layers)
        self._current = CurrentFetch(
            table, pool, self._cache, self._traffic, self.stats, class_of, clock
        )
        self._class = class_of
        self._is_closed = False

    @property
    def io_report(self) -> IoReport:
        """How blocks are read, and why not directly where they are not."""
        return self._engine.report()

    @property
    def cache(self) -> Cache:
        """Who stands in which slot, to look at."""
        return self._cache

    @property
    def look_ahead(self) -> int:
        """Layers ahead whose experts are worth predicting and handing to `prefetch` now."""
        return self.slots.prefetch_depth

    def fetch(self, layer: int, experts: Iterable[int] | NDArray[np.integer]) -> Fetch:
        """Leases of `experts`, each once, in order of arrival.

        Reads of what is missing are submitted before this returns. What is resident comes first,
        the rest as it arrives. More experts than there are slots are read in rounds, as leases
        are given back.

        Raises:
            UsageError: `no-such-expert`, `fetch-open` while the previous fetch is neither
                exhausted nor closed, or `store-closed`.
        """
        if self._is_closed:
            raise closed_error()
        current = self._current
        if current.is_open:
            raise UsageError(
                "fetch-open",
                f"fetch of layer {layer}",
                f"the fetch of layer {current.layer} is still open",
                "one fetch at a time",
                "exhaust or close it first",
            )
        # Plain ints, each once, in the order given: NumPy's own would hash and print differently.
        layer = int(layer)
        wanted = dict.fromkeys(map(int, experts))
        if self._traffic.reads:
            current.harvest()
        cache = self._cache
        missing = [expert for expert in wanted if (layer, expert) not in cache]
        if missing or not wanted:
            self._check(layer, missing)
        if self._traffic.predicted:
            self._settle(layer, wanted)
        for expert in missing:
            del wanted[expert]
        if cache.has_unused:
            self.stats.layers[layer].n_prefetch_used += cache.take_unused(layer, wanted)
        slots = cache.pin_all(layer, wanted)
        return current.open(layer, slots, missing)

    def observe(
        self, layer: int, experts: NDArray[np.integer], weights: NDArray[np.float32] | None
    ) -> None:
        """Tells policies that want to know how tokens were routed, before the layer is fetched.

        `experts` and `weights` (None: all alike) are `(n_tokens, top_k)`, best first.
        """
        chosen, totals = fuse_tokens(experts, weights)
        for policy in self._policies:
            policy.observe(layer, chosen, totals)

    def on_ready(self, callback: ReadyCallback | None) -> None:
        """Registers what `Fetch.run` calls with each block; None takes it back.

        For engines with kernels of their own: `run` calls it in the thread that called `run`,
        once for each block, what is resident first and then in order of arrival, and a lease ends
        when the callback returns. It must not fetch; it may `prefetch`.
        """
        self._current.callback = callback

    def prefetch(self, layer: int, experts: Iterable[int] | NDArray[np.integer]) -> None:
        """Begins to read those of `experts` that are not resident, if that costs no demand.

        A hint, of which any part may be dropped: when the open fetch still lacks slots, when
        as many blocks as the plan allows were read ahead and not yet asked for, or when only
        protected blocks could make room. Reads wait behind demands; those still queued when
        `layer` is fetched without them, or predicted otherwise, are cancelled. A read that fails
        is forgotten: a later demand reads again and reports.

        Raises:
            UsageError: `no-such-expert` or `store-closed`.
        """
        if self._is_closed:
            raise closed_error()
        wanted = list(dict.fromkeys(map(int, experts)))
        self._check(layer, wanted)
        traffic = self._traffic
        if traffic.reads:
            self._current.harvest()
        for expert in traffic.predicted.get(layer, frozenset()).difference(wanted):
            traffic.cancel_ahead((layer, expert))
        traffic.predicted[layer] = frozenset(wanted)
        n_submitted = 0
        for expert in wanted:
            key = (layer, expert)
            if key in self._cache:
                self._cache.touch(key)
            elif key not in traffic.reads:
                if self._submit_ahead(key):
                    n_submitted += 1
                else:
                    self.stats.layers[layer].n_prefetch_dropped += 1
        if n_submitted:
            traffic.flush()

    def part(self, number: int) -> StorePart:
        """The layers of source `number`, by that source's own numbers."""
        return StorePart(self, *self._table.span(number))

    def close(self) -> None:
        """Ends all reads and gives the pool back. Leases are void; closing again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._engine.close()
        self._current.shut()
        self._traffic.clear()
        self.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _class_of(self, key: Key) -> int:
        return self.slots.class_of_bytes(self._table.padded_bytes(*key))

    def _check(self, layer: int, experts: Sequence[int]) -> None:
        table = self._table
        is_layer = 0 <= layer < table.n_layers
        absent = [e for e in experts if not table.has(layer, e)]
        if absent or not is_layer:
            raise UsageError(
                "no-such-expert",
                f"layer {layer}",
                f"has no experts {absent}",
                f"layers 0 to {table.n_layers - 1} and experts that the index holds",
            )

    def _settle(self, layer: int, wanted: Iterable[int]) -> None:
        """Compares what was predicted for `layer` with what is wanted of it."""
        predicted = self._traffic.predicted.pop(layer, None)
        if predicted is None:
            return
        wanted = set(wanted)
        stats = self.stats.layers[layer]
        stats.n_predicted += len(predicted)
        stats.n_foretold += len(wanted)
        stats.n_recalled += len(predicted & wanted)
        for expert in predicted - wanted:
            if not self._traffic.cancel_ahead((layer, expert)):
                self._cache.expire((layer, expert))

    def _submit_ahead(self, key: Key) -> bool:
        number = self._class(key)
        traffic = self._traffic
        n_ahead = sum(self._class(other) == number for other in traffic.ahead)
        n_ahead += self._cache.n_waiting_in(number)
        if n_ahead >= self.slots.classes[number].plan.n_prefetch or self._current.pending:
            return False
        slot = self._cache.claim(key, is_prefetch=True)
        if slot is None:
            return False
        self._current.forget_lease(slot)
        traffic.submit(key, slot, is_prefetch=True)
        return True

    def _count_waste(self, key: Key) -> None:
        stats = self.stats.layers[key[0]]
        stats.n_prefetch_wasted += 1
        stats.wasted_bytes += self._table.padded_bytes(*key)


class StorePart:
    """The layers of one source in a store that several share; `fetch` and so on as there."""

    def __init__(self, store: Store, first_layer: int, n_layers: int) -> None:
        self.store = store
        self.first_layer = first_layer
        self.n_layers = n_layers

    @property
    def look_ahead(self) -> int:
        """As `Store.look_ahead`."""
        return self.store.look_ahead

    def fetch(self, layer: int, experts: Iterable[int] | NDArray[np.integer]) -> Fetch:
        """As `Store.fetch`; leases and statistics count layers through all sources."""
        return self.store.fetch(self._layer(layer), experts)

    def observe(
        self, layer: int, experts: NDArray[np.integer], weights: NDArray[np.float32] | None
    ) -> None:
        """As `Store.observe`."""
        self.store.observe(self._layer(layer), experts, weights)

    def prefetch(self, layer: int, experts: Iterable[int] | NDArray[np.integer]) -> None:
        """As `Store.prefetch`."""
        self.store.prefetch(self._layer(layer), experts)

    def _layer(self, layer: int) -> int:
        if not 0 <= layer < self.n_layers:
            raise UsageError(
                "no-such-expert",
                f"layer {layer}",
                "is not in this source",
                f"layers 0 to {self.n_layers - 1}",
            )
        return self.first_layer + layer


def _only_class(key: Key) -> int:
    return 0


def _check_slots(table: BlockTable, pool: Pool, plan: PoolPlan) -> None:
    needed = max((size for layer in table.census() for size in layer), default=0)
    largest = plan.classes[-1].slot_bytes
    expected = tuple(size for number, size in plan.shape for _ in range(number))
    if pool.sizes != expected or largest < needed:
        raise UsageError(
            "bad-slots",
            "store",
            f"a pool of {pool.n_slots} slots, the largest of {pool.slot_bytes} bytes",
            f"the {plan.n_slots} slots that were planned, the largest of at least {needed} bytes",
        )
