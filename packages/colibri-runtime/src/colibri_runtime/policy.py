"""Which block leaves the pool first: what every policy is told and asked.

A policy knows neither slots nor bytes, so that the store and a replay of recorded routing drive
the very same object. `policies.make_policy` makes them by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Key = tuple[int, int]
"""`(layer, expert)`: the address of a block."""


class Policy(Protocol):
    """Order of eviction among the blocks that are resident and not in use.

    A block enters with `release` (it was used) or `admit` (it was read ahead) and leaves with
    `pin` (it is about to be used) or `victim` (it is evicted). Calls come from one thread.

    One layer of one token, or of one batch, is an *event*. Its driver calls, in this order:
    `observe` once with every expert of the event; `pin` for each that is resident; `victim` for
    each that is not and lacks a free slot; `release` for each as it has been used. A driver that
    never calls `observe` is taken to begin an event with the first release of another layer, and
    to know no weights.

    It may also have `pin_all`, `release_all` and `touch_all`, `(layer, experts)`, for several
    blocks of a layer in one call.
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
        """`key`, not in use, is expected to be asked for by its layer's next event."""

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
        in use. A prefetch is given nothing that was read ahead or touched and not asked for since.
        """


class KeepAll:
    """For slots enough for every block: keeps no order, because none is ever evicted."""

    def observe(
        self, layer: int, experts: Sequence[int], weights: Sequence[float] | None = None
    ) -> None:
        """Nothing."""

    def pin(self, key: Key) -> None:
        """Nothing."""

    def release(self, key: Key) -> None:
        """Nothing."""

    def admit(self, key: Key) -> None:
        """Nothing."""

    def touch(self, key: Key) -> None:
        """Nothing."""

    def expire(self, key: Key) -> None:
        """Nothing."""

    def seed(self, shares: Mapping[Key, float]) -> None:
        """Nothing."""

    def victim(self, *, is_prefetch: bool) -> None:
        """None: there is a free slot for whatever is not resident."""


def fuse_tokens(
    experts: NDArray[np.integer[Any]], weights: NDArray[np.floating[Any]] | None
) -> tuple[list[int], list[float] | None]:
    """What a policy observes of a batch: each expert once, with the sum of its weights.

    `experts` and `weights` (None: equal) are `(n_tokens, top_k)`.
    """
    if len(experts) == 1:
        return experts[0].tolist(), None if weights is None else weights[0].tolist()
    flat = np.ones(experts.size) if weights is None else weights.ravel()
    totals = np.bincount(experts.ravel(), flat)
    chosen = np.flatnonzero(np.bincount(experts.ravel()))
    return chosen.tolist(), totals[chosen].tolist()
