"""How an arena is cut into slots of several sizes, and how those are shared out.

Pure: counts and bytes in, counts out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Final

from colibri_format import UsageError

from .slots import SlotPlan, plan_slots

Census = Sequence[dict[int, int]]
"""For each layer, how many blocks need slots of how many bytes (`BlockTable.census`)."""

MAX_CLASSES: Final = 4
"""Sizes of slots in one pool at most. Each class keeps transit slots of its own, so that many
classes would leave little to keep; four lose below 3 % on any K-quant mix of ggml's."""

_MAX_SIZES: Final = 24
"""Distinct sizes that are tried as slot sizes; more are merged into the nearest larger ones."""


@dataclass(frozen=True, slots=True)
class SlotClass:
    """Slots of one size and their division; `n_blocks` blocks belong to them."""

    slot_bytes: int
    n_blocks: int
    plan: SlotPlan


@dataclass(frozen=True)
class PoolPlan:
    """An arena cut into slots: classes in ascending order of size, numbered through.

    A block belongs to the first class that holds it. `top_k` is how many blocks of a layer a
    token asks for.
    """

    classes: tuple[SlotClass, ...]
    top_k: int
    prefetch_depth: int
    notes: tuple[str, ...] = ()

    @cached_property
    def n_slots(self) -> int:
        """Slots of all classes."""
        return sum(c.plan.n_slots for c in self.classes)

    @cached_property
    def arena_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(c.plan.n_slots * c.slot_bytes for c in self.classes)

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
        """`(n_slots, slot_bytes)` of each class, as a pool takes them."""
        return tuple((c.plan.n_slots, c.slot_bytes) for c in self.classes)

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
    one = SlotClass(slot_bytes, sum(blocks_per_layer), plan)
    return PoolPlan((one,), top_k, prefetch_depth, plan.notes)


def plan_pool(
    arena_bytes: int,
    census: Census,
    *,
    top_k: int,
    prefetch_depth: int = 1,
    slot_overhead: int = 0,
    max_classes: int = MAX_CLASSES,
) -> PoolPlan:
    """The cut of `arena_bytes` that keeps most blocks; `slot_overhead` further bytes go with each.

    With equal slots every block takes the room of the largest. Slots of several sizes waste less,
    but a block can then only take a slot of its own class, and each class needs transit slots of
    its own. So further sizes are used only where more blocks are kept from token to token for
    all that, and each class has the slots that one layer's demand and look-ahead want. Classes
    get slots for the same share of their blocks, so that no layer is favoured for being small.

    More slots than blocks are not made.

    Raises:
        UsageError: `bad-slots` when not even one slot of the largest size fits.
    """
    sizes = _merged(sorted({size for layer in census for size in layer}))
    if not sizes:
        return equal_slots(0, [0] * len(census), 0, top_k, prefetch_depth)
    largest = sizes[-1] + slot_overhead
    if arena_bytes < largest:
        raise UsageError(
            "bad-slots",
            "pool plan",
            f"{arena_bytes} bytes",
            f"{largest} for one slot of the largest block",
        )
    plans = []
    for cut in _cuts(sizes, max_classes):
        blocks = _blocks_per_class(census, cut)
        counts = [sum(layers) for layers in blocks]
        numbers = _fill(arena_bytes, [size + slot_overhead for size in cut], counts)
        if len(cut) > 1 and any(
            number < min(count, top_k * (1 + prefetch_depth))
            for number, count in zip(numbers, counts, strict=True)
        ):
            continue
        plans.append(_divided(cut, numbers, blocks, top_k, prefetch_depth))
    # Of equals the first, which has the fewest classes.
    return max(plans, key=lambda plan: (plan.n_protected, plan.n_slots))


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


def _fill(arena_bytes: int, costs: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Slots of each class: the same share of its blocks, and what is left one by one."""
    whole = sum(cost * count for cost, count in zip(costs, counts, strict=True))
    if whole <= arena_bytes:
        return list(counts)
    numbers = [count * arena_bytes // whole for count in counts]
    left = arena_bytes - sum(c * n for c, n in zip(costs, numbers, strict=True))
    while True:
        open_classes = [i for i, n in enumerate(numbers) if n < counts[i] and costs[i] <= left]
        if not open_classes:
            return numbers
        poorest = min(open_classes, key=lambda i: (numbers[i] / counts[i], -costs[i]))
        numbers[poorest] += 1
        left -= costs[poorest]


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
        classes.append(SlotClass(slot_bytes, sum(layers), plan))
        prefix = f"slots of {slot_bytes} bytes: " if len(cut) > 1 else ""
        notes += [prefix + note for note in plan.notes]
    return PoolPlan(tuple(classes), top_k, prefetch_depth, tuple(notes))
