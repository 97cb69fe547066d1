"""What the tables region says, and its bytes (spec, section 7)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from . import records
from .dtypes import DType
from .layout import DenseTensor, FileEntry, Layout, Segment, Volume
from .records import MIXED, NONE

__all__ = ["MIXED", "Tables", "encode_tables", "is_plain_name"]


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


def is_plain_name(name: str) -> bool:
    """Whether `name` names a file of its own folder on every system (spec, 7.6)."""
    return name not in (".", "..") and not set(name) & set("/\\:")


def encode_tables(tables: Tables) -> bytes:
    """The bytes of the region that `parse_tables` reads back as `tables`."""
    return _Encoder(tables).encode()


class _Encoder:
    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.strings = bytearray()
        self.parts: list[bytes] = []
        self.numbers = {dtype.name: n for n, dtype in enumerate(tables.dtypes)}

    def put(self, kind: struct.Struct, *values: object) -> None:
        self.parts.append(kind.pack(*values))

    def name(self, text: str) -> tuple[int, int]:
        """The reference to `text`, which is appended to the string bytes."""
        data = text.encode()
        offset = len(self.strings)
        self.strings += data
        return offset, len(data)

    def shape(self, item: Segment | DenseTensor) -> tuple[int, int, int, tuple[int, ...]]:
        """Dtype number, row interleave, rank and the four lengths."""
        rank = len(item.shape)
        lengths = (*item.shape, *(0,) * (4 - rank))
        return self.numbers[item.dtype.name], item.row_interleave, rank, lengths

    def encode(self) -> bytes:
        tables = self.tables
        for dtype in tables.dtypes:
            ggml_id = -1 if dtype.ggml_id is None else dtype.ggml_id
            self.put(
                records.DTYPE,
                *self.name(dtype.name),
                ggml_id,
                dtype.block_elements,
                dtype.block_bytes,
                b"",
            )
        first = 0
        for layout in tables.layouts:
            self.put(records.LAYOUT, first, len(layout.segments), layout.block_size)
            first += len(layout.segments)
        for layout in tables.layouts:
            for segment in layout.segments:
                number, row_interleave, rank, lengths = self.shape(segment)
                self.put(
                    records.SEGMENT,
                    segment.role,
                    number,
                    row_interleave,
                    rank,
                    segment.offset,
                    segment.size,
                    *lengths,
                    b"",
                )
        for layout_number in tables.layer_layouts:
            self.put(records.LAYER, NONE if layout_number is None else layout_number, b"")
        self.parts.append(tables.packs.tobytes())
        for tensor in tables.tensors:
            number, row_interleave, rank, lengths = self.shape(tensor)
            self.put(
                records.TENSOR,
                *self.name(tensor.name),
                NONE if tensor.layer is None else tensor.layer,
                number,
                row_interleave,
                rank,
                b"",
                *lengths,
                tensor.offset,
                tensor.size,
                tensor.checksum,
                b"",
            )
        for file in tables.files:
            self.put(
                records.FILE, *self.name(file.name), file.offset, file.size, file.checksum, b""
            )
        for volume in tables.volumes:
            self.put(
                records.VOLUME,
                *self.name(volume.label),
                volume.file_size,
                volume.digest,
                volume.data.offset,
                volume.data.size,
            )
        header = records.HEADER.pack(
            len(tables.dtypes),
            len(tables.layouts),
            first,
            len(tables.tensors),
            len(tables.files),
            len(tables.volumes),
            len(self.strings),
            b"",
        )
        return header + b"".join(self.parts) + bytes(self.strings)
