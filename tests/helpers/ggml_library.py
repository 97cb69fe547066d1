"""ggml's own quantisers and products, called through ctypes in a library that exports them."""

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
    """`ggml_quantize_chunk`, the `dequantize_row_*` and `ggml_vec_dot_*` of one library."""

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

    def dot_q8_k(
        self,
        data: NDArray[np.uint8],
        name: str,
        values: NDArray[np.int8],
        scales: NDArray[np.float32],
    ) -> NDArray[np.float32]:
        """Rows `(n_rows, row_bytes)` of a K-quant with `(n_tokens, n_blocks, 256)` rounded values.

        The result is `(n_tokens, n_rows)`; `scales` is `(n_tokens, n_blocks)`.
        """
        self._library.ggml_cpu_init()  # its table of half floats; again does nothing
        function = getattr(self._library, f"ggml_vec_dot_{name[:-1]}K_q8_K")
        function.restype = None
        function.argtypes = (
            ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t,
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int,
        )  # fmt: skip
        n_tokens, n_blocks, _ = values.shape
        # struct block_q8_K of ggml-common.h
        blocks = np.zeros((n_tokens, n_blocks), [("d", "<f4"), ("qs", "i1", 256), ("s", "<i2", 16)])
        blocks["d"], blocks["qs"] = scales, values
        blocks["s"] = values.reshape(n_tokens, n_blocks, 16, 16).sum(axis=3)
        out = np.zeros((n_tokens, len(data)), np.float32)
        for token in range(n_tokens):
            for row in range(len(data)):
                function(
                    256 * n_blocks, out[token, row:].ctypes.data, 0, data[row].ctypes.data, 0,
                    blocks[token].ctypes.data, 0, 1,
                )  # fmt: skip
        return out


# The type that activations become, elements and bytes of its block (vec_dot_type in ggml-cpu.c).
ACTIVATIONS = {
    "f16": ("f16", 1, 2), "bf16": ("bf16", 1, 2), "q8_0": ("q8_0", 32, 34),
    "q4_0": ("q8_0", 32, 34), "q5_0": ("q8_0", 32, 34), "mxfp4": ("q8_0", 32, 34),
    "q4_1": ("q8_1", 32, 36), "q5_1": ("q8_1", 32, 36),
}  # fmt: skip


class GgmlProducts:
    """`ggml_vec_dot_*` and the rounding of activations, of the processor that it runs on."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.ggml_cpu_init()

    def rounded(self, name: str, x: NDArray[np.float32]) -> NDArray[np.uint8]:
        """The bytes that are multiplied with weights of the type `name`, of one row."""
        kind, block, size = ACTIVATIONS[name]
        out = np.zeros(x.size // block * size, np.uint8)
        function = {
            "f16": "ggml_cpu_fp32_to_fp16", "bf16": "ggml_cpu_fp32_to_bf16",
            "q8_0": "quantize_row_q8_0", "q8_1": "quantize_row_q8_1",
        }[kind]  # fmt: skip
        call = getattr(self._library, function)
        call.restype, call.argtypes = None, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        call(x.ctypes.data, out.ctypes.data, x.size)
        return out

    def dot(self, name: str, weights: NDArray[np.uint8], x: NDArray[np.float32]) -> np.float32:
        """The product of one row of bytes with one row of activations."""
        suffix = "" if name in ("f32", "f16", "bf16") else f"_{ACTIVATIONS[name][0]}"
        function = getattr(self._library, f"ggml_vec_dot_{name}{suffix}")
        held = x if name == "f32" else self.rounded(name, x)
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        function.restype = None
        function.argtypes = (ctypes.c_int, *[pointer, size] * 3, ctypes.c_int)
        out = np.zeros(1, np.float32)
        function(x.size, out.ctypes.data, 0, weights.ctypes.data, 0, held.ctypes.data, 0, 1)
        return out[0]
