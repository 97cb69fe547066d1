"""Reading the tables region: every rule of the spec's section 7, in the order of the file."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from . import records
from .dtypes import DTYPES, DType
from .errors import FormatCode, FormatError
from .header import Incompat
from .interleave import can_interleave
from .layout import (
    INDEX_DTYPE,
    INTERLEAVE,
    MAX_NAME_BYTES,
    MAX_RANK,
    MAX_SIZE,
    PAGE,
    SEGMENT_ALIGNMENT,
    DenseTensor,
    Extent,
    FileEntry,
    Geometry,
    Layout,
    Role,
    Segment,
    Volume,
    round_up,
)
from .records import (
    LIMITS,
    MIXED,
    NONE,
    DTypeRecord,
    FileRecord,
    Header,
    LayerRecord,
    LayoutRecord,
    SegmentRecord,
    TensorRecord,
    VolumeRecord,
)
from .tables import Tables, is_plain_name

MAX_SEGMENTS_PER_LAYOUT: Final = 64
_FORBIDDEN: Final = frozenset({*range(0x20), 0x7F})
_ROLES: Final = frozenset(int(role) for role in Role)
_Named: TypeAlias = DTypeRecord | TensorRecord | FileRecord | VolumeRecord


def parse_tables(
    data: bytes, geometry: Geometry, region: Extent, where: str, incompat: int = 0
) -> Tables:
    """The tables in `data`, every rule of the spec's section 7 checked.

    `region` is the extent of the data region, which packs must stand in; `incompat` says whether
    there may be mixed layers and volumes.

    Raises:
        FormatError: with the code of the first rule that fails, naming the record.
    """
    return _Parser(data, geometry, region, where, incompat).parse()


class _Parser:
    """Walks the region once; its arrays are views into `data`, bounded before they are made."""

    def __init__(
        self, data: bytes, geometry: Geometry, region: Extent, where: str, incompat: int
    ) -> None:
        self.where = where
        self.may_be_mixed = bool(incompat & Incompat.MIXED_LAYOUTS)
        self.alignment = geometry.alignment
        self.region = region
        self.n_layers = geometry.n_layers
        header = self.header = Header._make(records.HEADER.unpack_from(data, 0))
        self.check_header(header, len(data), incompat)
        position = records.HEADER.size

        def take(kind: struct.Struct, count: int) -> Iterator[tuple[Any, ...]]:
            nonlocal position
            start = position
            position += kind.size * count
            return kind.iter_unpack(memoryview(data)[start:position])

        self.dtype_records = map(DTypeRecord._make, take(records.DTYPE, header.n_dtypes))
        self.layout_records = map(LayoutRecord._make, take(records.LAYOUT, header.n_layouts))
        self.segment_records = map(SegmentRecord._make, take(records.SEGMENT, header.n_segments))
        self.layer_records = map(LayerRecord._make, take(records.LAYER, self.n_layers))
        n_packs = self.n_layers + 2
        self.packs: NDArray[Any] = np.frombuffer(data, INDEX_DTYPE, n_packs, position)
        position += records.PACK.size * n_packs
        self.tensor_records = map(TensorRecord._make, take(records.TENSOR, header.n_tensors))
        self.file_records = map(FileRecord._make, take(records.FILE, header.n_files))
        self.volume_records = map(VolumeRecord._make, take(records.VOLUME, header.n_volumes))
        self.strings = memoryview(data)[position:]
        self.string_end = 0

    def check_header(self, header: Header, length: int, incompat: int) -> None:
        for key, limit in LIMITS.items():
            if getattr(header, key) > limit:
                raise self.error(
                    FormatCode.TABLE_COUNT,
                    "header",
                    f"{key} is {getattr(header, key)}",
                    f"at most {limit} is allowed",
                )
        if bool(header.n_volumes) != bool(incompat & Incompat.STRIPED):
            raise self.error(
                FormatCode.TABLE_COUNT,
                "header",
                f"n_volumes is {header.n_volumes}",
                "volumes exactly when feature STRIPED is set",
            )
        required = (
            records.HEADER.size
            + records.DTYPE.size * header.n_dtypes
            + records.LAYOUT.size * header.n_layouts
            + records.SEGMENT.size * header.n_segments
            + records.LAYER.size * self.n_layers
            + records.PACK.size * (self.n_layers + 2)
            + records.TENSOR.size * header.n_tensors
            + records.FILE.size * header.n_files
            + records.VOLUME.size * header.n_volumes
            + header.string_bytes
        )
        if length != required:
            raise self.error(
                FormatCode.TABLE_LENGTH,
                "header",
                f"the region has {length} bytes",
                f"its counts demand {required}",
            )
        self.reserved(header.reserved, "header")

    def error(self, code: FormatCode, record: str, found: str, required: str) -> FormatError:
        return FormatError(code, f"{self.where}: tables: {record}", found, required)

    def parse(self) -> Tables:
        self.dtypes = self.parse_dtypes()
        layouts = self.parse_layouts()
        layer_layouts = self.parse_layers(len(layouts))
        self.check_packs()
        packs = self.packs
        tensors = self.parse_tensors(packs)
        files = self.parse_files(packs)
        volumes = self.parse_volumes()
        if self.string_end != len(self.strings):
            raise self.error(
                FormatCode.BAD_STRING,
                "strings",
                f"names end at byte {self.string_end}",
                f"string_bytes is {len(self.strings)}",
            )
        return Tables(self.dtypes, layouts, layer_layouts, packs, tensors, files, volumes)

    def name(self, record: _Named, place: str, names: set[str]) -> str:
        """The record's string, which continues where the last one ended and is new in `names`."""
        offset, length = record.name_offset, record.name_length
        if (
            offset != self.string_end
            or not 1 <= length <= MAX_NAME_BYTES
            or length > len(self.strings) - offset
        ):
            raise self.error(
                FormatCode.BAD_STRING,
                place,
                f"name of {length} bytes at {offset}",
                f"1 to {MAX_NAME_BYTES} bytes at {self.string_end}, inside the string bytes",
            )
        self.string_end = offset + length
        data = bytes(self.strings[offset : self.string_end])
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise self.error(
                FormatCode.BAD_STRING, place, f"name {data!r}", "UTF-8 is required"
            ) from error
        if not _FORBIDDEN.isdisjoint(data):
            raise self.error(
                FormatCode.BAD_STRING,
                place,
                f"name {text!r}",
                "control characters are not allowed",
            )
        if text in names:
            raise self.error(
                FormatCode.DUPLICATE_NAME, place, f"name {text!r}", "names are unique in a table"
            )
        names.add(text)
        return text

    def reserved(self, value: bytes, place: str) -> None:
        if any(value):
            raise self.error(
                FormatCode.RESERVED_NOT_ZERO,
                place,
                "reserved bytes are not zero",
                "version 1.0 requires zeros",
            )

    def parse_dtypes(self) -> tuple[DType, ...]:
        found: list[DType] = []
        names: set[str] = set()
        for n, record in enumerate(self.dtype_records):
            place = f"dtype {n}"
            name = self.name(record, place, names)
            self.reserved(record.reserved, place)
            ggml_id = record.ggml_id
            dtype = DType(
                name,
                None if ggml_id == -1 else ggml_id,
                record.block_elements,
                record.block_bytes,
            )
            known = DTYPES.get(name)
            if known is not None:
                numbers = (dtype.ggml_id, dtype.block_elements, dtype.block_bytes)
                if numbers != (known.ggml_id, known.block_elements, known.block_bytes):
                    raise self.error(
                        FormatCode.BAD_DTYPE,
                        place,
                        f"{name} has ggml id, elements and bytes {numbers}",
                        f"{(known.ggml_id, known.block_elements, known.block_bytes)} are required",
                    )
                dtype = known
            elif ggml_id < -1 or not (
                1 <= dtype.block_elements <= 65_536 and 1 <= dtype.block_bytes <= 65_536
            ):
                raise self.error(
                    FormatCode.BAD_DTYPE,
                    place,
                    f"{name} has ggml id {ggml_id}, {dtype.block_elements} elements and "
                    f"{dtype.block_bytes} bytes",
                    "an id of at least -1, and 1 to 65536 elements and bytes, are required",
                )
            found.append(dtype)
        return tuple(found)

    def shape(
        self, record: SegmentRecord | TensorRecord, place: str, code: FormatCode, least: int
    ) -> tuple[DType, tuple[int, ...], int]:
        """Dtype, shape and row interleave of a segment or tensor; its size is checked too."""
        number = record.dtype
        if number >= len(self.dtypes):
            raise self.error(
                code, place, f"dtype number {number}", f"the file has {len(self.dtypes)} dtypes"
            )
        dtype = self.dtypes[number]
        row_interleave = record.row_interleave
        if row_interleave not in (0, INTERLEAVE):
            raise self.error(
                FormatCode.BAD_INTERLEAVE,
                place,
                f"row_interleave is {row_interleave}",
                f"0 or {INTERLEAVE}",
            )
        rank = record.rank
        lengths = record.lengths
        shape = lengths[:rank]
        if (
            not 1 <= rank <= MAX_RANK
            or any(lengths[rank:])
            or min(shape) < least
            or max(shape) >= MAX_SIZE
            or shape[-1] % dtype.block_elements
        ):
            raise self.error(
                FormatCode.BAD_SHAPE,
                place,
                f"rank {rank}, shape {lengths}",
                f"rank 1 to {MAX_RANK}, lengths of at least {least}, then zeros, and rows of "
                f"whole quant blocks of {dtype.block_elements} elements ({dtype.name})",
            )
        if row_interleave and not can_interleave(dtype, shape):
            raise self.error(
                FormatCode.BAD_INTERLEAVE,
                place,
                f"{dtype.name} of shape {shape} is interleaved",
                "rank 2, rows a multiple of 16 and a dtype with units",
            )
        size = dtype.size_bytes(shape)
        if size >= MAX_SIZE or size != record.size:
            raise self.error(
                FormatCode.SIZE_MISMATCH,
                place,
                f"size is {record.size}",
                f"shape {shape} of {dtype.name} takes {size}",
            )
        return dtype, shape, row_interleave

    def parse_layouts(self) -> tuple[Layout, ...]:
        layouts: list[Layout] = []
        n_segments = self.header.n_segments
        start = 0
        for n, record in enumerate(self.layout_records):
            place = f"layout {n}"
            first, count = record.first_segment, record.n_segments
            if (
                first != start
                or not 1 <= count <= MAX_SEGMENTS_PER_LAYOUT
                or count > n_segments - first
            ):
                raise self.error(
                    FormatCode.BAD_LAYOUT,
                    place,
                    f"{count} segments from {first}",
                    f"1 to {MAX_SEGMENTS_PER_LAYOUT} from {start}, of {n_segments}",
                )
            start += count
            layout = self.parse_segments(first, count)
            if layout.block_size != record.block_size:
                raise self.error(
                    FormatCode.BAD_LAYOUT,
                    place,
                    f"block_size is {record.block_size}",
                    f"the last segment ends at {layout.block_size}",
                )
            layouts.append(layout)
        if start != n_segments:
            raise self.error(
                FormatCode.BAD_LAYOUT,
                "layouts",
                f"they have {start} segments",
                f"n_segments is {n_segments}",
            )
        return tuple(layouts)

    def parse_segments(self, first: int, count: int) -> Layout:
        segments: list[Segment] = []
        end = 0
        last_role = 0
        for n in range(first, first + count):
            record = next(self.segment_records)
            place = f"segment {n}"
            self.reserved(record.reserved, place)
            number = record.role
            if number not in _ROLES or number <= last_role:
                raise self.error(
                    FormatCode.BAD_SEGMENT,
                    place,
                    f"role {number:#x}",
                    f"a known role above {last_role:#x}",
                )
            last_role = number
            dtype, shape, row_interleave = self.shape(record, place, FormatCode.BAD_SEGMENT, 1)
            offset, size = record.offset, record.size
            if offset != round_up(end, SEGMENT_ALIGNMENT) or offset + size >= MAX_SIZE:
                raise self.error(
                    FormatCode.BAD_SEGMENT,
                    place,
                    f"offset is {offset}",
                    f"{round_up(end, SEGMENT_ALIGNMENT)} is required",
                )
            end = offset + size
            segments.append(Segment(Role(number), dtype, shape, row_interleave, offset, size))
        return Layout(tuple(segments), end)

    def parse_layers(self, n_layouts: int) -> tuple[int | None, ...]:
        found: list[int | None] = []
        for n, record in enumerate(self.layer_records):
            self.reserved(record.reserved, f"layer {n}")
            layout = record.layout
            is_special = layout == NONE or (layout == MIXED and self.may_be_mixed)
            if not is_special and layout >= n_layouts:
                raise self.error(
                    FormatCode.BAD_LAYER,
                    f"layer {n}",
                    f"layout number {layout}",
                    f"the file has {n_layouts} layouts",
                )
            found.append(None if layout == NONE else layout)
        return tuple(found)

    def check_packs(self) -> None:
        start, end = self.region.offset, self.region.offset + self.region.size
        for n, (offset, size) in enumerate(self.packs.tolist()):
            if (offset, size) == (0, 0):
                continue
            if (
                size == 0
                or offset % self.alignment
                or offset < start
                or offset + round_up(size, self.alignment) > end
            ):
                raise self.error(
                    FormatCode.BAD_PACK,
                    f"pack {n}",
                    f"{size} bytes at {offset:#x}",
                    f"{{0, 0}}, or bytes at a multiple of {self.alignment} that end, padded, "
                    f"inside the data region ({start:#x} to {end:#x})",
                )

    def parse_tensors(self, packs: NDArray[Any]) -> tuple[DenseTensor, ...]:
        tensors: list[DenseTensor] = []
        names: set[str] = set()
        walk = _PackWalk(self, packs[: self.n_layers + 1], FormatCode.BAD_TENSOR)
        for n, record in enumerate(self.tensor_records):
            place = f"tensor {n}"
            name = self.name(record, place, names)
            self.reserved(record.reserved, place)
            self.reserved(record.reserved_tail, place)
            layer = record.layer
            if layer != NONE and layer >= self.n_layers:
                raise self.error(
                    FormatCode.BAD_TENSOR,
                    f"{place} ({name})",
                    f"layer {layer}",
                    f"the file has {self.n_layers} layers",
                )
            dtype, shape, row_interleave = self.shape(
                record, f"{place} ({name})", FormatCode.BAD_TENSOR, 0
            )
            offset, size = record.offset, record.size
            walk.step(self.n_layers if layer == NONE else layer, offset, size, f"{place} ({name})")
            tensors.append(
                DenseTensor(
                    name,
                    dtype,
                    shape,
                    None if layer == NONE else layer,
                    row_interleave,
                    offset,
                    size,
                    record.checksum,
                )
            )
        walk.finish()
        return tuple(tensors)

    def parse_files(self, packs: NDArray[Any]) -> tuple[FileEntry, ...]:
        files: list[FileEntry] = []
        names: set[str] = set()
        walk = _PackWalk(self, packs[self.n_layers + 1 :], FormatCode.BAD_FILE_ENTRY)
        for n, record in enumerate(self.file_records):
            name = self.name(record, f"file {n}", names)
            self.reserved(record.reserved, f"file {n}")
            if not is_plain_name(name):
                raise self.error(
                    FormatCode.BAD_FILE_ENTRY,
                    f"file {n}",
                    f"name {name!r}",
                    "a plain file name without / \\ : that is not . or ..",
                )
            offset, size = record.offset, record.size
            walk.step(0, offset, size, f"file {n} ({name})")
            files.append(FileEntry(name, offset, size, record.checksum))
        walk.finish()
        return tuple(files)

    def parse_volumes(self) -> tuple[Volume, ...]:
        volumes: list[Volume] = []
        labels: set[str] = set()
        start = round_up(PAGE, self.alignment)
        for n, record in enumerate(self.volume_records):
            label = self.name(record, f"volume {n}", labels)
            data = Extent(record.data_offset, record.data_length)
            volume = Volume(label, data, record.digest)
            if (
                not is_plain_name(label)
                or data.offset != start
                or data.size % self.alignment
                or data.size >= MAX_SIZE
                or volume.file_size != record.file_size
            ):
                raise self.error(
                    FormatCode.BAD_VOLUME,
                    f"volume {n} ({label})",
                    f"{data.size} bytes of data at {data.offset:#x} of {record.file_size}",
                    f"a plain name, whole multiples of {self.alignment} at {start:#x}, and a page "
                    "after them",
                )
            volumes.append(volume)
        return tuple(volumes)


class _PackWalk:
    """Checks that records fill their packs in order (spec, 7.5)."""

    def __init__(self, parser: _Parser, packs: NDArray[Any], code: FormatCode) -> None:
        self.parser = parser
        self.packs: Sequence[tuple[int, int]] = packs.tolist()
        self.code = code
        self.pack = 0
        self.position: int | None = None

    def step(self, pack: int, offset: int, size: int, place: str) -> None:
        if pack < self.pack:
            raise self.parser.error(
                self.code, place, f"stands after pack {self.pack}", "records are ordered by layer"
            )
        if pack != self.pack:
            self.close()
            for skipped in range(self.pack + 1, pack):
                self.check_empty(skipped)
            self.pack, self.position = pack, None
        start, length = self.packs[pack]
        due = start if self.position is None else round_up(self.position, SEGMENT_ALIGNMENT)
        if offset != due or size > start + length - offset:
            raise self.parser.error(
                self.code,
                place,
                f"{size} bytes at {offset:#x}",
                f"at {due:#x}, inside the pack of {length} bytes at {start:#x}",
            )
        self.position = offset + size

    def close(self) -> None:
        if self.position is None:
            self.check_empty(self.pack)
            return
        start, length = self.packs[self.pack]
        if self.position != start + length:
            raise self.parser.error(
                self.code,
                f"pack {self.pack}",
                f"its last record ends at {self.position:#x}",
                f"the pack ends at {start + length:#x}",
            )

    def check_empty(self, pack: int) -> None:
        if self.packs[pack] != (0, 0):
            raise self.parser.error(
                self.code,
                f"pack {pack}",
                f"has extent {self.packs[pack]}",
                "a pack without records is {0, 0}",
            )

    def finish(self) -> None:
        self.close()
        for pack in range(self.pack + 1, len(self.packs)):
            self.check_empty(pack)
