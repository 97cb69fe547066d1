"""Which block leaves the pool first: what every policy is told and asked.

A policy knows neither slots nor bytes, so that the store and a replay of recorded routing drive
the very same object. `policies.make_policy` makes them by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

Key = tuple[int, int]
"""`(layer, expert)`: the address of a block."""


class Policy(Protocol):
    """Order of eviction among the blocks that are resident and not in use.

    A block enters with `release` (it was used) or `admit` (it was read ahead) and leaves with
    `pin` (it is about to be used) or `victim` (it is evicted). Calls come from one thread.

    One layer of one token, or of one batch, is an *event*. Its driver calls, in this order:
    `observe` once with every expert of the event; `pin` for each that is resident; `victim` for
    each that is not and lacks a free slot; `release` for each as it has been used. Only `observe`
    may be left out, and then decayed frequencies know fewer visits than there were. Costs do not
    grow with the number of blocks, or with its logarithm at most.
    """

    def observe(
        self, layer: int, experts: Sequence[int], weights: Sequence[float] | None = None
    ) -> None:
        """The router chose `experts`, each named once, with `weights` (of any scale, None: equal).

        A batch gives each expert the sum of its tokens' weights.
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

    def seed(self, shares: Mapping[Key, float]) -> None:
        """What was learned before: the share of its layer's events that asked for each block.

        Called before any event. Blocks that are preloaded enter with `admit` and `expire`.
        """

    def victim(self, *, is_prefetch: bool) -> Key | None:
        """The block to evict, which leaves the policy; None when it would give none.

        A demand is given None only while each block it knows is protected by a layer's quota;
        a policy without quotas protects none, and gives a demand None only while every block is
        in use. A prefetch is given nothing that was read ahead and still waits.
        """
