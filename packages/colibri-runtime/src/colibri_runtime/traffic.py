"""The reads under way: which block each is for, and what is read ahead of its demand."""

from __future__ import annotations

from .blocks import BlockTable
from .cache import Cache
from .disk import BlockRead, DiskEngine
from .policy import Key
from .pool import Pool
from .stats import LayerStats


class Traffic:
    """Owner of the reads that `engine` was given and has not given back.

    A read is a demand, or ahead of one; one read ahead that is then asked for is promoted.
    `predicted` are the experts that were last predicted for layers not asked for since.
    """

    def __init__(
        self,
        table: BlockTable,
        pool: Pool,
        cache: Cache,
        engine: DiskEngine,
        layers: tuple[LayerStats, ...],
    ) -> None:
        self.engine = engine
        self.reads: dict[Key, BlockRead] = {}
        self.ahead: dict[Key, BlockRead] = {}
        self.promoted: set[Key] = set()
        self.predicted: dict[int, frozenset[int]] = {}
        self._table = table
        self._pool = pool
        self._cache = cache
        self._layers = layers

    def submit(self, key: Key, slot: int, *, is_prefetch: bool) -> None:
        """Begins to read a block into a slot that was claimed for it."""
        layer, expert = key
        read = self._table.plan_read(layer, expert, slot=slot, buffer=self._pool.slot(slot))
        read.address = self._pool.addresses[slot]
        self.reads[key] = read
        if is_prefetch:
            read.is_prefetch = True
            self.ahead[key] = read
        self.engine.submit(read)

    def flush(self) -> None:
        """Has an engine that gathers what it is given begin."""
        self.engine.flush()

    def promote(self, key: Key) -> None:
        """What is being read ahead, if `key` is, is now waited for."""
        read = self.ahead.pop(key, None)
        if read is not None:
            self.promoted.add(key)
            self.engine.promote(read)

    def cancel(self, key: Key) -> bool:
        """Whether the read of `key` had not begun, and is none any more."""
        if not self.engine.cancel(self.reads[key]):
            return False
        self.forget(key)
        self._cache.abandon(key)
        return True

    def cancel_ahead(self, key: Key) -> bool:
        """Whether `key` was to be read ahead, had not begun, and is no read any more."""
        if key not in self.ahead or not self.cancel(key):
            return False
        self._layers[key[0]].n_prefetch_cancelled += 1
        return True

    def forget(self, key: Key) -> None:
        """`key` is not being read any more."""
        del self.reads[key]
        self.ahead.pop(key, None)
        self.promoted.discard(key)

    def clear(self) -> None:
        """No read is under way: the engine was closed."""
        self.reads.clear()
        self.ahead.clear()
        self.promoted.clear()
