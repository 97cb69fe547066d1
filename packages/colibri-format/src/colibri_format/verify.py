"""Reading a whole file and naming what is damaged in it (spec, section 11, last paragraph)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from .errors import FormatCode
from .header import COPIED_REGIONS, find_unsoundness
from .layout import PAGE, block_seed, file_seed, round_up, tensor_seed
from .stream import CHUNK, stream_extent
from .volume import parse_page

if TYPE_CHECKING:
    from .reader import Reader


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
    for volume in range(1, len(reader.volumes) + 1):
        reader.fileno(volume)  # refuses if the file was opened without its volumes
    items = [item for item in _items(reader) if layer is None or item.layer == layer]
    items.sort(key=lambda item: (item.volume, item.offset))
    if layer is not None:
        walk = _Walk(reader, progress, sum(item.size for item in items))
        return [
            damage
            for run in _runs(items)
            for damage in walk.stretch(
                run[0].offset, run[-1].offset + run[-1].size, run, run[0].volume
            )
            if damage.code != FormatCode.PADDING_NOT_ZERO.text
        ]
    total = reader.file_size + sum(volume.file_size for volume in reader.volumes)
    walk = _Walk(reader, progress, total)
    damages = _check_copies(reader, walk)
    regions = [reader.data_region, *(volume.data for volume in reader.volumes)]
    for volume, region in enumerate(regions):
        if volume:
            damages += _check_pages(reader, volume, walk)
        held = [item for item in items if item.volume == volume]
        damages += walk.stretch(region.offset, region.offset + region.size, held, volume)
    return sorted(damages, key=lambda damage: (damage.volume, damage.offset))


def _runs(items: Sequence[_Item]) -> list[list[_Item]]:
    """Items that one stretch of reading brings: in one file, with less than a chunk between."""
    runs: list[list[_Item]] = []
    for item in items:
        last = runs[-1][-1] if runs else None
        is_near = (
            last is not None
            and last.volume == item.volume
            and item.offset - (last.offset + last.size) < CHUNK
        )
        if is_near:
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs


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
    return damages + walk.stretch(position, reader.data_region.offset, [], 0)


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
    return damages + walk.stretch(PAGE, fact.data.offset, [], volume)


class _Walk:
    """Goes over stretches of the data regions, hashing or looking for bytes that are not 0."""

    def __init__(
        self, reader: Reader, progress: Callable[[int, int], None] | None, total: int
    ) -> None:
        self.reader = reader
        self.progress = progress
        self.total = total
        self.done = 0

    def advance(self, n_bytes: int) -> None:
        self.done += n_bytes
        if self.progress is not None:
            self.progress(min(self.done, self.total), self.total)

    def stretch(self, start: int, end: int, items: Sequence[_Item], volume: int) -> list[Damage]:
        """Damage between `start` and `end`, where `items` stand in order and the rest is zero."""
        fd = self.reader.fileno(volume)
        path = self.reader.volume_paths[volume - 1] if volume else self.reader.path
        checks: list[_Sum | _Zeros] = []
        position = start
        for item in items:
            if item.offset > position:
                checks.append(_Zeros(position, item.offset, volume))
            checks.append(_Sum(item))
            position = item.offset + item.size
        if end > position:
            checks.append(_Zeros(position, end, volume))
        current = 0
        for offset, piece in stream_extent(fd, path, start, end - start):
            stop = offset + len(piece)
            while current < len(checks):
                check = checks[current]
                low, high = max(check.start, offset), min(check.end, stop)
                check.update(low, piece[low - offset : high - offset])
                if check.end > stop:
                    break
                current += 1
            self.advance(len(piece))
        return [damage for check in checks if (damage := check.result()) is not None]


class _Sum:
    """Hashes what stands in an item's extent."""

    def __init__(self, item: _Item) -> None:
        self.item = item
        self.start, self.end = item.offset, item.offset + item.size
        self.digest = xxhash.xxh3_64(seed=item.seed)

    def update(self, offset: int, piece: memoryview) -> None:
        self.digest.update(piece)

    def result(self) -> Damage | None:
        item = self.item
        if self.digest.intdigest() == item.expected:
            return None
        return Damage(
            item.code.text,
            item.place,
            item.offset,
            item.size,
            item.layer,
            item.expert,
            item.volume,
        )


class _Zeros:
    """Looks for the first byte that is not zero."""

    def __init__(self, start: int, end: int, volume: int) -> None:
        self.start, self.end, self.volume = start, end, volume
        self.found: int | None = None

    def update(self, offset: int, piece: memoryview) -> None:
        if self.found is None:
            marks = np.flatnonzero(np.frombuffer(piece, np.uint8))
            if len(marks):
                self.found = offset + int(marks[0])

    def result(self) -> Damage | None:
        if self.found is None:
            return None
        return Damage(
            FormatCode.PADDING_NOT_ZERO.text,
            "padding",
            self.found,
            self.end - self.found,
            volume=self.volume,
        )
