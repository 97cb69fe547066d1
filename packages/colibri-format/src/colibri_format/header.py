"""Superblock and region descriptors: bytes to values and back, no files (spec, 3 and 4)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Final
from uuid import UUID

from .checksum import checksum
from .errors import FormatCode, FormatError
from .layout import (
    MAX_ALIGN_LOG2,
    MAX_EXPERTS,
    MAX_INDEX_ENTRIES,
    MAX_LAYERS,
    MAX_SIZE,
    MIN_ALIGN_LOG2,
    PAGE,
    Geometry,
    round_up,
)

MAGIC: Final = b"\x89CLB\r\n\x1a\n"
MAJOR: Final = 1
MINOR: Final = 0
MIN_FILE_SIZE: Final = 4 * PAGE
REGIONS_OFFSET: Final = 128
CHECKSUM_OFFSET: Final = PAGE - 8
MAX_REGION: Final = 2**29

_HEAD: Final = struct.Struct("<8sHHIQQQ16sQIIII48s")
_REGION: Final = struct.Struct("<QQQQ")
_TAIL_RESERVED: Final = slice(REGIONS_OFFSET + 8 * _REGION.size, CHECKSUM_OFFSET)


class Region(IntEnum):
    """Regions by number of their descriptor (spec, section 4)."""

    INDEX = 0
    CHECKSUMS = 1
    EXPERT_LAYOUTS = 2
    VOLUME_MAP = 3
    TABLES = 4
    METADATA = 5
    EXTENSION = 6
    DATA = 7


COPIED_REGIONS: Final = tuple(region for region in Region if region is not Region.DATA)


class Incompat(IntFlag):
    """Features that a reader must know to read the file (spec, section 15)."""

    MIXED_LAYOUTS = 1
    STRIPED = 2
    ZSTD_BLOCKS = 4
    SHARED_POOL = 8


KNOWN_INCOMPAT: Final = Incompat.MIXED_LAYOUTS | Incompat.STRIPED


@dataclass(frozen=True, slots=True)
class RegionExtent:
    """Where a region stands: `length` bytes at `offset` and again at `copy_offset`."""

    offset: int = 0
    copy_offset: int = 0
    length: int = 0
    checksum: int = 0


@dataclass(frozen=True, slots=True)
class Superblock:
    """The first page of a file, and its last.

    `regions` has one extent for each `Region`, in order; masks are plain integers, because bits
    unknown here must survive.
    """

    uuid: UUID
    file_size: int
    n_layers: int
    n_experts: int
    align_log2: int
    regions: tuple[RegionExtent, ...]
    incompat: int = 0
    ro_compat: int = 0
    compat: int = 0
    minor: int = MINOR

    @property
    def geometry(self) -> Geometry:
        """Rows and columns of the index, and the alignment in bytes."""
        return Geometry(self.n_layers, self.n_experts, 1 << self.align_log2)

    def region(self, region: Region) -> RegionExtent:
        """The extent of `region`."""
        return self.regions[region]


def encode_superblock(block: Superblock) -> bytes:
    """The page of 4,096 bytes that `parse_superblock` reads back as `block`."""
    page = bytearray(PAGE)
    _HEAD.pack_into(
        page,
        0,
        MAGIC,
        MAJOR,
        block.minor,
        0,
        block.incompat,
        block.ro_compat,
        block.compat,
        block.uuid.bytes,
        block.file_size,
        block.n_layers,
        block.n_experts,
        block.align_log2,
        0,
        bytes(48),
    )
    for number, extent in enumerate(block.regions):
        _REGION.pack_into(
            page,
            REGIONS_OFFSET + number * _REGION.size,
            extent.offset,
            extent.copy_offset,
            extent.length,
            extent.checksum,
        )
    struct.pack_into("<Q", page, CHECKSUM_OFFSET, checksum(page[:CHECKSUM_OFFSET]))
    return bytes(page)


def find_unsoundness(page: bytes, where: str) -> FormatError | None:
    """What makes `page` no superblock of this major version; None if it is sound (spec, 11.2)."""
    if page[:8] != MAGIC:
        return FormatError(
            FormatCode.BAD_MAGIC,
            where,
            f"begins with {page[:8].hex(' ')}",
            _magic_hint(page),
            "this is not a .colibri file, or its first page is damaged",
        )
    major = struct.unpack_from("<H", page, 8)[0]
    if major != MAJOR:
        return FormatError(
            FormatCode.UNSUPPORTED_VERSION,
            where,
            f"major version {major}",
            f"this reader knows version {MAJOR}",
            "update colibri-format",
        )
    stored = struct.unpack_from("<Q", page, CHECKSUM_OFFSET)[0]
    actual = checksum(page[:CHECKSUM_OFFSET])
    if stored != actual:
        return FormatError(
            FormatCode.SUPERBLOCK_CHECKSUM,
            where,
            f"checksum of the page is {actual:#018x}",
            f"{stored:#018x} is stored in it",
            "the page is damaged",
        )
    return None


def _magic_hint(page: bytes) -> str:
    required = f"{MAGIC.hex(' ')} is required"
    if page[1:4] == MAGIC[1:4]:
        return f"{required} (a transfer in text mode changes line ends)"
    return required


def parse_superblock(page: bytes, where: str) -> Superblock:
    """The superblock in a sound `page`, all its rules checked (spec, 11.4 and 11.5).

    Raises:
        FormatError: with the code of the first rule that fails.
    """
    (
        _,
        _,
        minor,
        reserved_a,
        incompat,
        ro_compat,
        compat,
        uuid,
        file_size,
        n_layers,
        n_experts,
        align_log2,
        reserved_b,
        reserved_c,
    ) = _HEAD.unpack_from(page, 0)
    _check_features(incompat, where)
    if reserved_a or reserved_b or any(reserved_c) or any(page[_TAIL_RESERVED]):
        raise FormatError(
            FormatCode.RESERVED_NOT_ZERO,
            f"{where}: superblock",
            "reserved bytes are not zero",
            "version 1.0 requires zeros",
        )
    if not MIN_ALIGN_LOG2 <= align_log2 <= MAX_ALIGN_LOG2:
        raise FormatError(
            FormatCode.BAD_ALIGNMENT,
            f"{where}: superblock",
            f"align_log2 is {align_log2}",
            f"{MIN_ALIGN_LOG2} to {MAX_ALIGN_LOG2} is required",
        )
    check_geometry(n_layers, n_experts, f"{where}: superblock")
    regions = tuple(
        RegionExtent(*_REGION.unpack_from(page, REGIONS_OFFSET + number * _REGION.size))
        for number in range(len(Region))
    )
    block = Superblock(
        UUID(bytes=uuid),
        file_size,
        n_layers,
        n_experts,
        align_log2,
        regions,
        incompat,
        ro_compat,
        compat,
        minor,
    )
    _check_regions(block, where)
    return block


def _check_features(incompat: int, where: str) -> None:
    names = {int(feature): feature.name for feature in Incompat}
    if unknown := incompat & ~int(KNOWN_INCOMPAT):
        bits = [names.get(1 << n) or f"bit {n}" for n in range(64) if unknown >> n & 1]
        raise FormatError(
            FormatCode.UNSUPPORTED_FEATURE,
            f"{where}: superblock",
            f"the file uses {', '.join(str(bit) for bit in bits)}",
            "this reader knows MIXED_LAYOUTS and STRIPED",
            "update colibri-format",
        )


def check_geometry(n_layers: int, n_experts: int, where: str) -> None:
    """Raises `bad-geometry` unless the index has 1 to the largest permitted number of entries."""
    if not (
        1 <= n_layers <= MAX_LAYERS
        and 1 <= n_experts <= MAX_EXPERTS
        and n_layers * n_experts <= MAX_INDEX_ENTRIES
    ):
        raise FormatError(
            FormatCode.BAD_GEOMETRY,
            where,
            f"{n_layers} layers of {n_experts} experts",
            f"1 to {MAX_LAYERS} layers, 1 to {MAX_EXPERTS} experts, {MAX_INDEX_ENTRIES} in all",
        )


def place_regions(
    lengths: dict[Region, int], alignment: int
) -> tuple[dict[Region, tuple[int, int]], int]:
    """`(offset, copy_offset)` of each region, and the size of the whole file (spec, section 4).

    `lengths` gives the length of every region; absent ones (0) get `(0, 0)`.
    """
    offsets: dict[Region, int] = {}
    copies: dict[Region, int] = {}
    position = PAGE
    for region in COPIED_REGIONS:
        offsets[region] = position if lengths[region] else 0
        position += round_up(lengths[region], PAGE)
    offsets[Region.DATA] = round_up(position, alignment)
    position = offsets[Region.DATA] + lengths[Region.DATA]
    for region in reversed(COPIED_REGIONS):
        copies[region] = position if lengths[region] else 0
        position += round_up(lengths[region], PAGE)
    copies[Region.DATA] = 0
    return {r: (offsets[r], copies[r]) for r in Region}, position + PAGE


def _check_regions(block: Superblock, where: str) -> None:
    entries = block.n_layers * block.n_experts
    fixed = {
        Region.INDEX: 16 * entries,
        Region.CHECKSUMS: 8 * entries,
        Region.EXPERT_LAYOUTS: 2 * entries * bool(block.incompat & Incompat.MIXED_LAYOUTS),
        Region.VOLUME_MAP: 2 * entries * bool(block.incompat & Incompat.STRIPED),
    }
    lengths = {region: block.regions[region].length for region in Region}
    for region, length in lengths.items():
        required = ""
        if region in fixed and length != fixed[region]:
            required = f"{fixed[region]} bytes are required"
        elif region is Region.TABLES and not 64 <= length <= MAX_REGION:
            required = f"64 to {MAX_REGION} bytes are required"
        elif region is Region.EXTENSION and length > MAX_REGION:
            required = f"at most {MAX_REGION} bytes are allowed"
        elif region is Region.METADATA and not 2 <= length <= 2**24:
            required = "2 to 16777216 bytes are required"
        elif region is Region.EXTENSION and length and not block.ro_compat | block.compat:
            required = "none is allowed without a compat or ro_compat feature"
        elif region is Region.DATA and length % block.geometry.alignment:
            required = f"a multiple of the alignment ({block.geometry.alignment}) is required"
        elif length >= MAX_SIZE:
            required = "less than 2^62 is required"
        if required:
            raise FormatError(
                FormatCode.REGION_LENGTH,
                f"{where}: region {region.name.lower()}",
                f"{length} bytes long",
                required,
            )
    places, file_size = place_regions(lengths, block.geometry.alignment)
    for region, (offset, copy_offset) in places.items():
        extent = block.regions[region]
        if (extent.offset, extent.copy_offset) != (offset, copy_offset) or (
            (not extent.length or region is Region.DATA) and extent.checksum
        ):
            raise FormatError(
                FormatCode.REGION_PLACEMENT,
                f"{where}: region {region.name.lower()}",
                f"at {extent.offset:#x} and {extent.copy_offset:#x}",
                f"{offset:#x} and {copy_offset:#x} are required",
            )
    if file_size != block.file_size:
        raise FormatError(
            FormatCode.REGION_PLACEMENT,
            f"{where}: superblock",
            f"file_size is {block.file_size}",
            f"the regions end at {file_size}",
        )
