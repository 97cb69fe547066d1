"""ggml's own quantisers, called through ctypes in a shared library that exports them."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from colibri_format import DTYPES


def xllamacpp_library() -> Path:
    """The extension module of the wheel xllamacpp; it exports ggml's C functions."""
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("xllamacpp is not installed")
    return next(Path(spec.origin).parent.glob("xllamacpp*.so"))


class Ggml:
    """`ggml_quantize_chunk` and the `dequantize_row_*` of one library."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._quantise = self._library.ggml_quantize_chunk
        self._quantise.restype = ctypes.c_size_t
        self._quantise.argtypes = (
            ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64,
            ctypes.c_int64, ctypes.c_void_p,
        )  # fmt: skip

    def quantise(
        self,
        values: NDArray[np.float32],
        name: str,
        weights: NDArray[np.float32] | None = None,
    ) -> NDArray[np.uint8]:
        """`values`, `(n_rows, n_columns)`, as bytes of the type `name`."""
        dtype = DTYPES[name]
        out = np.zeros(dtype.size_bytes(values.shape), np.uint8)
        n = self._quantise(
            dtype.ggml_id,
            values.ctypes.data,
            out.ctypes.data,
            0,
            values.shape[0],
            values.shape[1],
            None if weights is None else weights.ctypes.data,
        )
        assert n == out.size
        return out

    def dequantise(self, data: NDArray[np.uint8], name: str, n: int) -> NDArray[np.float32]:
        """`n` elements of `data`, bytes of the type `name`."""
        stem = name[:-1] + "K" if name.endswith("_k") else name
        function = getattr(self._library, f"dequantize_row_{stem}")
        function.restype = None
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        out = np.zeros(n, np.float32)
        function(data.ctypes.data, out.ctypes.data, n)
        return out
