"""How the slots of a pool are shared out: which layers keep how many blocks, what passes through.

Pure: counts in, counts out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from colibri_format import UsageError


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """A division of `n_slots` slots.

    `quotas[layer]` blocks of a layer are kept from one token to the next; `n_transit` further
    slots hold what is being read, computed or read ahead, and blocks beyond their layer's quota
    until their slot is wanted. At most `n_prefetch` slots hold blocks that were read ahead and not
    asked for yet. `notes` says, in words, what works badly with so few slots.
    """

    n_slots: int
    quotas: tuple[int, ...]
    n_transit: int
    n_prefetch: int
    notes: tuple[str, ...] = ()

    @property
    def n_protected(self) -> int:
        """Slots that keep blocks between tokens."""
        return sum(self.quotas)


def plan_slots(
    *, n_slots: int, blocks_per_layer: Sequence[int], top_k: int, prefetch_depth: int = 1
) -> SlotPlan:
    """The division of `n_slots` slots over layers that have `blocks_per_layer` blocks.

    Transit slots come first: one for each block that a token demands of one layer, and as many
    again for each layer of look-ahead, but at most a quarter of the pool (at least two where there
    are two: one to compute from, one to read into). The rest is spread evenly over the layers; a
    layer takes no more than it has blocks, and what one leaves goes to the others. Layers that get
    one more than others are spread evenly over the depth, so that reads are as well.

    The quotas and the transit slots always add up to `n_slots`, and there is at least one transit
    slot unless every block has a slot of its own. More slots than blocks are left in transit.

    Raises:
        UsageError: `bad-slots` unless there is a slot, or no block at all.
    """
    n_blocks = sum(blocks_per_layer)
    if n_slots < (1 if n_blocks else 0) or top_k < 1 or prefetch_depth < 0:
        raise UsageError(
            "bad-slots",
            "plan_slots",
            f"{n_slots} slots, top-k {top_k}, look-ahead {prefetch_depth}",
            "at least one slot, top-k 1 and look-ahead 0",
        )
    widest = max(blocks_per_layer, default=0)
    demand = min(top_k, widest)
    if n_slots >= n_blocks:
        ahead = min(prefetch_depth * demand, n_blocks)
        return SlotPlan(n_slots, tuple(blocks_per_layer), n_slots - n_blocks, ahead)
    n_transit = min(demand * (1 + prefetch_depth), max(2, n_slots // 4), n_slots)
    quotas = _spread(n_slots - n_transit, blocks_per_layer)
    n_transit = n_slots - sum(quotas)
    # What is read ahead leaves room for a whole demand, or for half of one that is cut short.
    n_prefetch = min(prefetch_depth * demand, max(n_transit // 2, n_transit - demand))
    return SlotPlan(
        n_slots, quotas, n_transit, n_prefetch, _notes(n_slots, quotas, demand, prefetch_depth)
    )


def _spread(n_slots: int, blocks_per_layer: Sequence[int]) -> tuple[int, ...]:
    """`n_slots` over layers, evenly, none above its number of blocks."""
    quotas = [0] * len(blocks_per_layer)
    left = n_slots
    while left:
        open_layers = [i for i, n in enumerate(blocks_per_layer) if quotas[i] < n]
        if not open_layers:
            break
        share, rest = divmod(left, len(open_layers))
        if share == 0:
            # Bresenham's even spacing of `rest` marks over the layers that still take one.
            n = len(open_layers)
            chosen = [
                layer for i, layer in enumerate(open_layers) if (i + 1) * rest // n > i * rest // n
            ]
            for layer in chosen:
                quotas[layer] += 1
            break
        for layer in open_layers:
            taken = min(share, blocks_per_layer[layer] - quotas[layer])
            quotas[layer] += taken
            left -= taken
    return tuple(quotas)


def _notes(
    n_slots: int, quotas: Sequence[int], demand: int, prefetch_depth: int
) -> tuple[str, ...]:
    notes = []
    if n_slots < demand:
        notes.append(
            f"{n_slots} slots are fewer than the {demand} experts of one layer that a token needs: "
            "they are read in rounds and nothing is kept; give more memory"
        )
    elif not any(quotas):
        notes.append(
            f"all {n_slots} slots are in transit: no expert is kept from one token to the next, "
            "so nearly all are read again for each; give more memory"
        )
    elif demand > 1 and max(quotas) < demand:
        notes.append(
            f"at most {max(quotas)} experts are kept a layer, fewer than the {demand} that a token "
            "needs of it: few hits are to be expected; more memory helps most here"
        )
    if prefetch_depth and n_slots == 1:
        notes.append("one slot leaves nowhere to read ahead: prefetch is off")
    return tuple(notes)
