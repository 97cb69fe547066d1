"""The 2D index and its checksums: the rules of the spec's section 5, over whole arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import FormatCode, FormatError
from .layout import Extent, Geometry
from .tables import Tables


def pad_array(sizes: NDArray[np.uint64], alignment: int) -> NDArray[np.uint64]:
    """Each size rounded up to a multiple of `alignment`, a power of two; sizes below 2^63."""
    mask = np.uint64(alignment - 1)
    return (sizes + mask) & ~mask


def check_index(
    index: NDArray[Any],
    checksums: NDArray[np.uint64],
    tables: Tables,
    geometry: Geometry,
    region: Extent,
    where: str,
) -> None:
    """Raises FormatError for the first rule that an entry breaks, in the order of spec 11.8.

    `index` has `INDEX_DTYPE` and, like `checksums`, shape `(n_layers, n_experts)`; `region` is
    the data region.
    """

    def refuse(bad: NDArray[np.bool_], code: FormatCode, required: str) -> None:
        if not bad.any():
            return
        layer, expert = divmod(int(bad.argmax()), geometry.n_experts)
        offset, size = index[layer, expert].item()
        raise FormatError(
            code,
            f"{where}: block L{layer}/E{expert} at {offset:#x}",
            f"size {size}, checksum {int(checksums[layer, expert]):#x}",
            required,
        )

    offsets, sizes = index["offset"], index["size"]
    is_present = sizes != 0
    refuse(
        ((offsets != 0) != is_present) | (~is_present & (checksums != 0)),
        FormatCode.ABSENT_NOT_ZERO,
        "an absent expert has offset, size and checksum 0, a present one an offset and a size",
    )
    block_sizes = np.array(
        [0 if n is None else tables.layouts[n].block_size for n in tables.layer_layouts], np.uint64
    )
    _check_layers(is_present, tables, where)
    refuse(
        (offsets & np.uint64(geometry.alignment - 1)) != 0,
        FormatCode.BLOCK_MISALIGNED,
        f"the offset is a multiple of {geometry.alignment}",
    )
    refuse(
        is_present & (sizes != block_sizes[:, None]),
        FormatCode.BLOCK_SIZE,
        "the size is the block_size of the layer's layout",
    )
    start, end = np.uint64(region.offset), np.uint64(region.offset + region.size)
    padded = pad_array(sizes, geometry.alignment)
    refuse(
        is_present & ((offsets < start) | (offsets > end) | (padded > end - offsets)),
        FormatCode.BLOCK_OUT_OF_BOUNDS,
        f"the padded block lies inside the data region ({int(start):#x} to {int(end):#x})",
    )
    _check_overlap(offsets[is_present], padded[is_present], tables, geometry.alignment, where)


def _check_layers(is_present: NDArray[np.bool_], tables: Tables, where: str) -> None:
    for layer, (has_experts, layout) in enumerate(
        zip(np.any(is_present, axis=1).tolist(), tables.layer_layouts, strict=True)
    ):
        if has_experts != (layout is not None):
            raise FormatError(
                FormatCode.BAD_LAYER,
                f"{where}: layer {layer}",
                "has experts but no layout" if has_experts else "has a layout but no expert",
                "a layer has both or neither",
            )


def _check_overlap(
    offsets: NDArray[np.uint64],
    padded: NDArray[np.uint64],
    tables: Tables,
    alignment: int,
    where: str,
) -> None:
    packs = tables.packs[tables.packs["size"] != 0]
    starts = np.concatenate([packs["offset"], offsets])
    ends = starts + np.concatenate([pad_array(packs["size"], alignment), padded])
    order = np.argsort(starts, kind="stable")
    overlap = ends[order][:-1] > starts[order][1:]
    if overlap.any():
        n = int(overlap.argmax())
        first, second = order[n], order[n + 1]
        raise FormatError(
            FormatCode.EXTENT_OVERLAP,
            f"{where}: data region",
            f"the extent at {int(starts[first]):#x} ends at {int(ends[first]):#x}, the next one "
            f"begins at {int(starts[second]):#x}",
            "blocks and packs do not overlap",
        )
