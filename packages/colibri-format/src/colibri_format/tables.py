"""The tables region: dtypes, layouts, layers, packs, tensors and files (spec, section 7)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

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
    MAX_VOLUMES,
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

NONE: Final = 0xFFFF_FFFF
MIXED: Final = 0xFFFF_FFFE
MAX_SEGMENTS_PER_LAYOUT: Final = 64
_LIMITS: Final = {
    "n_dtypes": 256,
    "n_layouts": 65_535,
    "n_segments": 1_048_576,
    "n_tensors": 1_048_576,
    "n_files": 4_096,
    "n_volumes": MAX_VOLUMES,
    "string_bytes": 2**28,
}
_HEADER: Final = struct.Struct("<IIIIIIQ32s")
_STRING: Final = [("name_offset", "<u4"), ("name_length", "<u4")]
_DTYPE: Final = np.dtype(
    [*_STRING, ("ggml_id", "<i4"), ("elements", "<u4"), ("bytes", "<u4"), ("reserved", "V12")]
)
_LAYOUT: Final = np.dtype([("first", "<u4"), ("count", "<u4"), ("size", "<u8")])
_SEGMENT: Final = np.dtype(
    [
        ("role", "<u2"),
        ("dtype", "<u2"),
        ("row_interleave", "<u2"),
        ("rank", "<u2"),
        ("offset", "<u8"),
        ("size", "<u8"),
        ("shape", "<u8", 4),
        ("reserved", "V8"),
    ]
)
_LAYER: Final = np.dtype([("layout", "<u4"), ("reserved", "V4")])
_TENSOR: Final = np.dtype(
    [
        *_STRING,
        ("layer", "<u4"),
        ("dtype", "<u2"),
        ("row_interleave", "<u2"),
        ("rank", "<u2"),
        ("reserved", "V6"),
        ("shape", "<u8", 4),
        ("offset", "<u8"),
        ("size", "<u8"),
        ("checksum", "<u8"),
        ("reserved_b", "V16"),
    ]
)
_FILE: Final = np.dtype(
    [*_STRING, ("offset", "<u8"), ("size", "<u8"), ("checksum", "<u8"), ("reserved", "V16")]
)
_VOLUME: Final = np.dtype(
    [
        *_STRING,
        ("file_size", "<u8"),
        ("digest", "V16"),
        ("data_offset", "<u8"),
        ("data_length", "<u8"),
    ]
)
_FORBIDDEN: Final = {*range(0x20), 0x7F}


@dataclass(frozen=True, slots=True)
class Tables:
    """What the tables region says; `packs` has `INDEX_DTYPE`, n_layers + 2 records (spec, 7.4).

    `layer_layouts` has a layout's number for each layer, None for layers without experts, and
    `MIXED` for those whose experts differ.
    """

    dtypes: tuple[DType, ...]
    layouts: tuple[Layout, ...]
    layer_layouts: tuple[int | None, ...]
    packs: NDArray[Any]
    tensors: tuple[DenseTensor, ...]
    files: tuple[FileEntry, ...]
    volumes: tuple[Volume, ...] = ()


def encode_tables(tables: Tables) -> bytes:
    """The bytes of the region that `parse_tables` reads back as `tables`."""
    strings = bytearray()

    def name(record: Any, text: str) -> None:
        data = text.encode()
        record["name_offset"], record["name_length"] = len(strings), len(data)
        strings.extend(data)

    number = {dtype.name: n for n, dtype in enumerate(tables.dtypes)}
    dtypes = np.zeros(len(tables.dtypes), _DTYPE)
    for record, dtype in zip(dtypes, tables.dtypes, strict=True):
        name(record, dtype.name)
        record["ggml_id"] = -1 if dtype.ggml_id is None else dtype.ggml_id
        record["elements"], record["bytes"] = dtype.block_elements, dtype.block_bytes
    layouts = np.zeros(len(tables.layouts), _LAYOUT)
    segments = np.zeros(sum(len(layout.segments) for layout in tables.layouts), _SEGMENT)
    first = 0
    for record, layout in zip(layouts, tables.layouts, strict=True):
        record["first"], record["count"] = first, len(layout.segments)
        record["size"] = layout.block_size
        for row, segment in zip(segments[first:], layout.segments, strict=False):
            row["role"], row["offset"], row["size"] = segment.role, segment.offset, segment.size
            _encode_shape(row, segment, number)
        first += len(layout.segments)
    layers = np.zeros(len(tables.layer_layouts), _LAYER)
    layers["layout"] = [NONE if layout is None else layout for layout in tables.layer_layouts]
    tensors = np.zeros(len(tables.tensors), _TENSOR)
    for record, tensor in zip(tensors, tables.tensors, strict=True):
        name(record, tensor.name)
        record["layer"] = NONE if tensor.layer is None else tensor.layer
        record["offset"], record["size"] = tensor.offset, tensor.size
        record["checksum"] = tensor.checksum
        _encode_shape(record, tensor, number)
    files = np.zeros(len(tables.files), _FILE)
    for record, file in zip(files, tables.files, strict=True):
        name(record, file.name)
        record["offset"], record["size"] = file.offset, file.size
        record["checksum"] = file.checksum
    volumes = np.zeros(len(tables.volumes), _VOLUME)
    for record, volume in zip(volumes, tables.volumes, strict=True):
        name(record, volume.label)
        record["file_size"], record["digest"] = volume.file_size, np.void(volume.digest)
        record["data_offset"], record["data_length"] = volume.data.offset, volume.data.size
    header = _HEADER.pack(
        len(dtypes),
        len(layouts),
        len(segments),
        len(tensors),
        len(files),
        len(volumes),
        len(strings),
        bytes(32),
    )
    arrays = (dtypes, layouts, segments, layers, tables.packs, tensors, files, volumes)
    return header + b"".join(array.tobytes() for array in arrays) + bytes(strings)


def _encode_shape(record: Any, item: Segment | DenseTensor, number: dict[str, int]) -> None:
    record["dtype"] = number[item.dtype.name]
    record["row_interleave"], record["rank"] = item.row_interleave, len(item.shape)
    record["shape"][: len(item.shape)] = item.shape


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
        self.n_layers = n_layers = geometry.n_layers
        counts = _HEADER.unpack_from(data, 0)
        self.counts = dict(
            zip(
                (
                    "n_dtypes",
                    "n_layouts",
                    "n_segments",
                    "n_tensors",
                    "n_files",
                    "n_volumes",
                    "string_bytes",
                ),
                counts[:7],
                strict=True,
            )
        )
        for key, count in self.counts.items():
            if count > _LIMITS[key]:
                raise self.error(
                    FormatCode.TABLE_COUNT,
                    "header",
                    f"{key} is {count}",
                    f"at most {_LIMITS[key]} is allowed",
                )
        kinds = {
            "dtype": (_DTYPE, self.counts["n_dtypes"]),
            "layout": (_LAYOUT, self.counts["n_layouts"]),
            "segment": (_SEGMENT, self.counts["n_segments"]),
            "layer": (_LAYER, n_layers),
            "pack": (INDEX_DTYPE, n_layers + 2),
            "tensor": (_TENSOR, self.counts["n_tensors"]),
            "file": (_FILE, self.counts["n_files"]),
            "volume": (_VOLUME, self.counts["n_volumes"]),
        }
        if bool(self.counts["n_volumes"]) != bool(incompat & Incompat.STRIPED):
            raise self.error(
                FormatCode.TABLE_COUNT,
                "header",
                f"n_volumes is {self.counts['n_volumes']}",
                "volumes exactly when feature STRIPED is set",
            )
        length = _HEADER.size + self.counts["string_bytes"]
        length += sum(kind.itemsize * count for kind, count in kinds.values())
        if length != len(data):
            raise self.error(
                FormatCode.TABLE_LENGTH,
                "header",
                f"the region has {len(data)} bytes",
                f"its counts demand {length}",
            )
        if any(counts[7]):
            raise self.error(
                FormatCode.RESERVED_NOT_ZERO,
                "header",
                "reserved bytes are not zero",
                "version 1.0 requires zeros",
            )
        self.records: dict[str, NDArray[Any]] = {}
        offset = _HEADER.size
        for key, (kind, count) in kinds.items():
            self.records[key] = np.frombuffer(data, kind, count, offset)
            offset += kind.itemsize * count
        self.strings = memoryview(data)[offset:]
        self.string_end = 0

    def error(self, code: FormatCode, record: str, found: str, required: str) -> FormatError:
        return FormatError(code, f"{self.where}: tables: {record}", found, required)

    def parse(self) -> Tables:
        self.dtypes = self.parse_dtypes()
        layouts = self.parse_layouts()
        layer_layouts = self.parse_layers(len(layouts))
        packs = self.parse_packs()
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

    def name(self, record: Any, place: str, names: set[str]) -> str:
        """The record's string, which continues where the last one ended and is new in `names`."""
        offset, length = int(record["name_offset"]), int(record["name_length"])
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

    def reserved(self, value: Any, place: str) -> None:
        if any(value.tobytes()):
            raise self.error(
                FormatCode.RESERVED_NOT_ZERO,
                place,
                "reserved bytes are not zero",
                "version 1.0 requires zeros",
            )

    def parse_dtypes(self) -> tuple[DType, ...]:
        found: list[DType] = []
        names: set[str] = set()
        for n, record in enumerate(self.records["dtype"]):
            place = f"dtype {n}"
            name = self.name(record, place, names)
            self.reserved(record["reserved"], place)
            ggml_id = int(record["ggml_id"])
            dtype = DType(
                name,
                None if ggml_id == -1 else ggml_id,
                int(record["elements"]),
                int(record["bytes"]),
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
        self, record: Any, place: str, code: FormatCode, least: int
    ) -> tuple[DType, tuple[int, ...], int]:
        """Dtype, shape and row interleave of a segment or tensor; its size is checked too."""
        number = int(record["dtype"])
        if number >= len(self.dtypes):
            raise self.error(
                code, place, f"dtype number {number}", f"the file has {len(self.dtypes)} dtypes"
            )
        dtype = self.dtypes[number]
        row_interleave = int(record["row_interleave"])
        if row_interleave not in (0, INTERLEAVE):
            raise self.error(
                FormatCode.BAD_INTERLEAVE,
                place,
                f"row_interleave is {row_interleave}",
                f"0 or {INTERLEAVE}",
            )
        rank = int(record["rank"])
        lengths = tuple(int(length) for length in record["shape"])
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
        if size >= MAX_SIZE or size != int(record["size"]):
            raise self.error(
                FormatCode.SIZE_MISMATCH,
                place,
                f"size is {int(record['size'])}",
                f"shape {shape} of {dtype.name} takes {size}",
            )
        return dtype, shape, row_interleave

    def parse_layouts(self) -> tuple[Layout, ...]:
        layouts: list[Layout] = []
        segments = self.records["segment"]
        start = 0
        for n, record in enumerate(self.records["layout"]):
            place = f"layout {n}"
            first, count = int(record["first"]), int(record["count"])
            if (
                first != start
                or not 1 <= count <= MAX_SEGMENTS_PER_LAYOUT
                or count > len(segments) - first
            ):
                raise self.error(
                    FormatCode.BAD_LAYOUT,
                    place,
                    f"{count} segments from {first}",
                    f"1 to {MAX_SEGMENTS_PER_LAYOUT} from {start}, of {len(segments)}",
                )
            start += count
            layout = self.parse_segments(first, count)
            if layout.block_size != int(record["size"]):
                raise self.error(
                    FormatCode.BAD_LAYOUT,
                    place,
                    f"block_size is {int(record['size'])}",
                    f"the last segment ends at {layout.block_size}",
                )
            layouts.append(layout)
        if start != len(segments):
            raise self.error(
                FormatCode.BAD_LAYOUT,
                "layouts",
                f"they have {start} segments",
                f"n_segments is {len(segments)}",
            )
        return tuple(layouts)

    def parse_segments(self, first: int, count: int) -> Layout:
        segments: list[Segment] = []
        end = 0
        last_role = 0
        for n in range(first, first + count):
            record = self.records["segment"][n]
            place = f"segment {n}"
            self.reserved(record["reserved"], place)
            number = int(record["role"])
            if number not in Role.__members__.values() or number <= last_role:
                raise self.error(
                    FormatCode.BAD_SEGMENT,
                    place,
                    f"role {number:#x}",
                    f"a known role above {last_role:#x}",
                )
            last_role = number
            dtype, shape, row_interleave = self.shape(record, place, FormatCode.BAD_SEGMENT, 1)
            offset, size = int(record["offset"]), int(record["size"])
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
        for n, record in enumerate(self.records["layer"]):
            self.reserved(record["reserved"], f"layer {n}")
            layout = int(record["layout"])
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

    def parse_packs(self) -> NDArray[Any]:
        packs = self.records["pack"]
        start, end = self.region.offset, self.region.offset + self.region.size
        for n, (offset, size) in enumerate(packs.tolist()):
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
        return packs

    def parse_tensors(self, packs: NDArray[Any]) -> tuple[DenseTensor, ...]:
        tensors: list[DenseTensor] = []
        names: set[str] = set()
        walk = _PackWalk(self, packs[: self.n_layers + 1], FormatCode.BAD_TENSOR)
        for n, record in enumerate(self.records["tensor"]):
            place = f"tensor {n}"
            name = self.name(record, place, names)
            self.reserved(record["reserved"], place)
            self.reserved(record["reserved_b"], place)
            layer = int(record["layer"])
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
            offset, size = int(record["offset"]), int(record["size"])
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
                    int(record["checksum"]),
                )
            )
        walk.finish()
        return tuple(tensors)

    def parse_files(self, packs: NDArray[Any]) -> tuple[FileEntry, ...]:
        files: list[FileEntry] = []
        names: set[str] = set()
        walk = _PackWalk(self, packs[self.n_layers + 1 :], FormatCode.BAD_FILE_ENTRY)
        for n, record in enumerate(self.records["file"]):
            name = self.name(record, f"file {n}", names)
            self.reserved(record["reserved"], f"file {n}")
            if not is_plain_name(name):
                raise self.error(
                    FormatCode.BAD_FILE_ENTRY,
                    f"file {n}",
                    f"name {name!r}",
                    "a plain file name without / \\ : that is not . or ..",
                )
            offset, size = int(record["offset"]), int(record["size"])
            walk.step(0, offset, size, f"file {n} ({name})")
            files.append(FileEntry(name, offset, size, int(record["checksum"])))
        walk.finish()
        return tuple(files)

    def parse_volumes(self) -> tuple[Volume, ...]:
        volumes: list[Volume] = []
        labels: set[str] = set()
        start = round_up(PAGE, self.alignment)
        for n, record in enumerate(self.records["volume"]):
            label = self.name(record, f"volume {n}", labels)
            data = Extent(int(record["data_offset"]), int(record["data_length"]))
            volume = Volume(label, data, record["digest"].tobytes())
            if (
                not is_plain_name(label)
                or data.offset != start
                or data.size % self.alignment
                or data.size >= MAX_SIZE
                or volume.file_size != int(record["file_size"])
            ):
                raise self.error(
                    FormatCode.BAD_VOLUME,
                    f"volume {n} ({label})",
                    f"{data.size} bytes of data at {data.offset:#x} of {int(record['file_size'])}",
                    f"a plain name, whole multiples of {self.alignment} at {start:#x}, and a page "
                    "after them",
                )
            volumes.append(volume)
        return tuple(volumes)


def is_plain_name(name: str) -> bool:
    """Whether `name` names a file of its own folder on every system (spec, 7.6)."""
    return name not in (".", "..") and not set(name) & set("/\\:")


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
        is_first = self.position is None
        low = start if self.position is None else round_up(self.position, SEGMENT_ALIGNMENT)
        if (
            offset % SEGMENT_ALIGNMENT
            or (offset != start if is_first else offset < low)
            or offset > start + length
            or size > start + length - offset
        ):
            raise self.parser.error(
                self.code,
                place,
                f"{size} bytes at {offset:#x}",
                f"a multiple of 64 from {low:#x}, inside the pack of {length} bytes at {start:#x}",
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
