"""Experts on demand: blocks of a file, leased one at a time out of a pool of fixed size."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from colibri_format import Layout, Role, UsageError

from .blocks import BlockSource, block_slot_bytes, plan_read
from .cache import Cache
from .disk import BlockRead, DiskEngine, IoReport
from .policy import Key, LayerLru, Policy
from .pool import Pool
from .slots import SlotPlan
from .stats import Stats


@dataclass(slots=True, eq=False)
class Lease:
    """The right to read a block until the iterator that gave it is advanced or closed.

    `segments` are read-only `(n_bytes,) uint8` views into the slot, one for each segment of
    `layout`, each starting at a multiple of 64 bytes. Afterwards the same memory may hold another
    block: keep results, never views.
    """

    layer: int
    expert: int
    layout: Layout
    segments: Mapping[Role, NDArray[np.uint8]]


def _closed() -> UsageError:
    return UsageError("store-closed", "store", "is closed", "an open store")


@dataclass(slots=True, eq=False)
class _Fetch:
    """An open fetch: what is ready to lease, being read, and not yet asked of the disk."""

    layer: int
    ready: deque[Key] = field(default_factory=deque)
    outstanding: set[Key] = field(default_factory=set)
    pending: deque[Key] = field(default_factory=deque)
    leased: Key | None = None
    error: Exception | None = None


class Store:
    """Gives out leases of expert blocks, reading those that are not resident.

    Owns `pool` and `engine` and closes them; `source` stays the caller's. One thread uses a
    store, and one fetch is open at a time.

    Nothing waits for ever. A fetch that lacks a slot finds one because the plan keeps at least
    one slot out of every layer's quota (`SlotPlan`), and a slot out of quota is free or surplus
    (taken at once), read ahead (taken likewise), queued as prefetch (cancelled and taken), being
    read (comes back from the engine, which gives back every read it began), or leased or about to
    be leased to this same fetch, whose advance releases it. The last is why a second fetch
    beside an open one is refused.

    Raises:
        UsageError: `bad-slots` when the pool is smaller than the plan or the blocks need.
    """

    def __init__(
        self,
        source: BlockSource,
        pool: Pool,
        engine: DiskEngine,
        plan: SlotPlan,
        *,
        policy: Policy | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        slot_bytes = block_slot_bytes(source)
        if pool.n_slots < plan.n_slots or pool.slot_bytes < slot_bytes:
            raise UsageError(
                "bad-slots",
                "store",
                f"a pool of {pool.n_slots} slots of {pool.slot_bytes} bytes",
                f"{plan.n_slots} slots of {slot_bytes} bytes",
            )
        self.plan = plan
        self.pool = pool
        self.stats = Stats(source.geometry.n_layers)
        self._source = source
        self._engine = engine
        self._clock = clock
        self._layouts = [source.layout(i) for i in range(source.geometry.n_layers)]
        self._is_present = source.index["size"] > 0
        self._cache = Cache(plan.n_slots, policy or LayerLru(plan.quotas), self._count_waste)
        self._reads: dict[Key, BlockRead] = {}
        self._ahead: dict[Key, BlockRead] = {}
        self._promoted: set[Key] = set()
        self._predicted: dict[int, frozenset[int]] = {}
        self._open: _Fetch | None = None
        self._is_closed = False

    @property
    def io_report(self) -> IoReport:
        """How blocks are read, and why not directly where they are not."""
        return self._engine.report()

    @property
    def cache(self) -> Cache:
        """Who stands in which slot, to look at."""
        return self._cache

    def fetch(self, layer: int, experts: Sequence[int]) -> Generator[Lease, None, None]:
        """An iterator that gives a lease of each of `experts` once, in order of arrival.

        Reads of what is missing are submitted before this returns. What is resident comes first,
        the rest as it arrives. More experts than there are slots are read in rounds, as leases
        are given back. Closing the iterator early, or dropping it, gives everything back.

        Raises:
            UsageError: `no-such-expert`, `fetch-open` while the previous fetch is neither
                exhausted nor closed, or `store-closed`.
            FormatError: (while iterating) `block-checksum`.
            StorageError: (while iterating) `short-read`, or what the kernel said.
        """
        wanted = self._checked(layer, experts)
        if self._open is not None:
            raise UsageError(
                "fetch-open",
                f"fetch of layer {layer}",
                f"the fetch of layer {self._open.layer} is still open",
                "one fetch at a time",
                "exhaust or close it first",
            )
        self._harvest()
        self._open = state = _Fetch(layer)
        leases = self._leases(state)
        # Run up to its first yield, so that closing it, however early, gives everything back.
        next(leases)
        self._ask(state, wanted)
        return leases

    def prefetch(self, layer: int, experts: Sequence[int]) -> None:
        """Begins to read those of `experts` that are not resident, if that costs no demand.

        A hint, of which any part may be dropped: when the open fetch still lacks slots, when
        `plan.n_prefetch` blocks were read ahead and not yet asked for, or when only protected
        blocks could make room. Reads wait behind demands; those still queued when `layer` is
        fetched without them, or predicted otherwise, are cancelled. A read that fails is
        forgotten: a later demand reads again and reports.

        Raises:
            UsageError: `no-such-expert` or `store-closed`.
        """
        wanted = self._checked(layer, experts)
        self._harvest()
        for expert in self._predicted.get(layer, frozenset()).difference(wanted):
            self._cancel_ahead((layer, expert))
        self._predicted[layer] = frozenset(wanted)
        for expert in wanted:
            key = (layer, expert)
            if key in self._cache:
                self._cache.touch(key)
            elif key not in self._reads and not self._submit_ahead(key):
                self.stats.layers[layer].n_prefetch_dropped += 1

    def close(self) -> None:
        """Ends all reads and gives the pool back. Leases are void; closing again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._engine.close()
        self._open = None
        self._reads.clear()
        self._ahead.clear()
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

    def _checked(self, layer: int, experts: Sequence[int]) -> list[int]:
        if self._is_closed:
            raise _closed()
        # Plain ints, each once, in the order given: NumPy's own would hash and print differently.
        wanted = list(dict.fromkeys(map(int, experts)))
        n_layers, n_experts = self._is_present.shape
        is_layer = 0 <= layer < n_layers
        present = self._is_present[layer] if is_layer else self._is_present[:0]
        absent = [e for e in wanted if not (is_layer and 0 <= e < n_experts and present[e])]
        if absent or not is_layer:
            raise UsageError(
                "no-such-expert",
                f"layer {layer}",
                f"has no experts {absent}",
                f"layers 0 to {n_layers - 1} and experts that the index holds",
            )
        return wanted

    def _ask(self, state: _Fetch, wanted: Sequence[int]) -> None:
        """Sorts what is wanted into hits, lates and misses, and submits the misses."""
        layer = state.layer
        stats = self.stats.layers[layer]
        stats.n_fetches += 1
        predicted = self._predicted.pop(layer, None)
        for expert in wanted:
            key = (layer, expert)
            if self._cache.pin(key) is not None:
                stats.n_hits += 1
                stats.n_prefetch_used += self._cache.take_unused(key)
                state.ready.append(key)
            elif (read := self._reads.get(key)) is not None:
                stats.n_lates += 1
                state.outstanding.add(key)
                if self._ahead.pop(key, None) is not None:
                    self._promoted.add(key)
                    self._engine.promote(read)
            else:
                stats.n_misses += 1
                state.pending.append(key)
        if predicted is not None:
            stats.n_predicted += len(predicted)
            stats.n_foretold += len(wanted)
            stats.n_recalled += len(predicted.intersection(wanted))
            for expert in predicted.difference(wanted):
                if not self._cancel_ahead((layer, expert)):
                    self._cache.expire((layer, expert))
        self._submit_pending(state)

    def _leases(self, state: _Fetch) -> Generator[Lease, None, None]:
        try:
            yield None  # type: ignore[misc]  # taken by fetch(), which starts this generator
            stats = self.stats.layers[state.layer]
            while True:
                while not state.ready:
                    if state.error is not None:
                        raise state.error
                    if not state.outstanding and not state.pending:
                        return
                    self._wait(state)
                state.leased = state.ready.popleft()
                lease = self._lease(state.leased)
                given = self._clock()
                yield lease
                stats.compute_ns += self._clock() - given
                if self._open is not state:
                    raise _closed()
                del lease
                self._cache.release(state.leased)
                state.leased = None
                self._submit_pending(state)
        finally:
            self._end(state)

    def _lease(self, key: Key) -> Lease:
        layer, expert = key
        slot = self._cache.slot_of(key)
        layout = self._layouts[layer]
        if slot is None or layout is None:
            raise UsageError("no-such-expert", f"layer {layer}", f"no expert {expert}", "a block")
        view = self.pool.view(slot)
        segments = {s.role: view[s.offset : s.offset + s.size] for s in layout.segments}
        return Lease(layer, expert, layout, segments)

    def _wait(self, state: _Fetch) -> None:
        """Blocks until a read comes back, any read: it may free the slot that is lacking."""
        if not self._reads:
            raise UsageError(
                "no-slot",
                f"fetch of layer {state.layer}",
                "no slot can be had and no read is under way",
                "a policy that gives up what is beyond its quotas",
            )
        started = self._clock()
        try:
            self._harvest(wait=True)
        finally:
            self.stats.layers[state.layer].stall_ns += self._clock() - started
        self._submit_pending(state)

    def _end(self, state: _Fetch) -> None:
        """Gives back what an ended fetch still holds; reads that have begun land by themselves."""
        if self._open is not state:
            return
        self._open = None
        if state.leased is not None:
            self._cache.release(state.leased)
        for key in state.ready:
            self._cache.release(key)
        for key in state.outstanding:
            if self._engine.cancel(self._reads[key]):
                self._forget(key)

    def _submit_pending(self, state: _Fetch) -> None:
        while state.pending:
            key = state.pending[0]
            slot = self._cache.claim(key)
            if slot is None:
                # Newest first: it is needed last. A prefetch that has begun cannot be called off.
                if any(self._cancel_ahead(other) for other in reversed(list(self._ahead))):
                    continue
                return
            state.pending.popleft()
            state.outstanding.add(key)
            self._submit(key, slot, is_prefetch=False)

    def _submit_ahead(self, key: Key) -> bool:
        is_full = len(self._ahead) + self._cache.n_waiting >= self.plan.n_prefetch
        if is_full or (self._open is not None and self._open.pending):
            return False
        slot = self._cache.claim(key, is_prefetch=True)
        if slot is None:
            return False
        self._ahead[key] = self._submit(key, slot, is_prefetch=True)
        return True

    def _submit(self, key: Key, slot: int, *, is_prefetch: bool) -> BlockRead:
        read = plan_read(self._source, *key, slot=slot, buffer=self.pool.slot(slot))
        read.is_prefetch = is_prefetch
        self._reads[key] = read
        self._engine.submit(read)
        return read

    def _cancel_ahead(self, key: Key) -> bool:
        """Whether `key` was a prefetch that had not begun, and is none any more."""
        read = self._ahead.get(key)
        if read is None or not self._engine.cancel(read):
            return False
        self._forget(key)
        self.stats.layers[key[0]].n_prefetch_cancelled += 1
        return True

    def _count_waste(self, key: Key) -> None:
        self.stats.layers[key[0]].n_prefetch_wasted += 1

    def _forget(self, key: Key) -> None:
        del self._reads[key]
        self._ahead.pop(key, None)
        self._promoted.discard(key)
        self._cache.abandon(key)

    def _harvest(self, *, wait: bool = False) -> None:
        """Takes in the reads that are done; with `wait`, at least one."""
        for read in self._engine.wait() if wait else self._engine.poll():
            self._take(read)

    def _take(self, read: BlockRead) -> None:
        key = (read.layer, read.expert)
        stats = self.stats.layers[read.layer]
        is_ahead = key in self._ahead
        is_prefetch = is_ahead or key in self._promoted
        stats.read_ns += read.read_ns
        stats.checksum_ns += read.checksum_ns
        stats.n_rereads += read.n_rereads
        if is_prefetch:
            stats.prefetch_bytes += read.n_bytes
        else:
            stats.demand_bytes += read.n_bytes
        if read.error is not None:
            self._fail(key, read, is_prefetch=is_prefetch)
            return
        del self._reads[key]
        stats.n_prefetched += is_prefetch
        if is_ahead:
            del self._ahead[key]
            self._cache.land_ahead(key)
            if key[1] not in self._predicted.get(key[0], ()):
                self._cache.expire(key)
            return
        self._promoted.discard(key)
        stats.n_prefetch_used += is_prefetch
        self._cache.land(key)
        state = self._open
        if state is not None and key in state.outstanding:
            state.outstanding.remove(key)
            state.ready.append(key)
        else:
            # Its fetch was closed meanwhile: the block is good and was paid for.
            self._cache.release(key)

    def _fail(self, key: Key, read: BlockRead, *, is_prefetch: bool) -> None:
        state = self._open
        is_wanted = state is not None and key in state.outstanding
        self._forget(key)
        if is_prefetch:
            self.stats.layers[key[0]].n_prefetch_failed += 1
        if state is None or not is_wanted:
            return
        state.outstanding.remove(key)
        if is_prefetch:
            # It began as a guess: only a read made on demand may end the run.
            state.pending.appendleft(key)
        elif state.error is None:
            state.error = read.error
