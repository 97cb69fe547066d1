"""What a decoder asks of whoever computes: a pass, cut where experts are awaited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from colibri_format import Layout, ModelSpec, Role

from .backend import Floats

if TYPE_CHECKING:
    from .kv_cache import KvCache
    from .weights import Layouts, TensorFacts, Weights


class Lease(Protocol):
    """An expert whose block may be read until its fetch goes on."""

    @property
    def layer(self) -> int: ...
    @property
    def expert(self) -> int: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def address(self) -> int:
        """Of the block's first byte, a multiple of 64; segments lie where `layout` says."""
        ...

    @property
    def segments(self) -> Mapping[Role, NDArray[np.uint8]]:
        """Raw bytes of each segment: read-only views of the block."""
        ...


@dataclass(frozen=True, slots=True)
class Routing:
    """Where the tokens of a pass go: `experts` and `weights` are `(n_tokens, top_k)`, best first
    (weights None: all one); `wanted` are the experts that any token goes to, ascending.

    The arrays may be the steps' own, which the next layer overwrites.
    """

    experts: NDArray[np.integer]
    weights: Floats | None
    wanted: Sequence[int]


class Steps(Protocol):
    """The mathematics of a decoder over one residual stream, which it keeps between the steps.

    A pass is `begin`, for each layer `attention` and then either `dense` or `route`, `predict`
    any number of times, `shared`, `experts` until every wanted expert was given, `finish`; then
    `logits`. A pass that is broken off leaves nothing but positions of the KV cache beyond its
    length. The same tokens give the same bits in whatever groups experts come.
    """

    def begin(self, ids: NDArray[np.intp]) -> None:
        """Makes the embeddings of `ids` the stream; they stand behind the KV cache's positions."""

    def attention(self, layer: int) -> None:
        """Adds the layer's attention to the stream; stores keys and values."""

    def dense(self, layer: int) -> None:
        """Adds the feed-forward network of a layer that has no experts."""

    def route(self, layer: int) -> Routing:
        """Chooses each token's experts."""

    def predict(self, layer: int) -> Sequence[int]:
        """The experts that a later layer's router would choose for the stream as it is now, the
        surest first (`router.predict`)."""

    def shared(self, layer: int) -> None:
        """Computes what every token passes beside its experts, where there is such."""

    def experts(self, layer: int, leases: Sequence[Lease]) -> None:
        """Computes those of the wanted experts that are leased."""

    def finish(self, layer: int) -> None:
        """Adds the weighted sum of the experts to the stream, in order of rank.

        Raises:
            ModelError: `expert-not-delivered` when a wanted expert was not given to `experts`.
        """

    def logits(self, n_last: int, out: Floats) -> None:
        """Fills `out`, `(n_last, vocab_size)`, from the last rows of the stream."""


class JoinedPass(Protocol):
    """Steps and a store that go together without their caller in between."""

    @property
    def is_ready(self) -> bool:
        """Whether the next token may go that way."""
        ...

    def run(self, position: int) -> None:
        """Takes the stream of one token, which stands at `position` and was begun, through all
        layers: as `Decoder` does with steps and store, to the same result."""


@runtime_checkable
class JoiningSteps(Protocol):
    """Steps that know how to join a store."""

    def join(self, store: object) -> JoinedPass | None:
        """Both as one, or None where that cannot be."""
        ...


@runtime_checkable
class StepsBackend(Protocol):
    """A backend with steps of its own; the others get `BackendSteps`."""

    kv_dtype: str
    """The dtype of keys and values that it is fastest with."""

    def steps(
        self, model: ModelSpec, weights: Weights, kv_cache: KvCache, batch_size: int
    ) -> Steps:
        """New steps for passes of at most `batch_size` tokens; one of them at a time is used."""

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
        """Upper bound in bytes of all that its steps hold, results included (`working_memory`)."""
