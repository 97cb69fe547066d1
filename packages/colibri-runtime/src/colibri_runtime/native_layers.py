"""A model's layers as the C library takes them: records of csrc/ops_layer.h, filled once."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from colibri_format import Layout, ModelSpec, Role

from ._native import NativeLibrary
from .backend import FeedForward, Matrix
from .decoder_errors import ModelError
from .kv_cache import KvCache
from .native_kernels import EXPERT, MATRIX, NativeKernels
from .native_records import check_sizes
from .weights import LayerWeights

MAX_HEAD_DIM: Final = 512
"""Of heads that native attention takes (COLIBRI_MAX_HEAD_DIM in csrc/ops.h)."""

# Which of them are int32, int64 or float; all others are addresses.
_INTS: Final = (
    "isas", "hidden", "n_heads", "n_kv_heads", "head_dim", "n_dims", "is_interleaved",
    "is_norm_full", "is_f16", "n_experts", "top_k", "is_norm_top_k",
)  # fmt: skip
_LONGS: Final = ("window", "capacity", "batch")
BUFFERS: Final = (
    "stream", "normed", "queries", "keys", "values", "mixed", "shared", "outputs", "cosines",
    "sines", "logits", "experts", "weights", "guesses", "wanted", "starts", "tokens", "places",
    "gathered", "workspace",
)  # fmt: skip
"""Members of struct colibri_decoder that point to memory of the caller's, in order."""

DECODER: Final = np.dtype(
    [
        ("team", "u8"),
        *((name, "i4") for name in _INTS),
        ("eps", "f4"),
        ("clip", "f4"),
        *((name, "i8") for name in _LONGS),
        *((name, "u8") for name in BUFFERS),
        ("workspace_bytes", "i8"),
    ]
)
_BIASES: Final = ("query_bias", "key_bias", "value_bias", "output_bias")
LAYER: Final = np.dtype(
    [
        ("attn_norm", "u8"),
        ("ffn_norm", "u8"),
        *((name, MATRIX) for name in ("query", "key", "value", "output")),
        *((name, "u8") for name in _BIASES),
        *((name, "u8") for name in ("query_norm", "key_norm", "keys", "values")),
        ("router", MATRIX),
        ("dense", EXPERT),
        ("shared_gate", "u8"),
    ]
)
BLOCK: Final = EXPERT

_ROLES: Final = {
    Role.GATE: "gate", Role.UP: "up", Role.DOWN: "down",
    Role.GATE_BIAS: "gate_bias", Role.UP_BIAS: "up_bias", Role.DOWN_BIAS: "down_bias",
}  # fmt: skip


def check_records(library: NativeLibrary) -> None:
    """Nothing, when the library's structs have the sizes that these records have.

    Raises:
        ModelError: `native-records`; the two were built from different sources.
    """
    records = (DECODER, LAYER, BLOCK)
    check_sizes(library, "colibri_layer_struct_bytes", records, __name__)


def has_kernels(kernels: NativeKernels, matrices: Sequence[Matrix]) -> bool:
    """Whether products with all of these can be computed in C."""
    return all(kernels.has_kernel(m.dtype, m.row_interleave) for m in matrices)


def is_block_native(kernels: NativeKernels, layout: Layout) -> bool:
    """Whether experts in blocks of this layout can be computed in C: products, float32 biases."""
    return all(
        kernels.has_kernel(segment.dtype, segment.row_interleave)
        if segment.role in (Role.GATE, Role.UP, Role.DOWN)
        else segment.dtype.name == "f32"
        for segment in layout.segments
    )


def fill_matrix(record: np.void, matrix: Matrix) -> None:
    """Fills a record of MATRIX."""
    record["data"] = address_of(matrix.data)
    record["rows"], record["columns"] = matrix.shape
    record["type"] = matrix.dtype.ggml_id or 0
    record["row_interleave"] = matrix.row_interleave


def fill_network(record: np.void, network: FeedForward) -> None:
    """Fills a record of EXPERT for all tokens in order."""
    for name in ("gate", "up", "down"):
        fill_matrix(record[name], getattr(network, name))
        record[f"{name}_bias"] = address_of(getattr(network, f"{name}_bias"))


def fill_block(record: np.void, layout: Layout) -> None:
    """Fills a record of BLOCK: matrices and biases by their offsets."""
    for segment in layout.segments:
        name = _ROLES[segment.role]
        if segment.role not in (Role.GATE, Role.UP, Role.DOWN):
            record[name] = segment.offset
            continue
        matrix = record[name]
        matrix["data"] = segment.offset
        matrix["rows"], matrix["columns"] = segment.shape
        matrix["type"] = segment.dtype.ggml_id or 0
        matrix["row_interleave"] = segment.row_interleave


def fill_layer(record: np.void, weights: LayerWeights, layer: int, cache: KvCache) -> None:
    """Fills a record of LAYER; weights and cache must outlive it."""
    record["attn_norm"] = address_of(weights.attn_norm)
    record["ffn_norm"] = address_of(weights.ffn_norm)
    for name in ("query", "key", "value", "output"):
        fill_matrix(record[name], getattr(weights, name))
    for name in (*_BIASES, "query_norm", "key_norm", "shared_gate"):
        record[name] = address_of(getattr(weights, name))
    keys, values = cache.view(layer, 0, cache.capacity)
    record["keys"], record["values"] = address_of(keys), address_of(values)
    if weights.router is not None:
        fill_matrix(record["router"], weights.router)
    network = weights.dense if weights.shared is None else weights.shared
    if network is not None:
        fill_network(record["dense"], network)


def buffer_shapes(model: ModelSpec, batch_size: int) -> dict[str, tuple[tuple[int, ...], object]]:
    """Shape and dtype of each of `BUFFERS` but the workspace, for `batch_size` tokens at once."""
    n = batch_size
    n_experts, top_k = (model.moe.n_experts, model.moe.top_k) if model.moe else (1, 1)
    n_query, n_key = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    n_pairs = model.rope.n_dims // 2
    shapes: Mapping[str, tuple[tuple[int, ...], object]] = {
        "stream": ((n, model.hidden_size), np.float32),
        "normed": ((n, model.hidden_size), np.float32),
        "queries": ((n, n_query), np.float32),
        "keys": ((n, n_key), np.float32),
        "values": ((n, n_key), np.float32),
        "mixed": ((n, n_query), np.float32),
        "shared": ((n, model.hidden_size), np.float32),
        "outputs": ((n * top_k, model.hidden_size), np.float32),
        "cosines": ((n, n_pairs), np.float32),
        "sines": ((n, n_pairs), np.float32),
        "logits": ((n, n_experts), np.float32),
        "experts": ((n, top_k), np.int32),
        "weights": ((n, top_k), np.float32),
        "guesses": ((n, top_k), np.int32),
        "wanted": ((n_experts,), np.int32),
        "starts": ((n_experts + 1,), np.int32),
        "tokens": ((n * top_k,), np.int32),
        "places": ((n * top_k,), np.int32),
        "gathered": ((n_experts,), EXPERT),
    }
    return dict(shapes)


def fill_decoder(record: np.void, model: ModelSpec, kernels: NativeKernels, cache: KvCache) -> None:
    """Fills the members of a record of DECODER that are no buffers."""
    moe = model.moe
    record["team"] = kernels.team_address
    values = {
        "isas": kernels.isas,
        "hidden": model.hidden_size,
        "n_heads": model.n_heads,
        "n_kv_heads": model.n_kv_heads,
        "head_dim": model.head_dim,
        "n_dims": model.rope.n_dims,
        "is_interleaved": model.rope.style == "interleaved",
        "is_norm_full": model.qk_norm == "full",
        "is_f16": cache.dtype == np.float16,
        "n_experts": moe.n_experts if moe else 1,
        "top_k": moe.top_k if moe else 1,
        "is_norm_top_k": moe is not None and moe.norm_top_k,
        "eps": model.rms_norm_eps,
        "clip": model.clip_qkv or 0,
        "window": model.sliding_window or 0,
        "capacity": cache.capacity,
    }
    for name, value in values.items():
        record[name] = value


def address_of(array: NDArray[np.generic] | None) -> int:
    """Of the array's first item; 0 for None."""
    return 0 if array is None else int(array.__array_interface__["data"][0])


def check_code(code: int, what: str) -> int:
    """`code`, unless it is an error of the C library.

    Raises:
        ModelError: `native-call`.
    """
    if code >= 0:
        return code
    raise ModelError(
        "native-call",
        what,
        f"the C library answers {errno.errorcode.get(-code, str(code))}",
        "arguments that its headers allow",
        "report this; COLIBRI_NO_NATIVE=1 computes without it",
    )
