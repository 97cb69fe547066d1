"""Sixteen rows' quant blocks interleaved, and back (spec, section 9)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .dtypes import DType
from .errors import UsageError
from .layout import INTERLEAVE


def can_interleave(dtype: DType, shape: tuple[int, ...]) -> bool:
    """Whether section 9 defines an interleaved form of such a matrix."""
    return (
        len(shape) == 2
        and bool(dtype.units)
        and shape[0] % INTERLEAVE == 0
        and shape[1] % dtype.block_elements == 0
    )


def interleave(data: NDArray[np.uint8], dtype: DType, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """The interleaved bytes of a plain matrix; a new array of the same size.

    `data` holds the matrix of `shape` `(rows, columns)`, C-contiguous, as one row of bytes.

    Raises:
        UsageError: `bad-interleave` where section 9 defines no such form.
    """
    plain, out = _views(data, dtype, shape)
    start = 0
    for width in dtype.units:
        unit = plain[:, :, :, start : start + width]
        end = start + width
        out[:, :, INTERLEAVE * start : INTERLEAVE * end] = unit.transpose(0, 2, 1, 3).reshape(
            out.shape[0], out.shape[1], INTERLEAVE * width
        )
        start = end
    return out.reshape(-1)


def deinterleave(
    data: NDArray[np.uint8], dtype: DType, shape: tuple[int, ...]
) -> NDArray[np.uint8]:
    """The plain bytes of an interleaved matrix: the reverse of `interleave`."""
    out, packed = _views(data, dtype, shape)
    plain = np.empty_like(out)
    groups, _, blocks, _ = plain.shape
    packed = data.reshape(packed.shape)
    start = 0
    for width in dtype.units:
        end = start + width
        unit = packed[:, :, INTERLEAVE * start : INTERLEAVE * end]
        plain[:, :, :, start:end] = unit.reshape(groups, blocks, INTERLEAVE, width).transpose(
            0, 2, 1, 3
        )
        start = end
    return plain.reshape(-1)


def _views(
    data: NDArray[np.uint8], dtype: DType, shape: tuple[int, ...]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """`data` as (groups, rows of a group, blocks, bytes), and an array for the packed form."""
    if not can_interleave(dtype, shape):
        raise UsageError(
            "bad-interleave",
            f"{dtype.name} matrix of shape {shape}",
            "has no interleaved form",
            f"rows must be a multiple of {INTERLEAVE} and the dtype must have units",
        )
    groups = shape[0] // INTERLEAVE
    n_blocks = shape[1] // dtype.block_elements
    plain = data.reshape(groups, INTERLEAVE, n_blocks, dtype.block_bytes)
    return plain, np.empty((groups, n_blocks, INTERLEAVE * dtype.block_bytes), np.uint8)
