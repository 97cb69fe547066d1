"""How slices are cut into pieces that a worker converts, and pieces gathered into tiles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .memory_plan import PIECES
from .part_plan import Conversion, Part
from .recode import unit_elements


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `start` to `start + size` of a part's slice, which become `out_bytes`."""

    part: Part
    start: int
    size: int
    out_bytes: int

    @property
    def tile_bytes(self) -> int:
        """What a tile must have room for, before and after the conversion."""
        return max(self.size, self.out_bytes)


def unit_tile_bytes(part: Part) -> int:
    """What of `part` cannot be cut takes in a tile, before and after the conversion."""
    in_unit, out_unit = _unit_bytes(part)
    return max(in_unit, out_unit)


def _unit_bytes(part: Part) -> tuple[int, int]:
    """Bytes of the source and of the output that belong together: blocks, rows, groups of rows."""
    source, target = part.source.dtype, part.dtype
    columns = part.source.shape[-1]
    if part.row_interleave:
        unit = part.row_interleave * columns
    elif part.conversion is Conversion.COPY:
        return 1, 1
    else:
        unit = unit_elements(source, target, columns if part.importance else 0)
    return source.size_bytes((unit,)), target.size_bytes((unit,))


def cut(part: Part, tile_bytes: int) -> Iterator[Piece]:
    """`part` in pieces of whole units, none larger than `tile_bytes` unless one unit is."""
    source = part.source.dtype
    in_unit, out_unit = _unit_bytes(part)
    step = max(tile_bytes // max(in_unit, out_unit), 1) * in_unit
    for start in range(0, part.source.size, step):
        size = min(step, part.source.size - start)
        out_bytes = size
        if part.conversion is Conversion.RECODE:
            # The last piece of types without quant blocks may end inside a unit.
            n_elements = size // source.block_bytes * source.block_elements
            out_bytes = part.dtype.size_bytes((n_elements,))
        yield Piece(part, start, size, out_bytes)


def gather(parts: Iterable[Part], tile_bytes: int) -> Iterator[list[Piece]]:
    """Pieces of `parts` in order, as many together as fit in a tile."""
    tile: list[Piece] = []
    used = 0
    for part in parts:
        for piece in cut(part, tile_bytes):
            if tile and (used + piece.tile_bytes > tile_bytes or len(tile) == PIECES):
                yield tile
                tile, used = [], 0
            tile.append(piece)
            used += piece.tile_bytes
    if tile:
        yield tile
