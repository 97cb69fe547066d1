"""Quant blocks taken apart: small integers, and the scale and offset that turn them to weights.

The layouts are ggml's (ggml-common.h: block_q8_0, block_q4_0, block_q4_1, block_q4_K,
block_q6_K; the order of elements is that of dequantize_row_* in ggml-quants.c). A weight is
`value * scale + offset`, so a matrix product may multiply the values first and scale each sum,
or scale the weights first: both read the same three arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BlockCodec:
    """How a quantised dtype is taken apart.

    `unpack(blocks, values)` takes `(n, block_bytes)` uint8 and fills `values`, `(n,
    elements of a quant block)` float32, C-contiguous, with the integers; it returns `scale` and
    `offset`, each `(n, elements // group) float32` (offset None where the dtype has none).
    `group` is the number of consecutive elements that share a scale.
    """

    group: int
    unpack: Callable[[Bytes, Floats], tuple[Floats, Floats | None]]


def _halves(blocks: Bytes, start: int, stop: int) -> Floats:
    """Bytes `start` to `stop` of each block as half floats, `(n, (stop - start) / 2)` float32."""
    return np.ascontiguousarray(blocks[:, start:stop]).view("<f2").astype(np.float32)


def _unpack_q8_0(blocks: Bytes, values: Floats) -> tuple[Floats, None]:
    values[:] = blocks[:, 2:].view(np.int8)
    return _halves(blocks, 0, 2), None


def _unpack_q4_0(blocks: Bytes, values: Floats) -> tuple[Floats, None]:
    quants = blocks[:, 2:]
    values[:, :16] = quants & 15
    values[:, 16:] = quants >> 4
    values -= 8
    return _halves(blocks, 0, 2), None


def _unpack_q4_1(blocks: Bytes, values: Floats) -> tuple[Floats, Floats]:
    quants = blocks[:, 4:]
    values[:, :16] = quants & 15
    values[:, 16:] = quants >> 4
    halves = _halves(blocks, 0, 4)
    return halves[:, :1], halves[:, 1:]


def _unpack_q4_k(blocks: Bytes, values: Floats) -> tuple[Floats, Floats]:
    quants = blocks[:, 16:].reshape(-1, 4, 32)
    nibbles = values.reshape(-1, 4, 2, 32)
    nibbles[:, :, 0] = quants & 15
    nibbles[:, :, 1] = quants >> 4
    # Eight scales and eight minima of 6 bits in 12 bytes: the low six bits of bytes 0 to 7, then
    # nibbles of bytes 8 to 11 whose upper two bits are those of bytes 0 to 7 (get_scale_min_k4).
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((low & 63, (high & 15) | ((low >> 6) << 4)), axis=1)
    minima = np.concatenate((middle & 63, (high >> 4) | ((middle >> 6) << 4)), axis=1)
    halves = _halves(blocks, 0, 4)
    return halves[:, :1] * scales, -(halves[:, 1:] * minima)


def _unpack_q6_k(blocks: Bytes, values: Floats) -> tuple[Floats, None]:
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    out = values.reshape(-1, 2, 4, 32)
    for quarter in range(4):
        half = low[:, :, quarter & 1]
        nibble = np.right_shift(half, 4) if quarter >= 2 else np.bitwise_and(half, 15)
        out[:, :, quarter] = nibble | (((high >> (2 * quarter)) & 3) << 4)
    values -= 32
    scales = blocks[:, 192:208].view(np.int8)
    return _halves(blocks, 208, 210) * scales, None


BLOCK_CODECS: Final[dict[str, BlockCodec]] = {
    "q8_0": BlockCodec(32, _unpack_q8_0),
    "q4_0": BlockCodec(32, _unpack_q4_0),
    "q4_1": BlockCodec(32, _unpack_q4_1),
    "q4_k": BlockCodec(32, _unpack_q4_k),
    "q6_k": BlockCodec(16, _unpack_q6_k),
}
