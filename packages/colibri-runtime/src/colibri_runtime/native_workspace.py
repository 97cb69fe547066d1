"""How much memory native steps set aside: planned from the types and shapes of a model alone."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from colibri_format import Layout, ModelSpec, Role

from .backend import FeedForward, Matrix
from .lazy_memory import LazyMemory
from .native_kernels import EXPERT, EXPERT_IO, PRODUCT, NativeKernels
from .native_layers import (
    address_of,
    buffer_shapes,
    fill_block,
    fill_matrix,
    has_kernels,
    is_block_native,
)
from .weights import LayerWeights, TensorFacts

# Any address will do where only sizes are asked for.
_SOME: Final = 64
_ALIGNMENT: Final = 64
# What arrays of one expert lose to alignment, beyond what the average expert does.
_EXPERT_SLACK: Final = 1024

Network = tuple[Matrix, Matrix, Matrix]
"""Gate, up and down."""


@dataclass(frozen=True, slots=True)
class LayerMatrices:
    """The matrices of one layer, whose data need not be there.

    `inputs` are query, key and value; `network` is the shared expert or a dense layer's own.
    """

    inputs: tuple[Matrix, Matrix, Matrix]
    output: Matrix
    router: Matrix | None
    network: Network | None
    layouts: tuple[Layout, ...]

    @classmethod
    def of_weights(cls, weights: LayerWeights) -> LayerMatrices:
        """Those of loaded weights."""

        def network(found: FeedForward | None) -> Network | None:
            return None if found is None else (found.gate, found.up, found.down)

        return cls(
            (weights.query, weights.key, weights.value),
            weights.output,
            weights.router,
            network(weights.shared or weights.dense),
            weights.layouts,
        )

    @classmethod
    def of_facts(
        cls, tensors: Mapping[str, TensorFacts], prefix: str, layouts: tuple[Layout, ...]
    ) -> LayerMatrices:
        """Those that a file has under names that begin with `prefix`."""

        def matrix(name: str) -> Matrix:
            full = f"{prefix}.{name}.weight"
            return Matrix.of_facts(full, tensors[full])

        def has(name: str) -> bool:
            return f"{prefix}.{name}.weight" in tensors

        suffix = "_shexp" if layouts else ""
        network = None
        if has(f"ffn_gate{suffix}"):
            network = (
                matrix(f"ffn_gate{suffix}"),
                matrix(f"ffn_up{suffix}"),
                matrix(f"ffn_down{suffix}"),
            )
        return cls(
            (matrix("attn_q"), matrix("attn_k"), matrix("attn_v")),
            matrix("attn_output"),
            matrix("ffn_gate_inp") if has("ffn_gate_inp") else None,
            network,
            layouts,
        )

    def all(self) -> Iterator[Matrix]:
        """Every matrix of the layer, those of an expert of each layout included."""
        yield from (*self.inputs, self.output)
        if self.router is not None:
            yield self.router
        yield from self.network or ()
        for layout in self.layouts:
            for segment in layout.segments:
                if segment.role in (Role.GATE, Role.UP, Role.DOWN):
                    name = f"experts' {segment.role.name.lower()}"
                    yield Matrix.of_segment(name, segment, np.empty(0, np.uint8))


def workspace_bytes(
    kernels: NativeKernels,
    model: ModelSpec,
    layers: Sequence[LayerMatrices],
    head: Matrix,
    batch_size: int,
    n_logits: int,
) -> int:
    """The most workspace that a call of a step takes, of those that are computed in C."""
    n_experts, top_k = (model.moe.n_experts, model.moe.top_k) if model.moe else (1, 1)
    n_pairs = batch_size * top_k
    # Each expert has a share of its own for every row; what several share is the same for all.
    n_used = min(n_experts, n_pairs)
    shared_out = -(-n_pairs // n_used)
    sizes = [_products_bytes(kernels, [head], min(n_logits, batch_size))]
    seen: set[object] = set()
    for layer in layers:
        kinds = tuple((m.dtype.name, m.shape, m.row_interleave) for m in layer.all())
        if kinds in seen:
            continue
        seen.add(kinds)
        sizes.append(_products_bytes(kernels, layer.inputs, batch_size))
        sizes.append(_products_bytes(kernels, [layer.output], batch_size))
        if layer.router is not None:
            sizes.append(_products_bytes(kernels, [layer.router], batch_size))
        if layer.network is not None and has_kernels(kernels, layer.network):
            records = np.zeros(1, EXPERT)
            for name, matrix in zip(("gate", "up", "down"), layer.network, strict=True):
                _fill(records[0][name], matrix)
            sizes.append(_experts_bytes(kernels, records, batch_size, batch_size))
        if layer.layouts and all(is_block_native(kernels, layout) for layout in layer.layouts):
            records = np.zeros((n_used, len(layer.layouts)), EXPERT)
            for kind, layout in enumerate(layer.layouts):
                for record in records[:, kind]:
                    fill_block(record, layout)
                    for name in ("gate", "up", "down"):
                        record[name]["data"] = _SOME
            size = _experts_bytes(kernels, records.reshape(-1), batch_size, shared_out)
            sizes.append(size + n_used * _EXPERT_SLACK)
    return max(sizes)


def _products_bytes(kernels: NativeKernels, matrices: Sequence[Matrix], n_tokens: int) -> int:
    """Workspace of products of one batch with all of `matrices`; 0 where one has no kernel."""
    if not has_kernels(kernels, matrices):
        return 0
    records = np.zeros(len(matrices), PRODUCT)
    for record, matrix in zip(records, matrices, strict=True):
        _fill(record["matrix"], matrix)
        record["x_stride"], record["out_stride"] = matrix.shape[1], matrix.shape[0]
    records["x"] = records["out"] = _SOME
    records["n_tokens"] = n_tokens
    return kernels.matmul_workspace(records)


def _experts_bytes(
    kernels: NativeKernels, records: NDArray[np.void], batch_size: int, n_tokens: int
) -> int:
    """Workspace of experts with `n_tokens` each."""
    hidden = int(records[0]["gate"]["columns"])
    records["n_tokens"] = n_tokens
    io = np.zeros(1, EXPERT_IO)
    io["x"] = io["out"] = _SOME
    io["x_stride"] = io["out_stride"] = hidden
    io["n_tokens"] = io["n_places"] = batch_size
    return kernels.experts_workspace(records, io)


def _fill(record: np.void, matrix: Matrix) -> None:
    fill_matrix(record, matrix)
    record["data"] = _SOME


class Buffers:
    """One allocation of everything that the steps need beside weights and KV cache.

    What a pass of few tokens does not write to takes no memory until a larger one does.
    """

    def __init__(self, model: ModelSpec, batch_size: int, workspace_bytes: int) -> None:
        shapes = buffer_shapes(model, batch_size)
        shapes["workspace"] = ((workspace_bytes,), np.uint8)
        self._memory = LazyMemory(sum(map(_padded, shapes.values())))
        arena = self._memory.array
        self.arrays: dict[str, NDArray[Any]] = {}
        position = 0
        for name, (shape, dtype) in shapes.items():
            size = _bytes((shape, dtype))
            part = arena[position : position + size]
            self.arrays[name] = part.view(dtype).reshape(shape)  # type: ignore[call-overload]
            position += _padded((shape, dtype))

    def give_back(self) -> None:
        """Zeros everything, which takes no memory then, if the system takes it back. Not within
        a pass."""
        self._memory.give_back()

    def fill(self, record: np.void) -> None:
        """Points a record of DECODER to the buffers."""
        for name, array in self.arrays.items():
            record[name] = address_of(array)
        record["workspace_bytes"] = self.arrays["workspace"].size


def buffers_bytes(model: ModelSpec, batch_size: int, workspace_bytes: int) -> int:
    """Bytes that steps with these arguments allocate for their buffers."""
    shapes = buffer_shapes(model, batch_size)
    shapes["workspace"] = ((workspace_bytes,), np.uint8)
    return _ALIGNMENT + sum(map(_padded, shapes.values()))


def untouched_bytes(model: ModelSpec, batch_size: int, whole: int, single: int) -> int:
    """Lower bound in bytes of the buffers that a pass of one token does not touch.

    `whole` and `single` are the workspace of passes of `batch_size` tokens and of one.
    """
    n_arrays = len(buffer_shapes(model, 1)) + 1
    touched = buffers_bytes(model, 1, single) + 2 * n_arrays * mmap.PAGESIZE
    return max(0, buffers_bytes(model, batch_size, whole) - touched)


def _bytes(array: tuple[tuple[int, ...], object]) -> int:
    shape, dtype = array
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize  # type: ignore[call-overload,no-any-return]


def _padded(array: tuple[tuple[int, ...], object]) -> int:
    return -(-_bytes(array) // _ALIGNMENT) * _ALIGNMENT
