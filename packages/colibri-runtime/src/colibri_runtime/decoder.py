"""The decoder: tokens in, logits out, its experts fetched block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from colibri_format import ModelSpec, UsageError

from .backend import Backend, Floats
from .backend_steps import BackendSteps
from .kv_cache import KvCache
from .steps import JoinedPass, JoiningSteps, Lease, Steps, StepsBackend
from .timeline import Timeline
from .weights import Weights

DEFAULT_BATCH_SIZE: Final = 32
DEFAULT_PREFETCH_DEPTH: Final = 1
MAX_PREFETCH_DEPTH: Final = 2


class RoutingObserver(Protocol):
    """Told of every layer's routing: for traces, and for how well prefetch guesses."""

    def routed(
        self,
        layer: int,
        first_position: int,
        experts: NDArray[np.integer],
        weights: Floats | None,
        predicted: frozenset[int],
    ) -> None:
        """`experts` and `weights` are `(n_tokens, top_k)`, best first, of the positions from
        `first_position` on (weights None: a dense model's only expert); `predicted` is what was
        hinted for this layer in this pass."""


class ExpertStore(Protocol):
    """Where expert blocks come from.

    It may also have `look_ahead`, how many layers ahead it is worth predicting now, and
    `observe(layer, experts, weights)`, told of the routing before the fetch.
    """

    def fetch(self, layer: int, experts: Sequence[int]) -> Iterable[Lease]:
        """Each of `experts` once, in order of arrival; the reads begin when this is called.

        What it gives may also have `take`, for all that are ready, and `close`.
        """
        ...

    def prefetch(self, layer: int, experts: Sequence[int]) -> None:
        """Says that `experts` are likely wanted soon, the surest first; may be ignored."""
        ...


class Observers:
    """Tells several observers of the routing, in order."""

    def __init__(self, *observers: RoutingObserver) -> None:
        self._observers = observers

    def routed(
        self,
        layer: int,
        first_position: int,
        experts: NDArray[np.integer],
        weights: Floats | None,
        predicted: frozenset[int],
    ) -> None:
        for observer in self._observers:
            observer.routed(layer, first_position, experts, weights, predicted)


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
        timeline: told of every step; None costs nothing.
        make_room: told before each pass how many tokens it has; None where memory is no matter.

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
        timeline: Timeline | None = None,
        make_room: Callable[[int], None] | None = None,
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
        self._observer = observer
        self._make_room = make_room
        self._observe = getattr(store, "observe", None)
        self._has_experts = [bool(layer.layouts) for layer in weights.layers]
        self._steps: Steps
        if isinstance(backend, StepsBackend):
            self._steps = backend.steps(model, weights, kv_cache, batch_size)
        else:
            self._steps = BackendSteps(model, weights, kv_cache, backend)
        self._joined: JoinedPass | None = None
        if timeline is not None:
            self._steps = timeline.steps(self._steps)
        elif observer is None and isinstance(self._steps, JoiningSteps):
            # Nobody is to be told of what happens within a pass.
            self._joined = self._steps.join(store)

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
                part = ids[start : start + self.batch_size]
                self._pass(part)
                if all_logits:
                    self._steps.logits(len(part), logits[start : start + len(part)])
            if not all_logits:
                self._steps.logits(1, logits)
        except BaseException:
            self.kv_cache.truncate(before)
            raise
        return logits if all_logits else logits[0]

    def _pass(self, ids: NDArray[np.intp]) -> None:
        """Takes the stream through all layers."""
        if self._make_room is not None:
            self._make_room(len(ids))
        steps = self._steps
        steps.begin(ids)
        if len(ids) == 1 and self._joined is not None and self._joined.is_ready:
            self._joined.run(self.kv_cache.length)
            self.kv_cache.advance(1)
            return
        hinted: dict[int, frozenset[int]] = {}
        for layer, has_experts in enumerate(self._has_experts):
            steps.attention(layer)
            if has_experts:
                self._experts(layer, hinted)
            else:
                steps.dense(layer)
        self.kv_cache.advance(len(ids))

    def _experts(self, layer: int, hinted: dict[int, frozenset[int]]) -> None:
        """Adds the layer's experts to the stream."""
        steps, store = self._steps, self._store
        routing = steps.route(layer)
        if self._observer is not None:
            position = self.kv_cache.length
            predicted = hinted.get(layer, frozenset())
            weights = None if routing.weights is None else routing.weights.copy()
            experts = routing.experts.astype(np.intp)
            self._observer.routed(layer, position, experts, weights, predicted)
        if self._observe is not None:
            self._observe(layer, routing.experts, routing.weights)
        # In this order: a demand read must never queue behind a hint. Ascending, because
        # neighbours in the file read faster.
        leases = store.fetch(layer, routing.wanted)
        try:
            self._hint(layer, hinted)
            steps.shared(layer)
            for ready in _groups(leases):
                steps.experts(layer, ready)
        finally:
            # A fetch gives its leases back when closed; left to the collector, a failure would
            # hold slots for as long as its traceback lives.
            if (close := getattr(leases, "close", None)) is not None:
                close()
        steps.finish(layer)

    def _hint(self, layer: int, hinted: dict[int, frozenset[int]]) -> None:
        """Prefetches what the next layers' routers make of the stream as it is now.

        The stream lacks the present layer's experts, which come while the hinted blocks are
        read: it changes little from layer to layer, so most guesses hold.
        """
        depth = getattr(self._store, "look_ahead", self.prefetch_depth)
        for ahead in range(layer + 1, min(layer + 1 + depth, self.model.n_layers)):
            if not self._has_experts[ahead]:
                continue
            experts = self._steps.predict(ahead)
            hinted[ahead] = hinted.get(ahead, frozenset()) | frozenset(experts)
            self._store.prefetch(ahead, experts)


def _groups(leases: Any) -> Iterator[Sequence[Lease]]:
    """What is ready together, group after group; one by one from a store that knows no groups."""
    if (take := getattr(leases, "take", None)) is None:
        return ([lease] for lease in leases)
    return iter(take, [])
