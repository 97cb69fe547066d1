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

    ggml packs elements that lie a run apart into one byte. So `runs` is `(m, n_planes, k)`: the
    elements of a quant block in order are `m` times `n_planes` runs of `k`, and plane p holds
    the runs that stand p-th. A plane is unpacked by one operation on many blocks, which is fast
    where it is contiguous.

    `unpack(blocks, planes)` takes `(n, block_bytes)` uint8 and fills `planes`, `(n_planes, n, m,
    k)` float32 of any strides, with the integers; it returns `scale` and `offset`, each
    `(n, elements // group) float32` in order (offset None where the dtype has none). `group` is
    the number of consecutive elements that share a scale.
    """

    group: int
    runs: tuple[int, int, int]
    unpack: Callable[[Bytes, Floats], tuple[Floats, Floats | None]]

    def in_order(self, values: Floats) -> Floats:
        """Planes that are views of `values`, `(n, elements)`, such that they lie in order."""
        m, n_planes, k = self.runs
        return values.reshape(-1, m, n_planes, k).transpose(2, 0, 1, 3)


def _halves(blocks: Bytes, start: int, stop: int) -> Floats:
    """Bytes `start` to `stop` of each block as half floats, `(n, (stop - start) / 2)` float32."""
    return _gather(blocks, start, stop).view("<f2").astype(np.float32)


def _gather(blocks: Bytes, start: int, stop: int) -> Bytes:
    """Bytes `start` to `stop` of each block, `(n, stop - start)`, contiguous.

    Copied as one item a block: byte by byte, NumPy takes eight times as long.
    """
    items = blocks[:, start:stop].view(f"V{stop - start}")
    return np.ascontiguousarray(items).view(np.uint8)


def _unpack_nibbles(blocks: Bytes, start: int, planes: Floats) -> None:
    packed = _gather(blocks, start, blocks.shape[1]).reshape(planes.shape[1:])
    planes[0] = packed & 15
    planes[1] = packed >> 4


def _unpack_q8_0(blocks: Bytes, planes: Floats) -> tuple[Floats, None]:
    planes[0, :, 0] = _gather(blocks, 2, 34).view(np.int8)
    return _halves(blocks, 0, 2), None


def _unpack_q4_0(blocks: Bytes, planes: Floats) -> tuple[Floats, None]:
    _unpack_nibbles(blocks, 2, planes)
    planes -= 8
    return _halves(blocks, 0, 2), None


def _unpack_q4_1(blocks: Bytes, planes: Floats) -> tuple[Floats, Floats]:
    _unpack_nibbles(blocks, 4, planes)
    halves = _halves(blocks, 0, 4)
    return halves[:, :1], halves[:, 1:]


def _unpack_q4_k(blocks: Bytes, planes: Floats) -> tuple[Floats, Floats]:
    _unpack_nibbles(blocks, 16, planes)
    # Eight scales and eight minima of 6 bits in 12 bytes: the low six bits of bytes 0 to 7, then
    # nibbles of bytes 8 to 11 whose upper two bits are those of bytes 0 to 7 (get_scale_min_k4).
    # One row a byte of the twelve: operations on four bytes at a time would take twice as long.
    low, middle, high = np.ascontiguousarray(_gather(blocks, 4, 16).T).reshape(3, 4, -1)
    scales = np.concatenate((low & 63, (high & 15) | ((low >> 6) << 4)))
    minima = np.concatenate((middle & 63, (high >> 4) | ((middle >> 6) << 4)))
    halves = _halves(blocks, 0, 4)
    return halves[:, :1] * scales.T, -(halves[:, 1:] * minima.T)


def _unpack_q6_k(blocks: Bytes, planes: Floats) -> tuple[Floats, None]:
    low = _gather(blocks, 0, 128).reshape(-1, 2, 2, 32)
    high = _gather(blocks, 128, 192).reshape(-1, 2, 32)
    for quarter in range(4):
        half = low[:, :, quarter & 1]
        nibble = np.right_shift(half, 4) if quarter >= 2 else np.bitwise_and(half, 15)
        planes[quarter] = nibble | (((high >> (2 * quarter)) & 3) << 4)
    planes -= 32
    scales = _gather(blocks, 192, 208).view(np.int8)
    return _halves(blocks, 208, 210) * scales, None


BLOCK_CODECS: Final[dict[str, BlockCodec]] = {
    "q8_0": BlockCodec(32, (1, 1, 32), _unpack_q8_0),
    "q4_0": BlockCodec(32, (1, 2, 16), _unpack_q4_0),
    "q4_1": BlockCodec(32, (1, 2, 16), _unpack_q4_1),
    "q4_k": BlockCodec(32, (4, 2, 32), _unpack_q4_k),
    "q6_k": BlockCodec(16, (2, 4, 32), _unpack_q6_k),
}
