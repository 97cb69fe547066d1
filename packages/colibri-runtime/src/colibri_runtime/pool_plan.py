"""How an arena is cut into slots of several sizes, and how those are shared out.

Pure: counts and bytes in, counts out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Final

import numpy as np
from numpy.typing import NDArray

from colibri_format import UsageError

from .errors import BudgetError
from .pool import HUGE_PAGE, LEAST_HUGE_ARENA, mapped_bytes
from .slots import SlotPlan, plan_slots

Census = Sequence[dict[int, int]]
"""For each layer, how many blocks need slots of how many bytes (`BlockTable.census`)."""

MAX_CLASSES: Final = 4
"""Sizes of slots in one pool at most. Each class keeps transit slots of its own, so that many
classes would leave little to keep; four lose below 3 % on any K-quant mix of ggml's."""

SLOT_OVERHEAD: Final = 1280
"""Python objects that stand for one slot: views, lease and its segments, key, table entries
(measured 510 bytes, and 1,110 once segments were asked for)."""

_MAX_SIZES: Final = 12
"""Distinct sizes that are tried as slot sizes; more are merged into the nearest larger ones."""


@dataclass(frozen=True, slots=True)
class SlotClass:
    """Slots of one size and their division among `blocks_per_layer` blocks that belong to them."""

    slot_bytes: int
    blocks_per_layer: tuple[int, ...]
    plan: SlotPlan

    @property
    def n_blocks(self) -> int:
        """Blocks of all layers that belong to this class."""
        return sum(self.blocks_per_layer)


@dataclass(frozen=True)
class PoolPlan:
    """An arena cut into slots: classes in ascending order of size, numbered through.

    A block belongs to the first class that holds it. `top_k` is how many blocks of a layer a
    token asks for. `smallest_bytes` is the least budget for a pool that works, `largest_bytes`
    that which gives every block a slot.

    The last class may have `n_lent` slots beyond its plan: in memory that is meant for something
    else, and used by the pool as long as that is not there (`Store.resize`).
    """

    classes: tuple[SlotClass, ...]
    top_k: int
    prefetch_depth: int
    notes: tuple[str, ...] = ()
    smallest_bytes: int = 0
    largest_bytes: int = 0
    expected_hit_share: float | None = None
    n_lent: int = 0

    @cached_property
    def n_slots(self) -> int:
        """Slots of all classes, without those that are lent."""
        return sum(c.plan.n_slots for c in self.classes)

    @cached_property
    def arena_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(c.plan.n_slots * c.slot_bytes for c in self.classes)

    @cached_property
    def cost_bytes(self) -> int:
        """Bytes mapped for the arena, and of what stands for the slots in Python."""
        return mapped_bytes(self.arena_bytes) + (self.n_slots + self.n_lent) * SLOT_OVERHEAD

    @cached_property
    def quotas(self) -> tuple[int, ...]:
        """For each layer, the blocks that are kept from one token to the next."""
        return tuple(map(sum, zip(*(c.plan.quotas for c in self.classes), strict=True)))

    @cached_property
    def n_protected(self) -> int:
        """Slots that keep blocks between tokens."""
        return sum(c.plan.n_protected for c in self.classes)

    @cached_property
    def n_transit(self) -> int:
        """Slots for what is being read, computed or read ahead."""
        return sum(c.plan.n_transit for c in self.classes)

    @cached_property
    def n_prefetch(self) -> int:
        """Slots that may hold what was read ahead and not asked for yet."""
        return sum(c.plan.n_prefetch for c in self.classes)

    @property
    def shape(self) -> tuple[tuple[int, int], ...]:
        """`(n_slots, slot_bytes)` of each class, as a pool takes them, with those that are lent."""
        lent = [0] * (len(self.classes) - 1) + [self.n_lent]
        return tuple(
            (c.plan.n_slots + more, c.slot_bytes)
            for c, more in zip(self.classes, lent, strict=True)
        )

    def class_of_bytes(self, n_bytes: int) -> int:
        """The class of a block that needs `n_bytes`.

        Raises:
            UsageError: `bad-slots` when no slot holds it.
        """
        for number, c in enumerate(self.classes):
            if n_bytes <= c.slot_bytes:
                return number
        raise UsageError(
            "bad-slots",
            "pool plan",
            f"slots of {[c.slot_bytes for c in self.classes]} bytes",
            f"one that holds a block of {n_bytes}",
        )


def equal_slots(
    slot_bytes: int, blocks_per_layer: Sequence[int], n_slots: int, top_k: int, prefetch_depth: int
) -> PoolPlan:
    """A pool of `n_slots` slots of one size."""
    plan = plan_slots(
        n_slots=n_slots,
        blocks_per_layer=blocks_per_layer,
        top_k=top_k,
        prefetch_depth=prefetch_depth,
    )
    one = SlotClass(slot_bytes, tuple(blocks_per_layer), plan)
    return PoolPlan((one,), top_k, prefetch_depth, plan.notes)


def plan_pool(
    budget_bytes: int,
    census: Census,
    *,
    top_k: int,
    prefetch_depth: int = 1,
    counts: NDArray[np.floating] | None = None,
    max_classes: int = MAX_CLASSES,
) -> PoolPlan:
    """The pool within `budget_bytes` that keeps most blocks.

    Counted are the slots, `SLOT_OVERHEAD` for each, and what a large arena loses to alignment.
    With equal slots every block takes the room of the largest. Slots of several sizes waste less,
    but a block can then only take a slot of its own class, and each class needs transit slots of
    its own. So further sizes are used only where more blocks are kept from token to token for
    all that, and each class has the slots that one layer's demand and look-ahead want. Classes
    get slots for the same share of their blocks, so that no layer is favoured for being small.
    More slots than blocks are not made.

    `counts[layer, expert]` is how often each was asked for, if that is known: from it comes the
    share of hits to expect.

    Raises:
        BudgetError: `budget-too-small` when not even one slot of the largest size fits.
    """
    sizes = _merged(sorted({size for layer in census for size in layer}))
    if not sizes:
        return equal_slots(0, [0] * len(census), 0, top_k, prefetch_depth)
    smallest = pool_cost(1, sizes[-1])
    if budget_bytes < smallest:
        raise BudgetError(
            "pool",
            f"{budget_bytes} bytes are too few",
            f"{smallest} bytes for one slot of the largest block",
            "give it more",
            smallest_bytes=smallest,
        )
    cutter = _Cutter(census, sizes, top_k, prefetch_depth, max_classes)
    plan = cutter.best(budget_bytes)
    if plan.arena_bytes >= LEAST_HUGE_ARENA:
        plan = cutter.best(budget_bytes - HUGE_PAGE)
        if plan.arena_bytes < LEAST_HUGE_ARENA:
            plan = cutter.best(budget_bytes, arena_limit=LEAST_HUGE_ARENA - 1)
    return replace(
        plan,
        smallest_bytes=smallest,
        largest_bytes=cutter.best(None).cost_bytes,
        expected_hit_share=None if counts is None else expected_hit_share(plan.n_slots, counts),
    )


def pool_cost(n_slots: int, slot_bytes: int) -> int:
    """Bytes that a pool of equal slots takes, with what stands for them in Python."""
    return mapped_bytes(n_slots * slot_bytes) + n_slots * SLOT_OVERHEAD


def expected_hit_share(n_slots: int, counts: NDArray[np.floating]) -> float | None:
    """Share of asks that would hit if the `n_slots` blocks that were asked for most stayed.

    `counts` is `(n_layers, n_experts)`; None where nothing was counted. An estimate: the future
    may differ from the past, and a policy that follows what is in use does better.
    """
    total = float(np.sum(counts))
    if not total > 0:
        return None
    return float(np.sum(np.sort(counts, axis=None)[::-1][:n_slots])) / total


class _Cutter:
    """Tries every set of slot sizes."""

    def __init__(
        self,
        census: Census,
        sizes: Sequence[int],
        top_k: int,
        prefetch_depth: int,
        max_classes: int,
    ) -> None:
        self._top_k = top_k
        self._depth = prefetch_depth
        self._cuts = [(cut, _blocks_per_class(census, cut)) for cut in _cuts(sizes, max_classes)]

    def best(self, budget: int | None, arena_limit: int | None = None) -> PoolPlan:
        """The plan that keeps most blocks, or all in least room without a budget."""
        plans = []
        for cut, blocks in self._cuts:
            counts = [sum(layers) for layers in blocks]
            numbers = counts if budget is None else _fill(budget, arena_limit, cut, counts)
            if len(cut) > 1 and any(
                number < min(count, self._top_k * (1 + self._depth))
                for number, count in zip(numbers, counts, strict=True)
            ):
                continue
            plans.append(_divided(cut, numbers, blocks, self._top_k, self._depth))
        # Of equals the first, which has the fewest classes.
        return max(plans, key=lambda plan: (plan.n_protected, plan.n_slots, -plan.arena_bytes))


def _merged(sizes: Sequence[int]) -> Sequence[int]:
    """At most `_MAX_SIZES` of the ascending `sizes`, the largest included."""
    if len(sizes) <= _MAX_SIZES:
        return sizes
    step = len(sizes) / _MAX_SIZES
    return [sizes[int((i + 1) * step) - 1] for i in range(_MAX_SIZES)]


def _cuts(sizes: Sequence[int], max_classes: int) -> Iterable[tuple[int, ...]]:
    """Every choice of up to `max_classes` slot sizes that holds all blocks, fewest first."""
    for n_further in range(min(max_classes, len(sizes))):
        for chosen in combinations(sizes[:-1], n_further):
            yield (*chosen, sizes[-1])


def _blocks_per_class(census: Census, cut: Sequence[int]) -> list[list[int]]:
    """For each slot size, how many blocks of each layer belong to it."""
    blocks = [[0] * len(census) for _ in cut]
    for layer, sizes in enumerate(census):
        for size, number in sizes.items():
            blocks[bisect_left(cut, size)][layer] += number
    return blocks


def _fill(
    budget: int, arena_limit: int | None, cut: Sequence[int], counts: Sequence[int]
) -> list[int]:
    """Slots of each class: the same share of its blocks, and what is left one by one."""
    costs = [size + SLOT_OVERHEAD for size in cut]
    limit = budget if arena_limit is None else arena_limit
    whole = sum(cost * count for cost, count in zip(costs, counts, strict=True))
    room = sum(size * count for size, count in zip(cut, counts, strict=True))
    if whole <= budget and room <= limit:
        return list(counts)
    numbers = [min(count * budget // whole, count * limit // room) for count in counts]
    left = budget - sum(c * n for c, n in zip(costs, numbers, strict=True))
    left_room = limit - sum(s * n for s, n in zip(cut, numbers, strict=True))
    while True:
        open_classes = [
            i
            for i, n in enumerate(numbers)
            if n < counts[i] and costs[i] <= left and cut[i] <= left_room
        ]
        if not open_classes:
            return numbers
        poorest = min(open_classes, key=lambda i: (numbers[i] / counts[i], -costs[i]))
        numbers[poorest] += 1
        left -= costs[poorest]
        left_room -= cut[poorest]


def _divided(
    cut: Sequence[int],
    numbers: Sequence[int],
    blocks: Sequence[Sequence[int]],
    top_k: int,
    prefetch_depth: int,
) -> PoolPlan:
    classes = []
    notes: list[str] = []
    for slot_bytes, n_slots, layers in zip(cut, numbers, blocks, strict=True):
        plan = plan_slots(
            n_slots=n_slots, blocks_per_layer=layers, top_k=top_k, prefetch_depth=prefetch_depth
        )
        classes.append(SlotClass(slot_bytes, tuple(layers), plan))
        prefix = f"slots of {slot_bytes} bytes: " if len(cut) > 1 else ""
        notes += [prefix + note for note in plan.notes]
    return PoolPlan(tuple(classes), top_k, prefetch_depth, tuple(notes))
