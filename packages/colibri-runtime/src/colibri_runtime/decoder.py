"""The decoder: tokens in, logits out, its experts fetched block by block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from colibri_format import Layout, ModelSpec, UsageError

from .attention import attend
from .backend import Backend, Floats, Matrix
from .expert_mix import ExpertStore, mix_experts
from .kv_cache import KvCache
from .norms import rms_norm
from .rope import Rope
from .router import predict, route
from .weights import LayerWeights, Weights

DEFAULT_BATCH_SIZE: Final = 32
DEFAULT_PREFETCH_DEPTH: Final = 1
MAX_PREFETCH_DEPTH: Final = 2


class RoutingObserver(Protocol):
    """Told of every layer's routing: for traces, and for how well prefetch guesses."""

    def routed(
        self,
        layer: int,
        first_position: int,
        experts: NDArray[np.intp],
        weights: Floats | None,
        predicted: frozenset[int],
    ) -> None:
        """`experts` and `weights` are `(n_tokens, top_k)`, best first, of the positions from
        `first_position` on (weights None: a dense model's only expert); `predicted` is what was
        hinted for this layer in this pass."""


class Decoder:
    """A model's forward pass over positions that follow each other.

    Pre-norm transformer with grouped-query attention and gated feed-forward networks or experts
    (Llama: arXiv 2302.13971, section 2.2; Mixtral: arXiv 2401.04088, section 2.1). The residual
    stream is float32. Not thread-safe. The state is the KV cache alone: a failed `forward`
    leaves it as it was, and may be called again.

    Args:
        model: what the file describes.
        weights: dense weights of the same file.
        store: gives its expert blocks.
        backend: computes with stored weights.
        kv_cache: room for the positions; its length is where the next token stands.
        prefetch_depth: how many layers ahead experts are predicted, 0 to 2.
        batch_size: positions that pass the layers together in a longer `forward`.
        observer: told of the routing.

    Raises:
        UsageError: `bad-prefetch-depth`, `bad-batch-size`.
        ModelError: `unsupported-rope-scaling`.
    """

    def __init__(
        self,
        model: ModelSpec,
        weights: Weights,
        store: ExpertStore,
        backend: Backend,
        kv_cache: KvCache,
        prefetch_depth: int = DEFAULT_PREFETCH_DEPTH,
        *,
        batch_size: int = DEFAULT_BATCH_SIZE,
        observer: RoutingObserver | None = None,
    ) -> None:
        if not 0 <= prefetch_depth <= MAX_PREFETCH_DEPTH:
            raise UsageError(
                "bad-prefetch-depth",
                "decoder",
                f"prefetch depth is {prefetch_depth}",
                f"0 to {MAX_PREFETCH_DEPTH} layers ahead",
            )
        if batch_size < 1:
            raise UsageError(
                "bad-batch-size", "decoder", f"batch size is {batch_size}", "at least 1"
            )
        self.model = model
        self.weights = weights
        self.kv_cache = kv_cache
        self.prefetch_depth = prefetch_depth
        self.batch_size = batch_size
        self._store = store
        self._backend = backend
        self._observer = observer
        self._rope = Rope(model.rope, weights.rope_divisors, weights.where)

    def forward(self, tokens: Sequence[int], all_logits: bool = False) -> Floats:
        """Logits after the last of `tokens`, `(vocab_size,)`; with `all_logits` after each,
        `(n_tokens, vocab_size)`. The tokens' positions are added to the KV cache.

        Raises:
            UsageError: `no-tokens`, `bad-token`, `context-full`; the KV cache is unchanged.
        """
        ids = np.asarray(tokens, dtype=np.intp)
        if ids.size == 0:
            raise UsageError("no-tokens", "decoder", "no tokens were given", "at least one")
        outside = (ids < 0) | (ids >= self.model.vocab_size)
        if outside.any():
            raise UsageError(
                "bad-token",
                self.weights.where,
                f"token {int(ids[outside][0])} is not in the vocabulary",
                f"0 to {self.model.vocab_size - 1}",
            )
        self.kv_cache.require(len(ids))
        before = self.kv_cache.length
        n_logits = len(ids) if all_logits else 1
        logits = np.empty((n_logits, self.model.vocab_size), np.float32)
        try:
            for start in range(0, len(ids), self.batch_size):
                stream = self._pass(ids[start : start + self.batch_size])
                if all_logits:
                    logits[start : start + len(stream)] = self._logits(stream)
            if not all_logits:
                logits[:] = self._logits(stream[-1:])
        except BaseException:
            self.kv_cache.truncate(before)
            raise
        return logits if all_logits else logits[0]

    def _pass(self, ids: NDArray[np.intp]) -> Floats:
        """The residual stream after the last layer, `(n_tokens, hidden)`."""
        eps = self.model.rms_norm_eps
        stream = self._backend.rows(self.weights.embedding, ids)
        tables = self._rope.tables(self.kv_cache.length, len(ids))
        hinted: dict[int, frozenset[int]] = {}
        for layer, weights in enumerate(self.weights.layers):
            stream += self._attention(
                layer, weights, rms_norm(stream, weights.attn_norm, eps), tables
            )
            normed = rms_norm(stream, weights.ffn_norm, eps)
            if weights.layout is not None:
                stream += self._experts(layer, weights, weights.layout, normed, stream, hinted)
            elif weights.dense is not None:
                stream += self._backend.feed_forward(normed, weights.dense)
        self.kv_cache.advance(len(ids))
        return stream

    def _logits(self, stream: Floats) -> Floats:
        normed = rms_norm(stream, self.weights.output_norm, self.model.rms_norm_eps)
        return self._backend.matmul(normed, self.weights.head)

    def _attention(
        self, layer: int, weights: LayerWeights, x: Floats, tables: tuple[Floats, Floats]
    ) -> Floats:
        model = self.model
        queries = self._project(x, weights.query, weights.query_bias, weights.query_norm)
        keys = self._project(x, weights.key, weights.key_bias, weights.key_norm)
        values = self._project(x, weights.value, weights.value_bias, None)
        self._rope.turn(queries, tables)
        self._rope.turn(keys, tables)
        self.kv_cache.store(layer, keys, values)
        mixed = attend(queries, self.kv_cache, layer, model.sliding_window)
        out = self._backend.matmul(mixed, weights.output)
        if weights.output_bias is not None:
            out += weights.output_bias
        return out

    def _project(
        self, x: Floats, weight: Matrix, bias: Floats | None, norm: Floats | None
    ) -> Floats:
        """`(n_tokens, heads, head_dim)` before it is turned by position."""
        model = self.model
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

    def _experts(
        self,
        layer: int,
        weights: LayerWeights,
        layout: Layout,
        x: Floats,
        stream: Floats,
        hinted: dict[int, frozenset[int]],
    ) -> Floats:
        """The layer's experts (and shared expert) on `x`, `(n_tokens, hidden)`."""
        moe = self.model.moe
        shares: Floats | None = None
        if moe is None or weights.router is None:
            experts = np.zeros((len(x), 1), np.intp)
        else:
            logits = self._backend.matmul(x, weights.router)
            experts, shares = route(logits, moe.top_k, moe.norm_top_k)
        if self._observer is not None:
            position = self.kv_cache.length
            predicted = hinted.get(layer, frozenset())
            self._observer.routed(layer, position, experts, shares, predicted)
        # In this order: a demand read must never queue behind a hint. Ascending, because
        # neighbours in the file read faster.
        leases = self._store.fetch(layer, [int(expert) for expert in np.unique(experts)])
        try:
            self._hint(layer, stream, hinted)
            mixed = mix_experts(x, experts, shares, leases, layout, self._backend)
        finally:
            # A generator gives its leases back when closed; left to the collector, a failure
            # would hold slots for as long as its traceback lives.
            if (close := getattr(leases, "close", None)) is not None:
                close()
        if weights.shared is not None:
            shared = self._backend.feed_forward(x, weights.shared)
            if weights.shared_gate is not None:
                with np.errstate(over="ignore"):
                    shared /= 1 + np.exp(-(x @ weights.shared_gate))[:, np.newaxis]
            mixed += shared
        return mixed

    def _hint(self, layer: int, stream: Floats, hinted: dict[int, frozenset[int]]) -> None:
        """Prefetches what the next layers' routers make of the stream as it is now.

        The stream lacks the present layer's experts, which come while the hinted blocks are
        read: it changes little from layer to layer, so most guesses hold.
        """
        moe = self.model.moe
        for ahead in self._layers_ahead(layer):
            weights = self.weights.layers[ahead]
            if weights.layout is None:
                continue
            if moe is None or weights.router is None:
                experts = [0]
            else:
                normed = rms_norm(stream, weights.ffn_norm, self.model.rms_norm_eps)
                experts = predict(self._backend.matmul(normed, weights.router), moe.top_k)
            hinted[ahead] = hinted.get(ahead, frozenset()) | frozenset(experts)
            self._store.prefetch(ahead, experts)

    def _layers_ahead(self, layer: int) -> Iterable[int]:
        return range(layer + 1, min(layer + 1 + self.prefetch_depth, self.model.n_layers))
