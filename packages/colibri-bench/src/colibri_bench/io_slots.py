"""Slots to read into, in rotation, over a pool that no processor's cache holds."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from colibri_runtime.machine import available_bytes
from colibri_runtime.pool import Pool

POOL_BYTES: Final = 320 * 2**20
"""What is read into. An engine's pool is larger than caches are; few slots used over and over stay
in a cache, where the disk's data lands faster than in memory."""

_MOST_SHARE: Final = 4
"""A pool takes at most one part in so many of the memory that is available."""


def plan_slots(slot_bytes: int, n_least: int, available: int | None) -> int:
    """How many slots of one size make the pool: at least `n_least`, whatever memory there is."""
    most = POOL_BYTES if available is None else min(POOL_BYTES, available // _MOST_SHARE)
    return max(n_least, most // slot_bytes)


class SlotRotation:
    """Slots of `slot_bytes` each in huge pages where the system gives them; one that was given
    back comes again only after all others.

    Raises:
        UsageError: `bad-slots` unless the size is a multiple of 4096.
        StorageError: `out-of-memory`.
    """

    def __init__(self, slot_bytes: int, n_least: int) -> None:
        self.pool = Pool(plan_slots(slot_bytes, n_least, available_bytes()), slot_bytes)
        self._free = deque(range(self.pool.n_slots))

    def take(self) -> int:
        """The slot that has been free for longest; there must be one."""
        return self._free.popleft()

    def give(self, slot: int) -> None:
        """Takes a slot back."""
        self._free.append(slot)

    def report(self) -> dict[str, Any]:
        """For JSON: how many slots of what size, and the bytes of them in huge pages."""
        found = self.pool.report()
        return {
            "n_slots": found.n_slots,
            "slot_bytes": found.slot_bytes,
            "pool_bytes": found.arena_bytes,
            "huge_bytes": found.huge_bytes,
        }

    def close(self) -> None:
        """Gives the memory up."""
        self.pool.close()
