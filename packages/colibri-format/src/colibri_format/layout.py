"""Facts of a `.colibri` file as values: geometry, segments, layouts, tensors, embedded files."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np

from .dtypes import DType

INDEX_DTYPE: Final = np.dtype([("offset", "<u8"), ("size", "<u8")])
PAGE: Final = 4096
SEGMENT_ALIGNMENT: Final = 64
MIN_ALIGN_LOG2: Final = 12
MAX_ALIGN_LOG2: Final = 21
MAX_LAYERS: Final = 65_535
MAX_EXPERTS: Final = 1_048_576
MAX_INDEX_ENTRIES: Final = 2**24
MAX_RANK: Final = 4
MAX_NAME_BYTES: Final = 255
MAX_SIZE: Final = 2**62
INTERLEAVE: Final = 16
NO_LAYOUT: Final = 0xFFFF
MAX_VOLUMES: Final = 1_024


class Role(IntEnum):
    """What a segment is to its expert: 16 times the matrix, plus the part of it (spec, 7.3).

    The matrices are those of a gated feed-forward network,
    `down(act(gate(x)) * up(x))` (Shazeer 2020, arXiv 2002.05202).
    """

    GATE = 0x10
    GATE_BIAS = 0x11
    GATE_SCALE = 0x12
    UP = 0x20
    UP_BIAS = 0x21
    UP_SCALE = 0x22
    DOWN = 0x30
    DOWN_BIAS = 0x31
    DOWN_SCALE = 0x32


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def block_seed(layer: int, expert: int) -> int:
    """Seed of a block's XXH3-64: its place, so that a block in a wrong place fails (spec, 5.2)."""
    return (layer << 32) | expert


def tensor_seed(number: int) -> int:
    """Seed of the XXH3-64 of the dense tensor that stands `number`-th in its table (spec, 7.5)."""
    return (0xFFFF_FFFF << 32) | number


def file_seed(number: int) -> int:
    """Seed of the XXH3-64 of the embedded file that stands `number`-th in its table (spec, 7.6)."""
    return (0xFFFF_FFFE << 32) | number


@dataclass(frozen=True, slots=True)
class Geometry:
    """How many layers and experts the index has, and the bytes each block starts a multiple of."""

    n_layers: int
    n_experts: int
    alignment: int


@dataclass(frozen=True, slots=True)
class SegmentSpec:
    """A segment to be placed: `shape` is `(rows, columns)` in C order, or `(n,)` for biases."""

    role: Role
    dtype: DType
    shape: tuple[int, ...]
    row_interleave: int = 0

    @property
    def size(self) -> int:
        """Payload in bytes."""
        return self.dtype.size_bytes(self.shape)


@dataclass(frozen=True, slots=True)
class Segment:
    """One tensor's bytes inside a block: `size` bytes at `offset` from the block's start."""

    role: Role
    dtype: DType
    shape: tuple[int, ...]
    row_interleave: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each segment of a block stands; `block_size` is the payload, padding left out."""

    segments: tuple[Segment, ...]
    block_size: int

    @classmethod
    def of(cls, specs: tuple[SegmentSpec, ...]) -> Layout:
        """Segments in order of role, each at the next multiple of 64 bytes."""
        offset = 0
        placed = []
        for spec in sorted(specs, key=lambda s: s.role):
            offset = round_up(offset, SEGMENT_ALIGNMENT)
            placed.append(
                Segment(spec.role, spec.dtype, spec.shape, spec.row_interleave, offset, spec.size)
            )
            offset += spec.size
        return cls(tuple(placed), offset)

    def segment(self, role: Role) -> Segment | None:
        """The segment with that role, None where the block has none."""
        return next((s for s in self.segments if s.role is role), None)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A dense tensor to be placed; `layer` None for those of no layer (embeddings, head)."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    layer: int | None = None
    row_interleave: int = 0

    @property
    def size(self) -> int:
        """Payload in bytes."""
        return self.dtype.size_bytes(self.shape)


@dataclass(frozen=True, slots=True)
class DenseTensor:
    """A tensor that every token needs: `size` bytes at `offset` of the file."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    layer: int | None
    row_interleave: int
    offset: int
    size: int
    checksum: int


@dataclass(frozen=True, slots=True)
class FileSpec:
    """An embedded file to be placed."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class FileEntry:
    """An embedded file: `size` bytes at `offset` of the `.colibri` file."""

    name: str
    offset: int
    size: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Extent:
    """`size` bytes at `offset`; `(0, 0)` is nothing at all."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Volume:
    """A further file that holds blocks: recognised by `digest`, called `label` (spec, 7.7)."""

    label: str
    data: Extent
    digest: bytes = bytes(16)

    @property
    def file_size(self) -> int:
        """Exact size in bytes: header page, data region, header page."""
        return self.data.offset + self.data.size + PAGE
