"""K-quant blocks made from their parts, whose products are therefore known exactly.

The packing is ggml's (ggml-common.h: block_q2_K to block_q6_K, dequantize_row_q*_K in
ggml-quants.c), written here from the elements to the bytes, as no decoder is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from colibri_format import DTYPES

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Parts:
    """What blocks of 256 weights hold: `weight = d * scale * (quant - zero) - dmin * min`.

    `quants` is `(rows, blocks, 256)`, `scales` and `mins` `(rows, blocks, groups)`, `d` and `dmin`
    `(rows, blocks)` of float16. Types without minima have `mins` 0.
    """

    name: str
    quants: Ints
    scales: Ints
    mins: Ints
    d: NDArray[np.float16]
    dmin: NDArray[np.float16]


# Groups, largest quant, smallest and largest scale, largest min, what a quant of 0 weight is.
LIMITS: Final = {
    "q2_k": (16, 3, 0, 15, 15, 0),
    "q3_k": (16, 7, -32, 31, 0, 4),
    "q4_k": (8, 15, 0, 63, 63, 0),
    "q5_k": (8, 31, 0, 63, 63, 0),
    "q6_k": (16, 63, -128, 127, 0, 32),
}


def random_parts(name: str, n_rows: int, n_blocks: int, rng: np.random.Generator) -> Parts:
    """Blocks of parts drawn evenly from all that their bits can say."""
    groups, quant, low, high, least, _ = LIMITS[name]
    shape = (n_rows, n_blocks)
    return Parts(
        name,
        rng.integers(0, quant + 1, (*shape, 256)),
        rng.integers(low, high + 1, (*shape, groups)),
        rng.integers(0, least + 1, (*shape, groups)),
        rng.uniform(-0.02, 0.02, shape).astype(np.float16),
        rng.uniform(-0.02, 0.02, shape).astype(np.float16),
    )


def extreme_parts(name: str, n_rows: int, n_blocks: int) -> Parts:
    """Blocks of the largest quants, scales and minima; in odd rows of the smallest scales."""
    groups, quant, low, high, least, _ = LIMITS[name]
    shape = (n_rows, n_blocks)
    scales = np.full((*shape, groups), high)
    scales[1::2] = low
    quants = np.full((*shape, 256), quant)
    quants[2::4] = 0
    return Parts(
        name,
        quants,
        scales,
        np.full((*shape, groups), least),
        np.full(shape, 0.5, np.float16),
        np.full(shape, -0.25, np.float16),
    )


def pack(parts: Parts) -> NDArray[np.uint8]:
    """The bytes of the rows, `(rows, row_bytes)`."""
    q = parts.quants.reshape(-1, 256)
    scales = parts.scales.reshape(len(q), -1)
    mins = parts.mins.reshape(len(q), -1)
    d, dmin = (half.reshape(-1, 1).view(np.uint8) for half in (parts.d, parts.dmin))
    fields = {
        "q2_k": lambda: (scales | mins << 4, _spread(q, 2), d, dmin),
        "q3_k": lambda: (_planes(q >> 2), _spread(q & 3, 2), _sixes(scales + 32), d),
        "q4_k": lambda: (d, dmin, _scales_and_mins(scales, mins), _nibbles(q)),
        "q5_k": lambda: (
            d,
            dmin,
            _scales_and_mins(scales, mins),
            _planes(q >> 4),
            _nibbles(q & 15),
        ),
        "q6_k": lambda: (_low_nibbles(q & 15), _spread(q >> 4, 2), scales & 255, d),
    }[parts.name]()
    blocks = np.concatenate([field.astype(np.uint8) for field in fields], axis=1)
    assert blocks.shape[1] == DTYPES[parts.name].block_bytes
    return blocks.reshape(parts.quants.shape[0], -1)


def products(
    parts: Parts, values: Ints, scales: NDArray[np.float32]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Of every row with activations `values * scales`, and the size of what they are sums of.

    `values` is `(tokens, blocks, 256)`, `scales` `(tokens, blocks)`. Both results are
    `(tokens, rows)`; the second is the sum of |d scale (|quant| + zero) x| + |dmin min x|.
    """
    zero = LIMITS[parts.name][5]
    group = 256 // parts.scales.shape[2]
    step = parts.d.astype(np.float64)[..., None] * parts.scales
    less = parts.dmin.astype(np.float64)[..., None] * parts.mins
    step, less = (np.repeat(part, group, axis=2) for part in (step, less))
    x = (values * scales[..., None].astype(np.float64)).reshape(len(values), -1)
    weights = (step * (parts.quants - zero) - less).reshape(len(step), -1)
    sizes = (abs(step) * (parts.quants + zero) + abs(less)).reshape(len(step), -1)
    return x @ weights.T, abs(x) @ sizes.T


def _spread(q: Ints, bits: int) -> Ints:
    """`bits` bits of four elements 32 apart a byte, 128 elements in 32 bytes."""
    parts = q.reshape(len(q), 2, 4, 32)
    return sum(parts[:, :, j] << (bits * j) for j in range(4)).reshape(len(q), 64)


def _planes(bits: Ints) -> Ints:
    """One bit of eight elements 32 apart a byte."""
    parts = bits.reshape(len(bits), 8, 32)
    return sum(parts[:, i] << i for i in range(8))


def _nibbles(q: Ints) -> Ints:
    parts = q.reshape(len(q), 4, 2, 32)
    return (parts[:, :, 0] | parts[:, :, 1] << 4).reshape(len(q), 128)


def _low_nibbles(q: Ints) -> Ints:
    parts = q.reshape(len(q), 2, 2, 64)
    return (parts[:, :, 0] | parts[:, :, 1] << 4).reshape(len(q), 128)


def _sixes(scales: Ints) -> Ints:
    low, high = scales & 15, scales >> 4
    return np.concatenate(
        (
            low[:, :8] | low[:, 8:] << 4,
            sum(high[:, 4 * k : 4 * k + 4] << (2 * k) for k in range(4)),
        ),
        axis=1,
    )


def _scales_and_mins(scales: Ints, mins: Ints) -> Ints:
    return np.concatenate(
        (
            scales[:, :4] | scales[:, 4:] >> 4 << 6,
            mins[:, :4] | mins[:, 4:] >> 4 << 6,
            (scales[:, 4:] & 15) | (mins[:, 4:] & 15) << 4,
        ),
        axis=1,
    )
