"""Where every byte of a file will stand, decided before one is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .canonical import encode_canonical
from .dtypes import DType
from .errors import UsageError
from .header import Incompat, Region, check_geometry, place_regions
from .interleave import can_interleave
from .layout import (
    INDEX_DTYPE,
    INTERLEAVE,
    MAX_ALIGN_LOG2,
    MAX_NAME_BYTES,
    MAX_RANK,
    MAX_SIZE,
    MAX_VOLUMES,
    MIN_ALIGN_LOG2,
    NO_LAYOUT,
    PAGE,
    SEGMENT_ALIGNMENT,
    DenseTensor,
    Extent,
    FileEntry,
    FileSpec,
    Geometry,
    Layout,
    SegmentSpec,
    TensorSpec,
    Volume,
    round_up,
)
from .tables import MIXED, Tables, encode_tables, is_plain_name

LayerLayout: TypeAlias = Layout | Sequence[Layout | None] | None
"""What a layer's blocks look like: one layout, none (no experts), or one for each expert."""


@dataclass(frozen=True, slots=True, eq=False)
class FilePlan:
    """A whole file as extents.

    `index` has `INDEX_DTYPE`, `expert_layouts` (numbers of `layouts`, `NO_LAYOUT` where absent)
    and `block_volumes` (0: the file itself) uint16, all of shape `(n_layers, n_experts)`.
    Checksums of `tensors` and `files` and digests of `volumes` are 0: only a writer knows them.
    """

    geometry: Geometry
    tables: Tables
    index: NDArray[Any]
    expert_layouts: NDArray[np.uint16]
    block_volumes: NDArray[np.uint16]
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
        """Number of each layer's layout: None without experts, `MIXED` where they differ."""
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
    def volumes(self) -> tuple[Volume, ...]:
        """The further files that hold blocks; number 1 stands first."""
        return self.tables.volumes

    @property
    def incompat(self) -> Incompat:
        """The features that the file needs."""
        features = Incompat(0)
        if MIXED in self.layer_layouts:
            features |= Incompat.MIXED_LAYOUTS
        if self.volumes:
            features |= Incompat.STRIPED
        return features

    @property
    def data_region(self) -> Extent:
        """The extent of the data region."""
        return Extent(self.regions[Region.DATA][0], self.region_lengths[Region.DATA])

    def layout(self, layer: int, expert: int | None = None) -> Layout | None:
        """The layout of that layer's blocks, or of one expert's.

        Raises:
            UsageError: `mixed-layer` where experts differ and none is named.
        """
        number: int | None
        if expert is not None:
            number = int(self.expert_layouts[layer, expert])
            return None if number == NO_LAYOUT else self.layouts[number]
        number = self.layer_layouts[layer]
        if number == MIXED:
            raise UsageError(
                "mixed-layer",
                f"plan: layer {layer}",
                "its experts differ in layout",
                "the layout of one expert",
            )
        return None if number is None else self.layouts[number]

    @property
    def n_blocks(self) -> int:
        """Experts that are present."""
        return int(np.count_nonzero(self.index["size"]))

    @property
    def block_bytes(self) -> int:
        """Payload of all blocks together, gaps between segments included."""
        return int(self.index["size"].sum(dtype=np.uint64))

    def _uses(self) -> list[tuple[Layout, int]]:
        """Each layout and how many blocks have it."""
        counts = np.bincount(self.expert_layouts.reshape(-1), minlength=len(self.layouts))
        return [(layout, int(n)) for layout, n in zip(self.layouts, counts, strict=False)]

    @property
    def padding_bytes(self) -> int:
        """Bytes of the blocks' extents that hold no weight: after payloads and between segments."""
        alignment = self.geometry.alignment
        return sum(n * block_padding(layout, alignment) for layout, n in self._uses())

    @property
    def padding_share(self) -> float:
        """`padding_bytes` as a part of the blocks' padded extents, 0 to 1."""
        alignment = self.geometry.alignment
        total = sum(n * round_up(layout.block_size, alignment) for layout, n in self._uses())
        return self.padding_bytes / total if total else 0.0

    @property
    def index_bytes(self) -> int:
        """Bytes of the index and the arrays beside it, one copy."""
        return sum(self.region_lengths[region] for region in list(Region)[: Region.TABLES])


def block_padding(layout: Layout, alignment: int) -> int:
    """Bytes of a block's padded extent that belong to no segment."""
    return round_up(layout.block_size, alignment) - sum(s.size for s in layout.segments)


def plan_layout(
    *,
    n_layers: int,
    n_experts: int,
    layer_layouts: Sequence[LayerLayout],
    alignment: int = 4096,
    present: NDArray[np.bool_] | None = None,
    tensors: Sequence[TensorSpec] = (),
    files: Sequence[FileSpec] = (),
    metadata: Mapping[str, Any] | None = None,
    volumes: Sequence[str] = (),
    block_volumes: NDArray[np.uint16] | None = None,
    block_order: NDArray[np.int64] | None = None,
) -> FilePlan:
    """Every extent of a file with these contents; touches no file.

    `layer_layouts` has one layout for each layer, None for layers without experts, or a sequence
    of one for each expert; `present`, shape `(n_layers, n_experts)`, says which experts exist
    (default: all of layers with a layout). `volumes` names further files that hold blocks, and
    `block_volumes`, of the same shape, says which (0: the file itself; default: the volumes in
    turn within each layer). `block_order`, of that shape too, has each layer's experts in the order
    in which their blocks stand (default: by number). In the data region stand, each at a multiple
    of `alignment`: the tensors of no layer, the embedded files, the tensors of each layer, then the
    blocks layer by layer.

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
    rows = _expert_layouts(layer_layouts, present, n_layers, n_experts)
    _check_names([t.name for t in tensors], [f.name for f in files], volumes)
    for spec in tensors:
        _check_tensor(spec, n_layers)
    # Hashing a layout takes longer than the rest of its expert: each object is hashed once.
    by_id = {id(x): x for row in rows for x in row if x is not None}
    layouts = tuple(dict.fromkeys(by_id.values()))
    if len(layouts) >= NO_LAYOUT:
        raise UsageError("bad-plan", "plan", f"{len(layouts)} layouts", "at most 65534")
    for layout in layouts:
        _check_layout(layout)
    numbers = {layout: n for n, layout in enumerate(layouts)}
    number_of = {key: numbers[layout] for key, layout in by_id.items()} | {id(None): NO_LAYOUT}
    expert_layouts = np.array([[number_of[id(x)] for x in row] for row in rows], np.uint16)
    is_present = expert_layouts != NO_LAYOUT
    block_volumes = _block_volumes(block_volumes, is_present, len(volumes))
    dtypes: dict[str, DType] = {}
    for layout in layouts:
        dtypes |= {segment.dtype.name: segment.dtype for segment in layout.segments}
    dtypes |= {tensor.dtype.name: tensor.dtype for tensor in tensors}
    ordered = sorted(tensors, key=lambda t: n_layers if t.layer is None else t.layer)

    def tables(
        packs: NDArray[Any],
        placed: tuple[DenseTensor, ...],
        entries: tuple[FileEntry, ...],
        placed_volumes: tuple[Volume, ...],
    ) -> Tables:
        return Tables(
            tuple(dtypes.values()),
            layouts,
            tuple(_layer_number(row) for row in expert_layouts.tolist()),
            packs,
            placed,
            entries,
            placed_volumes,
        )

    draft = tables(
        np.zeros(n_layers + 2, INDEX_DTYPE),
        tuple(_placed(spec, 0) for spec in ordered),
        tuple(FileEntry(file.name, 0, file.size, 0) for file in files),
        tuple(Volume(label, Extent(0, 0)) for label in volumes),
    )
    metadata_bytes = encode_canonical(metadata or {})
    lengths = dict.fromkeys(Region, 0) | {
        Region.INDEX: 16 * n_layers * n_experts,
        Region.CHECKSUMS: 8 * n_layers * n_experts,
        Region.EXPERT_LAYOUTS: 2 * n_layers * n_experts * (MIXED in draft.layer_layouts),
        Region.VOLUME_MAP: 2 * n_layers * n_experts * bool(volumes),
        Region.TABLES: len(encode_tables(draft)),
        Region.METADATA: len(metadata_bytes),
    }
    start = place_regions(lengths, alignment)[0][Region.DATA][0]
    packs, placed, entries, position = _place_packs(ordered, files, n_layers, start, alignment)
    volume_start = round_up(PAGE, alignment)
    positions = [position] + [volume_start] * len(volumes)
    _check_order(block_order, (n_layers, n_experts))
    index = _place_blocks(layouts, expert_layouts, block_volumes, positions, alignment, block_order)
    lengths[Region.DATA] = positions[0] - start
    placed_volumes = tuple(
        Volume(label, Extent(volume_start, end - volume_start))
        for label, end in zip(volumes, positions[1:], strict=True)
    )
    regions, file_size = place_regions(lengths, alignment)
    if file_size >= MAX_SIZE:
        raise UsageError("bad-plan", "plan", f"a file of {file_size} bytes", "less than 2^62")
    return FilePlan(
        Geometry(n_layers, n_experts, alignment),
        tables(packs, placed, entries, placed_volumes),
        index,
        expert_layouts,
        block_volumes,
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
    layouts: Sequence[Layout],
    expert_layouts: NDArray[np.uint16],
    block_volumes: NDArray[np.uint16],
    positions: list[int],
    alignment: int,
    order: NDArray[np.int64] | None,
) -> NDArray[Any]:
    """The index; `positions`, where each file's next block goes, is moved on to its end."""
    if order is not None:
        place = (np.arange(len(order))[:, None], order)
        ordered = _place_blocks(
            layouts, expert_layouts[place], block_volumes[place], positions, alignment, None
        )
        index = np.zeros_like(ordered)
        index[place] = ordered
        index.flags.writeable = False
        return index
    index = np.zeros(expert_layouts.shape, INDEX_DTYPE)
    sizes = np.zeros(NO_LAYOUT + 1, np.uint64)
    sizes[: len(layouts)] = [layout.block_size for layout in layouts]
    index["size"] = sizes[expert_layouts]
    strides = -(-index["size"].astype(np.int64) // alignment) * alignment
    for volume, position in enumerate(positions):
        held = (block_volumes == volume) & (index["size"] != 0)
        ends = position + np.cumsum(strides[held], dtype=np.uint64)
        index["offset"][held] = ends - strides[held].astype(np.uint64)
        positions[volume] = int(ends[-1]) if len(ends) else position
    index.flags.writeable = False
    return index


def _check_order(order: NDArray[np.int64] | None, shape: tuple[int, int]) -> None:
    if order is None:
        return
    is_each_once = order.shape == shape and bool(
        (np.sort(order, axis=1) == np.arange(shape[1])).all()
    )
    if not is_each_once:
        raise UsageError(
            "bad-plan", "plan", f"block_order of shape {order.shape}",
            f"shape {shape} with every expert of a layer once",
        )  # fmt: skip


def _layer_number(numbers: Sequence[int]) -> int | None:
    """What stands in the layer's record, from the layout numbers of its experts."""
    found = set(numbers) - {NO_LAYOUT}
    if not found:
        return None
    return found.pop() if len(found) == 1 else MIXED


def _block_volumes(
    given: NDArray[np.uint16] | None, is_present: NDArray[np.bool_], n_volumes: int
) -> NDArray[np.uint16]:
    if n_volumes > MAX_VOLUMES:
        raise UsageError(
            "bad-plan", "plan", f"{n_volumes} volumes", f"at most {MAX_VOLUMES} are allowed"
        )
    if given is None:
        if not n_volumes:
            return np.zeros(is_present.shape, np.uint16)
        turn = (np.cumsum(is_present, axis=1) - 1) % n_volumes + 1
        return np.where(is_present, turn, 0).astype(np.uint16)
    if given.shape != is_present.shape or int(given.max(initial=0)) > n_volumes:
        raise UsageError(
            "bad-plan",
            "plan",
            f"block_volumes of shape {given.shape} up to {int(given.max(initial=0))}",
            f"shape {is_present.shape} and numbers up to {n_volumes}",
        )
    return np.where(is_present, given, 0).astype(np.uint16)


def _placed(spec: TensorSpec, offset: int) -> DenseTensor:
    return DenseTensor(
        spec.name, spec.dtype, spec.shape, spec.layer, spec.row_interleave, offset, spec.size, 0
    )


def _expert_layouts(
    layer_layouts: Sequence[LayerLayout],
    present: NDArray[np.bool_] | None,
    n_layers: int,
    n_experts: int,
) -> list[list[Layout | None]]:
    """The layout of every expert, None for absent ones."""
    rows = [
        [layout] * n_experts if layout is None or isinstance(layout, Layout) else list(layout)
        for layout in layer_layouts
    ]
    if len(rows) != n_layers or any(len(row) != n_experts for row in rows):
        raise UsageError(
            "bad-plan",
            "plan",
            f"layouts for {len(rows)} layers, of {[len(row) for row in rows][:3]} experts",
            f"{n_layers} layers of {n_experts} experts",
        )
    if present is None:
        return rows
    if present.shape != (n_layers, n_experts):
        raise UsageError(
            "bad-plan", "plan", f"present of shape {present.shape}", f"{(n_layers, n_experts)}"
        )
    for layer, row in enumerate(rows):
        if bool(present[layer].any()) != any(layout is not None for layout in row):
            raise UsageError(
                "bad-plan",
                f"plan: layer {layer}",
                "has experts but no layout" if present[layer].any() else "has no expert",
                "a layer has a layout and experts, or neither",
            )
    return [
        [layout if is_there else None for layout, is_there in zip(row, flags, strict=True)]
        for row, flags in zip(rows, present.tolist(), strict=True)
    ]


def _check_names(tensors: Sequence[str], files: Sequence[str], volumes: Sequence[str]) -> None:
    for kind, names in (("tensor", tensors), ("file", files), ("volume", volumes)):
        seen: set[str] = set()
        for name in names:
            try:
                data = name.encode()
            except UnicodeEncodeError:
                data = b""
            is_bad = not 1 <= len(data) <= MAX_NAME_BYTES
            is_bad |= any(byte < 0x20 or byte == 0x7F for byte in data)
            is_bad |= kind != "tensor" and not is_plain_name(name)
            if is_bad or name in seen:
                raise UsageError(
                    "bad-name",
                    f"plan: {kind} {name!r}",
                    "stands twice" if name in seen else "",
                    f"a unique name of 1 to {MAX_NAME_BYTES} bytes of UTF-8 without control "
                    "characters; of a file or volume, without / \\ :",
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
