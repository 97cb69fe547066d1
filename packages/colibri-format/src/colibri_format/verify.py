"""Reading a whole file and naming what is damaged in it (spec, section 11, last paragraph)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import xxhash

from .errors import FormatCode
from .header import COPIED_REGIONS, find_unsoundness
from .layout import PAGE, block_seed, file_seed, round_up, tensor_seed
from .volume import parse_page

if TYPE_CHECKING:
    from .reader import Reader

CHUNK: Final = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Damage:
    """One place that is not as it should be; `layer` and `expert` are None where none is hit.

    `offset` counts from the start of the file, or of the volume if `volume` is not 0.
    """

    code: str
    place: str
    offset: int
    size: int
    layer: int | None = None
    expert: int | None = None
    volume: int = 0


@dataclass(frozen=True, slots=True)
class _Item:
    offset: int
    size: int
    seed: int
    expected: int
    code: FormatCode
    place: str
    layer: int | None = None
    expert: int | None = None
    volume: int = 0


def verify_file(
    reader: Reader, progress: Callable[[int, int], None] | None, layer: int | None
) -> list[Damage]:
    """Every damage found, volume by volume in order of offset; of `layer` only if one is given."""
    items = [item for item in _items(reader) if layer is None or item.layer == layer]
    items.sort(key=lambda item: (item.volume, item.offset))
    if layer is not None:
        walk = _Walk(reader, progress, sum(item.size for item in items))
        return [damage for item in items for damage in walk.item(item)]
    total = reader.file_size + sum(volume.file_size for volume in reader.volumes)
    walk = _Walk(reader, progress, total)
    damages = _check_copies(reader, walk)
    regions = [reader.data_region, *(volume.data for volume in reader.volumes)]
    for volume, region in enumerate(regions):
        if volume:
            damages += _check_pages(reader, volume, walk)
        position = region.offset
        for item in (item for item in items if item.volume == volume):
            damages += walk.zeros(position, item.offset, volume)
            damages += walk.item(item)
            position = item.offset + item.size
        damages += walk.zeros(position, region.offset + region.size, volume)
    return sorted(damages, key=lambda damage: (damage.volume, damage.offset))


def _items(reader: Reader) -> Iterator[_Item]:
    index = reader.block_index
    for layer, expert in np.argwhere(index.entries["size"] != 0).tolist():
        offset, size = index.entries[layer, expert].item()
        yield _Item(
            offset,
            size,
            block_seed(layer, expert),
            int(index.checksums[layer, expert]),
            FormatCode.BLOCK_CHECKSUM,
            f"block L{layer}/E{expert}",
            layer,
            expert,
            int(index.volumes[layer, expert]),
        )
    for n, tensor in enumerate(reader.tables.tensors):
        if tensor.size:
            yield _Item(
                tensor.offset,
                tensor.size,
                tensor_seed(n),
                tensor.checksum,
                FormatCode.TENSOR_CHECKSUM,
                f"tensor {tensor.name}",
                tensor.layer,
            )
    for n, file in enumerate(reader.tables.files):
        if file.size:
            yield _Item(
                file.offset,
                file.size,
                file_seed(n),
                file.checksum,
                FormatCode.FILE_CHECKSUM,
                f"embedded file {file.name}",
            )


def _check_copies(reader: Reader, walk: _Walk) -> list[Damage]:
    """Both superblocks and both copies of each region, and the padding before the data."""
    damages = []
    for offset, end in ((0, "start"), (reader.file_size - PAGE, "end")):
        fault = find_unsoundness(reader.read_at(offset, PAGE), str(reader.path))
        if fault is not None:
            damages.append(Damage(fault.code, f"superblock at the {end}", offset, PAGE))
        walk.advance(PAGE)
    position = PAGE
    for region in COPIED_REGIONS:
        extent = reader.superblock.region(region)
        if not extent.length:
            continue
        for is_tail, offset in ((False, extent.offset), (True, extent.copy_offset)):
            if reader.read_region_copy(region, is_tail=is_tail) is None:
                end = "end" if is_tail else "start"
                damages.append(
                    Damage(
                        FormatCode.REGION_CHECKSUM.text,
                        f"region {region.name.lower()} at the {end}",
                        offset,
                        extent.length,
                    )
                )
            walk.advance(round_up(extent.length, PAGE))
        position = extent.offset + round_up(extent.length, PAGE)
    return damages + walk.zeros(position, reader.data_region.offset)


def _check_pages(reader: Reader, volume: int, walk: _Walk) -> list[Damage]:
    """Both pages of a volume, and the padding before its data."""
    fact = reader.volumes[volume - 1]
    damages = [
        Damage(
            FormatCode.SUPERBLOCK_CHECKSUM.text,
            f"page at the {end} of volume {fact.label}",
            offset,
            PAGE,
            volume=volume,
        )
        for offset, end in ((0, "start"), (fact.file_size - PAGE, "end"))
        if parse_page(reader.read_at(offset, PAGE, volume)) is None
    ]
    walk.advance(2 * PAGE)
    return damages + walk.zeros(PAGE, fact.data.offset, volume)


class _Walk:
    """Reads extents in chunks through one buffer, hashing or looking for bytes that are not 0."""

    def __init__(
        self, reader: Reader, progress: Callable[[int, int], None] | None, total: int
    ) -> None:
        self.reader = reader
        self.progress = progress
        self.total = total
        self.done = 0
        self.buffer = memoryview(bytearray(CHUNK))

    def advance(self, n_bytes: int) -> None:
        self.done += n_bytes
        if self.progress is not None:
            self.progress(min(self.done, self.total), self.total)

    def chunks(self, start: int, end: int, volume: int) -> Iterator[tuple[int, memoryview]]:
        for offset in range(start, end, CHUNK):
            view = self.buffer[: min(CHUNK, end - offset)]
            self.reader.read_at_into(offset, view, volume)
            yield offset, view
            self.advance(len(view))

    def item(self, item: _Item) -> list[Damage]:
        digest = xxhash.xxh3_64(seed=item.seed)
        for _, view in self.chunks(item.offset, item.offset + item.size, item.volume):
            digest.update(view)
        if digest.intdigest() == item.expected:
            return []
        return [
            Damage(
                item.code.text,
                item.place,
                item.offset,
                item.size,
                item.layer,
                item.expert,
                item.volume,
            )
        ]

    def zeros(self, start: int, end: int, volume: int = 0) -> list[Damage]:
        for offset, view in self.chunks(start, end, volume):
            found = np.flatnonzero(np.frombuffer(view, np.uint8))
            if len(found):
                place = offset + int(found[0])
                self.advance(end - offset)
                return [
                    Damage(
                        FormatCode.PADDING_NOT_ZERO.text,
                        "padding",
                        place,
                        end - place,
                        volume=volume,
                    )
                ]
        return []
