"""Inputs of the recorded products of ggml, the same everywhere (PCG64)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from colibri_format import DTYPES

from .quant_bytes import random_rows

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "mxfp4")
COLUMNS = 1024


def inputs(name: str) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Plain rows, `(16, row_bytes)`, and activations, `(2, COLUMNS)`."""
    x = np.random.default_rng(8).standard_normal((2, COLUMNS)).astype(np.float32)
    return random_rows(DTYPES[name], 16, COLUMNS, seed=6), x
