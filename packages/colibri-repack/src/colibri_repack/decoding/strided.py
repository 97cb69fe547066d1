"""Matrices that stand transposed, and rows that stand between others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from colibri_format import DType

from ..sources import Source, SourceTensor
from .slices import Slice

# Pieces of a column are gathered so many at a time, a cache's worth, before they are turned.
_LINES: Final = 64


@dataclass(frozen=True, slots=True)
class StridedDecoder:
    """Element (row, column) stands `row * row_step + column * column_step` elements on.

    `dtype` is the source's own and no quantised one. A slice of rank 1 has rows and no columns.
    `row_step` must be the smaller one: each column's rows are read in one request.
    """

    dtype: DType
    row_step: int
    column_step: int = 0

    @property
    def piece_units(self) -> int:
        # The fewer, the smaller each request: 8 MiB of output keep them at some kilobytes.
        return 2**22

    def inputs(self, part: Slice) -> tuple[SourceTensor, ...]:
        return ()

    def read(self, source: Source, part: Slice, first: int, n_units: int) -> NDArray[np.uint8]:
        item = self.dtype.block_bytes
        columns = part.shape[1] if len(part.shape) == 2 else 1
        first_row, last_row = first // columns, (first + n_units - 1) // columns
        n_rows = last_row - first_row + 1
        span = (n_rows - 1) * self.row_step + 1
        word = np.dtype(f"<u{item}")
        rows = np.empty((n_rows, columns), word)
        lines = np.empty((min(_LINES, columns), span), word)
        for start in range(0, columns, _LINES):
            n = min(_LINES, columns - start)
            for line in range(n):
                at = first_row * self.row_step + (start + line) * self.column_step
                source.read_into(
                    part.tensor.name, part.offset + at * item, lines[line].view(np.uint8).data
                )
            rows[:, start : start + n] = lines[:n, :: self.row_step].T
        flat = rows.reshape(-1)[first - first_row * columns :][:n_units]
        return flat.view(np.uint8)

    def place(self, part: Slice, index: int) -> tuple[int, ...]:
        columns = part.shape[1] if len(part.shape) == 2 else 1
        row, column = divmod(index, columns)
        at = part.offset // self.dtype.block_bytes
        at += row * self.row_step + column * self.column_step
        return tuple(int(i) for i in np.unravel_index(at, part.tensor.shape))

    def as_f32(self) -> StridedDecoder:
        return self
