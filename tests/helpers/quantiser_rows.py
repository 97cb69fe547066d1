"""Rows of numbers that quantisers find hard, the same everywhere (PCG64), and their importances."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]

TYPES = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "mxfp4",
         "f16", "bf16")  # fmt: skip
# Types whose float16 scales these rows outgrow, checked apart.
OVERFLOWS = {"large": {"q4_1", "q5_1", "f16"}}
# Below 2^-125 ggml's conversion of MXFP4's exponent to a byte is undefined in C.
UNDEFINED = {"subnormal": {"mxfp4"}}
WEIGHTED = ("normal", "heavy tails", "zeros", "outlier", "constant")


def rows(n_rows: int, n_columns: int) -> dict[str, Rows]:
    """`(n_rows, n_columns)` float32 each, by what is hard about them; at least 4 rows."""
    rng = np.random.default_rng(20261129)
    shape = (n_rows, n_columns)
    normal = rng.standard_normal(shape)
    outlier = rng.standard_normal(shape) * 0.01
    outlier[np.arange(n_rows), rng.integers(0, n_columns, n_rows)] = 500
    zeros = np.zeros(shape)
    zeros[1] = -0.0
    zeros[2, ::7] = 1
    zeros[3, ::5] = -1
    powers = 2.0 ** rng.integers(-20, 12, shape) * (1 - 2.0**-24 * rng.integers(0, 2, shape))
    found = {
        "normal": normal * 0.02,
        "heavy tails": rng.standard_cauchy(shape),
        "constant": np.repeat(np.linspace(-3, 3, n_rows)[:, None], n_columns, 1),
        "zeros": zeros,
        "subnormal": normal * 1e-41,
        "tiny": normal * 1e-37,
        "near the zero threshold": normal * 1e-15,
        "small": normal * 1e-8,
        "large": normal * 1e5,
        "outlier": outlier,
        "positive": np.abs(normal) + 3,
        "negative": -np.abs(normal) - 3,
        "integers": rng.integers(-8, 8, shape),
        "nearly constant": -1 - 1e-6 * rng.random(shape),
        "around powers of two": powers,
        "signs of zero": np.where(rng.random(shape) < 0.5, np.where(normal > 0, 0.0, -0.0), normal),
    }
    return {name: values.astype(np.float32) for name, values in found.items()}


def importances(n_columns: int) -> NDArray[np.float32]:
    """`(n_columns,)` float32, some of them 0."""
    rng = np.random.default_rng(7)
    weights = rng.gamma(1, 1, n_columns).astype(np.float32)
    weights[::17] = 0
    return weights
