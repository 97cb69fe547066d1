"""Valid `.colibri` files, and ways to break them with every checksum still right."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

import colibri_format as cf
from colibri_format.header import (
    COPIED_REGIONS,
    Region,
    Superblock,
    encode_superblock,
    parse_superblock,
)
from colibri_format.layout import PAGE


def layout_of(dtype: str, hidden: int, width: int) -> cf.Layout:
    """A gated feed-forward network of `width` neurons in one encoding."""
    kind = cf.DTYPES[dtype]
    return cf.Layout.of(
        (
            cf.SegmentSpec(cf.Role.GATE, kind, (width, hidden)),
            cf.SegmentSpec(cf.Role.UP, kind, (width, hidden)),
            cf.SegmentSpec(cf.Role.DOWN, kind, (hidden, width)),
        )
    )


def sample_plan(**changes: Any) -> cf.FilePlan:
    """Three layers of five experts: two encodings, one layer without experts, one absent one."""
    present = np.ones((3, 5), np.bool_)
    present[1] = False
    present[2, 3] = False
    arguments: dict[str, Any] = {
        "n_layers": 3,
        "n_experts": 5,
        "layer_layouts": [layout_of("q8_0", 64, 96), None, layout_of("f16", 64, 96)],
        "present": present,
        "tensors": [
            cf.TensorSpec("blk.1.norm", cf.DTYPES["f32"], (3, 5), 1),
            cf.TensorSpec("token_embd.weight", cf.DTYPES["q8_0"], (10, 64)),
            cf.TensorSpec("blk.0.empty", cf.DTYPES["f32"], (0, 4), 0),
            cf.TensorSpec("output_norm.weight", cf.DTYPES["f32"], (7,)),
        ],
        "files": [cf.FileSpec("config.json", 10), cf.FileSpec("empty.txt", 0)],
        "metadata": {"source": ["é", 1, True, None], "tool": "test"},
    }
    return cf.plan_layout(**(arguments | changes))


def fill(writer: cf.Writer, seed: int = 0) -> dict[str, bytes]:
    """Random bytes into everything that the writer's plan has; what was written, by place.

    Places are `L0/E1`, `tensor NAME` and `file NAME`.
    """
    rng = np.random.default_rng(seed)
    plan = writer.plan
    written = {}
    for layer, expert in np.argwhere(plan.index["size"] != 0).tolist():
        layout = plan.layout(layer)
        assert layout is not None
        payload = rng.bytes(sum(segment.size for segment in layout.segments))
        writer.write_block(layer, expert, payload)
        written[f"L{layer}/E{expert}"] = payload
    for tensor in plan.tensors:
        data = written[f"tensor {tensor.name}"] = rng.bytes(tensor.size)
        writer.write_tensor(tensor.name, data)
    for file in plan.files:
        data = written[f"file {file.name}"] = rng.bytes(file.size)
        writer.write_file(file.name, data)
    return written


def write_sample(path: Path, plan: cf.FilePlan | None = None, seed: int = 0) -> dict[str, bytes]:
    """Writes a valid file; what was written, by place."""
    with cf.Writer(path, plan or sample_plan()) as writer:
        return fill(writer, seed)


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
        counts = struct.unpack_from("<IIIII", tables)
        layers = self.superblock.n_layers
        sizes = {
            "dtype": (32, counts[0]),
            "layout": (16, counts[1]),
            "segment": (64, counts[2]),
            "layer": (8, layers),
            "pack": (16, layers + 2),
            "tensor": (96, counts[3]),
            "file": (48, counts[4]),
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


def code_of(action: Callable[[], object]) -> str | None:
    """The code of the error that `action` raises, None if it raises none."""
    try:
        action()
    except cf.ColibriError as error:
        return error.code
    return None


def region_extents(superblock: Superblock) -> Iterable[tuple[Region, int, int]]:
    """Every copy of every region: which, where, how long."""
    for region in COPIED_REGIONS:
        extent = superblock.regions[region]
        if extent.length:
            yield region, extent.offset, extent.length
            yield region, extent.copy_offset, extent.length
