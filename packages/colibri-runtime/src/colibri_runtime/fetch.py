"""A fetch: blocks of one layer, leased as they arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from colibri_format import UsageError

from .blocks import BlockTable
from .cache import Cache
from .disk import BlockRead
from .lease import Lease
from .policy import Key
from .pool import Pool
from .stats import Stats
from .traffic import Traffic

ReadyCallback = Callable[[Lease], object]
"""Told of a block that may be read until it returns."""


def closed_error() -> UsageError:
    """What is raised when a closed store is used."""
    return UsageError("store-closed", "store", "is closed", "an open store")


class Fetch:
    """Leases of the experts that were asked for, each once, in order of arrival.

    Three ways to use it, which may be mixed; each ends the leases given before.

    - As an iterator: one lease at a time.
    - `take`: all that are ready at once, to compute what is resident in one go and what arrives
      piece by piece.
    - `run`: the store's callback is called with each.

    A context manager; `close`, leaving the `with` block, or dropping it gives everything back.
    """

    __slots__ = ("_current", "_number")

    def __init__(self, current: CurrentFetch, number: int) -> None:
        self._current = current
        self._number = number

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Lease:
        lease = self._current.next(self._number)
        if lease is None:
            raise StopIteration
        return lease

    def take(self) -> list[Lease]:
        """All blocks that are ready now, at least one: waits until there is one. Empty when every
        block was given. They stay leased until the next call, or `close`.

        Raises:
            FormatError: `block-checksum`.
            StorageError: `short-read`, or what the kernel said.
            UsageError: `store-closed`.
        """
        return self._current.take(self._number)

    def run(self) -> int:
        """Calls the store's callback with each block as it arrives; gives how many there were.

        The callback runs in the thread that calls this, and a lease ends when it returns. When it
        raises, the fetch is closed and the exception goes on.

        Raises:
            UsageError: `no-callback` unless `Store.on_ready` was called before; else as `take`.
        """
        return self._current.run(self._number)

    def close(self) -> None:
        """Ends the leases, and reads that have not begun; those that have land for later."""
        self._current.close(self._number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._current.close(self._number)

    def __del__(self) -> None:
        self._current.close(self._number)


class CurrentFetch:
    """The state of the one fetch that is open in a store, and of none between two.

    What is wanted is ready (resident and pinned), outstanding (being read), pending (not asked of
    the disk for want of a slot), or leased. Each fetch has a number, so that a handle of an
    earlier one does nothing.
    """

    def __init__(
        self,
        table: BlockTable,
        pool: Pool,
        cache: Cache,
        traffic: Traffic,
        stats: Stats,
        class_of: Callable[[Key], int],
        clock: Callable[[], int],
    ) -> None:
        self.layer = -1
        self.is_open = False
        self.callback: ReadyCallback | None = None
        self.ended_ns = 0
        self.pending: deque[Key] = deque()
        self._number = 0
        self._is_store_closed = False
        self._ready: list[Lease] = []
        self._outstanding: set[Key] = set()
        self._leased: list[Lease] = []
        self._error: Exception | None = None
        self._given_ns = 0
        self._table = table
        self._pool = pool
        self._cache = cache
        self._traffic = traffic
        self._stats = stats
        self._class_of = class_of
        self._clock = clock
        self._leases: list[Lease | None] = [None] * cache.n_slots

    def open(self, layer: int, slots: Sequence[int], missing: Sequence[int]) -> Fetch:
        """A fetch of the blocks in `slots`, which are pinned, and of the experts `missing`."""
        self.layer = layer
        self.is_open = True
        self._number += 1
        stats = self._stats.layers[layer]
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
                self.pending.append(key)
        if self.pending:
            self.submit_pending()
        if traffic.reads:
            # After the misses are under way: taking in what has come may check its checksums.
            self.harvest()
        if missing:
            n_hits = sum(key in self._cache for key in late)
            n_lates = sum(key in traffic.reads for key in late)
            stats.n_hits += n_hits
            stats.n_lates += n_lates
            stats.n_misses += len(missing) - n_hits - n_lates
            if self.pending:
                self.submit_pending()
        return Fetch(self, self._number)

    def next(self, number: int) -> Lease | None:
        """One lease more, None when every block was given."""
        if not self._advance(number):
            return None
        lease = self._ready.pop(0)
        self._leased.append(lease)
        self._given_ns = self._clock()
        return lease

    def take(self, number: int) -> list[Lease]:
        """All that are ready, at least one; none when every block was given."""
        if not self._advance(number):
            return []
        self._leased, self._ready = self._ready, self._leased
        self._given_ns = self._clock()
        return self._leased.copy()

    def run(self, number: int) -> int:
        """How many blocks the callback was given."""
        callback = self.callback
        if callback is None:
            raise UsageError(
                "no-callback",
                f"fetch of layer {self.layer}",
                "nothing was registered to be called",
                "Store.on_ready(callback) before",
            )
        n_given = 0
        try:
            while (lease := self.next(number)) is not None:
                callback(lease)
                n_given += 1
        finally:
            self.close(number)
        return n_given

    def close(self, number: int) -> None:
        """Gives back what fetch `number` still holds, if it is open."""
        if number != self._number or not self.is_open:
            return
        self._give_back()
        self.is_open = False
        self._error = None
        if self._ready:
            self._cache.release_all(self.layer, [lease.expert for lease in self._ready])
            self._ready.clear()
        self.pending.clear()
        if self._outstanding:
            for key in self._outstanding:
                self._traffic.cancel(key)
            self._outstanding.clear()

    def shut(self) -> None:
        """The store was closed: whatever was open is void."""
        self._is_store_closed = True
        self.is_open = False
        self._ready.clear()
        self._leased.clear()
        self._outstanding.clear()
        self.pending.clear()
        # Their views would keep the pool's memory for as long as the store is held.
        self._leases.clear()

    def _advance(self, number: int) -> bool:
        """Ends the last leases; whether there is another ready, for which it waits."""
        if self._is_store_closed:
            raise closed_error()
        if number != self._number or not self.is_open:
            return False
        self._give_back()
        if self.pending:
            self.submit_pending()
        if self._traffic.reads:
            # What is read ahead as well: some engines begin the next read only when called.
            self.harvest()
        while not self._ready:
            if self._error is not None:
                error = self._error
                self.close(number)
                raise error
            if not self._outstanding and not self.pending:
                self.close(number)
                return False
            try:
                if self.pending:
                    self.submit_pending()
                self._wait()
            except BaseException:
                self.close(number)
                raise
        return True

    def _give_back(self) -> None:
        if self._leased:
            self.ended_ns = self._clock()
            self._stats.layers[self.layer].compute_ns += self.ended_ns - self._given_ns
            self._cache.release_all(self.layer, [lease.expert for lease in self._leased])
            self._leased.clear()

    def _wait(self) -> None:
        """Blocks until a read comes back, any read: it may free the slot that is lacking."""
        n_reads = len(self._traffic.reads)
        if not n_reads:
            raise UsageError(
                "no-slot",
                f"fetch of layer {self.layer}",
                "no slot can be had and no read is under way",
                "a policy that gives up what is beyond its quotas",
            )
        stats = self._stats.layers[self.layer]
        stats.n_waits += 1
        stats.queue_depth += n_reads
        started = self._clock()
        try:
            self.harvest(wait=True)
        finally:
            stats.stall_ns += self._clock() - started
        if self.pending:
            self.submit_pending()

    def submit_pending(self) -> None:
        """Asks the disk for what there are slots for, in order."""
        lacking: set[int] = set()
        left: list[Key] = []
        n_submitted = 0
        for key in self.pending:
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
        self.pending = deque(left)
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

    def forget_lease(self, slot: int) -> None:
        """Another block is about to be read into `slot`."""
        self._leases[slot] = None

    def harvest(self, *, wait: bool = False) -> None:
        """Takes in the reads that are done; with `wait`, at least one."""
        engine = self._traffic.engine
        for read in engine.wait() if wait else engine.poll():
            self._take_in(read)

    def _take_in(self, read: BlockRead) -> None:
        key = (read.tag, read.expert)
        traffic = self._traffic
        stats = self._stats.layers[read.tag]
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
                    self.pending.appendleft(key)
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
