"""Random weights in ggml's encodings, made without encoding anything."""

from __future__ import annotations

import hashlib
import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

# Standard deviations of the integers in quant blocks, before their scale.
_Q8_STD: Final = math.sqrt((255**2 - 1) / 12)  # uniform over -127 .. 127
_Q4_STD: Final = math.sqrt((16**2 - 1) / 12)  # uniform over 0 .. 15
_SCALE_SQUARE: Final = float(np.mean(np.arange(32, 64) ** 2))  # 6-bit scales, uniform over 32 .. 63


def generator(seed: int, name: str) -> np.random.Generator:
    """Random numbers of one tensor: the same for the same seed and name, whatever came before."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return np.random.Generator(np.random.SFC64(int.from_bytes(digest[:16], "little")))


def q8_0(rng: np.random.Generator, n_rows: int, n_columns: int, std: float) -> NDArray[np.uint8]:
    """`(n_rows, n_columns / 32, 34)`: block_q8_0 of ggml-common.h, weights of zero mean."""
    blocks = np.empty((n_rows, n_columns // 32, 34), np.uint8)
    blocks[..., :2] = np.frombuffer(np.float16(std / _Q8_STD).tobytes(), np.uint8)
    values = np.frombuffer(rng.bytes(n_rows * n_columns), np.int8).reshape(n_rows, -1, 32)
    # -128 would give the mean a slant, and ggml's quantiser never makes it.
    blocks[..., 2:] = np.maximum(values, np.int8(-127)).view(np.uint8)
    return blocks


def q8_0_value(std: float, value: float) -> int:
    """The byte that stands for `value` in blocks of `q8_0(std=std)`; it must fit."""
    number = round(value / float(np.float16(std / _Q8_STD)))
    if not -127 <= number <= 127:
        raise ValueError(f"{value} is beyond 127 scales of {std / _Q8_STD}")
    return number & 0xFF


def q4_k(rng: np.random.Generator, n_rows: int, n_columns: int, std: float) -> NDArray[np.uint8]:
    """`(n_rows, n_columns / 256, 144)`: block_q4_K of ggml-common.h, weights of zero mean.

    A weight is d * scale * q - dmin * min. With min = scale and dmin = 7.5 d that is
    d * scale * (q - 7.5), whose mean is zero as q is uniform over 0 .. 15.
    """
    n_blocks = n_rows * n_columns // 256
    blocks = np.empty((n_blocks, 144), np.uint8)
    d = std / (_Q4_STD * math.sqrt(_SCALE_SQUARE))
    blocks[:, :4] = np.frombuffer(np.array([d, 7.5 * d], np.float16).tobytes(), np.uint8)
    scales = np.frombuffer(rng.bytes(8 * n_blocks), np.uint8).reshape(n_blocks, 8) & 31 | 32
    # get_scale_min_k4 of ggml-quants.c, the other way round, with equal scales and minimums.
    low, high = scales[:, :4], scales[:, 4:]
    blocks[:, 4:8] = low | (high >> 4 << 6)
    blocks[:, 8:12] = blocks[:, 4:8]
    blocks[:, 12:16] = high & 15 | (high & 15) << 4
    blocks[:, 16:] = np.frombuffer(rng.bytes(128 * n_blocks), np.uint8).reshape(n_blocks, 128)
    return blocks.reshape(n_rows, -1, 144)
