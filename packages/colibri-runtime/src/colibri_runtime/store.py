"""Experts on demand: blocks of files, leased out of a pool of fixed size."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from colibri_format import UsageError

from .blocks import BlockSource, BlockTable
from .cache import Cache
from .disk import DiskEngine, IoReport
from .fetch import CurrentFetch, Fetch, ReadyCallback, closed_error
from .passes import Passes
from .policy import KeepAll, Key, Policy, fuse_tokens
from .policy_lru import LayerLru
from .pool import Pool
from .pool_plan import PoolPlan, SlotClass, plan_pool
from .prefetch import Predictor, PrefetchGate
from .stats import Stats
from .store_part import StorePart
from .traffic import Traffic

PRELOADS_AT_ONCE: Final = 4
"""Blocks read at once to fill free slots: they are queued as prefetches, behind all else."""


class HistoryCounter(Protocol):
    """Counts what is asked for; `history.History` is one."""

    def observe(self, layer: int, experts: Sequence[int]) -> None:
        """`experts` of `layer` were asked for together, each once."""


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
        make_policy: the policy of one class of slots, where these are fewer than its blocks;
            default `LayerLru`.
        history: is told of each fetch; None keeps none.
        predictor: after each fetch says what to read ahead; None leaves that to `prefetch`.
        gate: decides by trial whether to read ahead at all; None always does.
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
        history: HistoryCounter | None = None,
        predictor: Predictor | None = None,
        gate: PrefetchGate | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        sources = source if isinstance(source, Sequence) else (source,)
        self._table = table = BlockTable(sources)
        _check_slots(table, pool, plan)
        self.slots = plan
        self.pool = pool
        self.history = history
        self.stats = Stats(table.n_layers)
        self._engine = engine
        make = make_policy or (lambda slots: LayerLru(slots.plan.quotas))
        policies = [
            KeepAll() if slots.plan.n_slots >= slots.n_blocks else make(slots)
            for slots in plan.classes
        ]
        self._n_blocks = sum(slots.n_blocks for slots in plan.classes)
        self._observers = _observers(policies, plan, table.n_layers)
        self._observed = -1
        self._preload: deque[Key] = deque()
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
        self._clock = clock
        self._predictor = predictor
        self._targets = table.following(plan.prefetch_depth) if predictor is not None else ()
        self._passes = Passes(self.stats.total, plan.top_k, gate)
        self._look_ahead = plan.prefetch_depth
        if gate is not None:
            self._look_ahead = min(gate.depth, plan.prefetch_depth)
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
        """Layers ahead whose experts are worth predicting and handing to `prefetch` now: 0 where
        the store predicts by itself, while it reads nothing ahead because that did not pay, and
        when every block is resident."""
        if self._predictor is not None or self._cache.n_resident >= self._n_blocks:
            return 0
        return self._look_ahead

    @property
    def prefetch_depth(self) -> int:
        """Layers ahead that may be read at most."""
        return self.slots.prefetch_depth

    @property
    def passes(self) -> Passes:
        """What the last tokens did, one by one."""
        return self._passes

    def plan(self, budget_bytes: int, counts: NDArray[np.floating] | None = None) -> PoolPlan:
        """The pool that this store's blocks would have within `budget_bytes`; changes nothing.

        With `counts[layer, expert]`, how often each was asked for, it says what share of hits is
        to be expected.

        Raises:
            BudgetError: `budget-too-small`, with the least that works.
        """
        slots = self.slots
        return plan_pool(
            budget_bytes,
            self._table.census(),
            top_k=slots.top_k,
            prefetch_depth=slots.prefetch_depth,
            counts=counts,
        )

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
        asked = list(dict.fromkeys(map(int, experts)))
        cache = self._cache
        resident = cache.row(layer)
        missing = [expert for expert in asked if expert not in resident]
        if missing or not asked:
            self._check(layer, missing)
        passes = self._passes
        if layer <= passes.last_layer or passes.last_layer < 0:
            passes.turn(self._clock(), current.ended_ns)
            if passes.gate is not None:
                self._look_ahead = min(passes.gate.depth, self.prefetch_depth)
        passes.last_layer = layer
        passes.n_asks_most = max(passes.n_asks_most, len(asked))
        if layer != self._observed:
            for observe in self._observers[layer]:
                observe(layer, asked)
        self._observed = -1
        if self.history is not None:
            self.history.observe(layer, asked)
        if self._traffic.predicted:
            self._settle(layer, asked)
        there = [expert for expert in asked if expert in resident] if missing else asked
        if cache.has_unused:
            self.stats.layers[layer].n_prefetch_used += cache.take_unused(layer, there)
        fetch = current.open(layer, cache.pin_all(layer, there), missing)
        if self._preload:
            self._continue_preload()
        if self._predictor is not None:
            self._predictor.observe(layer, asked)
            for target in self._targets[layer][: self._look_ahead]:
                if predicted := self._predictor.predict(target):
                    self._read_ahead(target, predicted)
        return fetch

    def observe(
        self,
        layer: int,
        experts: NDArray[np.integer],
        weights: NDArray[np.floating] | None = None,
    ) -> None:
        """Tells policies how tokens were routed, just before the layer is fetched.

        May be left out: then they know which experts were asked for, but not how much they weigh.

        `experts` and `weights` (None: all alike) are `(n_tokens, top_k)`, best first.
        """
        if self._is_closed:
            raise closed_error()
        self._check(layer, ())
        if not self._observers[layer]:
            return
        asked, shares = fuse_tokens(experts, weights)
        for observe in self._observers[layer]:
            observe(layer, asked, shares)
        self._observed = layer

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
        layer = int(layer)
        wanted = list(dict.fromkeys(map(int, experts)))
        resident = self._cache.row(layer)
        self._check(layer, [expert for expert in wanted if expert not in resident])
        if self._look_ahead:
            self._read_ahead(layer, wanted)

    def preload(self, keys: Iterable[Key]) -> None:
        """Fills slots that are free with blocks that are likely wanted, `(layer, expert)` each, the
        likeliest first, while nothing else is to be read.

        Reads go on at later fetches. They evict nothing and end with the last free slot.

        Raises:
            UsageError: `no-such-expert` or `store-closed`.
        """
        if self._is_closed:
            raise closed_error()
        wanted = [(int(layer), int(expert)) for layer, expert in keys]
        for layer, expert in wanted:
            self._check(layer, [expert])
        self._preload.extend(wanted)
        self._continue_preload()

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

    def _read_ahead(self, layer: int, experts: Sequence[int]) -> None:
        traffic = self._traffic
        wanted = frozenset(experts)
        for expert in traffic.predicted.get(layer, wanted) - wanted:
            traffic.cancel_ahead((layer, expert))
        if wanted:
            traffic.predicted[layer] = wanted
        else:
            traffic.predicted.pop(layer, None)
        resident = self._cache.row(layer)
        # Before anything is evicted for the others.
        self._cache.touch_all(layer, [expert for expert in experts if expert in resident])
        n_submitted = 0
        for expert in experts:
            key = (layer, expert)
            if expert not in resident and key not in traffic.reads:
                if self._submit_ahead(key):
                    n_submitted += 1
                else:
                    self.stats.layers[layer].n_prefetch_dropped += 1
        if n_submitted:
            traffic.flush()

    def _continue_preload(self) -> None:
        traffic, preload = self._traffic, self._preload
        n_submitted = 0
        while preload and len(traffic.reads) < PRELOADS_AT_ONCE and not self._current.pending:
            key = preload.popleft()
            if key in self._cache or key in traffic.reads:
                continue
            slot = self._cache.claim_free(key)
            if slot is not None:
                self._current.forget_lease(slot)
                # Not predicted, so that it waits for no fetch: it lands as one read in vain.
                traffic.submit(key, slot, is_prefetch=True)
                n_submitted += 1
            elif not self._cache.n_free:
                preload.clear()
        if n_submitted:
            traffic.flush()

    def _submit_ahead(self, key: Key) -> bool:
        number = self._class(key)
        traffic = self._traffic
        n_ahead = len(traffic.ahead)
        if len(self.slots.classes) > 1:
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


def _observers(
    policies: Sequence[Policy], plan: PoolPlan, n_layers: int
) -> list[list[Callable[..., None]]]:
    """For each layer, what the policies that hold blocks of it are told routing by."""
    found: list[list[Callable[..., None]]] = [[] for _ in range(n_layers)]
    for policy, slots in zip(policies, plan.classes, strict=True):
        for layer, n_blocks in enumerate(slots.blocks_per_layer):
            if n_blocks and not isinstance(policy, KeepAll):
                found[layer].append(policy.observe)
    return found


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
