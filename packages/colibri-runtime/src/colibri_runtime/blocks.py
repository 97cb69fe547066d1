"""What the store must know of a file to read its blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from colibri_format import Geometry, Layout
from colibri_format.layout import round_up

from .disk import BlockRead


class BlockSource(Protocol):
    """Where each block stands; `colibri_format.Reader` is one.

    `index` is a structured array `(n_layers, n_experts)` with fields `offset` and `size`, both 0
    where the layer has no such expert; `checksums` is uint64 of the same shape.
    """

    @property
    def path(self) -> Path: ...
    @property
    def file_size(self) -> int: ...
    @property
    def geometry(self) -> Geometry: ...
    @property
    def index(self) -> NDArray[np.void]: ...
    @property
    def checksums(self) -> NDArray[np.uint64]: ...
    def layout(self, layer: int) -> Layout | None: ...


def block_slot_bytes(source: BlockSource) -> int:
    """Bytes a slot must have to hold any block of `source`, padding included; 0 without blocks."""
    largest = int(source.index["size"].max(initial=0))
    return round_up(largest, source.geometry.alignment)


def count_blocks(source: BlockSource) -> tuple[int, ...]:
    """How many blocks each layer has."""
    return tuple(int(n) for n in (source.index["size"] > 0).sum(axis=1))


def first_block(source: BlockSource) -> tuple[int, int] | None:
    """The address of the first block there is, None where there is none."""
    present = np.argwhere(source.index["size"] > 0)
    return (int(present[0][0]), int(present[0][1])) if len(present) else None


def slot_waste(source: BlockSource) -> float:
    """Share of a full pool that equal slots waste on blocks smaller than the largest, 0 to 1."""
    sizes = source.index["size"]
    n_blocks = int(np.count_nonzero(sizes))
    if not n_blocks:
        return 0.0
    alignment = source.geometry.alignment
    padded = -(-sizes.astype(np.int64) // alignment) * alignment
    return 1.0 - float(np.sum(padded)) / (n_blocks * block_slot_bytes(source))


def plan_read(
    source: BlockSource, layer: int, expert: int, *, slot: int, buffer: NDArray[np.uint8]
) -> BlockRead:
    """The read of block `(layer, expert)` into a slot: its payload and the padding after it."""
    entry = source.index[layer, expert]
    size = int(entry["size"])
    return BlockRead(
        layer=layer,
        expert=expert,
        offset=int(entry["offset"]),
        length=round_up(size, source.geometry.alignment),
        size=size,
        checksum=int(source.checksums[layer, expert]),
        slot=slot,
        buffer=buffer,
    )
