"""The records of the tables region, as they stand in the file (spec, section 7)."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

NONE: Final = 0xFFFF_FFFF
MIXED: Final = 0xFFFF_FFFE
LIMITS: Final = {
    "n_dtypes": 256,
    "n_layouts": 65_535,
    "n_segments": 1_048_576,
    "n_tensors": 1_048_576,
    "n_files": 4_096,
    "n_volumes": 1_024,
    "string_bytes": 2**28,
}


class Header(NamedTuple):
    """Counts of the record arrays (7.1)."""

    n_dtypes: int
    n_layouts: int
    n_segments: int
    n_tensors: int
    n_files: int
    n_volumes: int
    string_bytes: int
    reserved: bytes


class DTypeRecord(NamedTuple):
    """An encoding (7.2)."""

    name_offset: int
    name_length: int
    ggml_id: int
    block_elements: int
    block_bytes: int
    reserved: bytes


class LayoutRecord(NamedTuple):
    """A run of segments (7.3)."""

    first_segment: int
    n_segments: int
    block_size: int


class SegmentRecord(NamedTuple):
    """One tensor inside a block (7.3)."""

    role: int
    dtype: int
    row_interleave: int
    rank: int
    offset: int
    size: int
    length_0: int
    length_1: int
    length_2: int
    length_3: int
    reserved: bytes

    @property
    def lengths(self) -> tuple[int, int, int, int]:
        """All four lengths of the shape."""
        return self.length_0, self.length_1, self.length_2, self.length_3


class LayerRecord(NamedTuple):
    """A layer's layout (7.4)."""

    layout: int
    reserved: bytes


class PackRecord(NamedTuple):
    """An extent of dense tensors or files (7.4)."""

    offset: int
    size: int


class TensorRecord(NamedTuple):
    """A dense tensor (7.5)."""

    name_offset: int
    name_length: int
    layer: int
    dtype: int
    row_interleave: int
    rank: int
    reserved: bytes
    length_0: int
    length_1: int
    length_2: int
    length_3: int
    offset: int
    size: int
    checksum: int
    reserved_tail: bytes

    @property
    def lengths(self) -> tuple[int, int, int, int]:
        """All four lengths of the shape."""
        return self.length_0, self.length_1, self.length_2, self.length_3


class FileRecord(NamedTuple):
    """An embedded file (7.6)."""

    name_offset: int
    name_length: int
    offset: int
    size: int
    checksum: int
    reserved: bytes


class VolumeRecord(NamedTuple):
    """A further file that holds blocks (7.7)."""

    name_offset: int
    name_length: int
    file_size: int
    digest: bytes
    data_offset: int
    data_length: int


HEADER: Final = struct.Struct("<IIIIIIQ32s")
DTYPE: Final = struct.Struct("<IIiII12s")
LAYOUT: Final = struct.Struct("<IIQ")
SEGMENT: Final = struct.Struct("<HHHHQQ4Q8s")
LAYER: Final = struct.Struct("<I4s")
PACK: Final = struct.Struct("<QQ")
TENSOR: Final = struct.Struct("<IIIHHH6s4QQQQ16s")
FILE: Final = struct.Struct("<IIQQQ16s")
VOLUME: Final = struct.Struct("<IIQ16sQQ")
