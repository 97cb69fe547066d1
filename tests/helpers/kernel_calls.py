"""Products through the runtime's C library, and what they must give, in float64."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from colibri_format import DTYPES, DType, interleave
from colibri_runtime._native import Isa, NativeLibrary, native
from colibri_runtime.dequant import dequantise
from colibri_runtime.native_kernels import PRODUCT, NativeKernels, aligned_bytes

from .arm_emulator import ArmLibrary
from .arm_kernels import ArmKernels

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

ROUNDINGS = {"f32": "none", "f16": "f16", "bf16": "bf16", "q8_0": "q8_0", "q4_0": "q8_0",
             "q4_1": "q8_1", "q5_0": "q8_0", "q5_1": "q8_1", "mxfp4": "q8_0"}  # fmt: skip
HAS_OFFSET = ("q4_1", "q5_1")


def runtime_library() -> NativeLibrary:
    """The library; where the build had to make it, its absence is a failure."""
    loaded = native()
    if loaded.library is not None:
        return loaded.library
    if os.environ.get("COLIBRI_REQUIRE_NATIVE") == "1":
        pytest.fail(f"no C library: {loaded.reason}")
    pytest.skip(f"no C library: {loaded.reason}")


def isas(library: NativeLibrary | ArmLibrary) -> Iterator[Isa]:
    """Each instruction set of the library's machine, alone with the base."""
    for isa in Isa:
        if isa in library.isas:
            yield isa | Isa.BASE


def stored(rows: NDArray[np.uint8], dtype: DType, columns: int, row_interleave: int) -> NDArray:
    """`rows`, `(n_rows, row_bytes)`, as a segment holds them, at a multiple of 64."""
    data = rows.reshape(-1)
    if row_interleave:
        data = interleave(data, dtype, (len(rows), columns))
    held = aligned_bytes(data.size)
    held[:] = data
    return held


def matrix_record(data: NDArray[np.uint8], dtype: DType, n_rows: int, n_columns: int,
                  row_interleave: int) -> tuple[int, ...]:  # fmt: skip
    """The fields of a record of MATRIX."""
    assert dtype.ggml_id is not None
    return (data.ctypes.data, n_rows, n_columns, dtype.ggml_id, row_interleave)


def matmul(kernels: NativeKernels | ArmKernels, x: Floats, data: NDArray[np.uint8], dtype: DType,
           n_rows: int, row_interleave: int = 0, bias: Floats | None = None) -> Floats:  # fmt: skip
    """`x @ weights.T + bias`, `(n_tokens, n_rows)`, with guards around what is written."""
    n_tokens, n_columns = x.shape
    out = np.full((n_tokens + 1, n_rows + 3), np.float32(12345))
    product = np.zeros(1, PRODUCT)
    product["matrix"] = matrix_record(data, dtype, n_rows, n_columns, row_interleave)
    product["x"], product["x_stride"] = x.ctypes.data, x.strides[0] // 4
    product["out"], product["out_stride"] = out.ctypes.data, out.shape[1]
    product["bias"] = 0 if bias is None else bias.ctypes.data
    product["n_tokens"] = n_tokens
    kernels.matmul(product, aligned_bytes(kernels.matmul_workspace(product)))
    assert (out[n_tokens] == 12345).all() and (out[:, n_rows:] == 12345).all()
    return out[:n_tokens, :n_rows]


def decoded(rows: NDArray[np.uint8], name: str, n_columns: int) -> Doubles:
    """`(n_rows, n_columns)` float64 of plain `rows`."""
    out = np.empty((len(rows), n_columns), np.float32)
    dequantise(rows, DTYPES[name], out)
    return out.astype(np.float64)


def rounded_groups(x: Floats) -> tuple[NDArray[np.int8], Floats, Floats]:
    """Values `(n_tokens, n_groups, 32)`, scales before and after rounding to float16.

    The formulas of quantize_row_q8_0 and q8_1 for x86 in ggml (arch/x86/quants.c).
    """
    groups = x.reshape(len(x), -1, 32)
    largest = np.abs(groups).max(axis=2)
    scales = largest / np.float32(127)
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.where(largest == 0, np.float32(0), np.float32(127) / largest)
    values = np.rint(groups * inverse[:, :, np.newaxis]).astype(np.int8)
    return values, scales, scales.astype(np.float16).astype(np.float32)


def expected(x: Floats, rows: NDArray[np.uint8], name: str) -> tuple[Doubles, Doubles]:
    """The product of plain `rows` with `x` rounded as ggml rounds it, and a size for errors.

    Both `(n_tokens, n_rows)`; the size is the sum of |weight| * |activation|, where weights of
    types with an offset count as |value * scale| + |offset|.
    """
    weights = decoded(rows, name, x.shape[1])
    rounding = ROUNDINGS[name]
    if rounding == "none":
        rounded = x.astype(np.float64)
    elif rounding == "f16":
        rounded = x.astype(np.float16).astype(np.float64)
    elif rounding == "bf16":
        bits = x.view(np.uint32).astype(np.uint64)
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
        rounded = bits.astype(np.uint32).view(np.float32).astype(np.float64)
    else:
        values, exact, scales = rounded_groups(x)
        rounded = (values * scales[:, :, np.newaxis].astype(np.float64)).reshape(x.shape)
        if name in HAS_OFFSET:
            blocks = rows.reshape(len(rows), -1, DTYPES[name].block_bytes)
            offsets = np.ascontiguousarray(blocks[:, :, 2:4]).view(np.float16)[:, :, 0]
            offsets = offsets.astype(np.float64)
            weights = weights - np.repeat(offsets, 32, axis=1)
            sums = (exact * values.sum(axis=2, dtype=np.int32)).astype(np.float16)
            sums = sums.astype(np.float64)
            size = np.abs(rounded) @ np.abs(weights).T
            size += np.abs(rounded).reshape(*sums.shape, 32).sum(axis=2) @ np.abs(offsets).T
            return rounded @ weights.T + sums @ offsets.T, size
    return rounded @ weights.T, np.abs(rounded) @ np.abs(weights).T
