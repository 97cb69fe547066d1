"""FP8 weights with one scale a block of the matrix, as DeepSeek-V3 stores them.

`weight` is F8_E4M3 (or F8_E5M2) of shape `(rows, columns)`; `weight_scale_inv` has a number for
each block of 128 x 128, the last ones of a row or column cut by the matrix's edge. The weight is
the FP8 number times its block's scale (DeepSeek-V3's inference/kernel.py, `weight_dequant`;
transformers' integrations/finegrained_fp8.py). Formats: OCP 8-bit Floating Point Specification
(OFP8) 1.0; E8M0: OCP Microscaling Formats 1.0, section 5.4.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from colibri_format import DTYPES, DType

from ..errors import RepackError
from ..sources import Source, SourceTensor
from .slices import Slice

FP8_DTYPES: Final = frozenset({"f8_e4m3", "f8_e5m2"})
_PIECE: Final = 2**20


class Fp8Form(Enum):
    """What FP8 weights with block scales become; `KEEP` keeps both as they are."""

    BF16 = "bf16"
    F32 = "f32"
    KEEP = "keep"

    @classmethod
    def of(cls, value: str | Fp8Form) -> Fp8Form:
        """The member named `value`.

        Raises:
            RepackError: `bad-fp8`.
        """
        try:
            return cls(value)
        except ValueError:
            names = ", ".join(member.value for member in cls)
            raise RepackError("bad-fp8", "repack", f"fp8 is {value!r}",
                              f"one of {names}") from None  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Grid:
    """The scales of one matrix: a grid of `width` columns from byte `offset` of `tensor` on.

    `first_row` is which row of the grid's matrix is row 0 of the slice: the second half of a fused
    matrix starts inside the grid.
    """

    tensor: SourceTensor
    offset: int
    width: int
    first_row: int


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Decoder:
    """FP8 of shape `(rows, columns)` times block scales, as float32 or rounded to bfloat16.

    `scales` are by name of the weights: of a matrix a grid, of a stack one for each matrix. `block`
    is the rows and columns that share a scale.
    """

    scales: Mapping[str, SourceTensor]
    block: tuple[int, int]
    dtype: DType

    @property
    def piece_units(self) -> int:
        return _PIECE

    def inputs(self, part: Slice) -> tuple[SourceTensor, ...]:
        return (self.scales[part.tensor.name],)

    def read(self, source: Source, part: Slice, first: int, n_units: int) -> NDArray[np.uint8]:
        columns = part.shape[-1]
        codes = np.empty(n_units, np.uint8)
        source.read_into(part.tensor.name, part.offset + first, codes.data)
        out = np.empty(n_units, np.dtype(f"<u{self.dtype.block_bytes}"))
        end = first + n_units
        row, last_row = first // columns, (end - 1) // columns
        grid = self._grid(part)
        in_grid = grid.first_row
        scales = self._read_scales(source, grid, in_grid + row, in_grid + last_row)
        top = (in_grid + row) // self.block[0]
        while row <= last_row:
            # Rows that are there whole and share their scales are decoded together.
            left, right = max(first - row * columns, 0), min(end - row * columns, columns)
            n_rows = 1
            if left == 0 and right == columns:
                in_block = self.block[0] - (in_grid + row) % self.block[0]
                n_rows = min(in_block, end // columns - row)
            at = row * columns + left - first
            size = n_rows * (right - left)
            shape = (n_rows, right - left)
            line = scales[(in_grid + row) // self.block[0] - top]
            self._decode(part, line, left, codes[at : at + size].reshape(shape),
                         out[at : at + size].reshape(shape))  # fmt: skip
            row += n_rows
        return out.view(np.uint8)

    def _grid(self, part: Slice) -> _Grid:
        """The scales of the slice's matrix, which its place in the tensor tells."""
        rows, columns = part.tensor.shape[-2:]
        matrix, first_row = divmod(part.offset // columns, rows)
        scale = self.scales[part.tensor.name]
        height, width = scale.shape[-2:]
        return _Grid(scale, matrix * height * width * scale.dtype.block_bytes, width, first_row)

    def _read_scales(
        self, source: Source, grid: _Grid, first: int, last: int
    ) -> NDArray[np.float32]:
        """The grid rows of matrix rows `first` to `last`, inclusive, as `(n, columns)`."""
        dtype = grid.tensor.dtype
        row = first // self.block[0]
        n_rows = last // self.block[0] + 1 - row
        data = np.empty(n_rows * grid.width * dtype.block_bytes, np.uint8)
        at = grid.offset + row * grid.width * dtype.block_bytes
        source.read_into(grid.tensor.name, at, data.data)
        return _scales(data, dtype.name).reshape(n_rows, grid.width)

    def _decode(
        self,
        part: Slice,
        scales: NDArray[np.float32],
        left: int,
        codes: NDArray[np.uint8],
        out: NDArray[np.generic],
    ) -> None:
        """Fill `out` from `codes`, both `(n_rows, n)` from column `left` on, block by block.

        A block has 256 numbers at most: each is computed once, and looked up.
        """
        width = self.block[1]
        right = left + codes.shape[1]
        first, last = left // width, -(-right // width)
        with np.errstate(over="ignore", invalid="ignore"):
            values = scales[first:last, None] * _CODES[part.tensor.dtype.name]
        tables = _bf16(values) if self.dtype.name == "bf16" else values.view("<u4")
        for block, table in enumerate(tables, first):
            start, end = max(block * width, left) - left, min((block + 1) * width, right) - left
            # Twice as fast as table[...]: 256 entries have every code.
            out[:, start:end] = table.take(codes[:, start:end], mode="clip")

    def place(self, part: Slice, index: int) -> tuple[int, ...]:
        return tuple(int(i) for i in np.unravel_index(part.offset + index, part.tensor.shape))

    def as_f32(self) -> Fp8Decoder:
        return Fp8Decoder(self.scales, self.block, DTYPES["f32"])


def _scales(data: NDArray[np.uint8], dtype_name: str) -> NDArray[np.float32]:
    values: NDArray[np.float32]
    if dtype_name == "f32":
        values = data.view("<f4")
        return values
    if dtype_name == "bf16":
        values = (data.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
        return values
    if dtype_name == "f16":
        return data.view("<f2").astype(np.float32)
    # E8M0: 2^(code - 127); 255 is NaN. float32 holds 2^-127 as a denormal.
    values = np.exp2(data.astype(np.float64) - 127).astype(np.float32)
    values[data == 0xFF] = np.nan
    return values


def _bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """`values` rounded to bfloat16 as its bits, halves to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    is_nan = np.isnan(values)
    with np.errstate(over="ignore"):
        rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    rounded[is_nan] = np.uint32(0x7FC0_0000)
    return (rounded >> np.uint32(16)).astype("<u2")


def _table(exponent_bits: int, mantissa_bits: int, bias: int) -> NDArray[np.float32]:
    """The 256 numbers of an FP8 format by code, as if it had neither infinity nor NaN."""
    codes = np.arange(256)
    exponents = (codes >> mantissa_bits) & (2**exponent_bits - 1)
    mantissas = codes & (2**mantissa_bits - 1)
    is_normal = exponents > 0
    steps = mantissas + np.where(is_normal, 2**mantissa_bits, 0)
    powers = np.where(is_normal, exponents, 1) - bias - mantissa_bits
    signs = np.where(codes >= 128, -1.0, 1.0)
    numbers: NDArray[np.float64] = signs * np.ldexp(steps.astype(np.float64), powers)
    return numbers.astype(np.float32)


def _e4m3() -> NDArray[np.float32]:
    # Finite up to 448; only all ones are NaN, there is no infinity (OFP8, table 1).
    table = _table(4, 3, 7)
    table[[0x7F, 0xFF]] = np.nan
    return table


def _e5m2() -> NDArray[np.float32]:
    table = _table(5, 2, 15)
    table[0x7C], table[0xFC] = np.inf, -np.inf
    table[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
    return table


_CODES: Final = {"f8_e4m3": _e4m3(), "f8_e5m2": _e5m2()}
