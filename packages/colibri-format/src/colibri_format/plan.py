"""Where every byte of a file will stand, decided before one is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .canonical import encode_canonical
from .dtypes import DType
from .errors import UsageError
from .header import Region, check_geometry, place_regions
from .interleave import can_interleave
from .layout import (
    INDEX_DTYPE,
    INTERLEAVE,
    MAX_ALIGN_LOG2,
    MAX_NAME_BYTES,
    MAX_RANK,
    MAX_SIZE,
    MIN_ALIGN_LOG2,
    SEGMENT_ALIGNMENT,
    DenseTensor,
    Extent,
    FileEntry,
    FileSpec,
    Geometry,
    Layout,
    SegmentSpec,
    TensorSpec,
    round_up,
)
from .tables import Tables, encode_tables, is_plain_name


@dataclass(frozen=True, slots=True, eq=False)
class FilePlan:
    """A whole file as extents; `index` has `INDEX_DTYPE` and shape `(n_layers, n_experts)`.

    Checksums of `tensors` and `files` are 0: only a writer knows them.
    """

    geometry: Geometry
    tables: Tables
    index: NDArray[Any]
    metadata: bytes
    regions: Mapping[Region, tuple[int, int]]
    region_lengths: Mapping[Region, int]
    file_size: int

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The distinct layouts, in order of first use."""
        return self.tables.layouts

    @property
    def layer_layouts(self) -> tuple[int | None, ...]:
        """Number of each layer's layout, None for layers without experts."""
        return self.tables.layer_layouts

    @property
    def tensors(self) -> tuple[DenseTensor, ...]:
        """The dense tensors in order of the file."""
        return self.tables.tensors

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """The embedded files in order of the file."""
        return self.tables.files

    @property
    def data_region(self) -> Extent:
        """The extent of the data region."""
        return Extent(self.regions[Region.DATA][0], self.region_lengths[Region.DATA])

    def layout(self, layer: int) -> Layout | None:
        """The layout of that layer's blocks."""
        number = self.layer_layouts[layer]
        return None if number is None else self.layouts[number]

    @property
    def n_blocks(self) -> int:
        """Experts that are present."""
        return int(np.count_nonzero(self.index["size"]))

    @property
    def block_bytes(self) -> int:
        """Payload of all blocks together, gaps between segments included."""
        return int(self.index["size"].sum(dtype=np.uint64))

    @property
    def padding_bytes(self) -> int:
        """Bytes of the blocks' extents that hold no weight: after payloads and between segments."""
        return sum(
            block_padding(self.layouts[number], self.geometry.alignment)
            * int(np.count_nonzero(self.index["size"][layer]))
            for layer, number in enumerate(self.layer_layouts)
            if number is not None
        )

    @property
    def padding_share(self) -> float:
        """`padding_bytes` as a part of the blocks' padded extents, 0 to 1."""
        total = sum(
            round_up(self.layouts[number].block_size, self.geometry.alignment)
            * int(np.count_nonzero(self.index["size"][layer]))
            for layer, number in enumerate(self.layer_layouts)
            if number is not None
        )
        return self.padding_bytes / total if total else 0.0

    @property
    def index_bytes(self) -> int:
        """Bytes of the index and its checksums, one copy."""
        return self.region_lengths[Region.INDEX] + self.region_lengths[Region.CHECKSUMS]


def block_padding(layout: Layout, alignment: int) -> int:
    """Bytes of a block's padded extent that belong to no segment."""
    return round_up(layout.block_size, alignment) - sum(s.size for s in layout.segments)


def plan_layout(
    *,
    n_layers: int,
    n_experts: int,
    layer_layouts: Sequence[Layout | None],
    alignment: int = 4096,
    present: NDArray[np.bool_] | None = None,
    tensors: Sequence[TensorSpec] = (),
    files: Sequence[FileSpec] = (),
    metadata: Mapping[str, Any] | None = None,
) -> FilePlan:
    """Every extent of a file with these contents; touches no file.

    `layer_layouts` has one layout for each layer, None for layers without experts; `present`,
    shape `(n_layers, n_experts)`, says which experts exist (default: all of layers with a
    layout). In the data region stand, each at a multiple of `alignment`: the tensors of no
    layer, the embedded files, the tensors of each layer, then the blocks layer by layer.

    >>> from colibri_format import DTYPES, Layout, Role, SegmentSpec
    >>> gate, up = (SegmentSpec(role, DTYPES["q8_0"], (64, 32)) for role in (Role.GATE, Role.UP))
    >>> down = SegmentSpec(Role.DOWN, DTYPES["q8_0"], (32, 64))
    >>> layout = Layout.of((gate, up, down))
    >>> plan = plan_layout(n_layers=2, n_experts=4, layer_layouts=[layout, layout])
    >>> plan.n_blocks, layout.block_size, plan.file_size
    (8, 6528, 106496)

    Raises:
        FormatError: `bad-geometry`.
        UsageError: `bad-alignment`, `bad-plan`, `bad-name`, `bad-metadata`, `bad-interleave`.
    """
    check_geometry(n_layers, n_experts, "plan")
    if alignment.bit_count() != 1 or not 2**MIN_ALIGN_LOG2 <= alignment <= 2**MAX_ALIGN_LOG2:
        raise UsageError(
            "bad-alignment",
            "plan",
            f"alignment {alignment}",
            f"a power of two from {2**MIN_ALIGN_LOG2} to {2**MAX_ALIGN_LOG2}",
        )
    if present is None:
        has_layout = np.array([layout is not None for layout in layer_layouts], np.bool_)
        present = np.repeat(has_layout[:, None], n_experts, axis=1)
    _check_present(layer_layouts, present, n_layers, n_experts)
    _check_names([t.name for t in tensors], [f.name for f in files])
    for spec in tensors:
        _check_tensor(spec, n_layers)
    layouts = tuple(dict.fromkeys(layout for layout in layer_layouts if layout is not None))
    for layout in layouts:
        _check_layout(layout)
    numbers = {layout: n for n, layout in enumerate(layouts)}
    dtypes: dict[str, DType] = {}
    for layout in layouts:
        dtypes |= {segment.dtype.name: segment.dtype for segment in layout.segments}
    dtypes |= {tensor.dtype.name: tensor.dtype for tensor in tensors}
    ordered = sorted(tensors, key=lambda t: n_layers if t.layer is None else t.layer)

    def tables(
        packs: NDArray[Any], placed: tuple[DenseTensor, ...], entries: tuple[FileEntry, ...]
    ) -> Tables:
        return Tables(
            tuple(dtypes.values()),
            layouts,
            tuple(None if x is None else numbers[x] for x in layer_layouts),
            packs,
            placed,
            entries,
        )

    draft = tables(
        np.zeros(n_layers + 2, INDEX_DTYPE),
        tuple(_placed(spec, 0) for spec in ordered),
        tuple(FileEntry(file.name, 0, file.size, 0) for file in files),
    )
    metadata_bytes = encode_canonical(metadata or {})
    lengths = dict.fromkeys(Region, 0) | {
        Region.INDEX: 16 * n_layers * n_experts,
        Region.CHECKSUMS: 8 * n_layers * n_experts,
        Region.TABLES: len(encode_tables(draft)),
        Region.METADATA: len(metadata_bytes),
    }
    start = place_regions(lengths, alignment)[0][Region.DATA][0]
    packs, placed, entries, position = _place_packs(ordered, files, n_layers, start, alignment)
    index, position = _place_blocks(layer_layouts, present, position, alignment)
    lengths[Region.DATA] = position - start
    regions, file_size = place_regions(lengths, alignment)
    if file_size >= MAX_SIZE:
        raise UsageError("bad-plan", "plan", f"a file of {file_size} bytes", "less than 2^62")
    return FilePlan(
        Geometry(n_layers, n_experts, alignment),
        tables(packs, placed, entries),
        index,
        metadata_bytes,
        regions,
        lengths,
        file_size,
    )


def _place_packs(
    tensors: Sequence[TensorSpec],
    files: Sequence[FileSpec],
    n_layers: int,
    position: int,
    alignment: int,
) -> tuple[NDArray[Any], tuple[DenseTensor, ...], tuple[FileEntry, ...], int]:
    packs = np.zeros(n_layers + 2, INDEX_DTYPE)

    def place(pack: int, sizes: Sequence[int]) -> list[int]:
        """Offsets of items of these sizes in a new pack; {0, 0} if they take no byte."""
        nonlocal position
        if not sum(sizes):
            return [0] * len(sizes)
        start = end = position
        offsets = []
        for size in sizes:
            offsets.append(round_up(end, SEGMENT_ALIGNMENT))
            end = offsets[-1] + size
        packs[pack] = (start, end - start)
        position = round_up(end, alignment)
        return offsets

    by_layer: dict[int | None, list[TensorSpec]] = {}
    for tensor in tensors:
        by_layer.setdefault(tensor.layer, []).append(tensor)
    of_none = by_layer.pop(None, [])
    global_offsets = place(n_layers, [tensor.size for tensor in of_none])
    file_offsets = place(n_layers + 1, [file.size for file in files])
    placed = []
    for layer, group in by_layer.items():
        assert layer is not None
        offsets = place(layer, [tensor.size for tensor in group])
        placed += [_placed(tensor, at) for tensor, at in zip(group, offsets, strict=True)]
    placed += [_placed(tensor, at) for tensor, at in zip(of_none, global_offsets, strict=True)]
    entries = tuple(
        FileEntry(file.name, at, file.size, 0) for file, at in zip(files, file_offsets, strict=True)
    )
    return packs, tuple(placed), entries, position


def _place_blocks(
    layer_layouts: Sequence[Layout | None],
    present: NDArray[np.bool_],
    position: int,
    alignment: int,
) -> tuple[NDArray[Any], int]:
    index = np.zeros(present.shape, INDEX_DTYPE)
    for layer, layout in enumerate(layer_layouts):
        if layout is None:
            continue
        experts = np.flatnonzero(present[layer])
        stride = round_up(layout.block_size, alignment)
        index["offset"][layer, experts] = position + stride * np.arange(
            len(experts), dtype=np.uint64
        )
        index["size"][layer, experts] = layout.block_size
        position += stride * len(experts)
    index.flags.writeable = False
    return index, position


def _placed(spec: TensorSpec, offset: int) -> DenseTensor:
    return DenseTensor(
        spec.name, spec.dtype, spec.shape, spec.layer, spec.row_interleave, offset, spec.size, 0
    )


def _check_present(
    layer_layouts: Sequence[Layout | None],
    present: NDArray[np.bool_],
    n_layers: int,
    n_experts: int,
) -> None:
    if len(layer_layouts) != n_layers or present.shape != (n_layers, n_experts):
        raise UsageError(
            "bad-plan",
            "plan",
            f"{len(layer_layouts)} layouts, present of shape {present.shape}",
            f"{n_layers} layouts and shape {(n_layers, n_experts)}",
        )
    for layer, layout in enumerate(layer_layouts):
        if bool(present[layer].any()) != (layout is not None):
            raise UsageError(
                "bad-plan",
                f"plan: layer {layer}",
                "has experts but no layout" if layout is None else "has a layout but no expert",
                "a layer has both or neither",
            )


def _check_names(tensors: Sequence[str], files: Sequence[str]) -> None:
    for kind, names in (("tensor", tensors), ("file", files)):
        seen: set[str] = set()
        for name in names:
            try:
                data = name.encode()
            except UnicodeEncodeError:
                data = b""
            is_bad = not 1 <= len(data) <= MAX_NAME_BYTES
            is_bad |= any(byte < 0x20 or byte == 0x7F for byte in data)
            is_bad |= kind == "file" and not is_plain_name(name)
            if is_bad or name in seen:
                raise UsageError(
                    "bad-name",
                    f"plan: {kind} {name!r}",
                    "stands twice" if name in seen else "",
                    f"a unique name of 1 to {MAX_NAME_BYTES} bytes of UTF-8 without control "
                    "characters; of a file, without / \\ :",
                )
            seen.add(name)


def _check_tensor(spec: TensorSpec, n_layers: int) -> None:
    place = f"plan: tensor {spec.name}"
    if spec.layer is not None and not 0 <= spec.layer < n_layers:
        raise UsageError("bad-plan", place, f"layer {spec.layer}", f"there are {n_layers} layers")
    _check_shape(place, spec, 0)


def _check_layout(layout: Layout) -> None:
    specs = tuple(SegmentSpec(s.role, s.dtype, s.shape, s.row_interleave) for s in layout.segments)
    if len({spec.role for spec in specs}) != len(specs) or not specs:
        raise UsageError("bad-plan", "plan: layout", "has roles twice, or none", "one of each role")
    for spec in specs:
        _check_shape(f"plan: segment {spec.role.name.lower()}", spec, 1)
    if Layout.of(specs) != layout:
        raise UsageError(
            "bad-plan",
            "plan: layout",
            "segments do not stand where they must",
            "make layouts with Layout.of",
        )


def _check_shape(place: str, spec: TensorSpec | SegmentSpec, least: int) -> None:
    shape, dtype = spec.shape, spec.dtype
    if (
        not 1 <= len(shape) <= MAX_RANK
        or min(shape) < least
        or shape[-1] % dtype.block_elements
        or spec.size >= MAX_SIZE
    ):
        raise UsageError(
            "bad-plan",
            place,
            f"shape {shape} of {dtype.name}",
            f"1 to {MAX_RANK} lengths of at least {least}, rows of whole quant blocks "
            f"({dtype.block_elements} elements)",
        )
    if spec.row_interleave not in (0, INTERLEAVE) or (
        spec.row_interleave and not can_interleave(dtype, shape)
    ):
        raise UsageError(
            "bad-interleave",
            place,
            f"row_interleave {spec.row_interleave} of shape {shape}",
            f"0, or {INTERLEAVE} with rank 2, rows a multiple of 16 and a dtype with units",
        )
