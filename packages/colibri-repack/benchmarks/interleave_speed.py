"""How fast 16 rows are interleaved and put back: this package's C, NumPy, and a plain copy.

    python packages/colibri-repack/benchmarks/interleave_speed.py

One thread, 32 MiB of each type in rows of 2048 elements; the arms take turns, medians of rounds
with the least and the largest, GB/s of matrix.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from colibri_format import DTYPES, DType, deinterleave, interleave
from colibri_repack._native import native

COLUMNS, ROUNDS, BYTES = 2048, 9, 32 * 2**20


def arms_of(
    plain: np.ndarray, packed: np.ndarray, dtype: DType, shape: tuple[int, int]
) -> list[Callable[[], object]]:
    library = native().library
    if library is None:
        raise SystemExit(f"no C library: {native().reason}")
    n_blocks = COLUMNS // dtype.block_elements
    out = np.empty_like(plain)
    return [
        lambda: library.interleave(plain, out, dtype, n_blocks),
        lambda: library.interleave(packed, out, dtype, n_blocks, is_back=True),
        lambda: interleave(plain, dtype, shape),
        lambda: deinterleave(packed, dtype, shape),
        lambda: np.copyto(out, plain),
    ]


def main() -> None:
    print("| type | C | C, back | NumPy | NumPy, back | copy |")
    print("|---|---|---|---|---|---|")
    for name in ("q4_0", "q8_0", "mxfp4", "q4_k", "q5_k", "q6_k"):
        dtype = DTYPES[name]
        n_rows = BYTES // dtype.row_bytes(COLUMNS) // 16 * 16
        shape = (n_rows, COLUMNS)
        plain = np.random.default_rng(0).integers(0, 256, dtype.size_bytes(shape), np.uint8)
        arms = arms_of(plain, interleave(plain, dtype, shape), dtype, shape)
        rates: list[list[float]] = [[] for _ in arms]
        for _ in range(ROUNDS):
            for arm, found in zip(arms, rates, strict=True):
                start = time.perf_counter()
                arm()
                found.append(plain.size / (time.perf_counter() - start) / 1e9)
        cells = (f"{np.median(r):.2f} ({min(r):.2f} to {max(r):.2f})" for r in rates)
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
