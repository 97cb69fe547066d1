"""MXFP4 as gpt-oss stores it, brought into ggml's quant blocks without touching a number.

Both hold 32 numbers of 4 bits (E2M1) under one E8M0 scale (OCP Microscaling Formats 1.0). gpt-oss
keeps scales apart, and byte i of a block holds number 2i in its low half and 2i + 1 in its high
one (transformers' integrations/mxfp4.py, `convert_moe_packed_tensors`). ggml's `block_mxfp4` has
the scale first, then byte i holds numbers i (low) and i + 16 (high) (ggml-common.h and
`dequantize_row_mxfp4` in ggml-quants.c).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from colibri_format import DTYPES, DType

from ..sources import Source, SourceTensor
from .slices import Slice

BLOCK_ELEMENTS: Final = 32
_HALF: Final = 16
_PIECE: Final = 2**14


@dataclass(frozen=True, slots=True)
class Mxfp4Decoder:
    """Rows of ggml's mxfp4 from `blocks` (uint8, 16 bytes a block) and `scales` (one byte each).

    The slice's offset is where row 0 starts in the blocks; row r is `row_step * r` rows of the
    source further on.
    """

    scales: SourceTensor
    row_step: int = 1

    @property
    def dtype(self) -> DType:
        return DTYPES["mxfp4"]

    @property
    def piece_units(self) -> int:
        return _PIECE

    def inputs(self, part: Slice) -> tuple[SourceTensor, ...]:
        return (self.scales,)

    def read(self, source: Source, part: Slice, first: int, n_units: int) -> NDArray[np.uint8]:
        per_row = part.shape[-1] // BLOCK_ELEMENTS
        if self.row_step == 1:
            return _repack(*self._run(source, part, first, n_units))
        first_row, last_row = first // per_row, (first + n_units - 1) // per_row
        # Whole rows, those between them included, in one request; rows not wanted fall away.
        n_rows = (last_row - first_row) * self.row_step + 1
        at = first_row * self.row_step * per_row
        nibbles, scales = self._run(source, part, at, n_rows * per_row)
        nibbles = nibbles.reshape(n_rows, per_row, _HALF)[:: self.row_step]
        scales = scales.reshape(n_rows, per_row)[:: self.row_step]
        packed = _repack(nibbles.reshape(-1, _HALF), scales.reshape(-1))
        size = self.dtype.block_bytes
        skip = first - first_row * per_row
        return packed[skip * size : (skip + n_units) * size]

    def place(self, part: Slice, index: int) -> tuple[int, ...]:
        row, column = divmod(index, part.shape[-1])
        per_row = part.shape[-1] // 2
        byte = part.offset + row * self.row_step * per_row + column // 2
        return tuple(int(i) for i in np.unravel_index(byte, part.tensor.shape))

    def as_f32(self) -> Mxfp4Decoder:
        return self

    def _run(
        self, source: Source, part: Slice, first: int, n_blocks: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """`n_blocks` blocks from number `first` after the slice's start on, and their scales."""
        nibbles = np.empty((n_blocks, _HALF), np.uint8)
        scales = np.empty(n_blocks, np.uint8)
        flat = nibbles.reshape(-1)
        source.read_into(part.tensor.name, part.offset + first * _HALF, flat.data)
        source.read_into(self.scales.name, part.offset // _HALF + first, scales.data)
        return nibbles, scales


def _repack(nibbles: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """`(n, 16)` bytes of neighbours and `(n,)` scales as `n` ggml blocks, flat."""
    halves = nibbles.view("<u8")
    words = np.empty((len(nibbles), 2), "<u8")
    for word, shift in enumerate((np.uint64(0), np.uint64(32))):
        # Numbers 0 to 7 (8 to 15) into the low halves, those 16 further on into the high ones.
        low = _one_a_byte(halves[:, 0] >> shift)
        high = _one_a_byte(halves[:, 1] >> shift)
        high <<= np.uint64(4)
        np.bitwise_or(low, high, out=words[:, word])
    packed = np.empty((len(nibbles), 1 + _HALF), np.uint8)
    packed[:, 0] = scales
    packed[:, 1:] = words.view(np.uint8)
    return packed.reshape(-1)


def _one_a_byte(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The eight nibbles of each word's low 32 bits, lowest first, one in each byte."""
    words = words & np.uint64(0xFFFF_FFFF)
    for shift, mask in _SPREAD:
        words |= words << shift
        words &= mask
    return words


# Halves apart, then their halves, then nibbles (Warren, Hacker's Delight, section 7-2).
_SPREAD: Final = tuple(
    (np.uint64(shift), np.uint64(mask))
    for shift, mask in (
        (16, 0x0000_FFFF_0000_FFFF),
        (8, 0x00FF_00FF_00FF_00FF),
        (4, 0x0F0F_0F0F_0F0F_0F0F),
    )
)
