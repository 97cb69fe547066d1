"""Steps in C: three or four calls a layer, on memory that was set aside beforehand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from colibri_format import Layout, ModelSpec

from ._native import NativeLibrary
from .backend import Backend, Floats
from .backend_steps import BackendSteps
from .expert_mix import not_delivered
from .kv_cache import KvCache
from .native_kernels import MATRIX, NativeKernels
from .native_layers import (
    BLOCK,
    DECODER,
    LAYER,
    MAX_HEAD_DIM,
    address_of,
    check_code,
    check_records,
    fill_block,
    fill_decoder,
    fill_layer,
    fill_matrix,
    has_kernels,
    is_block_native,
)
from .native_pass import NativePass
from .native_workspace import Buffers
from .router import predict
from .steps import Lease, Routing
from .store import Store
from .store_part import StorePart
from .weights import LayerWeights, Weights


class NativeSteps:
    """The steps of csrc/ops_layer.h, and NumPy's for layers with a dtype that has no kernel.

    Attention of a layer goes the NumPy way as a whole when one of its matrices has no kernel, and
    so do its experts with their router; products in them that have a kernel still use it.

    Raises:
        ModelError: `unsupported-rope-scaling`, `native-records`.
    """

    def __init__(
        self,
        library: NativeLibrary,
        kernels: NativeKernels,
        model: ModelSpec,
        weights: Weights,
        kv_cache: KvCache,
        batch_size: int,
        backend: Backend,
        workspace_bytes: int,
    ) -> None:
        check_records(library)
        self._library = library
        self._model = model
        self._weights = weights
        self._kv_cache = kv_cache
        self._backend = backend
        self._kernels = kernels
        self._plain = BackendSteps(model, weights, kv_cache, backend)
        self._n = 0
        self._routed = 0
        self._pending = 0

        self._decoder = np.zeros(1, DECODER)
        self._buffers = Buffers(model, batch_size, workspace_bytes)
        fill_decoder(self._decoder[0], model, kernels, kv_cache)
        self._decoder["batch"] = batch_size
        self._buffers.fill(self._decoder[0])
        self._at = address_of(self._decoder)

        self._layers = np.zeros(len(weights.layers), LAYER)
        for layer, of_layer in enumerate(weights.layers):
            fill_layer(self._layers[layer], of_layer, layer, kv_cache)
        start = address_of(self._layers)
        self._layer_at = [start + LAYER.itemsize * i for i in range(len(weights.layers))]
        self._head = np.zeros(1, MATRIX)
        fill_matrix(self._head[0], weights.head)
        self._head_at = address_of(self._head)
        self._norm_at = address_of(weights.output_norm)

        self._kinds = _Kinds(weights.layers)
        self._attends = [is_attention_native(kernels, model, w) for w in weights.layers]
        self._feeds = [is_feed_native(kernels, w) for w in weights.layers]
        self._heads = has_kernels(kernels, [weights.head])
        self._has_shared = [w.shared is not None for w in weights.layers]
        # Arguments of one call: experts, addresses and kinds of blocks.
        n_experts = model.moe.n_experts if model.moe else 1
        self._experts = np.zeros(n_experts, np.int32)
        self._addresses = np.zeros(n_experts, np.uint64)
        self._kind = np.zeros(n_experts, np.int32)
        self._arguments = tuple(
            address_of(array)
            for array in (self._experts, self._addresses, self._kind, self._kinds.records)
        )

        step = ("i32", "ptr", "ptr", "i64")
        function = library.function
        self._call_attention = function("colibri_layer_attention", *step, "i64")
        self._call_route = function("colibri_layer_route", *step)
        self._call_predict = function("colibri_layer_predict", *step)
        self._call_shared = function("colibri_layer_shared", *step)
        self._call_finish = function("colibri_layer_finish", *step)
        self._call_dense = function("colibri_layer_dense", *step)
        self._call_experts = function(
            "colibri_layer_experts", "i32", "ptr", "i64", "i32", "ptr", "ptr", "ptr", "ptr"
        )
        self._call_logits = function(
            "colibri_decoder_logits", "i32", "ptr", "ptr", "ptr", "i64", "i64", "ptr"
        )

    def join(self, store: object) -> NativePass | None:
        """What takes one token through all layers with `store`, in one call to C; None where a
        layer, or the store, is not in C as a whole."""
        first, whole = 0, store
        if isinstance(store, StorePart):
            first, whole = store.first_layer, store.store
        # Not what is derived from a store, which C would not call.
        if not isinstance(whole, Store) or type(whole) is not Store:
            return None
        core = whole.native()
        if core is None or not all(self._attends) or not all(self._feeds):
            return None
        weights = self._weights.layers
        kinds = np.zeros((core.n_layers, core.width), np.int32)
        for layer, of_layer in enumerate(weights):
            if of_layer.layouts:
                kinds[first + layer] = self._kinds.row(core.layouts(first + layer))
        return NativePass(
            self._library,
            core,
            whole,
            first,
            [bool(of_layer.layouts) for of_layer in weights],
            kinds.reshape(-1),
            {
                "decoder": self._at,
                "layers": self._layer_at[0],
                "blocks": address_of(self._kinds.records),
            },
            len(self._experts),
        )

    def begin(self, ids: NDArray[np.intp]) -> None:
        """Makes the embeddings of `ids` the stream.

        One token after several gives back the memory that they took: it may be lent meanwhile.
        """
        n = len(ids)
        if n == 1 < self._n:
            self._buffers.give_back()
        self._n = n
        buffers = self._buffers.arrays
        stream = buffers["stream"][:n]
        stream[:] = self._weights.embedding.rows(self._backend, ids)
        tables = (buffers["cosines"][:n], buffers["sines"][:n])
        tables[0][:], tables[1][:] = self._plain.rope.tables(self._kv_cache.length, n)
        self._plain.resume(stream, tables)

    def attention(self, layer: int) -> None:
        """Adds the layer's attention to the stream."""
        if not self._attends[layer]:
            self._plain.attention(layer)
            return
        self._kv_cache.require(self._n)
        check_code(
            self._call_attention(self._at, self._layer_at[layer], self._n, self._kv_cache.length),
            "attention",
        )

    def dense(self, layer: int) -> None:
        """Adds the feed-forward network of a layer that has no experts."""
        if not self._feeds[layer]:
            self._plain.dense(layer)
            return
        check_code(self._call_dense(self._at, self._layer_at[layer], self._n), "feed-forward")

    def route(self, layer: int) -> Routing:
        """Chooses each token's experts."""
        if not self._feeds[layer]:
            return self._plain.route(layer)
        n_wanted = check_code(self._call_route(self._at, self._layer_at[layer], self._n), "router")
        arrays = self._buffers.arrays
        self._pending = n_wanted
        weights = arrays["weights"][: self._n] if self._model.moe else None
        wanted = arrays["wanted"][:n_wanted].tolist()
        return Routing(arrays["experts"][: self._n], weights, wanted)

    def predict(self, layer: int) -> Sequence[int]:
        """The experts that a later layer's router would choose for the stream as it is now."""
        weights = self._weights.layers[layer]
        moe = self._model.moe
        if moe is None or weights.router is None or not self._feeds[layer]:
            return self._plain.predict(layer)
        check_code(self._call_predict(self._at, self._layer_at[layer], self._n), "router")
        return predict(self._buffers.arrays["guesses"][: self._n], moe.n_experts)

    def shared(self, layer: int) -> None:
        """Computes the shared expert, where there is one."""
        if not self._feeds[layer]:
            self._plain.shared(layer)
        elif self._has_shared[layer]:
            check_code(self._call_shared(self._at, self._layer_at[layer], self._n), "shared expert")

    def experts(self, layer: int, leases: Sequence[Lease]) -> None:
        """Computes those of the wanted experts that are leased."""
        if not self._feeds[layer]:
            self._plain.experts(layer, leases)
            return
        n = len(leases)
        self._experts[:n] = [lease.expert for lease in leases]
        self._addresses[:n] = [lease.address for lease in leases]
        self._kind[:n] = self._kinds.of(layer, leases)
        check_code(self._call_experts(self._at, self._n, n, *self._arguments), "experts")
        self._pending -= n

    def finish(self, layer: int) -> None:
        """Adds the weighted sum of the experts, and the shared one, to the stream."""
        if not self._feeds[layer]:
            self._plain.finish(layer)
            return
        if self._pending:
            arrays = self._buffers.arrays
            raise not_delivered(self._pending, len(arrays["wanted"]))
        check_code(self._call_finish(self._at, self._layer_at[layer], self._n), "experts")

    def logits(self, n_last: int, out: Floats) -> None:
        """Fills `out`, `(n_last, vocab_size)`, from the last rows of the stream."""
        if not self._heads:
            self._plain.logits(n_last, out)
            return
        check_code(
            self._call_logits(
                self._at, self._norm_at, self._head_at, self._n - n_last, n_last, address_of(out)
            ),
            "output head",
        )


class _Kinds:
    """Records of all block layouts, numbered."""

    def __init__(self, layers: Sequence[LayerWeights]) -> None:
        distinct = list(dict.fromkeys(layout for w in layers for layout in w.layouts))
        numbers = {layout: number for number, layout in enumerate(distinct)}
        self.records = np.zeros(max(len(distinct), 1), BLOCK)
        for number, layout in enumerate(distinct):
            fill_block(self.records[number], layout)
        # Layouts of equal layers compare equal but slowly; they are told apart by identity.
        self._only = [numbers[w.layouts[0]] if len(w.layouts) == 1 else -1 for w in layers]
        self._numbers = numbers
        self._known: dict[int, tuple[Layout, int]] = {}

    def of(self, layer: int, leases: Sequence[Lease]) -> int | list[int]:
        """The number of each lease's layout, one for all where the layer has but one."""
        only = self._only[layer]
        if only >= 0:
            return only
        return [self._number(lease.layout) for lease in leases]

    def row(self, layouts: Sequence[Layout | None]) -> list[int]:
        """The number of each of a layer's layouts, 0 where there is no block."""
        return [0 if layout is None else self._number(layout) for layout in layouts]

    def _number(self, layout: Layout) -> int:
        known = self._known.get(id(layout))
        if known is None:
            known = self._known[id(layout)] = (layout, self._numbers[layout])
        return known[1]


def is_attention_native(kernels: NativeKernels, model: ModelSpec, weights: LayerWeights) -> bool:
    """Whether a layer's attention is computed in C."""
    matrices = [weights.query, weights.key, weights.value, weights.output]
    return model.head_dim <= MAX_HEAD_DIM and has_kernels(kernels, matrices)


def is_feed_native(kernels: NativeKernels, weights: LayerWeights) -> bool:
    """Whether a layer's router, shared expert and experts are computed in C."""
    matrices = [] if weights.router is None else [weights.router]
    for network in (weights.dense, weights.shared):
        if network is not None:
            matrices += [network.gate, network.up, network.down]
    return has_kernels(kernels, matrices) and all(
        is_block_native(kernels, layout) for layout in weights.layouts
    )
