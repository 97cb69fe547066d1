"""What there is to know of a `.colibri` file at a glance, planned or written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from colibri_format import (
    NO_LAYOUT,
    DenseTensor,
    FileEntry,
    FilePlan,
    Layout,
    ModelSpec,
    Reader,
    block_padding,
    round_up,
)


@dataclass(frozen=True, slots=True)
class TypeTotal:
    """Tensors and bytes of one encoding: in dense tensors, and in segments of blocks."""

    dense_tensors: int
    dense_bytes: int
    segments: int
    segment_bytes: int


@dataclass(frozen=True, slots=True)
class BlockSize:
    """Blocks of `size` payload bytes that take `padded` on disk, in `layers`."""

    size: int
    padded: int
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Figures of one file; all sizes in bytes.

    `token_bytes` are the blocks that one token reads when none is in memory: top_k padded blocks
    of every layer that has blocks (a dense model reads its single one; the largest ones where
    experts of a layer differ). Both are None for a file that says nothing of it. `dense_bytes`
    are read once. `padding_share` is the part of the blocks' padded extents that holds no weights.
    """

    family: str
    n_layers: int
    n_experts: int
    top_k: int | None
    n_blocks: int
    alignment: int
    block_sizes: tuple[BlockSize, ...]
    padding_share: float
    index_bytes: int
    token_bytes: int | None
    dense_bytes: int
    block_bytes: int
    embedded_bytes: int
    file_size: int
    volume_sizes: dict[str, int]
    types: dict[str, TypeTotal]

    def to_record(self) -> dict[str, Any]:
        """As JSON-ready values."""
        return asdict(self)


def facts_of_plan(plan: FilePlan, top_k: int | None, family: str) -> FileFacts:
    """The facts of a file that is planned."""
    return _facts(plan, plan.tensors, plan.files, top_k, family)


def facts_of_file(reader: Reader, model: ModelSpec | None, family: str) -> FileFacts:
    """The facts of a file that is open."""
    top_k: int | None = None
    if model is not None:
        top_k = model.moe.top_k if model.moe else 1
    else:
        # Files of families that are repacked only have the number in their metadata.
        said = reader.metadata.get("top_k")
        if type(said) is int and 0 < said <= reader.geometry.n_experts:
            top_k = said
    return _facts(reader, reader.tensors.values(), reader.files.values(), top_k, family)


def _facts(
    file: FilePlan | Reader,
    tensors: Iterable[DenseTensor],
    entries: Iterable[FileEntry],
    top_k: int | None,
    family: str,
) -> FileFacts:
    alignment = file.geometry.alignment
    layers_of: dict[int, list[int]] = {}
    types: dict[str, list[int]] = {}
    stored = padding = token_bytes = 0
    for layer in range(file.geometry.n_layers):
        left = top_k or 0
        for layout, n_blocks in layouts_of_layer(file, layer):
            padded = round_up(layout.block_size, alignment)
            layers_of.setdefault(layout.block_size, []).append(layer)
            stored += n_blocks * padded
            padding += n_blocks * block_padding(layout, alignment)
            token_bytes += min(left, n_blocks) * padded
            left -= min(left, n_blocks)
            _count_segments(types, layout, n_blocks)
    dense_bytes = 0
    for tensor in tensors:
        total = types.setdefault(tensor.dtype.name, [0, 0, 0, 0])
        total[0] += 1
        total[1] += tensor.size
        dense_bytes += tensor.size
    return FileFacts(
        family=family,
        n_layers=file.geometry.n_layers,
        n_experts=file.geometry.n_experts,
        top_k=top_k,
        n_blocks=int(np.count_nonzero(file.index["size"])),
        alignment=alignment,
        block_sizes=tuple(
            BlockSize(size, round_up(size, alignment), tuple(dict.fromkeys(layers)))
            for size, layers in sorted(layers_of.items())
        ),
        padding_share=padding / stored if stored else 0.0,
        index_bytes=file.index_bytes,
        token_bytes=None if top_k is None else token_bytes,
        dense_bytes=dense_bytes,
        block_bytes=stored,
        embedded_bytes=sum(entry.size for entry in entries),
        file_size=file.file_size,
        volume_sizes={volume.label: volume.file_size for volume in file.volumes},
        types={name: TypeTotal(*total) for name, total in sorted(types.items())},
    )


def layouts_of_layer(file: FilePlan | Reader, layer: int) -> list[tuple[Layout, int]]:
    """The layouts of a layer's blocks, the largest first, and how many blocks have each."""
    numbers, counts = np.unique(file.expert_layouts[layer], return_counts=True)
    found = [
        (file.layouts[number], n_blocks)
        for number, n_blocks in zip(numbers.tolist(), counts.tolist(), strict=True)
        if number != NO_LAYOUT
    ]
    return sorted(found, key=lambda item: -item[0].block_size)


def _count_segments(types: dict[str, list[int]], layout: Layout, n_blocks: int) -> None:
    for segment in layout.segments:
        total = types.setdefault(segment.dtype.name, [0, 0, 0, 0])
        total[2] += n_blocks
        total[3] += n_blocks * segment.size
