"""Which block stands in which slot: free, loading, in use or resident. Bookkeeping without I/O."""

from __future__ import annotations

from collections.abc import Callable

from .policy import Key, Policy


class Cache:
    """Owner of `n_slots` slot numbers; each is free, or belongs to exactly one block.

    A block is loading (being read), pinned (resident and in use), or resident and left to the
    policy. `claim` starts a load, `land` or `land_ahead` ends it well, `abandon` ends it badly;
    `pin` and `release` bracket use. All look-ups and evictions cost the same however many slots
    there are. Not thread-safe: one thread owns it.

    `on_waste` is told of blocks that were read ahead and are evicted without any use.
    """

    def __init__(
        self, n_slots: int, policy: Policy, on_waste: Callable[[Key], None] | None = None
    ) -> None:
        self.n_slots = n_slots
        self._policy = policy
        self._free = list(range(n_slots - 1, -1, -1))
        self._resident: dict[Key, int] = {}
        self._loading: dict[Key, int] = {}
        self._pinned: set[Key] = set()
        self._unused: set[Key] = set()
        self._waiting: set[Key] = set()
        self._on_waste = on_waste
        self.n_evicted = 0

    @property
    def n_resident(self) -> int:
        """Blocks that can be used without a read."""
        return len(self._resident)

    @property
    def n_loading(self) -> int:
        """Slots that a read owns."""
        return len(self._loading)

    @property
    def n_pinned(self) -> int:
        """Blocks in use."""
        return len(self._pinned)

    @property
    def n_free(self) -> int:
        """Slots that no block owns."""
        return len(self._free)

    @property
    def n_waiting(self) -> int:
        """Resident blocks that were read ahead and whose layer has not been asked for since."""
        return len(self._waiting)

    def __contains__(self, key: Key) -> bool:
        return key in self._resident

    def slot_of(self, key: Key) -> int | None:
        """The slot of a resident block, None where it is not resident."""
        return self._resident.get(key)

    def pin(self, key: Key) -> int | None:
        """The slot of `key`, which is in use from now on; None where it is not resident."""
        slot = self._resident.get(key)
        if slot is not None and key not in self._pinned:
            self._policy.pin(key)
            self._pinned.add(key)
            self._waiting.discard(key)
        return slot

    def take_unused(self, key: Key) -> bool:
        """Whether `key` was read ahead and this is its first use."""
        if key in self._unused:
            self._unused.remove(key)
            return True
        return False

    def release(self, key: Key) -> None:
        """`key` is no longer in use."""
        self._pinned.remove(key)
        self._policy.release(key)

    def touch(self, key: Key) -> None:
        """`key` is expected to be asked for soon."""
        if key in self._resident and key not in self._pinned:
            self._policy.touch(key)

    def expire(self, key: Key) -> None:
        """`key` was read ahead in vain."""
        if key in self._waiting:
            self._waiting.remove(key)
            self._policy.expire(key)

    def claim(self, key: Key, *, is_prefetch: bool = False) -> int | None:
        """A slot to read `key` into, free or made free; None while every other block is needed."""
        if self._free:
            slot = self._free.pop()
        else:
            victim = self._policy.victim(is_prefetch=is_prefetch)
            if victim is None:
                return None
            slot = self._resident.pop(victim)
            self.n_evicted += 1
            self._waiting.discard(victim)
            if victim in self._unused:
                self._unused.remove(victim)
                if self._on_waste is not None:
                    self._on_waste(victim)
        self._loading[key] = slot
        return slot

    def land(self, key: Key) -> None:
        """The read of `key` succeeded and the block is in use."""
        self._resident[key] = self._loading.pop(key)
        self._pinned.add(key)

    def land_ahead(self, key: Key) -> None:
        """The read of `key` succeeded before anything asked for it."""
        self._resident[key] = self._loading.pop(key)
        self._unused.add(key)
        self._waiting.add(key)
        self._policy.admit(key)

    def abandon(self, key: Key) -> None:
        """The read of `key` failed or was called off: its slot is free again."""
        self._free.append(self._loading.pop(key))
