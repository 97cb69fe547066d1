"""Groups of 16 rows interleaved and back, in C or, without it, in NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from colibri_format import DType, deinterleave, interleave

from ._native import native


def interleave_rows(
    data: NDArray[np.uint8], dtype: DType, n_columns: int, out: NDArray[np.uint8] | None = None
) -> NDArray[np.uint8]:
    """The plain rows of `n_columns` in `data`, whole groups of 16, interleaved, in `out`.

    As `colibri_format.interleave`, about 15 times faster where the C library is there.

    Raises:
        UsageError, ValueError: sizes or types that cannot be.
    """
    return _moved(data, dtype, n_columns, out, is_back=False)


def deinterleave_rows(data: NDArray[np.uint8], dtype: DType, n_columns: int) -> NDArray[np.uint8]:
    """The reverse of `interleave_rows`."""
    return _moved(data, dtype, n_columns, None, is_back=True)


def _moved(
    data: NDArray[np.uint8],
    dtype: DType,
    n_columns: int,
    out: NDArray[np.uint8] | None,
    *,
    is_back: bool,
) -> NDArray[np.uint8]:
    if out is None:
        out = np.empty_like(data)
    library = native().library
    if library is None:
        n_rows = data.size // dtype.row_bytes(n_columns)
        out[:] = (deinterleave if is_back else interleave)(data, dtype, (n_rows, n_columns))
        return out
    n_blocks = n_columns // dtype.block_elements
    library.interleave(data, out, dtype, n_blocks, is_back=is_back)
    return out
