"""Which block leaves the pool first.

A policy is told what happens and names victims; it knows neither slots nor bytes, so that the
store and a replay of recorded routing can drive the very same object.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

Key = tuple[int, int]
"""`(layer, expert)`: the address of a block."""


class Policy(Protocol):
    """Order of eviction among the blocks that are resident and not in use.

    A block enters with `release` (it was used) or `admit` (it was read ahead) and leaves with
    `pin` (it is about to be used) or `victim` (it is evicted). Calls come from one thread, and
    each costs the same however many blocks there are.
    """

    def pin(self, key: Key) -> None:
        """`key` is in use from now on: it must not be named as victim."""

    def release(self, key: Key) -> None:
        """`key` is no longer in use; it is the one used last."""

    def admit(self, key: Key) -> None:
        """`key` was read ahead and waits to be asked for."""

    def touch(self, key: Key) -> None:
        """`key`, not in use, is expected to be asked for soon."""

    def expire(self, key: Key) -> None:
        """`key`, read ahead, was not asked for when its layer was."""

    def victim(self, *, is_prefetch: bool) -> Key | None:
        """The block to evict, which leaves the policy; None when it would give none.

        A demand may be given None only while no more than the protected number of blocks are
        resident and unused. A prefetch is given nothing that was read ahead and still waits.
        """


class LayerLru:
    """Least recently used first, within each layer's own quota.

    The `quotas[layer]` blocks of a layer that were used last are protected. Those beyond are
    surplus: still resident, and hits when asked for, but evicted when a slot is wanted, the one
    that became surplus first leaving first. A single LRU over all layers would evict each block
    just before its layer comes round again once a token's blocks outnumber the slots.
    """

    def __init__(self, quotas: Sequence[int]) -> None:
        self._quotas = tuple(quotas)
        self._protected: tuple[OrderedDict[int, None], ...] = tuple(OrderedDict() for _ in quotas)
        self._surplus: OrderedDict[Key, None] = OrderedDict()
        self._ahead: OrderedDict[Key, None] = OrderedDict()

    def pin(self, key: Key) -> None:
        layer, expert = key
        protected = self._protected[layer]
        if expert in protected:
            del protected[expert]
        elif key in self._surplus:
            del self._surplus[key]
        else:
            del self._ahead[key]

    def release(self, key: Key) -> None:
        layer, expert = key
        protected = self._protected[layer]
        protected[expert] = None
        if len(protected) > self._quotas[layer]:
            oldest, _ = protected.popitem(last=False)
            self._surplus[(layer, oldest)] = None

    def admit(self, key: Key) -> None:
        self._ahead[key] = None

    def touch(self, key: Key) -> None:
        if key in self._surplus:
            self._surplus.move_to_end(key)

    def expire(self, key: Key) -> None:
        if key in self._ahead:
            del self._ahead[key]
            # Never used: less is known for it than for any block that was.
            self._surplus[key] = None
            self._surplus.move_to_end(key, last=False)

    def victim(self, *, is_prefetch: bool) -> Key | None:
        if self._surplus:
            return self._surplus.popitem(last=False)[0]
        if not is_prefetch and self._ahead:
            # The one read ahead last is needed last.
            return self._ahead.popitem()[0]
        return None
