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

if TYPE_CHECKING:
    from .reader import Reader

CHUNK: Final = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Damage:
    """One place that is not as it should be; `layer` and `expert` are None where none is hit."""

    code: str
    place: str
    offset: int
    size: int
    layer: int | None = None
    expert: int | None = None


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


def verify_file(
    reader: Reader, progress: Callable[[int, int], None] | None, layer: int | None
) -> list[Damage]:
    """Every damage found, in order of the file; only what belongs to `layer` if one is given."""
    items = [item for item in _items(reader) if layer is None or item.layer == layer]
    items.sort(key=lambda item: item.offset)
    # One file for a whole check, else the padded extents of the layer.
    total = reader.file_size if layer is None else sum(item.size for item in items)
    walk = _Walk(reader, progress, total)
    damages = _check_copies(reader, walk) if layer is None else []
    region = reader.data_region
    position = region.offset
    for item in items:
        if layer is None:
            damages += walk.zeros(position, item.offset)
        damages += walk.item(item)
        position = item.offset + item.size
    if layer is None:
        damages += walk.zeros(position, region.offset + region.size)
    return sorted(damages, key=lambda damage: damage.offset)


def _items(reader: Reader) -> Iterator[_Item]:
    for layer, expert in np.argwhere(reader.index["size"] != 0).tolist():
        offset, size = reader.index[layer, expert].item()
        yield _Item(
            offset,
            size,
            block_seed(layer, expert),
            int(reader.checksums[layer, expert]),
            FormatCode.BLOCK_CHECKSUM,
            f"block L{layer}/E{expert}",
            layer,
            expert,
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

    def chunks(self, start: int, end: int) -> Iterator[tuple[int, memoryview]]:
        for offset in range(start, end, CHUNK):
            view = self.buffer[: min(CHUNK, end - offset)]
            self.reader.read_at_into(offset, view)
            yield offset, view
            self.advance(len(view))

    def item(self, item: _Item) -> list[Damage]:
        digest = xxhash.xxh3_64(seed=item.seed)
        for _, view in self.chunks(item.offset, item.offset + item.size):
            digest.update(view)
        if digest.intdigest() == item.expected:
            return []
        return [Damage(item.code.text, item.place, item.offset, item.size, item.layer, item.expert)]

    def zeros(self, start: int, end: int) -> list[Damage]:
        for offset, view in self.chunks(start, end):
            found = np.flatnonzero(np.frombuffer(view, np.uint8))
            if len(found):
                place = offset + int(found[0])
                self.advance(end - offset - len(view))
                return [Damage(FormatCode.PADDING_NOT_ZERO.text, "padding", place, end - place)]
        return []
