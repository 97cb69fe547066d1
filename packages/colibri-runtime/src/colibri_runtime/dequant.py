"""Stored bytes to float32, for every dtype that NumPy code exists for."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from colibri_format import DType

from .decoder_errors import ModelError
from .quant_blocks import BLOCK_CODECS

_PLAIN: Final = ("f32", "f16", "bf16")


def has_own_decoder(dtype: DType) -> bool:
    """Whether this package decodes `dtype` itself; else the library gguf does, in more memory."""
    return dtype.name in _PLAIN or dtype.name in BLOCK_CODECS


def check_decodable(dtype: DType, where: object, tensor: str) -> None:
    """Nothing, when `dequantise` takes `dtype`.

    Raises:
        ModelError: `unsupported-dtype` naming the tensor.
    """
    if not has_own_decoder(dtype) and not _gguf_decodes(dtype):
        raise ModelError(
            "unsupported-dtype",
            where,
            f"tensor {tensor!r} is {dtype.name}, which no decoder here turns to float32",
            f"f32, f16, bf16, {', '.join(BLOCK_CODECS)}, or what the library gguf decodes",
            "repack the source with another --quant",
        )


def plain_rows(
    data: NDArray[np.uint8], dtype: DType, shape: tuple[int, int], row_interleave: int
) -> NDArray[np.uint8]:
    """`data` with ggml's order of bytes, `(rows, row_bytes)` uint8; a view where it is so already.

    Interleaved rows (spec, section 9) come in self-contained groups of `row_interleave` rows.
    """
    if row_interleave:
        from colibri_format import deinterleave

        data = np.asarray(deinterleave(data, dtype, shape))
    return data.reshape(shape[0], dtype.row_bytes(shape[1]))


def dequantise(
    rows: NDArray[np.uint8], dtype: DType, out: NDArray[np.float32], tensor: str = "tensor"
) -> None:
    """Fills `out`, `(n_rows, n_columns)` float32 C-contiguous, from `rows`, `(n_rows, row_bytes)`.

    `rows` is in ggml's plain order. The results are bit for bit those of `gguf.quants.dequantize`.

    Raises:
        ModelError: `unsupported-dtype` naming `tensor` when nobody decodes `dtype`.
    """
    name = dtype.name
    if name == "f32":
        out[:] = rows.view("<f4")
    elif name == "f16":
        out[:] = rows.view("<f2")
    elif name == "bf16":
        # A bfloat16 is the upper half of a float32.
        out.view(np.uint32)[:] = rows.view("<u2")
        out.view(np.uint32)[:] <<= 16
    elif (codec := BLOCK_CODECS.get(name)) is not None:
        blocks = rows.reshape(-1, dtype.block_bytes)
        values = out.reshape(-1, dtype.block_elements)
        scale, offset = codec.unpack(blocks, codec.in_order(values))
        grouped = values.reshape(len(blocks), -1, codec.group)
        grouped *= scale[:, :, np.newaxis]
        if offset is not None:
            grouped += offset[:, :, np.newaxis]
    else:
        check_decodable(dtype, tensor, tensor)
        from gguf import GGMLQuantizationType, quants

        # Bytes of a file may hold infinite scales; the numbers that follow are the model's own.
        with np.errstate(all="ignore"):
            out[:] = quants.dequantize(rows, GGMLQuantizationType(dtype.ggml_id or 0))


def _gguf_decodes(dtype: DType) -> bool:
    if dtype.ggml_id is None or not dtype.is_quantised:
        return False
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    try:
        kind = GGMLQuantizationType(dtype.ggml_id)
    except ValueError:
        return False
    if GGML_QUANT_SIZES[kind] != (dtype.block_elements, dtype.block_bytes):
        return False
    zeros = np.zeros((1, dtype.block_bytes), np.uint8)
    try:
        quants.dequantize(zeros, kind)
    except NotImplementedError:
        return False
    return True
