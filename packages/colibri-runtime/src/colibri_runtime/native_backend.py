"""The native backend: products, attention and routing in C, NumPy for dtypes without a kernel."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from colibri_format import DType, ModelSpec, UsageError

from ._native import Isa, native
from .backend import Floats, Matrix
from .budget import THREAD_BYTES
from .kv_cache import KvCache
from .native_kernels import PRODUCT, NativeKernels, aligned_bytes
from .native_layers import address_of, fill_matrix
from .native_steps import NativeSteps
from .native_workspace import LayerMatrices, buffers_bytes, untouched_bytes, workspace_bytes
from .numpy_backend import NumpyBackend
from .weights import Layouts, TensorFacts, Weights
from .working_memory import SLACK, plain_working_bytes

MAX_DEFAULT_THREADS: Final = 2
"""Threads taken by default where there are as many processors."""


class NativeBackend(NumpyBackend):
    """Computes in C on a team of threads; activations are rounded as ggml rounds them.

    Results depend on the instruction set in their last bits, on the number of threads not at all.
    `notes` says what had to be left to NumPy, once a model is known.

    Args:
        n_threads: threads that compute, the caller's counted; None takes the default.
        isas: instruction sets to use, all that the machine has by default.

    Raises:
        UsageError: `no-native` when there is no C library, saying why.
        KernelError: `no-team` when the system refuses the threads.
    """

    name = "native"
    kv_dtype = "float16"
    batch_size = 512

    def __init__(self, *, n_threads: int | None = None, isas: Isa | None = None) -> None:
        super().__init__()
        found = native()
        if found.library is None:
            raise UsageError(
                "no-native",
                "backend 'native'",
                f"there is no C library: {found.reason}",
                "a library built at installation",
                "use --backend numpy, or auto",
            )
        self._library = found.library
        self.n_threads = default_threads() if n_threads is None else n_threads
        self._kernels = NativeKernels(found.library, n_threads=self.n_threads, isas=isas)
        self._isas = self._kernels.isas

    @property
    def summary(self) -> str:
        """What computes, in a few words."""
        isa = max(isa for isa in Isa if isa & self._isas)
        threads = "1 thread" if self.n_threads == 1 else f"{self.n_threads} threads"
        return f"native, {isa.name}, {threads}"

    def check(self, matrix_name: str, dtype: DType, where: object) -> None:
        """Nothing, when there is a kernel or a decoder; else ModelError `unsupported-dtype`."""
        if not self._kernels.has_kernel(dtype):
            super().check(matrix_name, dtype, where)

    def matmul(self, x: Floats, weight: Matrix) -> Floats:
        """`x @ weight.T`: `(n_tokens, columns)` to `(n_tokens, rows)`."""
        if not self._kernels.has_kernel(weight.dtype, weight.row_interleave):
            return super().matmul(x, weight)
        x = np.ascontiguousarray(x)
        out = np.empty((len(x), weight.shape[0]), np.float32)
        product = np.zeros(1, PRODUCT)
        fill_matrix(product[0]["matrix"], weight)
        product["x"], product["x_stride"] = address_of(x), weight.shape[1]
        product["out"], product["out_stride"] = address_of(out), weight.shape[0]
        product["n_tokens"] = len(x)
        workspace = aligned_bytes(self._kernels.matmul_workspace(product))
        self._kernels.matmul(product, workspace)
        return out

    def steps(
        self, model: ModelSpec, weights: Weights, kv_cache: KvCache, batch_size: int
    ) -> NativeSteps:
        """The decoder's steps in C, for passes of at most `batch_size` tokens."""
        layers = [LayerMatrices.of_weights(layer) for layer in weights.layers]
        size = workspace_bytes(self._kernels, model, layers, weights.head, batch_size, batch_size)
        return NativeSteps(
            self._library, self._kernels, model, weights, kv_cache, batch_size, self, size
        )

    def working_bytes(
        self,
        model: ModelSpec,
        tensors: Mapping[str, TensorFacts],
        layouts: Layouts,
        *,
        batch_size: int,
        context: int,
        kv_dtype: str,
        n_logits: int = 1,
    ) -> int:
        """Upper bound in bytes of all that the steps hold, results included."""
        layers, head = _matrices(model, tensors, layouts)
        own = workspace_bytes(self._kernels, model, layers, head, batch_size, batch_size)
        total = buffers_bytes(model, batch_size, own) + SLACK
        # Embeddings before they are copied to the stream, angles and their tables in float64.
        total += batch_size * (4 * model.hidden_size + 32 * model.rope.n_dims)
        total += 4 * model.vocab_size * n_logits + (self.n_threads - 1) * THREAD_BYTES
        lacking = self._lacking([*layers], head)
        self.notes = _notes(lacking)
        if lacking:
            total += self.workspace_bytes + own
            total += plain_working_bytes(model, batch_size, context, kv_dtype, n_logits)
        return total

    def untouched_bytes(
        self,
        model: ModelSpec,
        tensors: Mapping[str, TensorFacts],
        layouts: Layouts,
        batch_size: int,
    ) -> int:
        """Bytes of `working_bytes` that passes of one token do not take, also after larger ones;
        none where NumPy takes part."""
        layers, head = _matrices(model, tensors, layouts)
        if self._lacking(layers, head):
            return 0
        whole, single = (
            workspace_bytes(self._kernels, model, layers, head, n, n) for n in (batch_size, 1)
        )
        return untouched_bytes(model, batch_size, whole, single)

    def close(self) -> None:
        """Ends the threads; computing afterwards is the caller's mistake."""
        self._kernels.close()

    def _lacking(self, layers: Iterable[LayerMatrices], head: Matrix) -> list[Matrix]:
        matrices = [head, *(matrix for layer in layers for matrix in layer.all())]
        has_kernel = self._kernels.has_kernel
        return [m for m in matrices if not has_kernel(m.dtype, m.row_interleave)]


def _matrices(
    model: ModelSpec, tensors: Mapping[str, TensorFacts], layouts: Layouts
) -> tuple[list[LayerMatrices], Matrix]:
    """Those of every layer, and of the output head, as a file describes them."""
    layers = [
        LayerMatrices.of_facts(tensors, f"blk.{layer}", found)
        for layer, found in enumerate(layouts)
    ]
    head_name = "token_embd.weight" if model.tie_embeddings else "output.weight"
    return layers, Matrix.of_facts(head_name, tensors[head_name])


def default_threads() -> int:
    """Threads taken where no number is given."""
    try:
        n_cpus = len(os.sched_getaffinity(0))
    except AttributeError:
        n_cpus = os.cpu_count() or 1
    return max(1, min(MAX_DEFAULT_THREADS, n_cpus))


def _notes(lacking: Sequence[Matrix]) -> tuple[str, ...]:
    if not lacking:
        return ()
    kinds = sorted({m.dtype.name + (" interleaved" if m.row_interleave else "") for m in lacking})
    more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
    return (
        f"{', '.join(kinds)}: no kernel in C for this type; {lacking[0].name}{more} are computed "
        "in NumPy, slowly",
    )
