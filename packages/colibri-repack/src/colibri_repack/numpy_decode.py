"""Quant blocks to float32 in NumPy, bit for bit as csrc/decode.c, which names the sources."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_E2M1: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
_SHIFTS: Final = np.array([0, 2, 4, 6], np.uint8)[:, None]


def decode_blocks(blocks: Bytes, name: str) -> Floats:
    """The elements of `blocks`, `(n_blocks, block_bytes)` of the quantised type `name`, flat.

    Raises:
        KeyError: there is no decoder for `name`.
    """
    decode = {"q8_0": _q8_0, "mxfp4": _mxfp4, "q2_k": _q2_k, "q3_k": _q3_k, "q6_k": _q6_k}.get(name)
    # Bytes of a file may hold infinite scales; whoever uses the numbers looks for them.
    with np.errstate(all="ignore"):
        if decode is not None:
            return decode(blocks).reshape(-1)
        if name in ("q4_k", "q5_k"):
            return _q45_k(blocks, name == "q5_k").reshape(-1)
        return _small(blocks, *_SMALL[name]).reshape(-1)


_SMALL: Final = {  # has a minimum, has a fifth bit
    "q4_0": (False, False),
    "q4_1": (True, False),
    "q5_0": (False, True),
    "q5_1": (True, True),
}


def _half(blocks: Bytes, at: int) -> Floats:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _small(blocks: Bytes, has_minimum: bool, has_fifth: bool) -> Floats:
    d, at = _half(blocks, 0), 4 if has_minimum else 2
    level = _nibbles(blocks[:, -16:]).astype(np.int32)
    if has_fifth:
        level |= np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)
    if has_minimum:
        return level.astype(np.float32) * d + _half(blocks, 2)
    return (level - (16 if has_fifth else 8)).astype(np.float32) * d


def _q8_0(blocks: Bytes) -> Floats:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _half(blocks, 0)


def _mxfp4(blocks: Bytes) -> Floats:
    e = blocks[:, :1].astype(np.int32)
    bits = np.where(e < 2, 0x00200000 << e.clip(0, 1), (e - 1) << 23).astype(np.int32)
    return _E2M1[_nibbles(blocks[:, 1:])] * bits.view(np.float32)


def _grouped(d: Floats, scale: NDArray[np.integer], level: NDArray[np.integer]) -> Floats:
    """d * scale * level; scale `(n_blocks, n_groups)`, level `(n_blocks, 256)`; by groups."""
    groups = level.reshape(len(level), scale.shape[1], -1).astype(np.float32)
    return (d * scale.astype(np.float32))[:, :, None] * groups


def _pairs(packed: Bytes) -> Bytes:
    level = packed.reshape(-1, 2, 1, 32) >> _SHIFTS & np.uint8(3)
    return level.astype(np.uint8).reshape(-1, 256)


def _q2_k(blocks: Bytes) -> Floats:
    scales = blocks[:, :16]
    offset = _half(blocks, 82) * (scales >> 4).astype(np.float32)
    return _grouped(_half(blocks, 80), scales & 15, _pairs(blocks[:, 16:80])) - offset[:, :, None]


def _q3_k(blocks: Bytes) -> Floats:
    packed = blocks[:, 96:108]
    low = _nibbles(packed[:, :8])
    high = (packed[:, None, 8:] >> _SHIFTS & 3).reshape(-1, 16)
    scale = (low | high << 4).astype(np.int32) - 32
    mask = np.unpackbits(blocks[:, None, :32], axis=1, bitorder="little").reshape(-1, 256)
    level = _pairs(blocks[:, 32:96]).astype(np.int32) - np.where(mask != 0, 0, 4)
    return _grouped(_half(blocks, 108), scale, level)


def _q45_k(blocks: Bytes, has_fifth: bool) -> Floats:
    a, b, c = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = np.concatenate([a & 63, c & 15 | a >> 6 << 4], axis=1)
    offset = np.concatenate([b & 63, c >> 4 | b >> 6 << 4], axis=1).astype(np.float32)
    packed = blocks[:, -128:].reshape(-1, 4, 1, 32)
    level = np.concatenate([packed & 15, packed >> 4], axis=2).reshape(-1, 8, 32)
    if has_fifth:
        level |= np.unpackbits(blocks[:, None, 16:48], axis=1, bitorder="little") << np.uint8(4)
    return (
        _grouped(_half(blocks, 0), scale, level.reshape(-1, 256))
        - (_half(blocks, 2) * offset)[:, :, None]
    )


def _q6_k(blocks: Bytes) -> Floats:
    packed = blocks[:, :128].reshape(-1, 2, 1, 2, 32)
    low = np.concatenate([packed & 15, packed >> 4], axis=2).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> _SHIFTS & 3
    level = (low | high << 4).reshape(-1, 256).astype(np.int32) - 32
    return _grouped(_half(blocks, 208), blocks[:, 192:208].view(np.int8), level)
