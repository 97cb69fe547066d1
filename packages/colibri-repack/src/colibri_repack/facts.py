"""What there is to know of a `.colibri` file at a glance, planned or written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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

from .plan_advice import ALIGNMENTS, padding_shares, uses_of


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
class LayerTypes:
    """Encodings in `layers`: of their blocks' segments by role, and of dense tensors by number.

    `x16` behind a type: rows interleaved. `segments` has several types of a role joined by `/`
    where experts of a layer differ.
    """

    layers: tuple[int, ...]
    segments: dict[str, str]
    dense: dict[str, int]


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Figures of one file; all sizes in bytes.

    `token_bytes` are the blocks that one token reads when none is in memory: top_k padded blocks
    of every layer that has blocks (a dense model reads its single one; the largest ones where
    experts of a layer differ). Both are None for a file that says nothing of it. `dense_bytes`
    are read once. `padding_share` is the part of the blocks' padded extents that holds no weights;
    `padding_shares` the same by alignment, at the file's and at others. `interleaved_bytes` are
    those of matrices with interleaved rows.
    """

    family: str
    n_layers: int
    n_experts: int
    top_k: int | None
    n_blocks: int
    alignment: int
    block_sizes: tuple[BlockSize, ...]
    padding_share: float
    padding_shares: dict[int, float]
    interleaved_bytes: int
    index_bytes: int
    token_bytes: int | None
    dense_bytes: int
    block_bytes: int
    embedded_bytes: int
    file_size: int
    volume_sizes: dict[str, int]
    types: dict[str, TypeTotal]
    layer_types: tuple[LayerTypes, ...]

    def to_record(self) -> dict[str, Any]:
        """As JSON-ready values; numbers that are keys as texts."""
        record = asdict(self)
        shares = {str(alignment): share for alignment, share in self.padding_shares.items()}
        return record | {"padding_shares": shares}


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
    tensors = tuple(tensors)
    stored = padding = token_bytes = interleaved = 0
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
            interleaved += n_blocks * sum(s.size for s in layout.segments if s.row_interleave)
    dense_bytes = 0
    for tensor in tensors:
        total = types.setdefault(tensor.dtype.name, [0, 0, 0, 0])
        total[0] += 1
        total[1] += tensor.size
        dense_bytes += tensor.size
        interleaved += tensor.size if tensor.row_interleave else 0
    alignments = sorted({*ALIGNMENTS, alignment})
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
        padding_shares=padding_shares(uses_of(file), alignments),
        interleaved_bytes=interleaved,
        index_bytes=file.index_bytes,
        token_bytes=None if top_k is None else token_bytes,
        dense_bytes=dense_bytes,
        block_bytes=stored,
        embedded_bytes=sum(entry.size for entry in entries),
        file_size=file.file_size,
        volume_sizes={volume.label: volume.file_size for volume in file.volumes},
        types={name: TypeTotal(*total) for name, total in sorted(types.items())},
        layer_types=_layer_types(file, tensors),
    )


def _layer_types(file: FilePlan | Reader, tensors: Sequence[DenseTensor]) -> tuple[LayerTypes, ...]:
    """Layers with the same types together, in order of their first."""
    dense: dict[int, dict[str, int]] = {}
    for tensor in tensors:
        if tensor.layer is not None:
            counts = dense.setdefault(tensor.layer, {})
            name = encoding(tensor.dtype.name, tensor.row_interleave)
            counts[name] = counts.get(name, 0) + 1
    groups: dict[str, LayerTypes] = {}
    for layer in range(file.geometry.n_layers):
        roles: dict[str, dict[str, None]] = {}
        for layout, _ in layouts_of_layer(file, layer):
            for s in layout.segments:
                name = encoding(s.dtype.name, s.row_interleave)
                roles.setdefault(s.role.name.lower(), {})[name] = None
        segments = {role: "/".join(names) for role, names in roles.items()}
        counts = dict(sorted(dense.get(layer, {}).items()))
        key = repr((segments, counts))
        layers = groups[key].layers if key in groups else ()
        groups[key] = LayerTypes((*layers, layer), segments, counts)
    return tuple(groups.values())


def encoding(name: str, row_interleave: int) -> str:
    """A type's name, with ` x16` behind it where rows are interleaved."""
    return f"{name} x{row_interleave}" if row_interleave else name


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
