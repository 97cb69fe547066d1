"""What a checkpoint holds, in canonical form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from colibri_format import ModelSpec

from ..decoding import Slice
from ..sources import Source, SourceTensor
from .expert_table import ExpertTable
from .family import Family

Admit: TypeAlias = Callable[[int, int], None]
"""Raises if so many layers of so many experts are too many."""
_TILE_BYTES: Final = 4 * 2**20


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A dense tensor under its canonical name."""

    name: str
    layer: int | None
    part: Slice


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a source holds, whatever it called it.

    `experts[layer][expert]` maps roles to slices; None for layers without experts. A dense model
    has one expert a layer. `model` is None where no `model.json` can describe the decoder: such a
    file is complete, but engines do not run it. `top_k` experts are read for a token, None where
    nothing says how many. `dropped` are source tensors that engines compute by themselves.
    """

    family: Family
    model: ModelSpec | None
    n_layers: int
    n_experts: int
    top_k: int | None
    dense: tuple[DenseWeight, ...]
    experts: tuple[ExpertTable | None, ...]
    dropped: tuple[str, ...]
    notes: tuple[str, ...]


def is_same(source: Source, a: SourceTensor, b: SourceTensor) -> bool:
    """Whether two tensors have the same bytes, read tile by tile."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    tiles = bytearray(_TILE_BYTES), bytearray(_TILE_BYTES)
    for start in range(0, a.size, _TILE_BYTES):
        n = min(_TILE_BYTES, a.size - start)
        views = [memoryview(tile)[:n] for tile in tiles]
        source.read_into(a.name, start, views[0])
        source.read_into(b.name, start, views[1])
        if views[0] != views[1]:
            return False
    return True
