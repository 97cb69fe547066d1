"""Where the blocks of one file, or of several, stand on disk."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from colibri_format import Geometry, Layout, UsageError, Volume
from colibri_format.blockindex import BlockIndex
from colibri_format.layout import round_up

from .disk import BlockRead


class BlockSource(Protocol):
    """What the store reads of a file; `colibri_format.Reader` is one.

    `block_index` has arrays of shape `(n_layers, n_experts)`; sizes are 0 where the layer has no
    such expert. `volume_paths` are the files that the numbers from 1 on in
    `block_index.volumes` stand for, `volumes` what is recorded of them.
    """

    @property
    def path(self) -> Path: ...
    @property
    def file_size(self) -> int: ...
    @property
    def geometry(self) -> Geometry: ...
    @property
    def block_index(self) -> BlockIndex: ...
    @property
    def layouts(self) -> tuple[Layout, ...]: ...
    @property
    def volumes(self) -> tuple[Volume, ...]: ...
    @property
    def volume_paths(self) -> tuple[Path, ...]: ...


@dataclass(frozen=True, slots=True)
class FileFacts:
    """A file that blocks are read from, and the bytes it had when its index was read."""

    path: Path
    file_size: int


def block_files(sources: Sequence[BlockSource]) -> tuple[FileFacts, ...]:
    """The files of all sources in the order that `BlockRead.file` counts them.

    Raises:
        UsageError: `no-such-volume` for a striped file that was opened without its volumes.
    """
    files = []
    for source in sources:
        if len(source.volume_paths) < len(source.volumes):
            raise UsageError(
                "no-such-volume",
                source.path,
                f"was opened without its {len(source.volumes)} volumes",
                "the volumes that hold its blocks",
                "open it with them",
            )
        files.append(FileFacts(source.path, source.file_size))
        for path, volume in zip(source.volume_paths, source.volumes, strict=True):
            files.append(FileFacts(path, volume.file_size))
    return tuple(files)


@dataclass(frozen=True, slots=True)
class BlockRow:
    """Where the blocks of a layer stand, `(n_experts,) int64` each; sizes are 0 where there is
    none. `own_layer` is the layer's number in its source, `padded` what a block takes in a file,
    `files` the numbers of `BlockTable.files`; `checksums` are uint64."""

    own_layer: int
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    padded: NDArray[np.int64]
    checksums: NDArray[np.uint64]
    files: NDArray[np.int64]


class BlockTable:
    """The blocks of one source, or of several one after the other.

    Layers are numbered through: those of the second source follow the first's, and
    `first_layers[i]` is the number of layer 0 of source `i`. Look-ups cost the same wherever the
    block is and allocate nothing.

    Raises:
        UsageError: `no-such-volume` as `block_files`, `no-source` without any source.
    """

    def __init__(self, sources: Sequence[BlockSource]) -> None:
        if not sources:
            raise UsageError("no-source", "store", "no source was given", "at least one")
        self.files = block_files(sources)
        self.n_layers = sum(source.geometry.n_layers for source in sources)
        first_layers = []
        self._parts: list[_Part] = []
        self._part_of: list[_Part] = []
        first_layer = first_file = 0
        for source in sources:
            part = _Part(source, first_layer, first_file)
            first_layers.append(first_layer)
            first_layer += part.n_layers
            first_file += 1 + len(source.volumes)
            self._parts.append(part)
            self._part_of += [part] * part.n_layers
        self.first_layers = tuple(first_layers)

    def span(self, number: int) -> tuple[int, int]:
        """The number of source `number`'s first layer, and how many it has."""
        return self.first_layers[number], self._parts[number].n_layers

    @property
    def most_experts(self) -> int:
        """Experts of the widest source's layers."""
        return max(part.n_experts for part in self._parts)

    def has(self, layer: int, expert: int) -> bool:
        """Whether there is such a block; any numbers may be asked for."""
        if not 0 <= layer < self.n_layers:
            return False
        part = self._part_of[layer]
        return 0 <= expert < part.n_experts and part.size(layer, expert) > 0

    def layout(self, layer: int, expert: int) -> Layout:
        """The layout of a block that there is."""
        return self._part_of[layer].layout(layer, expert)

    def padded_bytes(self, layer: int, expert: int) -> int:
        """Bytes that a slot needs for a block that there is."""
        part = self._part_of[layer]
        return round_up(part.size(layer, expert), part.alignment)

    def census(self) -> tuple[dict[int, int], ...]:
        """For each layer, how many blocks need slots of how many bytes."""
        return tuple(layer for part in self._parts for layer in part.census())

    def first(self) -> tuple[int, int] | None:
        """The address of the first block there is, None where there is none."""
        for part in self._parts:
            present = np.argwhere(part.sizes > 0)
            if len(present):
                return part.first_layer + int(present[0][0]), int(present[0][1])
        return None

    def first_of_each_file(self) -> list[tuple[int, int] | None]:
        """For each of `files`, the address of the first block in it, None where it has none."""
        found: list[tuple[int, int] | None] = []
        for part in self._parts:
            for volume in range(part.n_files):
                here = np.argwhere((part.sizes > 0) & (part.volumes == volume))
                place = here[0].tolist() if len(here) else None
                found.append(None if place is None else (part.first_layer + place[0], place[1]))
        return found

    def following(self, n_layers: int) -> tuple[tuple[int, ...], ...]:
        """For each layer, the next `n_layers` of its source that have blocks, the first after the
        last: a model asks for its first layer again at the next token."""
        found: list[tuple[int, ...]] = []
        for part in self._parts:
            has_blocks = (part.sizes > 0).any(axis=1)
            layers = [part.first_layer + int(i) for i in np.flatnonzero(has_blocks)]
            for layer in range(part.first_layer, part.first_layer + part.n_layers):
                place = bisect_right(layers, layer)
                later = [*layers[place:], *layers[:place]]
                found.append(tuple(other for other in later[:n_layers] if other != layer))
        return tuple(found)

    def row(self, layer: int) -> BlockRow:
        """All blocks of a layer."""
        return self._part_of[layer].row(layer)

    def plan_read(
        self, layer: int, expert: int, *, slot: int, buffer: NDArray[np.uint8]
    ) -> BlockRead:
        """The read of a block into a slot: its payload and the padding after it."""
        part = self._part_of[layer]
        return part.plan_read(layer, expert, slot, buffer)


class _Part:
    """The blocks of one source within a table."""

    def __init__(self, source: BlockSource, first_layer: int, first_file: int) -> None:
        index = source.block_index
        self.n_layers: int = index.entries.shape[0]
        self.n_experts: int = index.entries.shape[1]
        self.n_files = 1 + len(source.volumes)
        self.alignment = source.geometry.alignment
        self.first_layer = first_layer
        self.sizes = index.entries["size"]
        self._index = index
        self.volumes = index.volumes
        self._first_file = first_file
        self._layouts = source.layouts
        # Memoryviews of the same bytes give one number in a tenth of NumPy's time. The index is
        # little-endian; where the machine is, nothing is copied.
        entries = np.ascontiguousarray(index.entries).reshape(-1).view("<u8")
        self._entries = entries.astype(np.uint64, copy=False).data
        sums = np.ascontiguousarray(index.checksums).reshape(-1)
        self._checksums = sums.astype(np.uint64, copy=False).data
        self._layout_numbers = (
            np.ascontiguousarray(index.layouts.astype(np.uint16)).reshape(-1).data
        )
        self._volumes = np.ascontiguousarray(index.volumes.astype(np.uint16)).reshape(-1).data

    def size(self, layer: int, expert: int) -> int:
        place = (layer - self.first_layer) * self.n_experts + expert
        size: int = self._entries[2 * place + 1]
        return size

    def layout(self, layer: int, expert: int) -> Layout:
        place = (layer - self.first_layer) * self.n_experts + expert
        number: int = self._layout_numbers[place]
        return self._layouts[number]

    def census(self) -> list[dict[int, int]]:
        counts = []
        for row in self.sizes:
            sizes, numbers = np.unique(row[row > 0], return_counts=True)
            layer: dict[int, int] = {}
            for size, number in zip(sizes.tolist(), numbers.tolist(), strict=True):
                padded = round_up(size, self.alignment)
                layer[padded] = layer.get(padded, 0) + number
            counts.append(layer)
        return counts

    def row(self, layer: int) -> BlockRow:
        own_layer = layer - self.first_layer
        sizes = self.sizes[own_layer].astype(np.int64)
        return BlockRow(
            own_layer,
            self._index.entries["offset"][own_layer].astype(np.int64),
            sizes,
            -(-sizes // self.alignment) * self.alignment,
            self._index.checksums[own_layer].astype(np.uint64),
            self._first_file + self.volumes[own_layer].astype(np.int64),
        )

    def plan_read(self, layer: int, expert: int, slot: int, buffer: NDArray[np.uint8]) -> BlockRead:
        own_layer = layer - self.first_layer
        place = own_layer * self.n_experts + expert
        size = self._entries[2 * place + 1]
        return BlockRead(
            layer=own_layer,
            expert=expert,
            offset=self._entries[2 * place],
            length=round_up(size, self.alignment),
            size=size,
            checksum=self._checksums[place],
            slot=slot,
            buffer=buffer,
            file=self._first_file + self._volumes[place],
            tag=layer,
        )


def block_slot_bytes(source: BlockSource) -> int:
    """Bytes a slot must have to hold any block of `source`, padding included; 0 without blocks."""
    return max((size for layer in BlockTable([source]).census() for size in layer), default=0)


def plan_read(
    source: BlockSource, layer: int, expert: int, *, slot: int, buffer: NDArray[np.uint8]
) -> BlockRead:
    """The read of one block of `source` into a slot; for many, `BlockTable.plan_read`."""
    return BlockTable([source]).plan_read(layer, expert, slot=slot, buffer=buffer)


def slot_waste(census: Sequence[dict[int, int]], slot_sizes: Sequence[int]) -> float:
    """Share of a full pool that slots of `slot_sizes` waste on blocks smaller than they, 0 to 1.

    `census` is `BlockTable.census`; each block is counted in the smallest slot that holds it.
    """
    ordered = sorted(slot_sizes)
    used = taken = 0
    for layer in census:
        for size, number in layer.items():
            used += size * number
            taken += next(slot for slot in ordered if slot >= size) * number
    return 1.0 - used / taken if taken else 0.0
