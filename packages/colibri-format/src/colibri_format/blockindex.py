"""The 2D index and the arrays beside it: the rules of the spec's section 5, over whole arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from .errors import FormatCode, FormatError
from .layout import NO_LAYOUT, Extent, Geometry
from .tables import MIXED, Tables


@dataclass(frozen=True, slots=True, eq=False)
class BlockIndex:
    """Arrays of shape `(n_layers, n_experts)`: one value an expert.

    `entries` has `INDEX_DTYPE`; `checksums` is uint64; `layouts` uint16, the number of each
    expert's layout, `NO_LAYOUT` where it is absent; `volumes` uint16, 0 for the file itself.
    """

    entries: NDArray[Any]
    checksums: NDArray[np.uint64]
    layouts: NDArray[np.uint16]
    volumes: NDArray[np.uint16]


def layouts_of_layers(tables: Tables, is_present: NDArray[np.bool_]) -> NDArray[np.uint16]:
    """Each expert's layout number where no layer is mixed."""
    numbers = np.array([NO_LAYOUT if n is None else n for n in tables.layer_layouts], np.uint16)
    return np.where(is_present, numbers[:, None], np.uint16(NO_LAYOUT))


def pad_array(sizes: NDArray[np.uint64], alignment: int) -> NDArray[np.uint64]:
    """Each size rounded up to a multiple of `alignment`, a power of two; sizes below 2^63."""
    mask = np.uint64(alignment - 1)
    return (sizes + mask) & ~mask


def digest_volume(index: BlockIndex, volume: int) -> bytes:
    """The digest of what a volume holds (spec, 7.7)."""
    layers, experts = np.nonzero((index.volumes == volume) & (index.entries["size"] != 0))
    records = np.empty(
        len(layers),
        [("layer", "<u4"), ("expert", "<u4"), ("offset", "<u8"), ("size", "<u8"), ("sum", "<u8")],
    )
    entries = index.entries[layers, experts]
    records["layer"], records["expert"] = layers, experts
    records["offset"], records["size"] = entries["offset"], entries["size"]
    records["sum"] = index.checksums[layers, experts]
    records = records[np.argsort(records["offset"], kind="stable")]
    return xxhash.xxh3_128_digest(records.tobytes())


def check_index(
    index: BlockIndex, tables: Tables, geometry: Geometry, region: Extent, where: str
) -> None:
    """Raises FormatError for the first rule that an entry breaks, in the order of spec 11.8.

    `region` is the data region of the file itself.
    """
    _Checker(index, tables, geometry, region, where).check()


class _Checker:
    def __init__(
        self, index: BlockIndex, tables: Tables, geometry: Geometry, region: Extent, where: str
    ) -> None:
        self.index = index
        self.tables = tables
        self.geometry = geometry
        self.where = where
        self.regions = [region, *(volume.data for volume in tables.volumes)]
        self.offsets, self.sizes = index.entries["offset"], index.entries["size"]
        self.is_present = self.sizes != 0

    def refuse(self, bad: NDArray[np.bool_], code: FormatCode, required: str) -> None:
        """Raises for the first expert that is `bad`."""
        if not bad.any():
            return
        layer, expert = divmod(int(bad.argmax()), self.geometry.n_experts)
        offset, size = self.index.entries[layer, expert].item()
        raise FormatError(
            code,
            f"{self.where}: block L{layer}/E{expert} at {offset:#x}",
            f"size {size}, checksum {int(self.index.checksums[layer, expert]):#x}, layout "
            f"{int(self.index.layouts[layer, expert])}, volume "
            f"{int(self.index.volumes[layer, expert])}",
            required,
        )

    def check(self) -> None:
        self.refuse(
            ((self.offsets != 0) != self.is_present)
            | (~self.is_present & (self.index.checksums != 0)),
            FormatCode.ABSENT_NOT_ZERO,
            "an absent expert has offset, size and checksum 0, a present one an offset and a size",
        )
        self.check_layers()
        self.check_layouts()
        self.refuse(
            np.where(
                self.is_present, self.index.volumes >= len(self.regions), self.index.volumes != 0
            ),
            FormatCode.BAD_VOLUME,
            f"a volume below {len(self.regions)}, 0 for absent experts",
        )
        self.refuse(
            (self.offsets & np.uint64(self.geometry.alignment - 1)) != 0,
            FormatCode.BLOCK_MISALIGNED,
            f"the offset is a multiple of {self.geometry.alignment}",
        )
        block_sizes = np.zeros(NO_LAYOUT + 1, np.uint64)
        block_sizes[: len(self.tables.layouts)] = [x.block_size for x in self.tables.layouts]
        self.refuse(
            self.sizes != block_sizes[self.index.layouts],
            FormatCode.BLOCK_SIZE,
            "the size is the block_size of the expert's layout",
        )
        self.check_bounds()

    def check_layers(self) -> None:
        for layer, (has_experts, layout) in enumerate(
            zip(np.any(self.is_present, axis=1).tolist(), self.tables.layer_layouts, strict=True)
        ):
            if has_experts != (layout is not None):
                raise FormatError(
                    FormatCode.BAD_LAYER,
                    f"{self.where}: layer {layer}",
                    "has experts but no layout" if has_experts else "has a layout but no expert",
                    "a layer has both or neither",
                )

    def check_layouts(self) -> None:
        numbers = self.index.layouts
        of_layer = np.array(
            [NO_LAYOUT if n is None or n == MIXED else n for n in self.tables.layer_layouts],
            np.uint16,
        )[:, None]
        is_mixed = np.array([n == MIXED for n in self.tables.layer_layouts], np.bool_)[:, None]
        n_layouts = len(self.tables.layouts)
        allowed = np.where(is_mixed, numbers < n_layouts, numbers == of_layer)
        self.refuse(
            ~np.where(self.is_present, allowed, numbers == NO_LAYOUT),
            FormatCode.BAD_EXPERT_LAYOUT,
            "the number of its layer's layout, of any in a mixed layer, 65535 for absent experts",
        )
        used = np.zeros(NO_LAYOUT + 1, np.bool_)
        used[numbers.reshape(-1)] = True
        if not used[:n_layouts].all():
            raise FormatError(
                FormatCode.BAD_LAYOUT,
                f"{self.where}: tables: layout {int(used[:n_layouts].argmin())}",
                "no layer and no expert uses it",
                "every layout is used",
            )

    def check_bounds(self) -> None:
        padded = pad_array(self.sizes, self.geometry.alignment)
        starts = np.array([region.offset for region in self.regions], np.uint64)
        ends = np.array([region.offset + region.size for region in self.regions], np.uint64)
        # Gathering a bound for each block takes as long as all else: only where they differ.
        volumes: Any = self.index.volumes if len(self.regions) > 1 else 0
        start, end = starts[volumes], ends[volumes]
        self.refuse(
            self.is_present
            & ((self.offsets < start) | (self.offsets > end) | (padded > end - self.offsets)),
            FormatCode.BLOCK_OUT_OF_BOUNDS,
            "the padded block lies inside the data region of the file that holds it",
        )
        for volume in range(len(self.regions)):
            held = self.is_present
            if len(self.regions) > 1:
                held = held & (self.index.volumes == volume)
            self.check_overlap(self.offsets[held], padded[held], volume)
        for number, fact in enumerate(self.tables.volumes, 1):
            digest = digest_volume(self.index, number)
            if digest != fact.digest:
                raise FormatError(
                    FormatCode.VOLUME_DIGEST,
                    f"{self.where}: volume {fact.label}",
                    f"the index gives digest {digest.hex()}",
                    f"{fact.digest.hex()} is recorded",
                )

    def check_overlap(
        self, offsets: NDArray[np.uint64], padded: NDArray[np.uint64], volume: int
    ) -> None:
        starts, ends = offsets, offsets + padded
        if not volume:
            packs = self.tables.packs[self.tables.packs["size"] != 0]
            pack_ends = packs["offset"] + pad_array(packs["size"], self.geometry.alignment)
            starts = np.concatenate([packs["offset"], starts])
            ends = np.concatenate([pack_ends, ends])
        if not (ends[:-1] > starts[1:]).any():
            # Already in order, as most writers leave them: nothing to sort, nothing overlaps.
            return
        order = np.argsort(starts, kind="stable")
        overlap = ends[order][:-1] > starts[order][1:]
        if overlap.any():
            n = int(overlap.argmax())
            first, second = order[n], order[n + 1]
            raise FormatError(
                FormatCode.EXTENT_OVERLAP,
                f"{self.where}: data region" + (f" of volume {volume}" if volume else ""),
                f"the extent at {int(starts[first]):#x} ends at {int(ends[first]):#x}, the next "
                f"one begins at {int(starts[second]):#x}",
                "blocks and packs do not overlap",
            )
