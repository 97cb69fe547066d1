"""Replays recorded routing against policies, and against the best that was possible.

What the store does with blocks and slots, without blocks: the policies are the very objects that
a store drives. An event is fused: all its experts are asked for at once, and none of them makes
room for another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from colibri_format import UsageError

from .policy import Key, Policy
from .trace import Trace


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a replay came to.

    `event_hits` and `event_asks` are `(n_events,) int64`, `layer_hits` and `layer_asks`
    `(n_layers,) int64`. `missed_bytes` is 0 where the trace states no block sizes.
    """

    n_slots: int
    event_hits: NDArray[np.int64]
    event_asks: NDArray[np.int64]
    layer_hits: NDArray[np.int64]
    layer_asks: NDArray[np.int64]
    missed_bytes: int

    @property
    def n_hits(self) -> int:
        """Asks for blocks that were resident."""
        return int(self.event_hits.sum())

    @property
    def n_misses(self) -> int:
        """Asks for blocks that had to be read."""
        return int(self.event_asks.sum()) - self.n_hits

    @property
    def hit_rate(self) -> float:
        """Hits among asks, 0 without asks."""
        n_asks = int(self.event_asks.sum())
        return self.n_hits / n_asks if n_asks else 0.0

    def hits_within(self, first: float, last: float) -> int:
        """Hits of the events from the share `first` to the share `last` of all."""
        n = len(self.event_hits)
        return int(self.event_hits[round(first * n) : round(last * n)].sum())


def replay(
    trace: Trace, policy: Policy, n_slots: int, *, resident: Sequence[Key] = ()
) -> ReplayResult:
    """Hits of `policy`, which must be new, with `n_slots` slots over all events.

    `resident` blocks, as many as there is room for, were preloaded: the policy gets them as read
    ahead and not asked for. Where the policy gives no victim, blocks of the event that were used
    already leave first, as in a store that serves the demand in rounds.

    Raises:
        UsageError: `bad-slots` without a slot; `no-slot` when the policy gives up nothing
            though nothing is in use.
    """
    _require_slots(n_slots)
    held: set[Key] = set()
    for key in resident[:n_slots]:
        held.add(key)
        policy.admit(key)
        policy.expire(key)
    observe, pin, release, victim = policy.observe, policy.pin, policy.release, policy.victim
    hits = []
    for event in trace.events:
        layer = event.layer
        observe(layer, event.experts, event.weights)
        in_use: list[Key] = []
        missing: list[Key] = []
        for expert in event.experts:
            key = (layer, expert)
            if key in held:
                pin(key)
                in_use.append(key)
            else:
                missing.append(key)
        hits.append(len(in_use))
        for key in missing:
            while len(held) >= n_slots:
                evicted = victim(is_prefetch=False)
                if evicted is not None:
                    held.remove(evicted)
                elif in_use:
                    release(in_use.pop(0))
                else:
                    raise UsageError(
                        "no-slot",
                        f"replay of {trace.where}",
                        f"the policy protects all {n_slots} slots",
                        "quotas that leave a slot",
                    )
            held.add(key)
            in_use.append(key)
        for key in in_use:
            release(key)
    return _result(trace, n_slots, hits)


def belady(trace: Trace, n_slots: int) -> ReplayResult:
    """Hits of the policy that knows the future: the block whose next use is farthest leaves.

    Never one that the event itself asks for. Belady, IBM Systems Journal 5(2), 1966, algorithm
    MIN, with that restriction, under which it stays optimal: it only forbids what no store can do.

    Raises:
        UsageError: `bad-slots` unless the slots hold the largest event.
    """
    _require_slots(n_slots)
    largest = max((len(event.experts) for event in trace.events), default=0)
    if n_slots < largest:
        raise UsageError(
            "bad-slots", "belady", f"{n_slots} slots", f"the {largest} blocks of the largest event"
        )
    never = len(trace.events)
    following = _next_uses(trace)
    # Resident blocks and their next use. Of `queue`, entries that differ from it are outdated.
    held: dict[Key, int] = {}
    queue: list[tuple[int, Key]] = []
    hits = []
    for event, nexts in zip(trace.events, following, strict=True):
        keys = [(event.layer, expert) for expert in event.experts]
        hits.append(sum(key in held for key in keys))
        missing = len(keys) - hits[-1]
        for key in keys:
            # Out of the queue's reach while in use.
            if key in held:
                held[key] = -1
        while len(held) + missing > n_slots:
            use, key = heappop(queue)
            if held.get(key) == -use:
                del held[key]
        for key, use in zip(keys, nexts, strict=True):
            held[key] = use
            heappush(queue, (-use, key))
        if len(queue) > 4 * n_slots + never:
            queue = [(-use, key) for key, use in held.items()]
            queue.sort()
    return _result(trace, n_slots, hits)


def _next_uses(trace: Trace) -> list[list[int]]:
    """For each event and expert, the event that uses it next; `len(events)` for none."""
    never = len(trace.events)
    seen: dict[Key, int] = {}
    following: list[list[int]] = []
    for i in range(never - 1, -1, -1):
        event = trace.events[i]
        keys = [(event.layer, expert) for expert in event.experts]
        following.append([seen.get(key, never) for key in keys])
        for key in keys:
            seen[key] = i
    following.reverse()
    return following


def compare(
    trace: Trace, policies: Mapping[str, Callable[[int], Policy]], sizes: Sequence[int]
) -> dict[int, dict[str, ReplayResult]]:
    """Results by number of slots and name, `belady` among them; policies are made from slots."""
    return {
        n_slots: {
            "belady": belady(trace, n_slots),
            **{name: replay(trace, make(n_slots), n_slots) for name, make in policies.items()},
        }
        for n_slots in sizes
    }


def _require_slots(n_slots: int) -> None:
    if n_slots < 1:
        raise UsageError("bad-slots", "replay", f"{n_slots} slots", "at least one")


def _result(trace: Trace, n_slots: int, hits: Sequence[int]) -> ReplayResult:
    event_hits = np.array(hits, dtype=np.int64)
    event_asks = np.array([len(event.experts) for event in trace.events], dtype=np.int64)
    layers = np.array([event.layer for event in trace.events], dtype=np.int64)
    layer_hits = np.zeros(trace.n_layers, np.int64)
    layer_asks = np.zeros(trace.n_layers, np.int64)
    np.add.at(layer_hits, layers, event_hits)
    np.add.at(layer_asks, layers, event_asks)
    missed_bytes = 0
    if trace.block_bytes:
        missed_bytes = int((layer_asks - layer_hits) @ np.array(trace.block_bytes, np.int64))
    return ReplayResult(n_slots, event_hits, event_asks, layer_hits, layer_asks, missed_bytes)
