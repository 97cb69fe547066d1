"""What a file ends and starts with, once the checksums of all it holds are known."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import numpy as np
import xxhash
from numpy.typing import NDArray

from .blockindex import BlockIndex, digest_volume
from .checksum import checksum
from .header import (
    COPIED_REGIONS,
    Incompat,
    Region,
    RegionExtent,
    Superblock,
    encode_superblock,
)
from .layout import Volume
from .plan import FilePlan
from .tables import encode_tables
from .volume import VolumePage, encode_page


@dataclass(frozen=True, slots=True)
class FileEnds:
    """`regions` stand around the data, twice; `pages` are each file's first and last page.

    The first page is the superblock of the file itself, the others are of its volumes.
    """

    uuid: UUID
    regions: Mapping[Region, bytes]
    pages: tuple[bytes, ...]


def encode_ends(
    plan: FilePlan,
    block_sums: NDArray[np.uint64],
    tensor_sums: Mapping[int, int],
    file_sums: Mapping[int, int],
) -> FileEnds:
    """Everything of the file of `plan` but its data.

    `block_sums` are the blocks' checksums, `(n_layers, n_experts)`; the others go by the numbers of
    tensors and embedded files in the plan.
    """
    index = BlockIndex(plan.index, block_sums, plan.expert_layouts, plan.block_volumes)
    volumes = tuple(
        dataclasses.replace(volume, digest=digest_volume(index, n))
        for n, volume in enumerate(plan.volumes, 1)
    )
    regions = _encode_regions(plan, volumes, block_sums, tensor_sums, file_sums)
    uuid = derive_uuid([regions[r] for r in COPIED_REGIONS if r in regions])
    align_log2 = plan.geometry.alignment.bit_length() - 1
    pages = (
        _encode_superblock(plan, regions, uuid),
        *(encode_page(VolumePage(n, volume, align_log2)) for n, volume in enumerate(volumes, 1)),
    )
    return FileEnds(uuid, regions, pages)


def _encode_superblock(plan: FilePlan, regions: Mapping[Region, bytes], uuid: UUID) -> bytes:
    extents = []
    for region in Region:
        offset, copy_offset = plan.regions[region]
        data = regions.get(region)
        length = plan.region_lengths[region]
        extents.append(RegionExtent(offset, copy_offset, length, checksum(data) if data else 0))
    return encode_superblock(
        Superblock(
            uuid,
            plan.file_size,
            plan.geometry.n_layers,
            plan.geometry.n_experts,
            plan.geometry.alignment.bit_length() - 1,
            tuple(extents),
            int(plan.incompat),
        )
    )


def _encode_regions(
    plan: FilePlan,
    volumes: tuple[Volume, ...],
    block_sums: NDArray[np.uint64],
    tensor_sums: Mapping[int, int],
    file_sums: Mapping[int, int],
) -> dict[Region, bytes]:
    tables = dataclasses.replace(
        plan.tables,
        tensors=tuple(
            dataclasses.replace(tensor, checksum=tensor_sums[n])
            for n, tensor in enumerate(plan.tensors)
        ),
        files=tuple(
            dataclasses.replace(file, checksum=file_sums[n]) for n, file in enumerate(plan.files)
        ),
        volumes=volumes,
    )
    regions = {
        Region.INDEX: plan.index.tobytes(),
        Region.CHECKSUMS: block_sums.astype("<u8").tobytes(),
        Region.TABLES: encode_tables(tables),
        Region.METADATA: plan.metadata,
    }
    if plan.incompat & Incompat.MIXED_LAYOUTS:
        regions[Region.EXPERT_LAYOUTS] = plan.expert_layouts.astype("<u2").tobytes()
    if plan.incompat & Incompat.STRIPED:
        regions[Region.VOLUME_MAP] = plan.block_volumes.astype("<u2").tobytes()
    return regions


def derive_uuid(regions: Sequence[bytes]) -> UUID:
    """The UUID of the content that these regions, in order of their numbers, tell of (spec, 13)."""
    digest = xxhash.xxh3_128()
    for data in regions:
        digest.update(data)
    number = int.from_bytes(digest.digest(), "big")
    number = number & ~(0xF << 76) | 8 << 76
    number = number & ~(0x3 << 62) | 2 << 62
    return UUID(int=number)
