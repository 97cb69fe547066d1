"""Memory that is set aside for later, and lent to the pool until then.

A budget counts keys and values of the whole context, and buffers for a whole batch. A conversation
begins far from its longest, and tokens are generated one by one: until that memory is written to,
the pool may have more slots in its place.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

from colibri_format import ModelSpec

from .kv_cache import KvCache, kv_cache_bytes, kv_used_bytes
from .store import Store


@dataclass(frozen=True, slots=True)
class Reserve:
    """What a moment takes of the memory that is set aside, in bytes. Pure.

    `kv_bytes` are those of a `KvCache` for `context` positions in `kv_dtype`; `batch_bytes` those
    that a pass of one token does not touch.
    """

    model: ModelSpec
    context: int
    kv_dtype: str
    batch_bytes: int

    @property
    def kv_bytes(self) -> int:
        """Keys and values of the whole context."""
        return kv_cache_bytes(self.model, self.context, self.kv_dtype)

    def idle_bytes(self, n_positions: int, n_tokens: int) -> int:
        """What is not written to while `n_positions` have been reached and `n_tokens` pass."""
        used = kv_used_bytes(
            self.model, self.context, n_positions, self.kv_dtype, page_bytes=mmap.PAGESIZE
        )
        return max(0, self.kv_bytes - used) + (self.batch_bytes if n_tokens == 1 else 0)


class Lender:
    """Has the store take and give back slots, so that pool, positions and batches together stay
    within what was set aside for them.

    Args:
        reserve: what is set aside.
        store: with slots that are lent (`PoolPlan.n_lent`).
        kv_cache: tells how many positions were reached.
    """

    def __init__(self, reserve: Reserve, store: Store, kv_cache: KvCache) -> None:
        self._reserve = reserve
        self._store = store
        self._kv_cache = kv_cache
        self._n_slots = store.slots.n_slots
        self._n_lent = store.slots.n_lent
        self._slot_bytes = store.slots.classes[-1].slot_bytes

    def make_room(self, n_tokens: int) -> None:
        """To be called before `n_tokens` more pass the layers.

        Raises:
            StorageError: as the store, when a read into a slot cannot be waited for.
        """
        n_reached = self._kv_cache.reach(n_tokens)
        idle = self._reserve.idle_bytes(n_reached, n_tokens)
        self._store.resize(self._n_slots + min(self._n_lent, idle // self._slot_bytes))
