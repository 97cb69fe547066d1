"""Breaking a valid `.colibri` file with every checksum still right, so that one rule breaks."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterable
from pathlib import Path

import colibri_format as cf
from colibri_format.header import (
    COPIED_REGIONS,
    Region,
    Superblock,
    encode_superblock,
    parse_superblock,
)
from colibri_format.layout import PAGE


class Forge:
    """A valid file's bytes; changes keep its checksums right, so that only one rule breaks."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)

    @property
    def superblock(self) -> Superblock:
        return parse_superblock(bytes(self.data[:PAGE]), "forge")

    def region(self, region: Region) -> bytearray:
        extent = self.superblock.regions[region]
        return self.data[extent.offset : extent.offset + extent.length]

    def set_superblock(self, block: Superblock) -> Forge:
        self._put_page(encode_superblock(block))
        return self

    def patch_superblock(self, offset: int, value: bytes) -> Forge:
        """Overwrites bytes of both superblocks and makes their checksums right."""
        page = bytearray(self.data[:PAGE])
        page[offset : offset + len(value)] = value
        page[PAGE - 8 :] = struct.pack("<Q", cf.checksum(bytes(page[: PAGE - 8])))
        self._put_page(bytes(page))
        return self

    def patch_region(self, region: Region, offset: int, value: bytes) -> Forge:
        """Overwrites bytes of both copies of a region and makes all checksums right."""
        content = self.region(region)
        content[offset : offset + len(value)] = value
        return self.set_region(region, bytes(content))

    def set_region(self, region: Region, content: bytes) -> Forge:
        """Puts other content of the same padded size into both copies of a region."""
        block = self.superblock
        extent = block.regions[region]
        room = -(-extent.length // PAGE) * PAGE
        assert len(content) <= room
        for offset in (extent.offset, extent.copy_offset):
            self.data[offset : offset + room] = content + bytes(room - len(content))
        regions = list(block.regions)
        regions[region] = dataclasses.replace(
            extent, length=len(content), checksum=cf.checksum(content)
        )
        return self.set_superblock(dataclasses.replace(block, regions=tuple(regions)))

    def _put_page(self, page: bytes) -> None:
        self.data[:PAGE] = page
        self.data[-PAGE:] = page

    def record_offset(self, array: str, number: int = 0) -> int:
        """Where a record of the tables stands in their region (spec, section 7)."""
        tables = self.region(Region.TABLES)
        counts = struct.unpack_from("<IIIIII", tables)
        layers = self.superblock.n_layers
        sizes = {
            "dtype": (32, counts[0]),
            "layout": (16, counts[1]),
            "segment": (64, counts[2]),
            "layer": (8, layers),
            "pack": (16, layers + 2),
            "tensor": (96, counts[3]),
            "file": (48, counts[4]),
            "volume": (48, counts[5]),
            "string": (1, 0),
        }
        offset = 64
        for name, (size, count) in sizes.items():
            if name == array:
                return offset + size * number
            offset += size * count
        raise KeyError(array)

    def write(self, path: Path) -> Path:
        path.write_bytes(self.data)
        return path


def region_extents(superblock: Superblock) -> Iterable[tuple[Region, int, int]]:
    """Every copy of every region: which, where, how long."""
    for region in COPIED_REGIONS:
        extent = superblock.regions[region]
        if extent.length:
            yield region, extent.offset, extent.length
            yield region, extent.copy_offset, extent.length
