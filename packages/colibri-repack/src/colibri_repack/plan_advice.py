"""What is wrong with a file's proportions, and what would make it better, by how much."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from colibri_format import FilePlan, Layout, Reader, round_up

MIN_ALIGNMENT: Final = 4096
ALIGNMENTS: Final = (4096, 16_384, 65_536)
MAX_GOOD_PADDING: Final = 0.05
MAX_GOOD_INDEX: Final = 100 * 2**20
_MOST_GROUPED: Final = 64

Uses = tuple[tuple[Layout, int], ...]


def uses_of(file: FilePlan | Reader) -> Uses:
    """Each layout of `file`, and how many blocks have it."""
    counts = np.bincount(file.expert_layouts.reshape(-1), minlength=len(file.layouts))
    return tuple(zip(file.layouts, counts.tolist(), strict=False))


def padding_share(uses: Uses, alignment: int, n_grouped: int = 1) -> float:
    """The part of the blocks' extents that holds no weights, if they were aligned like this.

    With `n_grouped`, so many experts would share one extent; each still starts at a segment's
    multiple.
    """
    stored = weights = 0
    for layout, n_blocks in uses:
        n_extents = -(-n_blocks // n_grouped)
        # The last segment of an expert is followed by the next expert's first.
        grouped = round_up(layout.block_size, 64) * (n_grouped - 1) + layout.block_size
        stored += n_extents * round_up(grouped, alignment)
        weights += n_blocks * sum(segment.size for segment in layout.segments)
    return 1 - weights / stored if stored else 0.0


def padding_shares(uses: Uses, alignments: Iterable[int] = ALIGNMENTS) -> dict[int, float]:
    """`padding_share` by alignment."""
    return {alignment: padding_share(uses, alignment) for alignment in alignments}


def padding_advice(uses: Uses, alignment: int) -> str:
    """What brings padding below 5 %, in words; empty where it is."""
    share = padding_share(uses, alignment)
    if share <= MAX_GOOD_PADDING:
        return ""
    smaller = [MIN_ALIGNMENT << n for n in range(9) if MIN_ALIGNMENT << n < alignment]
    shares = padding_shares(uses, smaller)
    good = [a for a, found in shares.items() if found <= MAX_GOOD_PADDING]
    text = f"{share:.1%} of the blocks' space is padding (above {MAX_GOOD_PADDING:.0%}): "
    if good:
        return text + f"--block-size {max(good) // 1024}K gives {shares[max(good)]:.1%}"
    if shares:
        best = min(shares, key=lambda a: (shares[a], -a))
        text += f"--block-size {best // 1024}K gives {shares[best]:.1%}; "
    else:
        text += f"experts are small, {MIN_ALIGNMENT} is the smallest block size there is; "
    return text + _grouping_advice(uses)


def _grouping_advice(uses: Uses) -> str:
    for n_grouped in range(2, _MOST_GROUPED + 1):
        share = padding_share(uses, MIN_ALIGNMENT, n_grouped)
        if share <= MAX_GOOD_PADDING:
            return (
                f"{n_grouped} experts in one block of {MIN_ALIGNMENT} bytes' alignment would have "
                f"{share:.1%}, which this version does not write; a type of more bits, or a model "
                "with larger experts, has less"
            )
    return "a type of more bits, or a model with larger experts, has less"


def index_advice(
    index_bytes: int, n_layers: int, n_experts: int, block_bytes: int | None = None
) -> str:
    """What is cut too fine where the index is above 100 MiB, in words; else empty.

    `block_bytes` is the payload of all blocks, where it is known.
    """
    if index_bytes <= MAX_GOOD_INDEX:
        return ""
    factor = -(-index_bytes // MAX_GOOD_INDEX)
    n_places = n_layers * n_experts
    each = "" if block_bytes is None else f", {block_bytes // n_places} bytes each"
    return (
        f"the index takes {index_bytes} bytes (above {MAX_GOOD_INDEX}) for {n_layers} layers of "
        f"{n_experts} experts: they are cut too fine{each}, where "
        f"a block should be one large read; {factor} of them in one make the index "
        f"{index_bytes // factor} bytes"
    )
