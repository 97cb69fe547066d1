"""Random rows of any dtype whose scales are finite and of moderate size."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from colibri_format import DType

# Where a quant block keeps half floats, in bytes from its start (ggml-common.h).
_HALVES = {
    "q8_0": (0,), "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q2_k": (80, 82),
    "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "iq4_nl": (0,),
    "iq4_xs": (0,), "iq3_s": (0,), "tq1_0": (52,), "tq2_0": (64,), "iq2_xxs": (0,),
}  # fmt: skip


def random_rows(dtype: DType, n_rows: int, n_columns: int, seed: int) -> NDArray[np.uint8]:
    """`(n_rows, row_bytes)` uint8: every bit random but for the half-float scales (below 0.02)."""
    rng = np.random.default_rng(seed)
    if not dtype.is_quantised:
        values = rng.standard_normal((n_rows, n_columns)).astype(np.float32)
        if dtype.name == "bf16":
            return (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
        return values.astype({"f32": "<f4", "f16": "<f2"}[dtype.name]).view(np.uint8)
    n_blocks = n_rows * n_columns // dtype.block_elements
    blocks = rng.integers(0, 256, (n_blocks, dtype.block_bytes), dtype=np.uint8)
    if dtype.name == "mxfp4":
        blocks[:, 0] = rng.integers(110, 130, n_blocks)
    for offset in _HALVES.get(dtype.name, ()):
        scales = rng.uniform(-0.02, 0.02, (n_blocks, 1)).astype("<f2")
        blocks[:, offset : offset + 2] = scales.view(np.uint8)
    return blocks.reshape(n_rows, -1)
