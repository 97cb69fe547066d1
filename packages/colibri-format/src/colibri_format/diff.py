"""What differs between two files, from their heads alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .layout import NO_LAYOUT, Layout
from .reader import Reader

_PLAIN: Final = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that differs: what, and its value in each file (None: it is not there).

    Values of metadata are JSON texts.
    """

    kind: str
    what: str
    first: Any
    second: Any


def diff_files(first: Reader, second: Reader) -> list[Difference]:
    """What differs in geometry, layouts, dtypes, tensors, files, metadata and blocks.

    Blocks are compared by their checksums, so no data is read. Checksums are seeded with a block's
    place: files of different geometry are compared over the layers and experts that both have.
    """
    return list(_differences(first, second))


def _differences(first: Reader, second: Reader) -> Iterator[Difference]:
    for name in ("n_layers", "n_experts", "alignment"):
        a, b = getattr(first.geometry, name), getattr(second.geometry, name)
        if a != b:
            yield Difference("geometry", name, a, b)
    labels = [[volume.label for volume in file.volumes] for file in (first, second)]
    if labels[0] != labels[1]:
        yield Difference("geometry", "volumes", labels[0], labels[1])
    yield from _layouts(first, second)
    yield from _mappings("tensor", _tensor_facts(first), _tensor_facts(second))
    yield from _mappings("file", _file_facts(first), _file_facts(second))
    yield from _metadata(first.metadata, second.metadata)
    yield from _blocks(first, second)


def _mappings(
    kind: str, first: Mapping[str, Any], second: Mapping[str, Any]
) -> Iterator[Difference]:
    for name in dict.fromkeys([*first, *second]):
        a, b = first.get(name), second.get(name)
        if a != b:
            yield Difference(kind, name, a, b)


def _metadata(
    first: Mapping[str, Any], second: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[Difference]:
    """Members that differ as JSON texts: to Python, 1 equals true and null equals a missing one."""
    for name in dict.fromkeys([*first, *second]):
        a, b = first.get(name), second.get(name)
        place = (*path, name)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from _metadata(a, b, place)
            continue
        a_text = _json(a) if name in first else None
        b_text = _json(b) if name in second else None
        if a_text != b_text:
            what = ".".join(key if _PLAIN.fullmatch(key) else _json(key) for key in place)
            yield Difference("metadata", what, a_text, b_text)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _tensor_facts(file: Reader) -> dict[str, Any]:
    return {
        tensor.name: {
            "dtype": tensor.dtype.name,
            "shape": list(tensor.shape),
            "layer": tensor.layer,
            "row_interleave": tensor.row_interleave,
            # Seeded with its number in the table: equal data at another number differs here.
            "checksum": f"{tensor.checksum:016x}",
        }
        for tensor in file.tensors.values()
    }


def _file_facts(file: Reader) -> dict[str, Any]:
    return {
        entry.name: {"size": entry.size, "checksum": f"{entry.checksum:016x}"}
        for entry in file.files.values()
    }


def _describe(layout: Layout | None) -> str | None:
    if layout is None:
        return None
    parts = []
    for s in layout.segments:
        shape = "x".join(map(str, s.shape))
        suffix = f"/x{s.row_interleave}" if s.row_interleave else ""
        parts.append(f"{s.role.name.lower()} {s.dtype.name} {shape}{suffix}")
    return ", ".join(parts)


def _common(first: Reader, second: Reader) -> tuple[slice, slice]:
    shapes = [file.index.shape for file in (first, second)]
    return slice(min(s[0] for s in shapes)), slice(min(s[1] for s in shapes))


def _layouts(first: Reader, second: Reader) -> Iterator[Difference]:
    common = _common(first, second)
    pairs = np.stack([f.block_index.layouts[common] for f in (first, second)], axis=-1)
    seen: dict[tuple[int, int], list[int]] = {}
    for layer, row in enumerate(pairs):
        for a, b in np.unique(row.reshape(-1, 2), axis=0).tolist():
            if NO_LAYOUT not in (a, b) and first.layouts[a] != second.layouts[b]:
                seen.setdefault((a, b), []).append(layer)
    for (a, b), layers in seen.items():
        yield Difference(
            "layout",
            f"layers {_ranges(layers)}",
            _describe(first.layouts[a]),
            _describe(second.layouts[b]),
        )


def _blocks(first: Reader, second: Reader) -> Iterator[Difference]:
    common = _common(first, second)
    a_present, b_present = (file.index["size"][common] != 0 for file in (first, second))
    a_sums, b_sums = (file.checksums[common] for file in (first, second))
    for layer in range(a_present.shape[0]):
        a, b = a_present[layer], b_present[layer]
        alone = [_experts(a & ~b), _experts(b & ~a)]
        if any(alone):
            yield Difference("experts", f"layer {layer}, absent in the other", *alone)
        changed = _experts(a & b & (a_sums[layer] != b_sums[layer]))
        if changed:
            yield Difference("blocks", f"layer {layer}, other content", changed, changed)


def _experts(found: NDArray[np.bool_]) -> str | None:
    return _ranges(np.flatnonzero(found).tolist()) or None


def _ranges(numbers: list[int]) -> str:
    """`0-3, 7` for 0, 1, 2, 3, 7."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
