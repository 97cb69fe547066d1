"""How a memory budget is spent: dense tensors, KV cache, working memory, and slots for the rest.

Pure: sizes in, plan out. Everything that the runtime allocates in proportion to the model or the
pool is counted. The interpreter, its libraries and the tokenizer are not: they are measured
before loading and stated beside the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from colibri_format import UsageError, format_size

from .blocks import slot_waste
from .errors import BudgetError
from .pool import can_give_back, mapped_bytes
from .pool_plan import SLOT_OVERHEAD, PoolPlan, plan_pool, pool_cost

THREAD_BYTES: Final = 64 * 1024
"""What an I/O thread touches of its stack and of its own malloc arena (measured below 20 KB)."""

FIXED_BYTES: Final = 2**20
"""Python objects of reader, weights and decoder, whatever the model's size (measured 0.6 MB)."""

POLICY_BLOCK_BYTES: Final = 192
"""What a policy keeps of a block, in Python (measured 45 to 175 once each was asked for); in C,
with the 61 bytes of the store's core, 102 to 143."""

RECALL_LAYER_BYTES: Final = 18 * 1024
"""What `recall` remembers of a layer's visits (16.5 KiB of arrays)."""

HISTORY_BLOCK_BYTES: Final = 104
"""What a history keeps of a block: a count (measured 33), and a share while a store is opened
(measured 70)."""

DEFAULT_SHARE: Final = 0.8
"""Share of the memory that is available which is taken when no budget is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """What a model needs, in bytes; `census` says, for each layer, how many blocks need slots of
    how many bytes. `where` names the model in errors. `idle_bytes` of KV cache and working memory
    are not used at first, and may be lent to the pool.
    """

    where: str
    dense_bytes: int
    kv_bytes: int
    working_bytes: int
    index_bytes: int
    census: tuple[dict[int, int], ...]
    top_k: int
    idle_bytes: int = 0

    @property
    def n_blocks(self) -> int:
        """Blocks of all layers."""
        return sum(number for layer in self.census for number in layer.values())

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot that holds any block, 0 without blocks."""
        return max((size for layer in self.census for size in layer), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """A budget's division in bytes; `total_bytes` never exceeds `budget_bytes`.

    `pool_bytes` includes what the alignment of the pool may lose, `overhead_bytes` the index, the
    I/O threads and Python's own objects. `smallest_bytes` is the least budget that works,
    `largest_bytes` the most that can be used: there every block has a slot. `slot_bytes` is the
    largest slot; `slot_waste` the share of a full pool that blocks smaller than their slots leave
    unused, and `equal_waste` what it would be if all slots were equal. `n_lent` slots more than
    `n_slots` are used while `kv_bytes` and `working_bytes` are not needed whole.
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
    equal_waste: float
    n_slots: int
    n_lent: int
    n_blocks: int
    slots: PoolPlan
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The plan by name, for JSON."""
        return asdict(self)


def total_bytes(needs: MemoryNeeds, n_slots: int, *, io_threads: int) -> int:
    """Bytes taken with `n_slots` slots of one size."""
    pool = pool_cost(n_slots, needs.slot_bytes) if n_slots else 0
    return _fixed_bytes(needs, io_threads) + pool


def largest_bytes(needs: MemoryNeeds, *, io_threads: int) -> int:
    """Bytes taken when every block has a slot: more are of no use."""
    if not needs.n_blocks:
        return total_bytes(needs, 0, io_threads=io_threads)
    whole = plan_pool(2**62, needs.census, top_k=needs.top_k)
    return _fixed_bytes(needs, io_threads) + whole.cost_bytes


def plan_memory(
    budget_bytes: int,
    needs: MemoryNeeds,
    *,
    prefetch_depth: int = 1,
    io_threads: int = 2,
    cache_bytes: int | None = None,
    counts: NDArray[np.floating] | None = None,
) -> MemoryPlan:
    """The division of `budget_bytes`: what must be there first, then as many slots as fit.

    One slot is enough to work, if slowly; more than one for each block are not made. The pool
    takes at most `cache_bytes` of the budget, with what stands for its slots in Python and with
    slots that are lent.
    `counts[layer, expert]` is how often each expert was asked for in the past, if that is known.

    Raises:
        BudgetError: `budget-too-small`, with the least budget that works.
    """
    n_blocks = needs.n_blocks
    fewest = 1 if n_blocks else 0
    smallest = total_bytes(needs, fewest, io_threads=io_threads)
    fixed = _fixed_bytes(needs, io_threads)
    one_slot = smallest - fixed
    if budget_bytes < smallest:
        raise BudgetError(
            needs.where,
            f"a budget of {format_size(budget_bytes)} ({budget_bytes} bytes) is too small",
            f"at least {smallest} bytes ({format_size(smallest)}): "
            f"{format_size(needs.dense_bytes)} of dense tensors, "
            f"{format_size(needs.kv_bytes)} of KV cache, "
            f"{format_size(needs.working_bytes)} of working memory, "
            f"{format_size(_overhead(needs, io_threads))} of bookkeeping and "
            f"{format_size(one_slot)} for one slot",
            f"give --memory {-(-smallest // 2**20)}M, or more for speed, or a shorter --context",
            smallest_bytes=smallest,
        )
    room = budget_bytes - fixed
    if cache_bytes is not None and n_blocks:
        if cache_bytes < one_slot:
            raise BudgetError(
                needs.where,
                f"a pool of {format_size(cache_bytes)} ({cache_bytes} bytes) is too small",
                f"at least {one_slot} bytes ({format_size(one_slot)}) for one slot",
                f"give --cache-size {-(-one_slot // 2**20)}M, or more for speed, or leave it out",
                smallest_bytes=smallest,
            )
        room = min(room, cache_bytes)

    def plan(room: int) -> PoolPlan:
        return plan_pool(
            room, needs.census, top_k=needs.top_k, prefetch_depth=prefetch_depth, counts=counts
        )

    slots = plan(room)
    if n_lent := _most_lent(slots, needs.idle_bytes):
        # What stands for them in Python is counted always.
        apart = n_lent * SLOT_OVERHEAD
        if one_slot + apart <= room < slots.cost_bytes + apart:
            slots = plan(room - apart)
        n_lent = min(
            _most_lent(slots, needs.idle_bytes), (room - slots.cost_bytes) // SLOT_OVERHEAD
        )
        if cache_bytes is not None:
            a_slot = slots.classes[-1].slot_bytes + SLOT_OVERHEAD
            n_lent = min(n_lent, (cache_bytes - slots.cost_bytes) // a_slot)
        slots = replace(slots, n_lent=n_lent)
    notes = list(slots.notes)
    sizes = [c.slot_bytes for c in slots.classes]
    waste = slot_waste(needs.census, sizes)
    if waste > 0.1:
        notes.append(
            f"{waste:.0%} of the pool is lost because blocks are smaller than their slots; "
            "quantise all layers alike, or give more memory, to use it"
        )
    overhead = _overhead(needs, io_threads)
    overhead += (slots.n_slots + slots.n_lent) * SLOT_OVERHEAD
    return MemoryPlan(
        budget_bytes=budget_bytes,
        dense_bytes=needs.dense_bytes,
        kv_bytes=needs.kv_bytes,
        working_bytes=needs.working_bytes,
        overhead_bytes=overhead,
        pool_bytes=mapped_bytes(slots.arena_bytes),
        total_bytes=fixed + slots.cost_bytes,
        smallest_bytes=smallest,
        largest_bytes=fixed + slots.largest_bytes,
        slot_bytes=needs.slot_bytes,
        slot_waste=waste,
        equal_waste=slot_waste(needs.census, [needs.slot_bytes]),
        n_slots=slots.n_slots,
        n_lent=slots.n_lent,
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
    largest = largest_bytes(needs, io_threads=io_threads)
    return max(smallest, min(largest, int(available_bytes * DEFAULT_SHARE)))


def index_bytes(shape: Sequence[int]) -> int:
    """Bytes of the index `(n_layers, n_experts)` in memory: extents, checksums, and numbers of
    layout and volume, those twice (the reader's, and the store's for quick look-ups)."""
    n_layers, n_experts = shape
    return n_layers * n_experts * (16 + 8 + 2 * (2 + 2))


def usage_bytes(shape: Sequence[int], *, is_recalling: bool, keeps_history: bool) -> int:
    """Upper bound in bytes of what a policy and a history keep of `(n_layers, n_experts)` blocks.

    `is_recalling`: the policy remembers tokens (`recall`).
    """
    n_layers, n_experts = shape
    per_layer = RECALL_LAYER_BYTES if is_recalling else 0
    per_block = POLICY_BLOCK_BYTES + (HISTORY_BLOCK_BYTES if keeps_history else 0)
    return n_layers * (per_layer + n_experts * per_block)


def _fixed_bytes(needs: MemoryNeeds, io_threads: int) -> int:
    """What is taken whatever the pool."""
    return needs.dense_bytes + needs.kv_bytes + needs.working_bytes + _overhead(needs, io_threads)


def _most_lent(slots: PoolPlan, idle_bytes: int) -> int:
    """How many slots more `idle_bytes` hold, and blocks of the largest class want."""
    if not slots.n_slots or not idle_bytes or not can_give_back():
        return 0
    last = slots.classes[-1]
    return max(0, min(idle_bytes // last.slot_bytes, last.n_blocks - last.plan.n_slots))


def _overhead(needs: MemoryNeeds, io_threads: int) -> int:
    return FIXED_BYTES + needs.index_bytes + io_threads * THREAD_BYTES
