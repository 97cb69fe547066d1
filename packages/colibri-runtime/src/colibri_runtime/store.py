"""Experts on demand: blocks of files, leased out of a pool of fixed size."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Final, Protocol, Self, cast

import numpy as np
from numpy.typing import NDArray

from colibri_format import UsageError

from .blocks import BlockSource, BlockTable
from .core import Core, CoreStats, Slots, check_experts
from .disk import DiskEngine, IoReport
from .fetch import Fetch, ReadyCallback, closed_error
from .native_core import NativeCore, native_core
from .passes import Passes
from .plain_core import PlainCore
from .policy import KeepAll, Key, Policy
from .policy_lru import LayerLru
from .pool import Pool
from .pool_plan import PoolPlan, SlotClass, plan_pool
from .prefetch import Predictor, PrefetchGate
from .store_part import StorePart
from .timeline import Timeline

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
        timeline: is told of every read and wait.

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
        timeline: Timeline | None = None,
    ) -> None:
        sources = source if isinstance(source, Sequence) else (source,)
        self._table = table = BlockTable(sources)
        _check_slots(table, pool, plan)
        self.slots = plan
        self.pool = pool
        self.history = history
        self._engine = engine
        make = make_policy or (lambda slots: LayerLru(slots.plan.quotas))
        policies = [
            KeepAll() if slots.plan.n_slots >= slots.n_blocks else make(slots)
            for slots in plan.classes
        ]
        self._n_blocks = sum(slots.n_blocks for slots in plan.classes)
        core: Core | None = None
        if clock is time.perf_counter_ns and (timeline is None or timeline.clock is clock):
            core = native_core(table, pool, engine, plan, policies, timeline)
        if core is None and timeline is not None:
            self._engine = engine = timeline.engine(engine)
        self._core = core = core or PlainCore(table, pool, engine, plan, policies, clock)
        self.stats: CoreStats = core.stats
        self._preload: deque[Key] = deque()
        self._clock = clock
        self._predictor = predictor
        self._targets = table.following(plan.prefetch_depth) if predictor is not None else ()
        self._passes = Passes(self.stats.total, plan.top_k, gate)
        self._look_ahead = plan.prefetch_depth
        if gate is not None:
            self._look_ahead = min(gate.depth, plan.prefetch_depth)
        self._n_open = plan.n_slots
        self._is_closed = False

    @property
    def io_report(self) -> IoReport:
        """How blocks are read, and why not directly where they are not."""
        return self._engine.report()

    @property
    def cache(self) -> Slots:
        """Who stands in which slot, to look at."""
        return self._core.cache

    @property
    def is_native(self) -> bool:
        """Whether C does the bookkeeping of slots and reads."""
        return not isinstance(self._core, PlainCore)

    @property
    def look_ahead(self) -> int:
        """Layers ahead whose experts are worth predicting and handing to `prefetch` now: 0 where
        the store predicts by itself, while it reads nothing ahead because that did not pay, and
        when every block is resident."""
        if self._predictor is not None or self._core.cache.n_resident >= self._n_blocks:
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
        self._check_open(layer)
        core, passes = self._core, self._passes
        layer = self._layer(layer)
        history, predictor = self.history, self._predictor
        if history is not None or predictor is not None:
            experts = list(dict.fromkeys(map(int, experts)))
        self._turn(layer)
        fetch = core.fetch(layer, experts)
        passes.last_layer = layer
        passes.n_asks_most = max(passes.n_asks_most, core.n_asked)
        if history is not None:
            history.observe(layer, cast(list[int], experts))
        if self._preload:
            self._continue_preload()
        if predictor is not None:
            predictor.observe(layer, cast(list[int], experts))
            for target in self._targets[layer][: self._look_ahead]:
                if predicted := predictor.predict(target):
                    core.prefetch(target, predicted)
        return fetch

    def native(self) -> NativeCore | None:
        """The core, where C may drive it: nothing in Python is to be told of single fetches."""
        core = self._core
        if self.history is not None or self._predictor is not None:
            return None
        return core if isinstance(core, NativeCore) else None

    @property
    def is_preloading(self) -> bool:
        """Whether fetches are to go on with what `preload` was told."""
        return bool(self._preload)

    def begin_pass(self, first: int, last: int) -> None:
        """One token is about to be fetched for, from layer `first` to `last`, by C.

        Raises:
            UsageError: `fetch-open` or `store-closed`.
        """
        self._check_open(first)
        self._turn(first)
        passes = self._passes
        passes.last_layer = last
        passes.n_asks_most = max(passes.n_asks_most, self.slots.top_k)

    def _check_open(self, layer: int) -> None:
        if self._is_closed:
            raise closed_error()
        core = self._core
        core.recover()
        if core.is_open:
            raise UsageError(
                "fetch-open",
                f"fetch of layer {layer}",
                f"the fetch of layer {core.layer} is still open",
                "one fetch at a time",
                "exhaust or close it first",
            )

    def _turn(self, layer: int) -> None:
        """Begins another pass, unless `layer` goes on with this one."""
        passes = self._passes
        if layer <= passes.last_layer or passes.last_layer < 0:
            passes.turn(self._clock(), self._core.ended_ns)
            if passes.gate is not None:
                self._look_ahead = min(passes.gate.depth, self.prefetch_depth)

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
        self._core.observe(self._layer(layer), experts, weights)

    def on_ready(self, callback: ReadyCallback | None) -> None:
        """Registers what `Fetch.run` calls with each block; None takes it back.

        For engines with kernels of their own: `run` calls it in the thread that called `run`,
        once for each block, what is resident first and then in order of arrival, and a lease ends
        when the callback returns. It must not fetch; it may `prefetch`.
        """
        self._core.callback = callback

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
        self._core.prefetch(self._layer(layer), experts, is_read=self._look_ahead > 0)

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
            check_experts(self._table, layer, [expert])
        self._preload.extend(wanted)
        self._continue_preload()

    @property
    def n_open(self) -> int:
        """Slots that are used: those that were planned, and those that are lent now."""
        return self._n_open

    def resize(self, n_open: int) -> None:
        """Uses the first `n_open` slots from now on, while no fetch is open.

        At least those that were planned, `slots.n_slots`, with which a store begins; at most
        `slots.n_lent` more. Blocks beyond are given up, and their memory goes back to the system
        before this returns; reads that are under way into it are waited for.

        Raises:
            UsageError: `bad-slots`, `fetch-open`, or `store-closed`.
        """
        if self._is_closed:
            raise closed_error()
        plan = self.slots
        if not plan.n_slots <= n_open <= plan.n_slots + plan.n_lent:
            raise UsageError(
                "bad-slots",
                "store",
                f"{n_open} slots were to be used",
                f"{plan.n_slots} to {plan.n_slots + plan.n_lent}",
            )
        self._core.recover()
        if self._core.is_open:
            raise UsageError(
                "fetch-open",
                "store",
                f"the fetch of layer {self._core.layer} is still open",
                "none while slots come and go",
                "exhaust or close it first",
            )
        if n_open == self._n_open:
            return
        if n_open > self._n_open:
            # First: whatever breaks this off, the core has no more than is written here.
            self._n_open = n_open
            self._core.resize(n_open)
            return
        self._core.resize(n_open)
        self.pool.give_back(n_open)
        self._n_open = n_open

    def part(self, number: int) -> StorePart:
        """The layers of source `number`, by that source's own numbers."""
        return StorePart(self, *self._table.span(number))

    def close(self) -> None:
        """Ends all reads and gives the pool back. Leases are void; closing again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        # The core first: an open fetch must not drive an engine whose closing was interrupted.
        self._core.shut()
        self._engine.close()
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

    def _layer(self, layer: int) -> int:
        number = int(layer)
        if not 0 <= number < self._table.n_layers:
            check_experts(self._table, number, ())
        return number

    def _continue_preload(self) -> None:
        core, preload = self._core, self._preload
        while preload and core.n_reads < PRELOADS_AT_ONCE and not core.n_pending:
            if not core.preload(preload.popleft()) and not core.cache.n_free:
                preload.clear()


def _check_slots(table: BlockTable, pool: Pool, plan: PoolPlan) -> None:
    needed = max((size for layer in table.census() for size in layer), default=0)
    largest = plan.classes[-1].slot_bytes
    expected = tuple(size for number, size in plan.shape for _ in range(number))
    if pool.sizes != expected or pool.n_lent != plan.n_lent or largest < needed:
        raise UsageError(
            "bad-slots",
            "store",
            f"a pool of {pool.n_slots} slots, {pool.n_lent} of them lent, the largest of "
            f"{pool.slot_bytes} bytes",
            f"the {len(expected)} slots that were planned, {plan.n_lent} of them lent, the largest "
            f"of at least {needed} bytes",
        )
