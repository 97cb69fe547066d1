"""How a memory budget is spent: dense tensors, KV cache, working memory, and slots for the rest.

Pure: sizes in, plan out. Everything that the runtime allocates in proportion to the model or the
pool is counted. The interpreter, its libraries and the tokenizer are not: they are measured
before loading and stated beside the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from colibri_format import UsageError, format_size

from .errors import BudgetError
from .pool import pool_bytes
from .pool_plan import PoolPlan, equal_slots

SLOT_OVERHEAD: Final = 1024
"""Python objects that stand for one slot: array views, key, table entries (measured 0.6 KB)."""

THREAD_BYTES: Final = 64 * 1024
"""What an I/O thread touches of its stack and of its own malloc arena (measured below 20 KB)."""

FIXED_BYTES: Final = 2**20
"""Python objects of reader, weights and decoder, whatever the model's size (measured 0.6 MB)."""

DEFAULT_SHARE: Final = 0.8
"""Share of the memory that is available which is taken when no budget is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """What a model needs, in bytes; `blocks_per_layer` counts the blocks a pool would hold.

    `slot_waste` is the share of a full pool that equal slots leave unused. `where` names the
    model in errors.
    """

    where: str
    dense_bytes: int
    kv_bytes: int
    working_bytes: int
    index_bytes: int
    slot_bytes: int
    blocks_per_layer: tuple[int, ...]
    top_k: int
    slot_waste: float = 0.0

    @property
    def n_blocks(self) -> int:
        """Blocks of all layers."""
        return sum(self.blocks_per_layer)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """A budget's division in bytes; `total_bytes` never exceeds `budget_bytes`.

    `pool_bytes` includes what the alignment of the pool may lose, `overhead_bytes` the index, the
    I/O threads and Python's own objects. `smallest_bytes` is the least budget that works,
    `largest_bytes` the most that can be used: there every block has a slot.
    """

    budget_bytes: int
    dense_bytes: int
    kv_bytes: int
    working_bytes: int
    overhead_bytes: int
    pool_bytes: int
    total_bytes: int
    smallest_bytes: int
    largest_bytes: int
    slot_bytes: int
    slot_waste: float
    n_slots: int
    n_blocks: int
    slots: PoolPlan
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The plan by name, for JSON."""
        return asdict(self)


def total_bytes(needs: MemoryNeeds, n_slots: int, *, io_threads: int) -> int:
    """Bytes taken with `n_slots` slots."""
    return (
        needs.dense_bytes
        + needs.kv_bytes
        + needs.working_bytes
        + _overhead(needs, n_slots, io_threads)
        + pool_bytes(n_slots, needs.slot_bytes)
    )


def plan_memory(
    budget_bytes: int,
    needs: MemoryNeeds,
    *,
    prefetch_depth: int = 1,
    io_threads: int = 2,
) -> MemoryPlan:
    """The division of `budget_bytes`: what must be there first, then as many slots as fit.

    One slot is enough to work, if slowly; more than one for each block are not made.

    Raises:
        BudgetError: `budget-too-small`, with the least budget that works.
    """
    n_blocks = needs.n_blocks
    fewest = 1 if n_blocks else 0
    smallest = total_bytes(needs, fewest, io_threads=io_threads)
    if budget_bytes < smallest:
        raise BudgetError(
            needs.where,
            f"a budget of {format_size(budget_bytes)} ({budget_bytes} bytes) is too small",
            f"at least {smallest} bytes ({format_size(smallest)}): "
            f"{format_size(needs.dense_bytes)} of dense tensors, "
            f"{format_size(needs.kv_bytes)} of KV cache, "
            f"{format_size(needs.working_bytes)} of working memory, "
            f"{format_size(_overhead(needs, fewest, io_threads))} of bookkeeping and "
            f"{format_size(pool_bytes(fewest, needs.slot_bytes))} for one slot",
            f"give --memory {-(-smallest // 2**20)}M, or more for speed, or a shorter --context",
            smallest_bytes=smallest,
        )
    n_slots = fewest
    if n_blocks:
        per_slot = needs.slot_bytes + SLOT_OVERHEAD
        n_slots = min(n_blocks, fewest + (budget_bytes - smallest) // per_slot)
        # A pool that grows past the size from which it is aligned loses some slots to that.
        while total_bytes(needs, n_slots, io_threads=io_threads) > budget_bytes:
            n_slots -= 1
    slots = equal_slots(
        needs.slot_bytes, needs.blocks_per_layer, n_slots, needs.top_k, prefetch_depth
    )
    notes = list(slots.notes)
    if needs.slot_waste > 0.1:
        notes.append(
            f"{needs.slot_waste:.0%} of the pool is lost because blocks differ in size and every "
            "slot can hold the largest; quantise all layers alike to use it"
        )
    return MemoryPlan(
        budget_bytes=budget_bytes,
        dense_bytes=needs.dense_bytes,
        kv_bytes=needs.kv_bytes,
        working_bytes=needs.working_bytes,
        overhead_bytes=_overhead(needs, n_slots, io_threads),
        pool_bytes=pool_bytes(n_slots, needs.slot_bytes),
        total_bytes=total_bytes(needs, n_slots, io_threads=io_threads),
        smallest_bytes=smallest,
        largest_bytes=total_bytes(needs, n_blocks, io_threads=io_threads),
        slot_bytes=needs.slot_bytes,
        slot_waste=needs.slot_waste,
        n_slots=n_slots,
        n_blocks=n_blocks,
        slots=slots,
        notes=tuple(notes),
    )


def default_budget(needs: MemoryNeeds, available_bytes: int | None, *, io_threads: int = 2) -> int:
    """The budget taken when none is given: room for every block, within what is available.

    That is the smaller of what all blocks need and 80 % of `available_bytes` (None: unknown), but
    never less than the smallest budget that works.

    Raises:
        UsageError: `no-memory-figure` when nothing is known of the memory available.
        BudgetError: `budget-too-small` when even the smallest that works is not available.
    """
    if available_bytes is None:
        raise UsageError(
            "no-memory-figure",
            needs.where,
            "the system does not tell how much memory is available",
            "a budget",
            "give --memory",
        )
    smallest = total_bytes(needs, 1 if needs.n_blocks else 0, io_threads=io_threads)
    if smallest > available_bytes:
        raise BudgetError(
            needs.where,
            f"{format_size(available_bytes)} of memory are available",
            f"the smallest budget that works is {format_size(smallest)}",
            "free some memory, or give a shorter --context",
            smallest_bytes=smallest,
        )
    largest = total_bytes(needs, needs.n_blocks, io_threads=io_threads)
    return max(smallest, min(largest, int(available_bytes * DEFAULT_SHARE)))


def index_bytes(shape: Sequence[int]) -> int:
    """Bytes of the index `(n_layers, n_experts)` in memory: extents, checksums, presence."""
    n_layers, n_experts = shape
    return n_layers * n_experts * (16 + 8 + 1)


def _overhead(needs: MemoryNeeds, n_slots: int, io_threads: int) -> int:
    return FIXED_BYTES + needs.index_bytes + io_threads * THREAD_BYTES + n_slots * SLOT_OVERHEAD
