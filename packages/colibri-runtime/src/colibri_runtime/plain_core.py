"""The core of a store over any disk engine and any policy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from .blocks import BlockTable
from .cache import Cache
from .core import Core, Experts, check_experts, no_slot
from .disk import BlockRead, DiskEngine
from .fetch import Fetch, closed_error
from .lease import Lease
from .policy import KeepAll, Key, Policy, fuse_tokens
from .pool import Pool
from .pool_plan import PoolPlan
from .stats import Stats
from .traffic import Traffic


class PlainCore(Core):
    """Bookkeeping in Python.

    What the open fetch wants is ready (resident and pinned), outstanding (being read), pending
    (not asked of the disk for want of a slot), or leased. Each fetch has a number, so that a
    handle of an earlier one does nothing.
    """

    cache: Cache
    stats: Stats

    def __init__(
        self,
        table: BlockTable,
        pool: Pool,
        engine: DiskEngine,
        plan: PoolPlan,
        policies: Sequence[Policy],
        clock: Callable[[], int],
    ) -> None:
        self.stats = Stats(table.n_layers)
        self._class_of = self._find_class if len(plan.classes) > 1 else _only_class
        sizes = [n_slots for n_slots, _ in plan.shape]
        self.cache = self._cache = Cache(
            sizes[0],
            policies[0],
            self._count_waste,
            further=list(zip(sizes[1:], policies[1:], strict=True)),
            class_of=self._class_of,
        )
        self._cache.resize(plan.n_slots)
        self._traffic = Traffic(table, pool, self._cache, engine, self.stats.layers)
        self._observers = _observers(policies, plan, table.n_layers)
        self._observed = -1
        self._layer = -1
        self._is_open = False
        self._n_asked = 0
        self._ended_ns = 0
        self._pending: deque[Key] = deque()
        self._number = 0
        self._is_store_closed = False
        self._ready: list[Lease] = []
        self._outstanding: set[Key] = set()
        self._leased: list[Lease] = []
        self._error: Exception | None = None
        self._given_ns = 0
        self._table = table
        self._pool = pool
        self._plan = plan
        self._clock = clock
        self._leases: list[Lease | None] = [None] * self._cache.n_slots

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def layer(self) -> int:
        return self._layer

    @property
    def ended_ns(self) -> int:
        return self._ended_ns

    @property
    def n_reads(self) -> int:
        return len(self._traffic.reads)

    @property
    def n_pending(self) -> int:
        return len(self._pending)

    @property
    def n_asked(self) -> int:
        return self._n_asked

    def observe(
        self, layer: int, experts: NDArray[np.integer], weights: NDArray[np.floating] | None
    ) -> None:
        check_experts(self._table, layer, ())
        if not self._observers[layer]:
            return
        asked, shares = fuse_tokens(experts, weights)
        for observe in self._observers[layer]:
            observe(layer, asked, shares)
        self._observed = layer

    def fetch(self, layer: int, experts: Experts) -> Fetch:
        # Plain ints, each once, in the order given: NumPy's own would hash and print differently.
        asked = list(dict.fromkeys(map(int, experts)))
        cache = self._cache
        resident = cache.row(layer)
        missing = [expert for expert in asked if expert not in resident]
        if missing or not asked:
            check_experts(self._table, layer, missing)
        self._n_asked = len(asked)
        if layer != self._observed:
            for observe in self._observers[layer]:
                observe(layer, asked)
        self._observed = -1
        if self._traffic.predicted:
            self._settle(layer, asked)
        there = [expert for expert in asked if expert in resident] if missing else asked
        if cache.has_unused:
            self.stats.layers[layer].n_prefetch_used += cache.take_unused(layer, there)
        slots = cache.pin_all(layer, there)
        try:
            return self._open(layer, slots, missing)
        except BaseException:
            self.close(self._number)
            raise

    def _open(self, layer: int, slots: Sequence[int], missing: Sequence[int]) -> Fetch:
        """A fetch of the blocks in `slots`, which are pinned, and of the experts `missing`."""
        self._layer = layer
        self._is_open = True
        self._number += 1
        stats = self.stats.layers[layer]
        stats.n_fetches += 1
        stats.n_hits += len(slots)
        leases = self._leases
        self._ready = [leases[slot] for slot in slots]  # type: ignore[misc]
        traffic = self._traffic
        late: list[Key] = []
        for expert in missing:
            key = (layer, expert)
            if key in traffic.reads:
                late.append(key)
                self._outstanding.add(key)
                traffic.promote(key)
            else:
                self._pending.append(key)
        if self._pending:
            self._submit_pending()
        if traffic.reads:
            # After the misses are under way: taking in what has come may check its checksums.
            self._harvest()
        if missing:
            n_hits = sum(key in self._cache for key in late)
            n_lates = sum(key in traffic.reads for key in late)
            stats.n_hits += n_hits
            stats.n_lates += n_lates
            stats.n_misses += len(missing) - n_hits - n_lates
            if self._pending:
                self._submit_pending()
        return Fetch(self, self._number)

    def next(self, number: int) -> Lease | None:
        if not self._advance(number):
            return None
        lease = self._ready.pop(0)
        self._leased.append(lease)
        self._given_ns = self._clock()
        return lease

    def take(self, number: int) -> list[Lease]:
        if not self._advance(number):
            return []
        self._leased, self._ready = self._ready, self._leased
        self._given_ns = self._clock()
        return self._leased.copy()

    def close(self, number: int) -> None:
        if number != self._number or not self._is_open:
            return
        self._give_back()
        self._is_open = False
        self._error = None
        if self._ready:
            self._cache.release_all(self._layer, [lease.expert for lease in self._ready])
            self._ready.clear()
        self._pending.clear()
        if self._outstanding:
            for key in self._outstanding:
                self._traffic.cancel(key)
            self._outstanding.clear()

    def shut(self) -> None:
        self._is_store_closed = True
        self._traffic.clear()
        self._is_open = False
        self._ready.clear()
        self._leased.clear()
        self._outstanding.clear()
        self._pending.clear()
        # Their views would keep the pool's memory for as long as the store is held.
        self._leases.clear()

    def _advance(self, number: int) -> bool:
        """Ends the last leases; whether there is another ready, for which it waits."""
        if self._is_store_closed:
            raise closed_error()
        if number != self._number or not self._is_open:
            return False
        self._give_back()
        if self._pending:
            self._submit_pending()
        if self._traffic.reads:
            # What is read ahead as well: some engines begin the next read only when called.
            self._harvest()
        while not self._ready:
            if self._error is not None:
                error = self._error
                self.close(number)
                raise error
            if not self._outstanding and not self._pending:
                self.close(number)
                return False
            try:
                if self._pending:
                    self._submit_pending()
                self._wait()
            except BaseException:
                self.close(number)
                raise
        return True

    def _give_back(self) -> None:
        if self._leased:
            self._ended_ns = self._clock()
            self.stats.layers[self._layer].compute_ns += self._ended_ns - self._given_ns
            self._cache.release_all(self._layer, [lease.expert for lease in self._leased])
            self._leased.clear()

    def _wait(self) -> None:
        """Blocks until a read comes back, any read: it may free the slot that is lacking."""
        n_reads = len(self._traffic.reads)
        if not n_reads:
            raise no_slot(self._layer)
        stats = self.stats.layers[self._layer]
        stats.n_waits += 1
        stats.queue_depth += n_reads
        started = self._clock()
        try:
            self._harvest(wait=True)
        finally:
            stats.stall_ns += self._clock() - started
        if self._pending:
            self._submit_pending()

    def _submit_pending(self) -> None:
        """Asks the disk for what there are slots for, in order."""
        lacking: set[int] = set()
        left: list[Key] = []
        n_submitted = 0
        for key in self._pending:
            number = self._class_of(key)
            slot = None if number in lacking else self._claim(key, number)
            if slot is None:
                lacking.add(number)
                left.append(key)
                continue
            self._outstanding.add(key)
            self._leases[slot] = None
            self._traffic.submit(key, slot, is_prefetch=False)
            n_submitted += 1
            if n_submitted == 1:
                # The disk begins while slots are found for the others.
                self._traffic.flush()
        self._pending = deque(left)
        if n_submitted > 1:
            self._traffic.flush()

    def _claim(self, key: Key, number: int) -> int | None:
        slot = self._cache.claim(key)
        if slot is not None:
            return slot
        # Newest first: it is needed last. A prefetch that has begun cannot be called off.
        for other in reversed(list(self._traffic.ahead)):
            if self._class_of(other) == number and self._traffic.cancel_ahead(other):
                return self._cache.claim(key)
        return None

    def _harvest(self, *, wait: bool = False) -> None:
        """Takes in the reads that are done; with `wait`, at least one."""
        engine = self._traffic.engine
        for read in engine.wait() if wait else engine.poll():
            self._take_in(read)

    def _take_in(self, read: BlockRead) -> None:
        key = (read.tag, read.expert)
        traffic = self._traffic
        stats = self.stats.layers[read.tag]
        is_ahead = key in traffic.ahead
        is_prefetch = is_ahead or key in traffic.promoted
        stats.read_ns += read.read_ns
        stats.checksum_ns += read.checksum_ns
        stats.n_rereads += read.n_rereads
        if is_prefetch:
            stats.prefetch_bytes += read.n_bytes
        else:
            stats.demand_bytes += read.n_bytes
        traffic.forget(key)
        is_wanted = key in self._outstanding
        if read.error is not None or read.is_cut:
            self._cache.abandon(key)
            if is_prefetch and read.is_cut:
                stats.n_prefetch_cancelled += 1
            elif is_prefetch:
                stats.n_prefetch_failed += 1
            if is_wanted:
                self._outstanding.remove(key)
                if is_prefetch or read.is_cut:
                    # It began as a guess, or for a fetch that was closed: only a read made on
                    # this demand may end the run.
                    self._pending.appendleft(key)
                elif self._error is None:
                    self._error = read.error
            return
        stats.n_prefetched += is_prefetch
        if is_wanted:
            self._outstanding.remove(key)
            self._ready.append(self._lease(key, self._cache.land(key)))
            stats.n_prefetch_used += is_prefetch
        elif is_ahead:
            self._lease(key, self._cache.land_ahead(key))
            if key[1] not in traffic.predicted.get(key[0], ()):
                self._cache.expire(key)
        else:
            # Its fetch was closed meanwhile: the block is good and was paid for.
            self._lease(key, self._cache.land(key))
            self._cache.release(key)

    def _lease(self, key: Key, slot: int) -> Lease:
        layer, expert = key
        address, view = self._pool.addresses[slot], self._pool.view(slot)
        lease = Lease(layer, expert, self._table.layout(layer, expert), slot, address, view)
        self._leases[slot] = lease
        return lease

    def prefetch(self, layer: int, experts: Experts, *, is_read: bool = True) -> None:
        wanted = list(dict.fromkeys(map(int, experts)))
        resident = self._cache.row(layer)
        check_experts(self._table, layer, [expert for expert in wanted if expert not in resident])
        if is_read:
            self._read_ahead(layer, wanted)

    def preload(self, key: Key) -> bool:
        if key in self._cache or key in self._traffic.reads:
            return False
        slot = self._cache.claim_free(key)
        if slot is None:
            return False
        self._leases[slot] = None
        # Not predicted, so that it waits for no fetch: it lands as one read in vain.
        self._traffic.submit(key, slot, is_prefetch=True)
        self._traffic.flush()
        return True

    def resize(self, n_open: int) -> None:
        cache, traffic = self._cache, self._traffic
        while beyond := cache.loading_beyond(n_open):
            called_off = [traffic.cancel_ahead(key) or traffic.cancel(key) for key in beyond]
            if not all(called_off):
                self._harvest(wait=True)
        cache.resize(n_open)

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

    def _submit_ahead(self, key: Key) -> bool:
        number = self._class_of(key)
        traffic = self._traffic
        n_ahead = len(traffic.ahead)
        if len(self._plan.classes) > 1:
            n_ahead = sum(self._class_of(other) == number for other in traffic.ahead)
        n_ahead += self._cache.n_waiting_in(number)
        if n_ahead >= self._plan.classes[number].plan.n_prefetch or self._pending:
            return False
        slot = self._cache.claim(key, is_prefetch=True)
        if slot is None:
            return False
        self._leases[slot] = None
        traffic.submit(key, slot, is_prefetch=True)
        return True

    def _count_waste(self, key: Key) -> None:
        stats = self.stats.layers[key[0]]
        stats.n_prefetch_wasted += 1
        stats.wasted_bytes += self._table.padded_bytes(*key)

    def _find_class(self, key: Key) -> int:
        return self._plan.class_of_bytes(self._table.padded_bytes(*key))


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
