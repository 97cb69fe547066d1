"""The weighted sum over a layer's experts, the same bits in whatever order they arrive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from colibri_format import Layout, Role

from .backend import Backend, FeedForward, Floats, Matrix
from .decoder_errors import ModelError
from .dequant import dequantise


class Lease(Protocol):
    """An expert that may be read until the iterator which gave it is advanced."""

    @property
    def layer(self) -> int: ...
    @property
    def expert(self) -> int: ...
    @property
    def segments(self) -> Mapping[Role, NDArray[np.uint8]]:
        """Raw bytes of each segment: read-only views into the slot, at multiples of 64 bytes."""
        ...


class ExpertStore(Protocol):
    """Where expert blocks come from."""

    def fetch(self, layer: int, experts: Sequence[int]) -> Iterator[Lease]:
        """Each of `experts` once, in order of arrival; the reads begin when this is called."""
        ...

    def prefetch(self, layer: int, experts: Sequence[int]) -> None:
        """Says that `experts` are likely wanted soon, the surest first; may be ignored."""
        ...


def expert_network(lease: Lease, layout: Layout) -> FeedForward:
    """The matrices of a leased block: views into its slot, valid as long as the lease."""

    def matrix(role: Role) -> Matrix:
        segment = layout.segment(role)
        if segment is None:
            raise ModelError(
                "missing-segment",
                f"L{lease.layer}/E{lease.expert}",
                f"the block has no segment {role.name.lower()}",
                "gate, up and down",
            )
        name = f"L{lease.layer}/E{lease.expert} {role.name.lower()}"
        return Matrix.of_segment(name, segment, lease.segments[role])

    def bias(role: Role) -> Floats | None:
        segment = layout.segment(role)
        if segment is None:
            return None
        values = np.empty((1, segment.shape[0]), np.float32)
        dequantise(lease.segments[role].reshape(1, -1), segment.dtype, values, role.name)
        return values.reshape(-1)

    return FeedForward(
        matrix(Role.GATE),
        matrix(Role.UP),
        matrix(Role.DOWN),
        bias(Role.GATE_BIAS),
        bias(Role.UP_BIAS),
        bias(Role.DOWN_BIAS),
    )


def mix_experts(
    x: Floats,
    experts: NDArray[np.intp],
    weights: Floats | None,
    leases: Iterator[Lease],
    layout: Layout,
    backend: Backend,
) -> Floats:
    """Sum over each token's experts of weight times output, `(n_tokens, hidden)`, new.

    `x` is `(n_tokens, hidden)`; `experts` and `weights` are `(n_tokens, top_k)`, best first
    (weights None: all one). Every expert computes the group of tokens that chose it, as it
    arrives; outputs wait in a buffer and are summed by rank, so that neither the order of
    arrival nor what was resident changes a bit.

    Raises:
        ModelError: `expert-not-delivered` when `leases` ends before every expert came.
    """
    n_tokens, top_k = experts.shape
    outputs = np.empty((n_tokens, top_k, x.shape[1]), np.float32)
    n_pending = experts.size
    for lease in leases:
        tokens, ranks = np.nonzero(experts == lease.expert)
        group = x if len(tokens) == n_tokens else x[tokens]
        outputs[tokens, ranks] = backend.feed_forward(group, expert_network(lease, layout))
        n_pending -= len(tokens)
    if n_pending:
        raise ModelError(
            "expert-not-delivered",
            "expert store",
            f"{n_pending} of {experts.size} outputs are missing after the last block",
            "each expert that was asked for, once",
        )
    if weights is not None:
        outputs *= weights[:, :, np.newaxis]
    mixed = outputs[:, 0]
    for rank in range(1, top_k):
        mixed += outputs[:, rank]
    return np.ascontiguousarray(mixed)
