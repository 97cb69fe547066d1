"""Steps made of a backend's products and NumPy: for every backend that has none of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from colibri_format import ModelSpec

from .attention import attend
from .backend import Backend, Floats, Matrix
from .expert_mix import ExpertMix
from .kv_cache import KvCache
from .norms import rms_norm
from .rope import Rope
from .router import choose, predict, route
from .steps import Lease, Routing
from .weights import LayerWeights, Weights


class BackendSteps:
    """The reference for every other `Steps`; allocates as it goes (`working_bytes`).

    Raises:
        ModelError: `unsupported-rope-scaling`.
    """

    def __init__(
        self, model: ModelSpec, weights: Weights, kv_cache: KvCache, backend: Backend
    ) -> None:
        self.stream: Floats = np.empty((0, model.hidden_size), np.float32)
        self.tables: tuple[Floats, Floats] | None = None
        self.rope = Rope(model.rope, weights.rope_divisors, weights.where)
        self._model = model
        self._weights = weights
        self._kv_cache = kv_cache
        self._backend = backend
        self._mix: ExpertMix | None = None
        self._shared: Floats | None = None

    def begin(self, ids: NDArray[np.intp]) -> None:
        """Makes the embeddings of `ids` the stream."""
        self.resume(
            self._weights.embedding.rows(self._backend, ids),
            self.rope.tables(self._kv_cache.length, len(ids)),
        )

    def resume(self, stream: Floats, tables: tuple[Floats, Floats]) -> None:
        """Goes on with a stream, to be changed in place, and the rotary tables of its positions."""
        self.stream, self.tables = stream, tables
        self._mix = self._shared = None

    def attention(self, layer: int) -> None:
        """Adds the layer's attention to the stream."""
        weights, model, tables = self._weights.layers[layer], self._model, self.tables
        if tables is None:
            return
        x = rms_norm(self.stream, weights.attn_norm, model.rms_norm_eps)
        queries = self._project(x, weights.query, weights.query_bias, weights.query_norm)
        keys = self._project(x, weights.key, weights.key_bias, weights.key_norm)
        values = self._project(x, weights.value, weights.value_bias, None)
        del x
        self.rope.turn(queries, tables)
        self.rope.turn(keys, tables)
        self._kv_cache.store(layer, keys, values)
        mixed = attend(queries, self._kv_cache, layer, model.sliding_window)
        out = self._backend.matmul(mixed, weights.output)
        if weights.output_bias is not None:
            out += weights.output_bias
        self.stream += out

    def dense(self, layer: int) -> None:
        """Adds the feed-forward network of a layer that has no experts."""
        network = self._weights.layers[layer].dense
        if network is not None:
            self.stream += self._backend.feed_forward(self._normed(layer), network)

    def route(self, layer: int) -> Routing:
        """Chooses each token's experts."""
        weights, moe = self._weights.layers[layer], self._model.moe
        x = self._normed(layer)
        shares: Floats | None = None
        if moe is None or weights.router is None:
            experts = np.zeros((len(x), 1), np.intp)
        else:
            logits = self._backend.matmul(x, weights.router)
            experts, shares = route(logits, moe.top_k, moe.norm_top_k)
        self._mix = ExpertMix(x, experts, shares)
        self._shared = None
        return Routing(experts, shares, sorted(set(experts.ravel().tolist())))

    def predict(self, layer: int) -> Sequence[int]:
        """The experts that a later layer's router would choose for the stream as it is now."""
        weights, moe = self._weights.layers[layer], self._model.moe
        if moe is None or weights.router is None:
            return [0]
        logits = self._backend.matmul(self._normed(layer), weights.router)
        return predict(choose(logits, moe.top_k), moe.n_experts)

    def shared(self, layer: int) -> None:
        """Computes the shared expert, where there is one."""
        weights = self._weights.layers[layer]
        if weights.shared is None or self._mix is None:
            return
        x = self._mix.x
        self._shared = self._backend.feed_forward(x, weights.shared)
        if weights.shared_gate is not None:
            with np.errstate(over="ignore"):
                self._shared /= 1 + np.exp(-(x @ weights.shared_gate))[:, np.newaxis]

    def experts(self, layer: int, leases: Sequence[Lease]) -> None:
        """Computes those of the wanted experts that are leased."""
        if self._mix is not None:
            for lease in leases:
                self._mix.compute(lease, self._backend)

    def finish(self, layer: int) -> None:
        """Adds the weighted sum of the experts, and the shared one, to the stream."""
        if self._mix is None:
            return
        mixed = self._mix.total()
        self._mix = None
        if self._shared is not None:
            mixed += self._shared
            self._shared = None
        self.stream += mixed

    def logits(self, n_last: int, out: Floats) -> None:
        """Fills `out`, `(n_last, vocab_size)`, from the last rows of the stream."""
        last = self.stream[len(self.stream) - n_last :]
        normed = rms_norm(last, self._weights.output_norm, self._model.rms_norm_eps)
        out[:] = self._backend.matmul(normed, self._weights.head)

    def _normed(self, layer: int) -> Floats:
        weights: LayerWeights = self._weights.layers[layer]
        return rms_norm(self.stream, weights.ffn_norm, self._model.rms_norm_eps)

    def _project(
        self, x: Floats, weight: Matrix, bias: Floats | None, norm: Floats | None
    ) -> Floats:
        """`(n_tokens, heads, head_dim)` before it is turned by position."""
        model = self._model
        out = self._backend.matmul(x, weight)
        if bias is not None:
            out += bias
        if norm is not None and model.qk_norm == "full":
            out = rms_norm(out, norm, model.rms_norm_eps)
        heads = out.reshape(len(x), -1, model.head_dim)
        if norm is not None and model.qk_norm == "head":
            heads = rms_norm(heads, norm, model.rms_norm_eps)
        if model.clip_qkv is not None:
            np.clip(heads, -model.clip_qkv, model.clip_qkv, out=heads)
        return heads
